"""Loads an environment by name, with whichever version of verifiers is installed."""

import hashlib
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollstream.errors import ConfigError, RollstreamError
from rollstream.integrations.verifiers.outcome import Environment
from rollstream.integrations.verifiers.v0 import GroupEnvironment
from rollstream.integrations.verifiers.v1 import EpisodeEnvironment
from rollstream.user_code import import_name, source_digest

INSTALL = "pip install 'rollstream[verifiers]'"
"""What gives the package."""

_FIRST_OF_V1 = (0, 3)
_loading = threading.Lock()


def installed_version() -> tuple[int, int]:
    """The first two numbers of the installed version of verifiers.

    Raises:
        ConfigError: there is none.
    """
    try:
        major, minor, *_ = importlib.metadata.version("verifiers").split(".")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"environments of verifiers need that package: {INSTALL}") from None
    return int(major), int(minor)


def load(
    name: str, arguments: Mapping[str, Any], *, model: str = "rollstream", beside: Path | None = None
) -> Environment:
    """Loads an environment.

    Args:
        name: of an installed environment, as verifiers takes it (a taskset from 0.3 on), or
            `path/to/file.py:factory`, `package.module:factory`: called with the arguments, it returns one.
        arguments: of the environment; from 0.3 on its configuration (`agent`, `taskset`, `timeout`, ...).
        model: what requests call the model.
        beside: a file that has the name in it: where a relative path is looked for first.

    Raises:
        ConfigError: verifiers is not installed, or the environment cannot be loaded; has the cause.
    """
    is_v1 = installed_version() >= _FIRST_OF_V1
    try:
        with _loading, _no_signal_handlers(is_v1):
            if ":" in name:
                home, made = _make(name, arguments, beside)
            else:
                home, made = (_load_v1 if is_v1 else _load_v0)(name, arguments)
    except RollstreamError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"environment {name!r} cannot be loaded ({type(error).__name__}: {error}); its arguments are "
            f"{dict(arguments)}"
        ) from error
    kind = (
        importlib.import_module("verifiers.v1").Env
        if is_v1
        else importlib.import_module("verifiers").Environment
    )
    if not isinstance(made, kind):
        raise ConfigError(
            f"environment {name!r} is a {type(made).__name__}; the installed verifiers "
            f"{importlib.metadata.version('verifiers')} runs a {kind.__module__}.{kind.__name__}"
        )
    called = short_name(name)
    if is_v1:
        return EpisodeEnvironment(made, called, home=home, model=model)
    return GroupEnvironment(made, called, home=home, model=model)


def short_name(name: str) -> str:
    """What an environment is called: its name without a path, or the factory's, or its file's.

    >>> short_name("owner/gsm8k"), short_name("envs/sums.py:load_environment"), short_name("a.b:make")
    ('gsm8k', 'sums', 'make')
    """
    where, _, factory = name.rpartition(":")
    if factory != "load_environment":
        return factory.rpartition("/")[2]
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]


def digest(environment: Environment) -> str:
    """Names the source of an environment by content: of its module, and of the classes it consists of.

    What belongs to verifiers is not looked at: a new release of it may go on with an old run.
    """
    source = environment.source
    parts = [source, *(getattr(source, name, None) for name in ("rubric", "taskset"))]
    homes = {cls.__module__ for part in parts if part is not None for cls in type(part).__mro__}
    modules = [sys.modules[name] for name in sorted(homes) if name.partition(".")[0] != "verifiers"]
    sources = sorted({source_digest(module) for module in (environment.home, *modules)})
    return hashlib.blake2b("".join(sources).encode(), digest_size=16).hexdigest()


def _make(name: str, arguments: Mapping[str, Any], beside: Path | None) -> tuple[Any, Any]:
    where, _, attribute = name.rpartition(":")
    target = name if where.endswith(".py") else f"{where}.{attribute}"
    factory = import_name(target, key="environment", beside=beside)
    if not callable(factory):
        raise ConfigError(f"environment {name!r} is no function that returns an environment")
    return sys.modules[factory.__module__], factory(**arguments)


def _load_v0(name: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    import verifiers
    from verifiers.utils.env_utils import import_env_module

    return import_env_module(name), verifiers.load_environment(name, **arguments)


def _load_v1(name: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config

    taskset = {"id": name, **arguments.get("taskset", {})}
    return import_taskset(name), load_environment(resolve_env_config({**arguments, "taskset": taskset}))


@contextmanager
def _no_signal_handlers(is_v1: bool) -> Iterator[None]:
    """Keeps an environment of verifiers 0.2 from taking SIGINT and SIGTERM over when it is made.

    A run ends by its own handlers, which lets rollouts in flight end well; and in a thread that is not the
    main one, as in training, setting one raises.
    """
    if is_v1:
        yield
        return
    import signal

    from verifiers.envs import environment

    names = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "default_int_handler")}
    before = environment.signal
    environment.signal = SimpleNamespace(signal=lambda *_: None, **names)
    try:
        yield
    finally:
        environment.signal = before
