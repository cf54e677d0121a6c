import asyncio

import pytest

from rollstream.engine.base import Engine
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams

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


async def test_a_stop_id_ends_an_answer_and_belongs_to_it() -> None:
    engine = ScriptedEngine(lambda request: [1, 2, 3, 4])
    await engine.start()
    completion = await engine.generate([1], SamplingParams(8, stop_token_ids=(3,)), request_id="a")
    assert (completion.token_ids, completion.finish_reason) == ([1, 2, 3], "stop")
