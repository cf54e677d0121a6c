"""How a program is told to end by the person or the supervisor that started it."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

_T = TypeVar("_T")

TOGETHER_S = 0.5
"""Seconds. Signals that come this soon after the first are the same one: `timeout` and other wrappers signal
the process and then its whole group. Nobody presses Ctrl-C twice that fast."""


class StoppedEarly(Exception):
    """A stop was asked for in a phase that has nothing to finish: setting up, merging."""


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as an event; a second signal, not right after the first, calls `on_second` at once.

    SIGHUP, which a terminal sends when it is closed, stays ignored where `nohup` ignores it.

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
        """Takes over the signals of the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
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


def stop_signals() -> asyncio.Event:
    """Set by SIGINT, SIGTERM and SIGHUP; a second one ends the process at once."""
    signals = StopSignals(on_second=lambda number: os._exit(128 + number))
    signals.install()
    return signals.requested


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """In it SIGTERM raises `SystemExit(143)` in the main thread, so `finally` runs; a second one kills.

    Where somebody else handles the signal, and in other threads than the main one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
