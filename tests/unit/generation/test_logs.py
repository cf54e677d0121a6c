"""Log files: one per attempt, and a run goes on without one that takes nothing."""

import logging
from pathlib import Path

import pytest

from rollstream.generation.logs import log_to_file

logger = logging.getLogger("rollstream.test")


def test_one_file_per_attempt(tmp_path: Path) -> None:
    with log_to_file(tmp_path, "info") as path:
        logger.info("here")
        logger.debug("not here")
    logger.warning("not here either")
    assert path.read_text().endswith("INFO rollstream.test: here\n")


@pytest.mark.parametrize("where", ["full", "nowhere"])
def test_a_file_that_takes_nothing_is_said_once(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger("rollstream")
    root.addHandler(listener)
    folder = tmp_path
    if where == "nowhere":
        folder = tmp_path / "missing"
    else:
        monkeypatch.setattr("time.strftime", lambda *_: "x")
        monkeypatch.setattr("os.getpid", lambda: 1)
        (tmp_path / "attempt-x-1.log").symlink_to("/dev/full")
    try:
        with log_to_file(folder, "info"):
            for number in range(3):
                logger.info("line %d", number)
    finally:
        root.removeHandler(listener)
    assert [line for line in said if "log file" in line] == [line for line in said if "line" not in line]
    assert sum("going on without" in line for line in said) == 1
    assert [line for line in said if line.startswith("line")] == ["line 0", "line 1", "line 2"]
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
