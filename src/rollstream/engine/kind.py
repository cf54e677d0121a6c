"""What the file of an engine says of it to the rest: its entry in the registry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.engine.base import Engine
from rollstream.engine.checks import read_engine_kwargs
from rollstream.engine.replica import Replica
from rollstream.trajectory import LogprobKind


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a run wants its engine."""

    model_path: str | None
    """Folder of the model (embedded engines); what servers are expected to serve."""
    server_urls: Sequence[str] = ()
    max_model_len: int | None = None
    """Prompt plus response tokens at most; None takes the engine's own limit."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_dir: Path = Path()
    """An embedded engine and launched servers write their logs there."""
    logprobs_temperature: float | None = None
    """Log-probs are wanted of what is drawn from, all at this temperature; None takes the engine's kind."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One name for `actor_rollout_ref.rollout.name`."""

    name: str
    create: Callable[[EngineOptions], Engine]
    """Makes the engine; raises `ConfigError`."""
    kwargs: Mapping[str, Any]
    """Keys of `engine_kwargs` with their defaults."""
    data_deciding: tuple[str, ...] = ()
    """Those of `kwargs` that decide which tokens or log-probs it gives: they belong to a run's identity."""
    is_embedded: bool = False
    """Runs below this process, and has no URLs."""
    is_token_exact: bool = True
    """Takes and gives token ids."""
    logprobs: LogprobKind | None = None
    """The distribution that its log-probs are of, if that is known before it is started."""
    launches: tuple[str, ...] = ()
    """Servers that rollstream can launch for it."""
    make_replica: Callable[[str, EngineOptions], Replica] | None = None
    """Speaks to one server, by its URL; None for engines without servers that come and go."""

    def read_kwargs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`engine_kwargs` with their defaults. Raises `ConfigError`."""
        return read_engine_kwargs(self.name, given, self.kwargs)


def of_servers(engine: Callable[..., Engine]) -> Callable[[EngineOptions], Engine]:
    """Makes an engine of servers by its URLs and settings."""
    return lambda options: engine(
        options.server_urls,
        model_path=options.model_path,
        max_model_len=options.max_model_len,
        engine_kwargs=options.engine_kwargs,
    )
