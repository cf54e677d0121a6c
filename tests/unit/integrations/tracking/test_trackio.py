"""Trackio, in a database of the test's own."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytest.importorskip("trackio")

LOG = """
import sys
from pathlib import Path
from rollstream.integrations.tracking import TrackioTracker
from tests.unit.integrations.tracking.runs import run_in
tracker = TrackioTracker()
tracker.check()
last = tracker.open(run_in(Path(sys.argv[1])))
for step in sys.argv[2:]:
    tracker.log({"reward/mean": int(step) / 2, "progress/done": int(step)}, step=int(step))
tracker.close(succeeded=True)
print("LAST", last)
"""

READ = """
import orjson
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("some project")
logs = {run: SQLiteStorage.get_logs("some project", run) for run in runs}
print("FOUND", orjson.dumps(logs, default=str).decode())
"""


def python(code: str, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *words],
        env={
            "TRACKIO_DIR": str(folder / "trackio"),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_goes_on_in_the_same_run(tmp_path: Path) -> None:
    assert "LAST None" in python(LOG, tmp_path, "1", "4")
    assert "LAST 4" in python(LOG, tmp_path, "7")
    line = next(line for line in python(READ, tmp_path).splitlines() if line.startswith("FOUND "))
    runs = orjson.loads(line.removeprefix("FOUND "))
    assert list(runs) == ["an experiment-01234567"]
    points = [(one["step"], one["reward/mean"]) for one in runs["an experiment-01234567"]]
    assert points == [(1, 0.5), (4, 2.0), (7, 3.5)]
