"""The stub server: its own routes, and what rollstream's client hears from it."""

import asyncio
import base64
import hashlib
import json
import signal
import statistics
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
from rollstream.errors import ConfigError, EngineError, TransientEngineError
from rollstream.testing.scripted import AnswerRule, ScriptedEngine, ScriptedRequest
from rollstream.testing.stub_answers import book_rule
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.testing.stub_work import StubWork
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


async def test_answers_are_those_of_the_book() -> None:
    async with StubServer(response_tokens=20) as server:
        _, reply = await post(server.url, query([1, 2], max_tokens=64, rid="x"))
        ids, logprobs = server.book.answer([1, 2], 1, 20)
        assert reply["output_ids"] == ids
        assert reply["meta_info"]["output_token_logprobs"] == [
            [lp, i, None] for lp, i in zip(logprobs, ids, strict=True)
        ]
        assert (reply["meta_info"]["id"], reply["meta_info"]["finish_reason"]["type"]) == ("x", "stop")
        assert (await get(server.url, "/stub/stats"))[1]["answered"] == 1
        for path in ("/health", "/health_generate", "/get_model_info", "/get_server_info"):
            assert (await get(server.url, path))[0] == 200


async def test_an_answer_goes_on_from_the_tokens_that_stand_after_the_prompt() -> None:
    async with StubServer(book_rule(30, prompt_tokens=3)) as server:
        whole = server.book.answer([1, 2, 3], 1, 30)
        for begun, most, end, reason in ((0, 64, 30, "stop"), (20, 44, 30, "stop"), (20, 4, 24, "length")):
            _, reply = await post(server.url, query([1, 2, 3, *whole[0][:begun]], most))
            meta = reply["meta_info"]
            assert (reply["output_ids"], meta["finish_reason"]["type"]) == (whole[0][begun:end], reason)
            assert [entry[0] for entry in meta["output_token_logprobs"]] == whole[1][begun:end]
        assert server.stats.tokens == 44


async def test_faults_are_set_over_http_and_bad_input_is_a_400() -> None:
    async with StubServer() as server:
        for bad in (query([]), query([10**6]), {"input_ids": [1]}):
            assert (await post(server.url, bad))[0] == 400
        faults = {"error": 1.0, "error_status": 503, "unhealthy": True}
        await post(server.url, faults, "/stub/faults")
        assert (await post(server.url, query([1])))[0] == 503
        assert (await get(server.url, "/health"))[0] == 503


async def test_max_running_queues_the_rest() -> None:
    async with StubServer(latency=FOREVER, max_running=2) as server:
        tasks = [asyncio.create_task(post(server.url, query([i]))) for i in range(6)]
        await until(lambda: server.stats.in_flight == 6)
        _, load = await get(server.url, "/get_load")
        assert load == [{"dp_rank": 0, "num_reqs": 6, "num_waiting_reqs": 4}]
        await post(server.url, {"abort_all": True}, "/abort_request")
        for _, reply in await asyncio.gather(*tasks):
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"


async def test_turns_are_taken_in_order_and_an_abort_lets_the_next_one_in() -> None:
    work = StubWork(2)
    tasks = {name: asyncio.create_task(work.do(name, 1e6)) for name in "abcd"}
    await asyncio.sleep(0)
    assert (work.running, work.waiting, work.names()) == (2, 2, list("abcd"))
    assert work.abort("c") and await tasks["c"] == 0.0  # it waits: nothing is done
    assert work.abort("a")
    share = await tasks["a"]
    assert share is not None and 0 < share < 1
    await asyncio.sleep(0)
    assert (work.running, work.names()) == (2, ["b", "d"])
    tasks["b"].cancel()
    await asyncio.wait([tasks["b"]])
    assert not work.abort("b")
    work.end_all()
    assert await tasks["d"] is None


def test_fault_shares_and_latency_draws_are_what_was_asked_for() -> None:
    faults = Faults(error=0.25, hang=0.25)
    assert [faults.choose(x) for x in (0.0, 0.2, 0.3, 0.6)] == ["error", "error", "hang", None]
    keys = [str(i).encode() for i in range(4000)]
    lognormal = Latency.parse("lognormal:0.1,0.5")
    assert statistics.median(map(lognormal.draw, keys)) == pytest.approx(0.1, rel=0.1)
    assert lognormal.draw(b"a") == lognormal.draw(b"a")
    pareto = Latency.parse("pareto:0.1,1.5", maximum=2.0)
    draws = list(map(pareto.draw, keys))
    assert (min(draws) >= 0.1, max(draws)) == (True, 2.0)
    assert statistics.median(draws) == pytest.approx(0.1 * 2 ** (1 / 1.5), rel=0.1)
    assert Latency("fixed", 1.0, token_s=0.5).draw(b"a", 4) == 3.0
    with pytest.raises(ConfigError):
        Latency.parse("gauss:1,2")


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


async def test_images_are_counted_told_apart_and_part_of_the_question() -> None:
    red, blue = (base64.b64encode(data).decode() for data in (b"red", b"blue"))
    async with StubServer(model=StubModel(images=True)) as server:
        answers = []
        for images in (None, [red, f"data:image/png;base64,{blue}"], [blue, red], red, [blue, red]):
            _, reply = await post(server.url, query([1, 2], image_data=images))
            answers.append(tuple(reply["output_ids"]))
        assert len(set(answers)) == 4 and answers[4] == answers[2]
        assert (await get(server.url, "/get_model_info"))[1]["has_image_understanding"] is True
        for bad in (["?"], [3], 3):
            assert (await post(server.url, query([1, 2], image_data=bad)))[0] == 400
        assert server.stats.images == 7
        red, blue = (hashlib.sha256(data).hexdigest() for data in (b"red", b"blue"))
        assert server.stats.image_digests == [red, blue, blue, red, red, blue, red]
    async with StubServer() as server:
        status, refusal = await post(server.url, query([1], image_data=["eHg="]))
        assert (status, "understands no images" in refusal["error"]["message"]) == (400, True)


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


async def test_the_rule_gets_what_was_sent() -> None:
    seen: list[ScriptedRequest] = []

    async def rule(request: ScriptedRequest) -> list[int]:
        seen.append(request)
        return [9]

    async with StubServer(rule) as server:
        await ask(server, [1, 2, 3])
    assert [(one.prompt_ids, one.sampling) for one in seen] == [([1, 2, 3], SAMPLING)]


async def test_a_whole_completion_is_sent_as_it_is() -> None:
    whole = Completion([4, 5], [-0.5, -0.25], "length", cached_prompt_tokens=2)
    async with StubServer(lambda request: whole) as server:
        server.weight_version = "3"
        got = await ask(server, [1, 2, 3])
    assert got == replace(whole, policy_versions=[(0, 3)])
    async with StubServer(lambda request: Completion([4], None, "stop")) as server:
        with pytest.raises(TransientEngineError, match="no log-probs"):
            await ask(server, [1])


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


@pytest.mark.parametrize(
    ("answer", "words"), [(LookupError("no answer"), "LookupError: no answer"), (3, "TypeError")]
)
async def test_what_a_rule_raises_is_said_to_the_client(answer: Any, words: str) -> None:
    def rule(request: ScriptedRequest) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    typed: AnswerRule = rule
    async with StubServer(typed) as server:
        with pytest.raises(TransientEngineError, match=words):
            await ask(server, [1])
