"""`rollstream export`: a run directory's trajectories in another format."""

import os
import shutil
from pathlib import Path

from rollstream.errors import RunDirectoryError, StorageError
from rollstream.store.export.jsonl import artifact_rows, export_jsonl
from rollstream.store.lock import RunLock
from rollstream.store.manifest import read_manifest
from rollstream.store.merge import merge_batches
from rollstream.store.run_dir import RunPaths


def export_run(root: Path, name: str, output: Path | None) -> tuple[Path, int]:
    """Merges what is sealed and writes it as `parquet` or `jsonl`; returns the file and its rows.

    Works on unfinished runs too: rollouts that are in no batch yet are not in the export.

    Raises:
        RunDirectoryError: no run directory, nothing sealed in it, or a run is writing there.
        DamageError: a batch is damaged.
        StorageError: the disk is full.
    """
    manifest = read_manifest(root)
    if manifest is None:
        raise RunDirectoryError(f"{root} is not a run directory: it has no run.json")
    paths = RunPaths(root)
    if not paths.batch_numbers():
        raise RunDirectoryError(f"{root} has no sealed batch yet; run `rollstream generate` to its end first")
    lock = RunLock(root / "run.lock")
    lock.acquire()
    try:
        merge_batches(paths, manifest.run_id_bytes)
    finally:
        lock.release()
    target = output or root / f"trajectories.{name}"
    try:
        if name == "jsonl":
            return target, export_jsonl(paths.artifact, target)
        if target.resolve() != paths.artifact.resolve():
            temporary = target.with_name(target.name + ".tmp")
            try:
                shutil.copyfile(paths.artifact, temporary)
                os.replace(temporary, target)  # noqa: PTH105
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror}") from error
    return target, artifact_rows(paths.artifact)
