"""What all routes share: keys, errors, sizes, clients that go away, engines that fail."""

import asyncio
import logging
from dataclasses import replace

import aiohttp
import pytest

from rollstream.errors import TransientEngineError
from rollstream.serving.app import MAX_BODY
from rollstream.testing.scripted import ScriptedEngine
from tests.unit.serving.served import eventually, serving

GENERATE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
FOREVER = 1e6


async def test_a_key_is_asked_for_but_not_of_monitoring() -> None:
    engine = ScriptedEngine()
    async with serving(engine, api_key="secret") as client:
        for path in ("/generate", "/v1/completions", "/abort_request", "/pause_generation"):
            assert (await client.refused(path, GENERATE, 401))["code"] == "invalid_api_key"
        assert (await client.get("/v1/models"))[0] == 401
        assert (await client.get("/nothing"))[0] == 401
        assert (await client.get("/health"))[0] == 200
        assert (await client.get("/metrics"))[0] == 200
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
    async with serving(engine, allowed_hosts=["lab.example"]) as client:
        for headers, status in (
            ({"Origin": "http://evil.example"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Host": "evil.example"}, 403),
            ({"Host": "lab.example:30000"}, 200),
            ({"Origin": client.url}, 200),
        ):
            async with client.session.post(
                f"{client.url}/generate", json=GENERATE, headers=headers
            ) as answer:
                assert answer.status == status
    assert len(engine.requests) == 2


async def test_unknown_routes_and_methods() -> None:
    async with serving(ScriptedEngine()) as client:
        assert "/v2/x" in (await client.refused("/v2/x", {}, 404))["message"]
        status, answer = await client.get("/v1/chat/completions")
        assert (status, answer["error"]["message"]) == (405, "/v1/chat/completions takes POST, not GET")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
async def test_broken_bodies(path: str, body: bytes) -> None:
    async with serving(ScriptedEngine()) as client:
        assert "body" in (await client.refused(path, body))["message"]


async def test_a_body_that_is_too_large_is_a_413() -> None:
    async with serving(ScriptedEngine()) as client:
        body = b'{"text": "' + b"a" * MAX_BODY + b'"}'
        assert str(MAX_BODY) in (await client.refused("/generate", body, 413))["message"]
        assert (await client.post("/generate", GENERATE))[0] == 200


async def test_a_text_that_cannot_fit_is_refused_without_encoding_it() -> None:
    engine = ScriptedEngine()
    engine.capabilities = replace(engine.capabilities, max_model_len=100)
    async with serving(engine) as client:
        error = await client.refused("/generate", {"text": "a" * 10**6})
        assert (error["code"], "1000000 characters" in error["message"]) == ("context_length_exceeded", True)
        assert "max_model_len 100" in (await client.refused("/generate", {"text": "1" * 60_000}))["message"]


async def test_a_client_that_goes_away_aborts_its_request() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    async with serving(engine) as client:
        chat = {"messages": [{"role": "user", "content": "1"}], "n": 3}
        async with aiohttp.ClientSession() as session:
            tasks = [
                asyncio.create_task(session.post(client.url + path, json=body))
                for path, body in (("/generate", GENERATE), ("/v1/chat/completions", chat))
            ]
            await eventually(lambda: engine.in_flight == 4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: engine.in_flight == 0)
        _, load = await client.get("/get_load")
    assert load == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0}]
    assert not engine.completions


async def test_a_full_queue_is_a_503_with_a_time_to_wait() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    async with serving(engine, max_queue=1) as client:
        first = asyncio.create_task(client.post("/generate", {**GENERATE, "rid": "first"}))
        await eventually(lambda: engine.in_flight == 1)
        error = await client.refused("/generate", GENERATE, 503)
        assert (error["type"], client.headers["Retry-After"]) == ("overloaded_error", "1")
        await client.post("/abort_request", {"rid": "first"})
        status, reply = await first
    assert (status, reply["meta_info"]["finish_reason"]["type"]) == (200, "abort")


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
