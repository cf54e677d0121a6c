"""Where rows come from: JSON Lines, Parquet, Hugging Face dataset folders, a dataset class of the user's.

Rows are read by position when they are asked for. Parquet and zstd, which can only be read in order, are unpacked
once into a temporary file without a name, of which nothing is left when the process ends.

JSON Lines are read here and not by `datasets`, which gives a column one type: of truths "1" and 2 it makes numbers,
of large integers floats, of texts that look like dates timestamps.

Arrow gives every struct of a column all the keys that any row has, and fills the missing ones with None. So,
from Arrow, keys whose value is None are left out below the columns, at every depth. Columns stay. A pandas
index that slipped into a file (`__index_level_0__`) is a position, not content: it is left out.
"""

import bisect
import glob
import itertools
import json
import mmap
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.config.settings import DataSettings
from rollstream.data.values import BadRow, Row, described, to_jsonable
from rollstream.errors import ConfigError, DataError
from rollstream.user_code import import_name

_FORMATS = {
    "Parquet": (".parquet", ".pq"),
    "JSON Lines by zstd": (".jsonl.zst", ".json.zst", ".ndjson.zst"),
    "JSON Lines": (".jsonl", ".json", ".ndjson"),
}
"""Formats, and the endings of their files' names."""
_SPOOL_BATCH_BYTES = 32 << 20
"""Encoded bytes of a spooled record batch, about. Few are held in memory while spooling."""
_SPOOL_BATCH_ROWS = 256
"""Few, because Parquet encodes a text that all rows share once, and a batch holds it with each row."""

VERL_PROMPT = "raw_prompt"
"""The messages, as verl's dataset makes them of `data.prompt_key`."""

MISSING_EXTRA = "pip install 'rollstream[tasks]'"
"""What gives the packages that tasks and dataset folders need."""


class RowSource(ABC):
    """Rows by position, read when asked for. Safe to read from several threads.

    Args:
        label: What messages call the data.
        folder: Where relative paths in rows are taken from; None when there is no such folder.
        files: The files that hold the rows; None when they do not come from files alone.
    """

    def __init__(self, label: str, folder: Path | None = None, files: Sequence[Path] | None = None) -> None:
        self._label = label
        self._folder = None if folder is None else folder.absolute()
        self.files = files

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, position: int) -> Row:
        """Reads one row, `0 <= position < len`; the caller may change it.

        Raises:
            BadRow: The row cannot be read.
        """

    def location(self, position: int) -> str:
        """Where a row is, for people: `train.jsonl, row 17 (line 18)`. Rows count from 0, lines from 1."""
        return f"{self._label}, row {position}"

    def folder(self, position: int) -> Path | None:
        """The folder from which a row's relative paths are taken, absolute; None when there is none."""
        return self._folder


class Concatenated(RowSource):
    """Several sources, one after the other; at least one."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        files = [source.files for source in sources]
        super().__init__(
            "several", None, None if None in files else [file for each in files for file in each or ()]
        )
        self._sources = list(sources)
        self._begins = [0, *itertools.accumulate(map(len, sources))]

    def __len__(self) -> int:
        return self._begins[-1]

    def row(self, position: int) -> Row:
        source, inner = self._find(position)
        return source.row(inner)

    def location(self, position: int) -> str:
        source, inner = self._find(position)
        return source.location(inner)

    def folder(self, position: int) -> Path | None:
        source, inner = self._find(position)
        return source.folder(inner)

    def _find(self, position: int) -> tuple[RowSource, int]:
        which = bisect.bisect_right(self._begins, position) - 1
        return self._sources[which], position - self._begins[which]


class JsonLines(RowSource):
    """The rows of one JSON Lines file, one object a line. Blank lines are no rows.

    The offsets of the lines cost 8 bytes a row. Lines are read by `pread`, never mapped: a file that someone
    truncates meanwhile is then an error with a name, not a SIGBUS that takes the process along.

    Args:
        file: Open for reading, at its start; kept open as long as this object lives.
        path: The file that it is, or was unpacked from.

    Raises:
        DataError: The file holds one JSON array.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(str(path), path.parent, [path])
        self._file = file
        self._starts, self._blanks = array("q"), array("q")
        offset = len(b"\xef\xbb\xbf") if file.read(3) == b"\xef\xbb\xbf" else 0
        file.seek(offset)
        for line in file:
            (self._blanks if line.isspace() else self._starts).append(offset)
            offset += len(line)
        self._starts.append(offset)
        if len(self) and os.pread(file.fileno(), 1, self._starts[0]) == b"[":
            raise DataError(
                f"{path}: a JSON array, not JSON Lines; `jq -c '.[]' {path} > rows.jsonl` makes them of it"
            )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, position: int) -> Row:
        start, end = self._starts[position], self._starts[position + 1]
        try:
            line = os.pread(self._file.fileno(), end - start, start)
        except OSError as error:
            raise BadRow(f"the file cannot be read ({error})") from error
        if len(line) < end - start:
            raise BadRow("the file has become shorter since it was opened")
        return decode_line(line)

    def location(self, position: int) -> str:
        # From the offsets and not from the file, whose lines may have changed since.
        line = 1 + position + bisect.bisect_left(self._blanks, self._starts[position])
        return f"{super().location(position)} (line {line})"


def decode_line(line: bytes) -> Row:
    """Decodes one line, which must hold an object. NaN reads as None; integers come as they are written.

    Raises:
        BadRow: Not JSON, not an object, or a number too large for a float.
    """
    try:
        value = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:  # knows NaN and infinities, and tells what is wrong
            value = to_jsonable(json.loads(line))
        except (ValueError, RecursionError) as error:
            begins = line[:60].decode(errors="replace").rstrip()
            raise BadRow(f"not JSON ({error}); the line begins {begins!r}") from error
    if type(value) is not dict:
        raise BadRow(f"the line holds {described(value)}, not a JSON object")
    return value


_DECODER = msgspec.json.Decoder()


class ArrowRows(RowSource):
    """The rows of a table that lies in memory-mapped files, so that holding it holds no memory."""

    def __init__(self, table: pa.Table, label: str, folder: Path, files: Sequence[Path]) -> None:
        super().__init__(label, folder, files)
        names = [name for name in table.column_names if not name.startswith("__index_level_")]
        self._table = table.select(names)
        self._columns = list(zip(names, self._table.columns, strict=True))
        self._json_columns = [field for field in self._table.schema if _holds_json(field.type)]

    def __len__(self) -> int:
        rows: int = self._table.num_rows
        return rows

    def row(self, position: int) -> Row:
        try:  # a cell at a time, which is as quick as rows together
            raw = {name: column[position].as_py(maps_as_pydicts="strict") for name, column in self._columns}
            for field in self._json_columns:
                raw[field.name] = _decode_json(raw[field.name], field.type)
        except (pa.ArrowException, ValueError, KeyError, OverflowError) as error:
            raise BadRow(f"a value cannot be read ({type(error).__name__}: {error})") from error
        row: Row = to_jsonable(raw, drop_none=True)
        return row


def _inner_fields(kind: pa.DataType) -> "list[pa.Field[Any]]":
    return [kind.field(i) for i in range(kind.num_fields)]


def _holds_json(kind: pa.DataType) -> bool:
    """Whether it is or holds `datasets.Json`, which Arrow gives as text."""
    is_json = getattr(kind, "extension_name", None) == "arrow.json"
    return is_json or any(_holds_json(field.type) for field in _inner_fields(kind))


def _decode_json(value: Any, kind: pa.DataType) -> Any:
    if value is None or not _holds_json(kind):
        return value
    if isinstance(value, str):
        return orjson.loads(value)
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {field.name: _decode_json(value[field.name], field.type) for field in _inner_fields(kind)}
    return (
        [_decode_json(item, _inner_fields(kind)[0].type) for item in value]
        if isinstance(value, list)
        else value
    )


class ObjectRows(RowSource):
    """The rows of an object in memory: a list, a Hugging Face dataset, whatever has a length and positions.

    Of a pandas DataFrame and an Arrow table, whose positions are columns, they are made a list.

    A row is a mapping, of the same columns as a row of a file; a text is a row with this prompt. The same
    position must give the same row each time. `__getitem__` may be called from several threads.

    Args:
        dataset: The object; what can only be iterated over is read into a list.
        label: What messages call it.
        prompt_column: Of rows that are texts.

    Raises:
        DataError: It has no rows, or its rows have no positions.
    """

    def __init__(self, dataset: Any, label: str, prompt_column: str = "prompt") -> None:
        super().__init__(label)  # nobody knows where its data lie
        self._is_arrow = hasattr(dataset, "features") or hasattr(dataset, "to_pylist")
        self._prompt_column = prompt_column
        if hasattr(dataset, "to_pylist"):
            dataset = dataset.to_pylist()
        elif hasattr(dataset, "iloc"):
            dataset = dataset.to_dict("records")
        elif isinstance(dataset, Mapping) or not (
            hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
        ):
            raise DataError(
                f"{label}: {described(dataset)} holds no rows; give a list of them, or name a split"
            )
        elif not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            dataset = list(dataset)
        self._dataset: Any = dataset
        self._length = len(dataset)
        if not self._length:
            raise DataError(f"{label}: holds no rows")

    def __len__(self) -> int:
        return self._length

    def row(self, position: int) -> Row:
        try:
            row = self._dataset[position]
        except (Exception, SystemExit) as error:
            raise BadRow(f"the dataset raised {type(error).__name__}: {error}") from error
        if isinstance(row, str):
            row = {self._prompt_column: row}
        if not isinstance(row, Mapping):
            raise BadRow(f"the dataset gave {described(row)}, want a dict")
        is_verls = "dummy_tensor" in row and VERL_PROMPT in row
        plain = without_verls_own(row, self._prompt_column) if is_verls else dict(row)
        copied: Row = to_jsonable(plain, drop_none=self._is_arrow or is_verls)
        return copied


def without_verls_own(row: Mapping[str, Any], prompt_column: str) -> dict[str, Any]:
    """A row of verl's dataset by the columns that it was made of: it has the key that it has without verl.

    verl's dataset adds a tensor so that a batch is not empty, and an index that is 0 for every row that does
    not have one in its `extra_info`, where it stays.
    """
    plain = {str(key): value for key, value in row.items() if key not in ("dummy_tensor", "index")}
    plain[prompt_column] = plain.pop(VERL_PROMPT)
    for key in ("tools_kwargs", "interaction_kwargs"):
        if not plain.get(key):
            plain.pop(key, None)
    return plain


def custom_rows(data: DataSettings) -> ObjectRows:
    """`data.custom_cls`: the rows of a user's dataset class.

    The class is made with keyword arguments `files` (`data.train_files` as a list of str, maybe empty) and
    `data` (the `DataSettings`). It has `__len__` and `__getitem__(position)`, see `ObjectRows`.

    Raises:
        ConfigError: The class cannot be loaded.
        DataError: It cannot be made, or has no rows.
    """
    cls = load_class(data.custom_cls.path, data.custom_cls.name, "data.custom_cls")
    label = f"{cls.__name__} ({data.custom_cls.path})"
    try:
        return ObjectRows(cls(files=data.files, data=data), label, data.prompt_key)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{label}: cannot be made by (files=…, data=…) ({type(error).__name__}: {error}); "
            "a class for verl needs generation.executor=verl"
        ) from error


def load_class(path: str | None, name: str | None, setting: str) -> type:
    """Loads a class from a Python file of the user's; the file runs each time.

    Raises:
        ConfigError: Not set whole, no such file or class, or the file raises when it runs.
    """
    if not path or not name:
        raise ConfigError(f"{setting}: needs both path (a Python file) and name (a class in it)")
    loaded = import_name(f"{path}:{name}", key=setting)
    if not isinstance(loaded, type):
        raise ConfigError(f"{setting}: {name} in {path} is not a class")
    return loaded


def expand_paths(names: Iterable[str]) -> list[Path]:
    """The files and dataset folders that `data.train_files` names.

    A pattern stands for what it matches, and a folder that is no saved dataset for the data files in it; both
    come sorted by name. What leads to nothing stays: `open_source` says why.

    Raises:
        DataError: A folder has files of several formats, or a name is an address.
    """
    paths: list[Path] = []
    for name in names:
        if "://" in str(name):
            raise DataError(f"{name}: nothing is downloaded from addresses")
        path = Path(name).expanduser()
        matches = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  may be absolute
        for match in [Path(each) for each in matches] or [path]:
            saved = (match / "state.json").exists() or (match / "dataset_dict.json").exists()
            paths += _files_in(match) if match.is_dir() and not saved else [match]
    return paths


def _files_in(folder: Path) -> list[Path]:
    """The data files of a folder, by name; the folder itself if there are none."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith(".")]
    by_format = {kind: file for file in files if (kind := _format(file)) is not None}
    if len(by_format) > 1:
        names = ", ".join(file.name for file in by_format.values())
        raise DataError(f"{folder}: has files of several formats ({names}); name one by a pattern")
    return [file for file in files if _format(file) is not None] or [folder]


def _format(path: Path) -> str | None:
    return next((kind for kind, endings in _FORMATS.items() if path.name.lower().endswith(endings)), None)


def open_source(path: Path) -> RowSource:
    """Opens a file, or a folder that `Dataset.save_to_disk` wrote, as rows. Names say the format.

    Raises:
        ConfigError: A dataset folder, and the package `datasets` is not installed.
        DataError: Missing, without rows, damaged, or of a format that is not read.
    """
    try:
        source = _open(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read, or unpacked into {tempfile.gettempdir()} (TMPDIR): {error}"
        ) from error
    if not len(source):
        raise DataError(f"{path}: holds no rows")
    return source


def _open(path: Path) -> RowSource:
    if path.is_dir():
        return _open_dataset_folder(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; datasets of the Hugging Face Hub are loaded by train_tasks")
    kind = _format(path)
    if kind == "Parquet":
        return _open_parquet(path)
    if kind == "JSON Lines":
        return JsonLines(path.open("rb", buffering=1 << 20), path)
    if kind is None:
        raise DataError(
            f"{path}: not a format that is read; read are {', '.join(sum(_FORMATS.values(), ()))}"
        )
    spool = tempfile.TemporaryFile()  # noqa: SIM115  JsonLines keeps it open
    with pa.input_stream(path, compression="zstd") as unpacked:
        shutil.copyfileobj(unpacked, spool)
    spool.seek(0)
    return JsonLines(spool, path)


def _open_parquet(path: Path) -> ArrowRows:
    """Opens a Parquet file for random access, which Parquet itself gives by row group only."""
    with tempfile.TemporaryFile() as spool:
        with pq.ParquetFile(path) as parquet, pa.ipc.new_stream(spool, parquet.schema_arrow) as writer:
            # Each group has dictionaries of its own; a stream may have several of them, a file may not.
            for i in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(i)
                row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
                rows = max(1, min(_SPOOL_BATCH_ROWS, _SPOOL_BATCH_BYTES // row_bytes))
                for batch in parquet.iter_batches(batch_size=rows, row_groups=[i]):
                    writer.write_batch(batch)
        spool.flush()
        pa.default_memory_pool().release_unused()  # what unpacking took goes back to the system
        mapped = mmap.mmap(spool.fileno(), 0, access=mmap.ACCESS_READ)  # outlives the descriptor
    table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all()
    return ArrowRows(table, str(path), path.parent, [path])


def _open_dataset_folder(path: Path) -> ArrowRows:
    """Opens a saved dataset, or the split `train` of a saved `DatasetDict`; its files are memory-mapped."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{path}: needs the package datasets: {MISSING_EXTRA}") from error
    try:
        loaded: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # the package lets pass what its parts raise
        raise DataError(f"{path}: cannot be read as a Hugging Face dataset folder ({error})") from error
    if isinstance(loaded, dict):
        if "train" not in loaded:
            raise DataError(f"{path}: holds no split train; name one: {', '.join(loaded)}")
        loaded = loaded["train"]
    files = [Path(file["filename"]) for file in loaded.cache_files]
    return ArrowRows(loaded.with_format("arrow")[:], str(path), files[0].parent if files else path, files)
