"""The HTTP server around an engine: opens a port, ends in good order."""

from collections.abc import Iterable

from rollstream.engine.base import Engine
from rollstream.serving.app import create_server
from rollstream.serving.metrics import RequestCounts
from rollstream.serving.model import ServedModel
from rollstream.serving.service import EngineService
from rollstream.web import Access

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
        allowed_hosts: further names of this server, as clients write them.
        insecure: listens beyond loopback also without a key.
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
        allowed_hosts: Iterable[str] = (),
        insecure: bool = False,
    ) -> None:
        self.service = EngineService(engine, max_queue=max_queue, model_path=model.path)
        self.counts = RequestCounts()
        """HTTP requests so far."""
        access = Access(api_key, allowed_hosts=frozenset(allowed_hosts), insecure=insecure)
        self._web = create_server(model, self.service, self.counts, access=access)
        self._host = host
        self._port = port

    @property
    def url(self) -> str:
        """Known once `start` has returned."""
        return self._web.url

    async def start(self) -> str:
        """Begins to listen; returns the URL.

        Raises:
            ConfigError: the address cannot be used.
        """
        return await self._web.start(self._host, self._port)

    async def stop(self) -> None:
        """Ends: no more connections, 503 to who is still waiting, then the engine and the sockets."""
        self._web.stop_listening()
        await self.service.close()
        await self._web.stop(_LAST_ANSWERS_S)

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
