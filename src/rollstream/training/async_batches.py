"""Batches by number: for a trainer that says itself what each batch is made of.

    submit_batch(request) -> pending -> generate(request) -> completed -> get_batch(id)
                                |  errors that may pass: again, after a back-off
                                +-> failed: get_batch(id) raises, with the cause

The names are those that trainers with an asynchronous environment know. `BatchesAhead` is the better choice
where the trainer can leave it to a plan what comes next: it bounds staleness and resumes by itself.
"""

import asyncio
import heapq
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from rollstream.daemon_threads import DaemonThreads, is_async
from rollstream.errors import (
    BatchTimeoutError,
    ConfigError,
    GenerationFailedError,
    GenerationStoppedError,
    TrainingError,
)
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient
from rollstream.training.loop_thread import LoopThread

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY = RetryPolicy(max_attempts=3, delay=1.0, delay_max=30.0)

_TIMES_KEPT = 100
"""Of the last batches, for the average: enough to be smooth, few enough to follow a change."""


@dataclass(slots=True)
class BatchRequest:
    """What a batch is made of."""

    batch_id: int
    """Unique among those that are pending or completed."""
    inputs: Any = None
    """For the generate function: prompts, rows, …"""
    version: int = 0
    """The engine's version now, when it is submitted; comes back in the result."""
    priority: float = 0.0
    """The greater, the sooner, among those that wait; then in the order of submission."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class BatchResult:
    """A generated batch."""

    batch_id: int
    results: Any
    """What the generate function returned."""
    version: int = 0
    """Of the request: stamped before the wait."""
    generation_time: float = 0.0
    """Seconds, retries and the waits before them included."""
    queue_time: float = 0.0
    """Seconds from its submission until its generation began."""
    attempts: int = 1


@dataclass(slots=True)
class _Entry:
    request: BatchRequest
    submitted: float
    result: BatchResult | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


class AsyncBatchGenerator:
    """Generates submitted batches in a thread with an event loop of its own.

    Args:
        generate: makes the result of a request: a coroutine function, or a plain one (then in other threads).
        num_steps_async: batches that `should_submit_more` asks for, >= 0; 0 is synchronous: a batch is
            generated when it is asked for.
        async_generation_timeout: seconds for one batch, retries included; also what `get_batch` waits.
        async_max_queue_size: batches that may be there, from their submission until they are fetched, whether
            pending, completed or failed; None: twice `num_steps_async`, at least 1.
        use_async_generation: False: as `num_steps_async=0`.
        max_concurrent_batches: batches being generated at once; None: `num_steps_async`, at least 1.
        retry: for errors that may pass.
        max_failures: batches that may fail one after the other; one more ends the generator.
    """

    def __init__(
        self,
        generate: Callable[[BatchRequest], Any] | Callable[[BatchRequest], Awaitable[Any]],
        *,
        num_steps_async: int = 1,
        async_generation_timeout: float = 300.0,
        async_max_queue_size: int | None = None,
        use_async_generation: bool = True,
        max_concurrent_batches: int | None = None,
        retry: RetryPolicy = _RETRY,
        max_failures: int = 3,
    ) -> None:
        if num_steps_async < 0:
            raise ConfigError(f"num_steps_async={num_steps_async}: at least 0")
        if async_generation_timeout <= 0:
            raise ConfigError(f"async_generation_timeout={async_generation_timeout}: more than 0 seconds")
        self.num_steps_async = num_steps_async if use_async_generation else 0
        self.async_generation_timeout = async_generation_timeout
        self.async_max_queue_size = (
            max(1, 2 * self.num_steps_async) if async_max_queue_size is None else async_max_queue_size
        )
        if self.async_max_queue_size < max(1, self.num_steps_async):
            raise ConfigError(f"async_max_queue_size={async_max_queue_size}: at least 1, and num_steps_async")
        self._generate = generate
        self._is_async = is_async(generate)
        self._slots = (
            max(1, self.num_steps_async) if max_concurrent_batches is None else max_concurrent_batches
        )
        if self._slots < 1:
            raise ConfigError(f"max_concurrent_batches={max_concurrent_batches}: at least 1")
        self._retry = retry
        self._max_failures = max_failures
        self._jitter = random.Random()
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._entries: dict[int, _Entry] = {}
        self._waiting: list[tuple[float, int, int]] = []  # heap of (-priority, number, batch id)
        self._number = 0
        self._failures = 0
        self._times: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._error: BaseException | None = None
        self._stopped = False
        self._started = False
        self._work = asyncio.Event()
        self._thread = LoopThread("the generation thread", on_end=self._ended)
        self._plain: DaemonThreads | None = None

    def start(self) -> None:
        """Starts the thread. Again while it runs: nothing happens."""
        with self._changed:
            if self._stopped:
                raise GenerationStoppedError("the generator was stopped; make a new one")
            if self._started:
                return
            self._started = True
        self._thread.start(self._main)

    def stop(self, timeout: float = 10.0) -> bool:
        """Cuts off what is in flight; who waits is told. Idempotent.

        Returns:
            whether the thread ended within `timeout` seconds; one that hangs is left behind.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        return self._thread.stop(timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def submit_batch(self, request: BatchRequest) -> bool:
        """Asks for a batch.

        Returns:
            True: it is pending (or was already, or is completed). False: `async_max_queue_size` others are
                there already; there is room when one of them has been fetched.

        Raises:
            GenerationFailedError: the generator has ended, the cause is attached.
            GenerationStoppedError: it was stopped, or not started.
        """
        with self._changed:
            self._check()
            known = self._entries.get(request.batch_id)
            if known is not None and known.error is None:
                return True
            # Whoever submits until it is refused must not fill the memory with batches that nobody fetches.
            if known is None and len(self._entries) >= self.async_max_queue_size:
                return False
            self._entries[request.batch_id] = _Entry(request, time.monotonic())
            if self.num_steps_async > 0:
                self._queue(request)
            return True

    def get_batch(self, batch_id: int, timeout: float | None = None) -> BatchResult:
        """The result of a batch, which is forgotten then.

        Args:
            batch_id: as submitted.
            timeout: seconds, 0 for what is completed already; None: `async_generation_timeout`.

        Raises:
            BatchTimeoutError: it was not completed in time; ask again.
            GenerationFailedError: it failed, or generation ended; the original error is the `__cause__`. A
                batch that failed may be submitted again.
            GenerationStoppedError: the generator was stopped, or not started.
            TrainingError: no such batch was submitted, or it was fetched before.
        """
        timeout = self.async_generation_timeout if timeout is None else timeout
        began = time.monotonic()
        with self._changed:
            entry = self._entries.get(batch_id)
            if entry is not None and self.num_steps_async == 0 and not entry.done and timeout > 0:
                self._queue(entry.request)
            while True:
                entry = self._entries.get(batch_id)
                if entry is not None and entry.done:
                    break
                self._check()
                if entry is None:
                    raise TrainingError(f"batch {batch_id} was not submitted, or was fetched before")
                left = began + timeout - time.monotonic()
                if left <= 0:
                    raise BatchTimeoutError(
                        f"batch {batch_id} did not come within {timeout:g} s; {self._thread.describe()}"
                    )
                self._changed.wait(left)
            del self._entries[batch_id]
            self._changed.notify_all()
        if entry.error is not None:
            raise GenerationFailedError(
                f"batch {batch_id} failed with {type(entry.error).__name__}: {entry.error}"
            ) from entry.error
        assert entry.result is not None
        return entry.result

    def get_pending_count(self) -> int:
        """Batches submitted and not generated yet."""
        with self._changed:
            return sum(not entry.done for entry in self._entries.values())

    def get_completed_count(self) -> int:
        """Batches generated and not fetched yet."""
        with self._changed:
            return sum(entry.result is not None for entry in self._entries.values())

    def get_average_generation_time(self) -> float:
        """Seconds, over the last batches; 0.0 before the first one."""
        with self._changed:
            return sum(self._times) / len(self._times) if self._times else 0.0

    def should_submit_more(self) -> bool:
        """Whether fewer than `num_steps_async` batches are pending or completed."""
        with self._changed:
            return len(self._entries) < self.num_steps_async

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """Runs something else in the thread's event loop, as a weight update; returns what it returns.

        Raises:
            BatchTimeoutError: it took longer than `timeout` seconds (None: `async_generation_timeout`) and
                was cancelled.
            Exception: its own.
        """
        timeout = self.async_generation_timeout if timeout is None else timeout
        with self._changed:
            self._check()
        future = self._thread.submit(work())
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise BatchTimeoutError(f"not done within {timeout:g} s; {self._thread.describe()}") from None

    def _queue(self, request: BatchRequest) -> None:
        if all(batch_id != request.batch_id for _, _, batch_id in self._waiting):
            self._number += 1
            heapq.heappush(self._waiting, (-request.priority, self._number, request.batch_id))
            self._thread.call_soon(self._work.set)

    def _check(self) -> None:
        if self._error is not None:
            cause = self._error
            raise GenerationFailedError(f"generation ended with {type(cause).__name__}: {cause}") from cause
        if self._stopped or not self._started:
            raise GenerationStoppedError("it was stopped" if self._stopped else "start() comes first")

    def _ended(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def _main(self) -> None:
        self._plain = DaemonThreads("generate")
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._slots):
                    tasks.create_task(self._slot())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        finally:
            self._plain.close()

    async def _slot(self) -> None:
        while True:
            entry = self._next()
            if entry is None:
                self._work.clear()
                entry = self._next()  # one may have come before the clearing
                if entry is None:
                    await self._work.wait()
                    continue
            await self._run_entry(entry)

    def _next(self) -> _Entry | None:
        with self._changed:
            while self._waiting:
                entry = self._entries.get(heapq.heappop(self._waiting)[2])
                if entry is not None and not entry.done:
                    return entry
        return None

    async def _run_entry(self, entry: _Entry) -> None:
        began = time.monotonic()
        attempts = 1
        result: Any = None
        error: Exception | None = None
        try:
            async with asyncio.timeout(self.async_generation_timeout) as limit:
                waits = 0
                while True:
                    try:
                        result = await self._call(entry.request)
                        break
                    except Exception as failure:
                        if find_unavailable(failure) is None:
                            if attempts >= self._retry.max_attempts or not is_transient(failure):
                                raise
                            attempts += 1
                        waits += 1
                        wait = self._retry.wait(waits, self._jitter)
                        logger.warning(
                            "batch %d: %s: %s; again in %.1f s",
                            *(entry.request.batch_id, type(failure).__name__, failure, wait),
                        )
                        await asyncio.sleep(wait)
        except Exception as failure:
            error = failure
            if isinstance(failure, TimeoutError) and limit.expired():
                error = BatchTimeoutError(
                    f"generating it took longer than {self.async_generation_timeout:g} s "
                    "(async_generation_timeout)"
                )
                error.__cause__ = failure.__context__
        taken = time.monotonic() - began
        with self._changed:
            if error is not None:
                entry.error = error
                self._failures += 1
                if self._failures > self._max_failures:
                    self._error = error
            else:
                request = entry.request
                entry.result = BatchResult(
                    request.batch_id, result, request.version, taken, began - entry.submitted, attempts
                )
                self._failures = 0
                self._times.append(taken)
            self._changed.notify_all()
            if self._error is not None:
                raise self._error

    async def _call(self, request: BatchRequest) -> Any:
        if self._is_async:
            try:
                return await self._generate(request)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise RuntimeError("generate let a CancelledError of its own escape") from error
        assert self._plain is not None
        outcome = await self._plain.start(lambda: self._generate(request))
        if outcome.error is not None:
            raise outcome.error
        return await outcome.value if asyncio.iscoroutine(outcome.value) else outcome.value
