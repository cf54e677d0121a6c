"""The generation thread: takes work as it comes, tries it until it is done or has failed, and hands it back.

    _take() -> _generate(work) -> _done(work, result, attempts)
                   |  errors that may pass: again, after a back-off
                   +-> _failed(work, error): lets it go, or ends generation by raising

It ends by `stop`, or because generation cannot go on; then everyone who waits hears why. `BatchesAhead` and
`AsyncBatchGenerator` are such threads: they say what work there is, and keep what came of it.
"""

import asyncio
import logging
import math
import random
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rollstream.daemon_threads import BLOCKED_AFTER
from rollstream.errors import GenerationFailedError, GenerationStoppedError, TrainingError
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient
from rollstream.training.timing import mean

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W")

RETRY = RetryPolicy(max_attempts=3, delay=1.0, delay_max=30.0)
"""The configuration's defaults for rollouts."""

START_S = 600.0
"""For a generator to get ready: engines that load large models take minutes."""

_CLOSE_S = 20.0
"""For a generator to release what it holds; a server that is told to end gets about as long elsewhere."""

STOP_S = _CLOSE_S + 10.0
"""For the thread to end: what is in flight is cut off first."""

_TIMES_KEPT = 100
"""Batches whose generation times are averaged: enough to be smooth, few enough to follow a change."""

_SWITCH_S = 5e-4
"""After which a thread gives the interpreter to one that waits for it, from the first such thread on; Python's
default is ten times as long. A trainer asks for it again after every operator that it has started."""


async def try_again(
    call: Callable[[], Awaitable[T]], what: str, retry: RetryPolicy, *, until: float = math.inf
) -> tuple[T, int]:
    """Calls until it succeeds; returns the result and the attempts.

    An error that may pass is tried again after a back-off; an engine that is away is charged to nobody.
    Nothing is tried again at `until` (of the monotonic clock).
    """
    attempts, waits = 1, 0
    while True:
        try:
            return await _guarded(call), attempts
        except Exception as error:
            if _is_cut_off():  # this is how it answers that
                raise
            if find_unavailable(error) is None:
                if attempts >= retry.max_attempts or not is_transient(error):
                    raise
                attempts += 1
            waits += 1
            wait = retry.wait(waits, random.Random())
            if time.monotonic() + wait >= until:
                raise
            logger.warning("%s: %s: %s; again in %.1f s", what, type(error).__name__, error, wait)
            await asyncio.sleep(wait)


async def _guarded(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, asyncio.CancelledError) and _is_cut_off():
            raise
        # It would end this task without a trace, or the event loop.
        raise RuntimeError(f"the generator let a {type(error).__name__} of its own escape") from error


def _is_cut_off() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class GenerationThread(ABC, Generic[W]):
    """Does work in an event loop of its own.

    Args:
        at_once: pieces of work at once at most; None: all that there is.
        time_limit: seconds for one piece, retries and the waits before them included; None: none.
        limit_name: the setting of that, for the message.
        retry: for errors that may pass; an engine that is away is waited for, within the limit.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        at_once: int | None,
        time_limit: float | None,
        limit_name: str,
        retry: RetryPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._at_once = at_once
        self._time_limit = time_limit
        self._limit_name = limit_name
        self._retry = retry
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())  # guards all that both threads see
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._cleans_up = False
        self._in_flight = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._room = asyncio.Event()
        self._ready: Future[None] = Future()
        self._times: deque[float] = deque(maxlen=_TIMES_KEPT)

    # --- what a kind of batches does, in this thread

    @abstractmethod
    def _take(self) -> W | None:
        """Begins the next piece of work, with the lock held; None: there is none now, `_wake` tells of more.

        Its `str` is used in messages.
        """

    @abstractmethod
    async def _generate(self, work: W) -> Any:
        """Does it; what this raises may pass (then it is tried again) or not."""

    @abstractmethod
    def _done(self, work: W, result: Any, attempts: int) -> None:
        """Takes the result, with the lock held. What this or `_failed` raises ends generation."""

    @abstractmethod
    def _failed(self, work: W, error: Exception) -> None:
        """It has failed for good; with the lock held."""

    async def _open(self) -> None:
        """Gets ready; what it raises is raised by `start`."""

    async def _close(self) -> None:
        """Comes at the end, in the task of `_open`: what that opened may be bound to it."""

    # --- for whoever waits for it, in other threads

    def stop(self, timeout: float = STOP_S) -> bool:
        """Ends generation: what is in flight is cut off, whoever waits is told. Idempotent.

        Returns:
            whether the generation thread ended within `timeout` seconds. One that hangs is left behind: it is a
            daemon, and keeps nobody from exiting.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._call_soon(self._cancel)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self.alive:
                logger.warning(
                    "generation did not end within %g s and is left behind; %s", timeout, self._describe()
                )
        return not self.alive

    @abstractmethod
    def start(self) -> None:
        """Starts the thread."""

    def __enter__(self) -> Self:
        if self._thread is None:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

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

    @property
    def alive(self) -> bool:
        """Whether the generation thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def raise_if_over(self) -> None:
        """Raises `GenerationFailedError`, with the cause, or `GenerationStoppedError` when there is nothing
        to wait for (any more).
        """
        if (cause := self._error) is not None:
            raise GenerationFailedError(f"generation ended with {type(cause).__name__}: {cause}") from cause
        if self._stopped or self._thread is None:
            raise GenerationStoppedError("generation was stopped" if self._stopped else "start() comes first")

    def get_average_generation_time(self) -> float:
        """Seconds from the beginning of a batch's generation to its end, over the last batches; 0.0 before the
        first one.
        """
        with self._changed:
            return mean(self._times)

    def _start_thread(self, timeout: float) -> None:
        """Starts, once; returns when it is ready. Raises what `_open` raises, or that it takes too long."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        with self._changed:
            if self._stopped:
                raise GenerationStoppedError("generation was stopped: make a new one")
            if self._thread is not None:
                self.raise_if_over()
                raise TrainingError("generation was started before")
            self._loop = loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name="rollstream-generation", daemon=True
            )
            self._thread.start()
        try:
            self._ready.result(timeout)
        except asyncio.CancelledError:
            self.raise_if_over()  # by `stop`, most likely
            raise
        except TimeoutError:
            if self._ready.done():
                raise
            raise TrainingError(
                f"the generator did not start within {timeout:g} s; {self._describe()}"
            ) from None

    def _wait_for(self, ready: Callable[[], T | None], timeout: float | None) -> T | None:
        """Waits until `ready` returns something else than None, and returns that; it is asked again after every change.

        Args:
            ready: called with the lock held.
            timeout: seconds, 0 to ask once; None: as long as generation goes on. What comes too late is None.

        Raises:
            GenerationFailedError, GenerationStoppedError: generation has ended.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self.raise_if_over()
                if (answer := ready()) is not None:
                    return answer
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def _describe(self) -> str:
        """Says for an error message what the thread does: where it is, if its event loop does not answer.

        Without the lock held, for which the thread may be waiting.
        """
        if self._thread is None or not self.alive:
            return "the generation thread does not run"
        answered = threading.Event()
        self._call_soon(answered.set)
        if answered.wait(BLOCKED_AFTER):
            return "the generation thread is well"
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-4:]).rstrip() if frame is not None else "?"
        return f"the generation thread is at code that blocks it:\n{where}"

    # --- for both

    @property
    def _over(self) -> bool:
        """Whether generation has ended, or is about to."""
        return self._stopped or self._error is not None

    def _fail(self, error: BaseException) -> None:
        """Generation is over: whoever waits hears of it at once. The first cause counts."""
        with self._changed:
            if not self._over:
                self._error = error
            self._changed.notify_all()

    def _wake(self) -> None:
        """There may be work again."""
        self._call_soon(self._room.set)

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(function)

    def _busy_seconds(self) -> float:
        """Seconds so far in which at least one piece of work was being done."""
        return self._busy_s + (self._clock() - self._busy_since if self._in_flight else 0.0)

    # --- in this thread

    def _cancel(self) -> None:
        # Once, and not while it cleans up, which has a bound of its own.
        if self._main_task is not None and not self._cleans_up and not self._main_task.cancelling():
            self._main_task.cancel()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        runner = asyncio.Runner(loop_factory=lambda: loop)
        try:
            runner.run(self._main())
        except BaseException as error:  # SystemExit too: whoever waits for this thread must hear of its end
            self._fail(error)
            if not self._ready.done():
                self._ready.set_exception(error)
        with suppress(BaseException):  # waits for whatever still hangs; nobody is left to hear of it
            runner.close()

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        if self._stopped:
            raise GenerationStoppedError("generation was stopped before it began")
        try:
            await self._open()
            if self._over:  # it took no notice of being cut off
                raise GenerationStoppedError("generation was stopped before it began")
            self._ready.set_result(None)
            await self._work()
        except BaseException as error:
            self._cleans_up = True
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._close()
            except BaseException as closing:  # `error` is why it ends, and the cause that counts
                logger.warning(
                    "the generator did not close after %s: %s: %s",
                    *(type(error).__name__, type(closing).__name__, closing),
                )
            raise

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
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from first.__cause__

    def _next(self) -> W | None:
        if self._at_once is not None and self._in_flight >= self._at_once:
            return None
        with self._changed:
            try:
                return None if self._over else self._take()
            except Exception as error:
                self._fail(error)  # at once: what is in flight may take long to end
                raise

    async def _one(self, work: W) -> None:
        outcome: tuple[Any, int] | Exception
        try:
            try:
                async with asyncio.timeout(self._time_limit) as limit:
                    outcome = await try_again(lambda: self._generate(work), str(work), self._retry)
            except Exception as error:
                outcome = error
                if limit.expired():
                    late = f"{work} took longer than {self._time_limit:g} s ({self._limit_name})"
                    if error.__cause__ is not None and (before := error.__cause__.__context__) is not None:
                        late += f"; the last error was {type(before).__name__}: {before}"
                    outcome = TrainingError(late)
                    outcome.__cause__ = error
            with self._changed:
                if self._over:
                    pass
                elif isinstance(outcome, Exception):
                    self._failed(work, outcome)
                else:
                    self._done(work, *outcome)
                self._changed.notify_all()
        except Exception as error:
            self._fail(error)  # at once: what is in flight may take long to end
            raise
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_s += self._clock() - self._busy_since
            self._room.set()
