"""Opening a run directory to go on writing: it is brought into a clean state.

The truth is journal + batches, and the artifact where batches are gone. Journal file N becomes batch N when
it is sealed, so that after a crash between the two steps the number alone says which one to keep.
Recovering, in this order:

- temporary files of an earlier process are deleted;
- batches are read for their keys; of a damaged one the rollouts that can still be read become a batch of
  their own, and the file is moved to `damaged/`;
- a journal file whose batch is good is deleted; the newest one loses its torn tail and is continued;
  a damaged one is sealed with its whole frames and moved to `damaged/`; the others wait to be sealed;
- rollouts that only the artifact holds, because batches are gone or damaged, become a batch again;
- what is then in no file is owed.
"""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from rollstream.errors import DamageError
from rollstream.store.batch import (
    KEYS,
    BatchKeys,
    batch_metadata,
    belongs_to,
    build_table,
    file_rows,
    forget_digests,
    link_file,
    open_parquet,
    read_keys,
    read_tables,
    recorded_digests,
    require_intact,
    seal_journal,
    table_keys,
    to_arrow,
    whole_rollouts,
    write_tables_durably,
)
from rollstream.store.journal import (
    Damage,
    ScanReport,
    encode_file_header,
    encode_frame,
    scan,
    sync_folder,
    write_file_durably,
)
from rollstream.store.keys import KeyStates
from rollstream.store.manifest import Manifest
from rollstream.store.merge import holds_other_batches
from rollstream.store.paths import (
    MERGE_FOLDER,
    RunPaths,
    leftovers,
    missing_batches,
    quarantine_file,
    quarantine_name,
)
from rollstream.store.records import RecordCodec, RolloutRecord, scoring_failed
from rollstream.store.scores import Rewards
from rollstream.untrusted import read_regular

_RAW_PER_COMPRESSED = 2
"""Ids and log-probs compress to about half; where a continued journal stands need not be exact."""

_KEY_READERS = 4
"""Threads that read batch footers when a run is opened; reading waits more than it computes."""

_Current = Callable[[pa.Table], pa.Table]


@dataclass(slots=True)
class RewardTotals:
    """Sum over final trajectories."""

    total: float = 0.0
    scored: int = 0
    unscored: int = 0
    """Those whose reward function failed; one without a reward function is in neither count."""
    lowest: float = math.inf
    highest: float = -math.inf

    @property
    def mean(self) -> float | None:
        """Mean reward; None when nothing was scored."""
        return self.total / self.scored if self.scored else None

    @property
    def are_equal(self) -> bool:
        """Whether several were scored, and all alike."""
        return self.scored > 1 and self.lowest == self.highest

    def add(self, reward: float | None, failed: bool) -> None:
        """Counts one final trajectory; `failed`: its reward function failed."""
        if reward is not None:
            self.total += reward
            self.scored += 1
            self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)
        elif failed:
            self.unscored += 1


@dataclass(slots=True)
class RunState:
    """What a run directory holds, as counts and key states."""

    keys: KeyStates
    rewards: RewardTotals = field(default_factory=RewardTotals)
    batches: list[int] = field(default_factory=list)
    """Numbers of the good batches."""
    unsealed: list[int] = field(default_factory=list)
    """Numbers of closed journal files that wait to be sealed."""
    open_journal: int | None = None
    """Number of the journal file to continue."""
    open_end: int = 0
    """Where in it the next frame belongs."""
    journal_rows: int = 0
    """Rows in the journal to continue."""
    journal_bytes: int = 0
    """Bytes of them, uncompressed (about)."""
    rows: int = 0
    """Trajectories in batches and journals, and in the artifact alone."""
    artifact_rows: int = 0
    """Trajectories in the artifact alone; 0 once the run is opened for writing."""
    torn: int = 0
    """Bytes of the torn tail that was cut."""
    damage: list[str] = field(default_factory=list)
    """One line per damaged or missing file, or damaged stretch of one."""
    restored: list[str] = field(default_factory=list)
    """One line for each file that rollouts were taken from because their batches are gone or damaged."""

    def add_rows(self, keys: BatchKeys) -> None:
        """Counts the rollouts of a file."""
        self.keys.mark_done_many(keys["index"], keys["repeat"])
        self.rows += len(keys)
        self.add_rewards(keys)

    def add_rewards(self, keys: BatchKeys) -> None:
        """Counts the rewards of some rows."""
        rewards = keys["reward"][keys["final"]]
        scored = rewards[rewards == rewards]
        self.rewards.total += float(scored.sum())
        self.rewards.scored += len(scored)
        if len(scored):
            self.rewards.lowest = min(self.rewards.lowest, float(scored.min()))
            self.rewards.highest = max(self.rewards.highest, float(scored.max()))
        self.rewards.unscored += int(keys["unscored"].sum())

    def add_batch(self, number: int, keys: BatchKeys) -> None:
        """Counts a batch."""
        self.batches.append(number)
        self.add_rows(keys)

    def not_done(self, keys: BatchKeys) -> npt.NDArray[np.bool_]:
        """Which of these rows are of rollouts that are not done. Shape (rows,)."""
        return ~self.keys.are_done(keys["index"], keys["repeat"])


def read_checkpoint(root: Path) -> dict[str, Any]:
    """The content of `checkpoint.json`; empty where there is none that can be read."""
    try:
        content = orjson.loads(read_regular(root / "checkpoint.json"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def promised_rollouts(root: Path) -> int:
    """Rollouts that `checkpoint.json` counts as done. Read it before the files that hold them."""
    completed = read_checkpoint(root).get("completed")
    return completed if isinstance(completed, int) else 0


def lost_rollouts(promised: int, done: int) -> list[str]:
    """A line about damage, if fewer rollouts are done than `checkpoint.json` counted."""
    line = f"checkpoint.json counts {promised} finished rollouts, of which {done} are here"
    return [line] * (done < promised)


def _current_rewards(root: Path) -> _Current | None:
    rewards = Rewards(root)
    return None if rewards.name is None else rewards.current


def recover(paths: RunPaths, manifest: Manifest) -> RunState:
    """Brings a run directory into a clean state and says what it holds. The lock must be held."""
    for folder in (paths.journals, paths.batches, paths.failures, paths.logs):
        folder.mkdir(exist_ok=True)
    for leftover in leftovers(paths):
        leftover.unlink(missing_ok=True)
    shutil.rmtree(paths.root / MERGE_FOLDER, ignore_errors=True)
    state, current = RunState(KeyStates(manifest.n)), _current_rewards(paths.root)
    missing = missing_batches(paths)
    state.damage.extend(f"batches/{name} is missing" for name in missing)
    forget_digests(paths.batches, set(missing))  # before one of them is written anew
    for number in _read_batches(paths, manifest, state, current):
        if paths.journal(number).exists():  # a crash came before it was deleted: it holds all of them
            quarantine_file(paths, paths.batch(number))
        else:
            quarantine_batch(paths, manifest, paths.batch(number), state)
    _recover_journals(paths, manifest, state, current)
    _restore_from_artifact(paths, manifest, state, current)
    for path in paths.failure_files():
        _recover_failures(path, paths, manifest, state)
    state.damage += lost_rollouts(promised_rollouts(paths.root), state.keys.done)
    return state


def quarantine_batch(
    paths: RunPaths, manifest: Manifest, path: Path, state: RunState | None = None
) -> tuple[Path, int]:
    """Moves a damaged batch or artifact to `damaged/`, after the rollouts that it still holds whole.

    They become a new batch, but for those that `state` has as done. Returns where the file is now, and how
    many trajectories were taken from it. The lock must be held.
    """
    taken = _copy_rollouts(paths, manifest, path, state)
    if taken and state is not None:
        state.restored.append(f"{taken} trajectories were still whole in {path.name}")
    return quarantine_file(paths, path), taken


def _copy_rollouts(paths: RunPaths, manifest: Manifest, source: Path, state: RunState | None) -> int:
    """Writes a batch of the whole rollouts of a file, but for those done already; returns its rows.

    Row groups that cannot be read are passed over, and rollouts that they cut into (R4). A file of another run
    holds none of this one's rollouts.
    """
    try:
        with open_parquet(source) as file:
            if not belongs_to(file, manifest.run_id):
                return 0
    except DamageError:
        return 0
    tables = read_tables(source, skip_damaged=True)
    keys = np.concatenate([np.zeros(0, KEYS), *map(table_keys, tables)])
    wanted = whole_rollouts(keys)
    if state is not None:
        wanted &= state.not_done(keys)
    if not wanted.any():
        return 0
    number = paths.next_number()

    def kept() -> Iterator[pa.Table]:
        at = 0
        for table in read_tables(source, skip_damaged=True):
            yield table.filter(to_arrow(wanted[at : at + len(table)]))
            at += len(table)

    write_tables_durably(
        paths.batch(number), kept(), batch_metadata(manifest.run_id_bytes, manifest.logprobs)
    )
    if state is not None:
        state.add_batch(number, keys[wanted])
    return int(wanted.sum())


def _artifact_alone(
    paths: RunPaths, manifest: Manifest, state: RunState, current: _Current | None
) -> BatchKeys:
    """Keys of the rollouts that stand in the artifact and nowhere else. Raises `DamageError`."""
    if not holds_other_batches(paths, manifest.run_id, state.batches):
        return np.zeros(0, KEYS)
    keys = read_keys(paths.artifact, manifest.run_id, current)
    return keys[state.not_done(keys)]


def _restore_from_artifact(
    paths: RunPaths, manifest: Manifest, state: RunState, current: _Current | None
) -> None:
    """Makes a batch of the rollouts that only the artifact holds: by a hard link when those are all of its."""
    artifact = paths.artifact
    try:
        alone = _artifact_alone(paths, manifest, state, current)
        if not len(alone):
            return
        require_intact(artifact)
    except DamageError:
        state.damage.append(f"{artifact.name} is damaged")
        quarantine_batch(paths, manifest, artifact, state)
        return
    number = paths.next_number()
    all_of_it = len(alone) == file_rows(artifact)
    if all_of_it and artifact.name in recorded_digests(artifact) and link_file(artifact, paths.batch(number)):
        state.add_batch(number, alone)
    else:
        _copy_rollouts(paths, manifest, artifact, state)
    state.restored.append(f"{len(alone)} trajectories were taken from {artifact.name}")


def _read_batches(
    paths: RunPaths, manifest: Manifest, state: RunState, current: _Current | None
) -> list[int]:
    """Counts the good batches; returns the numbers of the others, which `state.damage` names.

    A batch that repeats what another one holds was copied by somebody: it counts as damaged.
    """

    def read(number: int) -> BatchKeys | DamageError:
        try:
            return read_keys(paths.batch(number), manifest.run_id, current)
        except DamageError as error:
            return error

    damaged = []
    with ThreadPoolExecutor(_KEY_READERS) as readers:
        numbers = paths.batch_numbers()
        for number, result in zip(numbers, readers.map(read, numbers), strict=True):
            if isinstance(result, DamageError):
                state.damage.append(f"batches/{result}")
                damaged.append(number)
            elif repeated := len(result) - int(state.not_done(result).sum()):
                name = paths.batch(number).name
                state.damage.append(f"batches/{name}: {repeated} of its trajectories stand in another batch")
                damaged.append(number)
            else:
                state.add_batch(number, result)
    return damaged


def _scan_rollouts(
    path: Path, manifest: Manifest, state: RunState, current: _Current | None
) -> tuple[ScanReport, int]:
    """Counts the rollouts of a journal file; returns also its rows."""
    report, codec, rows = ScanReport(), RecordCodec(), 0
    others: list[RolloutRecord] = []
    for frame in scan(path, manifest.run_id_bytes, report):
        if state.keys.mark_done(frame.index, frame.repeat):
            record = codec.decode_rollout(frame.body)
            final = record.trajectories[-1]
            if current is not None:
                others.append(record)
            else:
                state.rewards.add(final.reward, scoring_failed(orjson.loads(final.reward_extra)))
            state.journal_bytes += _RAW_PER_COMPRESSED * len(frame.body)
        rows += frame.rows
    if current is not None and others:
        state.add_rewards(table_keys(current(build_table(others))))
    state.rows += rows
    return report, rows


def _recover_journals(paths: RunPaths, manifest: Manifest, state: RunState, current: _Current | None) -> None:
    numbers = paths.journal_numbers()
    sealed = set(state.batches)
    for number in numbers:
        path, rows = paths.journal(number), 0
        newest = number == numbers[-1]
        if number in sealed:
            report = ScanReport()
            deque(scan(path, manifest.run_id_bytes, report), maxlen=0)
        else:
            state.journal_bytes = 0
            report, rows = _scan_rollouts(path, manifest, state, current)
        if report.torn and (number in sealed or not newest):
            report.damage.append(Damage(path, report.end, report.torn, "unfinished frame in a closed file"))
        if report.damage:
            if number not in sealed:
                seal_journal(path, paths.batch(number), manifest.run_id_bytes, manifest.logprobs)
                state.batches += [number] * (rows > 0)
            quarantine_file(paths, path)
            state.damage.extend(f"journal/{damage}" for damage in report.damage)
        elif number in sealed:
            path.unlink()
            sync_folder(path.parent)
        elif not newest:
            state.unsealed.append(number)
        else:
            state.torn = report.torn
            if report.end == 0:  # not even its header was finished: nothing was said to be done
                path.unlink()
            else:
                state.open_journal, state.open_end, state.journal_rows = number, report.end, rows


def _scan_failures(path: Path, manifest: Manifest, state: RunState) -> ScanReport:
    report = ScanReport()
    for frame in scan(path, manifest.run_id_bytes, report):
        state.keys.mark_failed(frame.index, frame.repeat)
    state.damage.extend(f"failed/{damage}" for damage in report.damage)
    return report


def _recover_failures(path: Path, paths: RunPaths, manifest: Manifest, state: RunState) -> None:
    report, run_id = _scan_failures(path, manifest, state), manifest.run_id_bytes
    if report.damage:
        frames = scan(path, run_id, ScanReport())
        whole = [encode_frame(one.index, one.repeat, one.rows, one.body) for one in frames]
        paths.damaged.mkdir(exist_ok=True)
        os.link(path, quarantine_name(paths, path))
        sync_folder(paths.damaged)
        write_file_durably(path, b"".join([encode_file_header(run_id), *whole]))
    elif report.torn:
        os.truncate(path, report.end) if report.end else path.unlink()
