"""Event files, read back by TensorBoard itself."""

from pathlib import Path

import pytest

from rollstream.integrations.trackers import TensorBoardTracker
from tests.unit.integrations.tracking.runs import run_in

pytest.importorskip("tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in tags["scalars"]}


def test_scalars_are_there_at_once_and_of_all_processes(tmp_path: Path) -> None:
    for steps in ((1, 4), (7,)):
        tracker = TensorBoardTracker()
        tracker.check()
        tracker.open(run_in(tmp_path))
        for step in steps:
            tracker.log({"reward/mean": step / 2, "progress/done": step}, step=step)
            # Whoever looks on does not wait for the end.
            assert scalars(tmp_path / "logs" / "tensorboard")["progress/done"][-1] == (step, float(step))
        tracker.close(succeeded=True)
    found = scalars(tmp_path / "logs" / "tensorboard")
    assert found["reward/mean"] == [(1, 0.5), (4, 2.0), (7, 3.5)]


def test_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "all"))
    tracker = TensorBoardTracker()
    tracker.open(run_in(tmp_path))
    tracker.log({"x": 1}, step=1)
    tracker.close(succeeded=True)
    assert scalars(tmp_path / "all" / "some project" / "an experiment-01234567") == {"x": [(1, 1.0)]}
