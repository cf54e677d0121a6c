"""The run directory: where its parts are, and what is in it when it is opened.

The truth is journal + batches. Journal file N becomes batch N when it is sealed, so that after a crash
between the two steps the number alone says which one to keep.

Opening for writing (`open_run`), in this order: lock, manifest, then
- temporary files of an earlier process are deleted;
- batches are read for their keys; a damaged one is moved to `damaged/`, its rollouts are owed again;
- a journal file whose batch is good is deleted; the newest one loses its torn tail and is continued;
  a damaged one is sealed with its whole frames and moved to `damaged/`; the others wait to be sealed.
"""

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from rollstream.errors import DamageError, RunDirectoryError, StorageError
from rollstream.store.batch import BatchKeys, forget_digests, read_keys, recorded_digests
from rollstream.store.journal import Damage, ScanReport, encode_file_header, encode_frame, scan, sync_folder
from rollstream.store.journal import write_file_durably as _write
from rollstream.store.keys import KeyStates
from rollstream.store.lock import RunLock
from rollstream.store.manifest import Manifest, check_identity, read_manifest, write_manifest
from rollstream.store.records import RecordCodec, scoring_failed
from rollstream.store.sealing import seal_journal

_RAW_PER_COMPRESSED = 2
"""Ids and log-probs compress to about half; where a continued journal stands need not be exact."""

_WRITTEN_WHOLE = (
    "run.json",
    "config.yaml",
    "checkpoint.json",
    "trajectories.parquet",
    "trajectories.parquet.sha256",
    "trajectories.jsonl",
)
"""Files of the run's root that are written by way of a temporary name."""

MERGE_FOLDER = "merge.tmp"
"""Where a merge spreads rows."""

_BATCH_NAME = r"batch_(\d{6,})\.parquet"

_KEY_READERS = 4
"""Threads that read batch footers when a run is opened; reading waits more than it computes."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where things are in a run directory."""

    root: Path

    @property
    def journals(self) -> Path:
        """Folder of the journal files."""
        return self.root / "journal"

    @property
    def batches(self) -> Path:
        """Folder of the sealed batches."""
        return self.root / "batches"

    @property
    def failures(self) -> Path:
        """Folder of the failed rollouts' journal files."""
        return self.root / "failed"

    @property
    def damaged(self) -> Path:
        """Folder where damaged files are kept aside."""
        return self.root / "damaged"

    @property
    def logs(self) -> Path:
        """Folder of log files."""
        return self.root / "logs"

    @property
    def artifact(self) -> Path:
        """The merged artifact."""
        return self.root / "trajectories.parquet"

    def has_data(self) -> bool:
        """Whether anything was ever finished here."""
        kept = (self.artifact.exists(), self.damaged.is_dir(), (self.root / "replaced").is_dir())
        return any(kept) or any((self.journal_numbers(), self.batch_numbers(), self.failure_files()))

    def journal(self, number: int) -> Path:
        """Journal file of this number."""
        return self.journals / f"{number:06d}.rsj"

    def batch(self, number: int) -> Path:
        """Batch of this number."""
        return self.batches / f"batch_{number:06d}.parquet"

    def journal_numbers(self) -> list[int]:
        """Numbers of the journal files there are, ascending."""
        return _numbers(self.journals, r"(\d{6,})\.rsj")

    def batch_numbers(self) -> list[int]:
        """Numbers of the batches there are, ascending."""
        return _numbers(self.batches, _BATCH_NAME)

    def failure_files(self) -> list[Path]:
        """Journal files of failures, oldest first."""
        return [self.failures / f"{number:06d}.rsj" for number in _numbers(self.failures, r"(\d{6,})\.rsj")]

    def damaged_files(self) -> list[Path]:
        """What was kept aside."""
        return sorted(self.damaged.iterdir()) if self.damaged.is_dir() else []


def _numbers(folder: Path, pattern: str) -> list[int]:
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(pattern, name) for name in os.listdir(folder))  # noqa: PTH208
    return sorted(int(match[1]) for match in matches if match)


@dataclass(slots=True)
class RewardTotals:
    """Sum over final trajectories."""

    total: float = 0.0
    scored: int = 0
    unscored: int = 0
    """Those whose reward function failed; one without a reward function is in neither count."""

    @property
    def mean(self) -> float | None:
        """Mean reward; None when nothing was scored."""
        return self.total / self.scored if self.scored else None

    def add(self, reward: float | None, failed: bool) -> None:
        """Counts one final trajectory; `failed`: its reward function failed."""
        if reward is not None:
            self.total += reward
            self.scored += 1
        elif failed:
            self.unscored += 1

    def add_batch(self, keys: BatchKeys) -> None:
        """Counts the final trajectories of a batch."""
        rewards = keys.reward[keys.final]
        scored = rewards[rewards == rewards]
        self.total += float(scored.sum())
        self.scored += len(scored)
        self.unscored += keys.unscored


@dataclass(slots=True)
class RunState:
    """What a run directory holds."""

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
    """Trajectories in batches and journals."""
    torn: int = 0
    """Bytes of the torn tail that was cut."""
    damage: list[str] = field(default_factory=list)
    """One line per damaged file or stretch."""

    @property
    def next_number(self) -> int:
        """The next unused journal number."""
        used = [*self.batches, *self.unsealed]
        if self.open_journal is not None:
            used.append(self.open_journal)
        return max(used, default=-1) + 1


class RunDirectory:
    """A run directory opened for writing: its lock is held until `close`."""

    def __init__(self, paths: RunPaths, manifest: Manifest, state: RunState, lock: RunLock) -> None:
        self.paths = paths
        self.manifest = manifest
        self.state = state
        self._lock = lock

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        self._lock.release()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_run(root: Path) -> RunLock:
    """Creates the folder if need be and takes its lock. Raises `RunDirectoryError`."""
    try:
        created = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for folder in created:
            sync_folder(folder.parent)
        lock = RunLock(root / "run.lock")
        lock.acquire()
    except (FileExistsError, NotADirectoryError) as error:
        blocking = next(path for path in (root, *root.parents) if path.exists() and not path.is_dir())
        raise RunDirectoryError(
            f"{blocking} is a file; trainer.default_local_dir ({root}) must be a folder"
        ) from error
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {root}: {error.strerror}") from error
    return lock


def open_run(lock: RunLock, root: Path, wanted: Manifest, *, config_yaml: str, fresh: bool) -> RunDirectory:
    """Opens a run for writing: a new one, or the one of the same identity that is there.

    Args:
        lock: held on `root`; owned by the result from here on, released if this raises.
        root: the run directory.
        wanted: manifest of the run asked for; its run id is used for a new run only.
        config_yaml: the resolved configuration, written to `config.yaml` of a new run.
        fresh: refuse a folder that holds a run with anything in it (`generation.resume=never`).

    Raises:
        IdentityMismatchError: the folder holds a run of another identity; nothing was touched.
        RunDirectoryError: not usable.
        StorageError: disk full.
    """
    paths = RunPaths(root)
    try:
        manifest = read_manifest(root)
        if manifest is None or not paths.has_data():
            # A run that never got to its first rollout (its engine refused, say) holds nothing to protect.
            refuse_foreign_data(paths)
            _create(paths, wanted, config_yaml)
            manifest = wanted
        elif fresh:
            raise RunDirectoryError(
                f"{root} already holds a run (created {manifest.created}) and generation.resume=never. "
                "Choose an empty trainer.default_local_dir, or generation.resume=auto to continue it."
            )
        else:
            check_identity(root, manifest.identity, wanted.identity, extend=False)
        state = recover(paths, manifest)
    except OSError as error:
        lock.release()
        raise StorageError(f"cannot write to {root}: {error.strerror}") from error
    except BaseException:
        lock.release()
        raise
    return RunDirectory(paths, manifest, state, lock)


def refuse_foreign_data(paths: RunPaths) -> None:
    """A folder with batches or journals but no manifest is never taken over."""
    if paths.journal_numbers() or paths.batch_numbers() or paths.artifact.exists():
        raise RunDirectoryError(
            f"{paths.root} holds batches or journals but no run.json. Restore run.json from a copy, "
            "or choose another trainer.default_local_dir."
        )


def _create(paths: RunPaths, manifest: Manifest, config_yaml: str) -> None:
    for folder in (paths.journals, paths.batches, paths.failures, paths.logs):
        folder.mkdir(exist_ok=True)
    _write(paths.root / "config.yaml", config_yaml.encode())
    write_manifest(paths.root, manifest)


def recover(paths: RunPaths, manifest: Manifest) -> RunState:
    """Brings a run directory into a clean state and says what it holds. The lock must be held."""
    for folder in (paths.journals, paths.batches, paths.failures, paths.logs):
        folder.mkdir(exist_ok=True)
    for leftover in _leftovers(paths):
        leftover.unlink(missing_ok=True)
    shutil.rmtree(paths.root / MERGE_FOLDER, ignore_errors=True)
    state = RunState(KeyStates(manifest.n))
    _note_missing_batches(paths, state)
    for number, keys in _read_batches(paths, state):
        if keys is None:
            set_aside(paths, paths.batch(number))
        else:
            _add_batch(state, number, keys)
    _recover_journals(paths, manifest, state)
    _recover_failures(paths, manifest, state)
    return state


def _leftovers(paths: RunPaths) -> list[Path]:
    """Temporary files that an earlier process of this run left; nobody else's."""
    mine = [paths.root / f"{name}.tmp" for name in _WRITTEN_WHOLE]
    mine += [paths.failures / f"{path.name}.tmp" for path in paths.failure_files()]
    mine += [
        paths.batches / name
        for name in os.listdir(paths.batches)  # noqa: PTH208
        if re.fullmatch(r"batch_\d{6,}\.parquet\.tmp|_SHA256SUMS\.tmp", name)
    ]
    return mine


def missing_batches(paths: RunPaths) -> list[str]:
    """Names of batches that were sealed but are not there any more."""
    there = {paths.batch(number).name for number in paths.batch_numbers()}
    aside = {path.name for path in paths.damaged_files()}
    recorded = (name for name in recorded_digests(paths.batch(0)) if re.fullmatch(_BATCH_NAME, name))
    # A crash between noting a checksum and naming the batch leaves the journal: nothing is missing then.
    journals = {paths.batch(number).name for number in paths.journal_numbers()}
    return sorted(set(recorded) - there - aside - journals)


def _note_missing_batches(paths: RunPaths, state: RunState) -> None:
    missing = missing_batches(paths)
    if missing and paths.artifact.exists():  # it may be all that is left of them
        set_aside(paths, paths.artifact)
    state.damage.extend(f"batches/{name} is missing" for name in missing)
    forget_digests(paths.batches, set(missing))


def inspect(root: Path) -> tuple[Manifest, RunState]:
    """What a run directory holds, read without lock and without changing anything.

    Also while another process writes: what it commits meanwhile may or may not be counted.
    """
    manifest = read_manifest(root)
    if manifest is None:
        raise RunDirectoryError(f"{root} is not a run directory: it has no run.json")
    paths = RunPaths(root)
    state = RunState(KeyStates(manifest.n))
    numbers = paths.journal_numbers()  # before the batches: one sealed meanwhile is then seen as batch
    for number, keys in _read_batches(paths, state):
        if keys is not None:
            _add_batch(state, number, keys)
    for number in numbers:
        if number in state.batches:
            continue
        report = ScanReport()
        try:
            rows = _scan_keys(paths.journal(number), manifest, state, report)
        except FileNotFoundError:  # sealed since we listed it
            _add_batch(state, number, read_keys(paths.batch(number)))
            continue
        state.unsealed.append(number)
        state.journal_rows += rows
        state.damage.extend(str(damage) for damage in report.damage)
        state.torn += report.torn
    for path in paths.failure_files():
        report = _scan_failures(path, manifest, state)
        state.damage.extend(f"failed/{damage}" for damage in report.damage)
    return manifest, state


def set_aside(paths: RunPaths, path: Path) -> Path:
    """Moves a damaged file to `damaged/`, under a name that is not taken there."""
    paths.damaged.mkdir(exist_ok=True)
    target = _free_name(paths, path)
    path.rename(target)
    sync_folder(path.parent)
    sync_folder(paths.damaged)
    if path.parent == paths.batches:
        forget_digests(paths.batches, {path.name})
    return target


def _free_name(paths: RunPaths, path: Path) -> Path:
    target = paths.damaged / path.name
    count = 1
    while target.exists():
        target = paths.damaged / f"{path.name}.{count}"
        count += 1
    return target


def _read_batches(paths: RunPaths, state: RunState) -> Iterator[tuple[int, BatchKeys | None]]:
    """Keys of every batch, None for a damaged one, which is noted in `state.damage`."""

    def read(number: int) -> BatchKeys | DamageError:
        try:
            return read_keys(paths.batch(number))
        except DamageError as error:
            return error

    with ThreadPoolExecutor(_KEY_READERS) as readers:
        numbers = paths.batch_numbers()
        for number, result in zip(numbers, readers.map(read, numbers), strict=True):
            if isinstance(result, DamageError):
                state.damage.append(f"batches/{result}")
                yield number, None
            else:
                yield number, result


def _add_batch(state: RunState, number: int, keys: BatchKeys) -> None:
    state.batches.append(number)
    state.keys.mark_done_many(keys.index, keys.repeat)
    state.rewards.add_batch(keys)
    state.rows += len(keys.index)


def _scan_keys(path: Path, manifest: Manifest, state: RunState, report: ScanReport) -> int:
    """Marks the rollouts of a journal file as done; returns its rows."""
    rows = 0
    codec = RecordCodec()
    for frame in scan(path, manifest.run_id_bytes, report):
        if state.keys.mark_done(frame.index, frame.repeat):
            final = codec.decode_rollout(frame.body).trajectories[-1]
            state.rewards.add(final.reward, scoring_failed(orjson.loads(final.reward_extra)))
            state.journal_bytes += _RAW_PER_COMPRESSED * len(frame.body)
        rows += frame.rows
    state.rows += rows
    return rows


def _recover_journals(paths: RunPaths, manifest: Manifest, state: RunState) -> None:
    numbers = paths.journal_numbers()
    sealed = set(state.batches)
    for number in numbers:
        path = paths.journal(number)
        if number in sealed:
            _drop_sealed_journal(paths, path, manifest, state)
            continue
        report = ScanReport()
        state.journal_bytes = 0
        rows = _scan_keys(path, manifest, state, report)
        newest = number == numbers[-1]
        if report.torn and not newest:
            report.damage.append(Damage(path, report.end, report.torn, "unfinished frame in a closed file"))
        if report.damage:
            seal_journal(path, paths.batch(number), manifest.run_id_bytes)
            set_aside(paths, path)
            if rows:
                state.batches.append(number)
            state.damage.extend(f"journal/{damage}" for damage in report.damage)
        elif not newest:
            state.unsealed.append(number)
        elif report.end == 0:  # not even its header was finished: nothing was said to be done
            path.unlink()
            state.torn = report.torn
        else:
            state.open_journal, state.open_end, state.journal_rows = number, report.end, rows
            state.torn = report.torn


def _drop_sealed_journal(paths: RunPaths, path: Path, manifest: Manifest, state: RunState) -> None:
    """Deletes a journal whose batch is good; one that was damaged when it was sealed is kept aside."""
    report = ScanReport()
    for _ in scan(path, manifest.run_id_bytes, report):
        pass
    if report.damage or report.torn:
        state.damage.extend(f"journal/{damage}" for damage in report.damage)
        set_aside(paths, path)
    else:
        path.unlink()
        sync_folder(path.parent)


def _scan_failures(path: Path, manifest: Manifest, state: RunState) -> ScanReport:
    report = ScanReport()
    for frame in scan(path, manifest.run_id_bytes, report):
        state.keys.mark_failed(frame.index, frame.repeat)
    return report


def _recover_failures(paths: RunPaths, manifest: Manifest, state: RunState) -> None:
    run_id = manifest.run_id_bytes
    for path in paths.failure_files():
        report = _scan_failures(path, manifest, state)
        if report.damage:
            state.damage.extend(f"failed/{damage}" for damage in report.damage)
            whole = [
                encode_frame(frame.index, frame.repeat, frame.rows, frame.body)
                for frame in scan(path, run_id, ScanReport())
            ]
            paths.damaged.mkdir(exist_ok=True)
            os.link(path, _free_name(paths, path))
            sync_folder(paths.damaged)
            _write(path, b"".join([encode_file_header(run_id), *whole]))
        elif report.torn:
            os.truncate(path, report.end) if report.end else path.unlink()
