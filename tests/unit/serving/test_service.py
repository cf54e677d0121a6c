"""One engine for everybody: bounds, ids, pauses, an engine that dies; and how a request is sampled."""

import asyncio
from dataclasses import replace

import pytest

from rollstream.chat.wires.requests import RequestError, Sampling
from rollstream.errors import EngineUnavailableError, TransientEngineError
from rollstream.serving.service import EngineRequest, EngineService, build_sampling, samples
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.trajectory import Completion, SamplingParams
from tests.support.until import until
from tests.unit.serving.served import FOREVER

SAMPLING = SamplingParams(max_tokens=8, seed=1)
ABLE = ScriptedEngine().capabilities


def request(name: str = "a", sampling: SamplingParams = SAMPLING) -> EngineRequest:
    return EngineRequest(name, [5, 6], sampling)


async def service_of(engine: ScriptedEngine, max_queue: int = 16) -> EngineService:
    await engine.start()
    return EngineService(engine, max_queue=max_queue, model_path="m")


async def ask(service: EngineService, *requests: EngineRequest) -> list[Completion]:
    return [completion for _, completion in await service.generate(requests)]


def asking(service: EngineService, name: str) -> "asyncio.Task[list[Completion]]":
    return asyncio.create_task(ask(service, request(name)))


async def test_answers_come_in_order_and_are_counted() -> None:
    service = await service_of(ScriptedEngine(latency=lambda one: 0.02 if one.request_id == "a_0" else 0.0))
    asked = [request(f"a_{i}", replace(SAMPLING, seed=i)) for i in range(3)]
    answers = await ask(service, *asked)
    alone = [(await ask(service, replace(one, request_id="b")))[0] for one in asked]
    assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in answers}) == 3
    assert (service.prompt_tokens, service.generated_tokens, service.finished) == (12, 48, {"length": 6})


async def test_the_queue_is_bounded_and_ids_are_used_once() -> None:
    engine = ScriptedEngine(latency=FOREVER)
    service = await service_of(engine, max_queue=3)
    first = asyncio.create_task(ask(service, request("a_0"), request("a_1")))
    await until(lambda: service.running == 2)
    for names, status in (
        (["a_1"], 400),
        (["d", "d"], 400),
        (["b_0", "b_1"], 503),
        (["c_0", "c_1", "c_2", "c_3"], 400),
    ):
        with pytest.raises(RequestError) as caught:
            await ask(service, *map(request, names))
        assert caught.value.status == status
    await service.abort("a")
    assert [one.finish_reason for one in await first] == ["abort", "abort"]
    assert len(engine.requests) == 2


async def test_one_that_fails_ends_the_others_of_its_request() -> None:
    engine = ScriptedEngine(latency=lambda one: 0.0 if one.request_id == "bad" else FOREVER)
    engine.fail("bad", TransientEngineError("busy"))
    service = await service_of(engine)
    with pytest.raises(TransientEngineError):
        await ask(service, request("good"), request("bad"))
    assert (engine.in_flight, service.running, service.waiting) == (0, 0, 0)


async def test_a_pause_aborts_what_runs_and_holds_what_comes() -> None:
    engine = ScriptedEngine(latency=lambda one: FOREVER if one.request_id == "early" else 0.0)
    service = await service_of(engine)
    early = asking(service, "early")
    await until(lambda: service.running == 1)
    await service.engine.pause()
    late, given_up = asking(service, "late"), asking(service, "given up")
    await until(lambda: service.waiting == 2)
    assert (await early)[0].finish_reason == "abort"
    assert await service.update_weights("new", None) == 1
    await service.abort("given up")
    (nothing,) = await given_up
    assert (nothing.token_ids, nothing.logprobs, nothing.finish_reason) == ([], [], "abort")
    assert nothing.policy_versions == [(0, 1)]
    service.engine.resume()
    assert (await late)[0].policy_versions == [(0, 1)]
    assert [one.request_id for one in engine.requests] == ["early", "late"]


class SlowToLoad(ScriptedEngine):
    """An engine that loads weights when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.may_load = asyncio.Event(), asyncio.Event()

    async def update_weights(self, source: str, version: int) -> None:
        self.loads.set()
        await self.may_load.wait()
        await super().update_weights(source, version)


async def test_an_update_whose_client_has_gone_has_its_version() -> None:
    engine = SlowToLoad()
    service = await service_of(engine)
    update = asyncio.create_task(service.update_weights("first", None))
    await engine.loads.wait()
    update.cancel()
    engine.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert (service.weight_version, service.model_path) == (1, "first")
    assert await service.update_weights("second", None) == 2


async def test_an_engine_that_dies_costs_nobody_an_answer() -> None:
    slow = ["a", "b", "c"]

    def latency(one: ScriptedRequest) -> float:
        if one.request_id not in slow:
            return 0.0
        slow.remove(one.request_id)
        return FOREVER

    engine = ScriptedEngine(latency=latency)
    service = await service_of(engine)
    a, b, given_up = (asking(service, name) for name in "abc")
    await until(lambda: engine.in_flight == 3)
    engine.go_down()
    await until(lambda: service.waiting == 3)
    await service.abort("c")
    engine.come_back()
    (one,), (other,), (nothing,) = await a, await b, await given_up
    assert one.token_ids == other.token_ids  # the same prompt and seed
    assert (nothing.token_ids, nothing.finish_reason) == ([], "abort")
    assert len(engine.requests) == 5


async def test_a_request_under_which_the_engine_dies_again_is_given_up() -> None:
    engine = ScriptedEngine()
    engine.fail("a", EngineUnavailableError("killed"), times=None)
    service = await service_of(engine)
    with pytest.raises(EngineUnavailableError, match="killed"):
        await ask(service, request())
    assert len(engine.requests) == 2
    assert (await ask(service, request("b")))[0].finish_reason == "length"


@pytest.mark.parametrize("held", ["by the engine", "by a pause", "by an outage"])
async def test_closing_ends_everything_as_unavailable(held: str) -> None:
    engine = ScriptedEngine(latency=FOREVER)
    service = await service_of(engine)
    if held == "by a pause":
        await service.engine.pause()
    task = asking(service, "a")
    await until(lambda: service.running + service.waiting == 1)
    if held == "by an outage":
        await until(lambda: engine.in_flight == 1)
        engine.go_down()
        await until(lambda: service.waiting == 1)
    await service.close()
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        await task
    with pytest.raises(RequestError) as caught:
        await ask(service, request("b"))
    assert caught.value.status == 503
    assert not await service.health()


def build(asked: Sampling, *, logprobs: bool = False) -> SamplingParams:
    return build_sampling(asked, ABLE, max_tokens=16, logprobs=logprobs)


def test_what_is_asked_for_is_what_is_sampled() -> None:
    asked = Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        stop="x",
        stop_token_ids=[4],
        ignore_eos=True,
    )
    assert build(asked, logprobs=True) == SamplingParams(5, 0.5, 0.9, 7, True, 3, ("x",), (4,), True)
    assert build(Sampling()) == SamplingParams(16, logprobs=False)
    # A top-k of all is none.
    assert [build(Sampling(top_k=k)).top_k for k in (2**62, 511)] == [-1, 511]


def test_seeds_fit_the_engine_and_samples_have_their_own() -> None:
    for given in (2**63 - 1, -1):
        asked = list(samples("a", [5], build(Sampling(seed=given)), 3))
        assert [one.sampling.seed for one in asked] == [2**31 - 1, 0, 1]
    assert [one.request_id for one in asked] == ["a_0", "a_1", "a_2"]
    (alone,) = samples("a", [5], build(Sampling()), 1)
    assert (alone.request_id, alone.sampling.seed) == ("a", None)


@pytest.mark.parametrize(
    "asked",
    [
        Sampling(stop=["a", ""]),
        Sampling(stop=["a"] * 65),
        Sampling(stop_token_ids=[512]),
        Sampling(stop_token_ids=[-1]),
        Sampling(n=0),
    ],
)
def test_what_the_engine_cannot_give_is_refused(asked: Sampling) -> None:
    with pytest.raises(RequestError):
        build(asked)
