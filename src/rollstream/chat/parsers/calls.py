"""From what was read to a `ToolCall`: can it be executed, and if not, why."""

import re
from collections.abc import Sequence
from typing import Any

import orjson

from rollstream.chat.parsers.base import ToolCall
from rollstream.chat.parsers.strict_json import UnreadableError, decode_value

_NAME = re.compile(r"[^\s<>{}\[\]\"']+")
"""A tool's name where a format writes it bare; other characters show that the call has another form."""


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
