"""Tools that are functions: `@function_tool` in a file of the user's."""

import contextvars
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

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
    """The schema that transformers makes of type hints and docstring; what is returned has no part in it."""
    from transformers.utils import get_json_schema

    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: the model cannot give {parameter}; name each parameter")
    shown = functools.update_wrapper(lambda: None, function)
    hints = getattr(function, "__annotations__", {})
    shown.__annotations__ = {name: hint for name, hint in hints.items() if name != "return"}
    try:
        schema: ToolSchema = get_json_schema(shown)
    except Exception as error:  # what a hint in quotes raises, too
        raise ConfigError(
            f"{where}: {error} It needs type hints, and a Google docstring that describes each argument, or "
            "@function_tool(schema=...)"
        ) from error
    return schema
