"""A buffer that only keeps what generators write, for tests of generators."""

import base64
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
from aiohttp import web

from rollstream.buffer.items import load_item


class KeepingBuffer:
    """Speaks the routes that a generator uses; items by uid, in order."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.batches: list[int] = []
        self.refuses: Callable[[dict[str, Any]], bool] = lambda item: False
        self.answers: list[int] = []
        """Statuses of the next writes, before it works."""
        self.seen_tokens: set[str | None] = set()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/items", self._write)
        app.router.add_post("/v1/uids/known", self._known)
        self._runner = web.AppRunner(app)
        self.url = ""

    async def __aenter__(self) -> "KeepingBuffer":
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _write(self, request: web.Request) -> web.Response:
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        self.seen_tokens.add(base64.b64decode(secret).decode() if kind == "Basic" else None)
        items = [readable(item) for item in msgspec.msgpack.decode(await request.read())["items"]]
        if self.answers:
            return web.Response(status=self.answers.pop(0), text="not now")
        if any(self.refuses(item) for item in items):
            return web.Response(status=400, text="items[?]: no")
        self.batches.append(len(items))
        results = ["known" if item["uid"] in self.items else "stored" for item in items]
        for item in items:
            self.items.setdefault(item["uid"], item)
        stored = results.count("stored")
        return web.json_response({"stored": stored, "known": len(items) - stored, "results": results})

    async def _known(self, request: web.Request) -> web.Response:
        uids = orjson.loads(await request.read())["uids"]
        return web.json_response({"known": [uid in self.items for uid in uids]})


def readable(item: dict[str, Any]) -> dict[str, Any]:
    """With tokens as lists."""
    loaded = load_item(msgspec.msgpack.encode(item), "msgpack")
    return {key: list(value) if isinstance(value, array) else value for key, value in loaded.items()}
