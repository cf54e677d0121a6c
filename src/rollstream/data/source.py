"""Where rows come from: one protocol, and the choice of a reader by what a file is."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from rollstream.data.arrow_rows import dataset_folder_files, open_dataset_folder, open_parquet
from rollstream.data.json_lines import JsonLines
from rollstream.data.spool import decompress
from rollstream.data.values import BadRow, Row
from rollstream.errors import DataError

FORMATS = (
    "Parquet (.parquet), JSON Lines (.jsonl, .json, .jsonl.zst), Hugging Face dataset folders (save_to_disk)"
)
"""The formats that are read, for messages."""

_PARQUET_NAMES = (".parquet", ".pq")
_JSON_NAMES = (".jsonl", ".json", ".ndjson")
_MAGIC = {
    b"PAR1": "Parquet",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"ARROW1": "Arrow IPC",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x80\x04": "pickle",
    b"\x80\x05": "pickle",
}


class RowSource(Protocol):
    """Rows by position, read when asked for. Safe to read from several threads."""

    def __len__(self) -> int:
        """How many rows."""
        ...

    def row(self, position: int) -> Row:
        """Reads one row, `0 <= position < len`; the caller may change it.

        Raises:
            BadRow: The row cannot be read.
        """
        ...

    def scan(self) -> Iterator[Row | BadRow]:
        """Reads all rows in order, the fast way; a row that cannot be read comes as its error."""
        ...

    def location(self, position: int) -> str:
        """Where a row is, for people: `train.jsonl, row 17 (line 18)`. Rows count from 0, lines from 1."""
        ...

    def folder(self, position: int) -> Path | None:
        """The folder from which a row's relative paths are taken, absolute; None when there is none."""
        ...


class Concatenated:
    """Several sources, one after the other.

    Args:
        sources: At least one.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = list(sources)
        self._begins = np.array([0, *itertools.accumulate(map(len, sources))], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def row(self, position: int) -> Row:
        source, inner = self._find(position)
        return source.row(inner)

    def scan(self) -> Iterator[Row | BadRow]:
        for source in self._sources:
            yield from source.scan()

    def location(self, position: int) -> str:
        source, inner = self._find(position)
        return source.location(inner)

    def folder(self, position: int) -> Path | None:
        source, inner = self._find(position)
        return source.folder(inner)

    def _find(self, position: int) -> tuple[RowSource, int]:
        which = int(np.searchsorted(self._begins, position, side="right")) - 1
        return self._sources[which], position - int(self._begins[which])


def open_source(path: Path, spool_dir: Path | None = None) -> RowSource:
    """Opens a file or dataset folder as rows.

    Args:
        path: What to open. Its name says the format; its first bytes must agree.
        spool_dir: Folder for unpacked data (Parquet, zstd); None takes the system's temporary folder.

    Raises:
        DataError: Missing, empty, without rows, damaged, or of a format that is not read.
    """
    source: RowSource
    if path.is_dir():
        source = open_dataset_folder(find_dataset_folder(path), str(path))
    else:
        kind = _check_format(path)
        try:
            if kind == "Parquet":
                source = open_parquet(path, str(path), spool_dir)
            elif kind == "zstd":
                source = JsonLines(decompress(path, spool_dir), str(path), path.parent)
            else:
                source = JsonLines(path.open("rb"), str(path), path.parent)
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
    files, index_files = dataset_folder_files(find_dataset_folder(path))
    return [*files, *index_files]


def find_dataset_folder(folder: Path) -> Path:
    """The dataset in a folder: the folder itself, or the split `train` of a saved `DatasetDict`.

    Raises:
        DataError: Neither; names the splits there are.
    """
    if (folder / "state.json").is_file():
        return folder
    if (folder / "dataset_dict.json").is_file():
        if (folder / "train" / "state.json").is_file():
            return folder / "train"
        try:
            splits = list(map(str, orjson.loads((folder / "dataset_dict.json").read_bytes())["splits"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}: its dataset_dict.json cannot be read ({error!r})") from error
        raise DataError(
            f"{folder}: holds the splits {', '.join(splits) or '(none)'}, but no train; "
            f"name the one to use, as in {folder / (splits or ['SPLIT'])[0]}"
        )
    raise DataError(
        f"{folder}: a folder, but no Hugging Face dataset folder (it has no state.json); "
        f"to use the files in it, list them. Read are: {FORMATS}"
    )


def _check_format(path: Path) -> str:
    """The format of a file: Parquet, zstd (JSON Lines in it) or JSON Lines. Its name and bytes agree."""
    if not path.exists():
        raise DataError(f"{path}: no such file (looked in {path.absolute().parent})")
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not head:
        raise DataError(f"{path}: the file is empty")
    name = path.name.lower()
    content = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "text")
    if name.endswith(_PARQUET_NAMES):
        named = "Parquet"
    elif name.endswith(tuple(suffix + ".zst" for suffix in _JSON_NAMES)):
        named = "zstd"
    elif name.endswith(_JSON_NAMES):
        named = "text"
    else:
        hint = f" (its bytes look like {content})" if content != "text" else ""
        raise DataError(f"{path}: not a format that is read{hint}. Read are: {FORMATS}")
    if content != named:
        shown = {"text": "JSON Lines", "zstd": "JSON Lines compressed with zstd"}
        found = "text, or something unknown" if content == "text" else content
        raise DataError(
            f"{path}: its name says {shown.get(named, named)}, but its bytes are {found}; "
            f"rename or convert it. Read are: {FORMATS}"
        )
    return "JSON Lines" if named == "text" else named
