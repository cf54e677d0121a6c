"""An environment's result of a rollout, for both versions of verifiers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.errors import RollstreamError, TransientError
from rollstream.gateway.recorder import Recorder


class EnvironmentFailedError(RollstreamError):
    """The environment ended a rollout with an error of its own; the message has its type and words."""


class TransientEnvironmentError(EnvironmentFailedError, TransientError):
    """The same, of something that may pass: a sandbox that died, a tunnel, a server of tools."""


OpenSession = Callable[[str], Recorder]
"""Makes requests with a session name those of a new recorder, for the rest of the attempt."""


@dataclass(frozen=True, slots=True)
class Played:
    """An agent's part in a rollout."""

    recorder: Recorder
    reward: float | None
    """`None`: the environment did not score it."""
    stop_condition: str | None
    """Why it ended, in the environment's words."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: Collection[str] | None = None
    """Names of the answers that belong to it; None: all."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The environment's other results; JSON values."""
