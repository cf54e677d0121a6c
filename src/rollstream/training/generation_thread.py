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
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rollstream.errors import GenerationFailedError, GenerationStoppedError, TrainingError
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W")

RETRY = RetryPolicy(max_attempts=3, delay=1.0, delay_max=30.0)
"""As the configuration's defaults for rollouts."""

START_S = 600.0
"""For a generator to get ready: engines that load large models take minutes."""

_CLOSE_S = 20.0
"""For a generator to release what it holds; a server that is told to end gets about as long elsewhere."""

_BEAT_S = 0.5
"""Between signs of life of the loop: rare enough to cost nothing, often enough for a wait of seconds."""

_BLOCKED_S = 3.0
"""A loop without a sign of life for this long is called blocked: no well-behaved callback takes so long."""

_SWITCH_S = 5e-4
"""After which a thread gives the interpreter to one that waits for it, from the first such thread on; Python's
default is ten times as long. A trainer asks for it again after every operator that it has started."""


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
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._cleans_up = False
        self._beat = 0.0
        self._jitter = random.Random()
        self._in_flight = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._room = asyncio.Event()
        self._ready: Future[None] = Future()

    def start(self, timeout: float) -> None:
        """Starts, once; returns when the generator is ready.

        Raises:
            Exception: the generator's own, if it does not start; `TrainingError` if it takes too long.
            GenerationStoppedError: it was stopped before.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        with self.changed:
            if self._stopped:
                raise GenerationStoppedError("generation was stopped: make a new one")
            if self._thread is not None:
                raise TrainingError("generation was started before")
            self._beat = time.monotonic()
            self._loop = loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name="rollstream-generation", daemon=True
            )
            self._thread.start()
        try:
            self._ready.result(timeout)
        except TimeoutError:
            if self._ready.done():
                raise
            late = TrainingError(f"the generator did not start within {timeout:g} s; {self.describe()}")
            self.fail(late)  # nothing will ever come
            self.stop(0.0)
            raise late from None

    def stop(self, timeout: float) -> bool:
        """Cuts off what is in flight, closes the generator; whether that took at most `timeout` seconds.

        A thread that takes longer is left behind: it is a daemon, and keeps nobody from exiting.
        """
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        self._call_soon(self._cancel)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if self.alive:
            logger.warning(
                "generation did not end within %g s and is left behind; %s", timeout, self.describe()
            )
        return not self.alive

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs a coroutine in the event loop; cancelling the future cancels it.

        Raises:
            GenerationStoppedError: the thread does not run.
        """
        try:
            if self._loop is None or not self.alive:
                raise RuntimeError
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop may have been closed a moment ago
            coroutine.close()
            raise GenerationStoppedError("the generation thread does not run") from error

    def wake(self) -> None:
        """There may be work again."""
        self._call_soon(self._room.set)

    def fail(self, error: BaseException) -> None:
        """Generation is over: whoever waits hears of it at once. The first cause counts."""
        with self.changed:
            if not self.over:
                self._error = error
            self.changed.notify_all()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def over(self) -> bool:
        """Whether generation has ended, or is about to."""
        return self._stopped or self._error is not None

    def raise_if_over(self) -> None:
        """Raises `GenerationFailedError` or `GenerationStoppedError` when there is nothing to wait for."""
        if (cause := self._error) is not None:
            raise GenerationFailedError(f"generation ended with {type(cause).__name__}: {cause}") from cause
        if self._stopped or self._thread is None:
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
        """What the thread does, for an error message: whether it is dead, blocked (and where), or well."""
        if self._thread is None or not self.alive:
            return "the generation thread does not run"
        silent = time.monotonic() - self._beat
        if silent < _BLOCKED_S:
            return "the generation thread is well"
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-4:]).rstrip() if frame is not None else "?"
        return (
            f"the generation thread has been blocked for {silent:.0f} s by code that does not await:\n{where}"
        )

    def busy_seconds(self) -> float:
        """Seconds so far in which at least one piece of work was being done."""
        return self._busy_s + (self._clock() - self._busy_since if self._in_flight else 0.0)

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(function)

    def _cancel(self) -> None:
        # Once, and not while it cleans up, which has a bound of its own.
        if self._main_task is not None and not self._cleans_up and not self._main_task.cancelling():
            self._main_task.cancel()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        error: BaseException | None = None
        runner = asyncio.Runner(loop_factory=lambda: loop)
        try:
            runner.run(self._main())
        except BaseException as end:  # SystemExit too: whoever waits for this thread must hear of its end
            error = end
        if error is not None:
            self.fail(error)
        if not self._ready.done():
            self._ready.set_exception(error or TrainingError("generation was stopped before it began"))
        with suppress(BaseException):  # waits for whatever still hangs; nobody is left to hear of it
            runner.close()

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        beating = asyncio.create_task(self._keep_beating())
        try:
            if self._stopped:
                return
            if self._start is not None:
                await self._start()
            self._ready.set_result(None)
            await self._work()
        except BaseException as error:
            self._cleans_up = True
            try:
                async with asyncio.timeout(_CLOSE_S):
                    if self._close is not None:
                        await self._close()
            except Exception as closing:  # `error` is why it ends, and the cause that counts
                logger.warning(
                    "the generator did not close after %s: %s: %s",
                    *(type(error).__name__, type(closing).__name__, closing),
                )
            raise
        finally:
            beating.cancel()

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(_BEAT_S)

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
