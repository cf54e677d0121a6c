"""Where in a body stands what JSON does not allow, although Python's own writer lets it through. Pure.

orjson, which reads bodies, tells a line and a column of them: of 700 items in one line that says nothing.
"""

import json
import math
from typing import Any, Final

_LARGEST: Final = 4 << 20
"""Bytes that are read a second time: some 0.2 s. The fault of a larger body is told without its place."""


class _Constant:
    """NaN or an infinity, as it was written."""

    def __init__(self, text: str) -> None:
        self.text = text


def find_fault(body: bytes) -> tuple[str, str] | None:
    """What is wrong in a body that is no JSON, and at which place, such as `items[700].reward`.

    Returns:
        The fault and its place; None where it is another one, or the body too large to look.
    """
    if len(body) > _LARGEST:
        return None
    try:
        # Halves of characters come as escapes or as three bytes each, which UTF-8 does not have.
        document = json.loads(body.decode("utf-8", "surrogatepass"), parse_constant=_Constant)
    except (ValueError, RecursionError):
        return None
    waiting: list[tuple[Any, str]] = [(document, "")]
    while waiting:
        value, where = waiting.pop()
        if fault := _fault_of(value):
            return fault, where
        if isinstance(value, dict):
            for key in value:
                if _is_broken(key):
                    return "half of a character (a lone surrogate) in a key", where
            waiting += [(child, _below(where, key)) for key, child in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(value[index], f"{where}[{index}]") for index in reversed(range(len(value)))]
    return None


def _fault_of(value: Any) -> str:
    if isinstance(value, _Constant):
        return value.text
    if isinstance(value, float) and math.isinf(value):
        return "a number that is too large"
    if isinstance(value, str) and _is_broken(value):
        return "half of a character (a lone surrogate)"
    return ""


def _is_broken(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _below(where: str, key: str) -> str:
    key = key if len(key) <= 50 else key[:50] + "…"
    return f"{where}.{key}" if where else key
