"""Trackio, in a database of the test's own."""

from pathlib import Path

import orjson
import pytest

from tests.unit.integrations.tracking.runs import LOG, python

pytest.importorskip("trackio")

READ = """
import orjson
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("some project")
logs = {run: SQLiteStorage.get_logs("some project", run) for run in runs}
print("FOUND", orjson.dumps(logs, default=str).decode())
"""


def test_a_second_process_goes_on_in_the_same_run(tmp_path: Path) -> None:
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    assert "LAST None" in python(LOG, tmp_path, "TrackioTracker", "1", "4", **env)
    assert "LAST 4" in python(LOG, tmp_path, "TrackioTracker", "7", **env)
    line = next(line for line in python(READ, tmp_path, **env).splitlines() if line.startswith("FOUND "))
    runs = orjson.loads(line.removeprefix("FOUND "))
    assert list(runs) == ["an experiment-01234567"]
    points = [(one["step"], one["reward/mean"]) for one in runs["an experiment-01234567"]]
    assert points == [(1, 0.5), (4, 2.0), (7, 3.5)]
