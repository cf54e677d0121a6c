import asyncio
import base64
import hashlib
import json
import signal
import statistics
import subprocess
import sys

import aiohttp
import pytest

from rollstream.errors import ConfigError
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubServer


def query(prompt: list[int], max_tokens: int = 20, **rest: object) -> dict[str, object]:
    params = {"max_new_tokens": max_tokens, "sampling_seed": 1}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **rest}


async def test_answers_are_those_of_the_book() -> None:
    async with StubServer(response_tokens=20) as server, aiohttp.ClientSession(server.url) as client:
        async with client.post("/generate", json=query([1, 2], max_tokens=64, rid="x")) as response:
            reply = await response.json()
        ids, logprobs = server.book.answer([1, 2], 1, 20)
        assert reply["output_ids"] == ids
        assert reply["meta_info"]["output_token_logprobs"] == [
            [lp, i, None] for lp, i in zip(logprobs, ids, strict=True)
        ]
        assert reply["meta_info"]["id"] == "x"
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"
        async with client.get("/stub/stats") as response:
            assert (await response.json())["answered"] == 1
        for path in ("/health", "/health_generate", "/get_model_info", "/get_server_info"):
            async with client.get(path) as response:
                assert response.status == 200


async def test_faults_are_set_over_http_and_bad_input_is_a_400() -> None:
    async with StubServer() as server, aiohttp.ClientSession(server.url) as client:
        for bad in (query([]), query([10**6]), {"input_ids": [1]}):
            async with client.post("/generate", json=bad) as response:
                assert response.status == 400
        async with client.post("/stub/faults", json={"error": 1.0, "error_status": 503, "unhealthy": True}):
            pass
        async with client.post("/generate", json=query([1])) as response:
            assert response.status == 503
        async with client.get("/health") as response:
            assert response.status == 503


async def test_max_running_queues_the_rest() -> None:
    server = StubServer(latency=Latency("fixed", 0.05), max_running=2)
    async with server, aiohttp.ClientSession(server.url) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def ask(i: int) -> None:
            async with client.post("/generate", json=query([i])) as response:
                assert response.status == 200

        await asyncio.gather(*map(ask, range(6)))
        assert loop.time() - began > 0.14
        assert server.stats.peak_in_flight == 6


def test_fault_shares_and_latency_draws_are_what_was_asked_for() -> None:
    faults = Faults(error=0.25, hang=0.25)
    assert [faults.choose(x) for x in (0.0, 0.2, 0.3, 0.6)] == ["error", "error", "hang", None]
    keys = [str(i).encode() for i in range(4000)]
    lognormal = Latency.parse("lognormal:0.1,0.5")
    assert statistics.median(map(lognormal.draw, keys)) == pytest.approx(0.1, rel=0.1)
    assert lognormal.draw(b"a") == lognormal.draw(b"a")
    pareto = Latency.parse("pareto:0.1,1.5", maximum=2.0)
    draws = list(map(pareto.draw, keys))
    assert min(draws) >= 0.1
    assert max(draws) == 2.0
    assert statistics.median(draws) == pytest.approx(0.1 * 2 ** (1 / 1.5), rel=0.1)
    with pytest.raises(ConfigError):
        Latency.parse("gauss:1,2")


def test_the_process_prints_its_url_and_stops_on_sigterm() -> None:
    command = [
        sys.executable,
        "-m",
        "rollstream.testing.stub_server",
        "--port",
        "0",
        "--response-tokens",
        "4",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert line["url"].startswith("http://127.0.0.1:")
        assert line["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


async def test_die_after_kills_the_process() -> None:
    command = [sys.executable, "-m", "rollstream.testing.stub_server", "--die-after", "1"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    url = json.loads(await process.stdout.readline())["url"]
    async with aiohttp.ClientSession(url) as client:
        async with client.post("/generate", json=query([1])) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.post("/generate", json=query([1]))
    assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGKILL


async def test_images_are_counted_told_apart_and_part_of_the_question() -> None:
    red, blue = (base64.b64encode(data).decode() for data in (b"red", b"blue"))
    async with StubServer(images=True) as server, aiohttp.ClientSession(server.url) as client:
        answers = []
        for images in (None, [red, f"data:image/png;base64,{blue}"], [blue, red], red):
            async with client.post("/generate", json=query([1, 2], image_data=images)) as response:
                answers.append(tuple((await response.json())["output_ids"]))
        async with client.post("/generate", json=query([1, 2], image_data=[blue, red])) as response:
            assert tuple((await response.json())["output_ids"]) == answers[2]
        async with client.get("/stub/stats") as response:
            stats = await response.json()
        async with client.get("/get_model_info") as response:
            assert (await response.json())["has_image_understanding"] is True
        for bad in (["?"], [3], 3):
            async with client.post("/generate", json=query([1, 2], image_data=bad)) as response:
                assert response.status == 400
    assert len(set(answers)) == 4
    assert stats["images"] == 7
    red, blue = (hashlib.sha256(data).hexdigest() for data in (b"red", b"blue"))
    assert stats["image_digests"] == [red, blue, blue, red, red, blue, red]


async def test_a_model_without_images_refuses_them() -> None:
    async with (
        StubServer() as server,
        aiohttp.ClientSession(server.url) as client,
        client.post("/generate", json=query([1], image_data=["eHg="])) as response,
    ):
        assert response.status == 400
        assert "understands no images" in await response.text()
