"""Calls as models write them: JSON read strictly, then a `ToolCall`: can it be executed, and if not, why."""

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import orjson

from rollstream.chat.parsers.base import ToolCall

_NAME = re.compile(r"[^\s<>{}\[\]\"']+")
"""A tool's name where a format writes it bare; other characters show that the call has another form."""
_SPACE = re.compile(r"[ \t\n\r]*")
_FIRST = frozenset('{["-0123456789tfnNI')
"""What a JSON value begins with; N and I for the constants that are refused by name."""
_LONGEST_INTEGER = 20
"""Digits of the largest number of 64 bits, sign included; a longer one is refused unconverted."""


class UnreadableError(ValueError):
    """A call cannot be read. The message is for the model: short, and where in its JSON.

    Attributes:
        open_string: the text ended inside a string, so it may have been cut too early.
    """

    def __init__(self, message: str, *, open_string: bool = False) -> None:
        super().__init__(message)
        self.open_string = open_string


def decode_value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, after white space, and where it ends; what follows is not looked at.

    Raises:
        UnreadableError: it is no JSON, or JSON that not everyone can read back: NaN, infinities, integers
            beyond 64 bits, nesting beyond Python's limit.
    """
    start = _end_of_space(text, start)
    if text[start : start + 1] not in _FIRST:
        # The same answer as below, at a third of the cost: what noise is mostly made of.
        raise UnreadableError("Expecting value: line 1 column 1")
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise UnreadableError(
            f"{error.msg}: {place(text, start, error.pos)}",
            open_string=error.msg.startswith("Unterminated string"),
        ) from None
    except RecursionError:
        raise UnreadableError("it is nested too deeply") from None


def place(text: str, start: int, position: int) -> str:
    """Line and column of a position in the JSON that begins at `start`."""
    line = text.count("\n", start, position) + 1
    column = position - max(text.rfind("\n", start, position), start - 1)
    return f"line {line} column {column}"


def broken_call(text: str, error: str, *, name: str = "", call_id: str | None = None) -> ToolCall:
    """A call that was begun and cannot be executed. What of it cannot be stored is left out."""
    if name and not _can_be_stored(name):
        name = ""
    if call_id is not None and not _can_be_stored(call_id):
        call_id = None
    return ToolCall(name, None, text, error, call_id)


def call_of_object(value: Any, text: str, keys: Sequence[str] = ("arguments",)) -> ToolCall:
    """A call written as one JSON object with `name` and arguments, and perhaps an `id`.

    Args:
        value: what was decoded.
        text: what the model wrote.
        keys: where arguments may stand, the preferred one first.
    """
    if not isinstance(value, dict):
        return broken_call(text, "the call is not a JSON object")
    name = value.get("name")
    call_id = value["id"] if isinstance(value.get("id"), str) else None
    if not isinstance(name, str) or not name:
        return broken_call(text, 'the call has no "name" that is a string', call_id=call_id)
    key = next((key for key in keys if key in value), None)
    if key is None:
        return broken_call(text, f'the call has no "{keys[0]}"', name=name, call_id=call_id)
    return call_of_arguments(name, value[key], text, call_id=call_id)


def call_of_arguments(name: str, arguments: Any, text: str, *, call_id: str | None = None) -> ToolCall:
    """A call whose name and arguments could be read; these may also be a string that holds the object."""
    if not name:
        return broken_call(text, "the call has no name of a tool", call_id=call_id)
    if isinstance(arguments, str):
        try:
            arguments = _decode_whole(arguments)
        except UnreadableError as error:
            reason = f"the arguments are a string that is not valid JSON: {error}"
            return broken_call(text, reason, name=name, call_id=call_id)
    if not isinstance(arguments, dict):
        return broken_call(text, "the arguments are not a JSON object", name=name, call_id=call_id)
    if not _can_be_stored([name, arguments, call_id]):
        reason = "the call holds half a surrogate pair or is nested too deeply"
        return broken_call(text, reason, name=name, call_id=call_id)
    return ToolCall(name, arguments, text, None, call_id)


def is_bare_name(name: str) -> bool:
    """Whether this can be the name of a tool."""
    return _NAME.fullmatch(name) is not None


def _decode_whole(text: str) -> Any:
    value, end = decode_value(text, 0)
    if text[end:].strip():
        raise UnreadableError("Extra data behind the object")
    return value


def _can_be_stored(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def _end_of_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _integer(digits: str) -> int:
    if len(digits) <= _LONGEST_INTEGER and -(2**63) <= (value := int(digits)) < 2**64:
        return value
    raise UnreadableError("an integer in it does not fit into 64 bits")


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise UnreadableError("a number in it is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise UnreadableError(f"JSON knows no {name}")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_constant)
