"""Stragglers move with what they have; a replica that hangs lets go of its requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from rollstream.engine import watch
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import EngineUnavailableError
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubServer
from rollstream.trajectory import Completion, SamplingParams

SAMPLING = SamplingParams(max_tokens=500)
LONG = Latency("fixed", 200)
PROMPT = 4


async def eventually(check: Callable[[], bool], within: float = 60.0) -> None:
    async with asyncio.timeout(within):
        while not check():
            await asyncio.sleep(0.005)


def stub(speed: float = 1.0, **settings: object) -> StubServer:
    """Answers of 200 tokens, 1 s at speed 1."""
    return StubServer(lengths=LONG, token_s=0.005, speed=speed, prompt_tokens=PROMPT, **settings)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_TICK_S", 0.02)
    monkeypatch.setattr(watch, "_PAUSE_S", 0.02)


@pytest.fixture
async def servers() -> AsyncIterator[tuple[StubServer, StubServer]]:
    async with stub(speed=0.05) as slow, stub(speed=10.0) as fast:
        yield slow, fast


@pytest.fixture
async def pool(servers: tuple[StubServer, StubServer]) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine([server.url for server in servers], engine_kwargs={"health_timeout": 1.0})
    await engine.start()
    yield engine
    await engine.close()


def prompt(number: int) -> list[int]:
    return [number, 1, 2, 3]


def ask(pool: SGLangEngine, number: int, sampling: SamplingParams = SAMPLING) -> "asyncio.Task[Completion]":
    return asyncio.create_task(pool.generate(prompt(number), sampling, request_id=f"r{number}"))


async def only(
    pool: SGLangEngine, server: StubServer, number: int, sampling: SamplingParams = SAMPLING
) -> "asyncio.Task[Completion]":
    """A request that has begun on a certain server."""
    others = [name for name in pool.replicas if name != server.url]
    states = pool._router.replicas
    for name in others:
        states[name].in_flight += 10**9
    before = server.stats.requests
    task = ask(pool, number, sampling)
    await eventually(lambda: server.stats.requests > before)
    for name in others:
        states[name].in_flight -= 10**9
    return task


async def measure(pool: SGLangEngine, servers: tuple[StubServer, StubServer]) -> None:
    """Has the pool know how fast they are."""
    slow, fast = servers
    slow.lengths = fast.lengths = Latency("fixed", 10)
    stays = replace(SAMPLING, seed=1)
    await asyncio.gather(await only(pool, slow, 100, stays), await only(pool, fast, 101, stays))
    slow.lengths = fast.lengths = LONG


def whole(server: StubServer, number: int, seed: int | None = None) -> tuple[list[int], list[float]]:
    return server.book.answer(prompt(number), seed, 200)


async def test_a_straggler_goes_on_at_the_fast_replica(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer]
) -> None:
    slow, fast = servers
    await measure(pool, servers)
    completion = await (await only(pool, slow, 1))
    assert pool.moved == 1
    assert (slow.stats.aborts, fast.stats.requests) == (1, 2)
    # Nothing is sampled twice, but for the token that the abort came with: see `sglang_wire.read_reply`.
    assert slow.stats.tokens + fast.stats.tokens == 200 + 1 + 2 * 10
    assert slow.stats.tokens > 11
    assert (completion.token_ids, completion.logprobs) == whole(fast, 1)  # exactly as if it had not moved
    assert completion.finish_reason == "stop"
    assert all(not state.in_flight for state in pool._router.replicas.values())


async def test_one_that_has_answered_nothing_yet_is_left_too(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer]
) -> None:
    """A very slow replica is not known to be slow before its first answer: but it is late."""
    slow, fast = servers
    first = await only(pool, slow, 1)
    for number in range(2, 8):
        await asyncio.wait_for(await only(pool, fast, number), 5)
    completion = await asyncio.wait_for(first, 10)
    assert pool.moved == 1
    assert (completion.token_ids, completion.logprobs) == whole(fast, 1)


@pytest.mark.parametrize("changes", [{"seed": 7}, {"stop": ("x",)}], ids=str)
async def test_a_request_whose_tokens_would_be_others_stays(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer], changes: dict[str, object]
) -> None:
    slow, fast = servers
    await measure(pool, servers)
    slow.speed = 0.5
    completion = await asyncio.wait_for(await only(pool, slow, 1, replace(SAMPLING, **changes)), 10)
    assert pool.moved == 0
    assert completion.token_ids == whole(fast, 1, changes.get("seed"))[0]  # type: ignore[arg-type]


async def test_moves_can_be_turned_off(servers: tuple[StubServer, StubServer]) -> None:
    slow, _ = servers
    pool = SGLangEngine([server.url for server in servers], engine_kwargs={"move_stragglers": False})
    await pool.start()
    await measure(pool, servers)
    slow.speed = 0.5
    await asyncio.wait_for(await only(pool, slow, 1), 10)
    assert pool.moved == 0
    await pool.close()


async def test_the_caller_aborts_while_a_request_moves(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer]
) -> None:
    slow, fast = servers
    await measure(pool, servers)
    fast.speed = 0.05
    task = await only(pool, slow, 1)
    await eventually(lambda: fast.stats.in_flight == 1)  # it has moved
    await asyncio.sleep(0.2)
    await pool.abort("r1")
    completion = await asyncio.wait_for(task, 60)
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 200
    assert completion.token_ids == whole(fast, 1)[0][: len(completion.token_ids)]
    assert len(completion.logprobs or ()) == len(completion.token_ids)
    assert all(not state.in_flight for state in pool._router.replicas.values())


async def test_the_fast_replica_dies_under_a_request_that_has_moved(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer]
) -> None:
    """It goes on with the tokens that it had before."""
    slow, fast = servers
    await measure(pool, servers)
    fast.speed = 0.05
    task = await only(pool, slow, 1)
    await eventually(lambda: fast.stats.in_flight == 1)
    slow.speed = 10.0
    fast.kill()
    completion = await asyncio.wait_for(task, 60)
    assert (completion.token_ids, completion.logprobs) == whole(fast, 1)


async def test_cancelling_a_request_that_moves_leaves_nothing(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer]
) -> None:
    slow, fast = servers
    await measure(pool, servers)
    task = await only(pool, slow, 1)
    await eventually(lambda: pool.moved == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not slow.stats.in_flight and not fast.stats.in_flight)
    assert all(not state.in_flight for state in pool._router.replicas.values())
    assert not pool._in_flight


@pytest.mark.parametrize("cancel", [False, True])
async def test_an_abort_that_does_not_arrive(
    pool: SGLangEngine,
    servers: tuple[StubServer, StubServer],
    monkeypatch: pytest.MonkeyPatch,
    cancel: bool,
) -> None:
    """The request stays, and the place that was kept for it is free again."""
    slow, fast = servers
    await measure(pool, servers)

    async def lost(rid: str) -> None:
        pass

    monkeypatch.setattr(pool._replicas[slow.url], "abort", lost)
    slow.speed = 0.5
    task = await only(pool, slow, 1)
    await eventually(lambda: pool.moved == 1)
    assert pool._router.replicas[fast.url].in_flight == 1
    if cancel:
        task.cancel()
        await asyncio.wait((task,))
    else:
        assert (await asyncio.wait_for(task, 10)).token_ids == whole(slow, 1)[0]
        assert fast.stats.requests == 1
    assert all(not state.in_flight for state in pool._router.replicas.values())


async def test_the_fast_replica_hangs_before_a_request_has_moved(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = servers
    await measure(pool, servers)
    replica = pool._replicas[slow.url]
    abort = replica.abort

    async def abort_late(rid: str) -> None:
        fast.faults = Faults(frozen=True)
        pool._router.hang(fast.url)
        slow.speed = 20.0  # for what is left
        await abort(rid)

    monkeypatch.setattr(replica, "abort", abort_late)
    completion = await asyncio.wait_for(await only(pool, slow, 1), 10)
    assert (completion.token_ids, completion.logprobs) == whole(slow, 1)
    assert fast.stats.requests == 1
    assert all(not state.in_flight for state in pool._router.replicas.values())


async def test_none_moves_while_all_are_busy(
    pool: SGLangEngine, servers: tuple[StubServer, StubServer]
) -> None:
    """A slow replica has its part in a run."""
    slow, fast = servers
    slow.speed, fast.speed = 4.0, 10.0
    slow.lengths = fast.lengths = Latency("pareto", 10, 2.0, 200)
    numbers = iter(range(300))
    seen = []

    async def slot() -> None:
        for number in numbers:
            await ask(pool, number)
            if number == 250:
                seen.append(pool.moved)

    await asyncio.wait_for(asyncio.gather(*(slot() for _ in range(24))), 30)
    assert seen[0] <= 2  # nothing is left to chance here but the time of day
    assert slow.stats.answered > 50


async def test_a_replica_that_hangs_lets_its_requests_go() -> None:
    async with stub(speed=20.0) as a, stub(speed=20.0) as b:
        pool = SGLangEngine([a.url, b.url], engine_kwargs={"probe_after": 0.1, "health_timeout": 1.0})
        await pool.start()
        a.faults = Faults(frozen=True)
        completions = await asyncio.wait_for(asyncio.gather(*(ask(pool, n) for n in range(40))), 60)
        assert [one.token_ids for one in completions] == [whole(b, n)[0] for n in range(40)]
        before = a.stats.requests
        await asyncio.gather(*(ask(pool, n) for n in range(40, 60)))
        assert a.stats.requests == before  # nothing more, not even to try
        a.faults = Faults()
        await eventually(lambda: not pool._router.hung)
        await asyncio.gather(*(ask(pool, n) for n in range(60, 80)))
        await asyncio.gather(*(ask(pool, n) for n in range(80, 100)))
        assert a.stats.requests > before
        await pool.close()


async def test_when_all_hang_that_is_an_outage() -> None:
    async with stub(speed=20.0) as server:
        pool = SGLangEngine([server.url], engine_kwargs={"probe_after": 0.1, "health_timeout": 1.0})
        await pool.start()
        server.faults = Faults(frozen=True)
        tasks = [ask(pool, number) for number in range(8)]
        for task in tasks:
            with pytest.raises(EngineUnavailableError, match="does not answer, and it is not healthy"):
                await asyncio.wait_for(task, 60)
        with pytest.raises(EngineUnavailableError, match="hangs"):
            await asyncio.wait_for(ask(pool, 9), 60)
        assert not await pool.health()
        server.faults = Faults()
        assert await pool.health()
        assert (await asyncio.wait_for(ask(pool, 10), 5)).token_ids == whole(server, 10)[0]
        await pool.close()


async def test_a_long_answer_of_a_healthy_replica_is_waited_for() -> None:
    async with stub() as server:
        pool = SGLangEngine([server.url], engine_kwargs={"probe_after": 0.1, "health_timeout": 1.0})
        await pool.start()
        assert (await ask(pool, 1)).token_ids == whole(server, 1)[0]
        assert server.stats.health_checks >= 2
        await pool.close()


async def test_close_ends_the_watch_and_its_health_checks() -> None:
    async with stub(speed=20.0) as server:
        pool = SGLangEngine([server.url], engine_kwargs={"probe_after": 0.05, "health_timeout": 30})
        await pool.start()
        server.faults = Faults(frozen=True)
        task = ask(pool, 1)
        await eventually(lambda: bool(pool._watch._probes))
        await asyncio.wait_for(pool.close(), 5)
        with pytest.raises(EngineUnavailableError):
            await asyncio.wait_for(task, 60)
        assert len(asyncio.all_tasks()) == 1 + sum(
            "aiohttp" in str(one) or "RequestHandler" in str(one) for one in asyncio.all_tasks()
        )
