"""The scalars of all trajectories of a run, as arrays: what is filtered, sorted and counted.

A row is a number: rows are in the order in which they were read, and keep their numbers as long as the run is
looked at. A file that is new or was changed is read, of a journal only what is new; rollouts that are there already
are left out: a journal becomes a batch, batches become the artifact, and are pruned.
"""

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollstream.errors import DamageError, RollstreamError
from rollstream.store.batch import (
    KEY_COLUMNS,
    METRIC_NAMES,
    DamagedFileError,
    belongs_to,
    build_table,
    column_values,
    open_parquet,
    read_group,
    reading,
    to_arrow,
    to_arrow_texts,
)
from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, scan
from rollstream.store.manifest import Manifest
from rollstream.store.merge import holds_other_batches, is_current
from rollstream.store.paths import RunPaths
from rollstream.store.records import FailureRecord, RecordCodec, RolloutRecord
from rollstream.store.scores import SCORED_COLUMNS, Rewards
from rollstream.trajectory import failure_cause

Array = npt.NDArray[Any]

_ARTIFACT: Final = -1
"""Number of a part's file that is no batch: its artifact, or an exported file."""
_REPEAT_BITS: Final = 31
_SLAB: Final = 128
"""Row groups that are read together: few calls, and little memory."""
_MOST_BYTES: Final = 1 << 28
"""Bytes of a row group in memory: it is written at some 8 MiB, or with one row that is larger."""
_MOST_VALUES: Final = 1 << 25
"""Values of a column in a row group: more tokens than `_MOST_BYTES` has."""
_MOST_REPEATED: Final = 1 << 32
_WIDE_TEXTS: Final = ("messages", "ground_truth", "extra")
"""Columns that are written without a dictionary: by one, the same text stands in many rows."""
_LOOKS: Final = 5
"""Looks at a run whose files are sealed and merged while it is read; each is as long as what is new takes."""
_MOST_PARTS: Final = 30
"""Parts of rewards that become columns."""
_MOST_ERROR: Final = 4096
"""Characters of a failure's error. Of its traceback nothing is kept but that of the first one of a cause."""
_FILE: Final = ""
"""Name of the column that says in which file a row was."""

_COLUMNS: Final[dict[str, tuple[Any, str, str]]] = {
    "index": (np.int64, "index", "prompt row"),
    "repeat": (np.int32, "repeat", "which of the rollouts of its prompt"),
    "trajectory": (np.int16, "trajectory", "which of the trajectories of its rollout"),
    "reward": (np.float64, "reward", "reward"),
    "finish_reason": (str, "finish_reason", "why it ended"),
    "data_source": (str, "data_source", "data source"),
    "num_turns": (np.int32, "num_turns", "turns"),
    "tokens": (np.int32, "response_tokens", "tokens of the response"),
    "sampled": (np.int32, "sampled_tokens", "tokens that the model sampled"),
    "prompt_tokens": (np.int32, "prompt_tokens", "tokens of the prompt"),
    "logprob": (np.float32, "mean_logprob", "mean log-prob of sampled tokens"),
    "version": (np.float64, "policy_versions", "oldest policy version"),
    "is_snapshot": (np.bool_, "is_snapshot", "snapshot: cut off by a context edit"),
    "attempts": (np.int32, "attempts", "attempts"),
    "finished_at": (np.float64, "finished_at", "when it was finished, Unix time"),
    **{name: (np.float32, "metrics", name.replace("_", " ")) for name in METRIC_NAMES},
    "prompt_key": (str, "prompt_key", "hash of the prompt row"),
}
"""By name: the type, the stored column, and the title. What may be null is a float, or NaN."""

_READ: Final = [*dict.fromkeys(stored for _, stored, _ in _COLUMNS.values()), "reward_extra"]
_CODED: Final = [*(stored for kind, stored, _ in _COLUMNS.values() if kind is str), "reward_extra"]
_TYPES: Final = {name: kind for name, (kind, _, _) in _COLUMNS.items()} | {_FILE: np.int32}

Piece = dict[str, Any]
"""Columns of some rows: numbers as arrays, texts as Arrow's dictionary arrays."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run directory, or one Parquet file; a run in shards has several."""

    root: Path
    manifest: Manifest | None
    scores: str | None = None
    """Whose rewards; None: the run's own."""

    def paths(self, number: int) -> list[Path]:
        """Where the rows of a batch's or journal's number may be, the likeliest first."""
        if self.manifest is None:
            return [self.root]
        paths = RunPaths(self.root)
        own = [] if number == _ARTIFACT else [paths.batch(number), paths.journal(number)]
        return [*own, paths.artifact]


@dataclass(slots=True)
class _File:
    """What has been read of a batch (or artifact), and of the journal that it was.

    After a pruning, numbers are given again: another file may come in its place.
    """

    part: int
    number: int
    version: tuple[int, ...] = ()
    """As the batch was; empty before it is read."""
    journal: int = 0
    """Inode of the journal."""
    end: int = FILE_HEADER_SIZE
    """Of what has been read of it."""


class RunColumns:
    """The scalars of a run. One thread reads what is new (`refresh`); others look at a `snapshot`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.rows = 0
        self.damage: list[str] = []
        self.selections: OrderedDict[tuple[str, str], Array] = OrderedDict()
        """Rows by filter and sort, for who asks again."""
        self._columns: Piece = {name: _filled(kind, 0) for name, kind in _TYPES.items()}
        self._files: dict[tuple[int, int], _File] = {}
        self._batches: dict[int, list[int]] = {}
        """Numbers of a part's batches at the last look."""
        self._failures: dict[tuple[int, int], FailureRecord] = {}
        self._failed_ends: dict[Path, int] = {}
        self._causes: set[str] = set()
        self._codec = RecordCodec()
        self._rewards: dict[Path, Rewards] = {}
        """By part, those that counted when it was first read."""
        self._sorted: tuple[int, Array, Array] = (0, np.zeros(0, np.int64), np.zeros(0, np.int64))

    # -- what there is

    def snapshot(self) -> "RunColumns":
        """The rows that there are now: those that come later are in another one. Arrays are shared."""
        found = copy.copy(self)
        found.selections, found.damage = OrderedDict(), list(self.damage)
        return found

    def columns(self) -> list[dict[str, str]]:
        """`name`, `type` (number, text, bool) and `title` of all that rows can be filtered and sorted by."""
        kinds: dict[Any, str] = {str: "text", np.bool_: "bool"}
        found = [
            {"name": name, "type": kinds.get(kind, "number"), "title": title}
            for name, (kind, _, title) in _COLUMNS.items()
        ]
        parts = sorted(name for name in self._columns if name.startswith("reward."))
        return found + [
            {"name": name, "type": "number", "title": f"{name.removeprefix('reward.')} of the reward"}
            for name in parts
        ]

    def __getitem__(self, name: str) -> Array:
        """A column's values, of a text their codes. Shape (rows,). `KeyError` where there is none."""
        column = self._columns[name]
        return _array(column.indices) if isinstance(column, pa.DictionaryArray) else column

    def texts(self, name: str) -> pa.StringArray:
        """The texts of a column, by code."""
        return self._columns[name].dictionary

    def values(self, name: str, rows: Array) -> list[Any]:
        """Cells for people; None where there are none."""
        column = self._columns[name]
        if isinstance(column, pa.DictionaryArray):
            return column.take(to_arrow(rows)).to_pylist()  # type: ignore[no-any-return]
        cells = column[rows]
        if cells.dtype.kind != "f":
            return cells.tolist()  # type: ignore[no-any-return]
        finite = [cell if math.isfinite(cell) else None for cell in cells.tolist()]
        if cells.dtype == np.float64:
            return finite
        return [None if cell is None else float(f"{cell:.7g}") for cell in finite]  # the digits that it has

    def equals(self, name: str, text: str) -> Array:
        """Which cells of a column of texts are this one."""
        code = self.texts(name).index(to_arrow_texts([text])[0]).as_py()
        found: Array = self[name] == code
        return found

    def prompt_keys(self, rows: Array) -> Array:
        """The prompt keys of rows, to be compared with those of other runs."""
        return np.array([key.encode() for key in self.values("prompt_key", rows)], "S32")

    def prompts(self, keys: Sequence[str]) -> list[int | None]:
        """A prompt row of each prompt key; None where there is none."""
        codes = pc.index_in(to_arrow_texts(keys), value_set=self.texts("prompt_key")).to_pylist()
        first = dict(
            zip(*(one.tolist() for one in np.unique(self["prompt_key"], return_index=True)), strict=True)
        )
        return [None if code is None else int(self["index"][first[code]]) for code in codes]

    def groups(self) -> tuple[Array, Array]:
        """`(order, starts)`: rows by prompt row and repeat, and where in them each prompt row begins."""
        order, keys = self._by_key()
        return order, np.flatnonzero(np.diff(keys >> _REPEAT_BITS, prepend=-1))

    def rollout_rows(self, index: int, repeat: int | None = None) -> Array:
        """The rows of a rollout, or of all rollouts of a prompt, in order."""
        order, keys = self._by_key()
        index = min(max(index, -1), 1 << 32)
        low, high = (index, repeat or 0), (index + 1, 0) if repeat is None else (index, repeat + 1)
        at, end = (np.searchsorted(keys, (one << _REPEAT_BITS) + two) for one, two in (low, high))
        return order[at:end].astype(np.int64)

    def rows_at(self, index: Array, repeat: Array, trajectory: Array) -> Array:
        """Rows by their keys; -1 where there is none."""
        order, keys = self._by_key()
        if not len(order):
            return np.full(len(index), -1)
        wanted = _keys(index, repeat)
        # The trajectories of a rollout are read together, and in order.
        at = np.minimum(np.searchsorted(keys, wanted) + trajectory, len(order) - 1)
        same = (keys[at] == wanted) & (self["trajectory"][order[at]] == trajectory)
        return np.where(same, order[at], -1)

    def _by_key(self) -> tuple[Array, Array]:
        rows, order, keys = self._sorted
        if rows != self.rows:
            rows = self.rows
            keys = _keys(self["index"], self["repeat"])
            order = np.arange(rows, dtype=np.int32)
            if np.any(np.diff(keys) < 0):
                order = np.argsort(keys, kind="stable").astype(np.int32)
                keys = keys[order]
            self._sorted = (rows, order, keys)
        return order, keys

    def failures(self) -> list[FailureRecord]:
        """Rollouts that failed and were not done later, by key."""
        keys, records = sorted(self._failures), dict(self._failures)
        index, repeat = np.array(keys, np.int64).reshape(-1, 2).T
        done = self.rows_at(index, repeat, np.zeros(len(keys), np.int64)) >= 0
        return [records[key] for key, over in zip(keys, done.tolist(), strict=True) if not over]

    # -- the rest of a row

    def read(self, rows: Array, names: Sequence[str] | None = None) -> Iterator[tuple[Array, pa.Table]]:
        """Stored columns (default: all) of some rows, from the row groups that hold them.

        Yields tables with their rows' numbers, -1 for those that were not asked for. What is gone or damaged by now is
        left out.
        """
        wanted = np.zeros(self.rows, bool)
        wanted[rows] = True
        files = list(self._files.values())
        for code in np.unique(self[_FILE][rows]).tolist():
            part = self.parts[files[code].part]
            for path in part.paths(files[code].number):  # where the number was given again, in the artifact
                chosen = np.flatnonzero(wanted & (self[_FILE] == code))
                if not len(chosen):
                    break
                try:
                    for table in self._tables(path, part, chosen, names):
                        found = self.rows_at(*(column_values(table[name]) for name in KEY_COLUMNS))
                        found = np.where((found >= 0) & wanted[found], found, -1)
                        wanted[found[found >= 0]] = False
                        yield found, table
                except FileNotFoundError:
                    continue
                except (RollstreamError, OSError) as error:
                    self._note(error)

    def _tables(self, path: Path, part: Part, rows: Array, names: Sequence[str] | None) -> Iterator[pa.Table]:
        manifest = part.manifest
        names = None if names is None else [*dict.fromkeys((*SCORED_COLUMNS, *names))]
        if path.suffix == ".rsj":
            assert manifest is not None
            keys = set(zip(self["index"][rows].tolist(), self["repeat"][rows].tolist(), strict=True))
            for frame in scan(path, manifest.run_id_bytes, ScanReport()):
                if (frame.index, frame.repeat) in keys:
                    table = self._current(part, build_table([RecordCodec().decode_rollout(frame.body)]))
                    yield table if names is None else table.select(names)
            return
        indices = np.unique(self["index"][rows])
        with _open(path) as file, reading(path):
            low, high = _footer(path, *_version(path))[1:]
            holds = np.searchsorted(indices, low) < np.searchsorted(indices, high, side="right")
            for group in np.flatnonzero(holds).tolist():
                yield self._current(part, read_group(file, group, names))

    def _current(self, part: Part, table: pa.Table) -> pa.Table:
        """Rows with the rewards that count; an exported file has its own."""
        if part.manifest is None:
            return table
        if part.root not in self._rewards:
            self._rewards[part.root] = Rewards(part.root, part.scores)
        return self._rewards[part.root].current(table)

    # -- reading what is new

    def refresh(self) -> bool:
        """Reads what is new; says whether there was anything."""
        before, pieces = (self.rows, len(self._failures), len(self.damage)), list[Piece]()
        for at, part in enumerate(self.parts):
            for _ in range(_LOOKS):
                try:
                    for piece in self._read_new(at, part):
                        pieces.append(piece)
                except (RollstreamError, OSError) as error:
                    if _is_gone(error):
                        continue
                    self._note(error)
                break
        if pieces:
            self._append(pieces)
        return before != (self.rows, len(self._failures), len(self.damage))

    def _note(self, error: Exception | str) -> None:
        if not _is_gone(error) and str(error) not in self.damage:
            self.damage.append(str(error))

    def _file(self, at: int, number: int) -> tuple[int, _File]:
        """A file's code, and what is known of it."""
        file = self._files.setdefault((at, number), _File(at, number))
        return list(self._files).index((at, number)), file

    def _read_new(self, at: int, part: Part) -> Iterator[Piece]:
        if part.manifest is None:
            yield from self._read_parquet(at, _ARTIFACT)
            return
        paths, run_id = RunPaths(part.root), part.manifest.run_id
        journals = paths.journal_numbers()  # before the batches: one sealed meanwhile is then seen as batch
        numbers, before = paths.batch_numbers(), self._batches.get(at)
        whole = (
            before is None and is_current(paths, run_id) and (yield from self._read_parquet(at, _ARTIFACT))
        )
        for number in numbers if whole else ():  # their rows are the artifact's
            self._file(at, number)[1].version = _version(paths.batch(number))
        for number in numbers:
            yield from self._read_parquet(at, number)
        for number in journals:
            if number not in numbers:
                yield from self._read_journal(at, number, paths.journal(number), part.manifest)
        if before != numbers and not whole and holds_other_batches(paths, run_id, numbers):
            yield from self._read_parquet(at, _ARTIFACT)
        self._batches[at] = numbers
        for path in paths.failure_files():
            self._read_failures(path, part.manifest)

    def _read_parquet(self, at: int, number: int) -> Generator[Piece, None, bool]:
        """The rows of a batch, artifact or exported file that was not read yet; says whether it was read whole."""
        part, (code, known) = self.parts[at], self._file(at, number)
        path = part.paths(number)[0]
        if not path.exists() or known.version == _version(path):
            return False
        version, known.end = _version(path), FILE_HEADER_SIZE
        try:
            with _open(path, _CODED) as file, reading(path):
                if part.manifest is not None and not belongs_to(file, part.manifest.run_id):
                    raise DamagedFileError(path, f"{path.name} belongs to another run")
                counted = set(_READ) <= set(file.schema_arrow.names)
                for start in range(0, file.num_row_groups, _SLAB):
                    slab = range(start, min(start + _SLAB, file.num_row_groups))
                    if counted:
                        table = file.read_row_groups(slab, columns=_READ)
                    else:
                        table = pa.concat_tables([read_group(file, group, _READ) for group in slab])
                    yield _scalars(self._current(part, table), code)
        except DamageError as error:
            self._note(error)
        else:
            known.version = version
            return True
        known.version = version  # it is not read again; after a passing failure it is
        return False

    def _read_journal(self, at: int, number: int, path: Path, manifest: Manifest) -> Iterator[Piece]:
        (code, known), report, records = self._file(at, number), ScanReport(), dict[Any, RolloutRecord]()
        try:
            inode, size, _ = _version(path)
            if known.journal != inode or size < known.end:
                known.journal, known.end = inode, FILE_HEADER_SIZE
            for frame in scan(path, manifest.run_id_bytes, report, known.end):
                records.setdefault((frame.index, frame.repeat), self._codec.decode_rollout(frame.body))
        except ValueError as error:
            self._note(f"{path.name} is damaged: {error}")
        known.end = max(known.end, report.end)
        for damage in report.damage:
            self._note(str(damage))
        if records:
            yield _scalars(self._current(self.parts[at], build_table(list(records.values()))), code)

    def _append(self, pieces: list[Piece]) -> None:
        """Adds the rows of rollouts that are not there; of one that is in several files, the first file's."""
        index, repeat, code = (
            np.concatenate([one[name] for one in pieces]) for name in ("index", "repeat", _FILE)
        )
        keys = _keys(index, repeat)
        new = self.rows_at(index, repeat, np.zeros_like(repeat)) < 0
        if len(code) and code[0] != code[-1]:
            _, first, which = np.unique(keys, return_index=True, return_inverse=True)
            new &= code == code[first][which]
        kept = np.concatenate([np.ones(self.rows, bool), new])
        pieces = [dict(self._columns), *pieces]
        sizes = [len(one[_FILE]) for one in pieces]
        parts = dict.fromkeys(name for one in pieces for name in one if name not in _TYPES)
        columns: Piece = {}
        for name in [*_TYPES, *[*parts][:_MOST_PARTS]]:
            empty = _TYPES.get(name, np.float32)
            some = [one.pop(name, None) for one in pieces]  # gone from there: half the memory
            columns[name] = _joined(
                [_filled(empty, size) if one is None else one for one, size in zip(some, sizes, strict=True)],
                kept,
            )
        self._columns, self.rows = columns, int(kept.sum())

    def _read_failures(self, path: Path, manifest: Manifest) -> None:
        report, end = ScanReport(), self._failed_ends.get(path, FILE_HEADER_SIZE)
        for frame in scan(path, manifest.run_id_bytes, report, end):
            try:
                record = self._codec.decode_failure(frame.body)
            except ValueError as error:
                self._note(f"{path.name} is damaged: {error}")
                continue
            first = (cause := failure_cause(record.error)) not in self._causes
            self._causes.add(cause)
            short = {"error": record.error[:_MOST_ERROR], "traceback": record.traceback if first else ""}
            self._failures[record.index, record.repeat] = msgspec.structs.replace(record, **short)
        self._failed_ends[path] = max(end, report.end)


def _is_gone(error: Exception | str) -> bool:
    """Whether a file was sealed, merged or pruned since it was listed: another look finds what came of it."""
    return isinstance(error, Exception) and FileNotFoundError in map(type, (error, error.__cause__))


def _open(path: Path, coded: Sequence[str] = ()) -> pq.ParquetFile:
    """A batch or artifact, its footer from memory: it is large where there are many rows.

    `coded`: columns of texts that are read as dictionary arrays.
    """
    footer = _footer(path, *_version(path))[0]
    with reading(path):
        return pq.ParquetFile(
            pa.OSFile(str(path)),
            metadata=footer,
            read_dictionary=coded,
            page_checksum_verification=True,
            pre_buffer=False,
        )


def _version(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=64)
def _footer(path: Path, *version: int) -> tuple[pq.FileMetaData, Array, Array]:
    """A file's footer, and the lowest and highest `index` of each row group."""
    with open_parquet(path) as file:
        footer = file.metadata
        for group in range(footer.num_row_groups):
            _check_size(path, footer.row_group(group))
    statistics = [footer.row_group(group).column(0).statistics for group in range(footer.num_row_groups)]
    both = [(0, 1 << 62) if one is None else (one.min, one.max) for one in statistics]
    low, high = np.array(both, np.int64).reshape(-1, 2).T
    return footer, low, high


def _check_size(path: Path, group: pq.RowGroupMetaData) -> None:
    """Raises `DamageError` for a row group that no rollout fills: a small file may hold very much."""
    wide = (group.column(at) for at in range(group.num_columns))
    if group.total_byte_size > _MOST_BYTES or any(
        column.num_values > _MOST_VALUES
        or (
            column.path_in_schema in _WIDE_TEXTS
            and "RLE_DICTIONARY" in column.encodings
            and column.total_uncompressed_size * group.num_rows > _MOST_REPEATED
        )
        for column in wide
    ):
        raise DamagedFileError(path, f"{path.name} has a row group that is larger than rows are")


def _array(column: pa.Array) -> Array:
    """Numbers without nulls; pyarrow's own ways to numpy import pandas, which takes half a second."""
    found: Array = np.from_dlpack(column)
    return found


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _keys(index: Array, repeat: Array) -> Array:
    """One number for each rollout, in the order of prompt rows and repeats."""
    found: Array = (index.astype(np.int64) << _REPEAT_BITS) + repeat
    return found


def _filled(kind: Any, size: int) -> Any:
    """A column of as many rows, of which nothing is known."""
    if kind is str:
        return to_arrow_texts([""] * size).dictionary_encode()
    return np.full(size, math.nan if np.dtype(kind).kind == "f" else 0, kind)


def _joined(parts: Sequence[Any], kept: Array) -> Any:
    """Columns behind each other, and of them the rows that are kept."""
    if isinstance(parts[0], pa.Array):
        texts = _chunk(pa.chunked_array(parts).unify_dictionaries())
        return texts if kept.all() else texts.filter(to_arrow(kept))
    numbers = np.concatenate(parts)
    return numbers if kept.all() else numbers[kept]


def _scalars(table: pa.Table, code: int) -> Piece:
    """The columns of rows as they are stored, as they are kept."""
    read = {name: _chunk(table[name]) for name in table.column_names}
    piece: Piece = {_FILE: np.full(len(table), code, np.int32)}
    for name, (kind, stored, _) in _COLUMNS.items():
        column = read[stored]
        if name in METRIC_NAMES:
            column = column.field(METRIC_NAMES.index(name))
        if kind is str:
            piece[name] = column.dictionary_encode()
        else:
            values = _oldest(column) if name == "version" else _numbers(column)
            piece[name] = values.astype(kind, copy=False)
    return piece | _parts_of_rewards(read["reward_extra"])


def _numbers(column: pa.Array) -> Array:
    """Numbers or truths; NaN where there is none."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if not column.null_count:
        return _array(column)
    values: Array = np.full(len(column), math.nan)
    values[_array(column.is_valid().cast(pa.uint8())) == 1] = _array(column.drop_null())
    return values


def _oldest(column: pa.Array) -> Array:
    """The lowest policy version of each row."""
    versions, offsets = _array(column.values.field("version")), _array(column.offsets)
    found: Array = np.full(len(column), math.nan)
    some = np.flatnonzero(np.diff(offsets))
    if len(some):
        found[some] = np.minimum.reduceat(versions[: offsets[-1]], offsets[some])
    return found


def _parts_of_rewards(column: pa.Array) -> Piece:
    """The numbers in `reward_extra`, by name; NaN where there is none. Equal texts are read once."""
    coded = column.dictionary_encode()
    texts = coded.dictionary.to_pylist()
    parts: dict[str, Array] = {}
    for code, text in enumerate(texts):
        try:
            found = orjson.loads(text)
        except ValueError:
            continue
        for name, value in found.items() if isinstance(found, dict) else ():
            if isinstance(value, int | float) and (name in parts or len(parts) < _MOST_PARTS):
                parts.setdefault(name, np.full(len(texts), math.nan, np.float32))[code] = value
    codes = _array(coded.indices)
    return {f"reward.{name}": values[codes] for name, values in parts.items()}
