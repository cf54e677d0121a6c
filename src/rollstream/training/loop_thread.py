"""A thread with an event loop of its own, whose end is heard of and never waited for without a bound."""

import asyncio
import concurrent.futures
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from rollstream.errors import GenerationStoppedError, TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BEAT_S = 0.5
"""Between signs of life of the loop: rare enough to cost nothing, often enough for a wait of seconds."""

_BLOCKED_S = 3.0
"""A loop without a sign of life for this long is called blocked: no well-behaved callback takes so long."""

_SWITCH_S = 5e-4
"""After which a thread gives the interpreter to one that waits for it, while this thread is there; Python's
default is ten times as long. A trainer asks for it again after every operator that it has started."""


class LoopThread:
    """Runs one coroutine, and what is submitted beside it, in a daemon thread.

    Args:
        name: of the thread.
        on_end: called in the thread with how the coroutine ended, whatever it was: None after a `stop`.
    """

    def __init__(self, name: str, *, on_end: Callable[[BaseException | None], None]) -> None:
        self._name = name
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = threading.Lock()
        self._stopping = False
        self._cleans_up = False
        self._beat = 0.0

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins `main`. It is cancelled by `stop`, and has to clean up then. Once only."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        with self._starting:
            if self._stopping:
                raise GenerationStoppedError(f"{self._name} was stopped: make a new one")
            if self._thread is not None:
                raise TrainingError(f"{self._name} was started before")
            self._beat = time.monotonic()
            self._loop = loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(main, loop), name=self._name, daemon=True)
            self._thread.start()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls `function` in the loop; nothing happens when it has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(function)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Runs a coroutine in the loop; cancelling the future cancels it.

        Raises:
            GenerationStoppedError: the thread does not run.
        """
        if self._loop is None or not self.alive or self._loop.is_closed():
            coroutine.close()
            raise GenerationStoppedError(f"{self._name} does not run")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # closed a moment ago
            coroutine.close()
            raise GenerationStoppedError(f"{self._name} has just ended") from error

    def stop(self, timeout: float) -> bool:
        """Cancels the coroutine and waits for the thread; whether it ended within `timeout` seconds.

        One that did not is left behind: it is a daemon, and keeps nobody from exiting.
        """
        with self._starting:
            self._stopping = True
        self.call_soon(self._cancel)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if self.alive:
            logger.warning(
                "%s did not end within %g s and is left behind; %s", self._name, timeout, self.describe()
            )
        return not self.alive

    def leave_alone(self) -> None:
        """Called by the coroutine when it cleans up, in a bounded time: `stop` cancels it no more."""
        self._cleans_up = True

    def describe(self) -> str:
        """What the thread does, for an error message: whether it is dead, blocked (and where), or well."""
        if self._thread is None:
            return f"{self._name} was never started"
        if not self.alive:
            return f"{self._name} has ended"
        silent = time.monotonic() - self._beat
        if silent < _BLOCKED_S:
            return f"{self._name} is well"
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-4:]).rstrip() if frame is not None else "?"
        return f"{self._name} has been blocked for {silent:.0f} s by code that does not await:\n{where}"

    def _run(self, main: Callable[[], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop) -> None:
        outcome: BaseException | None = None
        runner = asyncio.Runner(loop_factory=lambda: loop)
        try:
            runner.run(self._main(main))
        except BaseException as error:  # SystemExit too: whoever waits for this thread must hear of its end
            outcome = error
        if self._stopping and isinstance(outcome, asyncio.CancelledError):
            outcome = None
        elif outcome is None and not self._stopping:
            outcome = TrainingError(f"{self._name} ended by itself")
        self._on_end(outcome)  # before closing, which waits for whatever still hangs
        with suppress(BaseException):  # nobody is left to hear of it
            runner.close()

    async def _main(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = asyncio.current_task()
        beating = asyncio.create_task(self._keep_beating())
        try:
            if not self._stopping:
                await main()
        finally:
            beating.cancel()

    def _cancel(self) -> None:
        # Once: a second time would cut off how it cleans up.
        if self._task is not None and not self._cleans_up and not self._task.cancelling():
            self._task.cancel()

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(_BEAT_S)
