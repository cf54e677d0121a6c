"""How a program that a person or a supervisor started is told to end."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_TOGETHER_S = 0.5
"""Signals this soon after the first are the same one: wrappers signal a process and then its group."""


def stop_signals() -> asyncio.Event:
    """Set by SIGINT and SIGTERM; a second one, not right after the first, does not wait for anything."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    first_at = loop.time()

    def receive(number: int) -> None:
        nonlocal first_at
        if not stop.is_set():
            first_at = loop.time()
            stop.set()
        elif loop.time() - first_at > _TOGETHER_S:
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, number)
    return stop


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
