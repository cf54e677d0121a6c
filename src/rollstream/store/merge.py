"""The merge: all batches into one artifact, sorted by key, in bounded memory.

A bucket sort on disk. The keys alone (16 bytes a row) are sorted first; they say where in the artifact each
row goes. Then every batch is read once and its rows are spread over buckets of consecutive ranks (Arrow IPC
files in a temporary folder), and every bucket is read, sorted and appended to the artifact. A bucket that
turns out too large is cut again in the same way. Where one bucket is enough, nothing is spread.

Rows of keys that stand in several batches come from the batch with the lowest number.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import StorageError
from rollstream.store.batch import (
    ROW_GROUP_ROWS,
    SCHEMA,
    BatchKeys,
    commit_file,
    forget_old_digests,
    parquet_writer,
    read_keys,
    read_tables,
)
from rollstream.store.paths import MERGE_FOLDER, RunPaths
from rollstream.store.sealing import batch_metadata

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 16 << 20
"""Uncompressed bytes of a bucket: sorting it takes about three times that."""

_MAX_BUCKETS = 512
"""Open files while rows are spread; in artifacts above 8 GB buckets are cut twice."""

SOURCE_KEY = b"rollstream.source"
"""Metadata key of the artifact: which batches it was made of."""


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


class MergeCancelledError(Exception):
    """A merge was told to stop. The old artifact, if any, stays."""


def merge_batches(
    paths: RunPaths,
    run_id: bytes,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    bucket_bytes: int = _BUCKET_BYTES,
) -> int:
    """Writes the artifact; returns its rows. An artifact that is up to date is left as it is.

    Args:
        paths: of the run; everything must be sealed.
        run_id: 16 bytes.
        cancelled: asked between row groups.
        bucket_bytes: bytes sorted in memory at once.

    Raises:
        DamagedFileError: a batch is damaged. The old artifact, if any, stays.
        StorageError: the disk is full. The old artifact, if any, stays.
        MergeCancelledError: `cancelled` said so.
    """
    numbers = paths.batch_numbers()
    source = source_digest(paths, numbers)
    if artifact_source(paths.artifact) == source:
        return int(pq.read_metadata(paths.artifact).num_rows)
    batches = [paths.batch(number) for number in numbers]
    temporary = paths.artifact.with_name("trajectories.parquet.tmp")
    spread = paths.root / MERGE_FOLDER
    shutil.rmtree(spread, ignore_errors=True)
    logger.info("merging %d batches into %s", len(batches), paths.artifact)

    def rows_of_batches() -> Iterator[pa.Table]:
        for path in batches:
            for table in read_tables(path):
                if cancelled():
                    raise MergeCancelledError
                yield table.replace_schema_metadata(None)

    try:
        order = _order([read_keys(path) for path in batches])
        total = sum(_decoded_bytes(path) for path in batches)
        metadata = {**batch_metadata(run_id), SOURCE_KEY.decode(): source}
        done = 0
        with parquet_writer(temporary, metadata) as writer:
            for table in _sorted_tables(rows_of_batches, order, total, bucket_bytes, spread):
                if cancelled():
                    raise MergeCancelledError
                writer.write_table(table.replace_schema_metadata(metadata), row_group_size=ROW_GROUP_ROWS)
                done += len(table)
        if done != int((order >= 0).sum()):
            raise StorageError(f"merging gave {done} rows instead of {int((order >= 0).sum())}")
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


def _order(keys: list[BatchKeys]) -> npt.NDArray[np.int64]:
    """Where each row goes in the artifact, batch by batch, row by row; -1 for one that is left out.

    Shape (rows of all batches,).
    """
    index = np.concatenate([one.index for one in keys] or [np.zeros(0, np.int64)])
    repeat = np.concatenate([one.repeat for one in keys] or [np.zeros(0, np.int32)])
    batch = np.repeat(np.arange(len(keys), dtype=np.int32), [len(one.index) for one in keys])
    by_key = np.lexsort((batch, repeat, index))  # stable: within a rollout in the order of its trajectories
    new_key = np.ones(len(by_key), bool)
    new_key[1:] = (np.diff(index[by_key]) != 0) | (np.diff(repeat[by_key]) != 0)
    first = np.maximum.accumulate(np.where(new_key, np.arange(len(by_key)), 0))
    kept = by_key[batch[by_key] == batch[by_key[first]]] if len(by_key) else by_key
    order = np.full(len(by_key), -1, np.int64)
    order[kept] = np.arange(len(kept))
    return order


def _decoded_bytes(path: Path) -> int:
    metadata = pq.read_metadata(path)
    return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def _sorted_tables(
    tables: Callable[[], Iterator[pa.Table]],
    order: npt.NDArray[np.int64],
    total_bytes: int,
    bucket_bytes: int,
    folder: Path,
) -> Iterator[pa.Table]:
    """The rows of `tables` in order, as tables of about `bucket_bytes`.

    Args:
        tables: gives the rows, each time it is called, in the same order.
        order: rank of each row, -1 to leave it out; shape (rows,).
        total_bytes: of all rows, about.
        bucket_bytes: sorted in memory at once.
        folder: for temporary files.
    """
    kept = np.sort(order[order >= 0])
    buckets = int(min(-(-total_bytes // bucket_bytes), _MAX_BUCKETS, len(kept)))
    if buckets <= 1:
        picked, held = [], 0
        for rows, table in _kept_rows(tables(), order):
            if len(table):
                picked.append((rows, table))
                held += table.nbytes
            if held > 4 * bucket_bytes and len(kept) > 1:
                # Encoded it was small, decoded it is not (a long text in every row, say).
                picked.clear()
                decoded = sum(table.nbytes for _, table in _kept_rows(tables(), order))
                yield from _sorted_tables(tables, order, decoded, bucket_bytes, folder)
                return
        if picked:
            rank = np.concatenate([rows for rows, _ in picked])
            yield _take(pa.concat_tables([table for _, table in picked]), np.argsort(rank))
        return
    folder.mkdir()
    # Cut by rank: bucket b has the ranks from edges[b] on.
    edges = kept[np.arange(buckets) * len(kept) // buckets]
    ranks: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(buckets)]
    sizes = np.zeros(buckets, np.int64)
    with ExitStack() as files:
        writers = [
            files.enter_context(pa.ipc.new_file(str(folder / f"{number}.arrow"), SCHEMA))
            for number in range(buckets)
        ]
        for rows, table in _kept_rows(tables(), order):
            bucket_of = np.searchsorted(edges, rows, side="right") - 1
            for number in np.unique(bucket_of):
                chosen = bucket_of == number
                part = table.filter(pa.array(chosen))
                writers[number].write_table(part)
                ranks[number].append(rows[chosen])
                sizes[number] += part.nbytes
    for number in range(buckets):
        path = folder / f"{number}.arrow"
        inner = folder / f"{number}"
        rank = np.concatenate(ranks[number]) if ranks[number] else np.zeros(0, np.int64)
        ranks[number] = []
        # A bucket of unusually long rows, or one of very many, is cut again.
        again = sizes[number] > 2 * bucket_bytes
        yield from _sorted_tables(
            partial(_read_ipc, path), rank, int(sizes[number]) if again else 0, bucket_bytes, inner
        )
        shutil.rmtree(inner, ignore_errors=True)
        path.unlink()


def _read_ipc(path: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            yield pa.Table.from_batches([file.get_batch(number)])


def _kept_rows(
    tables: Iterator[pa.Table], order: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
    """Tables with the rank of each row, without the rows that are left out."""
    at = 0
    for table in tables:
        rows = order[at : at + len(table)]
        at += len(table)
        kept = rows >= 0
        yield (rows, table) if kept.all() else (rows[kept], table.filter(pa.array(kept)))


def _take(table: pa.Table, order: npt.NDArray[np.int64]) -> pa.Table:
    return table if (np.diff(order) == 1).all() else table.take(pa.array(order))
