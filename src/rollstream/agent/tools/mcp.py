"""Tools of MCP servers, by the official `mcp` package: settings, sessions, and the tools."""

import asyncio
import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import msgspec

from rollstream.agent.tools.base import OpenAIFunctionToolSchema, Tool, ToolError, ToolResponse
from rollstream.agent.tools.session import error_line
from rollstream.chat.tool_schema import ToolSchema
from rollstream.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

MAX_PAGES = 100
"""Pages of a server's list of tools that are read. A server with more is broken: it lists without end."""
LIST_TIMEOUT = 60.0
"""Seconds to list all tools. A server answers at once, or is still fetching what it describes."""
CONNECT_TIMEOUT = 60.0
"""Seconds to start a server and shake hands. Long enough for a command that first downloads its package."""
CLOSE_TIMEOUT = 10.0
"""Seconds for a session to end: mcp gives a command 2 s to exit, 2 s after SIGTERM, 2 s after SIGKILL."""
STDERR_CHARACTERS = 2000
"""Of what a command wrote to its standard error last; for messages."""

_HTTP = ("http", "streamable-http", "streamable_http", "streamableHttp")

logger = logging.getLogger(__name__)


def require_mcp(where: str) -> None:
    """Checks that the `mcp` package is there. Raises `ConfigError`."""
    try:
        from mcp import Client  # noqa: F401  (there since 2.0)
    except ImportError as error:
        raise ConfigError(
            f"{where}: MCP servers need the package mcp 2 or newer: pip install 'rollstream[mcp]' ({error})"
        ) from error


class McpServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server: a command that speaks over its standard streams, or an URL that speaks streamable HTTP."""

    command: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    args: tuple[str | int | float, ...] = ()
    env: dict[str, str | int | float] | None = None
    """Besides PATH, HOME and the like; nothing else of our environment is passed on. May be secret."""
    cwd: str | None = None
    url: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    headers: dict[str, str] | None = None
    """May be secret."""
    type: str | None = None
    transport: str | None = None
    disabled: bool = False
    name: Any = None
    """This and what follows is what other programs write into `mcpServers` for themselves."""
    description: Any = None
    always_allow: Any = msgspec.field(default=None, name="alwaysAllow")
    auto_approve: Any = msgspec.field(default=None, name="autoApprove")

    def __post_init__(self) -> None:
        if not self.disabled and (self.command is None) == (self.url is None):
            raise ValueError("needs either command (and args, env, cwd) or url (and headers)")
        transport = self.type or self.transport
        if transport is not None and transport not in (("stdio",) if self.url is None else _HTTP):
            raise ValueError(f"transport {transport!r} is not supported, only stdio and streamable HTTP")

    @property
    def identity(self) -> list[Any]:
        """What of it decides what the tools do. Secrets and places are left out: they may change."""
        return [self.command, [str(each) for each in self.args], self.url]


class _McpServers(msgspec.Struct):
    named: dict[str, McpServerSettings] = msgspec.field(name="mcpServers")


def load_mcp_servers(path: str | Path, where: str) -> dict[str, McpServerSettings]:
    """Reads the servers of a JSON file `{"mcpServers": {name: settings}}`.

    Raises:
        ConfigError: No such file, not JSON, all servers are disabled, or settings that cannot be used.
    """
    file = Path(path).expanduser()
    try:
        named = msgspec.json.decode(file.read_bytes(), type=_McpServers).named
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{where}: {file} cannot be read ({error})") from error
    if all(server.disabled for server in named.values()):
        raise ConfigError(f"{where}: {file} has no server that is not disabled")
    return named


class McpConnection:
    """A session that is owned by one task, and used by any.

    The task connects, waits until the session is to end, and disconnects: the scopes of `mcp` must be left by
    the task that entered them. Making one begins to connect.
    """

    def __init__(self, settings: McpServerSettings) -> None:
        self._settings = settings
        self._stderr: deque[str] = deque(maxlen=20)
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._own())

    @property
    def usable(self) -> bool:
        """Whether a call may be made; one being connected counts."""
        return not self._end.is_set() and not self.task.done()

    async def client(self) -> "Client":
        """The client, once it is connected. Raises what connecting raised."""
        return await asyncio.shield(self._client)

    async def call(self, tool: str, arguments: dict[str, Any]) -> "CallToolResult":
        """Calls a tool. Raises what `mcp` raises; the session ends then, if that was the reason."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

        try:
            client = await self.client()
            return await client.call_tool(tool, arguments)
        except MCPError as error:
            # Any other error is an answer, in a session that works. HTTP servers that do not know the session
            # (any more) say INVALID_REQUEST.
            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):
                self._end.set()
            raise
        except ValueError:  # an answer that mcp cannot read
            raise
        except Exception:
            self._end.set()
            raise

    async def close(self) -> None:
        """Ends the session, whatever is under way, and waits for it, with a bound. Twice is fine."""
        self._end.set()
        if not self._client.done():
            self.task.cancel()
        done, _ = await asyncio.wait({self.task}, timeout=CLOSE_TIMEOUT)
        if not done:
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=CLOSE_TIMEOUT)

    def describe(self, error: BaseException) -> str:
        """An error in one line, with what the server last wrote to its standard error."""
        wrote = " | ".join(line for line in self._stderr if line.strip())[-STDERR_CHARACTERS:]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        line = error_line(error, STDERR_CHARACTERS)
        return f"{line}; its standard error ends: {wrote}" if wrote else line

    async def _own(self) -> None:
        error: BaseException = ConnectionError("the session was ended while it was being connected")
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    client = await self._connect(stack)
                self._client.set_result(client)
                await self._end.wait()
        except Exception as raised:
            error = raised
            logger.debug("an MCP session ended", exc_info=True)
        finally:
            if not self._client.done():
                self._client.set_exception(error)

    async def _connect(self, stack: contextlib.AsyncExitStack) -> "Client":
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        settings = self._settings
        transport: contextlib.AbstractAsyncContextManager[Any]
        if settings.url is not None:
            # Without a limit on reading: whoever calls a tool has one.
            timeout = httpx2.Timeout(CONNECT_TIMEOUT, read=None)
            http = httpx2.AsyncClient(headers=settings.headers or {}, timeout=timeout)
            transport = streamable_http_client(
                settings.url, http_client=await stack.enter_async_context(http)
            )
        else:
            assert settings.command is not None
            env = {name: str(value) for name, value in (settings.env or {}).items()}
            args = [str(argument) for argument in settings.args]
            command = StdioServerParameters(command=settings.command, args=args, env=env, cwd=settings.cwd)
            transport = stdio_client(command, errlog=stack.enter_context(self._read_stderr()))
        return await stack.enter_async_context(Client(transport, cache=None))

    @contextlib.contextmanager
    def _read_stderr(self) -> Iterator[TextIO]:
        """A file for a command's standard error, which would be our own otherwise. Keeps the last lines."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        loop = asyncio.get_running_loop()

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                text = os.read(reading, 1 << 16).decode("utf-8", "replace")
                if not text:
                    loop.remove_reader(reading)
                self._stderr.extend(line[:STDERR_CHARACTERS] for line in text.splitlines() if line.strip())

        loop.add_reader(reading, read)
        try:
            with open(writing, "w", encoding="utf-8") as file:  # noqa: PTH123  (of a descriptor)
                yield file
            read()
        finally:
            loop.remove_reader(reading)
            os.close(reading)


class McpServer:
    """A server, and the session with it while there is one.

    All rollouts of a worker share the session. It begins with the first call, and anew with the first call
    after it broke. A call that finds it broken in the middle fails; it may have had effects, so it is not
    sent again.
    """

    def __init__(self, settings: McpServerSettings, where: str, name: str | None = None) -> None:
        """`where`: what the server is in the configuration; it and `name` are for messages."""
        self.settings = settings
        self.where = where
        self.name = name or settings.command or settings.url
        self._connection: McpConnection | None = None
        self._connections: dict[asyncio.Task[None], McpConnection] = {}
        """Those that have not ended."""
        self._closed = False

    async def list_tools(self) -> list[ToolSchema]:
        """Connects, asks for the tools' schemas, and disconnects. Can be used from any event loop.

        Raises:
            ConfigError: The server cannot be reached; with what it wrote to its standard error last.
        """
        connection = McpConnection(self.settings)
        try:
            client = await connection.client()
            async with asyncio.timeout(LIST_TIMEOUT):
                return await _list(client)
        except Exception as error:
            raise ConfigError(
                f"{self.where}: the MCP server {self.name} cannot be used ({connection.describe(error)})"
            ) from error
        finally:
            await connection.close()

    async def call(self, tool: str, arguments: dict[str, Any]) -> "CallToolResult":
        """Calls a tool. Raises `ToolError`: the server is not there, went away, or refused the call."""
        if self._closed:
            raise ToolError(f"the MCP server {self.name} is closed")
        connection = self._connection
        if connection is None or not connection.usable:
            if connection is not None:
                logger.warning("MCP server %s: connecting again", self.name)
            connection = self._connection = McpConnection(self.settings)
            self._connections[connection.task] = connection
            connection.task.add_done_callback(self._connections.pop)
        try:
            return await connection.call(tool, arguments)
        except Exception as error:
            raise ToolError(f"the MCP server {self.name} failed: {connection.describe(error)}") from error

    async def close(self) -> None:
        """Ends the session, and the server if it is a command. Twice is fine."""
        self._closed = True
        self._connection = None
        await asyncio.gather(*(connection.close() for connection in [*self._connections.values()]))


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


async def _list(client: "Client") -> list[ToolSchema]:
    schemas: list[ToolSchema] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            schemas.append({"type": "function", "function": function})
        if (cursor := page.next_cursor) is None:
            break
    return schemas


def _read_content(result: "CallToolResult") -> ToolResponse:
    """Texts, one per line; images as `data:` URLs; of what else there is, what it is."""
    texts: list[str] = []
    images = [f"data:{part.mime_type};base64,{part.data}" for part in result.content if part.type == "image"]
    for part in result.content:
        match part.type:
            case "text":
                texts.append(part.text)
            case "resource":
                texts.append(getattr(part.resource, "text", None) or f"[{part.resource.uri}]")
            case "resource_link":
                texts.append(f"[{part.uri}]")
            case "audio":
                texts.append("[audio]")
    if not texts and not images and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return ToolResponse(text="\n".join(texts), image=images or None)
