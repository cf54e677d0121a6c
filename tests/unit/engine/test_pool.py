"""A pool of stub servers: requests move, replicas come and go. Of their weights: `test_readiness`."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.kind import EngineOptions
from rollstream.engine.pool import Router, common_capabilities
from rollstream.engine.readiness import Member
from rollstream.engine.sglang import SGLangEngine, SGLangReplica
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.testing.stub_answers import book_rule
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import Completion, SamplingParams
from tests.support.engines import started
from tests.support.replicas import FakeReplica
from tests.support.until import until

SAMPLING = SamplingParams(max_tokens=16, seed=5)


@pytest.fixture
async def servers() -> AsyncIterator[list[StubServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(StubServer(response_tokens=16)) for _ in range(3)]


@pytest.fixture
async def pool(servers: list[StubServer]) -> AsyncIterator[SGLangEngine]:
    async with started(SGLangEngine([server.url for server in servers])) as engine:
        yield engine


def members(**in_flight: int) -> dict[str, Member]:
    return {name: Member(FakeReplica(name), in_flight=count) for name, count in in_flight.items()}


def picks(router: Router, among: Iterable[Member], count: int = 60) -> Counter[str]:
    return Counter(router.pick([*among], f"session {number}").name for number in range(count))


def test_router_the_least_in_flight_gets_it_and_ties_are_random() -> None:
    found = members(a=1, b=1, c=2)
    taken = picks(Router(), found.values())
    assert set(taken) == {"a", "b"} and min(taken.values()) > 10


def test_router_a_session_stays_unless_another_is_much_less_busy() -> None:
    router, found = Router(), members(a=0, b=0, c=0)
    home = router.pick([*found.values()], "s")
    home.in_flight = 3
    assert all(router.pick([*found.values()], "s") is home for _ in range(20))
    assert router.pick([one for one in found.values() if one is not home], "s") is not home
    home.in_flight = 4
    assert router.pick([*found.values()], "s") is not home


def ask(pool: SGLangEngine, number: int, session: str | None = None) -> "asyncio.Task[Completion]":
    request_id = session or f"r{number}"
    return asyncio.create_task(pool.generate([number % 500], SAMPLING, request_id=request_id))


@pytest.mark.parametrize(
    "faults",
    [
        Faults(error=1.0),
        Faults(error=1.0, error_status=429),
        Faults(truncate=1.0),
        Faults(drop=1.0),
    ],
    ids=str,
)
async def test_what_fails_on_one_replica_is_done_by_another(
    pool: SGLangEngine, servers: list[StubServer], faults: Faults
) -> None:
    """No error reaches the caller, so no rollout is charged an attempt."""
    servers[0].faults = faults
    completions = await asyncio.gather(*(ask(pool, i) for i in range(60)))
    expected = [servers[1].book.answer([i], 5, 16)[0] for i in range(60)]
    assert [completion.token_ids for completion in completions] == expected


async def test_an_error_that_all_replicas_have_is_told(pool: SGLangEngine, servers: list[StubServer]) -> None:
    for server in servers:
        server.faults = Faults(error=1.0)
    with pytest.raises(TransientEngineError, match="stub error"):
        await ask(pool, 1)
    servers[0].faults = Faults(drop=1.0)
    with pytest.raises(TransientEngineError, match="stub error"):
        await ask(pool, 1)  # some are there, and fail at it: that is not an outage
    for server in servers:
        server.faults = Faults(drop=1.0)
    with pytest.raises(EngineUnavailableError, match="no sglang server answers"):
        await ask(pool, 1)


async def test_a_bad_request_is_refused_once(pool: SGLangEngine, servers: list[StubServer]) -> None:
    for server in servers:
        server.faults = Faults(bad_request=1.0)
    with pytest.raises(EngineError, match="this request is bad"):
        await ask(pool, 1)
    assert sum(server.stats.requests for server in servers) == 1


async def test_the_turns_of_a_rollout_go_to_one_replica(
    pool: SGLangEngine, servers: list[StubServer]
) -> None:
    for turn in range(12):
        await ask(pool, turn, session="7-0-1")
    assert sorted(server.stats.requests for server in servers) == [0, 0, 12]
    home = next(server for server in servers if server.stats.requests)
    home.faults = Faults(drop=1.0)
    await ask(pool, 20, session="7-0-1")
    assert sorted(server.stats.answered for server in servers)[:2] == [0, 1]


async def test_a_replica_that_fails_again_and_again_gets_less(
    pool: SGLangEngine, servers: list[StubServer]
) -> None:
    servers[0].faults = Faults(error=1.0)
    for _ in range(5):
        await asyncio.gather(*(ask(pool, number) for number in range(12)))
    failing, *others = (server.stats.requests for server in servers)
    assert 5 <= failing < min(others)
    for server in servers[1:]:
        await pool.remove_replica(server.url)
    servers[0].faults = Faults()
    assert await pool.health()
    assert len((await ask(pool, 62)).token_ids) == 16


async def test_the_replicas_that_are_there_are_counted(pool: SGLangEngine, servers: list[StubServer]) -> None:
    wrapped = ContinuingEngine(pool)
    assert wrapped.replica_counts() == pool.replica_counts() == (3, 3)
    await servers[1].stop()
    await asyncio.gather(*(ask(pool, i) for i in range(9)))
    assert wrapped.replica_counts() == (2, 3)


async def test_replicas_join_and_leave_while_requests_go_on(
    pool: SGLangEngine, servers: list[StubServer]
) -> None:
    async with (
        StubServer(response_tokens=16) as late,
        StubServer(model=StubModel(context_length=20)) as other,
    ):
        replica = SGLangReplica(late.url, EngineOptions(None))
        await pool.add_replica(replica)
        await pool.add_replica(replica)
        assert pool.replicas == [*(server.url for server in servers), late.url]
        await asyncio.gather(*(ask(pool, i) for i in range(40)))
        assert late.stats.answered == 10
        with pytest.raises(EngineError, match="is not what the run began with"):
            await pool.add_replica(SGLangReplica(other.url, EngineOptions(None)))
        for server in servers:
            server.latency = Latency("fixed", 0.05)
        busy = [ask(pool, i) for i in range(40)]
        await asyncio.sleep(0)
        for server in servers:
            await pool.remove_replica(server.url)
        completions = await asyncio.gather(*busy)
        assert [len(completion.token_ids) for completion in completions] == [16] * 40
        await pool.remove_replica(late.url)
        with pytest.raises(EngineUnavailableError, match="there is none"):
            await ask(pool, 1)
        await pool.remove_replica("http://nobody:1")


async def test_a_pool_can_do_what_all_of_it_can() -> None:
    async with (
        StubServer(model=StubModel(images=True, context_length=50)) as a,
        StubServer(model=StubModel(seeds=False)) as b,
        started(SGLangEngine([a.url, b.url])) as pool,
    ):
        raw = pool.capabilities
        assert (raw.images, raw.seeds, raw.max_model_len) == (False, False, 50)
    assert common_capabilities([raw, replace(raw, logprobs="raw")]).logprobs == "none"


def ask_long(pool: SGLangEngine, number: int) -> "asyncio.Task[Completion]":
    sampling = SamplingParams(max_tokens=500)
    return asyncio.create_task(pool.generate([number, 1, 2, 3], sampling, request_id=f"r{number}"))


def watched(token_s: float, **kwargs: float) -> tuple[StubServer, Callable[[], SGLangEngine]]:
    """A server with answers of 200 tokens, and what makes a pool of it that asks soon whether it is healthy."""
    server = StubServer(book_rule(200, prompt_tokens=4), latency=Latency(token_s=token_s))
    options = {"probe_after": 0.1, "health_timeout": 1.0, **kwargs}
    return server, lambda: SGLangEngine([server.url], engine_kwargs=options)


async def test_when_all_are_frozen_that_is_an_outage() -> None:
    server, make = watched(0.0)
    async with server, started(make()) as pool:
        server.faults = Faults(frozen=True)
        for task in [ask_long(pool, number) for number in range(8)]:
            with pytest.raises(EngineUnavailableError, match="does not answer, and it is not healthy"):
                await task
        assert not await pool.health()
        server.faults = Faults()
        await until(lambda: len(pool.ready) == 1)
        assert await pool.health()
        assert (await ask_long(pool, 10)).token_ids == server.book.answer([10, 1, 2, 3], None, 200)[0]


async def test_a_long_answer_of_a_healthy_replica_is_waited_for() -> None:
    server, make = watched(0.005, health_timeout=60.0)
    async with server, started(make()) as pool:
        assert (await ask_long(pool, 1)).token_ids == server.book.answer([1, 1, 2, 3], None, 200)[0]
        assert server.stats.health_checks >= 2


async def test_close_ends_health_checks_and_requests() -> None:
    server, make = watched(0.0, health_timeout=600.0)
    async with server, started(make()) as pool:
        server.faults = Faults(frozen=True)
        task = ask_long(pool, 1)
        await until(lambda: server.stats.health_checks > 0)
        await pool.close()
        with pytest.raises(EngineUnavailableError):
            await task
