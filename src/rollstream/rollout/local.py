"""The local executor: a bounded window of rollouts in one event loop.

Slots share one iterator of owed keys; a slot takes the next key only when its last rollout is durable and
the window has room (late binding). So what is in flight, committing included, never exceeds `max_in_flight`,
and nothing is held for what is not dispatched yet. A lower cap makes slots wait, one by one as their rollouts
end; a higher one lets them go on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from rollstream.aio import finish_despite_cancellation
from rollstream.errors import DataError
from rollstream.rollout.concurrency import ConcurrencyController
from rollstream.rollout.semaphore import ResizableSemaphore
from rollstream.rollout.worker import make_failure
from rollstream.store.records import EncodingError
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey


@dataclass(slots=True)
class WindowCounters:
    """What the executor holds and what went through."""

    in_flight: int = 0
    completed: int = 0
    """Durable rollouts of this executor."""
    failed: int = 0
    """Durable failures of this executor."""
    dropped: int = 0
    """Rollouts in flight that were cut off by a stop; owed again."""


class Worker(Protocol):
    """Runs rollouts: a `RolloutWorker`, or what stands before one."""

    async def run(self, row: PromptRow, repeat: int) -> Rollout | Failure:
        """Executes one rollout to its end. Raises `EngineLostError` when the engine stays away."""
        ...


class Sink(Protocol):
    """Makes results durable: a `StoreWriter`, a rollout buffer."""

    def submit(self, result: Rollout | Failure, /) -> Awaitable[None]:
        """Done when the result is durable; raises `EncodingError` if this one cannot be stored."""
        ...


class LocalExecutor:
    """Runs owed rollouts until there are no more or it is told to stop."""

    def __init__(
        self,
        worker: Worker,
        sink: Sink,
        *,
        load_row: Callable[[int], PromptRow],
        max_in_flight: int,
        on_durable: Callable[[Rollout | Failure], None] | None = None,
        controller: ConcurrencyController | None = None,
    ) -> None:
        """Args:
        worker: runs them.
        sink: makes them durable.
        load_row: the prompt row of an index; may raise `DataError`.
        max_in_flight: rollouts at once.
        on_durable: called for each rollout or failure once it is durable (R2).
        controller: keeps fewer in flight while the engine is overloaded; None always fills the window.
        """
        self._worker = worker
        self._sink = sink
        self._load_row = load_row
        self._max_in_flight = max_in_flight
        self._on_durable = on_durable
        self._controller = controller
        self._window = ResizableSemaphore(max_in_flight)
        self._stopping = False
        self._slots: list[asyncio.Task[None]] = []
        self.counters = WindowCounters()

    @property
    def cap(self) -> int:
        """Rollouts in flight at most, now: `max_in_flight`, or fewer."""
        return self._window.cap

    @property
    def paused(self) -> bool:
        """Whether nothing is begun for now; what is in flight goes on."""
        return self._window.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._window.paused = paused

    async def run(self, keys: Iterator[RolloutKey]) -> None:
        """Works off `keys`; returns when all are durable, or after a stop when nothing is in flight.

        Raises:
            StorageError: the sink is broken.
            EngineLostError: the engine stayed away too long.
        """
        self._window = ResizableSemaphore(self._window.cap)
        try:
            async with asyncio.TaskGroup() as companions:
                controlling: asyncio.Task[None] | None = None
                if self._controller is not None:
                    controlling = companions.create_task(self._controller.run(self._window))
                try:
                    await self._run_slots(keys)
                finally:
                    if controlling is not None:
                        controlling.cancel()
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise first from first.__cause__

    async def _run_slots(self, keys: Iterator[RolloutKey]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._max_in_flight):
                if self._window.paused or self._window.in_flight >= self._window.cap:
                    # Of an earlier run: the others wait for their turn like those whose rollout has ended.
                    self._slots.append(group.create_task(self._wait_and_run(keys)))
                    continue
                key = next(keys, None)
                if key is None:
                    break
                await self._window.enter()
                self._slots.append(group.create_task(self._slot(key, keys)))

    def stop(self) -> None:
        """Takes no further keys; what is in flight goes on. Idempotent."""
        self._stopping = True
        self._window.close()

    def drop(self) -> None:
        """Cuts off what is in flight."""
        self._stopping = True
        for slot in self._slots:
            slot.cancel()

    async def _wait_and_run(self, keys: Iterator[RolloutKey]) -> None:
        if (key := await self._next(keys)) is not None:
            await self._slot(key, keys)

    async def _slot(self, key: RolloutKey | None, keys: Iterator[RolloutKey]) -> None:
        """Runs `key`, for which it has a place in the window, and then what comes."""
        while key is not None:
            self.counters.in_flight += 1
            try:
                if not self._stopping:
                    await self._one(key)
            except asyncio.CancelledError:
                self.counters.dropped += 1
                raise
            finally:
                self.counters.in_flight -= 1
                self._window.leave()
            key = await self._next(keys)

    async def _next(self, keys: Iterator[RolloutKey]) -> RolloutKey | None:
        """The next key and a place for it; None when there is no more to begin."""
        if self._stopping or not await self._window.enter():
            return None
        key = next(keys, None)
        if key is None:
            self._window.leave()
            self._window.close()  # those who wait have nothing to wait for
        return key

    async def _one(self, key: RolloutKey) -> None:
        result: Rollout | Failure
        try:
            row = self._load_row(key.index)
        except DataError as error:
            result = make_failure(key.index, key.repeat, "", 1, "prompt", error)
        else:
            result = await self._worker.run(row, key.repeat)
        try:
            await self._commit(result)
        except EncodingError as error:
            result = make_failure(key.index, key.repeat, result.prompt_key, 1, "store", error)
            await self._commit(result)
        self._count(result)

    async def _commit(self, result: Rollout | Failure) -> None:
        """Commits, also when the slot is cut off meanwhile: what the sink has got becomes durable."""
        durable = asyncio.ensure_future(self._sink.submit(result))
        try:
            await finish_despite_cancellation(durable)
        except asyncio.CancelledError:
            if durable.exception() is None:
                self.counters.dropped -= 1
                self._count(result)
            raise

    def _count(self, result: Rollout | Failure) -> None:
        if isinstance(result, Rollout):
            self.counters.completed += 1
        else:
            self.counters.failed += 1
        if self._on_durable is not None:
            self._on_durable(result)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    return errors
