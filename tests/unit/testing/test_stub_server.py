"""The stub server: its own routes, and what rollstream's client hears from it."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import EngineError
from rollstream.testing.scripted import AnswerRule, ScriptedEngine, ScriptedRequest
from rollstream.testing.stub_answers import book_rule
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import Completion, SamplingParams
from tests.support.until import until

COMMAND = [sys.executable, "-m", "rollstream.testing.stub_server"]
FOREVER = Latency("fixed", 1e6)
SAMPLING = SamplingParams(
    max_tokens=24, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop=("\n",), stop_token_ids=(500, 501)
)


def query(prompt: list[int], max_tokens: int = 20, **rest: object) -> dict[str, Any]:
    params = {"max_new_tokens": max_tokens, "sampling_seed": 1}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **rest}


async def post(url: str, body: Any, path: str = "/generate") -> tuple[int, Any]:
    async with aiohttp.ClientSession(url) as client, client.post(path, json=body) as response:
        return response.status, json.loads(await response.read() or b"null")


async def get(url: str, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession(url) as client, client.get(path) as response:
        return response.status, json.loads(await response.read() or b"null")


@asynccontextmanager
async def client_of(server: StubServer) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine([server.url])
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def ask(server: StubServer, prompt: list[int], sampling: SamplingParams = SAMPLING) -> Completion:
    async with client_of(server) as engine:
        return await engine.generate(prompt, sampling, request_id="a")


def count_up(request: ScriptedRequest) -> list[int]:
    return list(range(10))


async def test_an_answer_goes_on_from_the_tokens_that_stand_after_the_prompt() -> None:
    async with StubServer(book_rule(30, prompt_tokens=3)) as server:
        whole = server.book.answer([1, 2, 3], 1, 30)
        for begun, most, end, reason in ((0, 64, 30, "stop"), (20, 44, 30, "stop"), (20, 4, 24, "length")):
            _, reply = await post(server.url, query([1, 2, 3, *whole[0][:begun]], most))
            meta = reply["meta_info"]
            assert (reply["output_ids"], meta["finish_reason"]["type"]) == (whole[0][begun:end], reason)
            assert [entry[0] for entry in meta["output_token_logprobs"]] == whole[1][begun:end]
        assert server.stats.tokens == 44


async def test_max_running_queues_the_rest() -> None:
    async with StubServer(latency=FOREVER, max_running=2) as server:
        tasks = [asyncio.create_task(post(server.url, query([i]))) for i in range(6)]
        await until(lambda: server.stats.in_flight == 6)
        _, load = await get(server.url, "/get_load")
        assert load == [{"dp_rank": 0, "num_reqs": 6, "num_waiting_reqs": 4}]
        await post(server.url, {"abort_all": True}, "/abort_request")
        for _, reply in await asyncio.gather(*tasks):
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_process_prints_its_url_and_stops_on_sigterm_or_dies_when_told() -> None:
    for options, code in ((["--response-tokens", "4"], 0), (["--die-after", "1"], -signal.SIGKILL)):
        process = await asyncio.create_subprocess_exec(*COMMAND, *options, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        line = json.loads(await process.stdout.readline())
        assert (line["url"].startswith("http://127.0.0.1:"), line["pid"]) == (True, process.pid)
        assert (await post(line["url"], query([1])))[0] == 200
        if code == 0:
            process.send_signal(signal.SIGTERM)
        else:
            with pytest.raises(aiohttp.ClientConnectionError):
                await post(line["url"], query([1]))
        assert await asyncio.wait_for(process.wait(), 60) == code


async def test_it_answers_over_the_wire_as_the_scripted_engine_does() -> None:
    tokenizer = load_tokenizer(str(MODEL_PATH))
    rule = answer_by_text(tokenizer, lambda prompt: "five" if "2 + 3" in prompt else "what?")
    prompt = tokenizer.render([{"role": "user", "content": "2 + 3 ="}])
    scripted = ScriptedEngine(rule)
    await scripted.start()
    async with StubServer(rule) as server:
        for sampling in (
            replace(SAMPLING, stop=()),
            SamplingParams(2, seed=4),
            SamplingParams(24, logprobs=False),
        ):
            here = await scripted.generate(prompt, sampling, request_id="a")
            assert await ask(server, prompt, sampling) == here
    assert tokenizer.decode(here.token_ids) == "five"


@pytest.mark.parametrize("fault", ["error", "truncate", "short_logprobs", "bad_ids", "wrong_rid", "drop"])
async def test_faults_apply_to_a_rules_answers(fault: str) -> None:
    async with StubServer(count_up, faults=Faults(**{fault: 1.0})) as server:
        with pytest.raises(EngineError):
            await ask(server, [1, 2])
        server.faults = Faults()
        assert (await ask(server, [1, 2])).token_ids == list(range(10))


async def thinks(request: ScriptedRequest) -> list[int]:
    await asyncio.Event().wait()
    return []


@pytest.mark.parametrize(("rule", "latency"), [(count_up, FOREVER), (thinks, Latency())])
async def test_an_abort_cuts_a_rules_answer(rule: AnswerRule, latency: Latency) -> None:
    """Also while the rule is at work."""
    async with StubServer(rule, latency=latency) as server, client_of(server) as engine:
        task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
        await until(lambda: server.stats.in_flight)
        await engine.abort("a")
        assert (await task).finish_reason == "abort"
        assert (await task).token_ids == []
