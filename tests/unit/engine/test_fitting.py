"""Replicas are made fit by one task each, which requests, aborts and updates do not wait for in vain."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from rollstream.engine import fitting, pool, watch
from rollstream.engine.base import Capabilities
from rollstream.engine.interruptible import InterruptibleEngine
from rollstream.engine.pool import PoolEngine
from rollstream.engine.replica import ReplicaAwayError, ReplicaRequest
from rollstream.errors import EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams

CAPABILITIES = Capabilities(
    token_ids=True,
    logprobs="raw",
    seeds=True,
    stop_strings=True,
    stop_token_ids=True,
    images=False,
    update_weights=True,
    max_model_len=None,
)
SAMPLING = SamplingParams(max_tokens=1)


@dataclass(eq=False)
class Server:
    """A replica that answers at once, unless it is told otherwise."""

    name: str
    capabilities: Capabilities = CAPABILITIES
    version: int = 0
    away: bool = False
    hangs: bool = False
    """Takes requests and aborts, and does nothing."""
    deaf_while_loading: bool = False
    load_error: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Loads end when it is set."""
    loads: int = 0
    loading: int = 0
    cut_off: int = 0
    served: int = 0
    described: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def describe(self) -> Capabilities:
        self.described += 1
        if self.away or self.hangs:
            raise ReplicaAwayError(f"{self.name} is away")
        return self.capabilities

    async def generate(self, request: ReplicaRequest) -> Completion:
        if self.away:
            raise ReplicaAwayError(f"{self.name} is away")
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)
        self.served += 1
        return Completion([5], [-1.0], "length", [(0, self.version)])

    async def abort(self, rid: str) -> None: ...

    async def health(self) -> bool:
        return not (self.away or self.hangs or (self.deaf_while_loading and self.loading))

    async def update_weights(self, source: str, version: int) -> None:
        self.loads += 1
        self.loading += 1
        try:
            await self.gate.wait()
            if self.load_error:
                raise TransientEngineError(self.load_error)
            self.version = version
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        finally:
            self.loading -= 1

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_TICK_S", 0.01)
    monkeypatch.setattr(watch, "_PAUSE_S", 0.01)
    monkeypatch.setattr(fitting, "_REST_S", 0.05)
    monkeypatch.setattr(fitting, "_LOAD_REST_S_MAX", 0.1)
    monkeypatch.setattr(fitting, "_CLOSE_WAIT_S", 0.2)
    monkeypatch.setattr(pool, "_HEALTH_WAIT_S", 0.05)


@pytest.fixture
def a() -> Server:
    return Server("a")


@pytest.fixture
def b() -> Server:
    return Server("b")


@pytest.fixture
async def engine(a: Server, b: Server) -> AsyncIterator[InterruptibleEngine]:
    async with asyncio.timeout(30):
        inner = PoolEngine([a, b], kwargs={"probe_after": 0.05, "move_stragglers": False})
        await inner.start()
        yield InterruptibleEngine(inner)
        await inner.close()


async def eventually(check: Callable[[], bool], within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while not check():
            await asyncio.sleep(0.005)


async def ask(engine: InterruptibleEngine | PoolEngine, count: int = 8) -> list[Completion]:
    requests = (engine.generate([1], SAMPLING, request_id=f"{n}") for n in range(count))
    return await asyncio.gather(*requests)


async def fail_an_update(engine: InterruptibleEngine, server: Server) -> None:
    """So that the server owes weights."""
    server.load_error = "disk full"
    await engine.update_weights("/1", 1)
    server.load_error, server.loads = "", 0


async def test_requests_do_not_wait_behind_a_load_and_it_is_made_once(
    engine: InterruptibleEngine, a: Server, b: Server
) -> None:
    await fail_an_update(engine, b)
    b.load_error = "disk full"
    b.gate.clear()
    for _ in range(20):
        await asyncio.wait_for(ask(engine), 5)
    assert (b.loads, b.served) == (1, 0)
    b.gate.set()
    for _ in range(50):
        await ask(engine)
    assert 1 <= b.loads <= 10  # with rests between them
    b.load_error = ""
    while not b.served:
        assert {one.policy_versions[0] for one in await ask(engine)} == {(0, 1)}
    assert b.cut_off == 0


async def test_a_load_that_takes_long_is_not_cut_off(
    engine: InterruptibleEngine, a: Server, b: Server
) -> None:
    """Longer than the watch waits for a replica, which is deaf meanwhile."""
    await fail_an_update(engine, b)
    b.deaf_while_loading = True
    b.gate.clear()
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() - began < 0.4:  # eight times `probe_after`
        await ask(engine)
    assert engine.engine.is_loading("b")  # type: ignore[attr-defined]
    assert not engine.engine.is_loading("a")  # type: ignore[attr-defined]
    b.gate.set()
    while not b.served:
        await ask(engine)
    assert (b.loads, b.cut_off) == (1, 0)


async def test_the_next_update_and_aborts_do_not_wait_for_a_load_of_before(
    engine: InterruptibleEngine, a: Server, b: Server
) -> None:
    await fail_an_update(engine, b)
    b.gate.clear()
    await ask(engine)
    await asyncio.wait_for(engine.update_weights("/2", 2), 5)
    assert {one.policy_versions[0] for one in await ask(engine)} == {(0, 2)}
    a.away = True  # now there is nobody else to ask
    waits = asyncio.create_task(ask(engine, 1))
    flights = engine.engine._in_flight  # type: ignore[attr-defined]
    await eventually(lambda: "0" in flights and flights["0"].leash is not None)
    await asyncio.wait_for(engine.abort("0"), 1)
    assert [one.finish_reason for one in await asyncio.wait_for(waits, 1)] == ["abort"]
    waits = asyncio.create_task(ask(engine, 3))
    await asyncio.sleep(0.02)
    assert not waits.done()
    b.gate.set()  # it ends with the weights of before, and loads those that are wanted now
    assert {one.policy_versions[0] for one in await waits} == {(0, 2)}
    assert (b.loads, b.cut_off) == (2, 0)


async def test_health_is_no_while_the_only_server_has_no_weights(a: Server) -> None:
    inner = PoolEngine([a], kwargs={"probe_after": 0})
    await inner.start()
    await inner.update_weights("/1", 1)
    a.away, a.loads = True, 0
    with pytest.raises(EngineUnavailableError, match="a is away"):
        await ask(inner, 1)
    a.away, a.load_error = False, "no such folder"
    assert not await inner.health()
    assert a.loads == 1  # the question tries it
    with pytest.raises(EngineUnavailableError, match="a has no weights of version 1: no such folder"):
        await ask(inner, 1)
    assert a.loads == 1  # it rests
    a.gate.clear()
    await asyncio.sleep(0.06)
    assert not await inner.health()  # does not wait for long
    assert a.loading == 1
    a.load_error = ""
    a.gate.set()
    await eventually(lambda: not a.loading)
    assert await inner.health()
    assert (await ask(inner, 1))[0].policy_versions == [(0, 1)]
    await inner.close()


async def test_health_is_no_while_the_only_server_is_another_one(a: Server) -> None:
    inner = PoolEngine([a], kwargs={"probe_after": 0})
    await inner.start()
    a.away = True
    with pytest.raises(EngineUnavailableError):
        await ask(inner, 1)
    a.away, a.capabilities = False, replace(CAPABILITIES, logprobs="processed")
    assert not await inner.health()
    a.capabilities = CAPABILITIES
    await asyncio.sleep(0.06)
    assert await inner.health()
    assert a.described == 3
    await inner.close()


async def test_a_server_that_hangs_does_not_keep_an_update(
    a: Server, b: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_LET_GO_S", 0.05)
    inner = PoolEngine([a, b], kwargs={"probe_after": 0, "move_stragglers": False})
    await inner.start()
    engine = InterruptibleEngine(inner)
    b.hangs = True
    asked = asyncio.create_task(ask(engine, 8))
    await eventually(lambda: len(inner._in_flight) == 4 and a.served == 4)
    await asyncio.wait_for(engine.update_weights("/1", 1), 5)
    assert b.loads == 0  # it would keep all waiting
    answers = await asyncio.wait_for(asked, 5)
    assert sorted(one.policy_versions[0][1] for one in answers) == [0] * 4 + [1] * 4
    await inner.close()


async def test_closing_waits_for_a_load_but_not_for_ever(
    engine: InterruptibleEngine, b: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await fail_an_update(engine, b)
    b.gate.clear()
    await ask(engine)
    await eventually(lambda: b.loading == 1)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    await asyncio.wait_for(closing, 5)
    await eventually(lambda: b.cut_off == 1)
    assert "b still loads weights" in caplog.text


async def test_an_unexpected_error_is_said_and_not_repeated_in_a_hot_loop(
    a: Server, b: Server, caplog: pytest.LogCaptureFixture
) -> None:
    inner = PoolEngine([a, b], kwargs={"probe_after": 0})
    await inner.start()
    inner._introductions.owe("b")

    async def broken() -> Capabilities:
        b.described += 1
        raise KeyError("a mistake")

    b.described, b.describe = 0, broken  # type: ignore[method-assign]
    for _ in range(10):
        await ask(inner)
    assert "b cannot be made fit for work" in caplog.text
    assert 1 <= b.described <= 5
    await inner.close()
