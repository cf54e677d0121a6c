"""Processes of this machine, as tests look for them (Linux)."""

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.support.until import PATIENCE_S


@contextlib.contextmanager
def full_disk(after: int) -> Iterator[None]:
    """This process cannot make a file longer than so many bytes (EFBIG: Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def command_line(pid: int) -> str:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def running(word: str) -> list[int]:
    """Processes, other than this one, with a word in their command lines."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and word in command_line(pid)]


def is_running(pid: int) -> bool:
    """Also not one that has ended and that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def are_gone(pids: Iterable[int], within: float = PATIENCE_S) -> bool:
    """Whether processes have ended; waits for that."""
    return holds_within(within, lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def holds_within(seconds: float, check: Callable[[], bool]) -> bool:
    """Whether a check holds; waits for that."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
