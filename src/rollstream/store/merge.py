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

from rollstream.errors import DamageError, StorageError
from rollstream.store.arrow import column_values, to_arrow
from rollstream.store.batch import (
    SCHEMA,
    DamagedFileError,
    batch_metadata,
    file_rows,
    forget_old_digests,
    logprobs_of,
    read_footer,
    read_tables,
    recorded_digests,
    require_intact,
    write_tables_durably,
)
from rollstream.store.keys import rollout_numbers
from rollstream.store.paths import MERGE_FOLDER, RunPaths
from rollstream.store.scores import Rewards

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 16 << 20
"""Uncompressed bytes of a bucket: sorting it takes about three times that."""

_MAX_BUCKETS = 512
"""Open files while rows are spread; in artifacts above 8 GB buckets are cut twice."""

_LEFT_OUT = 0xFFFFFFFF
"""Rank of a row that is not in the artifact."""

_MERGED_KEY = b"rollstream.batches"
"""Metadata key of the artifact: the batches it was made of, as `_batch_names` has them."""


def _batch_names(paths: RunPaths, numbers: Iterable[int]) -> dict[int, str]:
    """`000012:0123456789abcdef`: number and checksum of each batch, so that its content is known, too.

    A batch that has lost its checksum is not among them.
    """
    digests = recorded_digests(paths.batch(0))
    known = ((number, digests.get(paths.batch(number).name)) for number in numbers)
    return {
        number: f"{number:06d}:{'+'.join(sorted(digest[:16] for digest in noted))}"
        for number, noted in known
        if noted
    }


def source_digest(paths: RunPaths) -> str:
    """Names the content of a run's batches and its own rewards; equal digests: nothing new to upload."""
    names = _batch_names(paths, paths.batch_numbers())
    content = " ".join([*sorted(names.values()), *filter(None, [Rewards(paths.root).content])])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


class Artifact:
    """What the merged artifact of a run holds, by its footer and the checksums, as they are now."""

    def __init__(self, paths: RunPaths, run_id: str) -> None:
        self.paths = paths
        self._footer = None
        self._merged: set[str] | None = None
        """The batches that it was made of; None where no artifact of this run says so."""
        try:
            self._footer = read_footer(paths.artifact)
        except (OSError, DamageError, StorageError):
            return
        metadata = self._footer.metadata or {}
        if metadata.get(b"rollstream.run_id") == run_id.encode() and _MERGED_KEY in metadata:
            self._merged = set(metadata[_MERGED_KEY].decode().split())

    @property
    def is_known(self) -> bool:
        """Whether it is an artifact of this run that says of which batches it was made."""
        return self._merged is not None

    def is_current(self) -> bool:
        """Whether it holds the rows of all batches that there are, with the run's own rewards."""
        if self._merged is None or self._footer is None:
            return False
        numbers = self.paths.batch_numbers()
        return {*numbers} == self.holds(numbers) and Rewards(self.paths.root).are_in(self._footer)

    def holds(self, numbers: Collection[int]) -> set[int]:
        """The batches among these whose rows it holds, whether they are there or not."""
        if self._merged is None:
            return set()
        names = _batch_names(self.paths, numbers)
        return {number for number, name in names.items() if name in self._merged} | self.links(numbers)

    def links(self, numbers: Collection[int]) -> set[int]:
        """The batches among these that are the artifact itself, under a second name."""
        own = recorded_digests(self.paths.artifact).get(self.paths.artifact.name, set())
        digests = recorded_digests(self.paths.batch(0))
        return {number for number in numbers if own & digests.get(self.paths.batch(number).name, set())}

    def may_hold_others(self, numbers: Collection[int]) -> bool:
        """Whether it may hold rollouts that are in none of these batches."""
        if not self.paths.artifact.exists() or self.links(numbers):
            return False
        return self._merged is None or not self._merged <= {*_batch_names(self.paths, numbers).values()}


class MergeCancelledError(Exception):
    """A merge was told to stop. The old artifact, if any, stays."""


def merge_batches(
    paths: RunPaths,
    run_id: bytes,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    bucket_bytes: int = _BUCKET_BYTES,
) -> int:
    """Writes the artifact; returns its rows. One that is up to date and matches its checksum is left as it is.

    Args:
        paths: of the run; everything must be sealed.
        run_id: 16 bytes.
        cancelled: asked between row groups.
        bucket_bytes: bytes sorted in memory at once.

    Raises:
        DamagedFileError: a batch is damaged, or the artifact that stands for its batches. The old artifact, if
            any, stays.
        StorageError: the disk is full, or the artifact holds more than the batches. It stays.
        MergeCancelledError: `cancelled` said so. The old artifact, if any, stays.
    """
    numbers, artifact = paths.batch_numbers(), Artifact(paths, run_id.hex())
    if artifact.is_current():
        try:
            require_intact(paths.artifact)
            return file_rows(paths.artifact)
        except DamagedFileError as error:
            if links := artifact.links(numbers):
                raise DamagedFileError(
                    paths.batch(min(links)), f"{error}, and there is no other copy"
                ) from error
            logger.warning("%s; it is made again", error)
    batches, rewards = [paths.batch(number) for number in numbers], Rewards(paths.root)
    spread = paths.root / MERGE_FOLDER
    shutil.rmtree(spread, ignore_errors=True)
    logger.debug("merging %d batches into %s", len(batches), paths.artifact)

    def tables() -> Iterator[pa.Table]:
        for path in batches:
            yield from map(rewards.current, until(read_tables(path), cancelled))

    try:
        ranks = _ranks(batches)
        count = int((ranks != _LEFT_OUT).sum())
        if artifact.is_known and (before := file_rows(paths.artifact)) > count:
            # What holds rollouts is never overwritten by fewer of them: opening the run takes them back first.
            raise StorageError(
                f"{paths.artifact} holds {before} trajectories, and the batches only {count}; it was left as it is. "
                f"`rollstream validate --repair {paths.root}` takes them back from it"
            )
        footers = [read_footer(path) for path in batches]
        kinds = {logprobs_of(footer) for footer in footers} - {None}
        metadata = batch_metadata(run_id, kinds.pop() if len(kinds) == 1 else None) | rewards.metadata()
        metadata[_MERGED_KEY.decode()] = " ".join(sorted(_batch_names(paths, numbers).values()))
        size = sum(
            footer.row_group(group).total_byte_size
            for footer in footers
            for group in range(footer.num_row_groups)
        )
        parts = _sorted_tables(tables, ranks, range(count), size, bucket_bytes, spread)
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


def until(tables: Iterator[pa.Table], cancelled: Callable[[], bool]) -> Iterator[pa.Table]:
    """The same tables; raises `MergeCancelledError` as soon as `cancelled` says so."""
    for table in tables:
        if cancelled():
            raise MergeCancelledError
        yield table


def _ranks(batches: Sequence[Path]) -> npt.NDArray[np.uint32]:
    """Where each row goes in the artifact, batch by batch, row by row; `_LEFT_OUT` for one that does not.

    Shape (rows of all batches,). The peak is some 35 bytes a row.
    """
    keys, ends, rows = [np.zeros(0, np.int64)], [], 0
    for path in batches:
        for table in read_tables(path, ["index", "repeat"]):
            keys.append(rollout_numbers(column_values(table["index"]), column_values(table["repeat"])))
            rows += len(table)
        ends.append(rows)
    if rows >= _LEFT_OUT:
        raise StorageError(f"{rows} rows are more than can be merged; merge fewer shards at a time")
    packed = np.concatenate(keys)
    del keys
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
        tables: gives the rows.
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
    sizes, at = [0] * buckets, 0
    with ExitStack() as files:
        writers = [
            files.enter_context(pa.ipc.new_file(str(folder / f"{number}.arrow"), SCHEMA))
            for number in range(buckets)
        ]
        for table in tables():
            rank, at = ranks[at : at + len(table)], at + len(table)
            bucket_of = np.searchsorted(edges, rank, side="right") - 1
            bucket_of[rank == _LEFT_OUT] = -1
            for number in np.unique(bucket_of[bucket_of >= 0]).tolist():
                chosen = bucket_of == number
                part = table if chosen.all() else table.filter(to_arrow(chosen))
                writers[number].write_table(part)
                ranks_of[number].append(rank[chosen])
                sizes[number] += part.nbytes
    for number, size in enumerate(sizes):
        path, here = folder / f"{number}.arrow", range(edges[number], edges[number + 1])
        rank, ranks_of[number] = np.concatenate(ranks_of[number]), []
        if size > 2 * bucket_bytes and len(here) > 1:
            # Its rows are unusually long, or were small only as they are encoded: it is cut again.
            inner = folder / f"{number}"
            yield from _sorted_tables(partial(_read_ipc, path), rank, here, size, bucket_bytes, inner)
            shutil.rmtree(inner)
        else:
            table, order = pa.concat_tables(_read_ipc(path)), np.argsort(rank)
            yield table if (np.diff(order) == 1).all() else table.take(to_arrow(order))
        path.unlink()


def _read_ipc(path: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            yield pa.Table.from_batches([file.get_batch(number)])
