"""A request on its way through a pool, over all the replicas that have a part in it."""

import asyncio
from dataclasses import dataclass, field

from rollstream.engine.base import ChatPrompt
from rollstream.engine.partial import PartialCompletion
from rollstream.engine.replica import Replica, ReplicaRequest, ResumesAborted
from rollstream.engine.routing import Pick


@dataclass(slots=True, eq=False)
class Stretch:
    """What a replica does of it: from a pick to an answer, an error or an abort."""

    pick: Pick
    replica: Replica
    request: ReplicaRequest
    leash: asyncio.Timeout
    """Pulled when the replica hangs."""

    def pull(self, after: float = 0.0) -> None:
        """Ends the wait for the replica in so many seconds, as if its connection was lost."""
        pull(self.leash, after)


@dataclass(slots=True, eq=False)
class Flight:
    """The request of a caller."""

    request_id: str
    partial: PartialCompletion
    images: list[object] = field(default_factory=list)
    seeded: bool = False
    chat: ChatPrompt | None = None
    """The request as messages, for replicas that speak messages."""
    stretch: Stretch | None = None
    """None between two replicas."""
    seat: Pick | None = None
    """Its place on the replica that it moves to, while it still is where it was."""
    moves: int = 0
    leash: asyncio.Timeout | None = None
    """While it waits for a replica: pulled by an abort."""
    aborted: bool = False
    """The caller wants what there is."""

    @property
    def may_move(self) -> bool:
        """Whether it may leave its replica with what it has, and its tokens are as good.

        Not with a seed: its tokens are to be repeatable. Not with stop strings or
        penalties: they look across the gap. Not with images: a server makes the prompt's ids from them.
        """
        stretch = self.stretch
        return (
            stretch is not None
            and self.seat is None
            and not (self.aborted or self.seeded or self.images)
            and self.partial.sampling.can_be_continued
            and isinstance(stretch.replica, ResumesAborted)
            and stretch.replica.resumes_aborted
        )


def pull(leash: asyncio.Timeout, after: float = 0.0) -> None:
    """Ends a wait in so many seconds, if it would not end sooner."""
    at = asyncio.get_running_loop().time() + after
    if (when := leash.when()) is None or at < when:
        leash.reschedule(at)
