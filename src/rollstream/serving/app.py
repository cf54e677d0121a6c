"""The HTTP server around an engine: its routes, who may use them, its end in good order."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rollstream.chat.wires.requests import refusal_of, render_error
from rollstream.engine.base import Engine
from rollstream.serving.control import ControlRoutes
from rollstream.serving.model import ServedModel
from rollstream.serving.native import GenerateRoutes
from rollstream.serving.openai import OpenAIRoutes
from rollstream.serving.service import EngineService
from rollstream.web import Access, Route, ServerLimits, WebServer

MAX_BODY = 64 * 2**20
"""Bytes. A batch of 64 prompts of 100,000 ids is 40 MB of JSON; more is a mistake."""

_SPARE_CONNECTIONS = 256
"""Beside those that wait for a sample: for idle ones, monitoring, and requests that are refused."""

LAST_ANSWERS_S = 5.0
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
        weights: folders below which clients may name weights.
        access: who may use it.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        host: str = "127.0.0.1",
        port: int = 30000,
        max_queue: int = 8192,
        weights: Iterable[Path] = (),
        access: Access | None = None,
    ) -> None:
        self._service = EngineService(engine, max_queue=max_queue, model_path=model.path)
        self._answered: Counter[tuple[str, int]] = Counter()
        routes = [
            *GenerateRoutes(model, self._service).routes(),
            *OpenAIRoutes(model, self._service).routes(),
            *ControlRoutes(model, self._service, self._answered, tuple(weights)).routes(),
        ]
        self._web = WebServer(
            # A client that goes away aborts its request.
            (replace(route, cancel_when_gone=True) for route in routes),
            access=access or Access(),
            limits=ServerLimits(max_body=MAX_BODY, max_connections=max_queue + _SPARE_CONNECTIONS),
            translate=refusal_of,
            render_error=render_error,
            on_answer=self._count,
        )
        self._host, self._port = host, port

    def _count(self, route: Route | None, status: int, seconds: float) -> None:
        # Paths that nobody knows share a label: clients could make any number of them.
        self._answered[route.path if route else "unknown", status] += 1

    @property
    def url(self) -> str:
        """Known once `start` has returned."""
        return self._web.url

    async def start(self) -> str:
        """Begins to listen; returns the URL. Raises `ConfigError`: the address cannot be used."""
        return await self._web.start(self._host, self._port)

    async def stop(self) -> None:
        """Ends: no more connections, 503 to who is still waiting, then the engine and the sockets."""
        self._web.stop_listening()
        await self._service.close()
        await self._web.stop(LAST_ANSWERS_S)

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
