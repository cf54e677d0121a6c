"""Temporary folders of a process: what one that was killed left behind goes when the next one is made.

    ScratchFolder("weights") -> /tmp/rollstream-weights-k3x9q_12/  with `.owner` in it, locked
    its process dies         -> the kernel lets go of the lock
    the next "weights"       -> whoever gets that lock removes the folder

A lock, and not a process id: ids come again, and mean nothing to a container that shares the folder.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

_OWNER = ".owner"


class ScratchFolder:
    """A folder of this process, made at once; call `cleanup` when it is not needed any more.

    Args:
        kind: goes into the folder's name; folders of dead processes of the same kind, user and parent go.
        parent: where it is made; None: the machine's temporary folder.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, kind: str, parent: str | Path | None = None) -> None:
        prefix = f"rollstream-{kind}-"
        where = Path(tempfile.gettempdir() if parent is None else parent)
        _sweep(where, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        """The folder."""
        # The lock's file gets its name when it is locked: before, nobody may judge by it.
        unnamed = self.path / f"{_OWNER}.new"
        lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._remove = weakref.finalize(self, _remove, self.path, lock)
        # A file system without locks: nobody else gets one either, and the folder stays after a kill.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _OWNER)

    def cleanup(self) -> None:
        """Removes the folder with all that is in it. Idempotent, raises nothing.

        It comes by itself when nobody has this object any more, and when the process ends.
        """
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def remove_folder(folder: Path) -> None:
    """Removes a folder, as deep and as unreadable as a program may have made it. Raises nothing."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    for words in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if folder.exists():
            subprocess.run([*words, "--", str(folder)], capture_output=True, check=False)


def _remove(folder: Path, lock: int) -> None:
    remove_folder(folder)
    os.close(lock)


def _sweep(where: Path, prefix: str) -> None:
    """Removes this user's folders whose process has died. Those of others, and errors, are passed over."""
    for folder in where.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its process lives
                remove_folder(folder)
                logger.info("removed %s, of a process that has died", folder)
            finally:
                os.close(lock)
