"""A run's figures as JSON Lines in its own folder: for scripts, and where no tracker is at hand."""

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import orjson

from rollstream.generation.tracking import TrackedRun

_TAIL_BYTES = 1 << 16
"""Read to find the last line: a line has some 2 KB."""


class JsonLinesTracker:
    """Appends a line a report to `logs/metrics.jsonl` of the run directory: `step`, `time`, the figures.

    A line is written whole and at once; a kill leaves at most a torn last line, which the next process ends.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def check(self) -> None:
        """Nothing can be missing."""

    def open(self, run: TrackedRun) -> int | None:
        path = run.run_dir / "logs" / "metrics.jsonl"
        path.parent.mkdir(exist_ok=True)
        last = _last_step(path)
        self._file = path.open("ab", buffering=0)
        if (size := self._file.tell()) and not _ends_a_line(path, size):
            self._file.write(b"\n")
        return last

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        assert self._file is not None
        line = {"step": step, "time": round(time.time(), 3), **figures}
        data = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def close(self, *, succeeded: bool) -> None:
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        """Nothing of it holds up a process."""


def _last_step(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return int(orjson.loads(line)["step"])
        except (ValueError, KeyError, TypeError):  # a torn line, or not ours
            continue
    return None


def _ends_a_line(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"
