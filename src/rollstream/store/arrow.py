"""Arrow columns from numbers and texts, and back, without pandas: pyarrow's own ways import it, which takes half a
second.
"""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def to_arrow(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An array of numbers or truths, with nulls where they are not `valid`."""
    data = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    nulls = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [nulls, pa.py_buffer(data)])


def to_arrow_texts(texts: Sequence[str]) -> pa.Array:
    """An array of texts."""
    parts = list(map(str.encode, texts))
    buffers = [None, pa.py_buffer(_offsets(parts)), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


def to_arrow_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An array of a stored column's type: numbers or None, texts, structs as tuples, lists as binary numbers or
    tuples.
    """
    if pa.types.is_string(kind):
        return to_arrow_texts(values)
    if pa.types.is_struct(kind):
        columns = zip(*values, strict=True) if values else [()] * kind.num_fields
        arrays = [to_arrow_column(column, field.type) for column, field in zip(columns, kind, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=list(kind))
    missing = np.array([value is None for value in values], np.bool_) if None in values else None
    if not pa.types.is_list(kind):
        known = values if missing is None else [value or 0 for value in values]
        return to_arrow(np.array(known, kind.to_pandas_dtype()), None if missing is None else ~missing)
    mask = None if missing is None else to_arrow(missing)
    if pa.types.is_struct(kind.value_type):
        inner = to_arrow_column([item for part in values for item in part], kind.value_type)
        return pa.ListArray.from_arrays(to_arrow(_offsets(values)), inner, mask=mask)
    parts = [part or b"" for part in values]
    numbers = np.frombuffer(b"".join(parts), np.dtype(kind.value_type.to_pandas_dtype()).newbyteorder("<"))
    offsets = to_arrow(_offsets(parts) // numbers.dtype.itemsize)
    return pa.ListArray.from_arrays(offsets, to_arrow(numbers), mask=mask)


def _offsets(parts: Sequence[Sized]) -> npt.NDArray[np.int32]:
    """Where each part begins and the last one ends, when they are joined."""
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, parts), np.int32, len(parts)), out=offsets[1:])
    return offsets


def column_values(column: pa.ChunkedArray | pa.Array) -> Any:
    """A column of numbers or truths as an array; where there are nulls, as float64 with NaN."""
    if isinstance(column, pa.ChunkedArray):
        if not column.num_chunks:
            dtype = np.bool_ if pa.types.is_boolean(column.type) else column.type.to_pandas_dtype()
            return np.zeros(0, dtype)
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if column.null_count:
        values = np.full(len(column), np.nan)
        values[column_values(column.is_valid())] = column_values(column.drop_null())
        return values
    if pa.types.is_boolean(column.type):
        return np.from_dlpack(column.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(column)
