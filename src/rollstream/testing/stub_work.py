"""Requests of a stub server that take time: some run, the others wait for their turn in the order they came."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Job:
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it runs."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class StubWork:
    """Runs requests.

    Args:
        max_running: at once; None is no limit.
    """

    def __init__(self, max_running: int | None) -> None:
        self._max_running = max_running
        self._running: dict[str, _Job] = {}
        self._waiting: dict[str, _Job] = {}

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
        """The ids of all requests, those that run first."""
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
        self._waiting[rid] = job = _Job()
        self._let_in()
        try:
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
        self._end(job)
        return True

    def end_all(self) -> None:
        """Ends all as if they were done."""
        for job in (*self._running.values(), *self._waiting.values()):
            self._end(job)

    def _end(self, job: _Job) -> None:
        job.over.set()
        job.turn.set()

    def _let_in(self) -> None:
        while self._waiting and (self._max_running is None or len(self._running) < self._max_running):
            rid = next(iter(self._waiting))
            self._running[rid] = job = self._waiting.pop(rid)
            job.turn.set()
