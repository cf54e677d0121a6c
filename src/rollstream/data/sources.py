"""Where rows come from: JSON Lines, Parquet, Hugging Face dataset folders, a dataset class of the user's.

Rows are read by position when they are asked for. What only can be read in order (Parquet, zstd) is unpacked
once into a spool file: a temporary file without a name, of which nothing is left when the process ends.

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
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from rollstream.config.settings import DataSettings
from rollstream.data.values import BadRow, Row, described, to_jsonable
from rollstream.errors import ConfigError, DataError
from rollstream.user_code import import_name

FORMATS = (
    "Parquet (.parquet), JSON Lines (.jsonl, .json, .jsonl.zst), Hugging Face dataset folders (save_to_disk)"
)
"""The formats that are read, for messages."""

_PARQUET, _ZSTD, _JSON = "Parquet", "JSON Lines compressed with zstd", "JSON Lines"
_JSON_NAMES = (".jsonl", ".json", ".ndjson")
_NAMES = {
    (".parquet", ".pq"): _PARQUET,
    tuple(f"{one}.zst" for one in _JSON_NAMES): _ZSTD,
    _JSON_NAMES: _JSON,
}
_MAGIC = {
    b"PAR1": _PARQUET,
    b"\x28\xb5\x2f\xfd": _ZSTD,
    b"ARROW1": "Arrow IPC",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
}
_BUFFER_BYTES = 1 << 20
_SPOOL_BATCH_BYTES = 32 << 20
"""Encoded bytes of a spooled record batch, about. Few are held in memory while spooling."""
_SPOOL_BATCH_ROWS = 256
"""Few, because Parquet encodes a text that all rows share once, and a batch holds it with each row."""


VERL_PROMPT = "raw_prompt"
"""The messages, as verl's dataset makes them of `data.prompt_key`."""


class RowSource(ABC):
    """Rows by position, read when asked for. Safe to read from several threads.

    Args:
        label: What messages call the data.
        folder: Where relative paths in rows are taken from; None when there is no such folder.
    """

    def __init__(self, label: str, folder: Path | None = None) -> None:
        self._label = label
        self._folder = None if folder is None else folder.absolute()

    @abstractmethod
    def __len__(self) -> int:
        """How many rows."""

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
        super().__init__("several")
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
        label: What messages call the file.
        folder: Where it lies.

    Raises:
        DataError: The file holds one JSON array.
    """

    def __init__(self, file: BinaryIO, label: str, folder: Path | None = None) -> None:
        super().__init__(label, folder)
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
                f"{label}: holds a JSON array, not JSON Lines (one object a line); "
                f"`jq -c '.[]' {label} > rows.jsonl` turns it into such a file"
            )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, position: int) -> Row:
        start, end = self._starts[position], self._starts[position + 1]
        line = b""
        while len(line) < end - start:  # one pread gives at most 2 GiB
            try:
                more = os.pread(self._file.fileno(), end - start - len(line), start + len(line))
            except OSError as error:
                raise BadRow(f"the file cannot be read ({error})") from error
            if not more:
                raise BadRow("the file has become shorter since it was opened")
            line = line + more if line else more
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
        value = _decode_json_text(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = _decode_slowly(line)
    if type(value) is not dict:
        raise BadRow(f"the line holds {described(value)}, not a JSON object")
    return value


_decode_json_text = msgspec.json.Decoder().decode


def _decode_slowly(line: bytes) -> Any:
    """Knows NaN and infinities, and says what is wrong."""
    try:
        return to_jsonable(json.loads(line))
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 ({error})") from error
    except RecursionError as error:
        raise BadRow("JSON nested too deeply") from error
    except ValueError as error:
        begins = line[:60].decode(errors="replace").rstrip()
        raise BadRow(f"not JSON ({error}); the line begins {begins!r}") from error


class ArrowRows(RowSource):
    """The rows of a table that lies in memory-mapped files.

    Args:
        table: Its buffers are mapped, so holding it holds no memory.
        label: What messages call the data.
        folder: Where the data lie.
        indices: Which row of the table each row is, as a Hugging Face dataset may store it; None is as they
            come.
    """

    def __init__(
        self, table: pa.Table, label: str, folder: Path, indices: "np.ndarray[Any, Any] | None" = None
    ) -> None:
        names = [name for name in table.column_names if not name.startswith("__index_level_")]
        super().__init__(label, folder)
        self._table, self._indices = table.select(names), indices
        self._columns = list(zip(names, self._table.columns, strict=True))
        stored = table.num_rows
        if indices is not None and len(indices) and not 0 <= indices.min() <= indices.max() < stored:
            raise DataError(f"{label}: its indices point outside its {stored} rows; save the dataset again")
        self._json_columns = [field for field in self._table.schema if _holds_json(field.type)]

    def __len__(self) -> int:
        return self._table.num_rows if self._indices is None else len(self._indices)

    def row(self, position: int) -> Row:
        stored = position if self._indices is None else int(self._indices[position])
        try:  # a cell at a time, which is as quick as rows together
            raw = {name: column[stored].as_py(maps_as_pydicts="strict") for name, column in self._columns}
        except (pa.ArrowException, ValueError, KeyError, OverflowError) as error:
            raise BadRow(f"a value cannot be read ({type(error).__name__}: {error})") from error
        for field in self._json_columns:
            raw[field.name] = _decode_json(raw[field.name], field.type)
        row: Row = to_jsonable(raw, drop_none=True)
        return row


def _inner_fields(kind: pa.DataType) -> "Iterable[pa.Field[Any]]":
    return (kind.field(i) for i in range(kind.num_fields))


def _holds_json(kind: pa.DataType) -> bool:
    """Whether it is or holds `datasets.Json`, which Arrow gives as text."""
    if getattr(kind, "extension_name", None) == "arrow.json":
        return True
    return any(_holds_json(field.type) for field in _inner_fields(kind))


def _decode_json(value: Any, kind: pa.DataType) -> Any:
    if value is None or not _holds_json(kind):
        return value
    if isinstance(value, str):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRow(f"a value is declared as JSON but is not ({error})") from error
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {field.name: _decode_json(value[field.name], field.type) for field in _inner_fields(kind)}
    items = next(iter(_inner_fields(kind))).type
    return [_decode_json(item, items) for item in value] if isinstance(value, list) else value


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
        if isinstance(dataset, Mapping):
            raise DataError(f"{label}: a mapping holds no rows; name a split, or give a list of rows")
        self._is_arrow = hasattr(dataset, "features") or hasattr(dataset, "to_pylist")
        if hasattr(dataset, "to_pylist"):
            dataset = dataset.to_pylist()
        elif hasattr(dataset, "iloc"):
            dataset = dataset.to_dict("records")
        elif not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            if not hasattr(dataset, "__iter__"):
                raise DataError(f"{label}: {described(dataset)} holds no rows; give a list of them")
            dataset = list(dataset)
        self._dataset: Any = dataset
        self._prompt_column = prompt_column
        self._length = len(dataset)
        if self._length == 0:
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
        made = cls(files=data.files, data=data)
        len(made)
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{label}: cannot be made by (files=…, data=…) with a length ({type(error).__name__}: "
            f"{error}); see docs/data.md. One as verl makes it, by (data_files=…, tokenizer=…, processor=…, "
            "config=…), needs generation.executor=verl"
        ) from error
    if not hasattr(cls, "__getitem__"):
        raise DataError(f"{label}: has no __getitem__(position)")
    return ObjectRows(made, label, data.prompt_key)


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
        DataError: A folder has files of several formats.
    """
    paths: list[Path] = []
    for name in names:
        matches = [path := Path(name).expanduser()]
        if not path.exists():
            found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  may be absolute
            matches = [Path(match) for match in found] or matches
        for match in matches:
            paths += _files_in(match) if match.is_dir() and not _is_dataset(match) else [match]
    return paths


def _is_dataset(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("state.json", "dataset_dict.json", "train/state.json"))


def _files_in(folder: Path) -> list[Path]:
    """The data files of a folder, by name; the folder itself if there are none."""
    by_format: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if (kind := _named_format(file)) is not None and file.is_file() and not file.name.startswith("."):
            by_format.setdefault(kind, []).append(file)
    if len(by_format) > 1:
        found = " and ".join(f"{kind} ({files[0].name})" for kind, files in by_format.items())
        raise DataError(
            f"{folder}: has files of several formats, {found}; name one by a pattern, as in '*.parquet'"
        )
    return next(iter(by_format.values()), [folder])


def open_source(path: Path) -> RowSource:
    """Opens a file or dataset folder as rows.

    Args:
        path: What to open. Its name says the format; its first bytes must agree.

    Raises:
        DataError: Missing, empty, without rows, damaged, or of a format that is not read.
    """
    source: RowSource
    try:
        if path.is_dir():
            source = _open_dataset_folder(path)
        elif (kind := _format(path)) == _PARQUET:
            source = _open_parquet(path)
        else:
            file = _decompress(path) if kind == _ZSTD else path.open("rb", buffering=_BUFFER_BYTES)
            source = JsonLines(file, str(path), path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not len(source):
        raise DataError(f"{path}: holds no rows")
    return source


def data_files(path: Path) -> list[Path]:
    """The files that hold the data of a path that `open_source` opens: itself, or those of the folder.

    Raises:
        DataError: The folder is no dataset.
    """
    if not path.is_dir():
        return [path]
    files, index_files = _dataset_files(path)
    return [*files, *index_files]


def _format(path: Path) -> str:
    """The format of a file; its name and its first bytes agree."""
    if not path.exists():
        raise DataError(_missing(path))
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        raise DataError(f"{path}: the file is empty")
    named = _named_format(path)
    content = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), _JSON)
    found = "text, or something unknown" if content == _JSON else content
    if named is None:
        raise DataError(
            f"{path}: not a format that is read (its bytes look like {found}). Read are: {FORMATS}"
        )
    if named != content:
        raise DataError(
            f"{path}: its name says {named}, but its bytes are {found}; rename or convert it. Read are: {FORMATS}"
        )
    return named


def _named_format(path: Path) -> str | None:
    return next((kind for ends, kind in _NAMES.items() if path.name.lower().endswith(ends)), None)


def _missing(path: Path) -> str:
    """Why a path leads to no file, and what to do: it may have been a URL, or a dataset's name."""
    text = str(path)
    scheme, is_url, rest = text.partition(":/")
    if is_url:
        return (
            f"{scheme}://{rest.lstrip('/')}: data are read from local files. Download it first, or load a "
            "dataset of the Hugging Face Hub by train_tasks"
        )
    what = f"{path}: no such file (looked in {path.absolute().parent})"
    if text.count("/") == 1 and not path.suffix and not path.parent.exists():
        what += "; a dataset of the Hugging Face Hub is loaded by train_tasks (docs/data.md)"
    return what


@contextmanager
def spool_for(what: str) -> Iterator[BinaryIO]:
    """Opens a spool file to be filled inside the `with`; it stays open after it, unless filling failed.

    Raises:
        DataError: The temporary folder cannot be written, or is full: names it, and how to choose another.
    """
    spool: Any = None
    try:
        spool = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
        yield spool
        spool.flush()
        spool.seek(0)
    except BaseException as error:
        if spool is not None:
            spool.close()
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own complaints have no errno
            raise DataError(
                f"{what}: cannot be put into the temporary folder {tempfile.gettempdir()} "
                f"({error}); free space there, or set TMPDIR to a folder on a larger disk"
            ) from error
        raise


def _decompress(path: Path) -> BinaryIO:
    """Decompresses a zstd file into a spool file; several frames, as `pzstd` writes them, are one stream."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    with spool_for(str(path)) as spool, path.open("rb") as source:
        try:
            while chunk := source.read(64 << 10):  # small: zstd can expand a thousandfold
                while chunk:
                    frame = frame or decompressor.decompressobj()
                    spool.write(frame.decompress(chunk))
                    chunk = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
        except zstandard.ZstdError as error:
            raise DataError(f"{path}: damaged zstd data ({error})") from error
    if frame is not None:
        spool.close()
        raise DataError(f"{path}: the zstd data is cut off; copy the file again")
    return spool


def _open_parquet(path: Path) -> ArrowRows:
    """Opens a Parquet file for random access, which Parquet itself gives by row group only."""
    try:
        with (
            pq.ParquetFile(path) as parquet,
            spool_for(str(path)) as spool,
            pa.ipc.new_stream(spool, parquet.schema_arrow) as writer,
        ):
            # Each group has dictionaries of its own; a stream may have several of them, a file may not.
            for i in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(i)
                row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
                rows = max(1, min(_SPOOL_BATCH_ROWS, _SPOOL_BATCH_BYTES // row_bytes))
                for batch in parquet.iter_batches(batch_size=rows, row_groups=[i]):
                    writer.write_batch(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({error})") from error
    pa.default_memory_pool().release_unused()  # what unpacking took goes back to the system
    with spool:
        mapped = mmap.mmap(spool.fileno(), 0, access=mmap.ACCESS_READ)  # outlives the descriptor
    table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all()
    return ArrowRows(table, str(path), path.parent)


def _dataset_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The data files of a saved dataset (of a `DatasetDict`: its split `train`), and those of a stored order."""
    folder = path if (path / "state.json").is_file() else path / "train"
    if not (folder / "state.json").is_file():
        if (path / "dataset_dict.json").is_file():
            splits = sorted(one.parent.name for one in path.glob("*/state.json"))
            raise DataError(
                f"{path}: holds the splits {', '.join(splits) or '(none)'}, but no train; "
                f"name the one to use, as in {path / (splits or ['SPLIT'])[0]}"
            )
        raise DataError(
            f"{path}: a folder without data files, and no Hugging Face dataset folder (it has no state.json). "
            f"Read are: {FORMATS}"
        )
    try:
        state = orjson.loads((folder / "state.json").read_bytes())
        files = [folder / entry["filename"] for entry in state["_data_files"]]
        order = [folder / entry["filename"] for entry in state.get("_indices_data_files") or ()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder}: its state.json cannot be read ({error!r}); save the dataset again"
        ) from error
    for file in (*files, *order):
        if not file.is_file():
            raise DataError(f"{folder}: state.json names {file.name}, which is not there")
    return files, order


def _open_dataset_folder(path: Path) -> ArrowRows:
    """Opens a dataset that `Dataset.save_to_disk` wrote; its files are memory-mapped as they are."""
    files, index_files = _dataset_files(path)
    indices = _mapped_table(index_files).column(0).to_numpy().astype(np.int64) if index_files else None
    return ArrowRows(_mapped_table(files), str(path), files[0].parent, indices)


def _mapped_table(files: Sequence[Path]) -> pa.Table:
    tables = []
    for file in files:
        try:
            with pa.ipc.open_stream(pa.memory_map(str(file))) as reader:
                tables.append(reader.read_all())
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: cannot be read as an Arrow stream ({error})") from error
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise DataError(
            f"{files[0].parent}: its files have different columns; save the dataset again"
        ) from error
