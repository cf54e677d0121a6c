"""What `rollstream` says on standard error: for the commands that are no generation run."""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat

_PAUSES_S = (2.0, 8.0)
"""Before a person is told that a command works, and told again; then every twenty seconds."""


def log_to_stderr(*, times: bool = True) -> None:
    """Shows what is logged at INFO and above; called again, it replaces the handler of before."""
    logger = logging.getLogger("rollstream")
    handler = logging.StreamHandler(sys.stderr)
    clock = "%(asctime)s " if times else ""
    handler.setFormatter(logging.Formatter(f"{clock}%(levelname)s: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextmanager
def at_work(command: str, pauses: Iterable[float] | None = None) -> Iterator[None]:
    """Says on a terminal that a command still works, where it takes longer than a person waits without asking."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()

    def say() -> None:
        began = time.monotonic()
        for pause in chain(_PAUSES_S, repeat(20.0)) if pauses is None else pauses:
            if over.wait(pause):
                return
            sys.stderr.write(f"{command}: working … {time.monotonic() - began:.0f}s\n")

    thread = threading.Thread(target=say, name="at-work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
