import asyncio
from dataclasses import replace

import pytest

from rollstream.chat.wires.requests import RequestError
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.serving.service import EngineRequest, EngineService
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams
from tests.unit.serving.served import eventually

FOREVER = 1e6
SAMPLING = SamplingParams(max_tokens=8, seed=1)


def request(name: str = "a", sampling: SamplingParams = SAMPLING) -> EngineRequest:
    return EngineRequest(name, [5, 6], sampling)


async def service_of(engine: ScriptedEngine, max_queue: int = 16) -> EngineService:
    await engine.start()
    return EngineService(engine, max_queue=max_queue, model_path="m")


async def test_answers_come_in_order_and_are_counted() -> None:
    engine = ScriptedEngine(latency=lambda one: 0.02 if one.request_id == "a_0" else 0.0)
    service = await service_of(engine)
    asked = [request(f"a_{i}", replace(SAMPLING, seed=i)) for i in range(3)]
    answers = await service.generate("a", asked)
    alone = [(await service.generate("b", [replace(one, request_id="b")]))[0] for one in asked]
    assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in answers}) == 3
    assert (service.prompt_tokens, service.generated_tokens) == (12, 48)
    assert service.finished == {"length": 6}
    assert (service.running, service.waiting) == (0, 0)


async def test_the_queue_is_bounded_and_ids_are_used_once() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    service = await service_of(engine, max_queue=3)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(service.generate("a", [request("a_0"), request("a_1")]))
        await eventually(lambda: service.running == 2)
        with pytest.raises(RequestError, match="'a_1' is in use") as caught:
            await service.generate("x", [request("a_1")])
        assert caught.value.status == 400
        with pytest.raises(RequestError, match="queue is full: 2 of 3") as caught:
            await service.generate("b", [request("b_0"), request("b_1")])
        assert caught.value.status == 503
        with pytest.raises(RequestError, match="4 samples") as caught:
            await service.generate("c", [request(f"c_{i}") for i in range(4)])
        assert caught.value.status == 400
        with pytest.raises(RequestError, match="in use"):
            await service.generate("d", [request("d"), request("d")])
        await service.abort("a")
    assert [one.finish_reason for one in first.result()] == ["abort", "abort"]
    assert len(engine.requests) == 2


async def test_what_cannot_be_served_is_refused_before_anything_runs() -> None:
    engine = ScriptedEngine()
    service = await service_of(engine)
    bad = EngineRequest("b", [5, 512], SAMPLING)
    with pytest.raises(EngineError, match="vocabulary"):
        await service.generate("a", [request(), bad])
    assert not engine.requests


async def test_one_that_fails_ends_the_others_of_its_request() -> None:
    engine = ScriptedEngine(latency=lambda one: 0.0 if one.request_id == "bad" else FOREVER)
    engine.fail("bad", TransientEngineError("busy"))
    service = await service_of(engine)
    with pytest.raises(TransientEngineError, match="busy"):
        await service.generate("a", [request("good"), request("bad")])
    assert (engine.in_flight, service.running, service.waiting) == (0, 0, 0)


async def test_cancelling_cancels_in_the_engine() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    service = await service_of(engine)
    task = asyncio.create_task(service.generate("a", [request("a_0"), request("a_1")]))
    await eventually(lambda: engine.in_flight == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (engine.in_flight, service.running, service.waiting) == (0, 0, 0)


async def test_aborts_by_id_by_group_and_of_all() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    service = await service_of(engine)

    async def abort_of(names: list[str], *, group: str, abort: str | None) -> list[str]:
        task = asyncio.create_task(service.generate(group, [request(name) for name in names]))
        await eventually(lambda: service.running == len(names))
        await service.abort("nobody")
        assert service.running == len(names)
        await service.abort(abort)
        return [one.finish_reason for one in await task]

    assert await abort_of(["a"], group="g", abort="a") == ["abort"]
    assert await abort_of(["a", "b"], group="g", abort="g") == ["abort", "abort"]
    assert await abort_of(["a", "b"], group="g", abort=None) == ["abort", "abort"]


async def test_a_pause_aborts_what_runs_and_holds_what_comes() -> None:
    engine = ScriptedEngine(latency=lambda one: FOREVER if one.request_id == "early" else 0.0)
    service = await service_of(engine)
    early = asyncio.create_task(service.generate("early", [request("early")]))
    await eventually(lambda: service.running == 1)
    await service.pause()
    assert (service.running, service.paused) == (0, True)
    late = asyncio.create_task(service.generate("late", [request("late")]))
    given_up = asyncio.create_task(service.generate("given up", [request("given up")]))
    await eventually(lambda: service.waiting == 2)
    assert (await early)[0].finish_reason == "abort"
    await service.abort("given up")
    (nothing,) = await given_up
    assert (nothing.token_ids, nothing.logprobs, nothing.finish_reason) == ([], [], "abort")
    await service.try_out()
    service.resume()
    assert (await late)[0].finish_reason == "length"
    # "given up" was never given to the engine; the trial went by the pause.
    assert [one.request_id for one in engine.requests] == ["early", "health-0", "late"]


async def test_a_pause_that_is_ended_at_once_is_answered() -> None:
    """Though others keep the engine busy."""
    engine = ScriptedEngine(latency=FOREVER)
    service = await service_of(engine)
    early = asyncio.create_task(service.generate("early", [request("early")]))
    await eventually(lambda: service.running == 1)
    aborting = asyncio.Event()

    async def slow_abort(request_id: str) -> None:
        aborting.set()
        await asyncio.sleep(0)

    engine.abort = slow_abort  # type: ignore[method-assign]
    pause = asyncio.create_task(service.pause())
    await aborting.wait()
    service.resume()
    await asyncio.wait_for(pause, 5)
    second = asyncio.create_task(service.pause())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()  # what is in the engine is still there
    service.resume()
    await asyncio.wait_for(second, 5)
    early.cancel()
    await asyncio.wait((early,))


async def test_an_engine_that_dies_costs_nobody_an_answer() -> None:
    calls: list[str] = []

    def latency(one: object) -> float:
        calls.append("")
        return FOREVER if len(calls) <= 2 else 0.0

    engine = ScriptedEngine(latency=latency)
    service = await service_of(engine)
    tasks = [asyncio.create_task(service.generate(name, [request(name)])) for name in ("a", "b")]
    await eventually(lambda: engine.in_flight == 2)
    engine.go_down()
    await eventually(lambda: service.waiting == 2)
    assert not await service.health()
    engine.come_back()
    answers = [(await task)[0] for task in tasks]
    assert answers[0].token_ids == answers[1].token_ids  # the same prompt and seed
    assert len(engine.requests) == 4


async def test_a_request_under_which_the_engine_dies_again_is_given_up() -> None:
    engine = ScriptedEngine()
    engine.fail("a", EngineUnavailableError("killed"), times=None)
    service = await service_of(engine)
    with pytest.raises(EngineUnavailableError, match="killed"):
        await service.generate("a", [request()])
    assert len(engine.requests) == 2
    assert (await service.generate("b", [request("b")]))[0].finish_reason == "length"


@pytest.mark.parametrize("held", ["by the engine", "by a pause", "by an outage"])
async def test_closing_ends_everything_as_unavailable(held: str) -> None:
    engine = ScriptedEngine(latency=FOREVER)
    service = await service_of(engine)
    if held == "by a pause":
        await service.pause()
    task = asyncio.create_task(service.generate("a", [request()]))
    await eventually(lambda: service.running + service.waiting == 1)
    if held == "by an outage":
        await eventually(lambda: engine.in_flight == 1)
        engine.go_down()
        await eventually(lambda: service.waiting == 1)
    await service.close()
    with pytest.raises(EngineUnavailableError):
        await task
    with pytest.raises(RequestError) as caught:
        await service.generate("b", [request("b")])
    assert caught.value.status == 503
    assert not await service.health()


async def test_weights_are_counted_up_or_named() -> None:
    engine = ScriptedEngine()
    service = await service_of(engine)
    assert await service.update_weights("new", None) == 1
    assert await service.update_weights("newer", 7) == 7
    assert (service.model_path, service.weight_version, engine.policy_version) == ("newer", 7, 7)
    fixed = ScriptedEngine(capabilities=replace(engine.capabilities, update_weights=False))
    with pytest.raises(RequestError, match="cannot update"):
        await (await service_of(fixed)).update_weights("new", None)
