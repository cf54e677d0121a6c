import asyncio
from dataclasses import replace

import pytest

from rollstream.engine.base import Engine
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.trajectory import Completion, SamplingParams

SAMPLING = SamplingParams(max_tokens=16, seed=3)


async def started(engine: ScriptedEngine) -> ScriptedEngine:
    await engine.start()
    return engine


async def test_it_is_an_engine_and_its_answers_depend_on_prompt_and_seed_only() -> None:
    one, two = await started(ScriptedEngine()), await started(ScriptedEngine(latency=0.001))
    assert isinstance(one, Engine)
    first = await one.generate([1, 2], SAMPLING, request_id="a")
    again = await two.generate([1, 2], SAMPLING, request_id="b")
    other = await one.generate([1, 2], SamplingParams(max_tokens=16, seed=4), request_id="c")
    assert first == again != other
    assert len(first.token_ids) == len(first.logprobs or []) == 16
    assert first.finish_reason == "length"
    assert [request_id for request_id, _ in one.completions] == ["a", "c"]


async def test_rules_may_be_async_and_answer_with_ids_or_completions() -> None:
    async def rule(request: ScriptedRequest) -> list[int]:
        await asyncio.sleep(0)
        return [request.prompt_ids[0] + 1]

    engine = await started(ScriptedEngine(rule))
    completion = await engine.generate([7], SAMPLING, request_id="a")
    assert completion.token_ids == [8]
    assert completion.finish_reason == "stop"
    whole = Completion([1], None, "stop", cached_prompt_tokens=5)
    engine = await started(ScriptedEngine(lambda request: whole))
    assert await engine.generate([7], SAMPLING, request_id="a") == whole


async def test_faults_hit_the_chosen_requests_so_often() -> None:
    engine = await started(ScriptedEngine())
    engine.fail("a", TransientEngineError("busy"), times=2)
    engine.fail(lambda request: request.prompt_ids == [9], EngineError("never"), times=None)
    for _ in range(2):
        with pytest.raises(TransientEngineError, match="busy"):
            await engine.generate([1], SAMPLING, request_id="a")
    await engine.generate([1], SAMPLING, request_id="a")
    for _ in range(3):
        with pytest.raises(EngineError, match="never"):
            await engine.generate([9], SAMPLING, request_id="b")
    assert engine.in_flight == 0


async def test_an_outage_hits_what_is_in_flight_and_ends() -> None:
    engine = await started(ScriptedEngine(latency=30))
    task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
    await asyncio.sleep(0)
    assert engine.in_flight == 1
    engine.go_down()
    with pytest.raises(EngineUnavailableError):
        await task
    assert not await engine.health()
    engine.come_back()
    assert await engine.health()


async def test_abort_gives_a_part() -> None:
    engine = await started(ScriptedEngine(latency=30))
    task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
    await asyncio.sleep(0)
    await engine.abort("a")
    completion = await task
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.logprobs or []) < 16


async def test_cancelling_frees_the_place_and_bad_requests_are_refused() -> None:
    engine = await started(ScriptedEngine(latency=30))
    task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.in_flight == 0
    with pytest.raises(EngineError, match="empty"):
        await engine.generate([], SAMPLING, request_id="a")
    with pytest.raises(EngineError, match="vocabulary"):
        await engine.generate([512], SAMPLING, request_id="a")


async def test_images_are_recorded_and_refused_by_default() -> None:
    blind = await started(ScriptedEngine())
    with pytest.raises(EngineError, match="images"):
        await blind.generate([1], SAMPLING, request_id="a", images=["x"])
    engine = await started(ScriptedEngine(capabilities=replace(blind.capabilities, images=True)))
    await engine.generate([1], SAMPLING, request_id="a", images=["x", "y"])
    await engine.generate([1], SAMPLING, request_id="b")
    assert [request.images for request in engine.requests] == [("x", "y"), ()]


async def test_a_larger_vocabulary_is_played_on_request() -> None:
    engine = await started(ScriptedEngine(lambda request: [150_000], vocab_size=151_936))
    assert engine.capabilities.vocab_size == 151_936
    assert (await engine.generate([151_935], SAMPLING, request_id="a")).token_ids == [150_000]
    with pytest.raises(EngineError, match="vocabulary"):
        await engine.generate([151_936], SAMPLING, request_id="a")


async def test_ids_of_a_rule_carry_the_policy_version() -> None:
    engine = await started(ScriptedEngine(lambda request: [1, 2]))
    await engine.update_weights("nowhere", 5)
    assert (await engine.generate([1], SAMPLING, request_id="a")).policy_versions == [(0, 5)]


async def test_a_stop_id_ends_an_answer_and_belongs_to_it() -> None:
    engine = ScriptedEngine(lambda request: [1, 2, 3, 4])
    await engine.start()
    completion = await engine.generate([1], SamplingParams(8, stop_token_ids=(3,)), request_id="a")
    assert (completion.token_ids, completion.finish_reason) == ([1, 2, 3], "stop")
