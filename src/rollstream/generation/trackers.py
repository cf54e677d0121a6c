"""Trackers by name: whether what they need is installed, and where they are.

Each belongs to another system and is part of `integrations`, which this room does not know. They are named
here by where they are found, and imported when a run asks for them.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rollstream.config.settings import Settings
from rollstream.errors import RunDirectoryError
from rollstream.generation.tracking import TrackedRun, Tracker
from rollstream.redaction import redact
from rollstream.store.manifest import Manifest, read_manifest

_ELSEWHERE = {
    "wandb": "rollstream.integrations.tracking.wandb:WandbTracker",
    "trackio": "rollstream.integrations.tracking.trackio:TrackioTracker",
    "tensorboard": "rollstream.integrations.tracking.tensorboard:TensorBoardTracker",
    "jsonl": "rollstream.integrations.tracking.jsonl:JsonLinesTracker",
}
"""Module and class. `console` is none of them: it is the progress line."""


UPLOADER = "wandb"
"""The tracker that takes artifacts, see `Uploader`."""


class CheckedTracker(Tracker, Protocol):
    """A tracker of ours."""

    def check(self) -> None:
        """Raises `ConfigError`, with what to do, when it could not work. Takes seconds at most."""
        ...


class Staged(str):
    """What an `Uploader` says of a file that waits on this machine until a person sends it."""


class Uploader(Protocol):
    """Takes a run's trajectories elsewhere."""

    def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        """Uploads a file; returns where it is, or what to do (`Staged`). Raises what its library raises."""
        ...

    def abandon(self) -> None:
        """See `Tracker`."""
        ...


def load_trackers(names: Iterable[str]) -> dict[str, CheckedTracker]:
    """The trackers of `trainer.logger`, not opened."""
    return {name: _load(name) for name in dict.fromkeys(names) if name in _ELSEWHERE}


def load_uploader() -> Uploader:
    """What uploads artifacts: W&B."""
    uploader: Uploader = _load(UPLOADER)
    return uploader


def tracked_run(settings: Settings, manifest: Manifest, run_dir: Path) -> TrackedRun:
    """What trackers are told of a run, by its present settings."""
    return _tracked(
        run_dir, manifest, asdict(settings), settings.trainer.project_name, settings.trainer.experiment_name
    )


def tracked_run_of(run_dir: Path) -> TrackedRun:
    """The same of a run directory. Raises `RunDirectoryError` when it is none."""
    manifest = read_manifest(run_dir)
    if manifest is None:
        raise RunDirectoryError(f"{run_dir} is not a run directory: it has no run.json")
    trainer = manifest.config.get("trainer", {})
    return _tracked(
        run_dir,
        manifest,
        manifest.config,
        str(trainer.get("project_name", "rollstream")),
        str(trainer.get("experiment_name", "generation")),
    )


def _tracked(
    run_dir: Path, manifest: Manifest, config: Mapping[str, Any], project: str, name: str
) -> TrackedRun:
    about = {
        "run_id": manifest.run_id,
        "run_dir": str(run_dir.absolute()),
        "versions": dict(manifest.versions),
    }
    return TrackedRun(manifest.run_id, project, name, {**redact(config), "rollstream": about}, run_dir)


def check_trackers(names: Iterable[str], *, upload: bool = False) -> None:
    """Refuses trackers, and an upload, that could not work, before anything is made on disk.

    Raises:
        ConfigError: with the command that installs what is missing.
    """
    for tracker in load_trackers([*names, *([UPLOADER] if upload else [])]).values():
        tracker.check()


def _load(name: str) -> Any:
    module, _, found = _ELSEWHERE[name].partition(":")
    return getattr(importlib.import_module(module), found)()
