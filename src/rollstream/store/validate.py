"""Validation: reads every byte of a run directory and says whether it is sound. Changes nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.batch import (
    KEY_COLUMNS,
    belongs_to,
    column_values,
    file_digest,
    note_digest,
    open_parquet,
    read_tables,
    recorded_digests,
    to_arrow,
)
from rollstream.store.export.files import stale_exports
from rollstream.store.journal import ScanReport, scan
from rollstream.store.lock import is_locked, locked
from rollstream.store.manifest import Manifest, require_manifest
from rollstream.store.merge import is_current, is_merged
from rollstream.store.paths import RunPaths, missing_batches
from rollstream.store.records import RecordCodec, RolloutRecord
from rollstream.store.recovery import RunState, lost_rollouts, promised_rollouts, quarantine_batch, recover
from rollstream.store.scores import score_folder
from rollstream.store.summary import refresh_checkpoint

NO_CHECKSUM = "has no checksum"


@dataclass(slots=True)
class Validation:
    """The findings. Sound when there are no problems."""

    rollouts: int = 0
    rows: int = 0
    batches: int = 0
    journals: int = 0
    artifact_rows: int | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Worth knowing, but not wrong: an unfinished frame that the next run cuts, say."""

    @property
    def sound(self) -> bool:
        """Whether everything is as it was written."""
        return not self.problems


Keys = npt.NDArray[np.int64]
"""Shape (rows, 3): index, repeat, trajectory."""


def validate_run(root: Path) -> Validation:
    """Checks every checksum, schema, length and key of a run directory, in bounded memory for tokens.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    manifest = require_manifest(root)
    paths = RunPaths(root)
    result, promised = Validation(), promised_rollouts(root)
    if is_locked(root / "run.lock"):
        promised = 0
        result.notes.append("a run is writing here right now; what it commits meanwhile is not looked at")
    batches = paths.batch_numbers()
    digests = recorded_digests(paths.batch(0))
    parts = [validate_parquet(paths.batch(number), manifest.run_id, digests, result) for number in batches]
    sealed = _join([keys for keys in parts if keys is not None])
    result.batches = sum(keys is not None for keys in parts)
    numbers = [number for number in paths.journal_numbers() if number not in batches]
    result.journals = len(numbers)
    journals = [_validate_journal(paths.journal(number), manifest.run_id_bytes, result) for number in numbers]
    for path in paths.failure_files():
        _validate_journal(path, manifest.run_id_bytes, result)
    keys = _join([sealed, *journals])
    for scores in sorted(score_folder(root).glob("*.parquet")):
        if file_digest(scores) not in recorded_digests(scores).get(scores.name, ()):
            result.problems.append(
                f"scores/{scores.name} does not match its checksum; `rollstream score` makes it anew"
            )
    missing = missing_batches(paths)
    if paths.artifact.exists():
        merged = validate_parquet(paths.artifact, manifest.run_id, recorded_digests(paths.artifact), result)
        if merged is not None:
            keys = _compare_artifact(paths, manifest, merged, sealed, keys, result)
            missing = [name for name in missing if not is_merged(paths, manifest.run_id, name)]
    result.problems.extend(f"batches/{name} is missing" for name in missing)
    result.rows = len(keys)
    _validate_keys(keys, manifest.n, result)
    result.problems += lost_rollouts(promised, result.rollouts)
    result.notes.extend(f"{name} is of an earlier artifact; export it again" for name in stale_exports(root))
    result.notes.extend(f"damaged/{path.name} was quarantined" for path in paths.damaged_files())
    return result


def _join(parts: list[Keys]) -> Keys:
    return np.concatenate([np.zeros((0, 3), np.int64), *parts])


def validate_parquet(
    path: Path, run_id: str, digests: Mapping[str, set[str]], result: Validation
) -> Keys | None:
    """Its keys; None when its rows cannot be read. What is wrong goes into `result`, in one line."""
    name = path.relative_to(path.parents[1] if path.parent.name == "batches" else path.parent)
    wanted = digests.get(path.name)
    keys: list[Keys] = []
    wrong: list[str] = []
    if wanted is None:
        wrong.append(NO_CHECKSUM)
    elif file_digest(path) not in wanted:
        wrong.append("does not match its checksum")
    try:
        with open_parquet(path) as file:
            if not belongs_to(file, run_id):
                wrong.append("belongs to another run")
        for table in read_tables(path):
            keys.append(
                np.stack([column_values(table[column]).astype(np.int64) for column in KEY_COLUMNS], 1)
            )
            wrong.extend(_row_problems(table))
    except (DamageError, RunDirectoryError) as error:
        wrong.append(str(error).partition(": ")[2] or str(error))
        result.problems.append(f"{name} is damaged: {'; '.join(dict.fromkeys(wrong))}")
        return None
    joined = _join(keys)
    if len(joined) > 1 and not (np.lexsort(joined.T[::-1]) == np.arange(len(joined))).all():
        wrong.append("is not sorted by key")
    if wrong:
        result.problems.append(f"{name}: {'; '.join(dict.fromkeys(wrong))}")
    return joined


def _row_problems(table: pa.Table) -> Iterator[str]:
    """Rows that break R1's shape: one mask value and one log-prob per response id."""
    ids, mask, logprobs = (table[f"response_{part}"].combine_chunks() for part in ("ids", "mask", "logprobs"))
    if not pc.all(pc.equal(pc.list_value_length(ids), pc.list_value_length(mask))).as_py():
        yield "response_ids and response_mask differ in length"
    equal = pc.equal(pc.list_value_length(ids), pc.list_value_length(logprobs))
    if not pc.all(equal, skip_nulls=True).as_py() and len(equal.drop_null()):
        yield "response_ids and response_logprobs differ in length"
    values = mask.flatten()
    if len(values) and not pc.all(pc.is_in(values, value_set=to_arrow(np.array([0, 1], np.int8)))).as_py():
        yield "response_mask holds something else than 0 and 1"


def repair_run(root: Path) -> list[str]:
    """Makes a run sound again as far as its bytes allow; returns what was done, a line each.

    Damaged batches and a damaged artifact are moved to `damaged/`. Their rollouts are taken from whatever
    intact copy there is: what can still be read of the file itself, and the artifact. The run's own command
    generates those again that have none. Good files that lost their checksum get one.

    Raises:
        RunDirectoryError: it is no run directory, or a run is writing there.
    """
    manifest = require_manifest(root)
    paths = RunPaths(root)
    done: list[str] = []

    def repair(path: Path, state: RunState | None) -> None:
        result = Validation()
        validate_parquet(path, manifest.run_id, recorded_digests(path), result)
        if result.problems and result.problems[0].endswith(f": {NO_CHECKSUM}"):
            note_digest(path)
            done.append(f"{path.name}: noted its checksum")
        elif result.problems:
            kept, rows = quarantine_batch(paths, manifest, path, state)
            done.append(f"{result.problems[0]}; moved to {kept}, {rows} trajectories taken from it")

    with locked(root):
        for number in paths.batch_numbers():
            repair(paths.batch(number), None)
        state = recover(paths, manifest)
        if paths.artifact.exists():
            repair(paths.artifact, state)
        refresh_checkpoint(root)
    return done + state.damage + state.restored


def _validate_journal(path: Path, run_id: bytes, result: Validation) -> Keys:
    """Checks a journal file of rollouts or of failures; returns the keys of the rollouts' trajectories."""
    codec, report, name = RecordCodec(), ScanReport(), f"{path.parent.name}/{path.name}"
    keys: list[tuple[int, int, int]] = []
    for frame in scan(path, run_id, report):
        try:
            record = codec.decode_rollout(frame.body) if frame.rows else codec.decode_failure(frame.body)
        except ValueError as error:
            result.problems.append(f"{name}: frame at offset {frame.offset}: {error}")
            continue
        rows = len(record.trajectories) if isinstance(record, RolloutRecord) else 0
        if (record.index, record.repeat, rows) != (frame.index, frame.repeat, frame.rows):
            result.problems.append(f"{name}: frame at offset {frame.offset} has another key inside")
        keys += [(frame.index, frame.repeat, number) for number in range(frame.rows)]
    result.problems.extend(f"{path.parent.name}/{damage}" for damage in report.damage)
    if report.torn:
        result.notes.append(
            f"{name} ends in an unfinished frame ({report.torn} bytes), as after a crash; the next run cuts it"
        )
    return np.array(keys, np.int64).reshape(-1, 3)


def _validate_keys(keys: Keys, n: int, result: Validation) -> None:
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    if len(ordered) == 0:
        return
    same = (np.diff(ordered, axis=0) == 0).all(axis=1)
    for key in ordered[1:][same][:5]:
        result.problems.append(f"key {tuple(int(part) for part in key)} stands in two places")
    if same.sum() > 5:
        result.problems.append(f"... {int(same.sum()) - 5} more keys stand in two places")
    if (keys[:, 0] < 0).any() or (keys[:, 1] < 0).any() or (keys[:, 1] >= n).any():
        result.problems.append(f"keys are out of range (n is {n})")
    first = np.ones(len(ordered), bool)
    first[1:] = (np.diff(ordered[:, :2], axis=0) != 0).any(axis=1)
    result.rollouts = int(first.sum())
    starts = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
    if not same.any() and not (ordered[:, 2] == np.arange(len(ordered)) - starts).all():
        result.problems.append("a rollout lacks one of its trajectories")


def _compare_artifact(
    paths: RunPaths, manifest: Manifest, merged: Keys, sealed: Keys, keys: Keys, result: Validation
) -> Keys:
    """`keys` and those that the artifact alone holds."""
    n = manifest.n
    result.artifact_rows = len(merged)
    alone = merged[~_rows_in(merged, keys, n)]
    if len(alone):
        result.notes.append(
            f"{len(alone)} trajectories stand in trajectories.parquet alone: their batches are gone or "
            "damaged, and the run's next command takes them from it"
        )
    if not is_current(paths, manifest.run_id):
        result.notes.append(
            "trajectories.parquet is older than the batches, or has other rewards than those that count now; "
            "the run's next command merges them again"
        )
    elif not _rows_in(sealed, merged, n).all():
        result.problems.append("trajectories.parquet does not hold all rows of the batches")
    return _join([keys, alone])


def _rows_in(rows: Keys, others: Keys, n: int) -> npt.NDArray[np.bool_]:
    """Which of `rows` are among `others`. Shape (rows,)."""
    one, other = (((keys[:, 0] * n + keys[:, 1]) << 20) + keys[:, 2] for keys in (rows, others))
    return np.isin(one, other)
