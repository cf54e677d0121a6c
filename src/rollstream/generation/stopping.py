"""How a run is stopped by a person or a scheduler."""

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")

TOGETHER_S = 0.5
"""Seconds. Signals that come this soon after the first are the same one: `timeout` and other wrappers signal
the process and then its whole group. Nobody presses Ctrl-C twice that fast."""


class StoppedEarly(Exception):
    """A stop was asked for in a phase that has nothing to finish: setting up, merging."""


class StopSignals:
    """SIGINT and SIGTERM as an event; a second signal, not right after the first, calls `on_second` at once.

    Only the outermost program may take over signals: the command line installs them, a run that is
    embedded in another program has one that never fires.
    """

    def __init__(self, on_second: Callable[[int], None] | None = None) -> None:
        self._on_second = on_second
        self.requested = asyncio.Event()
        self.signal: int | None = None
        """The first signal received."""
        self._first_at = 0.0

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM of the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at = number, now
            self.requested.set()
        elif self._on_second is not None and now - self._first_at > TOGETHER_S:
            self._on_second(self.signal)

    async def unless_stopped(self, work: Awaitable[_T]) -> _T:
        """Awaits `work`, or raises `StoppedEarly` as soon as a stop is asked for."""
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StoppedEarly
            return task.result()
        finally:
            waiter.cancel()
            task.cancel()


async def in_daemon_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Runs a function off the event loop, in a thread that never keeps the process from ending.

    (`asyncio.to_thread` would: the loop waits for its threads when it closes.)
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, caught = None, None
        try:
            result = function(*arguments)
        except BaseException as error:
            caught = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, caught)

    threading.Thread(target=run, name="rollstream-work", daemon=True).start()
    return await future
