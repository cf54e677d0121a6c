"""verl's calls of a server's actor, before a stub server over HTTP."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import orjson
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, EngineError
from rollstream.integrations.verl.server import ReplicaServer, ServerOptions
from rollstream.testing.scripted import ScriptedEngine
from tests.faults.runs import stub_server
from tests.support.until import until


def read(custom: Any, **more: Any) -> ServerOptions:
    lengths = {"prompt_length": 32, "response_length": 16, "max_model_len": None}
    rollout = SimpleNamespace(custom=custom, **lengths, **more)
    return ServerOptions.read(rollout, str(MODEL_PATH))


def server_of(options: ServerOptions) -> ReplicaServer:
    return ReplicaServer(options.lengths, options=options)


VERLS = {
    "temperature": 1.0,
    "top_p": 1,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}


def stats(url: str) -> dict[str, int]:
    with urlopen(f"{url}/stub/stats", timeout=10) as answer:
        seen: dict[str, int] = orjson.loads(answer.read())
    return seen


def in_flight(url: str) -> int:
    return stats(url)["in_flight"]


def requests(url: str) -> int:
    """Those that a stub server has had."""
    return stats(url)["requests"]


@pytest.fixture
def latency_s() -> float:
    return 0.2


@pytest.fixture
async def options(latency_s: float) -> AsyncIterator[ServerOptions]:
    with stub_server("--latency", f"fixed:{latency_s}") as url:
        yield read({"urls": [url], "engine": "sglang"})


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        (None, "urls"),
        ({"urls": "http://x"}, "urls"),
        ({"urls": ["http://x"], "engine": "openai"}, "engine"),
        ({"urls": ["http://x"], "url": "http://y"}, "`url`"),
    ],
)
def test_what_cannot_be_asked(custom: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(custom)


async def test_tokens_in_tokens_out(options: ServerOptions) -> None:
    server = server_of(options)
    await server.start()
    try:
        given = await server.generate([5, 6, 7], dict(VERLS), "a")
        assert given.token_ids and len(given.token_ids) == len(given.log_probs or [])
        assert given.stop_reason == "completed"
        assert given.extra_fields["global_steps"] == 0
        assert given.extra_fields["finish_reason"] in ("stop", "length")
        with pytest.raises(EngineError, match="no videos"):
            await server.generate([5], dict(VERLS), "b", video_data=["v"])
        assert await server.health()
    finally:
        await server.close()


@pytest.mark.parametrize("latency_s", [2.0])
async def test_requests_are_aborted_and_held_until_resumed(options: ServerOptions) -> None:
    server = server_of(options)
    await server.start()
    try:
        asked = asyncio.ensure_future(server.generate([5, 6, 7], dict(VERLS), "a"))
        await until(lambda: in_flight(options.urls[0]))
        await server.abort_all_requests()
        given = await asked
        assert given.stop_reason == "aborted"
        assert len(given.token_ids) == len(given.log_probs or [])

        held = asyncio.ensure_future(server.generate([5, 6, 7], dict(VERLS), "b"))
        done, _ = await asyncio.wait({held}, timeout=0.4)
        assert not done
        await server.resume_generation()
        assert (await held).stop_reason == "completed"

        await server.abort_all_requests(reject_request=True)
        assert (await server.generate([5], dict(VERLS), "c")).stop_reason == "aborted"
    finally:
        await server.close()


async def test_a_request_whose_images_are_read_is_held_as_well(
    options: ServerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, may_go_on = threading.Event(), threading.Event()

    def read(image: Any) -> str:
        reads.set()
        may_go_on.wait(60)
        return "an image"

    monkeypatch.setattr("rollstream.integrations.verl.server.encode_for_engine", read)
    server = server_of(options)
    await server.start()
    try:
        asked = asyncio.ensure_future(server.generate([5], dict(VERLS), "a", image_data=["an image"]))
        await until(reads.is_set)
        await server.abort_all_requests(reject_request=True)
        may_go_on.set()
        assert (await asked).stop_reason == "aborted"
        assert not requests(options.urls[0])
    finally:
        await server.close()


async def test_it_says_when_no_server_is_there(options: ServerOptions) -> None:
    deaf = server_of(replace(options, urls=("http://127.0.0.1:9",)))
    assert not await deaf.health()


async def test_raw_log_probs_of_another_distribution_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = ScriptedEngine()
    assert raw.capabilities.logprobs == "raw"
    monkeypatch.setattr("rollstream.integrations.verl.server.create_engine", lambda *_, **__: raw)
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1}
    with pytest.raises(ConfigError, match=r"temperature.*0\.7"):
        await server_of(read({"urls": ["http://x"]}, **sampling, calculate_log_probs=True)).start()
    await server_of(read({"urls": ["http://x"]}, **sampling, calculate_log_probs=False)).start()
