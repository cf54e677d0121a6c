"""The generation thread: takes work as it comes, tries it until it is done or has failed, and hands it back.

    take() -> generate(work) -> finish(work, result, attempts)
                   |  errors that may pass: again, after a back-off
                   +-> failed(work, error): lets it go, or ends generation by raising

It ends by `stop`, or because generation cannot go on; then everyone who waits hears why. Both kinds of batches
stand on it, `BatchesAhead` and `AsyncBatchGenerator`: they say what work there is, and keep what came of it.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from rollstream.errors import GenerationFailedError, GenerationStoppedError, TrainingError
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient
from rollstream.training.loop_thread import LoopThread

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W")

RETRY = RetryPolicy(max_attempts=3, delay=1.0, delay_max=30.0)
"""As the configuration's defaults for rollouts."""

_CLOSE_S = 20.0
"""For a generator to release what it holds; a server that is told to end gets about as long elsewhere."""


class GenerationThread(Generic[W]):
    """Does work in an event loop of its own.

    Args:
        take: begins the next piece of work, with the lock held; None: there is none now, `wake` tells of
            more. Its `str` is used in messages.
        generate: does it; what this raises may pass (then it is tried again) or not.
        finish: takes the result and the number of attempts.
        failed: a piece has failed for good. What this or `finish` raises ends generation.
        at_once: pieces at once at most; None: all that `take` gives.
        time_limit: seconds for one piece, retries and the waits before them included; None: none.
        setting: that sets the limit, for the message.
        retry: for errors that may pass; an engine that is away is waited for, within the limit.
        start: called first; what it raises is raised by `start`.
        close: called at the end, in the task that called `start`: what that opened may be bound to it.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        take: Callable[[], W | None],
        generate: Callable[[W], Awaitable[Any]],
        finish: Callable[[W, Any, int], None],
        failed: Callable[[W, Exception], None],
        at_once: int | None,
        time_limit: float | None,
        setting: str,
        retry: RetryPolicy,
        start: Callable[[], Awaitable[None]] | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take = take
        self._generate = generate
        self._finish = finish
        self._failed = failed
        self._at_once = at_once
        self._time_limit = time_limit
        self._setting = setting
        self._retry = retry
        self._start = start
        self._close = close
        self._clock = clock
        self.changed = threading.Condition(threading.RLock())
        """Guards what the owner keeps, too; notified of every change."""
        self._error: BaseException | None = None
        self._started = self._stopped = False
        self._jitter = random.Random()
        self._in_flight = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._room = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = LoopThread("the generation thread", on_end=self._ended)

    def start(self, timeout: float) -> None:
        """Starts; returns when the generator is ready.

        Raises:
            Exception: the generator's own, if it does not start; `TrainingError` if it takes too long.
        """
        self._started = True
        self._thread.start(self._main)
        try:
            self._ready.result(timeout)
        except TimeoutError:
            if self._ready.done():
                raise
            late = TrainingError(f"the generator did not start within {timeout:g} s; {self.describe()}")
            self.fail(late)  # nothing will ever come
            self._thread.stop(0.0)
            raise late from None

    def stop(self, timeout: float) -> bool:
        """Cuts off what is in flight, closes the generator; whether that took at most `timeout` seconds."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        return self._thread.stop(timeout)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs a coroutine in the event loop. Raises `GenerationStoppedError`."""
        return self._thread.submit(coroutine)

    def wake(self) -> None:
        """There may be work again."""
        self._thread.call_soon(self._room.set)

    def fail(self, error: BaseException) -> None:
        """Generation is over: whoever waits hears of it at once. The first cause counts."""
        with self.changed:
            if not self.over:
                self._error = error
            self.changed.notify_all()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.alive

    @property
    def over(self) -> bool:
        """Whether generation has ended, or is about to."""
        return self._stopped or self._error is not None

    def raise_if_over(self) -> None:
        """Raises `GenerationFailedError` or `GenerationStoppedError` when there is nothing to wait for."""
        if (cause := self._error) is not None:
            raise GenerationFailedError(f"generation ended with {type(cause).__name__}: {cause}") from cause
        if self._stopped or not self._started:
            raise GenerationStoppedError("generation was stopped" if self._stopped else "start() comes first")

    def wait_for(self, ready: Callable[[], T | None], timeout: float | None) -> T | None:
        """What `ready` says, once it says anything but None; it is asked again after every change.

        Args:
            ready: called with the lock held.
            timeout: seconds, 0 to ask once; None: as long as generation goes on. What comes too late is None.

        Raises:
            GenerationFailedError, GenerationStoppedError: generation has ended.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            while True:
                self.raise_if_over()
                if (answer := ready()) is not None:
                    return answer
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self.changed.wait(left)

    def describe(self) -> str:
        """What the thread does, for an error message."""
        return self._thread.describe()

    def busy_seconds(self) -> float:
        """Seconds so far in which at least one piece of work was being done."""
        return self._busy_s + (self._clock() - self._busy_since if self._in_flight else 0.0)

    def _ended(self, error: BaseException | None) -> None:
        if not self._ready.done():
            self._ready.set_exception(error or TrainingError("generation was stopped before it began"))
        if error is not None:
            self.fail(error)

    async def _main(self) -> None:
        try:
            if self._start is not None:
                await self._start()
            self._ready.set_result(None)
            await self._work()
        except BaseException as error:
            try:
                await self._clean_up()
            except Exception as closing:  # `error` is why it ends, and the cause that counts
                logger.warning(
                    "the generator did not close after %s: %s: %s",
                    *(type(error).__name__, type(closing).__name__, closing),
                )
            raise

    async def _clean_up(self) -> None:
        if self._close is not None:
            self._thread.leave_alone()
            async with asyncio.timeout(_CLOSE_S):
                await self._close()

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as running:
                while True:
                    self._room.clear()
                    while (work := self._next()) is not None:
                        if self._in_flight == 0:
                            self._busy_since = self._clock()
                        self._in_flight += 1
                        running.create_task(self._one(work))
                    await self._room.wait()
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise first from first.__cause__

    def _next(self) -> W | None:
        if self._at_once is not None and self._in_flight >= self._at_once:
            return None
        with self.changed:
            try:
                return None if self.over else self._take()
            except Exception as error:
                self.fail(error)  # at once: what is in flight may take long to end
                raise

    async def _one(self, work: W) -> None:
        try:
            await self._try(work)
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_s += self._clock() - self._busy_since
            self._room.set()

    async def _try(self, work: W) -> None:
        attempts, waits = 1, 0
        try:
            async with asyncio.timeout(self._time_limit) as limit:
                while True:
                    try:
                        result = await self._call(work)
                        break
                    except Exception as error:
                        if find_unavailable(error) is None:  # an engine that is away is charged to nobody
                            if attempts >= self._retry.max_attempts or not is_transient(error):
                                raise
                            attempts += 1
                        waits += 1
                        wait = self._retry.wait(waits, self._jitter)
                        logger.warning("%s: %s: %s; again in %.1f s", work, type(error).__name__, error, wait)
                        await asyncio.sleep(wait)
        except (SystemExit, KeyboardInterrupt) as error:  # of the user's code: they would tear the loop down
            raise TrainingError(f"the generator raised {type(error).__name__}({error})") from error
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                late = TrainingError(f"{work} took longer than {self._time_limit:g} s ({self._setting})")
                late.__cause__ = error.__context__ or error
                error = late
            self._failed(work, error)
        else:
            self._finish(work, result, attempts)

    async def _call(self, work: W) -> Any:
        try:
            return await self._generate(work)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # It would end this task without a trace, and the work would never be done.
            raise RuntimeError("the generator let a CancelledError of its own escape") from error


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    return errors
