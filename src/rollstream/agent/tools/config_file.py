"""Tools of a tool file: classes and MCP servers, in verl's YAML."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.agent.tools.base import OpenAIFunctionToolSchema
from rollstream.agent.tools.mcp import McpServer, require_mcp
from rollstream.agent.tools.mcp_settings import load_mcp_servers, read_mcp_server
from rollstream.chat.tool_schema import ToolSchema, check_tool_schema, read_tool_entries
from rollstream.errors import ConfigError
from rollstream.user_code import import_name, source_digest

_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
_ENTRY_KEYS = ("class_name", "config", "tool_schema", "mcp")
_MCP_KEYS = ("type", "server", "tool_filter", "mcp_servers_config_path", "tool_selected_list")
_METHODS = ("create", "execute", "calc_reward", "release")
_VERL_MCP_CLASS = "verl.tools.mcp_base_tool.MCPBaseTool"
"""verl's own, which does what is done here without one."""


@dataclass(frozen=True, slots=True)
class ClassTool:
    """A tool of a class, made."""

    name: str
    tool: Any
    """See `rollstream.agent.tools.base.Tool`; one of verl's own classes serves as well."""
    schema: ToolSchema
    identity: list[Any]
    """What decides what it does: class, source, configuration."""


@dataclass(frozen=True, slots=True)
class McpEntry:
    """Servers of one entry, and which of their tools are wanted."""

    servers: tuple[McpServer, ...]
    tool_filter: tuple[str, ...] | None
    """None: all."""
    where: str


def load_tool_file(path: str | Path) -> list[ClassTool | McpEntry]:
    """Reads a tool file: imports the classes, and makes one object of each. Connects to nothing.

    Args:
        path: YAML, `tools:` with a list of `class_name`, `config` (`type: native` or `mcp`) and
            `tool_schema`.

    Returns:
        One for each entry, in order.

    Raises:
        ConfigError: Anything is wrong with it; names the file and the entry.
    """
    return [
        _read_entry(entry, f"{_KEY}: {path}, tools[{position}]", Path(path).expanduser())
        for position, entry in enumerate(read_tool_entries(path, key=_KEY))
    ]


def _read_entry(entry: Any, where: str, file: Path) -> ClassTool | McpEntry:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {entry!r} is no mapping with class_name, config and tool_schema")
    _check_keys(entry, _ENTRY_KEYS, where)
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: config is {config!r}, want a mapping")
    match config.get("type", "native"):
        case "native":
            return _read_class(entry, config, where, file)
        case "mcp":
            return _read_mcp(entry, config, where)
        case other:
            raise ConfigError(f"{where}: config.type is {other!r}, want native or mcp")


def _read_class(entry: Mapping[str, Any], config: dict[str, Any], where: str, file: Path) -> ClassTool:
    class_name = entry.get("class_name")
    if not isinstance(class_name, str) or not class_name:
        raise ConfigError(f"{where}: needs class_name, as package.module.Class or path/to/file.py:Class")
    if "mcp" in entry:
        raise ConfigError(f"{where}: mcp is for entries with config.type: mcp")
    cls = import_name(class_name, key=f"{where}: class_name", beside=file)
    if not isinstance(cls, type) or not all(callable(getattr(cls, method, None)) for method in _METHODS):
        raise ConfigError(
            f"{where}: {class_name} is no tool class; subclass rollstream.agent.tools.base.Tool "
            f"(which has {', '.join(_METHODS)})"
        )
    given = entry.get("tool_schema")
    if given is not None:
        given = OpenAIFunctionToolSchema.model_validate(check_tool_schema(given, where))
    try:
        tool = cls(config=config, tool_schema=given)
        schema = OpenAIFunctionToolSchema.model_validate(
            given or getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
        ).model_dump()
    except BaseException as error:  # a class of the user's: SystemExit is an error of its, too
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"{where}: {class_name} cannot be made ({type(error).__name__}: {error})"
        ) from error
    check_tool_schema(schema, f"{where} ({class_name})")
    return ClassTool(schema["function"]["name"], tool, schema, [cls.__qualname__, source_digest(cls), config])


def _read_mcp(entry: Mapping[str, Any], config: dict[str, Any], where: str) -> McpEntry:
    require_mcp(where)
    if entry.get("class_name") not in (None, _VERL_MCP_CLASS):
        raise ConfigError(f"{where}: class_name cannot be chosen for MCP servers; leave it out")
    if entry.get("tool_schema") is not None:
        raise ConfigError(f"{where}: MCP servers say their schemas themselves; leave tool_schema out")
    nested = entry.get("mcp") or {}
    if not isinstance(nested, dict):
        raise ConfigError(f"{where}: mcp is {nested!r}, want a mapping")
    settings = {**config, **nested}
    _check_keys(settings, _MCP_KEYS, where)
    path = settings.get("mcp_servers_config_path")
    if (path is None) == (settings.get("server") is None):
        raise ConfigError(f"{where}: needs either config.server or mcp_servers_config_path")
    if path is not None:
        servers = load_mcp_servers(path, f"{where}: mcp_servers_config_path")
    else:
        server = read_mcp_server("", settings["server"], f"{where}: config.server")
        servers = [] if server is None else [server]
    wanted = settings.get("tool_filter") or settings.get("tool_selected_list")
    if wanted is not None and not (
        isinstance(wanted, list) and all(isinstance(name, str) for name in wanted)
    ):
        raise ConfigError(f"{where}: tool_filter is {wanted!r}, want a list of tool names")
    return McpEntry(
        tuple(McpServer(server, where) for server in servers),
        tuple(wanted) if wanted is not None else None,
        where,
    )


def _check_keys(mapping: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint} Known: {', '.join(known)}")
