"""The scalars of all trajectories of a run, as arrays: what is filtered, sorted and counted.

A row is a number: rows are in the order in which they were read, and keep their numbers as long as the run is
looked at. Sealed batches (or the artifact, where it holds them all) are read once; of a journal only what is new
since the last look; when a journal becomes a batch, its rows are the same.
"""

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
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
)
from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, scan
from rollstream.store.manifest import Manifest
from rollstream.store.merge import holds_other_batches, is_current
from rollstream.store.paths import RunPaths
from rollstream.store.records import FailureRecord, RecordCodec
from rollstream.trajectory import failure_cause

Array = npt.NDArray[Any]

_ARTIFACT: Final = -1
"""Number of a part's file that is no batch: its artifact, or an exported file."""

_REPEAT_BITS: Final = 31
_SLAB: Final = 32
"""Row groups that are read together: few calls, and little memory."""
_MOST_PARTS: Final = 30
"""Parts of rewards that become columns."""
_MOST_ERROR: Final = 4096
"""Characters of a failure's error. Of its traceback nothing is kept but that of the first one of a cause."""

_NULL: Final = -1
"""Stands for null in a column of whole numbers that has such."""
NULLABLE: Final = ("version",)
_ALL: Final = slice(None)

_COLUMNS: Final[dict[str, tuple[Any, str, str]]] = {
    "index": (np.int64, "index", "prompt row"),
    "repeat": (np.int32, "repeat", "which of the rollouts of its prompt"),
    "trajectory": (np.int16, "trajectory", "which of the trajectories of its rollout"),
    "reward": (np.float64, "reward", "reward"),
    "finish_reason": (np.int32, "finish_reason", "why it ended"),
    "data_source": (np.int32, "data_source", "data source"),
    "num_turns": (np.int32, "num_turns", "turns"),
    "tokens": (np.int32, "response_tokens", "tokens of the response"),
    "sampled": (np.int32, "sampled_tokens", "tokens that the model sampled"),
    "prompt_tokens": (np.int32, "prompt_tokens", "tokens of the prompt"),
    "logprob": (np.float32, "mean_logprob", "mean log-prob of sampled tokens"),
    "version": (np.int32, "policy_versions", "oldest policy version"),
    "is_snapshot": (np.bool_, "is_snapshot", "snapshot: cut off by a context edit"),
    "attempts": (np.int32, "attempts", "attempts"),
    "finished_at": (np.float64, "finished_at", "when it was finished, Unix time"),
    **{name: (np.float32, "metrics", name.replace("_", " ")) for name in METRIC_NAMES},
    "prompt_key": ("S32", "prompt_key", "hash of the prompt row"),
}
"""By name: the array's type, the stored column, and the title. Texts are codes but for prompt keys, too many."""

_CODED: Final = ("finish_reason", "data_source")
_READ: Final = [*dict.fromkeys(stored for _, stored, _ in _COLUMNS.values()), "reward_extra"]


class _Growing:
    """An array that rows are appended to. An array that was handed out stays as it is."""

    def __init__(self, dtype: Any, fill: float = 0) -> None:
        self._values, self._fill = np.zeros(0, dtype), fill

    def view(self, rows: int, more: int = 0) -> Array:
        """The first rows; `more` are about to come."""
        if rows > len(self._values):
            grown = np.full(rows + max(more, rows // 8), self._fill, self._values.dtype)
            grown[: len(self._values)] = self._values
            self._values = grown
        return self._values[:rows]


class Texts:
    """Texts by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}

    def codes(self, texts: Iterable[str]) -> Array:
        """The numbers of texts; new ones get one."""
        found = [self._codes.setdefault(text, len(self._codes)) for text in texts]
        self.texts += list(self._codes)[len(self.texts) :]
        return np.array(found, np.int32)


@dataclass(frozen=True, slots=True)
class Part:
    """A run directory, or one Parquet file; a run in shards has several."""

    root: Path
    manifest: Manifest | None

    def paths(self, number: int) -> list[Path]:
        """Where the rows of a batch's or journal's number may be, the likeliest first."""
        if self.manifest is None:
            return [self.root]
        paths = RunPaths(self.root)
        own = [] if number == _ARTIFACT else [paths.batch(number), paths.journal(number)]
        return [*own, paths.artifact]


@dataclass(slots=True)
class _Journal:
    """What has been read of a journal file."""

    end: int = FILE_HEADER_SIZE
    keys: set[tuple[int, int]] = field(default_factory=set)


class RunColumns:
    """The scalars of a run. One thread reads what is new (`refresh`); others look at a `snapshot`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.rows = 0
        self.damage: list[str] = []
        self.texts = {name: Texts() for name in _CODED}
        self._columns = {name: _Growing(dtype) for name, (dtype, _, _) in _COLUMNS.items()}
        self._file = _Growing(np.int32)
        self._places: list[tuple[int, int]] = []
        """By file: the part, and the number of the batch or journal."""
        self._reward_parts: dict[str, _Growing] = {}
        self._read: dict[tuple[int, int], tuple[int, ...]] = {}
        """Files that were read, as they were: after a pruning, numbers of batches are given again."""
        self._journals: dict[tuple[int, int], _Journal] = {}
        self._failures: dict[tuple[int, int], FailureRecord] = {}
        self._failed_ends: dict[Path, int] = {}
        self._causes: set[str] = set()
        self._codec = RecordCodec()
        self.selections: OrderedDict[tuple[str, str], Array] = OrderedDict()
        """Rows by filter and sort, for who asks again."""
        self._sorted: tuple[int, Array, Array] = (0, np.zeros(0, np.int64), np.zeros(0, np.int64))

    # -- what there is

    def snapshot(self) -> "RunColumns":
        """The rows that there are now: those that come later are in another one. Arrays are shared."""
        found = copy.copy(self)
        found.selections = OrderedDict()
        return found

    def columns(self) -> list[dict[str, str]]:
        """`name`, `type` (number, text, bool) and `title` of all that rows can be filtered and sorted by."""
        found = []
        for name, (dtype, _, title) in _COLUMNS.items():
            text = name in _CODED or dtype == "S32"
            kind = "text" if text else "bool" if dtype is np.bool_ else "number"
            found.append({"name": name, "type": kind, "title": title})
        parts = sorted(self._reward_parts)
        return found + [
            {"name": f"reward.{one}", "type": "number", "title": f"{one} of the reward"} for one in parts
        ]

    def __getitem__(self, name: str) -> Array:
        """A column's values, of a text their codes. Shape (rows,). `KeyError` where there is none."""
        if name.startswith("reward."):
            return self._reward_parts[name.removeprefix("reward.")].view(self.rows)
        return self._columns[name].view(self.rows)

    def values(self, name: str, rows: Array) -> list[Any]:
        """Cells for people; None where there are none."""
        cells = self[name][rows]
        if name in self.texts:
            texts = self.texts[name].texts
            return [texts[code] for code in cells.tolist()]
        if cells.dtype.kind == "S":
            return [cell.decode("utf-8", "replace") for cell in cells.tolist()]
        if cells.dtype == np.float32:  # shown with the digits that it has
            return [float(f"{cell:.7g}") if math.isfinite(cell) else None for cell in cells.tolist()]
        null = self.is_null(name, rows).tolist()
        return [None if missing else cell for cell, missing in zip(cells.tolist(), null, strict=True)]

    def is_null(self, name: str, rows: Array | slice = _ALL) -> Array:
        """Which cells of a column are null."""
        values = self[name][rows]
        if values.dtype.kind == "f":
            return ~np.isfinite(values)
        return values == _NULL if name in NULLABLE else np.zeros(len(values), bool)

    def equals(self, name: str, text: str) -> Array:
        """Which cells of a column of texts are this one."""
        if name not in self.texts:
            wanted: Any = np.bytes_(text.encode("utf-8", "surrogateescape"))
        else:
            texts = self.texts[name].texts
            wanted = texts.index(text) if text in texts else -1
        found: Array = np.equal(self[name], wanted)
        return found

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
        wanted = (index.astype(np.int64) << _REPEAT_BITS) + repeat
        # The trajectories of a rollout are read together, and in order.
        at = np.minimum(np.searchsorted(keys, wanted) + trajectory, len(order) - 1)
        same = (keys[at] == wanted) & (self["trajectory"][order[at]] == trajectory)
        return np.where(same, order[at], -1)

    def _by_key(self) -> tuple[Array, Array]:
        rows, order, keys = self._sorted
        if rows != self.rows:
            rows = self.rows
            keys = (self._columns["index"].view(rows) << _REPEAT_BITS) + self._columns["repeat"].view(rows)
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
        file = self._file.view(len(wanted))
        for code in np.unique(file[rows]).tolist():
            part, number = self._places[code]
            chosen = np.flatnonzero(wanted & (file == code))
            for path in self.parts[part].paths(number):
                if not len(chosen):
                    break
                try:
                    for table in self._tables(path, self.parts[part].manifest, chosen, names):
                        found = self.rows_at(*(column_values(table[name]) for name in KEY_COLUMNS))
                        found = np.where((found >= 0) & (found < len(wanted)), found, -1)
                        found = np.where((found >= 0) & wanted[found], found, -1)
                        wanted[found[found >= 0]] = False
                        yield found, table
                except FileNotFoundError:
                    continue
                except (RollstreamError, OSError) as error:
                    self._note(error)
                chosen = chosen[wanted[chosen]]  # the others are in the artifact: the number was given again

    def _tables(
        self, path: Path, manifest: Manifest | None, rows: Array, names: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        indices = np.unique(self["index"][rows])
        names = None if names is None else [*KEY_COLUMNS, *names]
        if path.suffix == ".rsj":
            assert manifest is not None
            keys = set(zip(self["index"][rows].tolist(), self["repeat"][rows].tolist(), strict=True))
            for frame in scan(path, manifest.run_id_bytes, ScanReport()):
                if (frame.index, frame.repeat) in keys:
                    table = build_table([RecordCodec().decode_rollout(frame.body)])
                    yield table if names is None else table.select(names)
            return
        with _open(path) as file, reading(path):
            low, high = _footer(path, *_version(path))[1:]
            holds = np.searchsorted(indices, low) < np.searchsorted(indices, high, side="right")
            for group in np.flatnonzero(holds).tolist():
                yield read_group(file, group, names)

    # -- reading what is new

    def refresh(self) -> bool:
        """Reads what is new; says whether there was anything."""
        before = (self.rows, len(self._failures), len(self.damage))
        for at, part in enumerate(self.parts):
            try:
                self._refresh(at, part)
            except FileNotFoundError:  # gone since it was listed: the next look finds what came of it
                continue
            except (RollstreamError, OSError) as error:
                self._note(error)
        return before != (self.rows, len(self._failures), len(self.damage))

    def _note(self, error: object) -> None:
        if (text := str(error)) not in self.damage:
            self.damage.append(text)

    def _refresh(self, at: int, part: Part) -> None:
        if part.manifest is None:
            self._read_file(at, _ARTIFACT)
            return
        paths, run_id = RunPaths(part.root), part.manifest.run_id
        journals = paths.journal_numbers()  # before the batches: one sealed meanwhile is then seen as batch
        numbers = paths.batch_numbers()
        known = any(part == at for part, _ in self._places)
        if not known and is_current(paths, run_id):
            self._read_file(at, _ARTIFACT)
            if (at, _ARTIFACT) in self._read:
                there = [number for number in numbers if paths.batch(number).exists()]
                self._read |= {(at, number): _version(paths.batch(number)) for number in there}
        for number in numbers:
            self._read_file(at, number, known=known)
        for number in journals:
            if number not in numbers:
                self._read_journal(at, number, paths.journal(number), part.manifest)
        if (at, _ARTIFACT) not in self._read and holds_other_batches(paths, run_id, numbers):
            self._read_file(at, _ARTIFACT, known=True)
        for path in paths.failure_files():
            self._read_failures(path, part.manifest)

    def _read_file(self, at: int, number: int, *, known: bool = False) -> None:
        """Appends the rows of a batch, artifact or exported file; `known`: some of them may be there already."""
        part = self.parts[at]
        path, before = part.paths(number)[0], self._read.get((at, number))
        try:
            if before is not None and (number == _ARTIFACT or before == _version(path)):
                return
            known, version = known or before is not None, _version(path)
            self._journals.pop((at, number), None)
            with _open(path) as file, reading(path):
                if part.manifest is not None and not belongs_to(file, part.manifest.run_id):
                    raise DamagedFileError(path, f"{path.name} belongs to another run")
                rows = file.metadata.num_rows
                counted = set(_READ) <= set(file.schema_arrow.names)
                for start in range(0, file.num_row_groups, _SLAB):
                    slab = range(start, min(start + _SLAB, file.num_row_groups))
                    if counted:
                        table = file.read_row_groups(slab, columns=_READ)
                    else:
                        table = pa.concat_tables([read_group(file, group, _READ) for group in slab])
                    rows -= self._append(at, number, table, known=known, more=rows)
        except FileNotFoundError:
            return
        except DamageError as error:
            self._note(error)
        self._read[at, number] = version

    def _read_journal(self, at: int, number: int, path: Path, manifest: Manifest) -> None:
        journal = self._journals.setdefault((at, number), _Journal())
        report, records = ScanReport(), []
        try:
            for frame in scan(path, manifest.run_id_bytes, report, journal.end):
                if (frame.index, frame.repeat) not in journal.keys:
                    journal.keys.add((frame.index, frame.repeat))
                    records.append(self._codec.decode_rollout(frame.body))
        except FileNotFoundError:  # sealed since: the next look finds the batch
            pass
        except ValueError as error:
            self._note(f"{path.name} is damaged: {error}")
        journal.end = max(journal.end, report.end)
        for damage in report.damage:
            self._note(damage)
        if records:
            self._append(at, number, build_table(records))

    def _append(self, at: int, number: int, table: pa.Table, *, known: bool = False, more: int = 0) -> int:
        """Adds the rows of a table; `known`: but for those that are there. Returns how many it has."""
        read = {name: _chunk(table[name]) for name in table.column_names}
        kept: Any = _ALL
        if known and self.rows:
            kept = np.flatnonzero(self.rows_at(*(_array(read[name]) for name in KEY_COLUMNS)) < 0)
        first, code = self.rows, self._code(at, number)
        end = first + (len(kept) if isinstance(kept, np.ndarray) else len(table))
        for name, (_, stored, _) in _COLUMNS.items():
            self._columns[name].view(end, more)[first:] = self._converted(name, read[stored])[kept]
        self._file.view(end, more)[first:] = code
        parts = _parts_of_rewards(read["reward_extra"])
        for name in [*self._reward_parts, *(one for one in parts if one not in self._reward_parts)][
            :_MOST_PARTS
        ]:
            column = self._reward_parts.get(name) or _Growing(np.float32, math.nan)
            column.view(end, more)[first:] = parts[name][kept] if name in parts else math.nan
            self._reward_parts[name] = column
        self.rows = end  # last: who looks meanwhile sees whole rows
        return len(table)

    def _code(self, at: int, number: int) -> int:
        if (at, number) not in self._places:
            self._places.append((at, number))
        return self._places.index((at, number))

    def _converted(self, name: str, column: pa.Array) -> Array:
        """A stored column as the array that is kept of it."""
        if name in self.texts:
            coded = column.dictionary_encode()
            codes = self.texts[name].codes(coded.dictionary.to_pylist())
            return codes[_array(coded.indices)]
        if name in METRIC_NAMES:
            column = column.field(METRIC_NAMES.index(name))
        if name == "prompt_key":
            coded = column.dictionary_encode()
            keys = np.array([key.encode() for key in coded.dictionary.to_pylist()], "S32")
            return keys[_array(coded.indices)]
        if name == "version":
            versions: Array = _array(column.values.field("version"))
            offsets: Array = _array(column.offsets)
            found = np.full(len(column), _NULL)
            some = np.flatnonzero(np.diff(offsets))
            if len(some):
                found[some] = np.minimum.reduceat(versions[: offsets[-1]], offsets[some])
            return found
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.uint8())
        if not column.null_count:
            return _array(column)
        values: Array = np.full(len(column), math.nan)
        values[_array(column.is_valid().cast(pa.uint8())) == 1] = _array(column.drop_null())
        return values

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


def _open(path: Path) -> pq.ParquetFile:
    """A batch or artifact, its footer from memory: it is large where there are many rows."""
    footer = _footer(path, *_version(path))[0]
    source = pa.OSFile(str(path))
    with reading(path):
        return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True, pre_buffer=False)


def _version(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=64)
def _footer(path: Path, *version: int) -> tuple[pq.FileMetaData, Array, Array]:
    """A file's footer, and the lowest and highest `index` of each row group."""
    with open_parquet(path) as file:
        footer = file.metadata
    said = [footer.row_group(group).column(0).statistics for group in range(footer.num_row_groups)]
    both = [(0, 1 << 62) if one is None else (one.min, one.max) for one in said]
    low, high = np.array(both, np.int64).reshape(-1, 2).T
    return footer, low, high


def _array(column: pa.Array) -> Array:
    """Numbers without nulls; pyarrow's own ways to numpy import pandas, which takes half a second."""
    found: Array = np.from_dlpack(column)
    return found


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _parts_of_rewards(column: pa.Array) -> dict[str, Array]:
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
    return {name: values[codes] for name, values in parts.items()}
