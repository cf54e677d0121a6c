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


def test_a_file_that_takes_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rollstream"), log_to_file(tmp_path / "missing", "info"):
        for number in range(3):
            logger.info("line %d", number)
    assert caplog.text.count("going on without") == 1
    assert caplog.text.count("line ") == 3
