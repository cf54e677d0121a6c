"""`custom_reward_function`: a reward function in a file of the user's."""

import difflib
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from rollstream.errors import ConfigError
from rollstream.reward.base import ComputeScore, FunctionReward
from rollstream.user_code import run_file

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


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
            `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`.
    """
    kwargs = dict(reward_kwargs or {})
    if not timeout > 0:
        raise ConfigError(f"custom_reward_function.timeout: {timeout} is not positive")
    if max_concurrency < 1:
        raise ConfigError(f"custom_reward_function.max_concurrency: {max_concurrency}, want 1 or more")
    file = Path(path).expanduser()
    module = run_file(file, key="custom_reward_function.path")
    source = file.read_bytes()
    function = _find_function(module, name, file)
    label = f"{name} in {file.name}"
    _check_arguments(function, kwargs, label)
    digest = hashlib.blake2b(digest_size=16)
    for part in (source, name.encode(), orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS, default=repr)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return FunctionReward(
        function,
        label=label,
        source_digest=digest.hexdigest(),
        reward_kwargs=kwargs,
        timeout=timeout,
        max_concurrency=max_concurrency,
    )


def _find_function(module: ModuleType, name: str, file: Path) -> ComputeScore:
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("__")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"custom_reward_function.name: {file} has no {name}{hint}")
    found = getattr(module, name)
    if isinstance(found, type):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"custom_reward_function.name: the class {name} in {file} cannot be made without arguments "
                f"({type(error).__name__}: {error})"
            ) from error
    if not callable(found):
        raise ConfigError(f"custom_reward_function.name: {name} in {file} cannot be called")
    function: ComputeScore = found
    return function


def _check_arguments(function: ComputeScore, kwargs: Mapping[str, Any], label: str) -> None:
    if taken := sorted(set(_ARGUMENTS) & kwargs.keys()):
        raise ConfigError(f"custom_reward_function.reward_kwargs: {taken[0]} comes from the prompt row")
    try:
        inspect.signature(function).bind(**dict.fromkeys(_ARGUMENTS), **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"custom_reward_function: {label} cannot be called with "
            f"{', '.join((*_ARGUMENTS, *kwargs))} ({error})"
        ) from error
    except ValueError:  # written in C, without a signature to look at: the first call will tell
        return
