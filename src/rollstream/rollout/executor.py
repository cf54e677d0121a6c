"""Owed rollouts are dispatched as late as possible; workers execute them; this process makes them durable.

    this process: keys --WorkQueue--> give --> [ worker 0 ] --\\
                        ^                  --> [ worker 1 ] ---> reports --> Sink --> committed
                        +--------------------------------------------------------------+

    slot (a number) --> start --> worker --reports--> ends --pause--> the slot's next worker
                          +-- cannot start, too often in a row --> the slot is given up

The driver owns the keys and the sink; the workers own attempts, retries and the wait for their engine
(`worker`). What was in flight in a worker that ends is owed again, and another worker takes its slot. A rollout
that was alone in a worker that died is charged, and fails after `max_attempts` such deaths. Which key is whose
is decided by `WorkQueue` alone. Where workers run is a backend's affair: in this event loop, as processes of
this machine, as Ray actors.
"""

import asyncio
import itertools
import logging
import pickle
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from rollstream.aio import Restarts, finish_despite_cancellation
from rollstream.chat.images import as_bytes, is_file
from rollstream.childproc import ChildDiedError
from rollstream.engine.load import ask_load
from rollstream.errors import DataError, EngineLostError, EngineUnavailableError, RollstreamError
from rollstream.rollout import concurrency
from rollstream.rollout.concurrency import ConcurrencyPolicy, Observation
from rollstream.rollout.stats import WorkerStats
from rollstream.rollout.work_queue import WorkQueue
from rollstream.rollout.worker import make_failure
from rollstream.rollout.worker_host import Result, WorkerReport, WorkItem
from rollstream.store.records import EncodingError
from rollstream.store.turns import TurnStore
from rollstream.trajectory import Failure, PromptRow, RolloutKey, failure_cause

logger = logging.getLogger(__name__)

_FIRST_WORKER_S = 1200.0
"""For the first worker: a cluster that scales itself starts machines, an embedded engine loads a model."""

_EXPECTED_S = 30.0
"""A worker that takes longer to come has no places kept free for it: there may be no room for it."""

_SILENCE_S = 60.0
"""Beyond the time limit of an attempt: a worker that reports nothing for so long hangs for good, since
whatever holds up its event loop holds up the limit as well."""

_CLOSE_S = 10.0
"""For a worker to release its engine and tools before it is killed."""

_HOLD_S = 90.0
"""For a worker's engine to let go of its requests: more than `ContinuingEngine` takes to empty one."""

_HELD_LOOK_S = 0.005
"""Between looks at who has let go: short against a load of weights."""

_URLS_EVERY_S = 1.0
"""Between looks at which servers there are; launched ones come back on other ports."""

_URLS_REPEAT = 10
"""Looks after which workers are sent what has not changed: one may have found a new server still deaf."""

_OUTAGE_PAUSE_S = 5.0
"""Before a worker is started again that found no engine: to start one costs seconds of a CPU."""

_FIRST_RESTART_S = 0.5
_RESTART_S_MAX = 5.0
"""A rollout that brings its workers down is found after some five to eight deaths."""
_MOST_FAILED_STARTS = 5


class WorkerDiedError(RollstreamError):
    """The worker process ended under a rollout that was alone in it, time after time."""


class WorkerHandle(Protocol):
    """A worker, as the driver holds it. Awaiting it when it is gone raises what ended it, mostly `ChildDiedError`."""

    async def start(self) -> int:
        """Makes the worker; returns its process id. Raises what `WorkerRecipe.build` raises."""
        ...

    async def give(self, items: Sequence[WorkItem]) -> None: ...
    def reports(self) -> AsyncGenerator[WorkerReport, None]:
        """Yields reports; raises what ended the worker."""
        ...

    async def follow(self, urls: Sequence[str]) -> None:
        """Says which servers the engine has now."""
        ...

    async def drop(self) -> None:
        """Cuts off what is in flight."""
        ...

    async def cut(self, key: RolloutKey) -> None:
        """Cuts off one rollout, which is reported as a failure; one that is not there: fine."""
        ...

    async def hold(self, number: int) -> None:
        """Has its engine let go of requests, and those that come wait; `WorkerReport.held` says that it is done."""
        ...

    async def release(self, urls: Sequence[str]) -> None:
        """Ends a hold, with the servers that the engine has now."""
        ...

    async def close(self) -> None: ...
    def kill(self) -> None:
        """Ends the worker now. Idempotent; never raises."""
        ...


class WorkerBackend(Protocol):
    """Makes workers in one kind of place: this event loop, processes, Ray actors."""

    is_local: bool
    """Whether in this event loop, so that nothing has to travel."""
    shares_files: bool
    """Whether workers can read the files that the driver reads."""

    def spawn(self, number: int) -> WorkerHandle:
        """Makes a worker, not started. Raises `ConfigError` when its options are refused."""
        ...


class Sink(Protocol):
    """Makes results durable: a `StoreWriter`, a rollout buffer."""

    def submit(self, result: Any, /) -> Awaitable[None]:
        """Stores a result; what is returned is done when it is durable, or has `EncodingError`: it cannot be stored."""
        ...


@dataclass(slots=True)
class WindowCounters:
    """Counts of rollouts by outcome; those that completed or failed are durable."""

    completed: int = 0
    failed: int = 0
    dropped: int = 0
    """Rollouts in flight that were cut off by a stop; owed again."""


class FailureStreak:
    """Says whether every rollout since the start has failed, with one cause. Pure.

    One prompt that cannot be used is not enough, however large `n` is: 8 prompt rows have to fail, or all of fewer.
    """

    _ROWS = 8

    def __init__(self, limit: int, rows: int) -> None:
        """`limit`: failures after which it is hopeless, 0 for never; `rows`: prompt rows of the run."""
        self.count = 0
        self._limit = limit
        self._enough = min(self._ROWS, rows)
        self._causes: set[str] = set()
        self._indices: set[int] = set()

    def completed(self) -> None:
        """A rollout was completed: it is not hopeless, and never will be."""
        self._limit = 0

    def failed(self, failure: Failure) -> bool:
        """Counts a failure; returns whether it is hopeless now."""
        self.count += 1
        if not self._limit:
            return False
        self._causes.add(failure_cause(failure.error))
        self._indices.add(failure.index)
        if len(self._causes) > 1:
            self._limit = 0
        return self.count >= self._limit > 0 and len(self._indices) >= self._enough


@dataclass(eq=False, slots=True)
class _Slot:
    """A place for one worker at a time; its number stays when the worker is replaced."""

    number: int
    waiting_since: float = field(default_factory=time.monotonic)
    """Since when no worker has it."""
    restarts: Restarts = field(
        default_factory=lambda: Restarts(
            first=_FIRST_RESTART_S, longest=_RESTART_S_MAX, most_failures=_MOST_FAILED_STARTS
        )
    )
    worker: WorkerHandle | None = None
    pid: int = 0
    has_come: bool = False
    """Whether it ever had a worker."""
    given_up: bool = False
    outage_since: float | None = None
    """Since when its workers cannot start because no engine answers."""
    held: int = 0
    """See `WorkerReport.held`."""

    def is_expected(self) -> bool:
        """Whether its share of places is kept free."""
        recent = time.monotonic() - self.waiting_since < _EXPECTED_S
        return not self.given_up and (self.worker is not None or recent)


@dataclass(eq=False)
class Executor:
    """Runs owed rollouts until there are no more or it is told to stop."""

    sink: Sink
    backend: WorkerBackend
    _: KW_ONLY
    load_row: Callable[[RolloutKey], PromptRow]
    """The prompt row of a rollout; may raise `DataError`."""
    max_in_flight: int
    """Rollouts at once, over all workers."""
    workers: int = 1
    attempt_timeout: float = 600.0
    """Seconds for one attempt."""
    max_attempts: int = 3
    """Workers that a rollout may bring down, alone in them, before it is recorded as failed."""
    engine_timeout: float = 600.0
    """Seconds that workers which start may find no engine, once there was one."""
    adaptive: bool = False
    """Keeps fewer in flight while the engines are overloaded."""
    engine: object = None
    """Asked how busy it is, where workers share one; None: they have their own."""
    urls: Callable[[], Sequence[str]] | None = None
    """Gives the URLs of the servers that workers use, where these may change."""
    turns: TurnStore | None = None
    """Keeps finished turns; None: they are not kept."""
    on_durable: Callable[[Any], object] | None = None
    """Called for each rollout or failure once it is durable (R2)."""

    def __post_init__(self) -> None:
        self.stats = WorkerStats(shared_engine=self.engine)
        self.counters = WindowCounters()
        self.deaths = 0
        """Workers that ended while they were wanted."""
        self._policy = ConcurrencyPolicy(self.max_in_flight)
        self._slots: list[_Slot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._commits: set[asyncio.Future[None]] = set()
        self._queue: WorkQueue | None = None
        self._pumping = self._paused = self._stopping = self._dropped = self._closed = False
        self._joined = asyncio.Event()
        self._released = asyncio.Event()
        self._released.set()
        self._holds = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the first cause for which the run cannot go on."""
        self._ended = asyncio.Event()
        """Set when nothing is in flight and nothing more will be, or all was dropped."""

    @property
    def cap(self) -> int:
        """Rollouts in flight at most, now."""
        return self._policy.cap

    def pause(self, paused: bool) -> None:
        """Stops beginning rollouts, or (False) goes on with it; those in flight go on anyway."""
        if paused != self._paused:
            self._paused = paused
            self._pump_soon()

    @property
    def in_flight(self) -> int:
        """Rollouts dispatched and not durable yet."""
        return self._queue.in_flight if self._queue is not None else 0

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that run, by slot."""
        return {slot.number: slot.pid for slot in self._slots if slot.worker is not None}

    async def start(self) -> None:
        """Starts the workers; returns when one of them is ready.

        Raises:
            ConfigError: a worker cannot be made as configured.
            RollstreamError: a worker says why it cannot start, or none comes.
        """
        self._slots = [_Slot(number) for number in range(self.workers)]
        for slot in self._slots:
            self._own(self._keep(slot))
        if self.urls is not None:
            self._own(self._send_urls(self.urls))
        joined = asyncio.ensure_future(self._joined.wait())
        try:
            started: set[asyncio.Future[Any]] = {joined, self._failed}
            await asyncio.wait(started, timeout=_FIRST_WORKER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            joined.cancel()
        if self._failed.done():
            self._failed.result()
        if not self._joined.is_set():
            raise RollstreamError(f"no worker could be started within {_FIRST_WORKER_S:g} s")

    async def run(self, keys: Iterator[RolloutKey | None]) -> None:
        """Works off `keys`; returns when all are durable, or after a stop when nothing is in flight.

        None among the keys: there is no other now; `wake` says that there may be.

        Raises:
            StorageError: the sink is broken.
            EngineLostError: the engine stayed away too long.
            RollstreamError: no worker can be started any more.
        """
        if not self._slots:
            await self.start()
        self._queue = queue = WorkQueue(keys, cap=self.cap, max_charges=self.max_attempts)
        for number in self.pids:
            queue.add(number)
        self._ended.clear()
        if self._stopping:
            queue.stop()
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._ended.wait())]
        if self.adaptive:
            waiting.append(asyncio.ensure_future(self._adapt(queue)))
        self._pump()
        try:
            await asyncio.wait({*waiting, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._failed, *waiting):
                if ended.done():
                    ended.result()
        finally:
            await finish_despite_cancellation(self._settle(queue, waiting))
            self._queue = None
            self.counters.dropped += queue.at_workers

    async def _settle(self, queue: WorkQueue, companions: Sequence[asyncio.Future[Any]]) -> None:
        """Nothing is in flight when this returns; what is in the sink's hands is durable, and counted."""
        for companion in companions:
            companion.cancel()
        await asyncio.gather(*companions, return_exceptions=True)
        if queue.at_workers:
            queue.stop()
            await self._tell_all(lambda worker: worker.drop())
        while self._commits:
            await asyncio.wait(set(self._commits))
            await asyncio.sleep(0)

    async def _adapt(self, queue: WorkQueue) -> None:
        """Keeps the cap where the engine is busy and not overloaded, until it is cancelled."""
        work, policy, returns = self.stats, self._policy, self.stats.returns
        while True:
            load = await ask_load(work.engine)
            # An outage is no evidence, neither while it lasts nor in what was seen before it.
            if work.is_available and work.returns == returns:
                before, counts = policy.cap, work.counts
                policy.observe(
                    Observation(
                        at=time.monotonic(),
                        in_flight=queue.in_flight,
                        calls=work.calls,
                        finished=counts.finished,
                        overloads=counts.overloads,
                        # A rollout that hangs in a tool says nothing about the engine.
                        timeouts=min(counts.timeouts, counts.cut_off),
                        load=load,
                    )
                )
                if policy.cap != before:
                    level = logging.INFO if policy.cap < before else logging.DEBUG
                    logger.log(
                        level, "%d in flight at most, %d before: %s", policy.cap, before, policy.reason
                    )
                    queue.cap = policy.cap
                    self._pump_soon()
            else:
                returns = work.returns
                policy.interrupt()
            await asyncio.sleep(concurrency.EVERY_S)

    def stop(self) -> None:
        """Gives out nothing more; what is in flight goes on. Idempotent."""
        self._stopping = True
        if self._queue is not None:
            self._queue.stop()
            self._pump_soon()

    def drop(self) -> None:
        """Cuts off what is in flight. Idempotent."""
        self.stop()
        self._dropped = True
        self._ended.set()

    def wake(self) -> None:
        """There may be keys again."""
        self._pump_soon()

    async def send_urls(self) -> None:
        """Sends workers the servers that there are, now."""
        if self.urls is not None:
            await self._tell_all(partial(_follow, list(self.urls())))

    def cut(self, key: RolloutKey) -> None:
        """Cuts off a rollout that a worker has: the sink gets a failure."""
        self._own(self._tell_all(lambda worker: worker.cut(key)))

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Inside it no worker has a request at its engine, and none sends one: all tokens have come, or never will.

        A worker that does not let go is killed, and its rollouts are owed again. One that starts meanwhile waits.
        """
        self._released.clear()
        self._holds = number = self._holds + 1
        holding = asyncio.create_task(self._tell_all(lambda worker: worker.hold(number)))
        until = time.monotonic() + _HOLD_S
        try:
            while late := [slot for slot in self._slots if slot.worker is not None and slot.held != number]:
                for slot in late if time.monotonic() >= until else ():
                    if slot.worker is not None:
                        slot.worker.kill()
                await asyncio.sleep(_HELD_LOOK_S)
            yield
        finally:
            holding.cancel()
            self._released.set()
            urls = list(self.urls()) if self.urls is not None else []
            self._own(self._tell_all(lambda worker: worker.release(urls)))

    async def close(self) -> None:
        """Ends the workers. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._tell_all(lambda worker: asyncio.wait_for(worker.close(), _CLOSE_S))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._failed.cancel()

    async def _tell_all(self, tell: Callable[[WorkerHandle], Awaitable[None]]) -> None:
        """Tells all workers something; one that does not hear it is dying, as its reports will say."""
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        await asyncio.gather(*map(tell, workers), return_exceptions=True)

    def _fail(self, error: BaseException) -> None:
        """Ends the run with its first cause (R10)."""
        if not self._failed.done() and not self._closed:
            self._failed.set_exception(error)
            self._failed.exception()  # whoever runs gets it; nobody may be running

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine until it ends or the executor is closed; what it raises ends the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)

    def _disown(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    # -- rollouts

    def _pump_soon(self) -> None:
        """Gives out work once for all that happens in this round of the event loop."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        queue = self._queue
        if queue is None or self._dropped:
            return
        if self._stopping or not self._paused:
            queue.expected = sum(slot.is_expected() for slot in self._slots)
            try:
                for number, keys in queue.assign().items():
                    self._give(queue, number, keys)
            except Exception as error:
                self._fail(error)
                return
        if queue.is_finished:
            self._ended.set()

    def _give(self, queue: WorkQueue, number: int, keys: Sequence[RolloutKey]) -> None:
        rows = []
        for key in keys:
            try:
                row = self.load_row(key)
            except DataError as error:
                self._refuse(queue, number, key, "", error)
                continue
            if row.images and not self.backend.shares_files:
                self._own(self._hand_over(queue, number, [(key, row)]))  # reading files holds nobody else up
            else:
                rows.append((key, row))
        if rows:
            self._own(self._hand_over(queue, number, rows))

    async def _hand_over(
        self, queue: WorkQueue, number: int, rows: Sequence[tuple[RolloutKey, PromptRow]]
    ) -> None:
        """Sends work; a worker that does not take it is killed, so its reports end.

        Images that are files travel as bytes where a node need not have them: one that has not would fail them all
        at once, and so be given nearly all there are.
        """
        worker = self._slots[number].worker
        items = []
        for key, row in rows:
            try:
                if self.backend.is_local:
                    item = WorkItem(row.index, key.repeat, row.prompt_key, row)
                elif not self.backend.shares_files and any(map(is_file, row.images)):
                    item = await asyncio.to_thread(_packed_with_images, row, key.repeat)
                else:
                    item = _packed(row, key.repeat)
            except Exception as error:  # a user's dataset class filled the row with what cannot travel
                self._refuse(queue, number, key, row.prompt_key, error)
            else:
                turns = None if self.turns is None else self.turns.turns_of(key)
                items.append(item if turns is None else replace(item, turns=turns))
        # Meanwhile the worker may have died, which gave the keys to another, or all may be over.
        if (
            worker is None
            or self._slots[number].worker is not worker
            or queue is not self._queue
            or self._dropped
        ):
            return
        try:
            await worker.give(items)
        except Exception as error:
            logger.debug("worker %d takes no work: %s", number, error)
            worker.kill()

    def _refuse(
        self, queue: WorkQueue, number: int, key: RolloutKey, prompt_key: str, error: Exception
    ) -> None:
        """Records a row that cannot be read or sent as failed."""
        if queue is self._queue and queue.receive(number, key):
            self._commit(queue, make_failure(key.index, key.repeat, prompt_key, 1, "prompt", error))

    def _commit(self, queue: WorkQueue, result: Result) -> None:
        future = asyncio.ensure_future(self.sink.submit(result))
        self._commits.add(future)
        future.add_done_callback(partial(self._committed, queue, result))

    def _committed(self, queue: WorkQueue, result: Result, future: "asyncio.Future[None]") -> None:
        self._commits.discard(future)
        error = future.exception()
        if isinstance(error, EncodingError) and not (isinstance(result, Failure) and result.stage == "store"):
            prompt_key = getattr(result, "prompt_key", "")
            self._commit(queue, make_failure(result.index, result.repeat, prompt_key, 1, "store", error))
            return
        if error is not None:
            self._fail(error)
            return
        queue.commit(result.key)
        if isinstance(result, Failure):
            self.counters.failed += 1
        else:
            self.counters.completed += 1
        if self.on_durable is not None:
            try:
                self.on_durable(result)
            except Exception as own:
                self._fail(own)
        self._pump_soon()

    def _blame(self, key: RolloutKey, charges: int, cause: BaseException) -> Failure:
        died = WorkerDiedError(
            f"its worker died {charges} times while nothing else was in flight there; the last time: {cause}"
        )
        prompt_key = ""
        with suppress(DataError):
            prompt_key = self.load_row(key).prompt_key
        return make_failure(key.index, key.repeat, prompt_key, charges, "agent", died)

    # -- workers

    async def _keep(self, slot: _Slot) -> None:
        """Sees to it that the slot has a worker, until it is given up."""
        while True:
            worker = self.backend.spawn(slot.number)
            try:
                pause = await self._live(slot, worker)
            finally:
                worker.kill()
            if pause is None:
                return
            slot.waiting_since = time.monotonic()
            await asyncio.sleep(pause)

    async def _live(self, slot: _Slot, worker: WorkerHandle) -> float | None:
        """The life of one worker; returns the pause until the next, None when there is none."""
        try:
            slot.pid = await worker.start()
        except Exception as error:
            return self._not_started(slot, error)
        while not self._released.is_set():
            await self._released.wait()
        slot.worker, slot.has_come = worker, True
        began = time.monotonic()
        try:
            await self._join(slot, worker)
            await self._listen(slot, worker)
        except Exception as error:
            return await self._gone(slot, worker, error, time.monotonic() - began)
        finally:
            slot.worker = None
        raise AssertionError("a worker reports until it ends")

    def _not_started(self, slot: _Slot, cause: BaseException) -> float | None:
        if not self._joined.is_set() and not isinstance(cause, ChildDiedError):
            self._fail(cause)  # the first worker could not be made, so none can
            return None
        now = time.monotonic()
        if not isinstance(cause, EngineUnavailableError):
            slot.outage_since = None
        elif slot.outage_since is None or now - slot.outage_since < self.engine_timeout:
            # As a worker that runs waits for it, and no fault of this one.
            slot.outage_since = slot.outage_since or now
            logger.warning("worker %d waits for an engine: %s", slot.number, cause)
            return _OUTAGE_PAUSE_S
        pause = slot.restarts.after_failed_start()
        if pause is not None:
            logger.warning("worker %d could not start: %s; again in %.1f s", slot.number, cause, pause)
            return pause
        slot.given_up = True
        logger.error("worker %d is given up: %s", slot.number, cause)
        self._pump_soon()
        if all(other.given_up for other in self._slots):
            self._fail(RollstreamError(f"no worker can be started any more; the last cause: {cause}"))
        return None

    async def _join(self, slot: _Slot, worker: WorkerHandle) -> None:
        if not self.backend.is_local:
            logger.info("worker %d is ready (pid %d)", slot.number, slot.pid)
        slot.restarts.failures = 0
        slot.outage_since = None
        self._joined.set()
        if self.urls is not None:
            await worker.follow(list(self.urls()))
        if self._queue is not None:
            self._queue.add(slot.number)
            self._pump_soon()

    async def _listen(self, slot: _Slot, worker: WorkerHandle) -> None:
        """Takes reports. Raises when the worker ends."""
        silence_s = None if self.backend.is_local else self.attempt_timeout + _SILENCE_S
        async with aclosing(worker.reports()) as reports:
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        report = await anext(reports)
                except TimeoutError:
                    raise ChildDiedError(f"it has reported nothing for {silence_s:.0f} s") from None
                for level, name, message in report.logs:
                    logging.getLogger(name).log(level, "worker %d: %s", slot.number, message)
                self.stats.update(slot.number, report.status)
                slot.held = report.held
                if (queue := self._queue) is None:
                    continue  # dropped: what it delivers is owed again
                if report.turns and self.turns is not None:
                    held = queue.held_by(slot.number)
                    for turn in report.turns:
                        if turn.key in held:
                            self.turns.keep(turn)
                for result in report.results:
                    if not self._dropped and queue.receive(slot.number, result.key):
                        self._commit(queue, result)
                self._pump_soon()  # who is waited for changes with time

    async def _gone(
        self, slot: _Slot, worker: WorkerHandle, cause: BaseException, served_s: float
    ) -> float | None:
        """A worker has ended; returns the pause until the next, None when there is none."""
        self.stats.remove(slot.number)
        if self._closed:
            return None
        self.deaths += 1
        lost = 0
        if (queue := self._queue) is not None:
            lost = len(queue.held_by(slot.number))
            blameless = isinstance(cause, EngineLostError) or getattr(cause, "blameless", False)
            for key, charges in queue.worker_lost(slot.number, suspect=not blameless):
                self._commit(queue, self._blame(key, charges, cause))
            self._pump_soon()
        if self.backend.is_local:
            await worker.drop()  # what else it has in flight
        if isinstance(cause, EngineLostError):
            # At the beginning the first may have waited in vain before the second is there.
            others = any(
                other.worker is not None or (not other.has_come and other.is_expected())
                for other in self._slots
                if other is not slot
            )
            if not others or self.stats.all_wait:
                self._fail(cause)
                return None
        elif not isinstance(cause, ChildDiedError):
            self._fail(cause)
            return None
        pause = slot.restarts.after_serving(served_s)
        logger.warning(
            "worker %d (pid %d) is gone: %s; its %d rollouts in flight are owed again; the next in %.1f s",
            slot.number,
            slot.pid,
            cause,
            lost,
            pause,
        )
        return pause

    async def _send_urls(self, current: Callable[[], Sequence[str]]) -> None:
        """Sends workers the servers that there are, whenever these change."""
        sent: list[str] = []
        for look in itertools.count():
            urls = list(current())
            if urls != sent or look % _URLS_REPEAT == 0:
                await self._tell_all(partial(_follow, urls))
                sent = urls
            await asyncio.sleep(_URLS_EVERY_S)


async def _follow(urls: Sequence[str], worker: WorkerHandle) -> None:
    await worker.follow(urls)


def _packed(row: PromptRow, repeat: int) -> WorkItem:
    """Raises whatever pickle does for a row of a user's own dataset class."""
    return WorkItem(row.index, repeat, row.prompt_key, pickle.dumps(row, protocol=5))


def _packed_with_images(row: PromptRow, repeat: int) -> WorkItem:
    return _packed(replace(row, images=[as_bytes(image) for image in row.images]), repeat)
