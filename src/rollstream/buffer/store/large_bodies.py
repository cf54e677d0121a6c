"""Large bodies, in files beside the database that are only appended to: each is written once.

A row says where a body lies. Whatever ends the process or the machine, and when:

1. Rows that are committed name bytes that were synced before.
2. Bytes that such a row may name are never written again. A file with bytes of a transaction that failed, or of
   an earlier process, is not appended to.
3. A file is deleted only once no committed row names it.

A file that is full, or has been left, waits until the last of its bodies is deleted.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rollstream.store.journal import sync_folder

_FILE_BYTES: Final = 16 * 2**20
"""A file of this size is not appended to: a body that stays long keeps no more of the disk."""

_VECTORS: Final = 512
"""Bodies in one call of the system, which takes 1024."""


class Place(NamedTuple):
    """The part of a file that is a body."""

    file: int
    at: int
    size: int


class LargeBodies:
    """The files of a folder, which is made with the first of them. One writer; others may read beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[int, int] = {}
        self._last = 0
        self._fd = -1
        self._synced = True
        self._kept = 0
        """Bytes of the open file that committed rows may name."""

    def open(self, named: Iterable[int]) -> None:
        """Begins to write beside the files that rows name, and deletes all others."""
        named = set(named)
        here = {int(path.name): path for path in self._folder.glob("[0-9]*")} if self._folder.is_dir() else {}
        for number, path in here.items():
            if number in named:
                self._sizes[number] = path.stat().st_size
            else:
                path.unlink()
        self._last = max(named | here.keys(), default=0)

    def size(self) -> int:
        """Bytes of all files."""
        if self._sizes:
            return sum(self._sizes.values())
        size = 0
        for path in self._folder.glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError):  # its server has just deleted it
                size += path.stat().st_size
        return size

    def append(self, bodies: Sequence[bytes]) -> list[Place]:
        """Writes bodies; `sync` makes them durable."""
        if self._fd < 0:
            self._begin()
        at, places = self._sizes[self._last], []
        for body in bodies:
            places.append(Place(self._last, at, len(body)))
            at += len(body)
        self._synced = False
        for start in range(0, len(bodies), _VECTORS):
            self._write([memoryview(body) for body in bodies[start : start + _VECTORS]])
        return places

    def _begin(self) -> None:
        if not self._folder.is_dir():
            self._folder.mkdir()
            sync_folder(self._folder.parent)
        number = self._last + 1
        self._fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._last = number
        self._sizes[number] = 0
        sync_folder(self._folder)

    def _write(self, parts: list[memoryview]) -> None:
        while parts:
            written = os.writev(self._fd, parts)
            self._sizes[self._last] += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]

    def sync(self) -> None:
        """Makes what was appended durable: before the rows are committed that name it."""
        if not self._synced:
            os.fdatasync(self._fd)
            self._synced = True

    def keep(self) -> None:
        """The rows are committed."""
        if self._fd >= 0:
            self._kept = self._sizes[self._last]
            if self._kept >= _FILE_BYTES:
                self.leave()

    def undo(self) -> None:
        """The transaction failed before its commit: nothing names what was appended since the last one."""
        if self._fd >= 0 and self._sizes[self._last] > self._kept:
            kept = self._kept
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, kept)
                self._sizes[self._last] = kept
            self.leave()
            if not kept:
                self.delete(self._last)

    def leave(self) -> None:
        """Appends no more to the file that is open: it is full, or whether a commit was done is not known."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._synced, self._kept = -1, True, 0

    def delete(self, number: int) -> None:
        """Deletes a file, which no row names any more."""
        if number == self._last:
            self.leave()
        self._path(number).unlink(missing_ok=True)
        self._sizes.pop(number, None)

    def read(self, places: Mapping[int, Place]) -> dict[int, bytes]:
        """Bodies by the number of their row, without those whose file is gone. A damaged one is shorter, or other."""
        found: dict[int, bytes] = {}
        for file in {place.file for place in places.values()}:
            try:
                fd = os.open(self._path(file), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                found |= {
                    row: _read(fd, place.at, place.size)
                    for row, place in places.items()
                    if place.file == file
                }
            finally:
                os.close(fd)
        return found

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}"


def _read(fd: int, at: int, size: int) -> bytes:
    try:
        return os.pread(fd, size, at)
    except OSError:  # a bad place of the disk
        return b""
