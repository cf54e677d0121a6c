"""The merge: all batches into one artifact, sorted by key, in bounded memory.

A bucket sort on disk. The keys alone are sorted first; they say where in the artifact each row goes. Then
every batch is read once and its rows are spread over buckets of consecutive ranks (Arrow IPC files in a
temporary folder), and every bucket is read, sorted and appended to the artifact. A bucket that
turns out too large is cut again in the same way.

Rows of keys that stand in several batches come from the batch with the lowest number.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstream.errors import StorageError
from rollstream.store.batch import (
    SCHEMA,
    DamagedFileError,
    batch_metadata,
    column_values,
    file_rows,
    forget_old_digests,
    logprobs_of,
    read_footer,
    read_tables,
    reading,
    recorded_digests,
    require_intact,
    to_arrow,
    write_tables_durably,
)
from rollstream.store.paths import MERGE_FOLDER, RunPaths
from rollstream.store.scores import Rewards, has_rewards, rewards_metadata

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 16 << 20
"""Uncompressed bytes of a bucket: sorting it takes about three times that."""

_MAX_BUCKETS = 512
"""Open files while rows are spread; in artifacts above 8 GB buckets are cut twice."""

_REPEAT_BITS = 31
"""Index and repeat stand in one number while rows are sorted."""

_LEFT_OUT = 0xFFFFFFFF
"""Rank of a row that is not in the artifact."""

_MERGED_KEY = b"rollstream.batches"
"""Metadata key of the artifact: the batches it was made of, as `_batch_names` has them."""


def source_digest(paths: RunPaths) -> str:
    """Names the content of a run's batches and its own rewards; equal digests: nothing new to upload."""
    names = _batch_names(paths, paths.batch_numbers())
    content = " ".join([*sorted(names.values()), *filter(None, [Rewards(paths.root).content])])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _batch_names(paths: RunPaths, numbers: Iterable[int]) -> dict[int, str]:
    """`000012:0123456789abcdef`: number and checksum of each batch, so that its content is known, too.

    A batch that has lost its checksum is not among them.
    """
    digests = recorded_digests(paths.batch(0))
    found = {number: digests.get(paths.batch(number).name) for number in numbers}
    return {
        number: f"{number:06d}:{'+'.join(sorted(digest[:16] for digest in one))}"
        for number, one in found.items()
        if one
    }


def _merged_from(artifact: Path, run_id: str) -> set[str] | None:
    """The batches an artifact was made of; None where no artifact of this run says so."""
    try:
        metadata = read_footer(artifact).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    if metadata.get(b"rollstream.run_id", b"").decode() != run_id or _MERGED_KEY not in metadata:
        return None
    return set(metadata[_MERGED_KEY].decode().split())


def is_current(paths: RunPaths, run_id: str) -> bool:
    """Whether the artifact holds the rows of all batches that there are, with the run's own rewards."""
    numbers = set(paths.batch_numbers())
    merged = _merged_from(paths.artifact, run_id)
    if merged is None or numbers != _in_artifact(paths, merged, numbers) | _links(paths, numbers):
        return False
    return has_rewards(read_footer(paths.artifact), Rewards(paths.root))


def merged_batches(paths: RunPaths, run_id: str) -> list[int]:
    """Numbers of the batches whose rows the artifact holds, too, under a file of its own."""
    numbers = set(paths.batch_numbers())
    merged = _merged_from(paths.artifact, run_id) or set()
    return sorted(_in_artifact(paths, merged, numbers) - _links(paths, numbers))


def holds_other_batches(paths: RunPaths, run_id: str, numbers: Collection[int]) -> bool:
    """Whether the artifact may hold rollouts that are in none of these batches, by its footer."""
    if not paths.artifact.exists() or _links(paths, numbers):
        return False
    merged = _merged_from(paths.artifact, run_id)
    return merged is None or not merged <= {*_batch_names(paths, numbers).values()}


def is_merged(paths: RunPaths, run_id: str, name: str) -> bool:
    """Whether the artifact holds the rows of the batch that has, or is to have, this file name."""
    number = int(name.removeprefix("batch_").removesuffix(".parquet"))
    merged = _merged_from(paths.artifact, run_id)
    return merged is not None and bool(_in_artifact(paths, merged, [number]) | _links(paths, [number]))


def _in_artifact(paths: RunPaths, merged: set[str], numbers: Iterable[int]) -> set[int]:
    return {number for number, name in _batch_names(paths, numbers).items() if name in merged}


def _links(paths: RunPaths, numbers: Iterable[int]) -> set[int]:
    """Those of the batches that are the artifact itself, under a second name."""
    own = recorded_digests(paths.artifact).get(paths.artifact.name, set())
    digests = recorded_digests(paths.batch(0))
    return {number for number in numbers if own & digests.get(paths.batch(number).name, set())}


class MergeCancelledError(Exception):
    """A merge was told to stop. The old artifact, if any, stays."""


def merge_batches(
    paths: RunPaths,
    run_id: bytes,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    bucket_bytes: int = _BUCKET_BYTES,
    rewards: Rewards | None = None,
) -> int:
    """Writes the artifact; returns its rows. One that is up to date and matches its checksum is left as it is.

    Args:
        paths: of the run; everything must be sealed.
        run_id: 16 bytes.
        rewards: the artifact's; None: the run's own.
        cancelled: asked between row groups.
        bucket_bytes: bytes sorted in memory at once.

    Raises:
        DamagedFileError: a batch is damaged, or the artifact that stands for its batches. The old artifact, if
            any, stays.
        StorageError: the disk is full, or the artifact holds more than the batches. It stays.
        MergeCancelledError: `cancelled` said so. The old artifact, if any, stays.
    """
    numbers = paths.batch_numbers()
    if is_current(paths, run_id.hex()):
        try:
            require_intact(paths.artifact)
            return file_rows(paths.artifact)
        except DamagedFileError as error:
            if links := _links(paths, numbers):
                raise DamagedFileError(
                    paths.batch(min(links)), f"{error}, and there is no other copy"
                ) from error
            logger.warning("%s; it is made again", error)
    batches = [paths.batch(number) for number in numbers]
    rewards = rewards or Rewards(paths.root)
    spread = paths.root / MERGE_FOLDER
    shutil.rmtree(spread, ignore_errors=True)
    logger.info("merging %d batches into %s", len(batches), paths.artifact)

    def tables() -> Iterator[pa.Table]:
        for path in batches:
            for table in until(read_tables(path), cancelled):
                yield rewards.current(table.replace_schema_metadata(None))

    try:
        ranks = _ranks(batches)
        count = int((ranks != _LEFT_OUT).sum())
        _refuse_fewer(paths, run_id, count)
        kinds = {logprobs_of(read_footer(path)) for path in batches} - {None}
        kind = kinds.pop() if len(kinds) == 1 else None
        metadata = batch_metadata(run_id, kind) | rewards_metadata(rewards)
        metadata[_MERGED_KEY.decode()] = " ".join(sorted(_batch_names(paths, numbers).values()))
        parts = _sorted_tables(
            tables, ranks, range(count), sum(map(_encoded_bytes, batches)), bucket_bytes, spread
        )
        write_tables_durably(paths.artifact, until(parts, cancelled), metadata)
        forget_old_digests(paths.artifact)
        return count
    except OSError as error:
        raise StorageError(
            f"cannot write {paths.artifact}: {error.strerror or error}. The batches are safe; free space and "
            "run the same command again."
        ) from error
    finally:
        shutil.rmtree(spread, ignore_errors=True)


def _refuse_fewer(paths: RunPaths, run_id: bytes, rows: int) -> None:
    """What holds rollouts is never overwritten by fewer of them: opening the run takes them back first."""
    if _merged_from(paths.artifact, run_id.hex()) is not None and file_rows(paths.artifact) > rows:
        raise StorageError(
            f"{paths.artifact} holds {file_rows(paths.artifact)} trajectories, and the batches only {rows}; "
            f"it was left as it is. `rollstream validate --repair {paths.root}` takes them back from it"
        )


def until(tables: Iterator[pa.Table], cancelled: Callable[[], bool]) -> Iterator[pa.Table]:
    """The same tables; raises `MergeCancelledError` as soon as `cancelled` says so."""
    for table in tables:
        if cancelled():
            raise MergeCancelledError
        yield table


def _encoded_bytes(path: Path) -> int:
    """Of a batch before compression, by its footer."""
    with reading(path):
        metadata = read_footer(path)
        return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def _ranks(batches: Sequence[Path]) -> npt.NDArray[np.uint32]:
    """Where each row goes in the artifact, batch by batch, row by row; `_LEFT_OUT` for one that does not.

    Shape (rows of all batches,). The peak is some 35 bytes a row.
    """
    keys, ends, rows = [np.zeros(0, np.int64)], [], 0
    for path in batches:
        for table in read_tables(path, ["index", "repeat"]):
            keys.append(column_values(table["index"]) << _REPEAT_BITS | column_values(table["repeat"]))
            rows += len(table)
        ends.append(rows)
    packed = np.concatenate(keys)
    del keys
    if rows >= _LEFT_OUT:
        raise StorageError(f"{rows} rows are more than can be merged; merge fewer shards at a time")
    order = packed.argsort(kind="stable")
    begins = np.diff(packed[order], prepend=-1) != 0
    batch = np.searchsorted(ends, order, side="right").astype(np.uint32)
    kept = order[batch == batch[begins][np.cumsum(begins, dtype=np.uint32) - 1]]
    ranks = np.full(rows, _LEFT_OUT, np.uint32)
    ranks[kept] = np.arange(len(kept), dtype=np.uint32)
    return ranks


def _sorted_tables(
    tables: Callable[[], Iterator[pa.Table]],
    ranks: npt.NDArray[np.uint32],
    wanted: range,
    total_bytes: int,
    bucket_bytes: int,
    folder: Path,
) -> Iterator[pa.Table]:
    """The rows of `tables` by rank, as tables of about `bucket_bytes`.

    Args:
        tables: gives the rows, each time it is called, in the same order.
        ranks: rank of each row, or `_LEFT_OUT`; shape (rows,).
        wanted: the ranks there are, each once.
        total_bytes: of all rows, about.
        bucket_bytes: sorted in memory at once.
        folder: for temporary files.
    """
    if not wanted:
        return
    buckets = max(1, min(-(-total_bytes // bucket_bytes), _MAX_BUCKETS, len(wanted)))
    folder.mkdir()
    # Cut by rank: bucket b has the ranks from edges[b] on.
    edges = [wanted.start + number * len(wanted) // buckets for number in range(buckets + 1)]
    ranks_of: list[list[npt.NDArray[np.uint32]]] = [[] for _ in range(buckets)]
    sizes = [0] * buckets
    with ExitStack() as files:
        writers = [
            files.enter_context(pa.ipc.new_file(str(folder / f"{number}.arrow"), SCHEMA))
            for number in range(buckets)
        ]
        for rank, table in _kept_rows(tables(), ranks):
            bucket_of = np.searchsorted(edges, rank, side="right") - 1
            for number in np.unique(bucket_of):
                chosen = bucket_of == number
                part = table if chosen.all() else table.filter(to_arrow(chosen))
                writers[number].write_table(part)
                ranks_of[number].append(rank[chosen])
                sizes[number] += part.nbytes
    for number in range(buckets):
        path = folder / f"{number}.arrow"
        here = range(edges[number], edges[number + 1])
        rank = np.concatenate(ranks_of[number])
        ranks_of[number] = []
        if sizes[number] > 2 * bucket_bytes and len(here) > 1:
            # Its rows are unusually long, or were small only as they are encoded: it is cut again.
            inner = folder / f"{number}"
            cut_again = partial(_read_ipc, path)
            yield from _sorted_tables(cut_again, rank, here, sizes[number], bucket_bytes, inner)
            shutil.rmtree(inner)
        else:
            yield _take(pa.concat_tables(_read_ipc(path)), np.argsort(rank))
        path.unlink()


def _read_ipc(path: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            yield pa.Table.from_batches([file.get_batch(number)])


def _kept_rows(
    tables: Iterator[pa.Table], ranks: npt.NDArray[np.uint32]
) -> Iterator[tuple[npt.NDArray[np.uint32], pa.Table]]:
    """Tables with the rank of each row, without the rows that are left out."""
    at = 0
    for table in tables:
        rank = ranks[at : at + len(table)]
        at += len(table)
        kept = rank != _LEFT_OUT
        yield (rank, table) if kept.all() else (rank[kept], table.filter(to_arrow(kept)))


def _take(table: pa.Table, order: npt.NDArray[np.intp]) -> pa.Table:
    return table if (np.diff(order) == 1).all() else table.take(to_arrow(order))
