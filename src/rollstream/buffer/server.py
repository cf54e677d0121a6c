"""The socket below the application, and uvicorn on it."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from rollstream.buffer.protocol import BufferProtocol
from rollstream.errors import ConfigError

_BACKLOG = 2048
"""Connections that wait to be accepted: agents come in waves of hundreds."""

_KEEP_ALIVE_S = 75
"""An idle connection stays open this long: longer than a rollout's pause between two items, mostly."""

_LAST_ANSWERS_S = 10
"""For requests in flight when the server ends: a stream of some hundred megabytes takes seconds."""


class Server:
    """Listens and runs an ASGI application, until it is told to stop.

    Args:
        app: the application.
        host: address to listen on.
        port: 0 takes a free one.
    """

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 8889) -> None:
        self.app = app
        """May be given later, before `start`."""
        self._host = host
        self._port = port
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""
        """Known once `start` has returned."""

    def bind(self) -> socket.socket:
        """Takes the address, without answering on it yet; `url` is known then.

        Raises:
            ConfigError: the address cannot be used.
        """
        if not 0 <= self._port <= 65535:  # getaddrinfo would take the rest of a division
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: a port is a number up to 65535")
        try:
            found = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, address = found[0]
            bound = socket.socket(family, kind, protocol)
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(address)
            except BaseException:
                bound.close()
                raise
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        shown = f"[{self._host}]" if family == socket.AF_INET6 and ":" in self._host else self._host
        self.url = f"http://{shown}:{bound.getsockname()[1]}"
        return bound

    async def start(self, bound: socket.socket) -> None:
        """Begins to answer on a socket of `bind`."""
        config = uvicorn.Config(
            self.app,
            http=BufferProtocol,
            interface="asgi3",
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]), name="buffer-http")
        while not self._server.started:  # uvicorn tells nobody when it is
            await asyncio.sleep(0.001)
            if self._task.done():
                self._task.result()
                raise ConfigError(f"the server on {self.url} ended while it started")

    async def stop(self) -> None:
        """No more connections; requests in flight have some seconds to end. Idempotent."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task

    @property
    def task(self) -> "asyncio.Task[None] | None":
        """The task that answers requests, once it has begun."""
        return self._task


class _Uvicorn(uvicorn.Server):
    """Without its signal handlers: the command has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
