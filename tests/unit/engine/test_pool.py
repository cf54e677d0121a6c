"""A pool of stub servers: requests move, replicas come and go, weights change on all of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rollstream.engine.interruptible import InterruptibleEngine
from rollstream.engine.pool import common_capabilities
from rollstream.engine.sglang import ENGINE_KWARGS, SGLangEngine, SGLangReplica
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubServer
from rollstream.trajectory import Completion, SamplingParams

SAMPLING = SamplingParams(max_tokens=16, seed=5)


@pytest.fixture
async def servers() -> AsyncIterator[list[StubServer]]:
    async with (
        StubServer(response_tokens=16) as a,
        StubServer(response_tokens=16) as b,
        StubServer(response_tokens=16) as c,
    ):
        yield [a, b, c]


@pytest.fixture
async def pool(servers: list[StubServer]) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine([server.url for server in servers])
    await engine.start()
    yield engine
    await engine.close()


def ask(pool: SGLangEngine, number: int, session: str | None = None) -> "asyncio.Task[Completion]":
    request_id = session or f"r{number}"
    return asyncio.create_task(pool.generate([number % 500], SAMPLING, request_id=request_id))


@pytest.mark.parametrize(
    "faults",
    [
        Faults(error=1.0),
        Faults(error=1.0, error_status=429),
        Faults(truncate=1.0),
        Faults(short_logprobs=1.0),
        Faults(bad_ids=1.0),
        Faults(wrong_rid=1.0),
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
    with pytest.raises(EngineUnavailableError, match="no SGLang server answers"):
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


async def test_a_slow_replica_gets_less(pool: SGLangEngine, servers: list[StubServer]) -> None:
    servers[0].latency = Latency("fixed", 0.2)
    servers[1].latency = servers[2].latency = Latency("fixed", 0.01)
    window = asyncio.Semaphore(12)

    async def one(number: int) -> None:
        async with window:
            await ask(pool, number)

    await asyncio.gather(*(one(i) for i in range(240)))
    slow, *fast = (server.stats.answered for server in servers)
    assert slow < min(fast) / 2, (slow, fast)


async def test_the_replicas_that_are_there_are_counted(pool: SGLangEngine, servers: list[StubServer]) -> None:
    wrapped = InterruptibleEngine(pool)
    assert wrapped.replica_counts() == pool.replica_counts() == (3, 3)
    await servers[1].stop()
    await asyncio.gather(*(ask(pool, i) for i in range(9)))
    assert wrapped.replica_counts() == (2, 3)


async def test_replicas_join_and_leave_while_requests_go_on(
    pool: SGLangEngine, servers: list[StubServer]
) -> None:
    async with StubServer(response_tokens=16) as late, StubServer(context_length=20) as other:
        replica = SGLangReplica(late.url, model_path=None, limits=None, kwargs=ENGINE_KWARGS)
        await pool.add_replica(replica)
        await pool.add_replica(replica)
        assert pool.replicas == [*(server.url for server in servers), late.url]
        await asyncio.gather(*(ask(pool, i) for i in range(40)))
        assert late.stats.answered == 10
        with pytest.raises(EngineError, match="another kind of server"):
            await pool.add_replica(
                SGLangReplica(other.url, model_path=None, limits=None, kwargs=ENGINE_KWARGS)
            )
        for server in servers:
            server.latency = Latency("fixed", 0.05)
        busy = [ask(pool, i) for i in range(40)]
        await asyncio.sleep(0)
        for server in servers:
            await pool.remove_replica(server.url)
        completions = await asyncio.gather(*busy)
        assert [len(completion.token_ids) for completion in completions] == [16] * 40
        with pytest.raises(EngineError, match="the last replica"):
            await pool.remove_replica(late.url)
        await pool.remove_replica("http://nobody:1")


async def test_weights_change_on_all_replicas_that_work(
    pool: SGLangEngine, servers: list[StubServer]
) -> None:
    await pool.update_weights("/models/step7", 7)
    completions = await asyncio.gather(*(ask(pool, i) for i in range(9)))
    assert Counter(version for one in completions for _, version in one.policy_versions) == {7: 9}
    servers[1].faults = Faults(update_fails=True)
    await pool.update_weights("/models/step8", 8)
    completions = await asyncio.gather(*(ask(pool, i) for i in range(9)))
    assert Counter(version for one in completions for _, version in one.policy_versions) == {8: 9}
    assert servers[1].weight_version == "7"  # it gets nothing
    servers[1].faults = Faults()
    while servers[1].weight_version == "7":  # until it is tried again, and loads before it answers
        completions = await asyncio.gather(*(ask(pool, i) for i in range(9)))
        assert Counter(version for one in completions for _, version in one.policy_versions) == {8: 9}
        await asyncio.sleep(0.05)
    for server in servers:
        server.faults = Faults(update_fails=True)
    with pytest.raises(EngineError, match=r"none of 3 replicas could load /models/step9.*stub cannot"):
        await pool.update_weights("/models/step9", 9)
    completions = await asyncio.gather(*(ask(pool, i) for i in range(9)))
    assert Counter(version for one in completions for _, version in one.policy_versions) == {8: 9}


async def test_an_aborted_request_is_not_sent_elsewhere(
    pool: SGLangEngine, servers: list[StubServer]
) -> None:
    for server in servers:
        server.latency = Latency("fixed", 30.0)
    task = ask(pool, 1, session="a")
    async with asyncio.timeout(5):
        while not sum(server.stats.in_flight for server in servers):
            await asyncio.sleep(0.005)
    await pool.abort("a")
    completion = await asyncio.wait_for(task, 5)
    assert completion.finish_reason == "abort"
    assert sum(server.stats.requests for server in servers) == 1


async def test_a_pool_can_do_what_all_of_it_can() -> None:
    async with StubServer(images=True, context_length=50) as a, StubServer(deterministic=False) as b:
        pool = SGLangEngine([a.url, b.url])
        await pool.start()
        assert (pool.capabilities.images, pool.capabilities.seeds) == (False, False)
        assert pool.capabilities.max_model_len == 50
        raw = pool.capabilities
        await pool.close()
    assert common_capabilities([raw, replace(raw, logprobs="raw")]).logprobs == "none"
