"""Room on the disk of a buffer in a folder: some is kept for reads and acks, whoever fills the rest.

It is kept as a file that means nothing. Items are taken only while that file is whole and the disk has room
beyond it; everything else takes of it, piece by piece, once the disk is full. So what was acknowledged can
always be read, acked and dropped, and that makes room again.
"""

import os
from pathlib import Path
from typing import Final

FILE: Final = "buffer.reserve"

_BYTES: Final = 32 * 2**20

_SHARE: Final = 8
"""The reserve is at most this part of the disk."""

_PIECES: Final = 32


class DiskRoom:
    """The room in a folder, which exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE
        disk = os.statvfs(folder)
        self.reserve = min(_BYTES, disk.f_blocks * disk.f_frsize // _SHARE)
        """Bytes of the reserve, when it is whole."""

    def free(self) -> int:
        """Bytes that can be written beside the reserve; without end where the file system does not say."""
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else 2**62

    def is_whole(self) -> bool:
        return self._kept() >= self.reserve

    def give(self) -> bool:
        """Gives a piece of the reserve to the disk; False: there is none left."""
        kept = self._kept()
        try:
            if kept:
                os.truncate(self._path, max(0, kept - self.reserve // _PIECES - 1))
        except OSError:
            return False
        return kept > 0

    def refill(self, beside: int) -> None:
        """Makes the reserve whole where that leaves so many bytes free."""
        kept = self._kept()
        if kept >= self.reserve or self.free() - beside < self.reserve - kept:
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, kept, self.reserve - kept)
            finally:
                os.close(fd)
        except OSError:  # somebody was faster; or a quota
            return

    def _kept(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0
