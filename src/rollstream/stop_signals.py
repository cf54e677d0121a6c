"""How a program is told to end by the person or the supervisor that started it."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

_T = TypeVar("_T")

TOGETHER_S = 0.5
"""Seconds. Signals that come this soon after the first are the same one: `timeout` and other wrappers signal
the process and then its whole group. Nobody presses Ctrl-C twice that fast."""

_EXIT_S = 10.0
"""A server that has not ended so long after its grace period is ended as it is: what it acknowledged is on disk."""


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
        self._bound_since: float | None = None

    def install(self, *, ends_within: float | None = None) -> None:
        """Takes over the signals of the running event loop.

        Args:
            ends_within: seconds after the first signal in which the process ends, if need be by SIGALRM, which
                waits for nobody: neither for who holds the loop or Python's lock, nor for a thread that hangs.
                A second signal ends it at once. None: only `requested` and `on_second` tell of signals.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, self._receive, number)
            if ends_within is not None:
                # In place of a handler that does nothing: the loop gets the signal by a file descriptor.
                signal.signal(number, partial(self._bound, ends_within))
                signal.siginterrupt(number, False)

    def _bound(self, ends_within: float, number: int, frame: object) -> None:
        """Runs between two steps of the main thread, whatever it is at."""
        now = time.monotonic()
        if self._bound_since is None:
            self._bound_since = now
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, ends_within)
        elif now - self._bound_since > TOGETHER_S:
            os._exit(128 + number)

    def take_time(self) -> None:
        """Lifts the bound: what is left to do has an end. A second signal still ends the process at once."""
        signal.setitimer(signal.ITIMER_REAL, 0)

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


def stop_signals(grace_s: float) -> StopSignals:
    """Signals of a server that ends in good order within `grace_s`; if it does not, it is ended soon after."""
    signals = StopSignals()
    signals.install(ends_within=grace_s + _EXIT_S)
    return signals


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
