"""The scalars of all trajectories of a run, as arrays: what is filtered, sorted and counted.

A row is a number: rows are in the order in which they were read, and keep their numbers as long as the run is
looked at. Only what is new is read (`Run.follow`); rollouts that are there already are left out.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import RollstreamError
from rollstream.store.batch import KEY_COLUMNS, METRIC_NAMES, column_values, to_arrow, to_arrow_texts
from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, scan
from rollstream.store.manifest import Manifest
from rollstream.store.records import FailureRecord, RecordCodec
from rollstream.store.run import ARTIFACT, Run, Seen, SeenFile, read_groups
from rollstream.store.scores import SCORED_COLUMNS
from rollstream.trajectory import failure_cause

Array = npt.NDArray[Any]

_REPEAT_BITS: Final = 31
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


class RunColumns:
    """The scalars of a run, of its shards, or of an exported file.

    One thread reads what is new (`refresh`); others look at a `snapshot`.
    """

    def __init__(self, parts: Sequence[Run | Path]) -> None:
        self.parts = list(parts)
        self.rows = 0
        self.damage: list[str] = []
        self.selections: OrderedDict[tuple[str, str], Array] = OrderedDict()
        """Rows by filter and sort, for who asks again."""
        self._columns: Piece = {name: _filled(kind, 0) for name, kind in _TYPES.items()}
        self._seen = [Seen() for _ in self.parts]
        self._codes: dict[tuple[int, int], int] = {}
        """By part and number of a file, what the column `_FILE` says."""
        self._failures: dict[tuple[int, int], FailureRecord] = {}
        self._failed_ends: dict[Path, int] = {}
        self._causes: set[str] = set()
        self._codec = RecordCodec()
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
        names = None if names is None else [*dict.fromkeys((*SCORED_COLUMNS, *names))]
        files = list(self._codes)
        for code in np.unique(self[_FILE][rows]).tolist():
            at, number = files[code]
            chosen = np.flatnonzero(wanted & (self[_FILE] == code))
            try:
                for table in self._tables(self.parts[at], number, np.unique(self["index"][chosen]), names):
                    found = self.rows_at(*(column_values(table[name]) for name in KEY_COLUMNS))
                    found = np.where((found >= 0) & wanted[found], found, -1)
                    wanted[found[found >= 0]] = False
                    yield found, table
                    if not wanted[chosen].any():
                        break
            except (RollstreamError, OSError) as error:
                self._note(error)

    def _tables(
        self, part: Run | Path, number: int, indices: Array, names: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        if isinstance(part, Run):
            yield from part.rows_of(number, indices, names)
            self._take_damage(part)
            return
        for table in read_groups(part, names, indices):
            if isinstance(table, pa.Table):
                yield table
            else:
                self._note(table)

    # -- reading what is new

    def refresh(self) -> bool:
        """Reads what is new; says whether there was anything."""
        before, pieces = (self.rows, len(self._failures), len(self.damage)), list[Piece]()
        for at, part in enumerate(self.parts):
            try:
                for code, table in self._new_tables(at):
                    pieces.append(_scalars(table, code))
            except (RollstreamError, OSError) as error:
                self._note(error)
            if isinstance(part, Run):
                self._take_damage(part)
        if pieces:
            self._append(pieces)
        return before != (self.rows, len(self._failures), len(self.damage))

    def _take_damage(self, run: Run) -> None:
        for line in run.damage:
            self._note(line)

    def _note(self, error: Exception | str) -> None:
        if str(error) not in self.damage:
            self.damage.append(str(error))

    def _new_tables(self, at: int) -> Iterator[tuple[int, pa.Table]]:
        """Rows that were not read yet, by the code of their file."""
        part, seen = self.parts[at], self._seen[at]
        if isinstance(part, Run):
            for number, table in part.follow(_READ, seen, _CODED):
                yield self._code(at, number), table
            for path in part.paths.failure_files():
                self._read_failures(path, part.manifest)
        elif not seen.files:
            seen.files[ARTIFACT] = SeenFile()
            for table in read_groups(part, _READ, None, _CODED):
                if isinstance(table, pa.Table):
                    yield self._code(at, ARTIFACT), table
                else:
                    self._note(table)

    def _code(self, at: int, number: int) -> int:
        return self._codes.setdefault((at, number), len(self._codes))

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
