"""Engines by name."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollstream import plugins
from rollstream.engine.base import Engine
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.launch.plan import LaunchRequest
from rollstream.engine.replica import Replica
from rollstream.errors import ConfigError
from rollstream.user_code import source_digest


def engine_kind(name: str) -> EngineKind:
    """The engine of a name. Raises `ConfigError`."""
    kind: EngineKind = plugins.load("rollstream.engines", name)
    return kind


def create_engine(
    name: str,
    *,
    model_path: str | Path | None,
    server_urls: Sequence[str] = (),
    max_model_len: int | None = None,
    engine_kwargs: Mapping[str, Any] | None = None,
    launch: LaunchRequest | None = None,
    log_dir: Path,
    logprobs_temperature: float | None = None,
) -> Engine:
    """Makes an engine; `start` it before use. One that was not started holds nothing and has written nothing.

    `name` is an entry point of `rollstream.engines`; `launch` says how servers are launched where no URLs are given
    (None: an engine that needs URLs says so); the others are those of `EngineOptions`.

    Raises:
        ConfigError: unknown engine or engine_kwargs key, a value out of range, missing package, model folder
            or URLs; servers that cannot be launched.
    """
    kind = engine_kind(name)
    path = None if model_path is None else str(model_path)
    options = EngineOptions(
        path, server_urls, max_model_len, engine_kwargs or {}, log_dir, logprobs_temperature
    )
    if kind.is_embedded and server_urls:
        raise ConfigError(
            f"engine {name!r} is embedded: actor_rollout_ref.rollout.server_urls is for servers, whose kind is said by "
            "--engine sglang, vllm or openai"
        )
    if launch is None or not is_launched(name, server_urls):
        return kind.create(options)
    from rollstream.engine.launch.engine import launched_engine

    if path is None:
        raise ConfigError(f"engine {name!r} needs actor_rollout_ref.model.path to launch servers")
    return launched_engine(kind, options, launch)


check_engine_config = partial(create_engine, log_dir=Path())
"""Refuses an engine that cannot start as it is configured, as far as that shows without starting it.

It takes milliseconds (seconds where `launch` asks for devices) and touches no server, so call it before anything
slow.
"""


def is_launched(name: str, server_urls: Sequence[str]) -> bool:
    """Whether an engine's servers are launched by rollstream: they could be, and no URLs are given."""
    return bool(engine_kind(name).launches) and not server_urls


def replica_maker(
    name: str, *, model_path: str, engine_kwargs: Mapping[str, Any] | None
) -> Callable[[str], Replica]:
    """A function that makes a replica of an engine from a URL, for a pool that takes it in."""
    options = EngineOptions(model_path, engine_kwargs=engine_kwargs or {})
    make = engine_kind(name).make_replica
    assert make is not None
    return lambda url: make(url, options)


def data_deciding_kwargs(name: str, engine_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of an engine that decide which tokens or log-probs it gives, with their defaults.

    They belong to a run's identity; the others (threads, batch sizes, timeouts) may change on resume. To an engine of
    another package belongs its source.

    Raises:
        ConfigError: unknown engine or engine_kwargs key, or a value of a wrong type.
    """
    kind = engine_kind(name)
    values = kind.read_kwargs(engine_kwargs or {})
    deciding = {key: values[key] for key in kind.data_deciding}
    if not kind.is_token_exact:
        deciding["token_exact"] = False
    if kind.create.__module__.partition(".")[0] != "rollstream":
        deciding["source"] = source_digest(kind.create)
    return deciding
