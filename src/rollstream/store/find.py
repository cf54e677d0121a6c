"""Finding one trajectory in a run directory, wherever it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.batch import KEY_COLUMNS, belongs_to, build_table, open_parquet, reading, rollout_rows
from rollstream.store.export.files import decode_row
from rollstream.store.journal import ScanReport, scan
from rollstream.store.manifest import DATASET_IDENTITY, Manifest, require_manifest
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec
from rollstream.store.scores import Rewards
from rollstream.store.summary import read_failures


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """One trajectory, as a row with its JSON columns decoded, and where it was."""

    root: Path
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
    manifest = require_manifest(root)
    paths, rewards = RunPaths(root), Rewards(root)
    damaged: list[str] = []
    for path in _files(paths):
        source = f"{path.parent.name}/{path.name}" if path.parent != root else path.name
        try:
            if path.suffix == ".rsj":
                rows = _in_journal(path, manifest, index, repeat, rewards)
            else:
                rows = _in_parquet(path, manifest, index, repeat, rewards)
        except FileNotFoundError:  # sealed, or merged anew, since the files were listed
            continue
        except DamageError:
            damaged.append(source)
            continue
        if rows:
            if trajectory is not None and not 0 <= trajectory < len(rows):
                raise RunDirectoryError(
                    f"rollout (index {index}, repeat {repeat}) has {len(rows)} trajectories, numbered from 0"
                )
            row = rows[-1 if trajectory is None else trajectory]
            return FoundTrajectory(root, decode_row(row, path), source, len(rows), manifest)
    wanted = "no rollout" if index is None else f"rollout (index {index}, repeat {repeat})"
    if damaged:
        raise DamageError(
            f"{wanted} was found, but {', '.join(damaged)} cannot be read: damaged. The same `rollstream "
            "generate` takes what is intact from there, and generates the other rollouts again"
        )
    if index is None:
        raise RunDirectoryError(f"{root} holds no finished rollout yet")
    raise RunDirectoryError(f"{wanted} is not in {root}: {_why_missing(paths, manifest, index, repeat)}")


def _files(paths: RunPaths) -> Iterator[Path]:
    """Where a rollout may be: the artifact first, which is one file, and then what is in no artifact yet.

    Journals are listed before the batches: one sealed meanwhile is seen as batch.
    """
    journals = [paths.journal(number) for number in paths.journal_numbers()]
    yield paths.artifact
    yield from map(paths.batch, paths.batch_numbers())
    for journal in journals:
        yield journal
        yield paths.batch(int(journal.stem))


def _in_parquet(
    path: Path, manifest: Manifest, index: int | None, repeat: int, rewards: Rewards
) -> list[dict[str, Any]]:
    """The rows of a rollout in a batch or artifact; of the first rollout without `index`."""
    if not path.exists():
        return []
    with open_parquet(path) as file, reading(path):
        if not belongs_to(file, manifest.run_id):
            raise DamageError(f"{path.name} belongs to another run")
        if not file.metadata.num_rows:
            return []
        if index is None:
            first = file.read_row_group(0, columns=KEY_COLUMNS, use_threads=False)
            index, repeat = first["index"][0].as_py(), first["repeat"][0].as_py()
        rows = rewards.current(rollout_rows(file, index, repeat))
        return rows.to_pylist()  # type: ignore[no-any-return]


def _in_journal(
    path: Path, manifest: Manifest, index: int | None, repeat: int, rewards: Rewards
) -> list[dict[str, Any]]:
    report = ScanReport()
    for frame in scan(path, manifest.run_id_bytes, report):
        if index is None or (frame.index, frame.repeat) == (index, repeat):
            try:
                rows = rewards.current(build_table([RecordCodec().decode_rollout(frame.body)]))
                return rows.to_pylist()  # type: ignore[no-any-return]
            except ValueError as error:
                raise DamageError(f"{path.name}: frame at offset {frame.offset}: {error}") from error
    if report.damage:
        raise DamageError(str(report.damage[0]))
    return []


def _why_missing(paths: RunPaths, manifest: Manifest, index: int, repeat: int) -> str:
    """What is known about a rollout that is not there."""
    rows = manifest.identity.get(f"{DATASET_IDENTITY}.count")
    if index < 0 or (isinstance(rows, int) and index >= rows):
        return "prompt rows are numbered from 0" + (f" to {rows - 1}" if isinstance(rows, int) else "")
    if not 0 <= repeat < manifest.n:
        return f"a prompt row has {manifest.n} rollouts, repeats 0 to {manifest.n - 1}"
    failures = (one for one in read_failures(paths.root) if (one.index, one.repeat) == (index, repeat))
    if (failure := next(failures, None)) is not None:
        return f"it failed: {failure.error}"
    return (
        f"it is not done yet, or its prompt row is not part of the run; see `rollstream status {paths.root}`"
    )
