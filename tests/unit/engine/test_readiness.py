"""Replicas that come, go, and miss updates: nothing is generated with any but the wanted weights."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.pool import PoolEngine
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError, WeightsLostError
from rollstream.engine.weight_probe import PROBE_IDS, write_probe
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams
from tests.support.replicas import CAPABILITIES, FakeReplica
from tests.support.until import until

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def a() -> FakeReplica:
    return FakeReplica("a")


@pytest.fixture
def b() -> FakeReplica:
    return FakeReplica("b")


@pytest.fixture
async def engine(a: FakeReplica, b: FakeReplica) -> AsyncIterator[PoolEngine]:
    one = PoolEngine([a, b])
    await one.start()
    yield one
    await one.close()


async def versions(engine: PoolEngine | ContinuingEngine, count: int = 8) -> set[int]:
    """The weights that some requests are answered with."""
    sampling = SamplingParams(max_tokens=1)
    requests = (engine.generate([1], sampling, request_id=f"{n}") for n in range(count))
    return {one.policy_versions[0][1] for one in await asyncio.gather(*requests)}


async def test_a_replica_that_missed_an_update_loads_it_once_before_it_works(
    engine: PoolEngine, b: FakeReplica
) -> None:
    b.load_errors = [TransientEngineError("disk full")] * 3
    await engine.update_weights("/1", 1)
    assert engine.ready == ["a"]
    while not b.served:
        assert await versions(engine) == {1}
    assert b.loads == [1] * 4


async def test_a_restarted_replica_loads_the_weights_again(engine: PoolEngine, a: FakeReplica) -> None:
    await engine.update_weights("/1", 1)
    a.restart()  # without a connection being lost: only its answer shows it
    assert await versions(engine) == {1}
    await until(lambda: len(engine.ready) == 2)
    assert (a.version, a.loads) == (1, [1, 1])


async def test_an_answer_may_be_of_weights_that_came_and_went_since_it_was_asked(a: FakeReplica) -> None:
    engine, plain, began = PoolEngine([a]), a.generate, asyncio.Event()

    async def late(request: ReplicaRequest) -> Completion:
        began.set()
        await until(lambda: a.version == 2)
        completion = await plain(request)
        await until(lambda: a.version == 3)
        return completion

    await engine.start()
    await engine.update_weights("/1", 1)
    a.generate = late  # type: ignore[method-assign]
    asked = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=1), request_id="late"))
    await began.wait()
    await engine.update_weights("/2", 2)
    await until(lambda: a.served > 0)
    await engine.update_weights("/3", 3)
    assert (await asked).policy_versions == [(0, 2)] and a.loads == [1, 2, 3]
    await engine.close()


async def test_an_answer_may_be_of_weights_whose_update_has_not_ended(a: FakeReplica) -> None:
    engine, plain, load, asked = PoolEngine([a]), a.generate, a.update_weights, asyncio.Event()

    async def late(request: ReplicaRequest) -> Completion:
        asked.set()
        await until(lambda: a.version == 2)
        return await plain(request)

    await engine.start()
    await engine.update_weights("/1", 1)
    a.generate = late  # type: ignore[method-assign]
    answer = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=1), request_id="late"))

    async def load_until_answered(source: str, version: int) -> None:
        await load(source, version)
        await asyncio.wait([answer])

    a.update_weights = load_until_answered  # type: ignore[method-assign]
    await asked.wait()
    await engine.update_weights("/2", 2)
    assert (await answer).policy_versions == [(0, 2)] and a.loads == [1, 2]
    await engine.close()


async def test_before_the_first_update_versions_are_whatever_the_servers_say(
    engine: PoolEngine, a: FakeReplica, b: FakeReplica
) -> None:
    a.version = b.version = 7  # somebody else updates them
    assert await versions(engine) == {7}
    a.restart()
    await versions(engine)
    assert (a.loads, b.loads) == ([], [])


async def test_no_replica_could_load(engine: PoolEngine, a: FakeReplica, b: FakeReplica) -> None:
    await engine.update_weights("/1", 1)
    a.load_errors, b.load_errors = [EngineError("no such folder")], [EngineError("no such folder")]
    with pytest.raises(EngineError, match=r"none of 2 replicas could load /2 .*no such folder"):
        await engine.update_weights("/2", 2)
    assert await versions(engine) == {1}
    a.load_errors, b.load_errors = [WeightsLostError("halfway")], [TransientEngineError("cut off")]
    with pytest.raises(EngineError, match="halfway"):
        await engine.update_weights("/2", 2)
    await until(lambda: len(engine.ready) == 2)  # both loaded the old ones again
    assert await versions(engine) == {1}
    for replica in (a, b):  # gone between the question after its health and the load
        replica.load_errors = [ReplicaUnavailableError("connection refused")]
    with pytest.raises(EngineUnavailableError, match="no server is there to load weights"):
        await engine.update_weights("/2", 2)
    a.away = b.away = True
    with pytest.raises(EngineUnavailableError, match="no server is there to load weights"):
        await engine.update_weights("/2", 2)


async def test_weights_lost_before_any_others_were_named(engine: PoolEngine, b: FakeReplica) -> None:
    engine_error = WeightsLostError("out of memory")
    b.load_errors = [engine_error]
    await engine.remove_replica("a")
    with pytest.raises(EngineError, match="out of memory"):
        await engine.update_weights("/1", 1)
    with pytest.raises(EngineUnavailableError, match="nobody knows which it has: update again"):
        await versions(engine, 1)
    await engine.update_weights("/1", 1)
    assert await versions(engine) == {1}


async def test_a_replica_that_a_failed_update_paused_is_asked_by_the_next(a: FakeReplica) -> None:
    engine = PoolEngine([a])
    await engine.start()
    a.paused, a.load_errors = True, [WeightsLostError("no space")]
    with pytest.raises(EngineError, match="no space"):
        await engine.update_weights("/1", 1)
    assert not await engine.health()
    await engine.update_weights("/2", 2)
    assert await versions(engine) == {2}
    await engine.close()


async def test_requests_wait_for_an_update_and_updates_for_each_other(
    engine: PoolEngine, a: FakeReplica, b: FakeReplica
) -> None:
    a.gate.clear()
    first = asyncio.create_task(engine.update_weights("/1", 1))
    await until(lambda: a.loading == 1)
    second = asyncio.create_task(engine.update_weights("/2", 2))
    asked = asyncio.create_task(versions(engine))
    first.cancel()  # takes effect at its end
    await asyncio.sleep(0)
    assert (a.served, b.served, a.loads) == (0, 0, [1])
    a.gate.set()
    await second
    assert 0 not in await asked  # they may go in between the two
    assert first.cancelled() and (a.version, a.cut_off_loads) == (2, 0)


async def test_an_update_and_a_request_do_not_wait_for_a_load_of_before(
    engine: PoolEngine, a: FakeReplica, b: FakeReplica
) -> None:
    b.load_errors = [TransientEngineError("busy")]
    b.deaf_while_loading = True
    await engine.update_weights("/1", 1)
    b.gate.clear()
    await until(lambda: b.loading == 1)
    assert engine.is_loading("b") and not engine.is_loading("a")
    assert await versions(engine) == {1}
    await engine.update_weights("/2", 2)
    assert await versions(engine) == {2}
    a.away = True
    with pytest.raises(EngineUnavailableError):  # nobody waits for a load, which may take minutes
        await versions(engine, 1)
    b.gate.set()
    await until(lambda: engine.ready == ["b"])
    assert await versions(engine) == {2}
    assert (b.loads, b.cut_off_loads) == ([1, 1, 2], 0)


async def test_health_tries_what_is_not_ready(engine: PoolEngine, a: FakeReplica, b: FakeReplica) -> None:
    await engine.update_weights("/1", 1)
    a.away = b.away = True
    with pytest.raises(EngineUnavailableError, match="a is away"):
        await versions(engine, 1)
    assert not await engine.health()
    a.restart()
    assert await engine.health()
    assert await versions(engine) == {1}


async def test_a_replica_that_comes_back_as_another_gets_no_work(
    engine: PoolEngine, b: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    b.away = True
    await versions(engine)
    b.away, b.served, b.capabilities = False, 0, replace(CAPABILITIES, logprobs="processed", seeds=False)
    before = b.described
    await until(lambda: b.described > before + 2)
    assert await versions(engine) == {0} and b.served == 0
    assert caplog.text.count("logprobs processed (not raw), seeds False (not True)") == 1
    b.capabilities = CAPABILITIES
    await until(lambda: len(engine.ready) == 2)


async def test_a_replica_that_answers_questions_but_no_requests_is_not_asked_in_a_hot_loop(
    engine: PoolEngine, b: FakeReplica
) -> None:
    late = FakeReplica("c", drops=True)
    await engine.add_replica(late)
    for _ in range(20):
        assert await versions(engine) == {0}
    assert late.described == 1  # the next try follows a pause


async def test_a_hanging_replica_lets_its_requests_go_and_keeps_no_update(
    engine: PoolEngine, a: FakeReplica, b: FakeReplica
) -> None:
    b.hangs = True
    assert await versions(engine) == {0}
    assert engine.ready == ["a"] and a.served == 8
    await engine.update_weights("/1", 1)
    assert b.loads == []
    b.hangs = False
    await until(lambda: len(engine.ready) == 2)
    assert (await versions(engine), b.loads) == ({1}, [1])


async def test_an_update_does_not_wait_for_a_server_that_ends_nothing(a: FakeReplica, b: FakeReplica) -> None:
    inner = PoolEngine([a, b], probe_after=0)
    await inner.start()
    engine = ContinuingEngine(inner)
    b.hangs = True
    asked = asyncio.create_task(versions(engine))
    await until(lambda: b.in_flight == 4 and a.served == 4)
    await engine.update_weights("/1", 1)
    assert await asked == {0, 1}
    await inner.close()


async def test_closing_waits_for_a_load_but_not_for_ever(
    engine: PoolEngine, b: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    b.load_errors = [TransientEngineError("busy")]
    await engine.update_weights("/1", 1)
    b.gate.clear()
    await until(lambda: b.loading == 1)
    await engine.close()
    await until(lambda: b.cut_off_loads == 1)
    assert "still loads weights, and is left alone" in caplog.text


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_no_answer_has_other_weights_than_the_wanted(seed: int) -> None:
    rng = random.Random(seed)
    replicas = [FakeReplica(name) for name in "abc"]
    failures = (EngineError("refused"), TransientEngineError("cut off"), WeightsLostError("halfway"))
    async with asyncio.timeout(3600):
        engine = PoolEngine(replicas)
        await engine.start()
        wanted = 0
        for version in range(1, 30):
            victim = rng.choice(replicas)
            match rng.choice(("restart", "leave", "fail", "update", "update")):
                case "restart" if wanted:
                    victim.restart()
                case "leave":
                    victim.away = True
                case "fail":
                    victim.load_errors = [rng.choice(failures)]
                case _:
                    with contextlib.suppress(EngineError):
                        await engine.update_weights(f"/{version}", version)
                        wanted = version
            with contextlib.suppress(EngineUnavailableError):
                assert await versions(engine) == {wanted}
            victim.away = False
        await engine.close()


@contextlib.asynccontextmanager
async def scoring(*replicas: FakeReplica) -> AsyncIterator[PoolEngine]:
    for replica in replicas:
        replica.capabilities = replace(CAPABILITIES, scores=True)
    engine = PoolEngine(replicas)
    await engine.start()
    yield engine
    await engine.close()


def trained(folder: Path, version: int, logprob: float | None = None) -> str:
    """A folder of weights as a trainer writes it, whose model has the log-probs of a `FakeReplica`."""
    path = folder / str(version)
    path.mkdir()
    write_probe(path, [-1.0 - version if logprob is None else logprob] * (len(PROBE_IDS) - 1))
    return str(path)


async def test_a_replica_that_keeps_its_old_weights_gets_no_work(
    a: FakeReplica, b: FakeReplica, tmp_path: Path
) -> None:
    async with scoring(a, b) as engine:
        b.keeps_old = True
        await engine.update_weights(trained(tmp_path, 1), 1)
        assert engine.ready == ["a"]
        assert await versions(engine) == {1} and not b.served
        b.keeps_old = False
        while not b.served:
            assert await versions(engine) == {1}
        a.keeps_old = b.keeps_old = True
        with pytest.raises(EngineError, match="nats off the trainer's"):
            await engine.update_weights(trained(tmp_path, 2), 2)


@pytest.mark.parametrize("broken", ["engine", "trainer"])
async def test_weights_that_are_not_numbers_are_refused(broken: str, a: FakeReplica, tmp_path: Path) -> None:
    async with scoring(a) as engine:
        if broken == "engine":
            a.keeps_old, a.logprobs = True, float("nan")
        source = trained(tmp_path, 1, float("nan") if broken == "trainer" else None)
        with pytest.raises(EngineError, match="not numbers"):
            await engine.update_weights(source, 1)


async def test_a_small_change_that_did_not_arrive_is_seen(a: FakeReplica, tmp_path: Path) -> None:
    async with scoring(a) as engine:
        await engine.update_weights(trained(tmp_path, 1), 1)
        a.keeps_old = True
        await engine.update_weights(trained(tmp_path, 2, -2.001), 2)  # less than other numbers make
        with pytest.raises(EngineError, match="did not change"):
            await engine.update_weights(trained(tmp_path, 3, -2.1), 3)


async def test_a_trainer_may_be_less_exact_than_its_engine(a: FakeReplica, tmp_path: Path) -> None:
    async with scoring(a) as engine:
        await engine.update_weights(trained(tmp_path, 1, -2.02), 1)
        a.keeps_old = True
        await engine.update_weights(
            trained(tmp_path, 2, -1.98), 2
        )  # of bfloat16, on a step that hardly counts
        await engine.update_weights(trained(tmp_path, 3, -2.02), 3)
        with pytest.raises(EngineError, match="did not change"):
            await engine.update_weights(trained(tmp_path, 4, -2.1), 4)


async def test_without_a_trainers_word_replicas_must_agree(
    a: FakeReplica, b: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    async with scoring(a, b, FakeReplica("c")) as engine:
        b.keeps_old = True
        await engine.update_weights("/1", 1)
        assert engine.ready == ["a", "c"]
        await until(lambda: len(b.loads) == 3)
        assert engine.ready == ["a", "c"]
        a.keeps_old, b.keeps_old = True, False
        await until(lambda: len(engine.ready) == 3)
    caplog.clear()
    async with scoring(a) as engine:  # a step that changes nothing is none of its faults
        for version in (2, 3):
            await engine.update_weights("/same", version)
        assert await versions(engine) == {3}
    assert caplog.text.count("same weights as before") == 1
