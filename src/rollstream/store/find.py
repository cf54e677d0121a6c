"""Finding one trajectory in a run directory, wherever it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.batch import build_table, open_parquet, read_keys
from rollstream.store.export.jsonl import JSON_COLUMNS
from rollstream.store.journal import ScanReport, scan
from rollstream.store.manifest import Manifest, read_manifest
from rollstream.store.records import RecordCodec
from rollstream.store.run_dir import RunPaths


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
    """
    manifest = read_manifest(root)
    if manifest is None:
        raise RunDirectoryError(f"{root} is not a run directory: it has no run.json")
    paths = RunPaths(root)
    for number in paths.batch_numbers():
        path = paths.batch(number)
        try:
            keys = read_keys(path)
        except DamageError:
            continue
        hits = _hits(keys.index, keys.repeat, index, repeat)
        if len(hits):
            at = _choose(hits, trajectory, index, repeat)
            with open_parquet(path) as file:
                row = file.read().slice(at, 1).to_pylist()[0]
            return FoundTrajectory(_decoded(row), f"batches/{path.name}", len(hits), manifest)
    codec = RecordCodec()
    for number in paths.journal_numbers():
        path = paths.journal(number)
        for frame in scan(path, manifest.run_id_bytes, ScanReport()):
            if index is None or (frame.index, frame.repeat) == (index, repeat):
                rows = build_table([codec.decode_rollout(frame.body)]).to_pylist()
                at = _choose(np.arange(len(rows)), trajectory, index, repeat)
                return FoundTrajectory(_decoded(rows[at]), f"journal/{path.name}", len(rows), manifest)
    if index is None:
        raise RunDirectoryError(f"{root} holds no finished rollout yet")
    raise RunDirectoryError(
        f"rollout (index {index}, repeat {repeat}) is not in {root}; it may be owed or failed: "
        f"rollstream status {root}"
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


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: orjson.loads(value) if key in JSON_COLUMNS else value for key, value in row.items()}
