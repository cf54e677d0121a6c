"""Row values: what a row may hold, and the content hash of a row.

Rows are hashed, stored and sent over the network, so every value is one that JSON knows:

| in the file | in the row |
|---|---|
| bytes | text, base64 (standard alphabet, padded) |
| datetime, date, time | text, ISO 8601 |
| duration | seconds, float |
| decimal, UUID | text |
| NaN | None (that is how tables write "missing") |
| infinity, integers beyond 64 bits, what contains itself, anything else | a `BadRow` that says to write it as text |
"""

import base64
import datetime
import decimal
import hashlib
import math
import uuid
from typing import Any

import numpy as np
import orjson

Row = dict[str, Any]
"""One row as a file gives it: column name to a value that JSON knows."""

PASS_RATE = "pass_rate"
"""The column that `rollstream select` adds: the row is the same as before."""


class BadRow(Exception):
    """A row cannot be used. The message says why; whoever knows the file and the row adds them."""


def to_jsonable(value: Any, *, drop_none: bool = False) -> Any:
    """Turns a value into one that JSON knows, by the table of this module. Mappings and lists are copied.

    Args:
        value: A Python, numpy or Arrow-made value, nested at will.
        drop_none: Leave out keys whose value is None, in mappings at every depth below this one. Arrow gives
            every struct of a column all keys that any row has, and fills them with None.

    Raises:
        BadRow: JSON has no form for the value; it contains itself, or is nested too deeply.
    """
    try:
        return _to_jsonable(value, drop_none)
    except RecursionError as error:
        raise BadRow("a value contains itself, or is nested too deeply; write it as text") from error


def _to_jsonable(value: Any, drop_none: bool) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is bool or kind is int:
        return value
    if kind is float:
        if math.isinf(value):
            raise BadRow(f"{value} has no JSON form; write it as text")
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {
            (key if type(key) is str else str(key)): _inner(item, drop_none) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_inner(item, drop_none) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _to_jsonable(value.tolist(), drop_none)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID | str):
        return str(value)
    if isinstance(value, int | float):  # a subclass: an enum, say
        return _to_jsonable(float(value) if isinstance(value, float) else int(value), drop_none)
    raise BadRow(f"a value of type {kind_name(value)} has no JSON form; write it as text, numbers or lists")


def _inner(value: Any, drop_none: bool) -> Any:
    value = _to_jsonable(value, drop_none)
    if drop_none and type(value) is dict:
        return {key: item for key, item in value.items() if item is not None}
    return value


def kind_name(value: Any) -> str:
    """The type of a value, for messages: `int`, `numpy.ndarray`, `None`."""
    kind = type(value)
    if value is None:
        return "None"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def described(value: Any) -> str:
    """A value as it reads after "is" in a message: `null`, `a number (17)`, `a list`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"a number ({value})"
    if isinstance(value, str):
        return f"text ({value if len(value) <= 40 else f'{value[:39]}…'!r})"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"a value of type {kind_name(value)}"


def content_digest(row: Row) -> bytes:
    """Hashes a row's content: 16 bytes of BLAKE2b over its canonical JSON.

    The order of keys does not count. Neither does `extra_info.index`, which is a position, nor `PASS_RATE`, nor a key
    whose value is null or an empty mapping, at any depth: the same row read from JSON Lines and from
    Parquet, where such keys come and go with the rows around it, has the same digest.

    Raises:
        BadRow: The row holds what JSON cannot (an integer beyond 64 bits, text with lone surrogates).
    """
    if PASS_RATE in row:
        row = {key: item for key, item in row.items() if key != PASS_RATE}
    extra_info = row.get("extra_info")
    if type(extra_info) is dict and "index" in extra_info:
        row = row | {"extra_info": {key: item for key, item in extra_info.items() if key != "index"}}
    canonical = canonical_json(row)
    if b"null" in canonical or b"{}" in canonical:  # or text that looks like it: pruning does no harm then
        canonical = canonical_json(pruned(row))
    return hashlib.blake2b(canonical, digest_size=16).digest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes.

    Raises:
        BadRow: The value holds what JSON cannot.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise BadRow(f"a value has no JSON form ({error}); write it as text") from error


def pruned(value: Any) -> Any:
    """A copy without the keys whose value is None or an empty mapping, at every depth."""
    if type(value) is dict:
        inner = ((key, pruned(item)) for key, item in value.items())
        return {key: item for key, item in inner if item is not None and item != {}}
    return [pruned(item) for item in value] if type(value) is list else value
