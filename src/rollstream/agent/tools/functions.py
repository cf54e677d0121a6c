"""Tools that are functions: `@function_tool` in a file of the user's."""

import contextvars
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, overload

from rollstream.agent.tools.base import OpenAIFunctionToolSchema
from rollstream.chat.tool_schema import ToolSchema, check_names_differ, check_tool_schema
from rollstream.errors import ConfigError
from rollstream.user_code import run_file

_KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
_MARK = "__rollstream_function_tool__"

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model can call."""

    name: str
    function: Callable[..., Any]
    """Plain or async; called with the model's arguments by keyword."""
    schema: ToolSchema
    signature: inspect.Signature = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Declared:
    function: Callable[..., Any]
    name: str | None
    schema: dict[str, Any] | None


_declared: contextvars.ContextVar[list[_Declared] | None] = contextvars.ContextVar("declared", default=None)
"""What the file that is being run declares; None when none is."""


@overload
def function_tool(name: _FunctionT) -> _FunctionT: ...
@overload
def function_tool(
    name: str | None = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None
) -> Callable[[_FunctionT], _FunctionT]: ...
def function_tool(
    name: Any = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None
) -> Any:
    """Decorator: makes a function a tool. The function itself stays as it is.

    Written `@function_tool`, `@function_tool("name")` or `@function_tool(schema=...)`, as in verl. Without a
    schema, it is made from the type hints and the Google docstring when the file is loaded.

    Args:
        name: What the model calls it; None takes the name in the schema, or the function's.
        schema: The OpenAI schema.
    """
    if callable(name):
        return function_tool()(name)

    def declare(function: _FunctionT) -> _FunctionT:
        declared = _Declared(function, name, None if schema is None else dict(schema))
        setattr(function, _MARK, declared)
        if (collected := _declared.get()) is not None:
            collected.append(declared)
        return function

    return declare


def load_function_tools(path: str | Path) -> list[FunctionTool]:
    """Runs a file and takes the tools that it declares, or imports by name from another module.

    Args:
        path: The file. It is run each time, as a module of its own; nothing is registered anywhere.

    Returns:
        The tools, in the order they are declared; then those imported.

    Raises:
        ConfigError: The file cannot be run, declares no tool or two of one name, or a function lacks what
            its schema is made from; says what to write.
    """
    collected: list[_Declared] = []
    token = _declared.set(collected)
    try:
        module = run_file(path, key=_KEY)
    finally:
        _declared.reset(token)
    own = [declared for declared in collected if declared.function.__module__ == module.__name__]
    imported = [getattr(value, _MARK) for value in vars(module).values() if _is_marked(value)]
    tools = [_make(declared, path) for declared in dict.fromkeys([*own, *imported])]
    if not tools:
        raise ConfigError(f"{_KEY}: {path} declares no tool; write @function_tool above a function")
    check_names_differ((tool.name for tool in tools), f"{_KEY}: {path}")
    return tools


def _is_marked(value: Any) -> bool:
    return callable(value) and isinstance(getattr(value, _MARK, None), _Declared)


def _make(declared: _Declared, path: str | Path) -> FunctionTool:
    function = declared.function
    where = f"{_KEY}: {path}, {getattr(function, '__qualname__', type(function).__name__)}"
    signature = inspect.signature(function)
    if declared.schema is not None:
        schema = OpenAIFunctionToolSchema.model_validate(declared.schema).model_dump()
    else:
        schema = _infer_schema(function, signature, where)
    check_tool_schema(schema, where)
    if declared.name is not None:
        schema["function"]["name"] = declared.name
    return FunctionTool(schema["function"]["name"], function, schema, signature)


def _infer_schema(function: Callable[..., Any], signature: inspect.Signature, where: str) -> ToolSchema:
    """The schema that `transformers.utils.get_json_schema` makes, without importing transformers."""
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{where}: the model cannot give {parameter}; name each parameter, or give the schema "
                "with @function_tool(schema=...)"
            )
    hints = _read_hints(function, where)
    described, arguments = _read_docstring(inspect.getdoc(function) or "")
    write = (
        "Write a Google docstring: what the tool does, and under `Args:` a line `name: description` for each "
        "parameter"
    )
    if not described:
        raise ConfigError(f"{where}: it has no docstring. {write}")
    properties: dict[str, Any] = {}
    for name in signature.parameters:
        if name not in hints:
            raise ConfigError(f"{where}: parameter {name} has no type; write {name}: str, or what it is")
        try:
            properties[name] = _type_schema(hints[name])
        except ValueError as error:
            raise ConfigError(
                f"{where}: parameter {name}: {error}; use str, int, float, bool, list[...], dict, Literal "
                "or a union of them, or give the schema with @function_tool(schema=...)"
            ) from error
        if name not in arguments:
            raise ConfigError(f"{where}: its docstring has no description for the argument {name!r}. {write}")
        description, choices = arguments[name], _CHOICES.search(arguments[name])
        if choices is not None:
            try:
                properties[name]["enum"] = [choice.strip() for choice in json.loads(choices[1])]
            except (ValueError, AttributeError) as error:
                raise ConfigError(
                    f'{where}: parameter {name}: its choices are no JSON list of texts; write (choices: ["a", "b"])'
                ) from error
            description = description[: choices.start()].strip()
        properties[name]["description"] = description
    required = [name for name, each in signature.parameters.items() if each.default is each.empty]
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    name = getattr(function, "__name__", type(function).__name__)
    return {
        "type": "function",
        "function": {"name": name, "description": described, "parameters": parameters},
    }


_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_SECTION = re.compile(r"\n\s*(Args|Returns|Raises):")
_ARGUMENT = re.compile(r"(?:^|\n)\s*(\w+):\s*(.*?)\s*(?=\n\s*\w+:|\Z)", re.DOTALL)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a Google docstring says of the function, and of each argument."""
    description, *sections = _SECTION.split("\n" + text)
    arguments = dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", "")
    lines = "\n".join(line for line in arguments.splitlines() if line.strip())
    found = {name: re.sub(r"\s*\n+\s*", " ", said.strip()) for name, said in _ARGUMENT.findall(lines)}
    return description.strip(), found


def _read_hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:  # a name in quotes that means nothing, a hint that cannot be evaluated
        raise ConfigError(
            f"{where}: its type hints cannot be read ({type(error).__name__}: {error})"
        ) from error


_TYPES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    dict: "object",
    types.NoneType: "null",
}


def _type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint. Raises `ValueError` when it has none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is None and isinstance(hint, type) and hint in _TYPES:
        return {"type": _TYPES[hint]}
    if hint in (list, tuple):
        raise ValueError(f"{hint.__name__} does not say of what")
    if origin is Literal and all(type(value) in _TYPES for value in arguments):
        kinds = list(dict.fromkeys(_TYPES[type(value)] for value in arguments))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        parts = [_type_schema(each) for each in arguments if each is not types.NoneType]
        if len(parts) == 1:
            union = parts[0]
        elif all(isinstance(part.get("type"), str) for part in parts):
            union = {"type": sorted(part["type"] for part in parts)}
        else:
            union = {"anyOf": parts}
        return union | ({"nullable": True} if types.NoneType in arguments else {})
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is tuple and ... not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(each) for each in arguments]}
    if origin is tuple:
        raise ValueError(f"{hint} has no fixed length; use a list")
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    name = hint if origin else getattr(hint, "__name__", hint)
    raise ValueError(f"{name} is nothing that JSON can express")
