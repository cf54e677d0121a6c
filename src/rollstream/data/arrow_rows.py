"""Rows of Arrow data: Parquet files and Hugging Face dataset folders, by position.

Arrow gives every struct of a column all the keys that any row has, and fills the missing ones with None. So
keys whose value is None are left out below the columns, in mappings at every depth. Columns stay.
A pandas index that slipped into a file (`__index_level_0__`) is a position, not content: it is left out.
"""

import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.data.spool import spool_for
from rollstream.data.values import BadRow, Row, to_jsonable
from rollstream.errors import DataError

_SPOOL_BATCH_BYTES = 32 << 20
"""Uncompressed bytes of a spooled record batch, about: what is held in memory while spooling."""
_SPOOL_BATCH_ROWS = 16_384
"""Rows of a spooled record batch at most. Reading a row costs the same in any batch size."""
_SCAN_ROWS = 512
"""Rows turned into Python objects at once by a scan."""
_PANDAS_INDEX = "__index_level_"


class ArrowRows:
    """The rows of record batches that lie in memory-mapped files.

    Args:
        batches: In order; their buffers are mapped, so holding them holds no memory.
        label: What messages call the data.
        indices: Which row of the batches each row is, as a Hugging Face dataset may store it; None is as
            they come.
        folder: Where the data lie; relative paths in rows are taken from there.
    """

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        label: str,
        indices: npt.NDArray[np.int64] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._batches = [batch.select(_content_columns(batch.schema)) for batch in batches if batch.num_rows]
        self._begins = np.array([0, *itertools.accumulate(b.num_rows for b in self._batches)], dtype=np.int64)
        self._label = label
        self._indices = indices
        self._folder = None if folder is None else folder.absolute()
        stored = int(self._begins[-1])
        if indices is not None and len(indices) and not 0 <= indices.min() <= indices.max() < stored:
            raise DataError(f"{label}: its indices point outside its {stored} rows; save the dataset again")
        if any(batch.schema != self._batches[0].schema for batch in self._batches):
            raise DataError(f"{label}: its files have different columns; save the dataset again")
        self._length = stored if indices is None else len(indices)
        self._converters = _field_converters(self._batches[0].schema) if self._batches else {}

    def __len__(self) -> int:
        return self._length

    def row(self, position: int) -> Row:
        if self._indices is not None:
            position = int(self._indices[position])
        which = int(np.searchsorted(self._begins, position, side="right")) - 1
        batch = self._batches[which].slice(position - int(self._begins[which]), 1)
        return self._to_row(_to_python(batch)[0])

    def scan(self) -> Iterator[Row | BadRow]:
        if self._indices is not None:
            yield from (self._row_or_error(position) for position in range(len(self)))
            return
        for which, batch in enumerate(self._batches):
            for offset in range(0, batch.num_rows, _SCAN_ROWS):
                part = batch.slice(offset, _SCAN_ROWS)
                try:
                    raw_rows = _to_python(part)
                except BadRow:  # one of them: find which
                    begin = int(self._begins[which]) + offset
                    yield from (self._row_or_error(begin + i) for i in range(part.num_rows))
                    continue
                for raw in raw_rows:
                    try:
                        yield self._to_row(raw)
                    except BadRow as error:
                        yield error

    def location(self, position: int) -> str:
        return f"{self._label}, row {position}"

    def folder(self, position: int) -> Path | None:
        return self._folder

    def _row_or_error(self, position: int) -> Row | BadRow:
        try:
            return self.row(position)
        except BadRow as error:
            return error

    def _to_row(self, raw: Row) -> Row:
        for column, convert in self._converters.items():
            value = raw[column]
            if value is not None:
                raw[column] = convert(value)
        return raw


def _content_columns(schema: pa.Schema) -> list[int]:
    return [i for i, name in enumerate(schema.names) if not name.startswith(_PANDAS_INDEX)]


def _to_python(batch: pa.RecordBatch) -> list[Row]:
    try:
        rows: list[Row] = batch.to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowException, ValueError, KeyError, OverflowError) as error:
        raise BadRow(f"a value cannot be read ({type(error).__name__}: {error})") from error
    return rows


_Convert = Callable[[Any], Any]
"""Turns an Arrow-made value that is not None into one that JSON knows."""


def _field_converters(fields: "Iterable[pa.Field[Any]]") -> dict[str, _Convert]:
    """Converters for the fields that need one; made once, so that plain values cost nothing."""
    return {field.name: convert for field in fields if (convert := _converter(field.type)) is not None}


def _converter(kind: pa.DataType) -> _Convert | None:
    """The converter for a type; None where Arrow's Python values are fine as they are."""
    is_type = pa.types
    if is_type.is_struct(kind):
        return _struct_converter(_field_converters(kind))
    if is_type.is_list(kind) or is_type.is_large_list(kind) or is_type.is_fixed_size_list(kind):
        item = _converter(kind.value_type)
        if item is None:
            return None
        return lambda value: [None if each is None else item(each) for each in value]
    if is_type.is_dictionary(kind):
        return _converter(kind.value_type)
    if (
        is_type.is_string(kind)
        or is_type.is_large_string(kind)
        or is_type.is_integer(kind)
        or is_type.is_boolean(kind)
        or is_type.is_null(kind)
    ):
        return None
    if getattr(kind, "extension_name", None) == "arrow.json":  # `datasets.Json`: Arrow gives it as text
        return _decode_json
    return _convert_anything


def _struct_converter(converters: dict[str, _Convert]) -> _Convert:
    def convert(value: Row) -> Row:
        kept = {key: item for key, item in value.items() if item is not None}
        for key, convert_item in converters.items():
            if key in kept:
                kept[key] = convert_item(kept[key])
                if kept[key] is None:  # it was NaN: missing, too
                    del kept[key]
        return kept

    return convert


def _decode_json(value: str) -> Any:
    try:
        return _convert_anything(orjson.loads(value))
    except orjson.JSONDecodeError as error:
        raise BadRow(f"a value is declared as JSON but is not ({error})") from error


def _convert_anything(value: Any) -> Any:
    converted = to_jsonable(value, drop_none=True)
    if type(converted) is dict:
        return {key: item for key, item in converted.items() if item is not None}
    return converted


def open_parquet(path: Path, label: str, spool_dir: Path | None) -> ArrowRows:
    """Opens a Parquet file for random access.

    Its rows are unpacked once into an uncompressed spool file (Parquet itself can only be read by row group),
    in bounded batches.

    Raises:
        DataError: Damaged, or too large for the spool folder.
    """
    try:
        with (
            pq.ParquetFile(path) as parquet,
            spool_for(label, spool_dir) as spool,
            pa.ipc.new_file(spool, parquet.schema_arrow) as writer,
        ):
            for batch in parquet.iter_batches(batch_size=_batch_rows(parquet.metadata)):
                writer.write_batch(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{label}: cannot be read as Parquet ({error})") from error
    pa.default_memory_pool().release_unused()  # what unpacking took goes back to the system
    with spool:
        mapped = mmap.mmap(spool.fileno(), 0, access=mmap.ACCESS_READ)  # outlives the descriptor
    reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped)))
    return ArrowRows(
        [reader.get_batch(i) for i in range(reader.num_record_batches)], label, None, path.parent
    )


def _batch_rows(metadata: pq.FileMetaData) -> int:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
    return max(1, min(_SPOOL_BATCH_ROWS, int(_SPOOL_BATCH_BYTES / max(row_bytes, 1.0))))


def dataset_folder_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Lists the files of a dataset that `Dataset.save_to_disk` wrote, from its `state.json`.

    Returns:
        The data files, and the files of a stored indices mapping (mostly none).

    Raises:
        DataError: The folder is no such dataset, or not whole.
    """
    try:
        state = orjson.loads((folder / "state.json").read_bytes())
        data_files = [folder / entry["filename"] for entry in state["_data_files"]]
        mapping = state.get("_indices_data_files") or state.get("_indices_files") or []
        index_files = [folder / entry["filename"] for entry in mapping]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder}: its state.json cannot be read ({error!r}); save the dataset again"
        ) from error
    for file in (*data_files, *index_files):
        if not file.is_file():
            raise DataError(f"{folder}: state.json names {file.name}, which is not there")
    return data_files, index_files


def open_dataset_folder(folder: Path, label: str) -> ArrowRows:
    """Opens a dataset that `Dataset.save_to_disk` wrote; its files are memory-mapped as they are.

    Raises:
        DataError: Not whole, or damaged.
    """
    data_files, index_files = dataset_folder_files(folder)
    batches = [batch for file in data_files for batch in _stream_batches(file)]
    if not index_files:
        return ArrowRows(batches, label, None, folder)
    columns = [batch.column(0).to_numpy() for file in index_files for batch in _stream_batches(file)]
    return ArrowRows(batches, label, np.concatenate(columns).astype(np.int64), folder)


def _stream_batches(file: Path) -> list[pa.RecordBatch]:
    try:
        with pa.ipc.open_stream(pa.memory_map(str(file))) as reader:
            return list(reader)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as an Arrow stream ({error})") from error
