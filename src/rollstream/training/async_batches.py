"""Batches by number: for a trainer that says itself what each batch is made of.

    submit_batch(request) -> pending -> generate(request) -> completed -> get_batch(id)
                                |  errors that may pass: again, after a back-off
                                +-> failed: get_batch(id) raises, with the cause

The names are those that trainers with an asynchronous environment know. `BatchesAhead` is the better choice
where the trainer can leave it to a plan what comes next: it bounds staleness and resumes by itself.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rollstream.errors import BatchTimeoutError, ConfigError, GenerationFailedError, TrainingError
from rollstream.rollout.retry import RetryPolicy
from rollstream.training.generation_thread import RETRY, GenerationThread, try_within
from rollstream.user_calls import in_daemon_thread, is_async

T = TypeVar("T")

_CAUSE_S = 5.0
"""For the end of a batch's generation to be told: a reader that waits as long as generation may take hears why."""


@dataclass(slots=True)
class BatchRequest:
    """Asks for a batch."""

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
    """The generate function's return value."""
    version: int = 0
    """The request's version, stamped before the wait."""
    generation_time: float = 0.0
    """Seconds, retries and the waits before them included."""
    queue_time: float = 0.0
    """Seconds from its submission until its generation began."""
    attempts: int = 1


@dataclass(slots=True)
class _AheadBatch:
    request: BatchRequest
    submitted: float = field(default_factory=time.monotonic)
    queued: bool = False
    """At once, or (where generation is synchronous) when somebody asks for it."""
    begun: float | None = None
    outcome: BatchResult | Exception | None = None


class AsyncBatchGenerator(GenerationThread):
    """Generates submitted batches in a thread with an event loop of its own.

    Args:
        generate: makes the result of a request: a coroutine function, or a plain one (then in other threads).
        num_steps_async: batches that `should_submit_more` asks for, >= 0, and that are generated at once; 0 is
            synchronous: a batch is generated when it is asked for.
        async_generation_timeout: seconds for one batch, retries included; also what `get_batch` waits.
        async_max_queue_size: batches that may be there, from their submission until they are fetched, whether
            pending, completed or failed; None: twice `num_steps_async`, at least 1.
        use_async_generation: False: as `num_steps_async=0`.
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
        retry: RetryPolicy = RETRY,
        max_failures: int = 3,
    ) -> None:
        self.num_steps_async = num_steps_async if use_async_generation else 0
        at_once = max(1, self.num_steps_async)
        self.async_max_queue_size = (
            max(1, 2 * self.num_steps_async) if async_max_queue_size is None else async_max_queue_size
        )
        if num_steps_async < 0 or async_generation_timeout <= 0 or self.async_max_queue_size < at_once:
            raise ConfigError(
                f"{num_steps_async=}, {async_generation_timeout=}, {async_max_queue_size=}: at least 0, more "
                "than 0 seconds, at least 1 and num_steps_async"
            )
        super().__init__()
        self.async_generation_timeout = async_generation_timeout
        self._function = generate
        self._retry = retry
        self._max_failures = max_failures
        self._at_once = at_once
        self._batches: dict[int, _AheadBatch] = {}
        self._queue: asyncio.PriorityQueue[tuple[float, int, _AheadBatch]] = asyncio.PriorityQueue()
        self._numbers = itertools.count()  # the order of submission, among those of one priority
        self._failures = 0  # one after the other

    def start(self) -> None:
        """Starts the thread. Again while it runs: nothing happens."""
        if self._over or not self.alive:
            self._start_thread()

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
            self.raise_if_over()
            known = self._batches.get(request.batch_id)
            if known is None and len(self._batches) >= self.async_max_queue_size:
                return False
            if known is None or isinstance(known.outcome, Exception):
                batch = self._batches[request.batch_id] = _AheadBatch(request)
                if self.num_steps_async:
                    self._enqueue(batch)
            return True

    def get_batch(self, batch_id: int, timeout: float | None = None) -> BatchResult:
        """The result of a batch, which is forgotten then.

        Args:
            batch_id: as submitted.
            timeout: seconds, 0 for what is completed already; None: `async_generation_timeout`, and a moment
                for the cause when generation ends by it.

        Raises:
            BatchTimeoutError: it was not completed in time; ask again.
            GenerationFailedError: it failed, or generation ended; the original error is the `__cause__`. A
                batch that failed may be submitted again.
            GenerationStoppedError: the generator was stopped, or not started.
            TrainingError: no such batch was submitted, or it was fetched before.
        """
        timeout = self.async_generation_timeout + _CAUSE_S if timeout is None else timeout

        def fetch() -> _AheadBatch | None:
            if (batch := self._batches.get(batch_id)) is None:
                raise TrainingError(f"batch {batch_id} was not submitted, or was fetched before")
            if batch.outcome is not None:
                return self._batches.pop(batch_id)
            if timeout > 0:
                self._enqueue(batch)
            return None

        with self._changed:
            batch = self._wait_for(fetch, timeout)
            waits = batch is None and self._batches[batch_id].begun is None
        if batch is None:
            state = "waits for its turn" if waits else "is still being generated"
            raise BatchTimeoutError(
                f"batch {batch_id} did not come within {timeout:g} s: it {state}; {self._describe()}"
            )
        outcome = batch.outcome
        if isinstance(outcome, BatchResult):
            return outcome
        raise GenerationFailedError(
            f"batch {batch_id} failed with {type(outcome).__name__}: {outcome}"
        ) from outcome

    def get_pending_count(self) -> int:
        """Batches submitted and not generated yet."""
        with self._changed:
            return sum(batch.outcome is None for batch in self._batches.values())

    def get_completed_count(self) -> int:
        """Batches generated and not fetched yet."""
        with self._changed:
            return sum(isinstance(batch.outcome, BatchResult) for batch in self._batches.values())

    def should_submit_more(self) -> bool:
        """Whether fewer than `num_steps_async` batches are pending or completed."""
        return len(self._batches) < self.num_steps_async

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """See `GenerationThread.run`; `timeout`: None is `async_generation_timeout`."""
        return super().run(work, self.async_generation_timeout if timeout is None else timeout)

    def _enqueue(self, batch: _AheadBatch) -> None:
        if not batch.queued:
            batch.queued = True
            place = (-batch.request.priority, next(self._numbers), batch)
            self._call_soon(lambda: self._queue.put_nowait(place))

    # --- in the generation thread

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._at_once):
                workers.create_task(self._generate_batches())

    async def _generate_batches(self) -> None:
        while True:
            _, _, batch = await self._queue.get()
            request = batch.request
            batch.begun = begun = time.monotonic()
            made: BatchResult | Exception
            try:
                results, attempts = await try_within(
                    partial(self._generate, request),
                    f"batch {request.batch_id}",
                    self._retry,
                    self.async_generation_timeout,
                    "async_generation_timeout",
                )
                taken, waited = time.monotonic() - begun, begun - batch.submitted
                made = BatchResult(request.batch_id, results, request.version, taken, waited, attempts)
                self._times.append(taken)
                self._failures = 0
            except Exception as error:
                made = error
                self._failures += 1
            with self._changed:
                batch.outcome = made
                self._changed.notify_all()
            if self._failures > self._max_failures and isinstance(made, Exception):
                self._fail(made)

    async def _generate(self, request: BatchRequest) -> Any:
        if is_async(self._function):
            return await self._function(request)
        value = await in_daemon_thread(self._function, request)
        return await value if isinstance(value, Awaitable) else value
