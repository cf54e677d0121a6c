"""SwanLab, offline and without a log-in."""

import re
import sys
from pathlib import Path

import pytest

from tests.unit.integrations.tracking.runs import LOG, RUN_ID, python

pytest.importorskip("swanlab")


def test_a_process_leaves_the_figures_and_nothing_of_itself(tmp_path: Path) -> None:
    python(LOG, tmp_path, "SwanlabTracker", "1", "4", SWANLAB_MODE="offline", SECRET="s3cr3t-word")
    (folder,) = (tmp_path / "logs" / "swanlab").glob("run-*")
    kept = (folder / f"run-{RUN_ID}.swanlab").read_bytes()
    assert b"reward/mean" in kept and b"an experiment" in kept and b"some-project" in kept
    assert "seed" in (folder / "files" / "config.yaml").read_text()
    whole = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert not re.search(rb"s3cr3t-word|SwanlabTracker|" + sys.executable.encode(), whole)


def test_without_a_log_in_it_says_so_and_asks_for_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no API key was provided"):
        python(LOG, tmp_path, "SwanlabTracker", "1")
