"""Batches: sealed Parquet files of trajectories, sorted by key, zstd, with page checksums.

Journal file N becomes batch N (`seal_journal`). The schema is the same in every batch and in the merged
artifact. It has row groups of 1,024 rows at most, with the range of their keys in the footer, so that one
rollout is found in milliseconds; what is counted of a row's tokens is a column of its own, so that a look at
all rows reads no tokens. Beside them stand `_SHA256SUMS` (batches) and `trajectories.parquet.sha256`, for `rollstream
validate` and for `sha256sum -c`: page checksums do not cover a Parquet file's footer. A line is durable
before its file has its name, so a file that has its name has a line. (Readers of Parquet folders pass over
names that begin with an underscore.)
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollstream.errors import DamageError, RunDirectoryError, StorageError
from rollstream.store.journal import ScanReport, scan, sync_folder, write_file_durably
from rollstream.store.records import RecordCodec, RolloutRecord, TrajectoryRecord, scoring_failed
from rollstream.trajectory import LogprobKind, Metrics
from rollstream.untrusted import open_regular, read_regular

_LOGPROBS = b"rollstream.logprobs"
"""Metadata key of what the log-probs are of."""

METRIC_NAMES = tuple(field.name for field in fields(Metrics))

BATCH_FORMAT = "rollstream.batch/3"
"""Stands in the metadata of every batch and artifact."""

_BEFORE_COUNTS = "rollstream.batch/2"
"""The format without the columns of `COUNTS`, which are computed when such a file is read. No other is read."""

RECORDED = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("repeat", pa.int32(), nullable=False),
        pa.field("trajectory", pa.int32(), nullable=False),
        pa.field("prompt_key", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_mask", pa.list_(pa.int8()), nullable=False),
        pa.field("response_logprobs", pa.list_(pa.float32())),
        pa.field(
            "policy_versions",
            pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int64())])),
            nullable=False,
        ),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("is_snapshot", pa.bool_(), nullable=False),
        pa.field("num_turns", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_extra", pa.string(), nullable=False),
        pa.field("metrics", pa.struct([(name, pa.float64()) for name in METRIC_NAMES]), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("ground_truth", pa.string(), nullable=False),
        pa.field("extra", pa.string(), nullable=False),
    ]
)
"""What a rollout says of itself. `messages`, `reward_extra`, `ground_truth` and `extra` hold JSON text."""

COUNTS = pa.schema(
    [
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("response_tokens", pa.int32(), nullable=False),
        pa.field("sampled_tokens", pa.int32(), nullable=False),
        pa.field("mean_logprob", pa.float32()),
        pa.field("finished_at", pa.float64()),
    ]
)
"""What is counted of a row when it is sealed, and when its rollout was encoded (Unix seconds)."""

SCHEMA = pa.schema([*RECORDED, *COUNTS])
"""Columns of a batch."""

KEY_COLUMNS = ["index", "repeat", "trajectory"]

_COMPRESSION_LEVEL = 1
"""Ids and log-probs are as small at level 1 as at 3 (the default), and written in two thirds of the time."""

_ROW_GROUP_ROWS = 1 << 10
"""Rows of a row group at most: who looks at one trajectory reads its row group."""

_ROW_GROUP_BYTES = 8 << 20
"""Uncompressed bytes of a row group, about: with long rows it has fewer. One trajectory out of it takes 3 to
20 ms, and a look at one column of a million rows of 1,000 tokens 0.1 s; a quarter of it would double the latter."""


KEYS = np.dtype(
    [
        ("index", np.int64),
        ("repeat", np.int32),
        ("trajectory", np.int32),
        ("reward", np.float64),
        ("final", np.bool_),
        ("unscored", np.bool_),
    ]
)
"""What is known of a row without reading its tokens. `reward`: NaN = not scored; `unscored`: a final trajectory
whose reward function failed."""

BatchKeys = npt.NDArray[np.void]
"""Array of `KEYS`, shape (rows,)."""


def whole_rollouts(keys: BatchKeys) -> npt.NDArray[np.bool_]:
    """Which rows belong to rollouts that are here from their first trajectory to their final one."""
    if not len(keys):
        return np.zeros(0, bool)
    begins = np.ones(len(keys), bool)
    begins[1:] = (np.diff(keys["index"]) != 0) | (np.diff(keys["repeat"]) != 0)
    starts = np.flatnonzero(begins)
    sizes = np.diff(np.append(starts, len(begins)))
    first, last = keys[starts], keys[starts + sizes - 1]
    whole = (first["trajectory"] == 0) & (last["trajectory"] == sizes - 1) & last["final"]
    return np.repeat(whole, sizes)


def build_table(records: Sequence[RolloutRecord]) -> pa.Table:
    """Rows of many rollouts as one table, sorted by key."""
    rows: list[tuple[RolloutRecord, int, TrajectoryRecord]] = [
        (record, number, trajectory)
        for record in sorted(records, key=lambda record: (record.index, record.repeat))
        for number, trajectory in enumerate(record.trajectories)
    ]
    records = [record for record, _, _ in rows]
    trajectories = [trajectory for _, _, trajectory in rows]
    metrics = np.array([one.metrics for one in trajectories], np.float64).reshape(len(rows), -1)
    columns = [
        to_arrow(np.array([record.index for record in records], np.int64)),
        to_arrow(np.array([record.repeat for record in records], np.int32)),
        to_arrow(np.array([number for _, number, _ in rows], np.int32)),
        to_arrow_texts([record.prompt_key for record in records]),
        _list_array([one.prompt_ids for one in trajectories], np.dtype("<i4")),
        _list_array([one.response_ids for one in trajectories], np.dtype("<i4")),
        _list_array([one.response_mask for one in trajectories], np.dtype("i1")),
        _list_array([one.response_logprobs for one in trajectories], np.dtype("<f4")),
        _versions_array([one.policy_versions for one in trajectories]),
        to_arrow_texts([one.messages for one in trajectories]),
        to_arrow(np.array([one.is_snapshot for one in trajectories], np.bool_)),
        to_arrow(np.array([one.num_turns for one in trajectories], np.int32)),
        to_arrow_texts([one.finish_reason for one in trajectories]),
        to_arrow_floats([one.reward for one in trajectories]),
        to_arrow_texts([one.reward_extra for one in trajectories]),
        pa.StructArray.from_arrays([to_arrow(column) for column in metrics.T], list(METRIC_NAMES)),
        to_arrow(np.array([record.attempts for record in records], np.int32)),
        to_arrow_texts([record.data_source for record in records]),
        to_arrow_texts([record.ground_truth for record in records]),
        to_arrow_texts([one.extra for one in trajectories]),
    ]
    recorded = pa.Table.from_arrays(columns, schema=RECORDED)
    return with_counts(recorded, to_arrow_floats([record.finished_at for record in records]))


def with_counts(table: pa.Table, finished_at: pa.Array | None = None) -> pa.Table:
    """Rows of all of `RECORDED` with the columns of `COUNTS` behind them."""
    prompt_offsets, _ = _list_parts(table["prompt_ids"])
    offsets, mask = _list_parts(table["response_mask"])
    logprob_offsets, logprobs = _list_parts(table["response_logprobs"])
    prompts, responses = np.diff(prompt_offsets), np.diff(offsets)
    for row in np.flatnonzero(prompts == 0):  # no tokenizer: as the endpoint counts
        usage = orjson.loads(table["extra"][int(row)].as_py()).get("usage")
        prompts[row], responses[row] = (_usage(usage, name) for name in ("prompt_tokens", "response_tokens"))
    sampled = _sums(mask, offsets)
    known = (sampled > 0) & (np.diff(logprob_offsets) > 0)
    means = _sums(logprobs, logprob_offsets) / np.where(known, sampled, 1)  # 0.0 where the mask is 0
    columns = [
        to_arrow(prompts.astype(np.int32)),
        to_arrow(responses.astype(np.int32)),
        to_arrow(sampled.astype(np.int32)),
        to_arrow(means.astype(np.float32), known),
        pa.nulls(len(table), pa.float64()) if finished_at is None else finished_at,
    ]
    return pa.Table.from_arrays([*table.columns, *columns], schema=SCHEMA)


def _usage(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and 0 <= count < 1 << 31 else 0


def _list_parts(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Where each list of numbers begins and the last one ends, and the numbers."""
    lists = column.combine_chunks()
    return np.from_dlpack(lists.offsets), np.from_dlpack(lists.values)


def _sums(values: Any, offsets: Any) -> npt.NDArray[np.float64]:
    """The sum of each list."""
    sums = np.zeros(len(offsets) - 1)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        sums[filled] = np.add.reduceat(values[: offsets[-1]], offsets[filled], dtype=np.float64)
    return sums


def to_arrow(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An array of numbers or truths, with nulls where they are not `valid`."""
    # By its buffers: `pa.array` would import pandas, which takes half a second.
    data = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    nulls = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [nulls, pa.py_buffer(data)])


def to_arrow_floats(values: Sequence[float | None]) -> pa.Array:
    """An array of numbers, None as null."""
    found = np.array(values, np.float64)  # None is NaN
    valid = np.array([value is not None for value in values], np.bool_)
    return to_arrow(found, None if valid.all() else valid)


def to_arrow_texts(texts: Sequence[str]) -> pa.Array:
    """An array of texts."""
    parts = list(map(str.encode, texts))
    buffers = [None, pa.py_buffer(_offsets(parts)), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


def _list_array(parts: Sequence[bytes | None], dtype: np.dtype[np.generic]) -> pa.Array:
    present, mask = [part or b"" for part in parts], None
    if None in parts:
        mask = to_arrow(np.array([part is None for part in parts], np.bool_))
    values = to_arrow(np.frombuffer(b"".join(present), dtype))
    return pa.ListArray.from_arrays(to_arrow(_offsets(present) // dtype.itemsize), values, mask=mask)


def _versions_array(versions: Sequence[Sequence[tuple[int, int]]]) -> pa.Array:
    runs = np.array([run for runs in versions for run in runs], np.int64).reshape(-1, 2)
    values = pa.StructArray.from_arrays(
        [to_arrow(runs[:, 0].astype(np.int32)), to_arrow(runs[:, 1])], ["start", "version"]
    )
    return pa.ListArray.from_arrays(to_arrow(_offsets(versions)), values)


def _offsets(parts: Sequence[Sized]) -> npt.NDArray[np.int32]:
    """Where each part begins and the last one ends, when they are joined."""
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, parts), np.int32, len(parts)), out=offsets[1:])
    return offsets


def seal_journal(
    journal: Path, batch: Path, run_id: bytes, logprobs: LogprobKind | None = None
) -> ScanReport:
    """Writes the whole frames of a journal file as a batch, durably; the journal is left to the caller.

    A batch is written even when some frames are damaged; the report says so. When there is no whole
    frame, no batch is written. Of frames with the same key, the first counts.
    """
    report = ScanReport()
    codec = RecordCodec()
    records: dict[tuple[int, int], RolloutRecord] = {}
    for frame in scan(journal, run_id, report):
        if (frame.index, frame.repeat) not in records:
            records[frame.index, frame.repeat] = codec.decode_rollout(frame.body)
    if records:
        write_table_durably(batch, build_table(list(records.values())), batch_metadata(run_id, logprobs))
    return report


def batch_metadata(run_id: bytes, logprobs: LogprobKind | None = None) -> dict[str, str]:
    """Key-value metadata of every Parquet file of a run; `logprobs`: see `Manifest`."""
    found = {"rollstream.format": BATCH_FORMAT, "rollstream.run_id": run_id.hex()}
    return found if logprobs is None else {**found, _LOGPROBS.decode(): logprobs}


def logprobs_of(footer: pq.FileMetaData) -> LogprobKind | None:
    """The kind of log-probs in a batch or artifact; None where it does not say."""
    return {b"raw": "raw", b"processed": "processed"}.get((footer.metadata or {}).get(_LOGPROBS, b""))  # type: ignore[return-value]


def write_table_durably(path: Path, table: pa.Table, metadata: dict[str, str]) -> None:
    """Writes one batch: temporary name, fsync, rename, fsync of the folder."""
    write_tables_durably(path, [table], metadata)


def write_tables_durably(path: Path, tables: Iterable[pa.Table], metadata: dict[str, str]) -> int:
    """Writes a batch or an artifact of sorted tables, one in memory at a time; returns its rows.

    `metadata` goes into the file's key-value metadata.
    """
    temporary = path.with_name(path.name + ".tmp")
    rows = 0
    try:
        temporary.unlink(missing_ok=True)  # a link of this name would lead elsewhere
        with pq.ParquetWriter(
            temporary,
            SCHEMA.with_metadata(metadata),
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            write_page_checksum=True,
            use_dictionary=["prompt_key", "finish_reason", "data_source", "reward_extra"],
            write_statistics=["index", "repeat", "trajectory"],
        ) as writer:
            for table in tables:
                if len(table):
                    group = max(
                        1, min(_ROW_GROUP_ROWS, _ROW_GROUP_BYTES * len(table) // max(1, table.nbytes))
                    )
                    writer.write_table(table.replace_schema_metadata(metadata), row_group_size=group)
                rows += len(table)
        commit_file(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return rows


def commit_file(temporary: Path, path: Path) -> None:
    """Makes a finished temporary file durable under its name, its checksum noted beforehand."""
    fd = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    note_digest(path, of=temporary)
    temporary.rename(path)
    sync_folder(path.parent)


def link_file(source: Path, path: Path) -> bool:
    """Gives a file a second name, durably; False where the file system cannot."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.hardlink_to(source)
    except OSError:
        return False
    commit_file(temporary, path)
    return True


def _append_line(path: Path, line: bytes) -> None:
    """Appends a line durably; an unfinished line before it (a crash, a full disk) stays one by itself."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = b"" if size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n" else b"\n"
        file.write(begin + line)
        file.flush()
        os.fdatasync(file.fileno())


def _sums_file(path: Path) -> Path:
    return path.with_name("_SHA256SUMS") if path.parent.name == "batches" else Path(f"{path}.sha256")


def note_digest(path: Path, *, of: Path | None = None) -> None:
    """Notes the checksum of a file, or of one that is to have its name."""
    _append_line(_sums_file(path), f"{file_digest(of or path)}  {path.name}\n".encode())


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_intact(path: Path) -> None:
    """Compares a file with its checksum, where one is noted.

    Raises:
        DamagedFileError: its bytes are not what was written.
        StorageError: it cannot be read right now.
    """
    with reading(path):
        known = recorded_digests(path).get(path.name)
        if known is not None and file_digest(path) not in known:
            raise DamagedFileError(path, f"{path.name} is damaged: it does not match its checksum")


def forget_digests(folder: Path, names: set[str]) -> None:
    """Takes batches that are not in their folder any more out of its checksum file."""
    sums = folder / "_SHA256SUMS"
    if names and sums.exists():
        lines = sums.read_bytes().splitlines(keepends=True)
        kept = [
            line for line in lines if line.decode(errors="replace").strip().partition("  ")[2] not in names
        ]
        write_file_durably(sums, b"".join(kept))


def forget_old_digests(artifact: Path) -> None:
    """Keeps only the last line of an artifact's checksum file, that of the artifact just committed."""
    sums = _sums_file(artifact)
    write_file_durably(sums, sums.read_bytes().splitlines(keepends=True)[-1])


def recorded_digests(path: Path) -> dict[str, set[str]]:
    """SHA-256 by file name, as noted for a batch or artifact and those beside it.

    Several for one name: a crash came between noting and renaming, and either may be what is there.
    """
    try:
        text = read_regular(_sums_file(path)).decode(errors="replace")
    except FileNotFoundError:
        return {}
    digests: dict[str, set[str]] = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        digests.setdefault(name, set()).add(digest)
    return digests


def open_parquet(path: Path) -> pq.ParquetFile:
    """Opens a batch or artifact with page checksums verified.

    Raises:
        DamageError: its bytes are not what was written.
        StorageError: it cannot be read right now (I/O error, no memory, too many open files).
        RunDirectoryError: another version of rollstream wrote it.
    """
    with reading(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
    written_as = (file.metadata.metadata or {}).get(b"rollstream.format", b"").decode(errors="replace")
    schema = {BATCH_FORMAT: SCHEMA, _BEFORE_COUNTS: RECORDED}.get(written_as)
    if schema is None and re.fullmatch(r"rollstream\.batch/\d+", written_as):
        file.close()
        raise RunDirectoryError(
            f"{path} has format {written_as!r}; this version of rollstream reads {BATCH_FORMAT!r}"
        )
    if schema is None or not file.schema_arrow.equals(schema):
        file.close()
        raise DamagedFileError(path, f"{path.name} does not have the columns of a batch")
    return file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tells damage from a passing failure to read: only the former quarantines a file.

    Arrow says both with the same exceptions; an operating system's error has an errno, a checksum's has not.
    """
    try:
        open_regular(path).close()  # Arrow would wait for who writes into a FIFO
        yield
    except pa.ArrowMemoryError as error:
        raise StorageError(f"cannot read {path}: not enough memory") from error
    except OSError as error:
        if error.errno is not None:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        raise DamagedFileError(path, f"{path.name} is damaged: {_first_line(error)}") from error
    except (pa.ArrowException, UnicodeDecodeError, orjson.JSONDecodeError) as error:
        raise DamagedFileError(path, f"{path.name} is damaged: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Arrow's messages have several lines; the first says it."""
    return str(error).partition("\n")[0]


def read_tables(
    path: Path, columns: Sequence[str] | None = None, *, skip_damaged: bool = False
) -> Iterator[pa.Table]:
    """A batch's or artifact's rows, row group by row group; raises as `open_parquet`.

    Args:
        path: the file.
        columns: None for all.
        skip_damaged: give what can be read instead of raising `DamagedFileError`.
    """
    try:
        file = open_parquet(path)
    except DamagedFileError:
        if skip_damaged:
            return
        raise
    with file:
        for group in range(file.num_row_groups):
            try:
                with reading(path):
                    table = read_group(file, group, columns)
            except DamagedFileError:
                if skip_damaged:
                    continue
                raise
            yield table


def read_group(file: pq.ParquetFile, group: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a row group; without `columns` all of `SCHEMA`, whatever format the file has."""
    counted = "finished_at" in file.schema_arrow.names
    if counted or (columns is not None and not set(columns) & set(COUNTS.names)):
        return file.read_row_group(group, columns=columns, use_threads=False)
    table = with_counts(file.read_row_group(group, use_threads=False).replace_schema_metadata(None))
    return table if columns is None else table.select(columns)


class DamagedFileError(DamageError):
    """A file's bytes are not what was written; `path` says which."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def read_footer(path: Path) -> pq.FileMetaData:
    """The footer of a batch or artifact. Raises what Arrow does, and `OSError` where it is no file."""
    open_regular(path).close()
    return pq.read_metadata(path)


def file_rows(path: Path) -> int:
    """Rows of a batch or artifact, by its footer."""
    with reading(path):
        return int(read_footer(path).num_rows)


def belongs_to(file: pq.ParquetFile, run_id: str) -> bool:
    """Whether a batch or artifact is of this run: files get copied."""
    return bool((file.metadata.metadata or {}).get(b"rollstream.run_id") == run_id.encode())


def read_keys(path: Path, run_id: str, current: Callable[[pa.Table], pa.Table] | None = None) -> BatchKeys:
    """Reads the key columns of a batch or artifact.

    Args:
        path: the file.
        run_id: whose it has to be.
        current: gives rows the run's own rewards; None: those in the file are.

    Raises:
        DamageError: also when it is of another run.
        RunDirectoryError: as `open_parquet`, like `StorageError`.
    """
    with open_parquet(path) as file, reading(path):
        if not belongs_to(file, run_id):
            raise DamagedFileError(path, f"{path.name} belongs to another run")
        names = [*KEY_COLUMNS, *["finished_at"] * (current is not None), "reward", "is_snapshot"]
        table = file.read(names, use_threads=False)
        if table["reward"].null_count or current is not None:
            extras = file.read(["reward_extra"], use_threads=False)["reward_extra"]
            table = table.append_column("reward_extra", extras)
    return table_keys(table if current is None else current(table))


def table_keys(table: pa.Table) -> BatchKeys:
    """The keys of rows; without `reward_extra` among them, no reward function has failed."""
    keys = np.zeros(len(table), KEYS)
    for name in KEY_COLUMNS:
        keys[name] = column_values(table[name])
    keys["final"] = ~_truths(table["is_snapshot"])
    keys["reward"] = math.nan
    keys["reward"][_truths(table["reward"].is_valid())] = column_values(table["reward"].drop_null())
    if "reward_extra" in table.column_names:
        likely = pc.and_(pc.is_null(table["reward"]), pc.match_substring(table["reward_extra"], '"error":'))
        for row in np.flatnonzero(_truths(likely) & keys["final"]):
            keys["unscored"][row] = scoring_failed(orjson.loads(table["reward_extra"][row].as_py()))
    return keys


def _truths(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = column_values(column.cast(pa.uint8())).astype(bool)
    return found


def column_values(column: pa.ChunkedArray) -> Any:
    """A column of numbers without nulls as an array."""
    # pyarrow's `to_numpy`, as `pa.scalar`, would import pandas, which takes half a second; so would
    # `combine_chunks` of nothing.
    if not column.num_chunks:
        return np.zeros(0, column.type.to_pandas_dtype())
    return np.from_dlpack(column.combine_chunks())
