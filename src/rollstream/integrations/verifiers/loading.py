"""Loads an environment by name, with whichever version of verifiers is installed."""

import hashlib
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError, RollstreamError
from rollstream.integrations.verifiers.v0 import GroupEnvironment, signals_left_alone
from rollstream.integrations.verifiers.v1 import EpisodeEnvironment
from rollstream.user_code import import_name, source_digest

Environment = EpisodeEnvironment | GroupEnvironment

_FIRST_OF_V1 = (0, 3)
_loading = threading.Lock()


def installed_version() -> tuple[int, int]:
    """The first two numbers of the installed version of verifiers. Raises `ConfigError` when there is none."""
    try:
        major, minor, *_ = importlib.metadata.version("verifiers").split(".")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "environments of verifiers need that package: pip install 'rollstream[verifiers]'"
        ) from None
    return int(major), int(minor)


def load(name: str, arguments: Mapping[str, Any]) -> Environment:
    """Loads an environment.

    Args:
        name: of an installed environment, as verifiers takes it (a taskset from 0.3 on), or
            `path/to/file.py:factory`, `package.module:factory`: called with the arguments, it returns one.
        arguments: of the environment; from 0.3 on its configuration (`agent`, `taskset`, `timeout`, ...).

    Raises:
        ConfigError: verifiers is not installed, or the environment cannot be loaded; has the cause.
    """
    is_v1 = installed_version() >= _FIRST_OF_V1
    family: type[Environment] = EpisodeEnvironment if is_v1 else GroupEnvironment
    try:
        with _loading, nullcontext() if is_v1 else signals_left_alone():
            home, made = (_call if ":" in name else family.load)(name, arguments)
        kind = importlib.import_module("verifiers.v1").Env if is_v1 else sys.modules["verifiers"].Environment
    except RollstreamError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"environment {name!r} cannot be loaded ({type(error).__name__}: {error}); its arguments are "
            f"{dict(arguments)}"
        ) from error
    if not isinstance(made, kind):
        raise ConfigError(
            f"environment {name!r} is a {type(made).__name__}; the installed verifiers "
            f"{importlib.metadata.version('verifiers')} runs a {kind.__module__}.{kind.__name__}"
        )
    return family(made, short_name(name), home)


def short_name(name: str) -> str:
    """An environment's short name: its name without a path, or the factory's, or its file's.

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


def _call(name: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    where, _, attribute = name.rpartition(":")
    factory = import_name(name if where.endswith(".py") else f"{where}.{attribute}", key="environment")
    if not callable(factory):
        raise ConfigError(f"environment {name!r} is no function that returns an environment")
    return sys.modules[factory.__module__], factory(**arguments)
