"""A run as trackers are told of it."""

from pathlib import Path

from rollstream.generation.tracking import TrackedRun

RUN_ID = "0123456789abcdef" * 2


def run_in(folder: Path) -> TrackedRun:
    """A run whose directory is `folder`."""
    (folder / "logs").mkdir(exist_ok=True)
    return TrackedRun(RUN_ID, "some project", "an experiment", {"data": {"seed": 3}}, folder)
