"""What all routes share: who is let in, errors, sizes, clients that go away, engines that fail, the end."""

import asyncio
import logging
import socket
from dataclasses import replace

import aiohttp
import pytest

from rollstream.errors import ConfigError, TransientEngineError
from rollstream.serving.app import MAX_BODY
from rollstream.testing.scripted import ScriptedEngine
from rollstream.web import Access
from tests.support.until import until
from tests.unit.serving.served import FOREVER, GENERATE, QUESTION, Client, server_of, serving


async def test_a_key_is_asked_for_but_not_of_monitoring() -> None:
    engine = ScriptedEngine()
    async with serving(engine, access=Access("secret")) as client:
        for path in ("/generate", "/v1/completions", "/abort_request", "/pause_generation"):
            assert (await client.refused(path, GENERATE, 401))["code"] == "invalid_api_key"
        for path, status in (("/v1/models", 401), ("/nothing", 401), ("/health", 200), ("/metrics", 200)):
            assert (await client.get(path))[0] == status
        for given, status in (
            ("Bearer secret", 200),
            ("Bearer other", 401),
            ("secret", 401),
            ("Bearer é", 401),
        ):
            client.session.headers["Authorization"] = given
            assert (await client.post("/generate", GENERATE))[0] == status
    assert len(engine.requests) == 1


async def test_web_pages_of_others_are_refused() -> None:
    engine = ScriptedEngine()
    async with serving(engine, access=Access(allowed_hosts=frozenset(["lab.example"]))) as client:
        for headers, status in (
            ({"Origin": "http://evil.example"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Host": "evil.example"}, 403),
            ({"Host": "lab.example:30000"}, 200),
            ({"Origin": client.url}, 200),
        ):
            assert (await client.post("/generate", GENERATE, headers=headers))[0] == status
    assert len(engine.requests) == 2


async def test_other_machines_are_let_in_by_a_key_or_when_asked_for() -> None:
    with pytest.raises(ConfigError, match="API key"):
        await (await server_of(ScriptedEngine(), host="0.0.0.0")).start()
    for access in (Access("secret"), Access(insecure=True)):
        async with await server_of(ScriptedEngine(), host="0.0.0.0", access=access):
            pass


async def test_an_address_that_cannot_be_had_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 70000, -1):
            with pytest.raises(ConfigError):
                await (await server_of(ScriptedEngine(), port=port)).start()


async def test_requests_that_are_none() -> None:
    async with serving(ScriptedEngine()) as client:
        assert "/v2/x" in (await client.refused("/v2/x", {}, 404))["message"]
        status, answer = await client.get("/v1/chat/completions")
        assert (status, answer["error"]["message"]) == (405, "/v1/chat/completions takes POST, not GET")
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"):
            for body in (b"", b"{", b"[]", b"\xff\xfe", b"null"):
                assert "body" in (await client.refused(path, body))["message"]
        large = b'{"text": "' + b"a" * MAX_BODY + b'"}'
        assert str(MAX_BODY) in (await client.refused("/generate", large, 413))["message"]
        assert (await client.post("/generate", GENERATE))[0] == 200


async def test_a_text_that_cannot_fit_is_refused_without_encoding_it() -> None:
    engine = ScriptedEngine()
    engine.capabilities = replace(engine.capabilities, max_model_len=100)
    async with serving(engine) as client:
        assert (await client.refused("/generate", {"text": "a" * 10**6}))["code"] == "context_length_exceeded"


async def test_a_client_that_goes_away_aborts_its_request() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    async with serving(engine) as client:
        chat = {"messages": QUESTION, "n": 3}
        async with aiohttp.ClientSession() as session:
            tasks = [
                asyncio.create_task(session.post(client.url + path, json=body))
                for path, body in (("/generate", GENERATE), ("/v1/chat/completions", chat))
            ]
            await until(lambda: engine.in_flight == 4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: engine.in_flight == 0)
        _, load = await client.get("/get_load")
    assert load == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0}]
    assert not engine.completions


async def test_a_full_queue_is_a_503_with_a_time_to_wait() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    async with serving(engine, max_queue=1) as client:
        first = asyncio.create_task(client.post("/generate", {**GENERATE, "rid": "first"}))
        await until(lambda: engine.in_flight == 1)
        error = await client.refused("/generate", GENERATE, 503)
        assert (error["type"], client.headers["Retry-After"]) == ("overloaded_error", "1")
        await client.post("/abort_request", {"rid": "first"})
        await first


async def test_faults_of_the_engine_are_5xx_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.fail("transient", TransientEngineError("busy"))
    engine.fail("bug", ZeroDivisionError("division by zero"))
    async with serving(engine) as client:
        error = await client.refused("/generate", {**GENERATE, "rid": "transient"}, 500)
        assert (error["message"], error["type"]) == ("busy", "server_error")
        with caplog.at_level(logging.ERROR, "rollstream"):
            error = await client.refused("/generate", {**GENERATE, "rid": "bug"}, 500)
    assert "ZeroDivisionError" in error["message"]
    assert "Traceback" not in error["message"]
    assert "Traceback" in caplog.text


async def test_a_stop_answers_who_waits_with_503() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    server = await server_of(engine)
    client = Client(await server.start())
    waiting = [
        asyncio.create_task(client.refused(path, body, 503))
        for path, body in (("/generate", GENERATE), ("/v1/completions", {"prompt": "1", "stream": True}))
    ]
    await until(lambda: engine.in_flight == 2)
    await server.stop()
    for task in waiting:
        assert (await task)["message"] == "the server is shutting down"
    with pytest.raises(OSError):
        await client.get("/health")
    await client.session.close()
    assert not engine.started
