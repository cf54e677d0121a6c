"""One server of a pool."""

from dataclasses import dataclass, field
from typing import Protocol

from rollstream.engine.base import Capabilities, ChatPrompt
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams


class ReplicaUnavailableError(EngineUnavailableError):
    """The replica is not there; another one may be. The message names it."""


class WeightsLostError(EngineError):
    """A replica could not load new weights, and has lost its old ones."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What an update names."""

    source: str
    version: int


INITIAL_WEIGHTS = Weights("", 0)
"""What a server began with, wherever that is from; its answers may say another version."""


@dataclass(slots=True)
class ReplicaRequest:
    """A request as a replica gets it."""

    prompt_ids: list[int]
    sampling: SamplingParams
    request_id: str
    """The caller's; the same for all turns of a rollout."""
    rid: str
    """On the wire: no two requests have the same one, over all replicas and runs."""
    images: list[object] = field(default_factory=list)
    aborted: bool = False
    """Set when the caller wants what there is."""
    weights: Weights | None = None
    """An adapter's, to be answered under; None: the replica's newest."""
    chat: ChatPrompt | None = None
    """The request as messages, for replicas that speak messages."""


class Replica(Protocol):
    """Speaks to one server. Its errors tell the pool what to do.

    - `ReplicaUnavailableError`: nobody is there (no connection, a lost one, a server that says it is not healthy);
      the request goes elsewhere.
    - `TransientEngineError`: the server failed at it (5xx, a broken reply); another one may do better.
    - `EngineError`: the request itself is at fault; no server will do better.
    """

    @property
    def name(self) -> str:
        """Its URL, for messages and as its key."""
        ...

    async def describe(self) -> Capabilities:
        """Asks the server what it is.

        Raises:
            ReplicaUnavailableError: it does not answer.
            EngineError: it refuses to say, or is something else than expected.
        """
        ...

    async def generate(self, request: ReplicaRequest) -> Completion:
        """Answers a request. Cancelling it leaves the request in the server: `abort` ends it there."""
        ...

    async def abort(self, rid: str) -> bool:
        """Ends a request in the server; its `generate` returns what there is. Never raises.

        Returns:
            False where the server has no way to do so: it ends a request whose connection is closed.
        """
        ...

    async def health(self) -> bool:
        """Whether a request sent now would be served. Never raises."""
        ...

    async def update_weights(self, source: str, version: int) -> None:
        """Loads other weights.

        Raises:
            ReplicaUnavailableError: it was not there, or was lost midway.
            WeightsLostError: it could not, and its old weights are gone.
            TransientEngineError: it failed in a way that says nothing of its weights.
            EngineError: it refused, and keeps the old ones.
        """
        ...

    async def close(self) -> None:
        """Releases connections."""
        ...
