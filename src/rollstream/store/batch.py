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
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import DamageError, RunDirectoryError, StorageError
from rollstream.store.arrow import column_values, to_arrow_column
from rollstream.store.journal import ScanReport, scan, sync_folder, write_file_durably
from rollstream.store.records import RecordCodec, RolloutRecord, TrajectoryRecord
from rollstream.trajectory import LogprobKind, Metrics
from rollstream.untrusted import open_regular, read_regular

METRIC_NAMES = tuple(field.name for field in fields(Metrics))

BATCH_FORMAT = "rollstream.batch/3"
"""Stands in the metadata of every batch and artifact. No other is read."""

_LOGPROBS = b"rollstream.logprobs"
"""Metadata key of what the log-probs are of."""

_TYPES: dict[str, pa.DataType] = {
    "index": pa.int64(),
    **dict.fromkeys(("repeat", "trajectory"), pa.int32()),
    "prompt_key": pa.string(),
    **dict.fromkeys(("prompt_ids", "response_ids"), pa.list_(pa.int32())),
    "response_mask": pa.list_(pa.int8()),
    "response_logprobs": pa.list_(pa.float32()),
    "policy_versions": pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int64())])),
    "messages": pa.string(),
    "is_snapshot": pa.bool_(),
    "num_turns": pa.int32(),
    "finish_reason": pa.string(),
    "reward": pa.float64(),
    "reward_extra": pa.string(),
    "metrics": pa.struct([(name, pa.float64()) for name in METRIC_NAMES]),
    "attempts": pa.int32(),
    **dict.fromkeys(("data_source", "ground_truth", "extra"), pa.string()),
    **dict.fromkeys(("prompt_tokens", "response_tokens", "sampled_tokens"), pa.int32()),
    "mean_logprob": pa.float32(),
    "finished_at": pa.float64(),
}
_NULLABLE = ("response_logprobs", "reward", "mean_logprob", "finished_at")

SCHEMA = pa.schema([pa.field(name, kind, nullable=name in _NULLABLE) for name, kind in _TYPES.items()])
"""Columns of a batch: what a rollout says of itself, where `messages`, `reward_extra`, `ground_truth` and `extra` hold
JSON text; what is counted of a row when it is sealed; and when its rollout was encoded (Unix seconds)."""

KEY_COLUMNS = ["index", "repeat", "trajectory"]

_COMPRESSION_LEVEL = 1
"""Ids and log-probs are as small at level 1 as at 3 (the default), and written in two thirds of the time."""

_ROW_GROUP_ROWS = 1 << 10
"""Rows of a row group at most: who looks at one trajectory reads its row group."""

_ROW_GROUP_BYTES = 8 << 20
"""Uncompressed bytes of a row group, about: with long rows it has fewer. One trajectory out of it takes 3 to
20 ms, and a look at one column of a million rows of 1,000 tokens 0.1 s; a quarter of it would double the latter."""

_SLAB: Final = 128
"""Row groups that are read together where no tokens and no texts are read: few calls, and little memory."""
_WIDE_TEXTS: Final = ("messages", "ground_truth", "extra")
"""Columns that are written without a dictionary: by one, the same text stands in many rows."""
_WIDE: Final = {"prompt_ids", "response_ids", "response_mask", "response_logprobs", *_WIDE_TEXTS}
_MOST_BYTES: Final = 1 << 28
"""Bytes of a row group in memory: it is written at some 8 MiB, or with one row that is larger."""
_MOST_VALUES: Final = 1 << 25
"""Values of a column in a row group: more tokens than `_MOST_BYTES` has."""
_MOST_REPEATED: Final = 1 << 32
_MANY_GROUPS: Final = 64
"""Row groups of a file whose footer is kept in memory: it is large, and each look would read it again."""
_KEPT_FOOTERS: Final = 8

Array = npt.NDArray[Any]


class DamagedFileError(DamageError):
    """A file's bytes are not what was written; `path` says which."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


# -- rows of rollouts


def build_table(records: Sequence[RolloutRecord]) -> pa.Table:
    """Rows of many rollouts as one table, sorted by key."""
    rows = [
        (record, number, trajectory)
        for record in sorted(records, key=lambda record: (record.index, record.repeat))
        for number, trajectory in enumerate(record.trajectories)
    ]
    counts = [_counts(trajectory) for _, _, trajectory in rows]
    columns: dict[str, Sequence[Any]] = {"trajectory": [number for _, number, _ in rows]}
    for name in SCHEMA.names:
        if name in _COUNTED:
            columns[name] = [count[_COUNTED.index(name)] for count in counts]
        elif name in TrajectoryRecord.__struct_fields__:
            columns[name] = [getattr(trajectory, name) for _, _, trajectory in rows]
        elif name != "trajectory":
            columns[name] = [getattr(record, name) for record, _, _ in rows]
    return pa.Table.from_arrays(
        [to_arrow_column(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA
    )


_COUNTED: Final = ("prompt_tokens", "response_tokens", "sampled_tokens", "mean_logprob")


def _counts(row: TrajectoryRecord) -> tuple[int, int, int, float | None]:
    """By `_COUNTED`; without ids, tokens as the endpoint counts them."""
    prompt, response, sampled = (
        len(row.prompt_ids) // 4,
        len(row.response_mask),
        row.response_mask.count(1),
    )
    if not prompt:
        usage = orjson.loads(row.extra).get("usage")
        prompt, response = (_usage(usage, name) for name in ("prompt_tokens", "response_tokens"))
    mean = None
    if sampled and row.response_logprobs:  # 0.0 where the mask is 0
        mean = float(np.frombuffer(row.response_logprobs, "<f4").sum(dtype=np.float64)) / sampled
    return prompt, response, sampled, mean


def _usage(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and 0 <= count < 1 << 31 else 0


def seal_journal(
    journal: Path, batch: Path, run_id: bytes, logprobs: LogprobKind | None = None
) -> ScanReport:
    """Writes the whole frames of a journal file as a batch, durably; the journal is left to the caller.

    A batch is written even when some frames are damaged; the report says so. When there is no whole
    frame, no batch is written. Of frames with the same key, the first counts.
    """
    report, codec = ScanReport(), RecordCodec()
    records: dict[tuple[int, int], RolloutRecord] = {}
    for frame in scan(journal, run_id, report):
        if (frame.index, frame.repeat) not in records:
            records[frame.index, frame.repeat] = codec.decode_rollout(frame.body)
    if records:
        write_tables_durably(batch, [build_table([*records.values()])], batch_metadata(run_id, logprobs))
    return report


# -- writing


def batch_metadata(run_id: bytes, logprobs: LogprobKind | None = None) -> dict[str, str]:
    """Key-value metadata of every Parquet file of a run; `logprobs`: see `Manifest`."""
    metadata = {"rollstream.format": BATCH_FORMAT, "rollstream.run_id": run_id.hex()}
    return metadata if logprobs is None else {**metadata, _LOGPROBS.decode(): logprobs}


def logprobs_of(footer: pq.FileMetaData) -> LogprobKind | None:
    """The kind of log-probs in a batch or artifact; None where it does not say."""
    return {b"raw": "raw", b"processed": "processed"}.get((footer.metadata or {}).get(_LOGPROBS, b""))  # type: ignore[return-value]


def write_tables_durably(
    path: Path, tables: Iterable[pa.Table], metadata: dict[str, str], schema: pa.Schema = SCHEMA
) -> int:
    """Writes a batch or an artifact of sorted tables, one in memory at a time; returns its rows.

    `metadata` goes into the file's key-value metadata.
    """
    temporary = path.with_name(path.name + ".tmp")
    rows = 0
    try:
        temporary.unlink(missing_ok=True)  # a link of this name would lead elsewhere
        with pq.ParquetWriter(
            temporary,
            schema.with_metadata(metadata),
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            write_page_checksum=True,
            use_dictionary=["prompt_key", "finish_reason", "data_source", "reward_extra"],
            write_statistics=KEY_COLUMNS,
        ) as writer:
            for table in tables:
                if len(table):
                    fitting = _ROW_GROUP_BYTES * len(table) // max(1, table.nbytes)
                    group = max(1, min(_ROW_GROUP_ROWS, fitting))
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


# -- checksums


def _sums_file(path: Path) -> Path:
    return path.with_name("_SHA256SUMS") if path.parent.name == "batches" else Path(f"{path}.sha256")


def note_digest(path: Path, *, of: Path | None = None) -> None:
    """Notes the checksum of a file, or of one that is to have its name, durably."""
    line = f"{file_digest(of or path)}  {path.name}\n".encode()
    with _sums_file(path).open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        # An unfinished line before it (a crash, a full disk) stays one by itself.
        begin = b"" if size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n" else b"\n"
        file.write(begin + line)
        file.flush()
        os.fdatasync(file.fileno())


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
        names_of = (line.decode(errors="replace").strip().partition("  ")[2] for line in lines)
        kept = [line for line, name in zip(lines, names_of, strict=True) if name not in names]
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


# -- reading


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


def read_footer(path: Path) -> pq.FileMetaData:
    """The footer of a batch or artifact. Raises as `reading`."""
    with reading(path):
        return pq.read_metadata(path)


def file_version(path: Path) -> tuple[int, ...]:
    """Inode, size and time of a file: another version differs in one of them."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Footer(NamedTuple):
    version: tuple[int, ...]
    metadata: pq.FileMetaData
    low: Array
    """The lowest `index` of each row group."""
    high: Array


_footers: dict[Path, _Footer] = {}


def read_tables(
    path: Path, columns: Sequence[str] | None = None, run_id: str | None = None
) -> Iterator[pa.Table]:
    """The rows of a batch or artifact. Arguments and errors as of `read_groups`; raises `DamagedFileError`, too."""
    for table in read_groups(path, columns, run_id=run_id):
        if isinstance(table, DamagedFileError):
            raise table
        yield table


def read_groups(
    path: Path,
    columns: Sequence[str] | None = None,
    indices: Array | None = None,
    coded: Sequence[str] = (),
    run_id: str | None = None,
) -> Iterator[pa.Table | DamagedFileError]:
    """The row groups of a Parquet file of trajectories, some together; for one that is damaged the error.

    Args:
        path: the file.
        columns: the names; None: all.
        indices: prompt rows, sorted: row groups that hold none of them are left out; None: all.
        coded: columns of texts that are given as dictionary arrays.
        run_id: whose the file has to be.

    Raises:
        DamageError: nothing of the file can be read, or it is of another run.
        StorageError: it cannot be read right now (I/O error, no memory, too many open files).
        RunDirectoryError: another version of rollstream wrote it.
    """
    footer = _footers.get(path)
    if footer is not None and footer.version != file_version(path):
        footer = None
    with (
        reading(path),
        pq.ParquetFile(
            pa.OSFile(str(path)),
            metadata=footer and footer.metadata,
            read_dictionary=coded,
            page_checksum_verification=True,
        ) as file,
    ):
        footer = footer or _checked_footer(path, file)
        if run_id is not None and footer.metadata.metadata.get(b"rollstream.run_id") != run_id.encode():
            raise DamagedFileError(path, f"{path.name} belongs to another run")
        groups = [*range(footer.metadata.num_row_groups)]
        if indices is not None:
            first = np.searchsorted(indices, footer.low)
            groups = np.flatnonzero(first < np.searchsorted(indices, footer.high, side="right")).tolist()
        step = 1 if columns is None or _WIDE.intersection(columns) else _SLAB
        for start in range(0, len(groups), step):
            yield from _read_slab(file, path, groups[start : start + step], columns)


def _read_slab(
    file: pq.ParquetFile, path: Path, groups: list[int], columns: Sequence[str] | None
) -> Iterator[pa.Table | DamagedFileError]:
    try:
        with reading(path):
            table = file.read_row_groups(groups, columns=columns, use_threads=len(groups) > 1)
            for field in table.schema:  # the Arrow schema in the footer has no checksum
                if field.type != _TYPES.get(field.name) and not pa.types.is_dictionary(field.type):
                    raise DamagedFileError(path, f"{path.name} does not have the columns of a batch")
    except DamagedFileError as error:
        if len(groups) == 1:
            yield error
        else:
            for group in groups:
                yield from _read_slab(file, path, [group], columns)
    else:
        yield table.replace_schema_metadata(None)


def _checked_footer(path: Path, file: pq.ParquetFile) -> _Footer:
    """The footer of a batch or artifact, with no row group larger than rows are. Raises as `read_groups`."""
    written_as = (file.metadata.metadata or {}).get(b"rollstream.format", b"").decode(errors="replace")
    if written_as != BATCH_FORMAT and re.fullmatch(r"rollstream\.batch/\d+", written_as):
        raise RunDirectoryError(
            f"{path} has format {written_as!r}; this version of rollstream reads {BATCH_FORMAT!r}"
        )
    if written_as != BATCH_FORMAT or not file.metadata.schema.equals(_parquet_schema()):
        raise DamagedFileError(path, f"{path.name} does not have the columns of a batch")
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    for group in groups:
        check_size(path, group)
    statistics = [group.column(0).statistics for group in groups]
    bounds = [(0, 1 << 62) if one is None else (one.min, one.max) for one in statistics]
    low, high = np.array(bounds, np.int64).reshape(-1, 2).T
    footer = _Footer(file_version(path), file.metadata, low, high)
    if len(groups) >= _MANY_GROUPS:
        if len(_footers) >= _KEPT_FOOTERS:
            _footers.clear()
        _footers[path] = footer
    return footer


@cache
def _parquet_schema() -> pq.ParquetSchema:
    """`SCHEMA` as files have it: compared in a hundredth of the time."""
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, SCHEMA).close()  # `write_table` would import pandas
    return pq.read_metadata(pa.BufferReader(sink.getvalue())).schema


def check_size(path: Path, group: pq.RowGroupMetaData) -> None:
    """Raises `DamagedFileError` for a row group that no rollout fills: a small file may hold very much."""
    if group.total_byte_size > _MOST_BYTES or any(
        column.num_values > _MOST_VALUES
        or (
            column.total_uncompressed_size * group.num_rows > _MOST_REPEATED
            and column.path_in_schema in _WIDE_TEXTS
            and "RLE_DICTIONARY" in column.encodings
        )
        for column in map(group.column, range(group.num_columns))
    ):
        raise DamagedFileError(path, f"{path.name} has a row group that is larger than rows are")


def file_rows(path: Path) -> int:
    """Rows of a batch or artifact, by its footer."""
    return int(read_footer(path).num_rows)


def whole_tables(tables: Iterable[pa.Table | DamagedFileError]) -> Iterator[pa.Table]:
    """The same rows cut between rollouts; what is damaged costs the rollouts that are cut by it."""
    held: pa.Table | None = None
    cut = False
    for table in tables:
        if isinstance(table, DamagedFileError):
            cut, held = True, None
            continue
        if cut:  # what comes before the first beginning of a rollout is the end of one that is damaged
            begins = np.flatnonzero(column_values(table["trajectory"]) == 0)
            if not len(begins):
                continue
            table, cut = table.slice(int(begins[0])), False
        if not len(table):
            continue
        whole = table if held is None else pa.concat_tables([held, table])
        held = None
        if (
            "is_snapshot" in whole.column_names and not whole["is_snapshot"][-1].as_py()
        ):  # a rollout's last row
            yield whole
            continue
        index, repeat = (column_values(whole[name]) for name in ("index", "repeat"))
        last = int(np.argmax((index == index[-1]) & (repeat == repeat[-1])))
        if last:
            yield whole.slice(0, last)
        held = whole.slice(last)
    if held is not None:
        yield held
