"""What a prompt row says of tools: arguments for each, and which of them it wants."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rollstream.errors import DataError


@dataclass(frozen=True, slots=True)
class RowArguments:
    """A row's keyword arguments for the methods of one tool."""

    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    execute_kwargs: Mapping[str, Any] = field(default_factory=dict)
    calc_reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    release_kwargs: Mapping[str, Any] = field(default_factory=dict)


_KEYS = tuple(field.name for field in fields(RowArguments))


def read_row_arguments(tools_kwargs: Mapping[str, Any]) -> dict[str, RowArguments]:
    """Reads `tools_kwargs` of a row: `{tool: {create_kwargs, execute_kwargs, ...}}`.

    None stands for nothing at every level: a Parquet column has all keys in all rows.

    Raises:
        DataError: Something in it is no mapping, or an unknown key.
    """
    return {name: _read(name, arguments) for name, arguments in tools_kwargs.items() if arguments is not None}


def select_tools(selection: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The tools of a row, in the order it names them.

    Args:
        selection: `extra_info.tool_selection`; None or nothing in it means all, as in verl.
        known: All tools.

    Raises:
        DataError: It is no list, or names an unknown tool.
    """
    if selection is None or (not isinstance(selection, str) and len(selection) == 0):
        return list(known)
    if isinstance(selection, str | Mapping):
        raise DataError(f"extra_info.tool_selection is {selection!r}, want a list of tool names")
    for name in selection:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(
                f"extra_info.tool_selection: unknown tool {name!r}{hint} Known: {', '.join(known) or 'none'}"
            )
    return list(dict.fromkeys(selection))


def _read(name: str, arguments: Any) -> RowArguments:
    if not isinstance(arguments, Mapping):
        raise DataError(f"tools_kwargs.{name} is {arguments!r}, want a mapping with {', '.join(_KEYS)}")
    for key, value in arguments.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f"tools_kwargs.{name}: unknown key {key!r}{hint} Known: {', '.join(_KEYS)}")
        if value is not None and not isinstance(value, Mapping):
            raise DataError(f"tools_kwargs.{name}.{key} is {value!r}, want a mapping")
    return RowArguments(**{key: value for key, value in arguments.items() if value is not None})
