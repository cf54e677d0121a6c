"""The generation thread: an event loop of its own for whatever generates, until it is stopped or fails.

When it ends, everyone who waits hears why. `BatchesAhead`, `AsyncBatchGenerator` and verl's
`SequenceGenerator` are such threads.
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
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

from rollstream.errors import (
    BatchTimeoutError,
    GenerationFailedError,
    GenerationStoppedError,
    TrainingError,
)
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient
from rollstream.training.timing import mean
from rollstream.user_calls import BLOCKED_AFTER

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY = RetryPolicy(max_attempts=3, delay=1.0, delay_max=30.0)
"""The configuration's defaults for rollouts."""

_START_S = 600.0
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
    Nothing is tried again at `until` (of the monotonic clock), nor once this task is cut off.
    """
    task, attempts, waits = asyncio.current_task(), 1, 0
    assert task is not None
    while True:
        try:
            return await call(), attempts
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            # It would end this task without a trace, or the event loop.
            raise RuntimeError(f"the generator let a {type(error).__name__} of its own escape") from error
        except Exception as error:
            attempts += (charged := find_unavailable(error) is None)
            waits += 1
            wait = retry.wait(waits, random.Random())
            hopeless = charged and (attempts > retry.max_attempts or not is_transient(error))
            if hopeless or task.cancelling() or time.monotonic() + wait >= until:
                raise
            logger.warning("%s: %s: %s; again in %.1f s", what, type(error).__name__, error, wait)
            await asyncio.sleep(wait)  # here: an error that cuts it off has this one as its context


async def try_within(
    call: Callable[[], Awaitable[T]], what: str, retry: RetryPolicy, seconds: float, setting: str
) -> tuple[T, int]:
    """Does as `try_again`, within so many seconds, by the setting of that name; infinity: no limit.

    Raises:
        TrainingError: it took longer; with the last error.
    """
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds) as limit:
            return await try_again(call, what, retry)
    except Exception as error:
        if not limit.expired():
            raise
        late = f"{what} took longer than {seconds:g} s ({setting})"
        if error.__cause__ is not None and (before := error.__cause__.__context__) is not None:
            late += f"; the last error was {type(before).__name__}: {before}"
        raise TrainingError(late) from error


class GenerationThread(ABC):
    """Generates in an event loop of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # guards all that both threads see
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task[None] | None = None  # until it cleans up
        self._ready: Future[None] = Future()
        self._times: deque[float] = deque(maxlen=_TIMES_KEPT)

    # --- a kind of batches, in this thread

    @abstractmethod
    async def _work(self) -> None:
        """Generates until it is cut off; what goes wrong beyond mending it tells `_fail`."""

    async def _open(self) -> None:
        """Gets ready; what it raises is raised by `start`."""
        return

    async def _close(self) -> None:
        """Comes at the end, in the task of `_open`: what that opened may be bound to it."""
        return

    # --- in other threads

    def start(self) -> None:
        """Starts the thread, once; returns when it is ready."""
        self._start_thread()

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
                logger.warning("generation is left behind after %g s; %s", timeout, self._describe())
        return not self.alive

    def __enter__(self) -> Self:
        if self._thread is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
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

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """Runs something else in the event loop, as a weight update; returns what it returns.

        Raises:
            BatchTimeoutError: it took longer than `timeout` seconds, and is cut off.
            GenerationFailedError, GenerationStoppedError: generation has ended meanwhile.
            Exception: its own.
        """
        with self.cause_first():
            future = self.submit(work())
            try:
                return future.result(timeout)
            except TimeoutError:
                if future.done():
                    raise
                raise BatchTimeoutError(f"not done within {timeout:g} s; {self._describe()}") from None
            finally:
                future.cancel()

    @contextmanager
    def cause_first(self) -> Iterator[None]:
        """Whatever goes wrong in it after generation has ended is raised as that end, with its cause.

        A loop that ends cancels what others have submitted, and is closed: their errors say no more than that.
        """
        self.raise_if_over()
        try:
            yield
        except Exception:  # `concurrent.futures.CancelledError` is one
            self.raise_if_over()
            raise

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
        """Seconds that the generation of a batch took, over the last batches; 0.0 before the first one."""
        with self._changed:
            return mean(self._times)

    def _start_thread(self) -> None:
        """Starts, once; returns when it is ready. Raises what `_open` raises, or that it takes too long."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        with self._changed:
            if self._thread is not None or self._stopped:
                self.raise_if_over()
                raise TrainingError("generation was started before")
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), name="rollstream-generation", daemon=True
            )
            self._thread.start()
        try:
            self._ready.result(_START_S)
        except asyncio.CancelledError:
            self.raise_if_over()  # by `stop`, most likely
            raise
        except TimeoutError:
            if self._ready.done():
                raise
            late = f"the generator did not start within {_START_S:g} s; {self._describe()}"
            raise TrainingError(late) from None

    def _wait_for(self, ready: Callable[[], T | None], timeout: float | None) -> T | None:
        """Waits until `ready`, asked with the lock held after every change, returns something else than None.

        Args:
            ready: what is waited for.
            timeout: seconds, 0 to ask once; None: as long as generation goes on. What comes too late is None.

        Raises:
            GenerationFailedError, GenerationStoppedError: generation has ended.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self.raise_if_over()
                left = None if until is None else until - time.monotonic()
                if (answer := ready()) is not None or (left is not None and left <= 0):
                    return answer
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

    # --- in both

    @property
    def _over(self) -> bool:
        """Whether generation has ended, or is about to."""
        return self._stopped or self._error is not None

    def _fail(self, error: BaseException) -> None:
        """Ends generation: whoever waits hears of it at once, before what is in flight has been cut off.

        The first cause counts.
        """
        with self._changed:
            if not self._over:
                self._error = error
            self._changed.notify_all()
        self._call_soon(self._cancel)

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(function)

    # --- in this thread

    def _cancel(self) -> None:
        if self._main_task is not None and not self._main_task.cancelling():
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
        try:
            if not self._over:
                await self._open()
            if self._over:  # before it began, or it took no notice of being cut off
                raise GenerationStoppedError("generation was stopped before it began")
            self._ready.set_result(None)
            await self._work()
        finally:
            self._main_task = None
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._close()
            except BaseException as error:  # why generation ends is the cause that counts
                logger.warning("the generator did not close: %s: %s", type(error).__name__, error)
