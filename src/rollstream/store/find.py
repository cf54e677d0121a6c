"""Finding one trajectory in a run directory, wherever it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.batch import build_table, read_keys, read_tables
from rollstream.store.export.jsonl import decode_row
from rollstream.store.journal import ScanReport, scan
from rollstream.store.manifest import DATASET_IDENTITY, Manifest, read_manifest
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """One trajectory, as a row with its JSON columns decoded, and where it was."""

    row: dict[str, Any]
    source: str
    siblings: int
    """Trajectories of its rollout."""
    manifest: Manifest


def find_trajectory(
    root: Path, index: int | None, repeat: int = 0, trajectory: int | None = None
) -> FoundTrajectory:
    """One trajectory of a run, sealed or not; by default the first rollout's final one.

    Raises:
        RunDirectoryError: no run, or no such rollout in it.
        DamageError: the file that holds it, or may hold it, is damaged.
    """
    manifest = read_manifest(root)
    if manifest is None:
        raise RunDirectoryError(f"{root} is not a run directory: it has no run.json")
    paths = RunPaths(root)
    damaged: list[str] = []
    journals = paths.journal_numbers()  # before the batches: one sealed meanwhile is then seen as batch
    for path in map(paths.batch, paths.batch_numbers()):
        try:
            found = _in_batch(path, index, repeat, trajectory, manifest)
        except DamagedKeysError:
            damaged.append(f"batches/{path.name}")
            continue
        if found is not None:
            return found
    for number in journals:
        path, report = paths.journal(number), ScanReport()
        try:
            found = _in_journal(path, report, index, repeat, trajectory, manifest)
        except FileNotFoundError:  # sealed since we listed it
            found = _in_batch(paths.batch(number), index, repeat, trajectory, manifest)
        if found is not None:
            return found
        if report.damage:
            damaged.append(f"journal/{path.name}")
    if damaged:
        wanted = (
            "no rollout was found"
            if index is None
            else f"rollout (index {index}, repeat {repeat}) was not found"
        )
        raise DamageError(
            f"{wanted}, but {', '.join(damaged)} cannot be read: damaged. The same `rollstream generate` "
            "keeps it aside and generates its rollouts again"
        )
    if index is None:
        raise RunDirectoryError(f"{root} holds no finished rollout yet")
    raise RunDirectoryError(
        f"rollout (index {index}, repeat {repeat}) is not in {root}: "
        + _why_missing(paths, manifest, index, repeat)
    )


class DamagedKeysError(DamageError):
    """The keys of a batch cannot be read, so that nobody knows what is in it."""


def _in_batch(
    path: Path, index: int | None, repeat: int, trajectory: int | None, manifest: Manifest
) -> FoundTrajectory | None:
    try:
        keys = read_keys(path)
    except DamageError as error:
        raise DamagedKeysError(str(error)) from error
    hits = _hits(keys.index, keys.repeat, index, repeat)
    if not len(hits):
        return None
    at = _choose(hits, trajectory, index, repeat)
    for table in read_tables(path):
        if at < len(table):
            row = decode_row(table.slice(at, 1).to_pylist()[0], path)
            return FoundTrajectory(row, f"batches/{path.name}", len(hits), manifest)
        at -= len(table)
    raise DamagedKeysError(f"{path.name} has fewer rows than keys")


def _in_journal(
    path: Path,
    report: ScanReport,
    index: int | None,
    repeat: int,
    trajectory: int | None,
    manifest: Manifest,
) -> FoundTrajectory | None:
    for frame in scan(path, manifest.run_id_bytes, report):
        if index is None or (frame.index, frame.repeat) == (index, repeat):
            try:
                rows = build_table([RecordCodec().decode_rollout(frame.body)]).to_pylist()
            except ValueError as error:
                raise DamageError(f"{path.name}: frame at offset {frame.offset}: {error}") from error
            at = _choose(np.arange(len(rows)), trajectory, index, repeat)
            return FoundTrajectory(decode_row(rows[at], path), f"journal/{path.name}", len(rows), manifest)
    return None


def _why_missing(paths: RunPaths, manifest: Manifest, index: int, repeat: int) -> str:
    """What is known about a rollout that is not there."""
    rows = manifest.identity.get(f"{DATASET_IDENTITY}.count")
    if index < 0 or (isinstance(rows, int) and index >= rows):
        return "prompt rows are numbered from 0" + (f" to {rows - 1}" if isinstance(rows, int) else "")
    if not 0 <= repeat < manifest.n:
        return f"a prompt row has {manifest.n} rollouts, repeats 0 to {manifest.n - 1}"
    error = None
    for path in paths.failure_files():
        for frame in scan(path, manifest.run_id_bytes, ScanReport()):
            if (frame.index, frame.repeat) == (index, repeat):
                error = RecordCodec().decode_failure(frame.body).error
    if error is not None:
        return f"it failed: {error}"
    return (
        f"it is not done yet, or its prompt row is not part of the run; see `rollstream status {paths.root}`"
    )


def _hits(
    indices: npt.NDArray[np.int64], repeats: npt.NDArray[np.int32], index: int | None, repeat: int
) -> npt.NDArray[np.intp]:
    if index is None:
        if not len(indices):
            return np.zeros(0, np.intp)
        index, repeat = int(indices[0]), int(repeats[0])
    return np.flatnonzero((indices == index) & (repeats == repeat))


def _choose(hits: npt.NDArray[Any], trajectory: int | None, index: int | None, repeat: int) -> int:
    if trajectory is None:
        return int(hits[-1])
    if not 0 <= trajectory < len(hits):
        raise RunDirectoryError(
            f"rollout (index {index}, repeat {repeat}) has {len(hits)} trajectories, numbered from 0"
        )
    return int(hits[trajectory])
