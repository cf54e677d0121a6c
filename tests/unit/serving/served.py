"""A server in this process, over a scripted engine with the demo model's tokenizer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import aiohttp
import orjson

from rollstream.chat.parsers.registry import get_parser
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.serving.app import Server
from rollstream.serving.model import ServedModel
from rollstream.testing.scripted import ScriptedEngine

END = "<|im_end|>"
FOREVER = 1e6
GENERATE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
QUESTION = [{"role": "user", "content": "2 + 3 ="}]


@cache
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(str(MODEL_PATH))


def served_model(*, parser: str = "hermes", keeps_prefixes: bool = False) -> ServedModel:
    return ServedModel("demo", str(MODEL_PATH), "scripted", tokenizer(), get_parser(parser), keeps_prefixes)


def saying(*texts: str, **kwargs: Any) -> ScriptedEngine:
    """An engine that says these texts, one after the other and the last one forever.

    It takes stop strings: a text that is to end with one ends there.
    """
    left = [tokenizer().encode(text) for text in texts]
    engine = ScriptedEngine(lambda request: left.pop(0) if len(left) > 1 else left[0], **kwargs)
    engine.capabilities = replace(engine.capabilities, stop_strings=True)
    return engine


class Client:
    """Asks a server; gives status and body."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = aiohttp.ClientSession()
        self.headers: dict[str, str] = {}

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await _body(response)

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        given: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, **given, **options) as response:
            self.headers = dict(response.headers)
            return response.status, await _body(response)

    async def answer(self, path: str, body: Any) -> Any:
        """What a request is answered that must be answered."""
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, without its end."""
        *events, end = (await self.answer(path, {**body, "stream": True})).strip().split("\n\n")
        assert (end, self.headers["Content-Type"]) == ("data: [DONE]", "text/event-stream")
        return [orjson.loads(event.removeprefix("data: ")) for event in events]

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that must be refused with this status."""
        got, answer = await self.post(path, body)
        assert got == status, answer
        error: dict[str, Any] = answer["error"]
        assert error["message"]
        return error


async def _body(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.text()


async def server_of(engine: ScriptedEngine, model: ServedModel | None = None, **kwargs: Any) -> Server:
    if engine.capabilities.max_model_len is None:  # an embedded engine says it
        engine.capabilities = replace(engine.capabilities, max_model_len=4096)
    await engine.start()
    return Server(engine, model or served_model(), **{"port": 0, **kwargs})


@asynccontextmanager
async def serving(
    engine: ScriptedEngine, model: ServedModel | None = None, **kwargs: Any
) -> AsyncIterator[Client]:
    async with await server_of(engine, model, **kwargs) as server:
        client = Client(server.url)
        try:
            yield client
        finally:
            await client.session.close()
