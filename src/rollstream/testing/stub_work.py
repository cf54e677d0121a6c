"""What a stub server has to do and what it counts: requests that run, and requests that wait for their turn."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

_IMAGE_DIGESTS = 1024
"""How many are kept: a test with images has a few, a benchmark with images has no use for them."""


@dataclass(slots=True)
class Stats:
    """What a stub server has seen. Served at `/stub/stats`."""

    requests: int = 0
    """`/generate` requests that arrived."""
    answered: int = 0
    """Whole answers, broken ones included."""
    tokens: int = 0
    """Sampled, those of aborted requests included."""
    faults: int = 0
    aborts: int = 0
    """`/abort_request` calls that named a request in flight."""
    health_checks: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    images: int = 0
    """Images that arrived with `/generate` requests."""
    image_digests: list[str] = field(default_factory=list)
    """SHA-256 of the newest of them, as files, in the order they came."""

    def saw_images(self, digests: list[str]) -> None:
        """Counts the images of a request."""
        self.images += len(digests)
        self.image_digests = [*self.image_digests, *digests][-_IMAGE_DIGESTS:]


@dataclass(slots=True)
class _Job:
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it runs."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class StubWork:
    """Runs requests that take time, some at once and the others in the order in which they came.

    Args:
        max_running: at once; None is no limit.
    """

    def __init__(self, max_running: int | None) -> None:
        self._max_running = max_running
        self._running: dict[str, _Job] = {}
        self._waiting: OrderedDict[str, _Job] = OrderedDict()

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    def __contains__(self, rid: object) -> bool:
        return rid in self._running or rid in self._waiting

    def names(self) -> list[str]:
        """Of all requests, those that run first."""
        return [*self._running, *self._waiting]

    async def do(self, rid: str, seconds: float) -> float | None:
        """Takes as long as a request takes.

        Args:
            rid: nobody else's.
            seconds: that it runs; infinite: until it is ended.

        Returns:
            The share that was done when it was aborted, 0 to 1; None: it was not, or only when all was done.
        """
        if seconds <= 0 and self._max_running is None:
            return None
        loop = asyncio.get_running_loop()
        job = _Job()
        self._waiting[rid] = job
        self._let_in()
        try:
            if not job.turn.is_set():
                await job.turn.wait()
            began = loop.time()
            try:
                async with asyncio.timeout(None if seconds == float("inf") else seconds):
                    await job.over.wait()
            except TimeoutError:
                return None
            if not job.aborted:
                return None
            return min(1.0, (loop.time() - began) / seconds) if rid in self._running else 0.0
        finally:
            self._waiting.pop(rid, None)
            self._running.pop(rid, None)
            self._let_in()

    def abort(self, rid: str) -> bool:
        """Ends a request now; whether there was one."""
        job = self._running.get(rid) or self._waiting.get(rid)
        if job is None:
            return False
        job.aborted = True
        job.over.set()
        job.turn.set()
        return True

    def end_all(self) -> None:
        """Ends all as if they were done."""
        for job in (*self._running.values(), *self._waiting.values()):
            job.over.set()
            job.turn.set()

    def _let_in(self) -> None:
        while self._waiting and (self._max_running is None or len(self._running) < self._max_running):
            rid, job = self._waiting.popitem(last=False)
            self._running[rid] = job
            job.turn.set()
