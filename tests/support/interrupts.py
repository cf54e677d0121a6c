"""Ctrl-C for tests of what it does to code that waits in the main thread."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupted(begun: threading.Event) -> Iterator[None]:
    """One KeyboardInterrupt in the block, once `begun` is set, by another thread.

    Also where these tests were started to ignore SIGINT, as `nohup` does. The signal is sent until it is heard: Python
    hears one that comes a moment before the main thread waits for a lock only when it has the lock.
    """
    heard = threading.Event()

    def hear(number: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def send() -> None:
        while not heard.is_set():
            if begun.wait(0.1):
                os.kill(os.getpid(), signal.SIGINT)
                heard.wait(0.1)

    before = signal.signal(signal.SIGINT, hear)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        heard.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
