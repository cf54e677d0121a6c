"""A call between `<tool_call>` tags with its values as bare text, of the types that the tool's schema declares:
what GLM's and Qwen's formats share.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rollstream.chat.parsers.json_call import UnreadableError, broken_call, call_of_arguments, decode_value
from rollstream.chat.parsers.turn import TurnReader

OPENING, CLOSING = "<tool_call>", "</tool_call>"

_DEEPEST_SCHEMA = 8
"""How far references and alternatives are followed; deeper ones are circular."""

_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


class TaggedCall(ABC):
    """The call at the cursor of a turn, and how far it could be read."""

    def __init__(self, turn: TurnReader) -> None:
        self.turn = turn
        self.position = turn.past(OPENING, turn.position)
        self.name = ""

    @abstractmethod
    def read_name(self) -> None:
        """Sets `name` and moves `position` behind it. Raises `UnreadableError`."""

    @abstractmethod
    def read_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Moves `position` behind the call. Raises `UnreadableError`.

        Args:
            parameters: the tool's parameter schema; empty if there is none.
        """

    def take(self, tools: Sequence[dict[str, Any]]) -> None:
        """Takes the call, whole or broken."""
        turn, start = self.turn, self.turn.position
        try:
            self.read_name()
            arguments = self.read_arguments(parameters_of(tools, self.name))
        except UnreadableError as error:
            stop = min(turn.find(CLOSING, self.position), turn.find(OPENING, self.position))
            end = turn.end_of_broken(self.position, stop, CLOSING)
            turn.take_call(end, broken_call(turn.text[start:end], str(error), name=self.name))
            return
        end = self.position
        turn.take_call(end, call_of_arguments(self.name, arguments, turn.text[start:end]))


def parameters_of(tools: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The parameter schema of a tool; empty if there is none."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def declared_types(parameters: dict[str, Any], name: str) -> set[str]:
    """JSON-schema types that a parameter may have, alternatives and local references included.

    Empty if it has none declared.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return _types(schema, parameters, 0)


def read_value(text: str, types: set[str]) -> Any:
    """A value written as bare text, as one of its types.

    It stays text when it fits none of them, or when text is allowed and nothing else fits.
    """
    bare = text.strip()
    # Qwen's templates write values by Python's str, GLM's as JSON: null and None, true and True.
    if "null" in types and bare in ("null", "None"):
        return None
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    value = json_or_text(text)
    if isinstance(value, bool) or value is None:
        return text
    fits = any(isinstance(value, _PYTHON_TYPES[name]) for name in types & _PYTHON_TYPES.keys())
    return value if fits else text


def json_or_text(text: str) -> Any:
    """What a text means as JSON; the text itself if it is none."""
    bare = text.strip()
    try:
        value, end = decode_value(bare, 0)
    except UnreadableError:
        return text
    return value if end == len(bare) else text


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > _DEEPEST_SCHEMA:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth + 1)
    types: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        for member in members if isinstance(members, list) else ():
            types |= _types(member, root, depth + 1)
    return types


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """What a local reference such as `#/$defs/Address` means; None if nothing."""
    if not reference.startswith("#/"):
        return None
    schema: Any = root
    for key in reference[2:].split("/"):
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema
