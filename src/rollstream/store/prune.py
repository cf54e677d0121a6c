"""Pruning: what a run directory holds twice is dropped, when a person asks for it.

A merged run holds its trajectories in its batches and in the artifact. The artifact is checked to its last
byte; then the batches that it was made of are deleted, and it becomes a batch itself: one file under two
names. A crash in between leaves the artifact, from which the next opening takes what has no batch.
"""

from dataclasses import dataclass
from pathlib import Path

from rollstream.errors import DamageError
from rollstream.store.batch import forget_digests, open_parquet, recorded_digests
from rollstream.store.journal import sync_folder
from rollstream.store.lock import locked
from rollstream.store.manifest import require_manifest
from rollstream.store.merge import merged_batches
from rollstream.store.paths import RunPaths
from rollstream.store.recovery import recover
from rollstream.store.validate import Validation, validate_parquet


@dataclass(frozen=True, slots=True)
class Pruned:
    """What is held twice."""

    batches: list[Path]
    bytes: int
    """Of these batches."""


def prune_run(root: Path, *, dry_run: bool) -> Pruned:
    """Deletes the batches whose rollouts the artifact holds; with `dry_run` it only says which.

    Raises:
        RunDirectoryError: no run directory, or a run is writing there.
        DamageError: the artifact is damaged; nothing was deleted.
    """
    manifest = require_manifest(root)
    paths = RunPaths(root)
    with locked(root):
        if paths.artifact.exists():
            open_parquet(paths.artifact).close()  # without a footer nothing says which batches it holds
        batches = [paths.batch(number) for number in merged_batches(paths, manifest.run_id)]
        pruned = Pruned(batches, sum(path.stat().st_size for path in batches))
        if dry_run or not batches:
            return pruned
        result = Validation()
        validate_parquet(paths.artifact, manifest.run_id, recorded_digests(paths.artifact), result)
        if result.problems:
            raise DamageError(
                f"{result.problems[0]}; nothing was deleted (rollstream validate --repair {root})"
            )
        for path in batches:
            path.unlink()
        sync_folder(paths.batches)
        forget_digests(paths.batches, {path.name for path in batches})
        recover(paths, manifest)
    return pruned
