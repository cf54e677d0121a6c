"""Calling functions of the user's off the event loop, such that one that hangs hurts itself only.

`BoundedThreads` is for plain functions, `LoopThread` for async ones. Neither keeps the interpreter from
exiting, which is why the executors of the standard library won't do: they join their threads at exit.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rollstream.daemon_threads import MAX_LOST, DaemonThreads, Outcome, deliver
from rollstream.errors import RewardError

STUCK_AFTER = 1.0
"""Seconds without an answer after which an event loop counts as blocked. A healthy one answers in
milliseconds; async code that computes for a second between two awaits does not belong on a loop."""


class BoundedThreads:
    """Runs plain functions in daemon threads, so many at once.

    A call that takes longer than its timeout is abandoned: its slot is free at once, its thread ends when the
    function returns, if ever. Belongs to one event loop.

    Args:
        limit: Calls at once, > 0.
        name: Of the threads, for debuggers.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._threads = DaemonThreads(name)
        self._closed = False

    @property
    def lost(self) -> int:
        """Abandoned calls that still run."""
        return self._threads.lost

    async def run(self, function: Callable[[], Any], timeout: float) -> Outcome:
        """Calls `function` in a thread.

        Args:
            function: What to call.
            timeout: Seconds, counted from when it is its turn.

        Raises:
            TimeoutError: It took longer.
            RewardError: Closed, or `MAX_LOST` calls hang.
        """
        async with self._slots:
            if self._closed:
                raise RewardError("the reward is closed")
            if self.lost >= MAX_LOST:
                raise RewardError(f"{self.lost} earlier calls still hang; the reward is not called any more")
            call = self._threads.start(function)
            try:
                async with asyncio.timeout(timeout):
                    return await call.future
            except (TimeoutError, asyncio.CancelledError):
                self._threads.abandon(call)
                raise

    def close(self) -> None:
        """Ends the threads, each when its call returns. Waits for none."""
        self._closed = True
        self._threads.close()


class LoopThread:
    """Runs async functions on an event loop of their own, in a daemon thread.

    A call that takes longer than its timeout is cancelled. When the loop does not even answer then, a
    function is blocking it: later calls get a new loop, those on the old one run into their timeouts.
    Belongs to one event loop, besides its own.

    Args:
        limit: Calls at once, > 0.
        name: Of the thread, for debuggers.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._replaced = 0
        self._closed = False

    async def run(self, function: Callable[[], Awaitable[Any]], timeout: float) -> Outcome:
        """Calls and awaits `function` on the loop.

        Args:
            function: What to call.
            timeout: Seconds, counted from when it is its turn.

        Raises:
            TimeoutError: It took longer.
            RewardError: Closed, or `MAX_LOST` loops were blocked.
        """
        async with self._slots:
            here = asyncio.get_running_loop()
            theirs = self._running_loop()
            future: asyncio.Future[Outcome] = here.create_future()
            tasks: list[asyncio.Task[Outcome]] = []

            def begin() -> None:
                task = theirs.create_task(_collect(function))
                task.add_done_callback(lambda task: deliver(here, future, _ended(task)))
                tasks.append(task)

            _call_soon(theirs, begin)
            try:
                async with asyncio.timeout(timeout):
                    return await future
            except (TimeoutError, asyncio.CancelledError) as error:
                _call_soon(theirs, lambda: tasks[0].cancel())
                if isinstance(error, TimeoutError):
                    await self._replace_if_stuck(theirs)
                raise

    def close(self) -> None:
        """Cancels what runs and ends the thread. Waits for nothing."""
        self._closed = True
        if self._loop is not None:
            _call_soon(self._loop, self._loop.stop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise RewardError("the reward is closed")
        if self._loop is None:
            if self._replaced >= MAX_LOST:
                raise RewardError(
                    f"the reward blocked its event loop {self._replaced} times; it is not called any more"
                )
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True).start()
        return self._loop

    async def _replace_if_stuck(self, theirs: asyncio.AbstractEventLoop) -> None:
        here = asyncio.get_running_loop()
        answer: asyncio.Future[Outcome] = here.create_future()
        _call_soon(theirs, lambda: deliver(here, answer, Outcome()))
        try:
            async with asyncio.timeout(STUCK_AFTER):
                await answer
        except TimeoutError:
            if self._loop is theirs:
                self._loop = None
                self._replaced += 1
                _call_soon(theirs, theirs.stop)  # should it ever wake up


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        _run_forever(loop)
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


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Runs it until it is stopped, whatever tasks raise that a function of the user's started.

    asyncio lets SystemExit and KeyboardInterrupt of a task end the loop, besides giving them to whoever
    awaits the task: other calls would wait for their timeouts.
    """
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue
        return


async def _collect(function: Callable[[], Awaitable[Any]]) -> Outcome:
    try:
        return Outcome(value=await function())
    except BaseException as error:  # SystemExit, too, which would end the loop
        return Outcome(error=error)


def _ended(task: "asyncio.Task[Outcome]") -> Outcome:
    return Outcome(error=asyncio.CancelledError()) if task.cancelled() else task.result()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(function)
