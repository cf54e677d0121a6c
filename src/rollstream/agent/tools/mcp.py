"""Tools of MCP servers, by the official `mcp` package."""

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

from rollstream.agent.tools.base import OpenAIFunctionToolSchema, Tool, ToolError, ToolResponse
from rollstream.agent.tools.mcp_connection import McpConnection
from rollstream.agent.tools.mcp_settings import McpServerSettings
from rollstream.chat.tool_schema import ToolSchema
from rollstream.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult
    from mcp_types import Tool as Listed

MAX_PAGES = 100
"""Pages of a server's list of tools that are read. A server with more is broken: it lists without end."""
LIST_TIMEOUT = 60.0
"""Seconds to list all tools. A server answers at once, or is still fetching what it describes."""

logger = logging.getLogger(__name__)


def require_mcp(where: str) -> None:
    """Checks that the `mcp` package is there. Raises `ConfigError`."""
    try:
        from mcp import Client  # noqa: F401  (there since 2.0)
    except ImportError as error:
        raise ConfigError(
            f"{where}: MCP servers need the package mcp 2 or newer: pip install 'rollstream[mcp]' ({error})"
        ) from error


class McpServer:
    """A server, and the session with it while there is one.

    All rollouts of a worker share the session. It begins with the first call, and anew with the first call
    after it broke. A call that finds it broken in the middle fails; it may have had effects, so it is not
    sent again.
    """

    def __init__(self, settings: McpServerSettings, where: str) -> None:
        """`where`: what the server is in the configuration, for messages."""
        self.settings = settings
        self.where = where
        self._connection: McpConnection | None = None
        self._old: list[McpConnection] = []
        self._closed = False

    async def list_tools(self) -> list[ToolSchema]:
        """Connects, asks for the tools, and disconnects. Can be used from any event loop.

        Returns:
            Their schemas, in the server's order.

        Raises:
            ConfigError: The server cannot be reached; with the last lines of what it wrote to its standard
                error.
        """
        connection = McpConnection(self.settings)
        try:
            client = await connection.client()
            async with asyncio.timeout(LIST_TIMEOUT):
                listed = await _list(client)
        except Exception as error:
            raise ConfigError(
                f"{self.where}: the MCP server {self.settings.name} cannot be used "
                f"({connection.describe(error)})"
            ) from error
        finally:
            await connection.close()
        return [_read_schema(tool) for tool in listed]

    async def call(self, tool: str, arguments: dict[str, Any]) -> "CallToolResult":
        """Calls a tool.

        Raises:
            ToolError: The server is not there, went away, or refused the call.
        """
        if self._closed:
            raise ToolError(f"the MCP server {self.settings.name} is closed")
        connection = self._connection
        if connection is None or not connection.usable:
            if connection is not None:
                connection.retire()
                self._old = [old for old in (*self._old, connection) if not old.ended]
                logger.warning("MCP server %s: connecting again", self.settings.name)
            connection = self._connection = McpConnection(self.settings)
        try:
            return await connection.call(tool, arguments)
        except Exception as error:
            raise ToolError(
                f"the MCP server {self.settings.name} failed: {connection.describe(error)}"
            ) from error

    async def close(self) -> None:
        """Ends the session, and the server if it is a command. Twice is fine."""
        self._closed = True
        connections = [*self._old, *([] if self._connection is None else [self._connection])]
        self._old, self._connection = [], None
        await asyncio.gather(*(connection.close() for connection in connections))


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, server: McpServer, schema: ToolSchema) -> None:
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.server = server

    async def execute(  # type: ignore[override]  # what it does not take is not copied for it
        self, instance_id: str, parameters: dict[str, Any]
    ) -> ToolResponse:
        result = await self.server.call(self.name, parameters)
        response = _read_content(result)
        if result.is_error:
            raise ToolError(response.text or "the tool failed without saying why")
        return response


async def _list(client: "Client") -> "list[Listed]":
    listed: list[Listed] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return listed


def _read_schema(tool: "Listed") -> ToolSchema:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        },
    }


def _read_content(result: "CallToolResult") -> ToolResponse:
    """Texts, one per line; images as `data:` URLs; of what else there is, what it is."""
    texts: list[str] = []
    images: list[str] = []
    for part in result.content:
        match part.type:
            case "text":
                texts.append(part.text)
            case "image":
                images.append(f"data:{part.mime_type};base64,{part.data}")
            case "resource":
                texts.append(getattr(part.resource, "text", None) or f"[{part.resource.uri}]")
            case "resource_link":
                texts.append(f"[{part.uri}]")
            case "audio":
                texts.append("[audio]")
    if not texts and not images and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return ToolResponse(text="\n".join(texts), image=images or None)
