"""TensorBoard event files, by TensorBoard's own writer: no torch, no TensorFlow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollstream.generation.tracking import TrackedRun
from rollstream.integrations.tracking.installed import check_installed

_FLUSH_S = 10
"""What is shown while a run goes on is at most this old."""


class TensorBoardTracker:
    """Writes scalars into `logs/tensorboard` of the run directory.

    With `TENSORBOARD_DIR` in the environment, into `<project>/<name>-<run id>` below that, so that many runs
    are shown side by side.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def check(self) -> None:
        """Raises `ConfigError` when TensorBoard is not installed."""
        check_installed("tensorboard", "trainer.logger=[tensorboard]")

    def open(self, run: TrackedRun) -> int | None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder = run.run_dir / "logs" / "tensorboard"
        if shared := os.environ.get("TENSORBOARD_DIR"):
            folder = Path(shared) / run.project / f"{run.name}-{run.run_id[:8]}"
        self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        return None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in figures.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        # Its own thread writes now and then, and keeps quiet about a full disk: so it is asked each time.
        self._writer.flush()

    def close(self, *, succeeded: bool) -> None:
        self._writer.close()

    def abandon(self) -> None:
        """Its threads are daemons."""
