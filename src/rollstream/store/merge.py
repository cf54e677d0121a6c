"""The merge: all batches into one artifact, sorted by key, in bounded memory.

A bucket sort on disk. The keys alone (20 bytes a row) are sorted first; they say where in the artifact
each row goes, and cut the artifact into buckets of at most `bucket_bytes`. Then every batch is read once
and its rows are spread over the buckets (Arrow IPC files in a temporary folder), and every bucket is
read, sorted and appended to the artifact. Where one bucket is enough, nothing is spread.

Rows of keys that stand in several batches come from the batch with the lowest number.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import DamageError, StorageError
from rollstream.store.batch import (
    KEY_COLUMNS,
    ROW_GROUP_ROWS,
    SCHEMA,
    BatchKeys,
    commit_file,
    forget_old_digests,
    open_parquet,
    parquet_writer,
    read_keys,
)
from rollstream.store.run_dir import RunPaths
from rollstream.store.sealing import batch_metadata

_BUCKET_BYTES = 32 << 20
"""Uncompressed bytes of a bucket: sorting it takes about three times that."""

_MAX_BUCKETS = 512
"""Open files while rows are spread; buckets grow beyond `_BUCKET_BYTES` in artifacts above 16 GB."""

SOURCE_KEY = b"rollstream.source"
"""Metadata key of the artifact: which batches it was made of."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where every row goes. Arrays of shape (rows,), in the order batch by batch, row by row."""

    bucket: npt.NDArray[np.int32]
    """-1 for a row that is left out because its key stands in an earlier batch."""
    starts: npt.NDArray[np.int64]
    """First row of each batch, shape (batches + 1,)."""
    buckets: int
    rows: int
    """Rows of the artifact."""


def source_digest(paths: RunPaths, numbers: list[int]) -> str:
    """Names the set of batches an artifact is made of; equal digests mean nothing to merge."""
    digest = hashlib.blake2b(digest_size=16)
    for number in numbers:
        stat = paths.batch(number).stat()
        digest.update(f"{number}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()


def artifact_source(path: Path) -> str | None:
    """The source digest in an artifact's footer; None when there is no readable artifact."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    value = metadata.get(SOURCE_KEY)
    return None if value is None else value.decode()


def merge_batches(
    paths: RunPaths,
    run_id: bytes,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    bucket_bytes: int = _BUCKET_BYTES,
) -> int:
    """Writes the artifact; returns its rows. An artifact that is up to date is left as it is.

    Args:
        paths: of the run; everything must be sealed.
        run_id: 16 bytes.
        on_progress: called with (rows done, rows in all) now and then.
        bucket_bytes: uncompressed bytes sorted in memory at once.

    Raises:
        DamageError: a batch is damaged; its path is in `path`. The old artifact, if any, stays.
        StorageError: the disk is full. The old artifact, if any, stays.
    """
    numbers = paths.batch_numbers()
    source = source_digest(paths, numbers)
    if artifact_source(paths.artifact) == source:
        return int(pq.read_metadata(paths.artifact).num_rows)
    batches = [paths.batch(number) for number in numbers]
    temporary = paths.artifact.with_name("trajectories.parquet.tmp")
    spread = paths.root / "merge.tmp"
    shutil.rmtree(spread, ignore_errors=True)
    try:
        layout = _plan(batches, bucket_bytes)
        metadata = {**batch_metadata(run_id), SOURCE_KEY.decode(): source}
        done = 0
        with parquet_writer(temporary, metadata) as writer:
            for table in _sorted_buckets(batches, layout, spread):
                writer.write_table(table.replace_schema_metadata(metadata), row_group_size=ROW_GROUP_ROWS)
                done += len(table)
                if on_progress is not None:
                    on_progress(done, layout.rows)
        if done != layout.rows:
            raise DamageError(f"merging gave {done} rows instead of {layout.rows}")
        commit_file(temporary, paths.artifact)
        forget_old_digests(paths.artifact)
        return done
    except OSError as error:
        raise StorageError(
            f"cannot write {paths.artifact}: {error.strerror or error}. The batches are safe; free space and "
            "run the same command again."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
        shutil.rmtree(spread, ignore_errors=True)


def _plan(batches: list[Path], bucket_bytes: int) -> _Layout:
    keys = [_read_keys_or_damage(path) for path in batches]
    starts = np.concatenate([[0], np.cumsum([len(one.index) for one in keys])]).astype(np.int64)
    index = np.concatenate([one.index for one in keys] or [np.zeros(0, np.int64)])
    repeat = np.concatenate([one.repeat for one in keys] or [np.zeros(0, np.int32)])
    batch = np.repeat(np.arange(len(batches), dtype=np.int32), np.diff(starts))
    order = np.lexsort((batch, repeat, index))
    same = np.zeros(len(order), bool)
    if len(order):
        ordered_index, ordered_repeat, ordered_batch = index[order], repeat[order], batch[order]
        new_key = np.ones(len(order), bool)
        new_key[1:] = (ordered_index[1:] != ordered_index[:-1]) | (ordered_repeat[1:] != ordered_repeat[:-1])
        first = np.maximum.accumulate(np.where(new_key, np.arange(len(order)), 0))
        same = ordered_batch != ordered_batch[first]
    total = sum(_uncompressed_bytes(path) for path in batches)
    buckets = int(min(max(1, -(-total // bucket_bytes)), _MAX_BUCKETS, max(1, len(order))))
    kept = order[~same]
    bucket = np.full(len(order), -1, np.int32)
    if len(kept):
        ranks = (np.arange(len(kept)) * buckets // len(kept)).astype(np.int32)
        bucket[kept] = ranks
    return _Layout(bucket, starts, buckets, len(kept))


def _read_keys_or_damage(path: Path) -> BatchKeys:
    try:
        return read_keys(path)
    except DamageError as error:
        raise DamagedBatchError(path, str(error)) from error


class DamagedBatchError(DamageError):
    """A batch is damaged; `path` says which."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def _uncompressed_bytes(path: Path) -> int:
    metadata = pq.read_metadata(path)
    return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def _read_rows(path: Path) -> Iterator[pa.Table]:
    """Row group by row group."""
    with open_parquet(path) as file:
        for group in range(file.num_row_groups):
            try:
                yield file.read_row_group(group)
            except (pa.ArrowException, OSError) as error:
                raise DamagedBatchError(path, f"{path.name}: {error}") from error


def _sorted_buckets(batches: list[Path], layout: _Layout, spread: Path) -> Iterator[pa.Table]:
    if layout.buckets == 1:
        tables = [table for _, table in _kept_rows(batches, layout)]
        if tables:
            yield _sort(pa.concat_tables(tables))
        return
    spread.mkdir()
    with ExitStack() as files:
        writers = [
            files.enter_context(pa.ipc.new_file(str(spread / f"{number}.arrow"), SCHEMA))
            for number in range(layout.buckets)
        ]
        for rows, table in _kept_rows(batches, layout):
            for number in np.unique(rows):
                writers[number].write_table(table.filter(pa.array(rows == number)))
    for number in range(layout.buckets):
        path = spread / f"{number}.arrow"
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        path.unlink()
        yield _sort(table)


def _kept_rows(batches: list[Path], layout: _Layout) -> Iterator[tuple[npt.NDArray[np.int32], pa.Table]]:
    """Row groups of all batches with the bucket of each row, rows that are left out removed."""
    for number, path in enumerate(batches):
        at = int(layout.starts[number])
        for table in _read_rows(path):
            rows = layout.bucket[at : at + len(table)]
            at += len(table)
            kept = rows >= 0
            if not kept.all():
                table, rows = table.filter(pa.array(kept)), rows[kept]
            if len(table):
                yield rows, table.replace_schema_metadata(None)


def _sort(table: pa.Table) -> pa.Table:
    keys = [table[name].to_numpy() for name in reversed(KEY_COLUMNS)]
    order = np.lexsort(keys)
    if (np.diff(order) == 1).all():
        return table
    return table.take(pa.array(order))
