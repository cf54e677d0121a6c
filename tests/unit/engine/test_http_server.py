"""Whoever names an engine names all that is asked: no server leads on to another."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollstream.engine.base import ChatPrompt
from rollstream.engine.detect import detect_server
from rollstream.engine.http_server import CONNECTION_KWARGS, HttpServer
from rollstream.engine.openai import OpenAIEngine
from rollstream.engine.replica import ReplicaUnavailableError
from rollstream.errors import ConfigError, EngineError
from rollstream.trajectory import SamplingParams


@pytest.fixture
async def leading() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that redirects every request to another one, and what that one was asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"model_path": "org/model", "data": []})

    async def lead(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(elsewhere.make_url(request.path))

    apps = []
    for handler in (answer, lead):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        apps.append(app)
    async with TestServer(apps[0]) as elsewhere, TestServer(apps[1]) as server:
        yield str(server.make_url("")).rstrip("/"), asked


async def test_a_server_that_never_answers_is_named_with_how_long_it_had() -> None:
    async def hold(request: web.Request) -> web.Response:
        await ended.wait()
        return web.Response()

    ended, app = asyncio.Event(), web.Application()
    app.router.add_route("*", "/{path:.*}", hold)
    async with TestServer(app) as frozen:
        url = str(frozen.make_url("")).rstrip("/")
        server = HttpServer(url, CONNECTION_KWARGS)
        try:
            with pytest.raises(ReplicaUnavailableError, match=rf"^{re.escape(url)}: .* 0\.05 s$"):
                await server.tell("/generate", {}, timeout_s=0.05)
        finally:
            ended.set()
            await server.close()


async def test_no_redirect_is_followed(leading: tuple[str, list[str]]) -> None:
    url, asked = leading
    with pytest.raises(ConfigError):
        await detect_server([url], timeout=60)
    server = HttpServer(url, CONNECTION_KWARGS)

    async def healthy() -> bool:
        return True

    try:
        assert (await server.get("/v1/models", timeout_s=60))[0] == 307
        with pytest.raises(EngineError):
            await server.post("/generate", b"{}", is_healthy=healthy, wanted=lambda: True)
    finally:
        await server.close()
    hosted = OpenAIEngine([url], model_path="org/model")
    await hosted.start()
    with pytest.raises(EngineError):
        await hosted.chat(
            ChatPrompt([{"role": "user", "content": "hi"}]),
            SamplingParams(4, logprobs=False),
            request_id="a",
        )
    await hosted.close()
    assert asked == []
