"""Calling a tool's functions such that what they do hurts nobody else.

A plain function runs in a daemon thread: one that hangs is left behind, and neither blocks the event loop nor
keeps the interpreter from exiting (the executors of the standard library join their threads at exit). An
async one runs in a task of its own, so that nothing it raises, SystemExit and CancelledError included, ends
anything but itself.
"""

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollstream import daemon_threads
from rollstream.daemon_threads import MAX_LOST, DaemonThreads, is_async

THREADS = 64
"""Calls of plain functions at once. Tools wait for the network more than they compute; some hundred rollouts
a worker call them in turn."""
CANCEL_GRACE = 1.0
"""Seconds for an async function to end once it is cancelled. Cleaning up takes milliseconds; one that goes on
is left behind."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome(daemon_threads.Outcome):
    """How a call ended."""

    timed_out: bool = False
    seconds: float = 0.0
    """How long it ran, waiting for its turn excluded."""


class CallsRefusedError(Exception):
    """Too many earlier calls still hang."""


class Calls:
    """Calls functions, plain or async. Belongs to one event loop, from its first call on."""

    def __init__(self) -> None:
        self._threads = DaemonThreads("rollstream-tool")
        self._slots = asyncio.Semaphore(THREADS)
        self._closed = False
        self._strays: set[asyncio.Task[Outcome]] = set()

    @property
    def lost(self) -> int:
        """Calls that were left behind and still run."""
        return self._threads.lost + len(self._strays)

    async def run(
        self, call: Callable[[], Any], *, seconds: float, read: Callable[[Any], Any] | None = None
    ) -> Outcome:
        """Calls a function, and awaits what it returns if that can be awaited.

        Args:
            call: What to call; a `functools.partial` of an async function counts as one.
            seconds: How long it may take, waiting for a thread excluded.
            read: Applied to what it returns, in the same place; its errors are the function's.

        Returns:
            How it ended. Raises nothing but CancelledError, when the caller is cancelled.
        """
        if is_async(call):
            return await self._run_task(call, read, seconds)
        outcome = await self._run_thread(functools.partial(_call, call, read), seconds)
        if not inspect.isawaitable(outcome.value):
            return outcome
        awaitable: Awaitable[Any] = outcome.value  # a plain function that wraps an async one
        inner = await self._run_task(lambda: awaitable, read, seconds - outcome.seconds)
        inner.seconds += outcome.seconds
        return inner

    def close(self) -> None:
        """Ends idle threads, and cancels tasks that were left behind. Waits for neither."""
        self._closed = True
        self._threads.close()
        for task in self._strays:
            task.cancel()

    async def _run_task(
        self, call: Callable[[], Awaitable[Any]], read: Callable[[Any], Any] | None, seconds: float
    ) -> Outcome:
        if refusal := self._refusal():
            return refusal
        began = time.monotonic()
        task = asyncio.create_task(_await(call, read))
        try:
            await asyncio.wait({task}, timeout=max(seconds, 0.0))
        except asyncio.CancelledError:
            await self._leave(task)
            raise
        if not task.done():
            await self._leave(task)
            return Outcome(timed_out=True, seconds=time.monotonic() - began)
        outcome = Outcome(error=asyncio.CancelledError()) if task.cancelled() else task.result()
        outcome.seconds = time.monotonic() - began
        return outcome

    async def _run_thread(self, function: Callable[[], Any], seconds: float) -> Outcome:
        async with self._slots:
            if refusal := self._refusal():
                return refusal
            began = time.monotonic()
            call = self._threads.start(function)
            try:
                done, _ = await asyncio.wait({call.future}, timeout=seconds)
            except asyncio.CancelledError:
                self._threads.abandon(call)
                raise
            if not done:
                self._threads.abandon(call)
                return Outcome(timed_out=True, seconds=time.monotonic() - began)
            ended = call.future.result()
            return Outcome(ended.value, ended.error, seconds=time.monotonic() - began)

    def _refusal(self) -> Outcome | None:
        if self._closed:
            return Outcome(error=CallsRefusedError("the tools are closed"))
        if self.lost < MAX_LOST:
            return None
        hanging = f"{self.lost} earlier tool calls still hang; no tool is called until some of them end"
        logger.error(hanging)
        return Outcome(error=CallsRefusedError(hanging))

    async def _leave(self, task: "asyncio.Task[Outcome]") -> None:
        self._strays.add(task)
        task.add_done_callback(self._strays.discard)
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE)


async def _await(call: Callable[[], Awaitable[Any]], read: Callable[[Any], Any] | None) -> Outcome:
    try:
        value = await call()
        return Outcome(value=read(value) if read else value)
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: they would end the event loop
        return Outcome(error=error)


def _call(call: Callable[[], Any], read: Callable[[Any], Any] | None) -> Any:
    value = call()
    return read(value) if read and not inspect.isawaitable(value) else value
