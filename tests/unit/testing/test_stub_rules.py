"""A stub server that answers by a rule, as rollstream's own client sees it."""

import asyncio
from dataclasses import replace

import pytest

from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import EngineError, TransientEngineError
from rollstream.testing.scripted import AnswerRule, ScriptedEngine, ScriptedRequest
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import Completion, SamplingParams

SAMPLING = SamplingParams(
    max_tokens=24, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop=("\n",), stop_token_ids=(500, 501)
)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(str(MODEL_PATH))


async def ask(server: StubServer, prompt: list[int], sampling: SamplingParams = SAMPLING) -> Completion:
    engine = SGLangEngine([server.url])
    await engine.start()
    try:
        return await engine.generate(prompt, sampling, request_id="a")
    finally:
        await engine.close()


async def test_it_answers_over_the_wire_as_the_scripted_engine_does(tokenizer: ChatTokenizer) -> None:
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
        await asyncio.sleep(0)
        return [9]

    async with StubServer(rule) as server:
        await ask(server, [1, 2, 3])
    assert [(one.prompt_ids, one.sampling) for one in seen] == [([1, 2, 3], SAMPLING)]


async def test_a_whole_completion_is_sent_as_it_is() -> None:
    whole = Completion([4, 5], [-0.5, -0.25], "length", cached_prompt_tokens=2)
    async with StubServer(lambda request: whole, weight_version="3") as server:
        got = await ask(server, [1, 2, 3])
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([4, 5], [-0.5, -0.25], "length")
    assert (got.cached_prompt_tokens, got.policy_versions) == (2, [(0, 3)])
    async with StubServer(lambda request: Completion([4], None, "stop")) as server:
        with pytest.raises(TransientEngineError, match="no log-probs"):
            await ask(server, [1])


@pytest.mark.parametrize("fault", ["error", "truncate", "short_logprobs", "bad_ids", "wrong_rid", "drop"])
async def test_faults_apply_to_a_rules_answers(fault: str) -> None:
    async with StubServer(_count_up, faults=Faults(**{fault: 1.0})) as server:
        with pytest.raises(EngineError):
            await ask(server, [1, 2])
        server.faults = Faults()
        assert (await ask(server, [1, 2])).token_ids == list(range(10))


async def test_an_abort_cuts_a_rules_answer() -> None:
    async with StubServer(_count_up, latency=Latency("fixed", 60.0)) as server:
        engine = SGLangEngine([server.url])
        await engine.start()
        task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
        while not server.stats.in_flight:
            await asyncio.sleep(0.001)
        await engine.abort("a")
        completion = await task
        await engine.close()
    assert completion.finish_reason == "abort"
    assert completion.token_ids == list(range(10))[: len(completion.token_ids)] != list(range(10))


async def test_what_a_rule_raises_is_said_to_the_client() -> None:
    rules: list[AnswerRule] = [_raise, lambda request: 3]  # type: ignore[list-item,return-value]
    for rule, words in zip(rules, ["LookupError: no answer", "TypeError"], strict=True):
        async with StubServer(rule) as server:
            with pytest.raises(TransientEngineError, match=words):
                await ask(server, [1])


def _count_up(request: ScriptedRequest) -> list[int]:
    return list(range(10))


def _raise(request: ScriptedRequest) -> list[int]:
    raise LookupError("no answer")
