"""JSON as models write it, read strictly: every value that passes can be stored and read back by everyone."""

import json
import re
from typing import Any, NoReturn

import orjson

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
    match = _SPACE.match(text, start)
    start = match.end() if match else start
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


def read_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call; they may also be a string that holds the object. Raises `UnreadableError`."""
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments, end = decode_value(text, 0)
            if text[end:].strip():
                raise UnreadableError("Extra data behind the object")
        except UnreadableError as error:
            raise UnreadableError(f"the arguments are a string that is not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise UnreadableError("the arguments are not a JSON object")
    return arguments


def is_bare_name(name: str) -> bool:
    """Whether this can be the name of a tool."""
    return _NAME.fullmatch(name) is not None


def can_be_stored(value: Any) -> bool:
    """Whether `orjson` takes it: no half of a surrogate pair, no nesting beyond its limit."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


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
