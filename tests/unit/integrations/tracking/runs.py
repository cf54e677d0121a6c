"""A run as trackers are told of it, and a process that tells one."""

import subprocess
import sys
from pathlib import Path

from rollstream.generation.trackers import TrackedRun

RUN_ID = "0123456789abcdef" * 2


def run_in(folder: Path) -> TrackedRun:
    """A run whose directory is `folder`."""
    (folder / "logs").mkdir(exist_ok=True)
    return TrackedRun(RUN_ID, "some project", "an experiment", {"data": {"seed": 3}}, folder)


LOG = """
import sys
from pathlib import Path
from rollstream.integrations import trackers as tracking
from tests.unit.integrations.tracking.runs import run_in
tracker = getattr(tracking, sys.argv[2])()
tracker.check()
last = tracker.open(run_in(Path(sys.argv[1])))
for step in sys.argv[3:]:
    tracker.log({"reward/mean": int(step) / 2, "reward/a@b:c/mean": 1.0, "progress/done": int(step)}, step=int(step))
tracker.close(succeeded=True)
print("LAST", last)
"""
"""Its words: a folder, a class, steps."""


def python(code: str, folder: Path, *words: str, **env: str) -> str:
    """What a process of its own wrote, in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *words],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "HOME": str(folder), **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
