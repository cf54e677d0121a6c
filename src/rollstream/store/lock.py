"""One writer per run directory."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from rollstream.errors import RunDirectoryError
from rollstream.untrusted import read_regular

_PATIENCE_S = 0.3
"""`is_locked` has the lock for an instant."""

_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


_FOLDERS = (
    *("journal", "batches", "failed", "turns", "scores", "damaged", "logs", "merge.tmp"),
    *("training", "set_aside"),
)


class LockHeldError(RunDirectoryError):
    """Another process has the lock.

    Attributes:
        holder: its host and process id, for people.
    """

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class RunLock:
    """An flock on `run.lock`, released by the kernel when its process ends, however it ends.

    The file says who holds it, for the error message of the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            LockHeldError: another process has it.
            RunDirectoryError: there are no locks on this file system.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            _lock_patiently(fd)
        except BlockingIOError as error:
            os.close(fd)
            holder = lock_holder(self._path)
            raise LockHeldError(
                f"{self._path.parent} is being written by another run: {holder}. "
                "Wait for it or stop it; `rollstream status` works meanwhile.",
                holder,
            ) from error
        except OSError as error:
            os.close(fd)
            why = "its file system has no flock: " if error.errno in _NO_FLOCK else ""
            raise RunDirectoryError(f"cannot lock {self._path}: {why}{error.strerror}") from error
        holder_text = orjson.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
        with suppress(OSError):  # a full disk must not keep a run from being opened; only the message suffers
            os.ftruncate(fd, 0)
            os.pwrite(fd, holder_text, 0)
        self._fd = fd

    def release(self) -> None:
        """Gives the lock back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def run_lock(root: Path) -> RunLock:
    """The lock of a run directory, for who writes there. Raises `RunDirectoryError`: a folder of the run is a link.

    In a run that was downloaded it may lead to somebody's other run, which would be repaired as if it was this one.
    """
    if links := [name for name in _FOLDERS if (root / name).is_symlink()]:
        raise RunDirectoryError(
            f"{root}: {', '.join(links)} leads elsewhere: folders of a run must lie in it"
        )
    return RunLock(root / "run.lock")


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Holds the lock of a run directory that is there. Raises `RunDirectoryError`."""
    lock = run_lock(root)
    try:
        lock.acquire()
    except OSError as error:
        raise RunDirectoryError(f"cannot lock {root}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _lock_patiently(fd: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def lock_holder(path: Path) -> str:
    """Host and process id in a lock file, for people."""
    try:
        holder = orjson.loads(read_regular(path))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"host {holder['host']}, process {holder['pid']}, since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "holder unknown"


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock right now; False on a file system without locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(fd)
    return False
