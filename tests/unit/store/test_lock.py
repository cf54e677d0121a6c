import errno
import fcntl
import multiprocessing
from pathlib import Path

import pytest

from rollstream.errors import RunDirectoryError
from rollstream.store.lock import LockHeldError, RunLock, is_locked


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_flock_is_named_and_has_no_holder(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.lock"
    path.write_text('{"host": "h", "pid": 1, "since": 0}')

    def refuse(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not is_locked(path)
    with pytest.raises(RunDirectoryError, match="no flock") as raised:
        RunLock(path).acquire()
    assert not isinstance(raised.value, LockHeldError)


def _acquire(path: Path, answers: "multiprocessing.Queue[str]") -> None:
    try:
        RunLock(path).acquire()
    except LockHeldError as error:
        answers.put(error.holder)


def test_another_process_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lock = RunLock(path)
    lock.acquire()
    assert is_locked(path)
    answers: multiprocessing.Queue[str] = multiprocessing.get_context("spawn").Queue()
    other = multiprocessing.get_context("spawn").Process(target=_acquire, args=(path, answers))
    other.start()
    assert "process" in answers.get(timeout=60)
    other.join()
    lock.release()
    assert not is_locked(path)
