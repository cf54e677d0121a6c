"""Calling functions of the user's, plain or async, such that one that hangs hurts itself only.

A plain function runs in a daemon thread, an async one on an event loop of its own in such a thread. Neither
blocks the caller's event loop nor keeps the interpreter from exiting, which is why the executors of the
standard library won't do: they join their threads at exit.
"""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rollstream.daemon_threads import MAX_LOST, DaemonThreads, Outcome, is_async

STUCK_AFTER = 1.0
"""Seconds without an answer after which an event loop counts as blocked. A healthy one answers in
milliseconds; async code that computes for a second between two awaits does not belong on a loop."""


class CallsRefusedError(Exception):
    """It was not called: all is closed, or too many earlier calls still hang."""


class UserCalls:
    """Calls functions, so many at once. Belongs to one event loop.

    A call that takes longer than its time is abandoned: its place is free at once. A thread ends when its
    function returns, if ever; an async function is cancelled, and where it blocks its event loop, later calls
    get a new one. After `MAX_LOST` calls that hang at the same time no more are made.

    Args:
        name: Of the threads, for debuggers.
        limit: Calls at once, > 0.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._slots = asyncio.Semaphore(limit)
        self._threads = DaemonThreads(name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked: list[threading.Thread] = []
        self._closed = False

    @property
    def lost(self) -> int:
        """Abandoned calls that still run, and event loops that calls block."""
        self._blocked = [thread for thread in self._blocked if thread.is_alive()]
        return self._threads.lost + len(self._blocked)

    async def run(self, function: Callable[[], Any], seconds: float) -> Outcome:
        """Calls `function`, and awaits what it returns if that can be awaited.

        Args:
            function: What to call; a `functools.partial` of an async function counts as one.
            seconds: How long it may take, from when it is its turn.

        Raises:
            TimeoutError: It took longer.
            CallsRefusedError: It was not called.
        """
        async with self._slots:
            if self._closed:
                raise CallsRefusedError("closed")
            if (lost := self.lost) >= MAX_LOST:
                raise CallsRefusedError(f"{lost} earlier calls still hang; no more are made")
            if is_async(function):
                return await self._on_loop(function, seconds)
            began = time.monotonic()
            call = self._threads.start(function)
            try:
                async with asyncio.timeout(seconds):
                    outcome = await call.future
            except (TimeoutError, asyncio.CancelledError):
                self._threads.abandon(call)
                raise
            if not inspect.isawaitable(outcome.value):
                return outcome
            awaitable: Awaitable[Any] = outcome.value  # a plain callable that wraps an async one
            return await self._on_loop(lambda: awaitable, seconds - (time.monotonic() - began))

    def close(self) -> None:
        """Cancels what is async and ends the threads, each when its call returns. Waits for nothing."""
        self._closed = True
        self._threads.close()
        if self._loop is not None:
            _stop(self._loop)

    async def _on_loop(self, function: Callable[[], Awaitable[Any]], seconds: float) -> Outcome:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        loop, thread = self._loop, self._thread
        try:
            async with asyncio.timeout(seconds):
                outcome: Outcome = await _submit(_collect(function), loop)
                return outcome
        except TimeoutError:
            try:
                async with asyncio.timeout(STUCK_AFTER):
                    await _submit(asyncio.sleep(0), loop)
            except TimeoutError:
                if self._loop is loop:
                    self._loop = None
                    self._blocked.append(thread)
                    _stop(loop)  # should it ever wake up
            raise


def _submit(work: Any, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[Any]":
    try:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    except RuntimeError as error:
        work.close()
        raise CallsRefusedError("closed") from error


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop until it is stopped, then cancels what is left."""
    asyncio.set_event_loop(loop)
    try:
        while True:
            try:
                loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets one that a task raises end the loop, besides giving it to whoever awaits the
                # task: other calls would wait for their timeouts.
                continue
        loop.run_until_complete(
            asyncio.sleep(0)
        )  # calls that came just before the end begin, to be cancelled
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _collect(function: Callable[[], Awaitable[Any]]) -> Outcome:
    try:
        return Outcome(value=await function())
    except BaseException as error:  # SystemExit, too, which would end the loop
        return Outcome(error=error)
