"""Tools of MCP servers, by the official `mcp` package: settings, sessions, and the tools."""

import asyncio
import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import orjson

from rollstream.agent.tools.base import OpenAIFunctionToolSchema, Tool, ToolError, ToolResponse
from rollstream.agent.tools.result import error_line
from rollstream.chat.tool_schema import ToolSchema, check_keys
from rollstream.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult
    from mcp_types import Tool as Listed

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

_STDIO = ("stdio",)
_HTTP = ("http", "streamable-http", "streamable_http", "streamableHttp")
_IGNORED = ("alwaysAllow", "autoApprove", "description", "name")
"""What other programs write into `mcpServers` for themselves."""
_KNOWN = ("command", "args", "env", "cwd", "url", "headers", "type", "transport", "disabled")

logger = logging.getLogger(__name__)


def require_mcp(where: str) -> None:
    """Checks that the `mcp` package is there. Raises `ConfigError`."""
    try:
        from mcp import Client  # noqa: F401  (there since 2.0)
    except ImportError as error:
        raise ConfigError(
            f"{where}: MCP servers need the package mcp 2 or newer: pip install 'rollstream[mcp]' ({error})"
        ) from error


@dataclass(frozen=True, slots=True)
class McpServerSettings:
    """One server: a command that speaks over its standard streams, or an URL that speaks streamable HTTP."""

    name: str
    """For messages."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Besides PATH, HOME and the like; nothing else of our environment is passed on. May be secret."""
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """May be secret."""

    @property
    def identity(self) -> list[Any]:
        """What of it decides what the tools do. Secrets and places are left out: they may change."""
        return [self.command, list(self.args), self.url]


def read_mcp_server(name: str, settings: Any, where: str) -> McpServerSettings | None:
    """Reads one server's settings, as a tool file or `mcpServers` has them; None when it is disabled.

    Args:
        name: For messages; "" takes the command or the url.
        settings: `command`, `args`, `env`, `cwd`; or `url`, `headers`.
        where: What they are, for messages.

    Raises:
        ConfigError: An unknown key, a wrong type, or a transport that is not supported.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: {settings!r} is no mapping with command or url")
    check_keys([key for key in settings if key not in _IGNORED], _KNOWN, where)
    if settings.get("disabled"):
        return None
    command, url = settings.get("command"), settings.get("url")
    if (command is None) == (url is None):
        raise ConfigError(f"{where}: needs either command (and args, env, cwd) or url (and headers)")
    transport = settings.get("type") or settings.get("transport")
    if transport is not None and transport not in (_STDIO if url is None else _HTTP):
        raise ConfigError(
            f"{where}: transport {transport!r} is not supported; a command speaks stdio, an url http "
            "(streamable HTTP)"
        )
    args = settings.get("args") or []
    if not isinstance(args, list):
        raise ConfigError(f"{where}: args is {args!r}, want a list")
    return McpServerSettings(
        name or str(command or url),
        command=_text(command, f"{where}: command"),
        args=tuple(str(argument) for argument in args),
        env=_texts(settings.get("env"), f"{where}: env"),
        cwd=_text(settings.get("cwd"), f"{where}: cwd"),
        url=_text(url, f"{where}: url"),
        headers=_texts(settings.get("headers"), f"{where}: headers"),
    )


def load_mcp_servers(path: str | Path, where: str) -> list[McpServerSettings]:
    """Reads the servers of a JSON file `{"mcpServers": {name: settings}}`, without those that are disabled.

    Raises:
        ConfigError: No such file, not JSON, no server, or settings that cannot be used.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: no such file: {file} (looked in {file.absolute().parent})")
    try:
        content = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: {file} is not JSON ({error})") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f"{where}: {file} needs mcpServers, a mapping of names to servers")
    read = [read_mcp_server(name, settings, f"{where}: {file}, {name}") for name, settings in servers.items()]
    enabled = [settings for settings in read if settings is not None]
    if not enabled:
        raise ConfigError(f"{where}: {file} has no server that is not disabled")
    return enabled


def _text(value: Any, where: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{where} is {value!r}, want text")
    return value


def _texts(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(item, Mapping | list) for item in value.values()):
        raise ConfigError(f"{where} must be a mapping of names to texts")
    return {str(key): str(item) for key, item in value.items()}


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
        self._broken = False
        self._in_flight = 0
        self._task = asyncio.create_task(self._own())

    def when_ended(self, call: Callable[["McpConnection"], None]) -> None:
        """Calls a function with it when nothing is left of it."""
        self._task.add_done_callback(lambda _: call(self))

    @property
    def usable(self) -> bool:
        """Whether a call may be made; one being connected counts."""
        return not self._broken and not self._task.done()

    async def client(self) -> "Client":
        """The client, once it is connected. Raises what connecting raised."""
        return await asyncio.shield(self._client)

    async def call(self, tool: str, arguments: dict[str, Any]) -> "CallToolResult":
        """Calls a tool. Raises what `mcp` raises; the session is not usable then, if that was the reason."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

        self._in_flight += 1
        try:
            client = await self.client()
            return await client.call_tool(tool, arguments)
        except MCPError as error:
            # Any other error is an answer, in a session that works. HTTP servers that do not know the session
            # (any more) say INVALID_REQUEST.
            self._broken |= error.code in (CONNECTION_CLOSED, INVALID_REQUEST)
            raise
        except ValueError:  # an answer that mcp cannot read
            raise
        except Exception:
            self._broken = True
            raise
        finally:
            self._in_flight -= 1
            self._end_if_unused()

    def retire(self) -> None:
        """Lets the session end when the last call that is under way has ended."""
        self._broken = True
        self._end_if_unused()

    async def close(self) -> None:
        """Ends the session, whatever is under way, and waits for it, with a bound. Twice is fine."""
        self._broken = True
        self._end.set()
        if not self._client.done():
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)

    def describe(self, error: BaseException) -> str:
        """An error in one line, with what the server last wrote to its standard error."""
        wrote = " | ".join(line for line in self._stderr if line.strip())[-STDERR_CHARACTERS:]
        line = error_line(_innermost(error), STDERR_CHARACTERS)
        return f"{line}; its standard error ends: {wrote}" if wrote else line

    def _end_if_unused(self) -> None:
        if self._broken and not self._in_flight:
            self._end.set()

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
            logger.debug("MCP server %s: the session ended", self._settings.name, exc_info=True)
        finally:
            self._broken = True
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
            http = httpx2.AsyncClient(headers=dict(settings.headers), timeout=timeout)
            transport = streamable_http_client(
                settings.url, http_client=await stack.enter_async_context(http)
            )
        else:
            assert settings.command is not None
            command = StdioServerParameters(
                command=settings.command, args=list(settings.args), env=dict(settings.env), cwd=settings.cwd
            )
            errlog = stack.enter_context(self._read_stderr())
            transport = self._watch(stdio_client(command, errlog=errlog))
        return await stack.enter_async_context(Client(transport, cache=None))

    @contextlib.asynccontextmanager
    async def _watch(self, transport: contextlib.AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        """The transport of a command; when the command closes its output, the session is broken."""
        async with transport as (incoming, outgoing):
            yield _WatchedStream(incoming, self.retire), outgoing

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


class _WatchedStream:
    """A stream of incoming messages that says when it ends."""

    def __init__(self, stream: Any, ended: Callable[[], None]) -> None:
        self._stream = stream
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._ended()
            raise


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


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
        self._connections: set[McpConnection] = set()
        """Those that have not ended; a broken one ends with the last call that is under way."""
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
        """Calls a tool. Raises `ToolError`: the server is not there, went away, or refused the call."""
        if self._closed:
            raise ToolError(f"the MCP server {self.settings.name} is closed")
        connection = self._connection
        if connection is None or not connection.usable:
            if connection is not None:
                connection.retire()
                logger.warning("MCP server %s: connecting again", self.settings.name)
            connection = self._connection = McpConnection(self.settings)
            self._connections.add(connection)
            connection.when_ended(self._connections.discard)
        try:
            return await connection.call(tool, arguments)
        except Exception as error:
            raise ToolError(
                f"the MCP server {self.settings.name} failed: {connection.describe(error)}"
            ) from error

    async def close(self) -> None:
        """Ends the session, and the server if it is a command. Twice is fine."""
        self._closed = True
        self._connection = None
        await asyncio.gather(*(connection.close() for connection in self._connections))


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
