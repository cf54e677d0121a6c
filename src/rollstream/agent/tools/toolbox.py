"""All tools of a worker."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollstream.agent.tools.calls import Calls
from rollstream.agent.tools.config_file import ClassTool, McpEntry, load_tool_file
from rollstream.agent.tools.functions import FunctionTool, load_function_tools
from rollstream.agent.tools.limits import ToolLimits
from rollstream.agent.tools.mcp import McpTool
from rollstream.agent.tools.result import ToolResult
from rollstream.agent.tools.row_arguments import read_row_arguments, select_tools
from rollstream.agent.tools.session import ToolSession
from rollstream.chat.tool_schema import ToolSchema, check_names_differ
from rollstream.engine.checks import unknown_name
from rollstream.errors import ConfigError
from rollstream.user_code import source_digest

__all__ = ["ToolBox", "ToolLimits", "ToolResult", "ToolSession", "load_toolbox"]

WARNINGS = 5
"""Failed calls that are logged as warnings; later ones for debugging only. A model that is learning to call
tools fails often, and the trajectories have it all."""

logger = logging.getLogger(__name__)


class ToolBox:
    """The tools of a worker, shared by its rollouts.

    Without MCP servers it is complete at once. With them, `describe` or `start` asks the servers for their
    tools first. `describe` may run in another event loop than the rollouts.

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
        self._calls = Calls()
        self._closed = False
        self._failures = 0
        if not any(isinstance(tool, McpEntry) for tool in tools):
            self._complete([tool for tool in tools if not isinstance(tool, McpEntry)])

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

        Raises:
            ConfigError: A server cannot be reached, lacks a tool that is asked for, or two tools have the
                same name.
        """
        if self._tools is not None:
            return
        found = await asyncio.gather(*(_resolve(tool) for tool in self._given), return_exceptions=True)
        tools: list[FunctionTool | ClassTool] = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            tools += each
        self._complete(tools)

    async def start(self) -> None:
        """`describe`, if that was not done. Sessions with MCP servers begin with the first call."""
        await self.describe()

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

        Args:
            tools_kwargs: The row's arguments by tool; tools that are not here are passed over, as in verl.
            selection: The tools of this rollout; None or an empty one means all.
            request_id: Of the rollout, for messages.

        Raises:
            DataError: The row names an unknown tool, or its arguments have another shape.
        """
        if self._closed:
            raise RuntimeError("the toolbox is closed")
        known = self._known()
        return ToolSession(
            {name: known[name] for name in select_tools(selection, list(known))},
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
        self._tools = {
            name: tool for name, tool in known.items() if self._names is None or name in self._names
        }

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

    Connects to nothing, so it may run in a thread; with MCP servers, `describe` comes next.

    Args:
        tool_config_path: See `config_file.load_tool_file`; None: none.
        function_tool_path: See `functions.load_function_tools`; None: none.
        limits: What applies to each rollout.
        names: Of the tools that are used; None: all of them.

    Raises:
        ConfigError: A file cannot be used, or two tools have the same name.
    """
    return ToolBox(
        [
            *(load_tool_file(tool_config_path) if tool_config_path else []),
            *(load_function_tools(function_tool_path) if function_tool_path else []),
        ],
        limits,
        names=names,
    )


async def _resolve(tool: FunctionTool | ClassTool | McpEntry) -> list[FunctionTool | ClassTool]:
    if not isinstance(tool, McpEntry):
        return [tool]
    found: list[FunctionTool | ClassTool] = []
    for server in tool.servers:
        for schema in await server.list_tools():
            name = schema["function"]["name"]
            made = McpTool(server, schema)
            found.append(ClassTool(name, made, schema, ["mcp", *server.settings.identity]))
    names = [each.name for each in found]
    for name in tool.tool_filter or ():
        if name not in names:
            raise ConfigError(
                f"{tool.where}: tool_filter: no tool {name!r}. The server has: {', '.join(names)}"
            )
    return [each for each in found if tool.tool_filter is None or each.name in tool.tool_filter]


def _identity(tool: FunctionTool | ClassTool) -> list[Any]:
    if isinstance(tool, ClassTool):
        return tool.identity
    function = tool.function
    return [getattr(function, "__qualname__", type(function).__qualname__), source_digest(function)]
