r"""Lone surrogates: half of a UTF-16 pair, which UTF-8 cannot hold.

A program that cuts a text through an emoji writes the rest as JSON all the same: `"\ud83d"`. Browsers make U+FFFD
of it, and so does whatever reads texts here that programs, tools and rewards wrote.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

REPLACEMENT = "\ufffd"

_SURROGATES = re.compile("[\ud800-\udfff]")
_IN_JSON = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"  # a first half alone
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a second half alone
    rb"|\xed[\xa0-\xbf][\x80-\xbf]"  # either, as bytes that are no UTF-8
)

T = TypeVar("T")


def replace_in_text(text: str) -> str:
    """The text without lone surrogates."""
    return text if text.isascii() else _SURROGATES.sub(REPLACEMENT, text)


def replace_in_value(value: Any) -> Any:
    """A value of dicts, lists, tuples and others, without lone surrogates in its texts."""
    if isinstance(value, str):
        return replace_in_text(value)
    if isinstance(value, Mapping):
        return {replace_in_value(key): replace_in_value(item) for key, item in value.items()}
    return [replace_in_value(item) for item in value] if isinstance(value, list | tuple) else value


def replace_in_json(text: bytes) -> tuple[bytes, int]:
    """JSON without lone surrogates, and how many there were. It need not be whole, and is not parsed."""
    if not (b"\\ud" in text or b"\\uD" in text or b"\xed" in text):
        return text, 0
    # NUL, which JSON does not hold, keeps an escaped backslash and what follows it apart.
    apart = text.replace(rb"\\", b"\\\\\0")
    mended, count = _IN_JSON.subn(rb"\\ufffd", apart)
    return (mended.replace(b"\\\\\0", rb"\\"), count) if count else (text, 0)


def decode_json(text: bytes, decode: Callable[[bytes], T]) -> tuple[T, int]:
    """Decodes JSON strictly, and counts the lone surrogates that were replaced for it.

    Raises:
        ValueError: The decoder's.
    """
    try:
        return decode(text), 0
    except ValueError:
        mended, count = replace_in_json(text)
        if not count:
            raise
        return decode(mended), count
