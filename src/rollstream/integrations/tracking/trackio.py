"""Trackio: tracking in a database of one's own, by `TRACKIO_DIR`; or a Space, as its environment says."""

from collections.abc import Mapping
from typing import Any

from rollstream.generation.tracking import TrackedRun
from rollstream.integrations.tracking.installed import check_installed


class TrackioTracker:
    """A run of the project `trainer.project_name`, named after the experiment and the run's id."""

    def __init__(self) -> None:
        self._run: Any = None

    def check(self) -> None:
        """Raises `ConfigError` when Trackio is not installed."""
        check_installed("trackio", "trainer.logger=[trackio]")

    def open(self, run: TrackedRun) -> int | None:
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id[:8]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # That it goes on after the last step of a resumed run is known to it alone.
        following = getattr(self._run, "_next_step", None)
        return following - 1 if isinstance(following, int) and following > 0 else None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, *, succeeded: bool) -> None:
        self._run.finish()

    def abandon(self) -> None:
        """Its threads are daemons, and its own end is bounded."""
