"""`custom_reward_function`: a reward function in a file of the user's."""

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from rollstream.errors import ConfigError
from rollstream.reward.base import ANSWERS, SCORED, ComputeScore, FunctionReward, has_parameter
from rollstream.user_code import import_name

_KEY = "custom_reward_function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_OF_GROUP = ("data_sources", ANSWERS, "ground_truths", "extra_infos")


def load_reward(
    path: str,
    name: str = "compute_score",
    reward_kwargs: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    max_concurrency: int = 32,
) -> FunctionReward:
    """Loads a reward function from a Python file, which runs here.

    Its `source_digest` covers that file, `name` and `reward_kwargs`; not what the file imports.

    Args:
        path: The file.
        name: What in it: a function, sync or async; an object that can be called; or a class whose objects
            can, made without arguments.
        reward_kwargs: Further keyword arguments of each call.
        timeout: Seconds for one call, > 0.
        max_concurrency: Calls at once, > 0.

    Raises:
        ConfigError: No such file or name, the file raises, or the function cannot be called like verl's
            `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`, or like that of a
            batch: `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs)`.
    """
    kwargs = dict(reward_kwargs or {})
    if not timeout > 0 or max_concurrency < 1:
        raise ConfigError(f"{_KEY}: timeout must be above 0 and max_concurrency at least 1")
    file = Path(path).expanduser()
    function = import_name(f"{file}:{name}", key=_KEY)
    if isinstance(function, type):
        try:
            function = function()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{_KEY}.name: the class {name} in {file} cannot be made without arguments "
                f"({type(error).__name__}: {error})"
            ) from error
    if not callable(function):
        raise ConfigError(f"{_KEY}.name: {name} in {file} cannot be called")
    label = f"{name} in {file.name}"
    _check_arguments(function, kwargs, label)
    digest = hashlib.blake2b(digest_size=16)
    arguments = orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS, default=repr)
    for part in (file.read_bytes(), name.encode(), arguments):
        digest.update(len(part).to_bytes(8, "little") + part)
    return FunctionReward(
        function,
        label=label,
        source_digest=digest.hexdigest(),
        reward_kwargs=kwargs,
        timeout=timeout,
        max_concurrency=max_concurrency,
    )


def reward_of_function(
    function: ComputeScore,
    reward_kwargs: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    max_concurrency: int = 32,
) -> FunctionReward:
    """A reward of a function that is in memory, called as one of a file; see `load_reward`.

    Its `source_digest` covers the function's source where that can be read (else its compiled code), and
    `reward_kwargs`; not what it refers to.

    Raises:
        ConfigError: it cannot be called like verl's `compute_score`.
    """
    kwargs = dict(reward_kwargs or {})
    label = str(getattr(function, "__qualname__", type(function).__qualname__))
    if not callable(function):
        raise ConfigError(f"reward: {label} cannot be called")
    _check_arguments(function, kwargs, label)
    plain = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    try:
        source = inspect.getsource(plain if inspect.isroutine(plain) else type(plain))
    except (OSError, TypeError):
        code = getattr(plain, "__code__", None)
        source = label if code is None else f"{code.co_code.hex()} {code.co_consts} {code.co_names}"
    arguments = orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS, default=repr)
    return FunctionReward(
        function,
        label=label,
        source_digest=hashlib.blake2b(source.encode() + arguments, digest_size=16).hexdigest(),
        reward_kwargs=kwargs,
        timeout=timeout,
        max_concurrency=max_concurrency,
    )


def _check_arguments(function: ComputeScore, kwargs: Mapping[str, Any], label: str) -> None:
    given, told = [*_ARGUMENTS], SCORED
    if has_parameter(function, ANSWERS):
        given, told = [*_OF_GROUP], "trajectories"
    given += [told] if has_parameter(function, told) else []
    if taken := sorted(set(given) & kwargs.keys()):
        raise ConfigError(f"{_KEY}.reward_kwargs: {taken[0]} comes from the prompt row or the rollout")
    try:
        inspect.signature(function).bind(**dict.fromkeys(given), **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{_KEY}: {label} cannot be called with {', '.join((*given, *kwargs))} ({error})"
        ) from error
    except ValueError:  # written in C, without a signature to look at: the first call will tell
        return
