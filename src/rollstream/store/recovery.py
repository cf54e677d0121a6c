"""Reading a run directory: for a look (`inspect`), or to go on writing (`recover`).

The truth is journal + batches. Journal file N becomes batch N when it is sealed, so that after a crash
between the two steps the number alone says which one to keep. Recovering, in this order:

- temporary files of an earlier process are deleted;
- batches are read for their keys; a damaged one is moved to `damaged/`, its rollouts are owed again;
- a journal file whose batch is good is deleted; the newest one loses its torn tail and is continued;
  a damaged one is sealed with its whole frames and moved to `damaged/`; the others wait to be sealed.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.batch import BatchKeys, forget_digests, read_keys
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
from rollstream.store.manifest import Manifest, read_manifest
from rollstream.store.paths import MERGE_FOLDER, RunPaths, free_name, leftovers, missing_batches, set_aside
from rollstream.store.records import RecordCodec, scoring_failed
from rollstream.store.sealing import seal_journal
from rollstream.store.state import RunState

_RAW_PER_COMPRESSED = 2
"""Ids and log-probs compress to about half; where a continued journal stands need not be exact."""

_KEY_READERS = 4
"""Threads that read batch footers when a run is opened; reading waits more than it computes."""


def recover(paths: RunPaths, manifest: Manifest) -> RunState:
    """Brings a run directory into a clean state and says what it holds. The lock must be held."""
    for folder in (paths.journals, paths.batches, paths.failures, paths.logs):
        folder.mkdir(exist_ok=True)
    for leftover in leftovers(paths):
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
            os.link(path, free_name(paths, path))
            sync_folder(paths.damaged)
            write_file_durably(path, b"".join([encode_file_header(run_id), *whole]))
        elif report.torn:
            os.truncate(path, report.end) if report.end else path.unlink()
