"""Finding the request that brings its engine down, among all that were in flight with it.

An outage says nothing about who caused it. A rollout that was in flight at many outages becomes a *suspect*.
While there are suspects nobody else starts, and of the suspects `limit` may be in flight: one at first, twice
as many after each that passes, one again after an outage. So innocents are through after a few rounds, and
whoever is alone in flight at an outage has caused it.

Owns no task and no clock; all calls from one event loop.
"""

import asyncio


class PoisonIsolator:
    """Who may be in flight."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._suspects = 0
        self._limit = 1
        self._changed = asyncio.Event()

    @property
    def suspects(self) -> int:
        """Rollouts under suspicion."""
        return self._suspects

    def suspect(self) -> None:
        """One more rollout is under suspicion, until `resolve`."""
        self._suspects += 1

    def resolve(self, *, passed: bool) -> None:
        """A suspect has ended; `passed`: it completed, so it was innocent."""
        self._suspects -= 1
        if passed:
            self._limit *= 2
        if not self._suspects:
            self._limit = 1
        self._notify()

    async def enter(self, *, suspected: bool) -> bool:
        """Waits until an attempt may begin. Returns whether it is alone in flight, and will be."""
        while self._in_flight >= self._limit if suspected else self._suspects:
            await self._changed.wait()
        self._in_flight += 1
        return suspected and self._limit == 1

    def leave(self, *, outage: bool) -> None:
        """The attempt is over; `outage`: the engine went away under it."""
        self._in_flight -= 1
        if outage:
            self._limit = 1
        if self._suspects:
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
