"""Opening a run directory to go on writing: it is brought into a clean state.

The truth is journal + batches, and the artifact where batches are gone. Journal file N becomes batch N when
it is sealed, so that after a crash between the two steps the number alone says which one to keep.
Recovering, in this order:

- temporary files of an earlier process are deleted;
- of a damaged batch or artifact the rollouts that can still be read become a batch of their own, and the file is
  moved to `damaged/`;
- a journal file whose batch is good is deleted; the newest one loses its torn tail and is continued;
  a damaged one is sealed with its whole frames and moved to `damaged/`; the others wait to be sealed;
- turns of rollouts that are done are deleted;
- rollouts that only the artifact holds, because batches are gone or damaged, become a batch again;
- what is then in no file is owed.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from rollstream.errors import DamageError
from rollstream.store.arrow import column_values, to_arrow
from rollstream.store.batch import (
    batch_metadata,
    file_rows,
    link_file,
    read_groups,
    recorded_digests,
    require_intact,
    seal_journal,
    whole_tables,
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
from rollstream.store.keys import KeyStates, OpenJournal, RunState
from rollstream.store.manifest import Manifest
from rollstream.store.paths import (
    MERGE_FOLDER,
    RunPaths,
    forget_batches,
    leftovers,
    missing_batches,
    quarantine_file,
)
from rollstream.store.run import Run
from rollstream.store.turns import read_places, remove_turns

_RAW_PER_COMPRESSED = 2
"""Ids and log-probs compress to about half; where a continued journal stands need not be exact."""


def recover(paths: RunPaths, manifest: Manifest) -> RunState:
    """Brings a run directory into a clean state and says what it holds. The lock must be held."""
    paths.make_folders()
    for leftover in leftovers(paths):
        leftover.unlink(missing_ok=True)
    shutil.rmtree(paths.root / MERGE_FOLDER, ignore_errors=True)
    run = Run(paths.root, manifest)
    state = run.state()
    # What is lost shows at the end: it may come back from a journal.
    damage = [line for line in state.damage if not line.startswith("checkpoint.json")]
    restored: list[str] = []
    forget_batches(paths, missing_batches(paths))  # before one of them is written anew
    broken = sorted(path for path in run.damaged if path.suffix == ".parquet")
    if broken:
        keys = Run(paths.root, manifest).state(without={*broken, paths.artifact}).keys
        for path in broken:
            if path.parent == paths.batches and paths.journal(run.number(path)).exists():
                quarantine_file(
                    paths, path
                )  # a crash came before the journal was deleted: it holds all of them
                continue
            _, taken = quarantine_batch(paths, manifest, path, keys)
            if taken:
                restored.append(f"{taken} trajectories were still whole in {path.name}")
        state = Run(paths.root, manifest).state()
    if state.artifact_rows:
        restored += _restore_from_artifact(paths, manifest, state, damage)
    known = len(damage)
    unsealed, open_journal, torn = _recover_journals(paths, manifest, damage)
    turn_files = [*map(paths.turns_file, paths.turn_numbers())]
    for path in (*paths.failure_files(), *turn_files):
        recover_frames(path, paths, manifest)
    if restored or len(damage) > known:
        state = Run(paths.root, manifest).state()
    state.unsealed, state.open_journal, state.torn, state.restored = unsealed, open_journal, torn, restored
    state.damage = [*dict.fromkeys([*damage, *state.damage])]
    state.turns = read_places(paths, manifest.run_id_bytes, state.keys.is_done, [])
    remove_turns(paths, state.turns)
    return state


def quarantine_batch(
    paths: RunPaths, manifest: Manifest, path: Path, keys: KeyStates | None = None
) -> tuple[Path, int]:
    """Moves a damaged batch or artifact to `damaged/`, after the rollouts that it still holds whole.

    They become a new batch, but for those that are done elsewhere, which `keys` knows. Row groups that cannot be read
    are passed over, and rollouts that they cut into (R4). Returns where the file is now, and how many trajectories
    were taken from it. The lock must be held.
    """
    keys = keys or Run(paths.root, manifest).state(without={path}).keys
    taken = copy_rollouts(paths, manifest, path, keys)
    return quarantine_file(paths, path), taken


def copy_rollouts(paths: RunPaths, manifest: Manifest, source: Path, keys: KeyStates) -> int:
    """Writes a batch of the rollouts of a file that are not done, and marks them; returns its rows."""

    def kept() -> Iterator[pa.Table]:
        try:
            for table in whole_tables(read_groups(source, run_id=manifest.run_id)):
                new = keys.mark_done_many(column_values(table["index"]), column_values(table["repeat"]))
                if new.any():
                    yield table.filter(to_arrow(new))
        except DamageError:
            return

    tables = kept()
    first = next(tables, None)
    if first is None:
        return 0

    def all_tables() -> Iterator[pa.Table]:
        yield first
        yield from tables

    batch = paths.batch(paths.next_number())
    return write_tables_durably(batch, all_tables(), batch_metadata(manifest.run_id_bytes, manifest.logprobs))


def _restore_from_artifact(
    paths: RunPaths, manifest: Manifest, state: RunState, damage: list[str]
) -> list[str]:
    """Makes a batch of the rollouts that only the artifact holds: by a hard link when those are all of its."""
    artifact = paths.artifact
    try:
        require_intact(artifact)
    except DamageError:
        damage.append(f"{artifact.name} is damaged")
        _, taken = quarantine_batch(paths, manifest, artifact)
        return [f"{taken} trajectories were still whole in {artifact.name}"] * (taken > 0)
    whole = state.artifact_rows == file_rows(artifact) and artifact.name in recorded_digests(artifact)
    if not (whole and link_file(artifact, paths.batch(paths.next_number()))):
        keys = Run(paths.root, manifest).state(without={artifact}).keys
        copy_rollouts(paths, manifest, artifact, keys)
    return [f"{state.artifact_rows} trajectories were taken from {artifact.name}"]


def _recover_journals(
    paths: RunPaths, manifest: Manifest, damage: list[str]
) -> tuple[list[int], OpenJournal | None, int]:
    """The closed journals that wait to be sealed, the one to continue, and the bytes of its torn tail."""
    numbers, unsealed = paths.journal_numbers(), list[int]()
    for number in numbers:
        path, batch = paths.journal(number), paths.batch(number)
        is_sealed, report, rows, size = batch.exists(), ScanReport(), 0, 0
        for frame in scan(path, manifest.run_id_bytes, report):
            rows, size = rows + frame.rows, size + len(frame.body)
        if report.torn and (is_sealed or number != numbers[-1]):
            report.damage.append(Damage(path, report.end, report.torn, "unfinished frame in a closed file"))
        if report.damage:
            if not is_sealed:
                seal_journal(path, batch, manifest.run_id_bytes, manifest.logprobs)
            quarantine_file(paths, path)
            damage += [f"journal/{line}" for line in report.damage]
        elif is_sealed:
            path.unlink()
            sync_folder(path.parent)
        elif number != numbers[-1]:
            unsealed.append(number)
        elif report.end:
            return unsealed, OpenJournal(number, report.end, rows, _RAW_PER_COMPRESSED * size), report.torn
        else:  # not even its header was finished: nothing was said to be done
            path.unlink()
            return unsealed, None, report.torn
    return unsealed, None, 0


def recover_frames(path: Path, paths: RunPaths, manifest: Manifest) -> None:
    """Cuts the torn tail of a journal that is not sealed; of a damaged one the whole frames stay."""
    report, run_id = ScanReport(), manifest.run_id_bytes
    frames = [
        encode_frame(frame.index, frame.repeat, frame.rows, frame.body)
        for frame in scan(path, run_id, report)
    ]
    if report.damage:
        quarantine_file(paths, path, keep=True)
        write_file_durably(path, b"".join([encode_file_header(run_id), *frames]))
    elif report.torn and report.end:
        os.truncate(path, report.end)
    elif report.torn:
        path.unlink()
