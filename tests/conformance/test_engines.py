"""What an engine promises, and every engine keeps.

The same model behind all of them: greedy ids are the same everywhere, log-probs are within 1e-3 of a plain
forward pass. An engine that lacks something says so in its capabilities; then, and only then, it is let off.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Engine, ScoresIds
from rollstream.engine.continuation import PartialCompletion
from rollstream.errors import EngineError
from rollstream.sampling import PLAIN
from rollstream.trajectory import Completion, SamplingParams
from tests.conformance.engines import NAMES, missing, started
from tests.conformance.reference import END, Reference
from tests.support.forward import answer
from tests.support.until import PATIENCE_S

pytest.importorskip("torch")
pytest.importorskip("openvino_genai")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

GREEDY = SamplingParams(24, temperature=0.0)
HOT = SamplingParams(40, temperature=1.5)
LONG = SamplingParams(1500, temperature=0.0, ignore_eos=True)
TOLERANCE = 1e-3
"""Nats. Float32 kernels differ by 1e-5; half precision would differ by more than this."""


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL_PATH)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=NAMES)
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: Reference
) -> AsyncIterator[Engine]:
    if reason := missing(request.param):
        pytest.skip(reason)
    async with started(request.param, tmp_path_factory.mktemp("engine"), reference) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    sums = [(i * 13 % 90 + 10, i * 31 % 90 + 10) for i in range(20)]
    texts = [
        "<|im_start|>user\nState the final answer to the following arithmetic problem: "
        f"{a} + {b} =<|im_end|>\n<|im_start|>assistant\n"
        for a, b in sums
    ]
    return [reference.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


async def test_it_says_what_it_can_do(engine: Engine) -> None:
    found = engine.capabilities
    assert found.token_ids
    assert found.logprobs in ("raw", "processed")
    assert (found.vocab_size, found.max_model_len) == (512, 4096)
    assert isinstance(engine, Engine)
    assert await engine.health()


async def test_greedy_answers_are_those_of_a_forward_pass(
    engine: Engine, prompts: list[list[int]], reference: Reference
) -> None:
    for prompt, completion in zip(prompts, await answer(engine, [(p, GREEDY) for p in prompts]), strict=True):
        ids, logprobs = reference.score(prompt, completion.token_ids)
        assert completion.token_ids == ids
        assert completion.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
        assert (completion.finish_reason, ids[-1]) == ("stop", END)  # the end token is part of it
        assert completion.policy_versions == [(0, 0)]


async def test_logprobs_are_of_the_kind_it_says(
    engine: Engine, prompts: list[list[int]], reference: Reference
) -> None:
    is_raw = engine.capabilities.logprobs == "raw"  # then also under top-p and top-k
    temperature, how = (1.0, replace(HOT, top_p=0.9, top_k=50)) if is_raw else (HOT.temperature, HOT)
    answers = await answer(engine, [(prompt, how) for prompt in prompts])
    for prompt, completion in zip(prompts, answers, strict=True):
        _, logprobs = reference.score(prompt, completion.token_ids, temperature)
        assert completion.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
    assert len({tuple(completion.token_ids) for completion in answers}) > 15
    without = await engine.generate(prompts[0], replace(HOT, logprobs=False), request_id="a")
    assert without.logprobs is None and without.token_ids


async def test_penalties_and_min_p(
    request: pytest.FixtureRequest, engine: Engine, prompts: list[list[int]], reference: Reference
) -> None:
    if "stub" in request.node.name or not set(PLAIN) <= set(engine.capabilities.extra_sampling):
        pytest.skip("it says it takes none")
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 1.1}
    how = replace(GREEDY, ignore_eos=True, extra=penalties)
    plain = replace(how, extra={})
    narrow = replace(HOT, max_tokens=24, ignore_eos=True, extra={"min_p": 0.999})  # the likeliest one
    answers = await answer(engine, [(prompts[0], each) for each in (how, plain, narrow)])
    wanted, raw = reference.penalized(prompts[0], 24, **penalties)
    assert answers[0].token_ids == wanted != answers[1].token_ids == answers[2].token_ids
    if engine.capabilities.logprobs == "raw":
        assert answers[0].logprobs == pytest.approx(raw, abs=TOLERANCE)


async def test_log_probs_of_given_ids(
    request: pytest.FixtureRequest, engine: Engine, reference: Reference
) -> None:
    if not isinstance(engine, ScoresIds) or not engine.capabilities.scores:
        pytest.skip("it says it gives none")
    ids = [3 + at * 37 % 500 for at in range(600)]  # more than a step takes
    scores = (await engine.score(ids, 5)).logprobs
    if "stub" not in request.node.name:  # whose are made up
        assert scores == pytest.approx(reference.score(ids[:5], ids[5:])[1], abs=TOLERANCE)
    assert len(scores) == 595
    assert len((await engine.score(ids[:2])).logprobs) == 1


async def test_the_likeliest_ids_in_the_places_of_given_ones(
    request: pytest.FixtureRequest, engine: Engine, reference: Reference
) -> None:
    if not isinstance(engine, ScoresIds) or not engine.capabilities.score_top_k:
        pytest.skip("it says it knows none")
    ids = [3 + at * 37 % 500 for at in range(300)]
    for start, top_k in ((1, 1), (5, 8)):
        scores = await engine.score(ids, start, top_k)
        assert len(scores.top_ids) == len(scores.logprobs) == len(ids) - start
        assert {len(one) for one in (*scores.top_ids, *scores.top_logprobs)} == {top_k}
        assert scores.logprobs == pytest.approx((await engine.score(ids, start)).logprobs, abs=TOLERANCE)
        if "stub" in request.node.name:  # whose are made up
            continue
        wanted_ids, wanted = reference.top(ids, start, top_k)
        for place, values in enumerate(wanted):
            assert scores.top_logprobs[place] == pytest.approx(values, abs=TOLERANCE)
        same = sum(one == other for one, other in zip(scores.top_ids, wanted_ids, strict=True))
        assert same > 0.95 * len(wanted), "but for those that are equally likely"


async def test_a_seed_repeats_whatever_else_is_in_flight(engine: Engine, prompts: list[list[int]]) -> None:
    if not engine.capabilities.seeds:
        pytest.skip("it says it has no seeds")
    asked = [(prompts[i % 4], replace(HOT, seed=i)) for i in range(16)]
    together = await answer(engine, asked)
    alone = [await engine.generate(prompt, how, request_id="a") for prompt, how in asked]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    assert len({tuple(c.token_ids) for c in together}) > 10


async def test_tokens_at_most(engine: Engine, prompts: list[list[int]], reference: Reference) -> None:
    whole = (await reference.answer(prompts[0], replace(LONG, max_tokens=17))).token_ids
    for limit in (1, 2, 17):
        cut = await engine.generate(prompts[0], replace(LONG, max_tokens=limit), request_id="a")
        assert (cut.token_ids, cut.finish_reason) == (whole[:limit], "length")
        assert len(cut.logprobs or []) == limit


async def test_stop_token_ids(engine: Engine, prompts: list[list[int]], reference: Reference) -> None:
    if not engine.capabilities.stop_token_ids:
        pytest.skip("it says it has none")
    whole = (await reference.answer(prompts[0], GREEDY)).token_ids
    wanted = whole[1]
    assert wanted != END
    stopped = await engine.generate(prompts[0], replace(GREEDY, stop_token_ids=(wanted,)), request_id="a")
    assert (stopped.token_ids, stopped.finish_reason) == (whole[: whole.index(wanted) + 1], "stop")
    if engine.capabilities.stop_token_ids_with_ignore_eos:
        how = replace(LONG, max_tokens=40, stop_token_ids=(wanted,))
        assert (await engine.generate(prompts[0], how, request_id="a")).token_ids == stopped.token_ids


async def test_stop_strings(engine: Engine, prompts: list[list[int]], reference: Reference) -> None:
    if not engine.capabilities.stop_strings:
        pytest.skip("it says it has none")
    whole = (await reference.answer(prompts[0], replace(LONG, max_tokens=200))).token_ids
    for text in (reference.text(whole[5:8]), reference.text([END])):  # over several tokens; a special one
        how = replace(LONG, max_tokens=200, stop=("none of this", text))
        cut = await engine.generate(prompts[0], how, request_id="a")
        assert cut.finish_reason == "stop"
        assert cut.token_ids == whole[: len(cut.token_ids)]
        assert text in reference.text(cut.token_ids)
        assert text not in reference.text(cut.token_ids[:-1])
        assert len(cut.logprobs or []) == len(cut.token_ids)


async def test_64_at_once_are_not_mixed_up(
    engine: Engine, prompts: list[list[int]], reference: Reference
) -> None:
    asked = [(prompts[i % 20] + [5] * (i % 7), replace(GREEDY, max_tokens=4 + i % 21)) for i in range(64)]
    for (prompt, how), completion in zip(asked, await answer(engine, asked), strict=True):
        ids, logprobs = reference.score(prompt, completion.token_ids)
        assert completion.token_ids == ids
        assert completion.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
        assert len(ids) == how.max_tokens or completion.finish_reason == "stop"


async def test_an_abort_gives_what_there_is_and_it_goes_on_from_there(
    engine: Engine, prompts: list[list[int]], reference: Reference
) -> None:
    prompt = prompts[0]
    part = Completion([], [], "length")
    for seconds in (0.05, 0.2, 0.8):
        task = asyncio.create_task(engine.generate(prompt, LONG, request_id="a"))
        await asyncio.sleep(seconds)
        await engine.abort("a")
        part = await asyncio.wait_for(task, PATIENCE_S)
        if part.token_ids:
            break
    assert len(part.logprobs or []) == len(part.token_ids)
    assert part.finish_reason == "abort" or len(part.token_ids) == LONG.max_tokens
    request = PartialCompletion(prompt, replace(LONG, max_tokens=len(part.token_ids) + 50))
    request.add(part)
    rest = await engine.generate(request.prompt_ids, request.sampling, request_id="a")
    whole = request.finish(rest)
    assert (len(rest.token_ids), whole.finish_reason) == (50, "length")
    ids, logprobs = reference.score(prompt, whole.token_ids)
    assert whole.token_ids == ids
    assert whole.logprobs == pytest.approx(logprobs, abs=TOLERANCE)


async def test_what_is_not_in_flight_can_be_aborted(engine: Engine, prompts: list[list[int]]) -> None:
    await engine.abort("never heard of")
    done = await engine.generate(prompts[0], GREEDY, request_id="a")
    await engine.abort("a")
    assert done.finish_reason == "stop"


async def test_cancelled_requests_leave_room(engine: Engine, prompts: list[list[int]]) -> None:
    for pause_s in (0, 0.05, 0.1):
        tasks = [
            asyncio.create_task(engine.generate(prompts[i % 20], LONG, request_id=str(i))) for i in range(32)
        ]
        await asyncio.sleep(pause_s)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # After a pause that the machine made longer, an engine has answered some of them, or all.
        assert all(task.cancelled() or (pause_s and len(task.result().token_ids)) for task in tasks)
    async with asyncio.timeout(PATIENCE_S):
        answers = await answer(engine, [(prompt, GREEDY) for prompt in prompts])
    assert {completion.finish_reason for completion in answers} == {"stop"}


async def test_bad_prompts_are_refused_alone(engine: Engine, prompts: list[list[int]]) -> None:
    bad = {"beyond the vocabulary": [1, 512], "negative": [1, -1], "empty": [], "too long": [5] * 4096}
    asked = [(prompts[0], GREEDY), *((prompt, GREEDY) for prompt in bad.values()), (prompts[1], GREEDY)]
    first, *refused, last = await asyncio.gather(
        *(engine.generate(prompt, how, request_id=str(i)) for i, (prompt, how) in enumerate(asked)),
        return_exceptions=True,
    )
    # Neither transient nor an outage: they are never sent again.
    assert dict(zip(bad, map(type, refused), strict=True)) == dict.fromkeys(bad, EngineError)
    for completion in (first, last):
        assert isinstance(completion, Completion) and completion.finish_reason == "stop"
