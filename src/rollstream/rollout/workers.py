"""The executor of several workers: rollouts dispatched late, executed elsewhere, durable here.

    this process: keys --WorkQueue--> give --> [ worker 0 ] --\\
                        ^                   --> [ worker 1 ] ---> reports --> StoreWriter --> committed
                        +----------------------------------------------------------------------+

The driver owns the keys, the store and its lock; the workers own attempts, retries and the wait for their
engine (`worker`); `WorkerSupervisor` keeps them running, as processes or as Ray actors. A worker that ends
costs what was in flight there: that is owed again and charged to no rollout, and another worker takes its
slot. Which key is whose is decided by `WorkQueue` alone.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rollstream.chat.images import as_bytes, is_file
from rollstream.childproc import ChildDiedError
from rollstream.errors import DataError, EngineLostError, RollstreamError
from rollstream.rollout.concurrency import ConcurrencyController
from rollstream.rollout.local import WindowCounters
from rollstream.rollout.stats import WorkerStats
from rollstream.rollout.supervisor import (
    Worker,
    WorkerBackend,
    WorkerSlot,
    WorkerSupervisor,
)
from rollstream.rollout.work_queue import WorkQueue
from rollstream.rollout.worker import make_failure
from rollstream.rollout.worker_host import WorkerRecipe, WorkerReport, WorkItem
from rollstream.store.records import EncodedRollout, EncodingError
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, PromptRow, RolloutKey


class WorkerDiedError(RollstreamError):
    """The worker process ended under a rollout that was alone in it, time after time."""


class WorkersExecutor:
    """Runs owed rollouts on workers until there are no more or it is told to stop.

    Args:
        recipe: what a worker is made from, asked for each anew.
        writer: makes rollouts durable.
        backend: where workers run.
        load_row: the prompt row of an index; may raise `DataError`.
        max_in_flight: rollouts at once, over all workers.
        workers: how many.
        attempt_timeout: seconds for one attempt.
        max_attempts: workers that a rollout may bring down, alone in them, before it is recorded as failed.
        engine_timeout: seconds that workers which start may find no engine, once there was one.
        adaptive: keeps fewer in flight while the engines are overloaded.
        engine: asked how busy it is, where workers share one; None: they have their own.
        urls: of the servers that workers use, where these may change.
        on_durable: called for each rollout or failure once it is durable (R2).
    """

    def __init__(
        self,
        recipe: Callable[[], WorkerRecipe],
        writer: StoreWriter,
        backend: WorkerBackend,
        *,
        load_row: Callable[[int], PromptRow],
        max_in_flight: int,
        workers: int,
        attempt_timeout: float,
        max_attempts: int = 3,
        engine_timeout: float = 600.0,
        adaptive: bool = False,
        engine: object = None,
        urls: Callable[[], Sequence[str]] | None = None,
        on_durable: Callable[[EncodedRollout | Failure], None] | None = None,
    ) -> None:
        self._writer = writer
        self._backend = backend
        self._load_row = load_row
        self._cap = max_in_flight
        self._workers = workers
        self._max_charges = max_attempts
        self._on_durable = on_durable
        self.stats = WorkerStats(shared_engine=engine)
        """What the workers count."""
        self.counters = WindowCounters()
        self._controller = ConcurrencyController(max_in_flight, self.stats) if adaptive else None
        self._supervisor = WorkerSupervisor(
            backend,
            recipe,
            self,
            attempt_timeout=attempt_timeout,
            engine_timeout=engine_timeout,
            stats=self.stats,
            urls=urls,
        )
        self._commits: set[asyncio.Future[None]] = set()
        self._queue: WorkQueue | None = None
        self._pumping = False
        self._paused = False
        self._stopping = False
        self._dropped = False
        self._ended = asyncio.Event()
        """Of the keys: nothing is in flight and nothing more will be, or all was dropped."""
        self._last_item: WorkItem | None = None

    @property
    def cap(self) -> int:
        """Rollouts in flight at most, now."""
        return self._cap

    @cap.setter
    def cap(self, cap: int) -> None:
        self._cap = cap
        if self._queue is not None:
            self._queue.cap = cap
            self._pump_soon()

    @property
    def paused(self) -> bool:
        """Whether nothing is begun for now; what is in flight goes on."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._pump_soon()

    @property
    def in_flight(self) -> int:
        """Rollouts dispatched and not durable yet."""
        return self._queue.in_flight if self._queue is not None else 0

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that run, by slot."""
        return {one.slot.number: one.pid for one in self._supervisor.workers.values()}

    @property
    def deaths(self) -> int:
        """Workers that ended while they were wanted."""
        return self._supervisor.deaths

    async def start(self) -> None:
        """Starts the workers; returns when one of them is ready.

        Raises:
            ConfigError: a worker cannot be made as configured.
            RollstreamError: a worker says why it cannot start, or none comes.
        """
        await self._supervisor.start(self._workers)

    def add_workers(self, count: int) -> None:
        """Starts further workers, also while rollouts run."""
        self._supervisor.add(count)

    async def run(self, keys: Iterator[RolloutKey]) -> None:
        """Works off `keys`; returns when all are durable, or after a stop when nothing is in flight.

        Raises:
            StorageError: the writer is broken.
            EngineLostError: the engine stayed away too long.
            RollstreamError: no worker can be started any more.
        """
        failed = self._supervisor.failed
        queue = WorkQueue(keys, cap=self._cap, max_charges=self._max_charges)
        for worker in self._supervisor.workers:
            queue.add(worker)
        self._queue = queue
        self._ended.clear()
        if self._stopping:
            queue.stop()
        ended = asyncio.ensure_future(self._ended.wait())
        controlling = None if self._controller is None else asyncio.ensure_future(self._controller.run(self))
        self._pump()
        try:
            waiting: set[asyncio.Future[Any]] = {ended, failed}
            if controlling is not None:
                waiting.add(controlling)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            if controlling is not None and controlling.done():
                controlling.result()
        finally:
            ended.cancel()
            if controlling is not None:
                controlling.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({controlling})
            # What is in the writer's hands becomes durable, and is counted.
            while self._commits:
                await asyncio.wait(set(self._commits))
                await asyncio.sleep(0)
            self._queue = None
            self.counters.dropped += queue.at_workers
            self.counters.in_flight = 0

    def stop(self) -> None:
        """Gives out nothing more; what is in flight goes on. Idempotent."""
        self._stopping = True
        if self._queue is not None:
            self._queue.stop()
            self._pump_soon()

    def drop(self) -> None:
        """Cuts off what is in flight. Idempotent."""
        self.stop()
        if not self._dropped:
            self._dropped = True
            self._supervisor.drop()
        self._ended.set()

    async def close(self) -> None:
        """Ends the workers. May be called twice."""
        await self._supervisor.close()

    # -- what the supervisor tells, see `RolloutOwner`

    def joined(self, worker: Worker) -> None:
        if self._queue is not None:
            self._queue.add(worker.id)
            self._pump_soon()

    def reported(self, worker: Worker, report: WorkerReport) -> None:
        queue = self._queue
        if queue is None:
            return  # dropped: what it delivers is owed again
        for result in report.results:
            if self._dropped:  # by the result before, maybe
                return
            if queue.receive(worker.id, result.key):
                self._commit(queue, result)
        self._pump_soon()  # who is waited for changes with time

    def lost(self, worker: Worker, cause: BaseException) -> int:
        queue = self._queue
        if queue is None:
            return 0
        lost = len(queue.held_by(worker.id))
        blameless = isinstance(cause, EngineLostError) or (
            isinstance(cause, ChildDiedError) and cause.blameless
        )
        for key, charges in queue.worker_lost(worker.id, suspect=not blameless):
            self._commit(queue, self._blame(key, charges, cause))
        self._pump_soon()
        return lost

    def given_up(self, slot: WorkerSlot) -> None:
        self._pump_soon()

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
        if self._paused and not self._stopping:
            self.counters.in_flight = queue.in_flight
            return
        queue.expected = self._supervisor.expected()
        workers = self._supervisor.workers
        try:
            for worker, keys in queue.assign().items():
                self._give(queue, workers[worker], keys)
        except Exception as error:
            self._supervisor.fail(error)
            return
        self.counters.in_flight = queue.in_flight
        if queue.is_finished:
            self._ended.set()

    def _give(self, queue: WorkQueue, worker: Worker, keys: Sequence[RolloutKey]) -> None:
        items, shown = [], []
        for key in keys:
            prompt_key = ""
            try:
                row = self._load_row(key.index)
                prompt_key = row.prompt_key
                if not self._backend.shares_files and any(map(is_file, row.images)):
                    shown.append((key, row))
                else:
                    items.append(self._item(row, key.repeat))
            except Exception as error:
                if not prompt_key and not isinstance(error, DataError):
                    raise
                # A row that cannot be read, or that a user's dataset class filled with what cannot travel.
                queue.receive(worker.id, key)
                self._commit(queue, make_failure(key.index, key.repeat, prompt_key, 1, "prompt", error))
        if items:
            self._supervisor.give(worker, items)
        if shown:
            self._supervisor.own(self._give_with_images(queue, worker, shown))

    def _item(self, row: PromptRow, repeat: int) -> WorkItem:
        """What travels; the repeats of a row, which come one after the other, share its bytes."""
        last = self._last_item
        if last is not None and last.index == row.index and last.prompt_key == row.prompt_key:
            return replace(last, repeat=repeat)
        self._last_item = item = WorkItem.of(row, repeat)
        return item

    async def _give_with_images(
        self, queue: WorkQueue, worker: Worker, rows: Sequence[tuple[RolloutKey, PromptRow]]
    ) -> None:
        """Gives rows whose images are files, which travel as bytes: a node need not have the files.

        One that has not would fail them all at once, and so be given nearly all there are. What the row's
        messages say of the images stays as it is.
        """
        for key, row in rows:
            item: WorkItem | Exception
            try:
                item = await asyncio.to_thread(_item_with_images, row, key.repeat)
            except Exception as error:  # as in `_give`
                item = error
            # Meanwhile the worker may have died, which gave the key to another, or all may be over.
            if self._queue is not queue or self._dropped:
                return
            if key not in queue.held_by(worker.id):
                continue
            if isinstance(item, WorkItem):
                self._supervisor.give(worker, [item])
            elif queue.receive(worker.id, key):
                self._commit(queue, make_failure(key.index, key.repeat, row.prompt_key, 1, "prompt", item))

    def _commit(self, queue: WorkQueue, result: EncodedRollout | Failure) -> None:
        future = self._writer.submit(result)
        self._commits.add(future)
        future.add_done_callback(partial(self._committed, queue, result))

    def _committed(
        self, queue: WorkQueue, result: EncodedRollout | Failure, future: "asyncio.Future[None]"
    ) -> None:
        self._commits.discard(future)
        error = future.exception()
        if isinstance(error, EncodingError) and not (isinstance(result, Failure) and result.stage == "store"):
            self._commit(queue, make_failure(result.index, result.repeat, "", 1, "store", error))
            return
        if error is not None:
            self._supervisor.fail(error)
            return
        queue.commit(result.key)
        if isinstance(result, Failure):
            self.counters.failed += 1
        else:
            self.counters.completed += 1
        if self._on_durable is not None:
            try:
                self._on_durable(result)
            except Exception as own:
                self._supervisor.fail(own)
        self._pump_soon()

    def _blame(self, key: RolloutKey, charges: int, cause: BaseException) -> Failure:
        died = WorkerDiedError(
            f"its worker died {charges} times while nothing else was in flight there; the last time: {cause}"
        )
        prompt_key = ""
        with suppress(DataError):
            prompt_key = self._load_row(key.index).prompt_key
        return make_failure(key.index, key.repeat, prompt_key, charges, "agent", died)


def _item_with_images(row: PromptRow, repeat: int) -> WorkItem:
    return WorkItem.of(replace(row, images=[as_bytes(image) for image in row.images]), repeat)
