"""The base of both stub servers: a listener in this process that can be stopped, started again and killed."""

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import orjson
from aiohttp import web


class HttpStub:
    """Listens; its subclass answers."""

    host = "127.0.0.1"
    port = 0
    """0 takes a free one; after a `stop` it is the same one."""
    url = ""
    """Known once `start` has returned."""
    handler_cancellation = False
    """Whether a client that goes away cancels the handler of its request."""
    _server: web.Server | None = None
    _listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Begins to serve; returns the URL."""
        self._server = web.Server(
            self._handle, access_log=None, handler_cancellation=self.handler_cancellation
        )
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._server, self.host, self.port, backlog=4096)
        self.port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"
        return self.url

    async def stop(self) -> None:
        """Ends all connections and the server."""
        if self._listener is not None and self._server is not None:
            self._listener.close()
            await self._server.shutdown(timeout=0.1)
        self._listener = self._server = None

    def kill(self) -> None:
        """Closes every socket at once, in the middle of whatever it was doing."""
        if self._listener is not None and self._server is not None:
            self._listener.close()
            for handler in self._server.connections:
                if handler.transport is not None:
                    handler.transport.abort()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raise NotImplementedError


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A value as JSON."""
    return web.Response(
        body=orjson.dumps(value), status=status, content_type="application/json", headers=headers
    )


def error_response(
    status: int, message: str, code: Any = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An error in OpenAI's shape."""
    return json_response({"error": {"message": message, "type": "stub", "code": code}}, status, headers)
