"""Calls between `<tool_call>` and `</tool_call>`: Hermes, Qwen and GLM models.

- `hermes`: `{"name": ..., "arguments": {...}}`. Hermes 2 and 3, Qwen2.5, Qwen3; format: the chat templates of
  NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen3-8B.
- `qwen3_coder`: `<function=name><parameter=key>value</parameter></function>`. Format: the chat templates of
  Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen3.5, and the parser published with the former, which also takes a
  `<function=` without `<tool_call>`: that model leaves it out at times.
- `glm45`: `name<arg_key>key</arg_key><arg_value>value</arg_value>`. GLM-4.5, 4.6 and later; format: the chat
  template of zai-org/GLM-4.5. Strings are written as they are, everything else as JSON.

The last two write values as bare text, of the types that the tool's schema declares.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from rollstream.chat.parsers.base import register_parser
from rollstream.chat.parsers.json_call import UnreadableError, decode_value, is_bare_name
from rollstream.chat.parsers.turn import CallParser, OpenCall, TurnReader

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_FUNCTION_TAG = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER_TAG = re.compile(r"<parameter=([^<>\n]*)>")
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"

_DEEPEST_SCHEMA = 8
"""How far references and alternatives are followed; deeper ones are circular."""
_LONGEST_LITERAL = 100_000
"""Characters of a Python literal that is read: some 50 ms, during which nothing else happens."""

_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


class _TagParser(CallParser):
    markers: ClassVar[tuple[str, ...]] = (_OPENING,)
    call_marks = (_OPENING, (_CLOSING,), (_OPENING,))


@register_parser("hermes")
class HermesParser(_TagParser):
    """JSON between tags. A missing closing tag is no error where the JSON is whole."""

    def read_call(self, turn: TurnReader, call: OpenCall, tools: Sequence[dict[str, Any]]) -> None:
        value, stop = turn.decode_between(call.position, call.stop, "the call is", (_CLOSING,))
        call.take_object(value, turn.past(_CLOSING, stop))


@register_parser("qwen3_coder")
class Qwen3CoderParser(_TagParser):
    """A value without a declared type is text."""

    markers = (_OPENING, _FUNCTION)

    def read_call(self, turn: TurnReader, call: OpenCall, tools: Sequence[dict[str, Any]]) -> None:
        tag = _FUNCTION_TAG.match(turn.text, turn.skip_space(call.position), turn.end)
        if tag is None or not is_bare_name(tag[1].strip()):
            raise UnreadableError("no <function=name> where the call begins")
        call.name = tag[1].strip()
        parameters, arguments = parameters_of(tools, call.name), {}
        call.position = turn.skip_space(tag.end())
        while tag := _PARAMETER_TAG.match(turn.text, call.position, turn.end):
            call.position = tag.end()
            key = tag[1].strip()
            value = _read_until(turn, call, _PARAMETER_END, f"parameter {key[:40]!r}", _PARAMETER)
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = read_value(value, declared_types(parameters, key))
        if not turn.at(_FUNCTION_END, call.position):
            raise UnreadableError(f"the call is not closed by {_FUNCTION_END}")
        end = call.position + len(_FUNCTION_END)
        closing = turn.skip_space(end)
        call.take_arguments(arguments, turn.past(_CLOSING, closing) if turn.at(_CLOSING, closing) else end)


@register_parser("glm")
@register_parser("glm45")
class Glm45Parser(_TagParser):
    """A value without a declared type is JSON if it reads as JSON, else text."""

    stop_tokens: tuple[str, ...] = ("<|observation|>",)

    def read_call(self, turn: TurnReader, call: OpenCall, tools: Sequence[dict[str, Any]]) -> None:
        end = turn.find_any((_KEY, _CLOSING, _OPENING), call.position)
        name = turn.text[call.position : end].strip()
        if not is_bare_name(name):
            raise UnreadableError("no name of a tool where the call begins")
        call.name, call.position = name, end
        parameters, arguments = parameters_of(tools, name), {}
        while turn.at(_KEY, call.position):
            call.position += len(_KEY)
            key = _read_until(turn, call, _KEY_END, "a key", _KEY, _VALUE).strip()
            if not turn.at(_VALUE, call.position):
                raise UnreadableError(f"no {_VALUE} for the key {key[:40]!r}")
            call.position += len(_VALUE)
            value = _read_until(turn, call, _VALUE_END, f"the value of {key[:40]!r}", _KEY, _VALUE)
            types = declared_types(parameters, key)
            arguments[key] = read_value(value, types) if types else json_or_text(value)
        if not turn.at(_CLOSING, call.position):
            raise UnreadableError(f"the call is not closed by {_CLOSING}")
        call.take_arguments(arguments, call.position + len(_CLOSING))


def _read_until(turn: TurnReader, call: OpenCall, closing: str, what: str, *others: str) -> str:
    """The text up to a closing tag, which moves the call's position behind that."""
    start = call.position
    end = turn.find(closing, start)
    # What runs into the next key or value lost its own end: taking both would be a guess.
    if end == turn.end or turn.find_any(others, start) < end:
        raise UnreadableError(f"{what} is not closed by {closing}")
    call.position = turn.skip_space(end + len(closing))
    return turn.text[start:end]


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

    Keywords that only an object or an array has, such as `properties`, declare one, and so do the values of an
    `enum`. Empty if nothing is declared.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return _types(schema, parameters, 0)


def read_value(text: str, types: set[str]) -> Any:
    """A value written as bare text, as one of its types.

    An array or object may be JSON or a literal of Python. It stays text when it fits none of them, or when text
    is allowed and nothing else fits.
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
    if value is text and types & {"array", "object"}:
        value = _python_literal(bare, text)
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


def _python_literal(literal: str, otherwise: Any) -> Any:
    """The array or object that a literal of Python means; `otherwise` if JSON has no form for it."""
    if literal[:1] not in ("[", "{", "(") or len(literal) > _LONGEST_LITERAL:
        return otherwise
    try:
        value = ast.literal_eval(literal)
        json.dumps(value, allow_nan=False)  # orjson has null for an infinity
        return orjson.loads(orjson.dumps(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return otherwise


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > _DEEPEST_SCHEMA:
        return set()
    nullable = {"null"} if schema.get("nullable") is True else set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared} | nullable
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)} | nullable
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth + 1)
    types: set[str] = set(nullable)
    if schema.keys() & {"properties", "additionalProperties"}:
        types.add("object")
    if schema.keys() & {"items", "prefixItems"}:
        types.add("array")
    values = schema.get("enum")
    for value in values if isinstance(values, list) else ():
        types |= {name for name, kind in _PYTHON_TYPES.items() if isinstance(value, kind)}
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
