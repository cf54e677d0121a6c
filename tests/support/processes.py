"""Processes of this machine, as tests look for them (Linux)."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path


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


def are_gone(pids: Iterable[int], within: float = 10.0) -> bool:
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
