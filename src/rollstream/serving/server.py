"""The HTTP server around an engine: opens a port, ends in good order."""

import socket

from aiohttp import web

from rollstream.engine.base import Engine
from rollstream.errors import ConfigError
from rollstream.serving.app import create_app
from rollstream.serving.metrics import RequestCounts
from rollstream.serving.model import ServedModel
from rollstream.serving.service import EngineService

_BACKLOG = 1024
"""Connections that wait to be accepted: rollouts come in waves of hundreds."""

_LAST_ANSWERS_S = 5.0
"""For handlers to write their last answers, which they have already, when the server ends."""


class Server:
    """Serves a started engine; closes it at the end.

    Example:
        >>> async with Server(engine, model, port=0) as server:
        ...     print(server.url)

    Args:
        engine: started.
        model: what it serves.
        host: address to listen on.
        port: 0 takes a free one.
        max_queue: samples in flight at most.
        api_key: what clients have to show; None asks for none.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        host: str = "127.0.0.1",
        port: int = 30000,
        max_queue: int = 8192,
        api_key: str | None = None,
    ) -> None:
        self.service = EngineService(engine, max_queue=max_queue, model_path=model.path)
        self.counts = RequestCounts()
        """HTTP requests so far."""
        app = create_app(model, self.service, self.counts, api_key=api_key)
        self._host = host
        self._port = port
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_ANSWERS_S
        )
        self._sites: list[web.BaseSite] = []
        self.url = ""
        """Known once `start` has returned."""

    async def start(self) -> str:
        """Begins to listen; returns the URL.

        Raises:
            ConfigError: the address cannot be used.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=_BACKLOG)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        self._sites.append(site)
        family = socket.AF_INET6 if ":" in self._runner.addresses[0][0] else socket.AF_INET
        shown = f"[{self._host}]" if family == socket.AF_INET6 and ":" in self._host else self._host
        self.url = f"http://{shown}:{self._runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        """Ends: no more connections, 503 to who is still waiting, then the engine and the sockets."""
        for site in self._sites:
            await site.stop()
        await self.service.close()
        await self._runner.cleanup()

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
