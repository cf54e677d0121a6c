"""One session with an MCP server, from connecting to its end."""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Self, TextIO

from rollstream.agent.tools.mcp_settings import McpServerSettings
from rollstream.agent.tools.text import error_line

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

CONNECT_TIMEOUT = 60.0
"""Seconds to start a server and shake hands. Long enough for a command that first downloads its package."""
CLOSE_TIMEOUT = 10.0
"""Seconds for a session to end: mcp gives a command 2 s to exit, 2 s after SIGTERM, 2 s after SIGKILL."""
STDERR_CHARACTERS = 2000
"""Of what a command wrote to its standard error last; for messages."""

logger = logging.getLogger(__name__)


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

    @property
    def usable(self) -> bool:
        """Whether a call may be made; one being connected counts."""
        return not self._broken and not self._task.done()

    @property
    def ended(self) -> bool:
        """Whether nothing is left of it."""
        return self._task.done()

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
