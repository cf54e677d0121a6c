"""Large bodies, in files beside the database that are only appended to: each is written once.

A row says where a body lies. Whatever ends the process or the machine, and when:

1. Rows that are committed name bytes that were synced before.
2. Bytes that such a row may name are never written again. A file of which a transaction failed, or of an earlier
   process, is not appended to.
3. A file is deleted only once no committed row names it.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rollstream.store.journal import sync_folder


class BodyPlace(NamedTuple):
    """The part of a file that is a body."""

    file: int
    at: int
    size: int


class LargeBodies:
    """The files of a folder, which is made with the first of them.

    One thread of one server writes; `read` and `size` may be called beside it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_bytes = 0
        self._named: Counter[int] = Counter()
        """Bodies by file that committed rows name."""
        self._changed: Counter[int] = Counter()
        """By how much the transaction that is under way changes these."""
        self._unnamed: list[Path] = []
        self._fd = -1
        self._last = 0
        """The number of the newest file, which is the open one if there is one."""
        self._end = self._kept = 0
        """Bytes of the open file, and those of them that committed rows may name."""

    def open(self, named: Mapping[int, int], file_bytes: int) -> None:
        """Begins to write beside the files that rows name. A file of `file_bytes` is not appended to."""
        self._named, self._file_bytes = Counter(named), file_bytes
        here = {int(path.name): path for path in self._files()}
        self._unnamed = [path for number, path in here.items() if number not in named]
        self._last = max(named.keys() | here.keys(), default=0)

    def delete_unnamed(self) -> None:
        """Deletes the files that no row named when the folder was opened."""
        while self._unnamed:
            self._unnamed.pop().unlink(missing_ok=True)

    def close(self) -> None:
        """Appends no more to the file that is open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._end, self._kept = -1, 0, 0

    def append(self, body: bytes) -> BodyPlace:
        """Writes a body; `sync` makes it durable."""
        if self._fd < 0:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._last += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._path(self._last), flags, 0o600)
        place, rest = BodyPlace(self._last, self._end, len(body)), memoryview(body)
        while rest:
            written = os.write(self._fd, rest)
            self._end += written
            rest = rest[written:]
        self._changed[place.file] += 1
        return place

    def forget(self, file: int) -> None:
        """Notes that the transaction deletes a row that names this file."""
        self._changed[file] -= 1

    def sync(self) -> None:
        """Makes what was appended durable, before the rows are committed that name it."""
        if self._end > self._kept:
            os.fdatasync(self._fd)
            if not self._kept:
                sync_folder(self._folder)
                sync_folder(self._folder.parent)

    def keep(self) -> None:
        """Takes note that the transaction is committed; deletes the files that no row names any more."""
        self._kept = self._end
        self._named.update(self._changed)
        for file in self._changed:
            if not self._named[file]:
                if file == self._last:
                    self.close()
                with contextlib.suppress(OSError):  # what stays is deleted after the next opening
                    self._path(file).unlink()
        self._changed.clear()
        if self._end >= self._file_bytes:
            self.close()

    def undo(self, *, cut: bool) -> None:
        """Takes note that the transaction failed; with `cut` certainly no row names what it appended."""
        self._changed.clear()
        if self._end > self._kept:
            if cut:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._kept)
                    if not self._kept:
                        self._path(self._last).unlink()
            self.close()

    def read(self, place: BodyPlace) -> bytes | None:
        """Returns a body, or None where its file is gone. A damaged one is shorter, or other."""
        try:
            with self._path(place.file).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), place.size, place.at)
        except FileNotFoundError:
            return None
        except OSError:  # a bad place of the disk
            return b""

    def size(self) -> int:
        """Bytes of all files."""
        size = 0
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):  # its server has just deleted it
                size += path.stat().st_size
        return size

    def _files(self) -> list[Path]:
        return list(self._folder.glob("[0-9]" * 12))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}"
