"""What a tool says, as bounded text that can be stored."""

import inspect
import json
import re
from typing import Any

from rollstream.agent.tools.limits import TruncateSide

_MARKERS: dict[TruncateSide, str] = {
    "left": "(truncated)...",
    "right": "...(truncated)",
    "middle": "...(truncated)...",
}
"""verl's, word for word: models may have been trained with them."""

_SURROGATES = re.compile("[\ud800-\udfff]")


def truncate_text(text: str, max_length: int, side: TruncateSide) -> str:
    """Cuts a text to `max_length` characters, the marker that says so included.

    Args:
        text: Any text.
        max_length: Characters, > 0. When the marker would fill it, nothing marks the cut.
        side: `left` cuts the beginning off, `right` the end, `middle` keeps half of both.

    Returns:
        `text` itself when it fits, else a text of exactly `max_length`.
    """
    if len(text) <= max_length:
        return text
    marker = _MARKERS[side]
    if len(marker) >= max_length:
        marker = ""
    keep = max_length - len(marker)
    match side:
        case "left":
            return marker + text[len(text) - keep :]
        case "right":
            return text[:keep] + marker
        case "middle":
            head = keep // 2
            return text[:head] + marker + text[len(text) - (keep - head) :]


def clean_text(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot store."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def to_text(value: Any, max_length: int, side: TruncateSide) -> str:
    """Any value as text for the model, truncated; a long one is cut before it is looked at further.

    Text stays as it is, bytes are read as UTF-8, a dict becomes JSON, everything else what `str` makes of it.

    Raises:
        TypeError: A generator, which would say nothing.
        Exception: Whatever the value's own `__str__` raises.
    """
    if isinstance(value, str):
        text = str.__str__(value)  # of a subclass, too, whatever it overrides
    elif isinstance(value, bytes | bytearray):
        text = _decode(value, max_length)
    elif isinstance(value, dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    elif inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TypeError("the tool returned a generator, want text or a ToolResponse")
    else:
        text = str.__str__(str(value))
    return clean_text(truncate_text(text, max_length, side))


def error_text(error: BaseException, max_length: int) -> str:
    """What an error says, at most `max_length` characters of it. Never raises."""
    try:
        said = str.__str__(str(error))
    except BaseException:  # a __str__ of the user's
        said = "(its text cannot be read)"
    return clean_text(truncate_text(said, max_length, "right"))


def error_line(error: BaseException, max_length: int) -> str:
    """`ValueError: what it says`, in one line of at most `max_length` characters. Never raises."""
    said = " ".join(error_text(error, max_length).split())
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return truncate_text(line, max_length, "right")


def _decode(data: bytes | bytearray, max_length: int) -> str:
    """Bytes as text; of very long ones only what can be left after truncation.

    A character takes four bytes at most, so both ends together are longer than `max_length`.
    """
    most = 4 * max_length + 4
    if len(data) <= 2 * most:
        return data.decode("utf-8", "replace")
    return data[:most].decode("utf-8", "replace") + data[-most:].decode("utf-8", "replace")
