"""Validation: reads every byte of a run directory and says whether it is sound. Changes nothing."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.arrow import column_values, to_arrow
from rollstream.store.batch import KEY_COLUMNS, file_digest, note_digest, read_tables, recorded_digests
from rollstream.store.export.files import stale_exports
from rollstream.store.journal import ScanReport, scan
from rollstream.store.keys import KeyStates
from rollstream.store.lock import is_locked, locked
from rollstream.store.manifest import Manifest, require_manifest
from rollstream.store.merge import Artifact
from rollstream.store.paths import RunPaths, missing_batches
from rollstream.store.records import RecordCodec, RolloutRecord
from rollstream.store.recovery import quarantine_batch, recover, recover_frames
from rollstream.store.run import lost_rollouts, promised_rollouts
from rollstream.store.scores import notes_path
from rollstream.store.summary import refresh_checkpoint
from rollstream.store.turns import NO_TURN

_NO_CHECKSUM = "has no checksum"

Keys = npt.NDArray[np.int64]
"""A number for each row: its rollout's `index * n + repeat`, above the bits of `trajectory`. Shape (rows,)."""

_TRAJECTORY_BITS = 20


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


def validate_run(root: Path) -> Validation:
    """Checks every checksum, schema, length and key of a run directory, in bounded memory for tokens.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    manifest, paths = require_manifest(root), RunPaths(root)
    result, promised = Validation(), promised_rollouts(root)
    if is_locked(root / "run.lock"):
        promised = 0
        result.notes.append("a run is writing here right now; what it commits meanwhile is not looked at")
    batches, digests = paths.batch_numbers(), recorded_digests(paths.batch(0))
    parts = [_validate_file(paths.batch(number), manifest, digests, result) for number in batches]
    sealed = _join([keys for keys in parts if keys is not None])
    result.batches = sum(keys is not None for keys in parts)
    journals = [paths.journal(number) for number in paths.journal_numbers() if number not in batches]
    result.journals = len(journals)
    keys = _join([sealed, *(_validate_journal(path, manifest, result) for path in journals)])
    for path in (*paths.failure_files(), *map(paths.turns_file, paths.turn_numbers())):
        _validate_journal(path, manifest, result)
    if notes_path(root).exists():
        report = ScanReport()
        deque(scan(notes_path(root), manifest.run_id_bytes, report), maxlen=0)
        result.problems += [f"training/{damage}" for damage in report.damage]
    for kind, command in (("scores", "score"), ("streams", "annotate")):
        for table in sorted((root / kind).glob("*.parquet")):
            if file_digest(table) not in recorded_digests(table).get(table.name, ()):
                result.problems.append(
                    f"{kind}/{table.name} does not match its checksum; `rollstream {command}` makes it anew"
                )
    missing = {*missing_batches(paths)}
    if paths.artifact.exists():
        digests = recorded_digests(paths.artifact)
        merged = _validate_file(paths.artifact, manifest, digests, result)
        if merged is not None:
            artifact = Artifact(paths, manifest.run_id)
            keys = _compare_artifact(artifact, merged, sealed, keys, result)
            missing -= artifact.holds(missing)
    result.problems += [f"batches/{paths.batch(number).name} is missing" for number in sorted(missing)]
    result.rows = len(keys)
    _validate_keys(keys, manifest.n, result)
    result.problems += lost_rollouts(promised, result.rollouts)
    result.notes += [f"{name} is of an earlier artifact; export it again" for name in stale_exports(root)]
    result.notes += [f"damaged/{path.name} was quarantined" for path in paths.damaged_files()]
    return result


def _join(parts: list[Keys]) -> Keys:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _numbers(index: Keys, repeat: Keys, trajectory: Keys, n: int) -> Keys:
    """Raises `DamageError` for keys that no row has."""
    if (index < 0).any() or (repeat < 0).any() or (repeat >= n).any():
        raise DamageError(f"damaged: keys are out of range (n is {n})")
    return ((index * n + repeat) << _TRAJECTORY_BITS) + trajectory


def _validate_file(
    path: Path, manifest: Manifest, digests: Mapping[str, set[str]], result: Validation
) -> Keys | None:
    """The keys of a batch or artifact; None when it cannot be read. What is wrong goes into `result`, in one line."""
    name = path.relative_to(path.parents[1] if path.parent.name == "batches" else path.parent)
    known = digests.get(path.name)
    keys, wrong = list[Keys](), list[str]()
    if known is None:
        wrong.append(_NO_CHECKSUM)
    elif file_digest(path) not in known:
        wrong.append("does not match its checksum")
    try:
        for table in read_tables(path, run_id=manifest.run_id):
            index, repeat, number = (column_values(table[name]).astype(np.int64) for name in KEY_COLUMNS)
            keys.append(_numbers(index, repeat, number, manifest.n))
            wrong += _row_problems(table)
    except (DamageError, RunDirectoryError) as error:
        wrong.append(str(error).partition(": ")[2] or str(error))
        result.problems.append(f"{name} is damaged: {'; '.join(dict.fromkeys(wrong))}")
        return None
    joined = _join(keys)
    if (np.diff(joined) < 0).any():
        wrong.append("is not sorted by key")
    if wrong:
        result.problems.append(f"{name}: {'; '.join(dict.fromkeys(wrong))}")
    return joined


def _row_problems(table: pa.Table) -> Iterator[str]:
    """Rows that break R1's shape: one mask value and one log-prob per response id."""
    lengths = {name: pc.list_value_length(table[f"response_{name}"]) for name in ("ids", "mask", "logprobs")}
    for name in ("mask", "logprobs"):
        if pc.any(pc.not_equal(lengths["ids"], lengths[name])).as_py():
            yield f"response_ids and response_{name} differ in length"
    values = pc.list_flatten(table["response_mask"])
    if pc.any(pc.invert(pc.is_in(values, value_set=to_arrow(np.array([0, 1], np.int8))))).as_py():
        yield "response_mask holds something else than 0 and 1"


def repair_run(root: Path) -> list[str]:
    """Makes a run sound again as far as its bytes allow; returns what was done, a line each.

    Damaged batches and a damaged artifact are moved to `damaged/`. Their rollouts are taken from whatever
    intact copy there is: what can still be read of the file itself, and the artifact. The run's own command
    generates those again that have none. Good files that lost their checksum get one.

    Raises:
        RunDirectoryError: it is no run directory, or a run is writing there.
    """
    manifest, paths = require_manifest(root), RunPaths(root)
    done: list[str] = []

    def repair(path: Path, keys: KeyStates | None) -> None:
        result = Validation()
        _validate_file(path, manifest, recorded_digests(path), result)
        if result.problems and result.problems[0].endswith(f": {_NO_CHECKSUM}"):
            note_digest(path)
            done.append(f"{path.name}: noted its checksum")
        elif result.problems:
            kept, rows = quarantine_batch(paths, manifest, path, keys)
            done.append(f"{result.problems[0]}; moved to {kept}, {rows} trajectories taken from it")

    with locked(root):
        for number in paths.batch_numbers():
            repair(paths.batch(number), None)
        state = recover(paths, manifest)
        if notes_path(root).exists():
            recover_frames(notes_path(root), paths, manifest)
        if paths.artifact.exists():
            repair(paths.artifact, state.keys)
        refresh_checkpoint(root)
    return done + state.damage + state.restored


def _validate_journal(path: Path, manifest: Manifest, result: Validation) -> Keys:
    """Checks a journal file of rollouts, failures or turns; returns the keys of the rollouts' trajectories."""
    turns = path.parents[1] / "turns"
    codec, report, name = RecordCodec(), ScanReport(), f"{path.parent.name}/{path.name}"
    keys: list[tuple[int, int, int]] = []
    for frame in scan(path, manifest.run_id_bytes, report):
        try:
            if path.parent == turns:
                if frame.rows != NO_TURN:
                    codec.decode_turn(frame.body)
                continue
            record = codec.decode_rollout(frame.body) if frame.rows else codec.decode_failure(frame.body)
        except ValueError as error:
            result.problems.append(f"{name}: frame at offset {frame.offset}: {error}")
            continue
        rows = len(record.trajectories) if isinstance(record, RolloutRecord) else 0
        if (record.index, record.repeat, rows) != (frame.index, frame.repeat, frame.rows):
            result.problems.append(f"{name}: frame at offset {frame.offset} has another key inside")
        keys += [(frame.index, frame.repeat, number) for number in range(frame.rows)]
    result.problems += [f"{path.parent.name}/{damage}" for damage in report.damage]
    if report.torn:
        result.notes.append(
            f"{name} ends in an unfinished frame ({report.torn} bytes), as after a crash; the next run cuts it"
        )
    try:
        index, repeat, trajectory = np.array(keys, np.int64).reshape(-1, 3).T
        return _numbers(index, repeat, trajectory, manifest.n)
    except DamageError as error:
        result.problems.append(f"{name} is {error}")
        return np.zeros(0, np.int64)


def _validate_keys(keys: Keys, n: int, result: Validation) -> None:
    ordered = np.sort(keys)
    rollouts, trajectories = ordered >> _TRAJECTORY_BITS, ordered & ((1 << _TRAJECTORY_BITS) - 1)
    repeated = np.flatnonzero(np.diff(ordered) == 0)
    for at in repeated[:5].tolist():
        key = (*divmod(int(rollouts[at]), n), int(trajectories[at]))
        result.problems.append(f"key {key} stands in two places")
    if len(repeated) > 5:
        result.problems.append(f"... {len(repeated) - 5} more keys stand in two places")
    first = np.diff(rollouts, prepend=-1) != 0
    result.rollouts = int(first.sum())
    starts = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
    if not len(repeated) and (trajectories != np.arange(len(ordered)) - starts).any():
        result.problems.append("a rollout lacks one of its trajectories")


def _compare_artifact(artifact: Artifact, merged: Keys, sealed: Keys, keys: Keys, result: Validation) -> Keys:
    """`keys` and those that the artifact alone holds."""
    result.artifact_rows = len(merged)
    alone = merged[~np.isin(merged, keys)]
    if len(alone):
        result.notes.append(
            f"{len(alone)} trajectories stand in trajectories.parquet alone: their batches are gone or "
            "damaged, and the run's next command takes them from it"
        )
    if not artifact.is_current():
        result.notes.append(
            "trajectories.parquet is older than the batches, or has other rewards than those that count now; "
            "the run's next command merges them again"
        )
    elif not np.isin(sealed, merged).all():
        result.problems.append("trajectories.parquet does not hold all rows of the batches")
    return _join([keys, alone])
