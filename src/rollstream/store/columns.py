"""The scalars of all trajectories of a run, as arrays: what is filtered, sorted and counted.

A row is a number: rows are in the order in which they were read, and keep their numbers as long as the run is
looked at. Only what is new is read (`Run.follow`); rollouts that are there already are left out.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import RollstreamError
from rollstream.store.arrow import column_values, to_arrow, to_arrow_texts
from rollstream.store.batch import KEY_COLUMNS, METRIC_NAMES, DamagedFileError, read_groups
from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, scan
from rollstream.store.keys import rollout_numbers, row_numbers
from rollstream.store.records import RecordCodec
from rollstream.store.run import ARTIFACT, Run, Seen, SeenFile
from rollstream.store.scores import SCORED_COLUMNS
from rollstream.trajectory import Failure, failure_cause

Array = npt.NDArray[Any]

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
        self._failures: dict[tuple[int, int], Failure] = {}
        self._failed_ends: dict[Path, int] = {}
        self._causes: set[str] = set()
        self._codec = RecordCodec()
        self._sorted: tuple[int, Array, Array] = (0, np.zeros(0, np.int64), np.zeros(0, np.int64))

    # -- what there is

    def snapshot(self) -> "RunColumns":
        """The rows that there are now: those that come later are in another one. Arrays are shared."""
        seen = copy.copy(self)
        seen.selections, seen.damage = OrderedDict(), list(self.damage)
        return seen

    def columns(self) -> list[dict[str, str]]:
        """`name`, `type` (number, text, bool) and `title` of all that rows can be filtered and sorted by."""
        kinds: dict[Any, str] = {str: "text", np.bool_: "bool"}
        titles = {name: (kinds.get(kind, "number"), title) for name, (kind, _, title) in _COLUMNS.items()}
        for name in sorted(name for name in self._columns if name.startswith("reward.")):
            titles[name] = "number", f"{name.removeprefix('reward.')} of the reward"
        return [{"name": name, "type": kind, "title": title} for name, (kind, title) in titles.items()]

    def __getitem__(self, name: str) -> Array:
        """A column's values, of a text their codes. Shape (rows,). `KeyError` where there is none."""
        column = self._columns[name]
        found: Array = column_values(column.indices) if isinstance(column, pa.DictionaryArray) else column
        return found

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
        present, first = np.unique(self["prompt_key"], return_index=True)
        index = dict(zip(present.tolist(), self["index"][first].tolist(), strict=True))
        return [index.get(code) for code in codes]

    def groups(self) -> tuple[Array, Array]:
        """`(order, starts)`: rows by prompt row and repeat, and where in them each prompt row begins."""
        order, keys = self._by_key()
        return order, np.flatnonzero(np.diff(row_numbers(keys), prepend=-1))

    def rollout_rows(self, index: int, repeat: int | None = None) -> Array:
        """The rows of a rollout, or of all rollouts of a prompt, in order."""
        order, keys = self._by_key()
        index = min(max(index, -1), 1 << 32)
        ends = [(index, 0), (index + 1, 0)] if repeat is None else [(index, repeat), (index, repeat + 1)]
        low, high = np.searchsorted(keys, rollout_numbers(*np.array(ends).T))
        return order[low:high].astype(np.int64)

    def rows_at(self, index: Array, repeat: Array, trajectory: Array) -> Array:
        """Rows by their keys; -1 where there is none."""
        order, keys = self._by_key()
        if not len(order):
            return np.full(len(index), -1)
        wanted = rollout_numbers(index, repeat)
        # The trajectories of a rollout are read together, and in order.
        at = np.minimum(np.searchsorted(keys, wanted) + trajectory, len(order) - 1)
        same = (keys[at] == wanted) & (self["trajectory"][order[at]] == trajectory)
        return np.where(same, order[at], -1)

    def _by_key(self) -> tuple[Array, Array]:
        rows, order, keys = self._sorted
        if rows != self.rows:
            rows = self.rows
            keys = rollout_numbers(self["index"], self["repeat"])
            order = np.arange(rows, dtype=np.int32)
            if np.any(np.diff(keys) < 0):
                order = np.argsort(keys, kind="stable").astype(np.int32)
                keys = keys[order]
            self._sorted = (rows, order, keys)
        return order, keys

    def failures(self) -> list[Failure]:
        """Rollouts that failed and were not done later, by key."""
        records = [record for _, record in sorted(self._failures.items())]
        keys = np.array([(record.index, record.repeat, 0) for record in records], np.int64).reshape(-1, 3)
        open_ = self.rows_at(*keys.T) < 0
        return [record for record, is_open in zip(records, open_.tolist(), strict=True) if is_open]

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
            part, number = files[code]
            chosen = np.flatnonzero(wanted & (self[_FILE] == code))
            try:
                for table in self._tables(self.parts[part], number, np.unique(self["index"][chosen]), names):
                    found = self.rows_at(*(column_values(table[name]) for name in KEY_COLUMNS))
                    found = np.where((found >= 0) & wanted[found], found, -1)
                    wanted[found[found >= 0]] = False
                    yield found, table
                    if not wanted[chosen].any():
                        break
            except (RollstreamError, OSError) as error:
                self._note(error)

    def _tables(
        self, part: Run | Path, number: int, indices: Array | None, names: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        if isinstance(part, Run):
            assert indices is not None
            yield from part.rows_of(number, indices, names)
            self._note(*part.damage)
            return
        for table in read_groups(part, names, indices, _CODED if indices is None else ()):
            if isinstance(table, DamagedFileError):
                self._note(table)
            else:
                yield table

    # -- reading what is new

    def refresh(self) -> bool:
        """Reads what is new; says whether there was anything."""
        before, pieces = (self.rows, len(self._failures), len(self.damage)), list[Piece]()
        for at, (part, seen) in enumerate(zip(self.parts, self._seen, strict=True)):
            try:
                for number, table in self._new_tables(part, seen):
                    pieces.append(_scalars(table, self._codes.setdefault((at, number), len(self._codes))))
            except (RollstreamError, OSError) as error:
                self._note(error)
            if isinstance(part, Run):
                self._note(*part.damage)
        if pieces:
            self._append(pieces)
        return before != (self.rows, len(self._failures), len(self.damage))

    def _note(self, *errors: Exception | str) -> None:
        self.damage += [line for line in map(str, errors) if line not in self.damage]

    def _new_tables(self, part: Run | Path, seen: Seen) -> Iterator[tuple[int, pa.Table]]:
        """Rows that were not read yet, and the number of their file."""
        if isinstance(part, Run):
            yield from part.follow(_READ, seen, _CODED)
            for path in part.paths.failure_files():
                self._read_failures(path, part.manifest.run_id_bytes)
        elif not seen.files:
            seen.files[ARTIFACT] = SeenFile()
            for table in self._tables(part, ARTIFACT, None, _READ):
                yield ARTIFACT, table

    def _append(self, pieces: list[Piece]) -> None:
        """Adds the rows of rollouts that are not there; of one that is in several files, the first file's."""
        index, repeat, code = (
            np.concatenate([piece[name] for piece in pieces]) for name in ("index", "repeat", _FILE)
        )
        new = self.rows_at(index, repeat, np.zeros_like(repeat)) < 0
        if len(code) and code[0] != code[-1]:
            keys = rollout_numbers(index, repeat)
            _, first, which = np.unique(keys, return_index=True, return_inverse=True)
            new &= code == code[first][which]
        kept = np.concatenate([np.ones(self.rows, bool), new])
        pieces = [dict(self._columns), *pieces]
        sizes = [len(piece[_FILE]) for piece in pieces]
        parts = dict.fromkeys(name for piece in pieces for name in piece if name not in _TYPES)
        columns: Piece = {}
        for name in [*_TYPES, *[*parts][:_MOST_PARTS]]:
            empty = _TYPES.get(name, np.float32)
            some = [piece.pop(name, None) for piece in pieces]  # gone from there: half the memory
            filled = zip(some, sizes, strict=True)
            columns[name] = _joined(
                [_filled(empty, size) if part is None else part for part, size in filled], kept
            )
        self._columns, self.rows = columns, int(kept.sum())

    def _read_failures(self, path: Path, run_id: bytes) -> None:
        report, end = ScanReport(), self._failed_ends.get(path, FILE_HEADER_SIZE)
        for frame in scan(path, run_id, report, end):
            try:
                record = self._codec.decode_failure(frame.body)
            except ValueError as error:
                self._note(f"{path.name} is damaged: {error}")
                continue
            first = (cause := failure_cause(record.error)) not in self._causes
            self._causes.add(cause)
            text, traceback = record.error[:_MOST_ERROR], record.traceback if first else ""
            self._failures[record.index, record.repeat] = replace(record, error=text, traceback=traceback)
        self._failed_ends[path] = max(end, report.end)


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


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
        if kind is str:
            piece[name] = column.dictionary_encode()
            continue
        if name in METRIC_NAMES:
            column = column.field(METRIC_NAMES.index(name))
        values = _oldest(column) if name == "version" else column_values(column)
        piece[name] = values.astype(kind, copy=False)
    return piece | _parts_of_rewards(read["reward_extra"])


def _oldest(column: pa.Array) -> Array:
    """The lowest policy version of each row."""
    versions, offsets = column_values(column.values.field("version")), column_values(column.offsets)
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
            extra = orjson.loads(text)
        except ValueError:
            continue
        for name, value in extra.items() if isinstance(extra, dict) else ():
            if isinstance(value, int | float) and (name in parts or len(parts) < _MOST_PARTS):
                parts.setdefault(name, np.full(len(texts), math.nan, np.float32))[code] = value
    codes = column_values(coded.indices)
    return {f"reward.{name}": values[codes] for name, values in parts.items()}
