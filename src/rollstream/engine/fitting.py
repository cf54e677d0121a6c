"""Makes replicas fit for work: they say what they are, and load the pool's weights where they have others.

    fit --(away, or owes weights)--> unfit --(somebody wants it)--> says what it is --> loads --> fit
                                       ^                                |                 |
                                       +------ rests for a while -------+-----------------+

One task for each replica does it, whoever wants it and whoever stops waiting for it: a load that is cut off
may leave a server without any weights. A request waits for it only when no other replica can serve. The time
it takes is bounded by the replica, which bounds each question and each step of a load (`update_timeout`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollstream.engine.introductions import Introductions
from rollstream.engine.pool_weights import PoolWeights
from rollstream.engine.replica import Replica, ReplicaAwayError

_LOG = logging.getLogger(__name__)

_REST_S = 1.0
"""After a try that failed: as long as a replica that was away gets nothing. To ask a server what it is costs
next to nothing, so this does not grow."""
_LOAD_REST_S_MAX = 15.0
"""After loads that failed; doubles up to this. A load may keep a server's disk busy for minutes."""

_CLOSE_WAIT_S = 30.0
"""For loads that are under way when the engine is closed: most servers need less, and who closes it waits."""


@dataclass(slots=True)
class _Rest:
    """After a try that failed."""

    error: ReplicaAwayError
    until: float
    load_rest: float
    """After the next load that fails."""


class Fitting:
    """Knows which replicas are fit, and makes those fit that are not. Owns the tasks that do it.

    Args:
        introductions: who has to say what it is.
        weights: who has to load.
        on_fit: told the name of a replica that has become fit.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        introductions: Introductions,
        weights: PoolWeights,
        *,
        on_fit: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._introductions = introductions
        self._weights = weights
        self._on_fit = on_fit
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[ReplicaAwayError | None]] = {}
        self._rests: dict[str, _Rest] = {}
        self._loading: set[str] = set()
        self._closed = False

    def is_fit(self, name: str) -> bool:
        """Whether a replica may get requests: it owes neither an introduction nor weights."""
        return not (self._introductions.is_owed(name) or self._weights.ledger.owes(name))

    def is_loading(self, name: str) -> bool:
        """Whether it loads weights before it gets work: it may be deaf, paused and not healthy meanwhile."""
        return name in self._loading

    def begin(self, replica: Replica) -> "asyncio.Task[ReplicaAwayError | None] | None":
        """Begins to make a replica fit, if nobody does yet.

        Returns:
            the task, which others share and which is not the caller's to cancel; it gives None, or why the
            replica is not fit. None while the replica rests after a failure: see `failure`.
        """
        name = replica.name
        if (task := self._tasks.get(name)) is not None:
            return task
        if self._closed or ((rest := self._rests.get(name)) is not None and self._clock() < rest.until):
            return None
        task = asyncio.get_running_loop().create_task(self._make_fit(replica), name=f"fitting-{name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._done(name, done))
        return task

    def failure(self, name: str) -> ReplicaAwayError:
        """Why a replica was not made fit the last time."""
        rest = self._rests.get(name)
        return ReplicaAwayError("the engine is closed") if rest is None else rest.error

    def forget(self, name: str) -> None:
        """The replica is no more."""
        self._rests.pop(name, None)
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends it all; loads that are under way have a while to come to their end."""
        self._closed = True
        tasks = self._tasks
        for name, task in tasks.items():
            if name not in self._loading:
                task.cancel()
        if tasks:
            await asyncio.wait(list(tasks.values()), timeout=_CLOSE_WAIT_S)
        for name, task in tasks.items():
            _LOG.warning(
                "%s still loads weights, and is left alone: it may be without any when it ends", name
            )
            task.cancel()

    async def _make_fit(self, replica: Replica) -> ReplicaAwayError | None:
        name = replica.name
        while not self.is_fit(name):
            try:
                await self._introductions.ask(replica)  # also before a load: it may be another server by now
            except ReplicaAwayError as error:
                return self._rested(name, error)
            if not self._weights.ledger.owes(name):
                continue
            self._loading.add(name)
            try:
                await self._weights.bring_up(replica)
            except ReplicaAwayError as error:
                return self._rested(name, error, loaded=True)
            finally:
                self._loading.discard(name)
        self._rests.pop(name, None)
        self._on_fit(name)
        return None

    def _rested(self, name: str, error: ReplicaAwayError, *, loaded: bool = False) -> ReplicaAwayError:
        before = self._rests.get(name)
        if before is None or str(before.error) != str(error):
            _LOG.info("%s gets no work: %s", name, error)
        load_rest = _REST_S if before is None else before.load_rest
        rest = load_rest if loaded else _REST_S
        following = min(2 * load_rest, _LOAD_REST_S_MAX) if loaded else load_rest
        self._rests[name] = _Rest(error, self._clock() + rest, following)
        return error

    def _done(self, name: str, task: "asyncio.Task[ReplicaAwayError | None]") -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Nobody may be waiting; and it must not be tried again in a hot loop.
            _LOG.error("%s cannot be made fit for work", name, exc_info=error)
            self._rested(name, ReplicaAwayError(f"{name}: {error!r}"))
