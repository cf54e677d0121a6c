"""All tools of a worker, and the tool file: classes and MCP servers, in verl's YAML."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollstream.agent.tools.base import OpenAIFunctionToolSchema
from rollstream.agent.tools.functions import FunctionTool, load_function_tools
from rollstream.agent.tools.mcp import McpServer, McpServerSettings, McpTool, load_mcp_servers, require_mcp
from rollstream.agent.tools.session import (
    ClassTool,
    ToolLimits,
    ToolSession,
    read_row_arguments,
    select_tools,
)
from rollstream.chat.tool_schema import (
    ArgumentCheck,
    ToolSchema,
    check_names_differ,
    check_tool_schema,
    read_tool_entries,
)
from rollstream.errors import ConfigError, unknown_name
from rollstream.user_calls import UserCalls
from rollstream.user_code import construct, import_name, source_digest

_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
_METHODS = ("create", "execute", "calc_reward", "release")
_VERL_MCP_CLASS = "verl.tools.mcp_base_tool.MCPBaseTool"
"""verl's own, which does what is done here without one."""

WARNINGS = 5
"""Failed calls that are logged as warnings; later ones for debugging only. A model that is learning to call
tools fails often, and the trajectories have it all."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class McpEntry:
    """Servers of one entry, and which of their tools are wanted."""

    servers: tuple[McpServer, ...]
    tool_filter: tuple[str, ...] | None
    """None: all."""
    where: str

    async def list_tools(self) -> list[ClassTool]:
        """Asks the servers. Raises `ConfigError`: one cannot be reached, or lacks a tool that is wanted."""
        tools = {}
        for server in self.servers:
            for schema in await server.list_tools():
                name, identity = schema["function"]["name"], ["mcp", *server.settings.identity]
                tools[server, name] = ClassTool(name, McpTool(server, schema), schema, identity)
        names = [name for _, name in tools]
        for name in self.tool_filter or ():
            if name not in names:
                raise ConfigError(f"{self.where}: tool_filter: {unknown_name('tool', name, names)}")
        return [tool for tool in tools.values() if self.tool_filter is None or tool.name in self.tool_filter]


class ToolBox:
    """The tools of a worker, shared by its rollouts.

    Without MCP servers it is complete at once. With them, `describe` asks the servers for their tools first; it
    may run in another event loop than the rollouts, whose sessions with servers begin with the first call.

    Args:
        tools: In the order in which the model is shown them.
        limits: What applies to each rollout.
        names: Of the tools that are used; None: all of them.

    Raises:
        ConfigError: Two tools have the same name, or none has a name that is asked for.
    """

    def __init__(
        self,
        tools: Sequence[FunctionTool | ClassTool | McpEntry] = (),
        limits: ToolLimits | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        self.limits = limits or ToolLimits()
        self._names = names
        self._given = tuple(tools)
        self._tools: dict[str, FunctionTool | ClassTool] | None = None
        self._checks: dict[str, ArgumentCheck] = {}
        self._calls = UserCalls("tool")
        self._closed = False
        self._failures = 0
        own = [tool for tool in tools if not isinstance(tool, McpEntry)]
        if len(own) == len(tools):
            self._complete(own)

    @property
    def schemas(self) -> list[ToolSchema]:
        """OpenAI schemas of all tools, in order."""
        return [tool.schema for tool in self._known().values()]

    @property
    def digest(self) -> str:
        """Changes when the tools may do something else: schemas, configurations, sources of the user's code.

        It does not cover the limits, what that code imports, nor what an MCP server runs beyond its command
        and what it says of its tools. 32 hexadecimal digits.
        """
        parts = [[_identity(tool), tool.schema] for tool in self._known().values()]
        options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
        return hashlib.blake2b(orjson.dumps(parts, option=options, default=repr), digest_size=16).hexdigest()

    async def describe(self) -> None:
        """Asks MCP servers for their tools, once: connects, lists, and disconnects.

        Raises `ConfigError`: a server cannot be reached, lacks a tool that is asked for, or two tools have the
        same name.
        """
        if self._tools is not None:
            return

        async def listed(tool: FunctionTool | ClassTool | McpEntry) -> Sequence[FunctionTool | ClassTool]:
            return await tool.list_tools() if isinstance(tool, McpEntry) else [tool]

        answers = await asyncio.gather(*map(listed, self._given), return_exceptions=True)
        tools: list[FunctionTool | ClassTool] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            tools += answer
        self._complete(tools)

    async def close(self) -> None:
        """Ends threads and MCP sessions, and the servers that are commands. Twice is fine."""
        self._closed = True
        self._calls.close()
        servers = [server for entry in self._given if isinstance(entry, McpEntry) for server in entry.servers]
        await asyncio.gather(*(server.close() for server in servers))

    def session(
        self, *, tools_kwargs: Mapping[str, Any], selection: Sequence[str] | None, request_id: str
    ) -> ToolSession:
        """The tools of one rollout. Whoever takes it closes it.

        `tools_kwargs` are the row's arguments by tool; tools that are not here are passed over, as in verl.
        Raises `DataError`: the row names an unknown tool, or its arguments have another shape.
        """
        if self._closed:
            raise RuntimeError("the toolbox is closed")
        known = self._known()
        return ToolSession(
            {name: known[name] for name in select_tools(selection, list(known))},
            checks=self._checks,
            calls=self._calls,
            limits=self.limits,
            arguments=read_row_arguments(tools_kwargs or {}),
            request_id=request_id,
            report=self._report,
        )

    def _complete(self, tools: Sequence[FunctionTool | ClassTool]) -> None:
        check_names_differ((tool.name for tool in tools), "actor_rollout_ref.rollout.multi_turn:")
        known = {tool.name: tool for tool in tools}
        for name in self._names or ():
            if name not in known:
                raise unknown_name("tool", name, known)
        self._tools = {name: known[name] for name in known if self._names is None or name in self._names}
        self._checks = {name: ArgumentCheck(tool.schema) for name, tool in self._tools.items()}

    def _known(self) -> dict[str, FunctionTool | ClassTool]:
        if self._tools is None:
            raise RuntimeError("the MCP servers have not been asked for their tools; await describe() first")
        return self._tools

    def _report(self, what: str, said: str, error: BaseException | None) -> None:
        self._failures += 1
        level = logging.WARNING if self._failures <= WARNINGS else logging.DEBUG
        logger.log(level, "tool call failed: %s: %.500s", what, said)
        if error is not None:
            logger.debug("%s failed here:", what, exc_info=error)
        if self._failures == WARNINGS:
            logger.warning("further failed tool calls are logged for debugging only")


def load_toolbox(
    *,
    tool_config_path: str | None = None,
    function_tool_path: str | None = None,
    limits: ToolLimits | None = None,
    names: Sequence[str] | None = None,
) -> ToolBox:
    """Loads the tools of a run: those of the tool file, then the functions. Runs the user's code.

    Connects to nothing, so it may run in a thread; with MCP servers, `describe` comes next. See `ToolBox`,
    `load_tool_file` and `load_function_tools`. Raises `ConfigError`.
    """
    tools: list[FunctionTool | ClassTool | McpEntry] = []
    if tool_config_path:
        tools += load_tool_file(tool_config_path)
    if function_tool_path:
        tools += load_function_tools(function_tool_path)
    return ToolBox(tools, limits, names=names)


def _identity(tool: FunctionTool | ClassTool) -> list[Any]:
    if isinstance(tool, ClassTool):
        return tool.identity
    function = tool.function
    return [getattr(function, "__qualname__", type(function).__qualname__), source_digest(function)]


def load_tool_file(path: str | Path) -> list[ClassTool | McpEntry]:
    """Reads a tool file: imports the classes, and makes one object of each. Connects to nothing.

    The file is YAML: `tools:` with a list of `class_name`, `config` (`type: native` or `mcp`) and
    `tool_schema`. Raises `ConfigError`, which names the file and the entry.
    """
    file = Path(path).expanduser()
    return [
        _read_entry(entry, f"{_KEY}: {path}, tools[{position}]", file)
        for position, entry in enumerate(read_tool_entries(path, key=_KEY))
    ]


class _ToolEntry(msgspec.Struct, forbid_unknown_fields=True):
    class_name: str | None = None
    config: dict[Any, Any] | None = None
    tool_schema: Any = None
    mcp: dict[str, Any] | None = None


class _McpConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What `config` and `mcp` of an entry for MCP servers hold together."""

    type: str = "mcp"
    server: McpServerSettings | None = None
    tool_filter: list[str] | None = None
    mcp_servers_config_path: str | None = None
    tool_selected_list: list[str] | None = None


def _read_entry(entry: Any, where: str, file: Path) -> ClassTool | McpEntry:
    try:
        read = msgspec.convert(entry, _ToolEntry)
        match (read.config or {}).get("type", "native"):
            case "native":
                return _read_class(read, where, file)
            case "mcp":
                return _read_mcp(read, where)
            case other:
                raise ConfigError(f"{where}: config.type is {other!r}, want native or mcp")
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_class(entry: _ToolEntry, where: str, file: Path) -> ClassTool:
    class_name, config = entry.class_name, entry.config or {}
    if not class_name or entry.mcp is not None:
        raise ConfigError(
            f"{where}: needs class_name (package.module.Class or path/to/file.py:Class), and no mcp"
        )
    cls = import_name(class_name, key=f"{where}: class_name", beside=file)
    if not isinstance(cls, type) or not all(callable(getattr(cls, method, None)) for method in _METHODS):
        raise ConfigError(f"{where}: {class_name} is no class with {', '.join(_METHODS)}")
    shown: Any = None
    if entry.tool_schema is not None:
        shown = OpenAIFunctionToolSchema.model_validate(check_tool_schema(entry.tool_schema, where))

    def make() -> tuple[Any, ToolSchema]:
        tool = cls(config=config, tool_schema=shown)
        schema = shown or getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
        return tool, OpenAIFunctionToolSchema.model_validate(schema).model_dump()

    tool, schema = construct(make, f"{where}: {class_name}")
    check_tool_schema(schema, f"{where} ({class_name})")
    return ClassTool(schema["function"]["name"], tool, schema, [cls.__qualname__, source_digest(cls), config])


def _read_mcp(entry: _ToolEntry, where: str) -> McpEntry:
    require_mcp(where)
    if entry.class_name not in (None, _VERL_MCP_CLASS) or entry.tool_schema is not None:
        raise ConfigError(f"{where}: MCP servers say their schemas themselves: no class_name, no tool_schema")
    settings = msgspec.convert({**(entry.config or {}), **(entry.mcp or {})}, _McpConfig)
    path = settings.mcp_servers_config_path
    if (path is None) == (settings.server is None):
        raise ConfigError(f"{where}: needs either config.server or mcp_servers_config_path")
    named: dict[str | None, McpServerSettings] = {}
    if path is not None:
        named.update(load_mcp_servers(path, f"{where}: mcp_servers_config_path"))
    elif settings.server is not None:
        named[None] = settings.server
    servers = [McpServer(server, where, name) for name, server in named.items() if not server.disabled]
    wanted = settings.tool_filter or settings.tool_selected_list
    return McpEntry(tuple(servers), None if wanted is None else tuple(wanted), where)
