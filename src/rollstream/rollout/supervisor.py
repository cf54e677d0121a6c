"""Keeps a run's workers running: starts them, takes their reports, replaces those that end.

    slot (a number) --> start --> worker --reports--> ends --pause--> the slot's next worker
                          +-- cannot start, too often in a row --> the slot is given up

The supervisor decides nothing about rollouts: their owner hears when a worker joins, reports or is lost. Nor
does it know where workers run: a backend makes them (`processes`, `ray`).
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollstream.aio import Restarts
from rollstream.childproc import ChildDiedError
from rollstream.errors import EngineLostError, EngineUnavailableError, RollstreamError
from rollstream.rollout.stats import WorkerStats
from rollstream.rollout.worker_host import WorkerRecipe, WorkerReport, WorkItem

logger = logging.getLogger(__name__)

_FIRST_WORKER_S = 1200.0
"""For the first worker: a cluster that scales itself starts machines, an embedded engine loads a model."""

_EXPECTED_S = 30.0
"""A worker that takes longer to come has no places kept free for it: there may be no room for it."""

_SAY_EVERY_S = 10.0
"""Between lines about a worker that has not come yet, until the first one has."""

_SILENCE_S = 60.0
"""Beyond the time limit of an attempt: a worker that reports nothing for so long hangs for good, since
whatever holds up its event loop holds up the limit as well."""

_CLOSE_S = 10.0
"""For a worker to release its engine and tools before it is killed."""

_URLS_EVERY_S = 1.0
"""Between looks at which servers there are; launched ones come back on other ports."""

_URLS_REPEAT = 10
"""Looks after which workers are sent what has not changed: one may have found a new server still deaf."""

_OUTAGE_PAUSE_S = 5.0
"""Before a worker is started again that found no engine: to start one costs seconds of a CPU."""

_FIRST_RESTART_S = 0.5
_RESTART_S_MAX = 30.0
_MOST_FAILED_STARTS = 5
"""As for launched servers: a worker that cannot start so often in a row is given up."""


class WorkerHandle(Protocol):
    """One worker, as the driver holds it. Whatever it awaits raises `ChildDiedError` once the worker is gone."""

    async def start(self) -> int:
        """Makes the worker; returns its process id. Raises what `WorkerRecipe.build` raises."""
        ...

    async def give(self, items: Sequence[WorkItem]) -> None:
        """Hands rollouts over."""
        ...

    def reports(self) -> AsyncGenerator[WorkerReport, None]:
        """What the worker says, at least once a second. Ends by raising what ended it."""
        ...

    def follow(self, urls: Sequence[str]) -> None:
        """The engine's servers are others now. Does not wait."""
        ...

    def drop(self) -> None:
        """Cuts off what is in flight. Does not wait."""
        ...

    async def close(self) -> None:
        """Lets the worker release what it has."""
        ...

    def kill(self) -> None:
        """Ends the process now. Idempotent; never raises."""
        ...


class WorkerBackend(Protocol):
    """Where workers run."""

    shares_files: bool
    """Whether workers can read the files that the driver reads."""

    def spawn(self, recipe: WorkerRecipe, number: int) -> WorkerHandle:
        """A new worker, not started. Raises `ConfigError` when its options are refused."""
        ...

    async def waits_for_room(self, handle: WorkerHandle) -> bool:
        """Whether a worker that has not started yet has no place to run."""
        ...

    def describe_room(self) -> str:
        """What there is and what a worker asks for, for messages; without secrets."""
        ...


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """A number that a worker has, and others after it."""

    number: int
    waiting_since: float
    """Since when no worker has it."""
    restarts: Restarts = field(
        default_factory=lambda: Restarts(
            first=_FIRST_RESTART_S, longest=_RESTART_S_MAX, most_failures=_MOST_FAILED_STARTS
        )
    )
    worker: "Worker | None" = None
    has_come: bool = False
    """Whether it ever had a worker."""
    given_up: bool = False
    outage_since: float | None = None
    """Since when its workers cannot start because no engine answers."""

    def is_expected(self) -> bool:
        """Whether its share of places is kept free."""
        recent = time.monotonic() - self.waiting_since < _EXPECTED_S
        return not self.given_up and (self.worker is not None or recent)


@dataclass(eq=False, slots=True)
class Worker:
    """A worker that runs."""

    id: int
    """Never used again."""
    slot: WorkerSlot
    handle: WorkerHandle
    pid: int


class RolloutOwner(Protocol):
    """Owns the rollouts that the workers execute."""

    def joined(self, worker: Worker) -> None:
        """A worker can be given work."""
        ...

    def reported(self, worker: Worker, report: WorkerReport) -> None:
        """A worker has reported."""
        ...

    def lost(self, worker: Worker, cause: BaseException) -> int:
        """A worker has ended; returns how many rollouts are owed again."""
        ...

    def given_up(self, slot: WorkerSlot) -> None:
        """A slot will have no worker any more."""
        ...


class WorkerSupervisor:
    """Keeps workers running.

    Args:
        backend: where they run.
        recipe: gives what a worker is made from, asked for each anew.
        owner: of the rollouts.
        attempt_timeout: seconds for one attempt.
        engine_timeout: seconds that a worker may find no engine at its start, once there was one.
        stats: gets what the workers count.
        urls: of the servers that workers use, where these may change.
    """

    def __init__(
        self,
        backend: WorkerBackend,
        recipe: Callable[[], WorkerRecipe],
        owner: RolloutOwner,
        *,
        attempt_timeout: float,
        engine_timeout: float,
        stats: WorkerStats,
        urls: Callable[[], Sequence[str]] | None,
    ) -> None:
        self._backend = backend
        self._recipe = recipe
        self._owner = owner
        self._engine_timeout = engine_timeout
        self._silence_s = attempt_timeout + _SILENCE_S
        self._stats = stats
        self._urls = urls
        self.slots: list[WorkerSlot] = []
        self.deaths = 0
        """Workers that ended while they were wanted."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the first cause for which the run cannot go on."""
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._closed = False

    @property
    def workers(self) -> dict[int, Worker]:
        """The workers that run, by id."""
        return {slot.worker.id: slot.worker for slot in self.slots if slot.worker is not None}

    def expected(self) -> int:
        """Workers that there are, or that will soon be."""
        return sum(slot.is_expected() for slot in self.slots)

    async def start(self, count: int) -> None:
        """Starts workers; returns when one of them is ready.

        Raises:
            RollstreamError: a worker says why it cannot start, or none comes.
        """
        logger.info("starting %d workers", count)
        self.add(count)
        if self._urls is not None:
            self.own(self._send_urls(self._urls))
        joined = asyncio.ensure_future(self._joined.wait())
        try:
            started: set[asyncio.Future[Any]] = {joined, self.failed}
            await asyncio.wait(started, timeout=_FIRST_WORKER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            joined.cancel()
        if self.failed.done():
            self.failed.result()
        if not self._joined.is_set():
            raise RollstreamError(
                f"no worker could be started within {_FIRST_WORKER_S:g} s: {self._backend.describe_room()}"
            )

    def add(self, count: int) -> None:
        """Starts further workers."""
        for _ in range(count):
            slot = WorkerSlot(len(self.slots), time.monotonic())
            self.slots.append(slot)
            self.own(self._keep(slot))

    def give(self, worker: Worker, items: Sequence[WorkItem]) -> None:
        """Sends work; a worker that does not take it is killed, so its reports end."""
        self.own(self._give(worker, items))

    def drop(self) -> None:
        """Has all workers cut off what is in flight."""
        for worker in self.workers.values():
            worker.handle.drop()

    async def close(self) -> None:
        """Ends the workers. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.gather(*(self._close_worker(worker) for worker in self.workers.values()))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.failed.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends the run with its first cause (R10)."""
        if not self.failed.done() and not self._closed:
            self.failed.set_exception(error)
            self.failed.exception()  # whoever runs gets it; nobody may be running

    def own(self, work: Any) -> None:
        """Runs a coroutine until it ends or the supervisor is closed; what it raises ends the run."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)

    def _disown(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _close_worker(self, worker: Worker) -> None:
        with suppress(Exception):  # it may be dying: then there is nothing to release
            async with asyncio.timeout(_CLOSE_S):
                await worker.handle.close()

    async def _give(self, worker: Worker, items: Sequence[WorkItem]) -> None:
        try:
            await worker.handle.give(items)
        except Exception as error:
            logger.debug("worker %d takes no work: %s", worker.slot.number, error)
            worker.handle.kill()

    async def _keep(self, slot: WorkerSlot) -> None:
        """Sees to it that the slot has a worker, until it is given up."""
        while True:
            handle = self._backend.spawn(self._recipe(), slot.number)
            try:
                pause = await self._live(slot, handle)
            finally:
                handle.kill()
            if pause is None:
                return
            slot.waiting_since = time.monotonic()
            await asyncio.sleep(pause)

    async def _live(self, slot: WorkerSlot, handle: WorkerHandle) -> float | None:
        """The life of one worker; returns the pause until the next, None when there is none."""
        saying = asyncio.ensure_future(self._say_what_it_waits_for(slot, handle))
        try:
            pid = await handle.start()
        except Exception as error:
            return self._not_started(slot, error)
        finally:
            saying.cancel()
        worker = Worker(next(self._ids), slot, handle, pid)
        slot.worker, slot.has_come = worker, True
        began = time.monotonic()
        self._join(worker)
        try:
            await self._listen(worker)
        except Exception as error:
            return self._gone(worker, error, time.monotonic() - began)
        finally:
            slot.worker = None
        raise AssertionError("a worker reports until it ends")

    async def _say_what_it_waits_for(self, slot: WorkerSlot, handle: WorkerHandle) -> None:
        """Logs it until cancelled: often while no worker works yet, and once when its places go to others."""
        began, warned = time.monotonic(), False
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            waited = time.monotonic() - began
            no_room = await self._backend.waits_for_room(handle)
            is_long = waited > _EXPECTED_S - 1 and not warned
            if no_room and is_long:
                logger.warning(
                    "worker %d still waits for room, after %.0f s: %s",
                    *(slot.number, waited, self._backend.describe_room()),
                )
            elif is_long or not self._joined.is_set():
                state = "waits for room" if no_room else "is starting"
                logger.info("worker %d still %s, after %.0f s", slot.number, state, waited)
            warned = warned or is_long

    def _not_started(self, slot: WorkerSlot, cause: BaseException) -> float | None:
        if not self._joined.is_set() and not isinstance(cause, ChildDiedError):
            self.fail(cause)  # the first of all: so it is with the others
            return None
        now = time.monotonic()
        if not isinstance(cause, EngineUnavailableError):
            slot.outage_since = None
        elif slot.outage_since is None or now - slot.outage_since < self._engine_timeout:
            # As a worker that runs waits for it, and no fault of this one.
            slot.outage_since = slot.outage_since or now
            logger.warning("worker %d waits for an engine: %s", slot.number, cause)
            return _OUTAGE_PAUSE_S
        pause = slot.restarts.after_failed_start()
        if pause is None:
            slot.given_up = True
            logger.error("worker %d is given up: %s", slot.number, cause)
            self._owner.given_up(slot)
            if all(other.given_up for other in self.slots):
                self.fail(
                    RollstreamError(
                        f"no worker can be started any more; the last cause: {cause}. What is done is safe; "
                        "mend the cause and run the same command again."
                    )
                )
            return None
        logger.warning("worker %d could not start: %s; again in %.1f s", slot.number, cause, pause)
        return pause

    def _join(self, worker: Worker) -> None:
        logger.info("worker %d is ready (pid %d)", worker.slot.number, worker.pid)
        worker.slot.restarts.failures = 0
        worker.slot.outage_since = None
        self._joined.set()
        if self._urls is not None:
            worker.handle.follow(list(self._urls()))
        self._owner.joined(worker)

    async def _listen(self, worker: Worker) -> None:
        """Takes reports. Raises when the worker ends."""
        async with aclosing(worker.handle.reports()) as reports:
            while True:
                try:
                    async with asyncio.timeout(self._silence_s):
                        report = await anext(reports)
                except TimeoutError:
                    raise ChildDiedError(f"it has reported nothing for {self._silence_s:.0f} s") from None
                for level, name, message in report.logs:
                    logging.getLogger(name).log(level, "worker %d: %s", worker.slot.number, message)
                self._stats.update(worker.id, report.status)
                self._owner.reported(worker, report)

    def _gone(self, worker: Worker, cause: BaseException, served_s: float) -> float | None:
        """A worker has ended; returns the pause until the next, None when there is none."""
        self._stats.remove(worker.id)
        if self._closed:
            return None
        self.deaths += 1
        lost = self._owner.lost(worker, cause)
        if isinstance(cause, EngineLostError):
            others = [slot for slot in self.slots if slot is not worker.slot and slot.worker is not None]
            # At the beginning the first may have waited in vain before the second is there.
            coming = [slot for slot in self.slots if not slot.has_come and slot.is_expected()]
            if not (others or coming) or self._stats.all_wait:
                self.fail(cause)
                return None
        elif not isinstance(cause, ChildDiedError):
            self.fail(cause)
            return None
        pause = worker.slot.restarts.after_serving(served_s)
        logger.warning(
            "worker %d (pid %d) is gone: %s; its %d rollouts in flight are owed again; the next in %.1f s",
            *(worker.slot.number, worker.pid, cause, lost, pause),
        )
        return pause

    async def _send_urls(self, current: Callable[[], Sequence[str]]) -> None:
        """Sends workers the servers that there are, whenever these change."""
        sent: list[str] = []
        for look in itertools.count():
            urls = list(current())
            if urls != sent or look % _URLS_REPEAT == 0:
                for worker in self.workers.values():
                    worker.handle.follow(urls)
                sent = urls
            await asyncio.sleep(_URLS_EVERY_S)
