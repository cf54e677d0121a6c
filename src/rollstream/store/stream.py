"""All rollouts of a run directory as a stream of tables, finished or being written, without a lock."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from rollstream.errors import DamageError
from rollstream.store.batch import belongs_to, build_table, column_values, open_parquet, read_group, reading
from rollstream.store.journal import ScanReport, scan
from rollstream.store.manifest import Manifest, require_manifest
from rollstream.store.merge import holds_other_batches
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec, RolloutRecord
from rollstream.store.scores import Rewards

_FRAMES: Final = 256
"""Rollouts of a journal that are read together."""


def run_tables(
    root: Path, columns: Sequence[str], note: Callable[[str], object], *, scores: str | None = None
) -> Iterator[pa.Table]:
    """Some columns of all rows of a run, each rollout whole in one table, finished or being written.

    One row group is in memory at a time. A rollout may come twice, where two files hold it.

    Args:
        root: the run directory.
        columns: the names, `SCORED_COLUMNS` among them if rewards are.
        note: is told of files that are damaged, and passed over.
        scores: whose rewards; None: the run's own.
    """
    manifest, paths, rewards = require_manifest(root), RunPaths(root), Rewards(root, scores)
    journals = paths.journal_numbers()  # before the batches: one sealed meanwhile is then seen as batch
    numbers = paths.batch_numbers()
    waiting = [paths.batch(number) for number in numbers]
    waiting += [paths.journal(number) for number in journals if number not in numbers]
    if holds_other_batches(paths, manifest.run_id, numbers):
        waiting.append(paths.artifact)
    while waiting:
        path = waiting.pop(0)
        try:
            if path.suffix == ".rsj":
                for records in _journal_records(path, manifest, note):
                    yield rewards.current(build_table(records).select(columns))
                continue
            with open_parquet(path) as file, reading(path):
                if not belongs_to(file, manifest.run_id):
                    raise DamageError(f"{path.name} belongs to another run")
                groups = (read_group(file, group, columns) for group in range(file.num_row_groups))
                for table in _whole_rollouts(groups):
                    yield rewards.current(table.replace_schema_metadata(None))
        except FileNotFoundError:  # a journal that was sealed since
            if path.suffix == ".rsj":
                waiting.insert(0, paths.batch(int(path.stem)))
        except DamageError as error:
            note(str(error))


def _journal_records(
    path: Path, manifest: Manifest, note: Callable[[str], object]
) -> Iterator[list[RolloutRecord]]:
    report, codec, records = ScanReport(), RecordCodec(), list[RolloutRecord]()
    for frame in scan(path, manifest.run_id_bytes, report):
        try:
            records.append(codec.decode_rollout(frame.body))
        except ValueError as error:
            note(f"{path.name}: frame at offset {frame.offset}: {error}")
        if len(records) >= _FRAMES:
            yield records
            records = []
    if records:
        yield records
    for damage in report.damage:
        note(str(damage))


def _whole_rollouts(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, cut between rollouts."""
    held: pa.Table | None = None
    for table in tables:
        whole = table if held is None else pa.concat_tables([held, table])
        index, repeat = (column_values(whole[name]) for name in ("index", "repeat"))
        last = int(np.argmax((index == index[-1]) & (repeat == repeat[-1])))
        yield whole.slice(0, last)
        held = whole.slice(last)
    if held is not None:
        yield held
