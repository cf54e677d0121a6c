"""Nothing is generated with any but the wanted weights, whatever happens to the replicas."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollstream.engine.base import Capabilities
from rollstream.engine.pool_weights import FIRST, LoadResult, PoolWeights, WeightLedger, Weights
from rollstream.engine.replica import ReplicaAwayError, ReplicaRequest, WeightsLostError
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams

NAMES = ("a", "b", "c")
RESULTS: tuple[LoadResult, ...] = ("loaded", "refused", "unknown", "not asked")


class Ledger(RuleBasedStateMachine):
    """Beside the ledger there is the truth; what the ledger lets work must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = WeightLedger()
        self.truth = dict.fromkeys(NAMES, FIRST)
        self.versions = 0

    @rule(results=st.tuples(*(st.sampled_from(RESULTS) for _ in NAMES)), done=st.booleans())
    def update(self, results: tuple[LoadResult, ...], done: bool) -> None:
        self.versions += 1
        weights = Weights(f"/step{self.versions}", self.versions)
        before = self.ledger.wanted
        said = dict(zip(NAMES, results, strict=True))
        for name, result in said.items():
            if result == "loaded" or (result == "unknown" and done):
                self.truth[name] = weights
        went_well = self.ledger.settle(weights, said)
        assert went_well == ("loaded" in results)
        assert self.ledger.wanted == (weights if went_well else before)

    @rule(name=st.sampled_from(NAMES))
    def starts_anew(self, name: str) -> None:
        """And its requests in flight are lost, which shows."""
        self.truth[name] = FIRST
        self.ledger.lost(name, self.ledger.epoch(name))

    @rule(name=st.sampled_from(NAMES))
    def says_late_that_it_was_away(self, name: str) -> None:
        before = self.ledger.owes(name)
        self.ledger.lost(name, self.ledger.epoch(name) - 1)
        assert self.ledger.owes(name) == before

    @rule(name=st.sampled_from(NAMES))
    def loads_what_it_owes(self, name: str) -> None:
        if self.ledger.owes(name) and self.ledger.wanted != FIRST:
            self.truth[name] = self.ledger.wanted
            self.ledger.loaded(name, self.ledger.wanted)
            assert not self.ledger.owes(name)

    @invariant()
    def nobody_works_with_other_weights(self) -> None:
        working = [name for name in NAMES if not self.ledger.owes(name)]
        assert all(self.truth[name] == self.ledger.wanted for name in working)


class TestLedger(Ledger.TestCase):  # type: ignore[name-defined,misc]
    pass


@given(st.integers(1, 5))
def test_all_that_loaded_go_on(count: int) -> None:
    ledger = WeightLedger()
    names = [str(i) for i in range(count)]
    assert not any(ledger.owes(name) for name in names)
    assert ledger.settle(Weights("/x", 3), dict.fromkeys(names, "loaded"))
    assert not any(ledger.owes(name) for name in names)
    assert ledger.owes("one that joins later")
    ledger.forget(names[0])
    assert ledger.owes(names[0])


@dataclass(eq=False)
class FakeServer:
    """A replica with weights, which it may refuse, or get without saying so."""

    name: str
    version: int = 0
    healthy: bool = True
    errors: list[Exception | None] = field(default_factory=list)
    """Of the next loads; None goes well."""
    loads: list[int] = field(default_factory=list)
    gate: asyncio.Event | None = None
    busy: int = 0
    most_busy: int = 0

    async def describe(self) -> Capabilities:
        raise NotImplementedError

    async def generate(self, request: ReplicaRequest) -> Completion:
        if not self.healthy:
            raise ReplicaAwayError(f"{self.name} is away")
        return Completion([1], [-1.0], "length", [(0, self.version)])

    async def abort(self, rid: str) -> None: ...

    async def health(self) -> bool:
        return self.healthy

    async def update_weights(self, source: str, version: int) -> None:
        self.loads.append(version)
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            error = self.errors.pop(0) if self.errors else None
            if error is None and not self.healthy:
                error = ReplicaAwayError(f"{self.name} is away")
            if error is not None:
                raise error
            self.version = version
        finally:
            self.busy -= 1

    async def close(self) -> None: ...


def request() -> ReplicaRequest:
    return ReplicaRequest([1], SamplingParams(1), "a", "a.1")


async def version_from(weights: PoolWeights, server: FakeServer) -> int:
    await weights.settled()
    if weights.ledger.owes(server.name):
        with pytest.raises(ReplicaAwayError, match="has no weights of version"):
            await weights.generate(server, request())
        await weights.bring_up(server)
    return (await weights.generate(server, request())).policy_versions[0][1]


async def test_a_replica_that_failed_loads_before_its_next_request() -> None:
    weights, servers = PoolWeights(), [FakeServer("a"), FakeServer("b"), FakeServer("c")]
    servers[1].errors = [TransientEngineError("busy")] * 3
    servers[2].healthy = False
    await weights.update(servers, "/step1", 1)
    assert [server.loads for server in servers] == [[1], [1, 1], []]  # those that failed, once more
    assert await version_from(weights, servers[0]) == 1
    with pytest.raises(ReplicaAwayError, match="b has no weights of version 1: busy"):
        await version_from(weights, servers[1])
    servers[2].healthy = True
    answers = await asyncio.gather(*(version_from(weights, server) for server in servers * 4))
    assert answers == [1] * 12
    assert [len(server.loads) for server in servers] == [1, 4, 1]  # once for all who waited


async def test_none_could_load() -> None:
    weights, servers = PoolWeights(), [FakeServer("a"), FakeServer("b")]
    for server in servers:
        server.errors = [EngineError("no such folder")]
    with pytest.raises(EngineError, match=r"none of 2 replicas could load /step1 .*no such folder"):
        await weights.update(servers, "/step1", 1)
    assert [server.loads for server in servers] == [[1], [1]]
    assert [await version_from(weights, server) for server in servers] == [0, 0]
    await weights.update(servers, "/step2", 2)
    for server in servers:
        server.errors = [EngineError("broken file")]
    with pytest.raises(EngineError, match="broken file"):
        await weights.update(servers, "/step3", 3)
    assert [await version_from(weights, server) for server in servers] == [2, 2]
    assert [server.loads for server in servers] == [[1, 2, 3]] * 2
    for server in servers:
        server.errors = [WeightsLostError("broken file")]
    with pytest.raises(EngineError, match="broken file"):
        await weights.update(servers, "/step4", 4)
    assert [await version_from(weights, server) for server in servers] == [2, 2]  # they load the old ones
    assert [server.loads for server in servers] == [[1, 2, 3, 4, 2]] * 2


async def test_nobody_is_there() -> None:
    weights, server = PoolWeights(), FakeServer("a", healthy=False)
    with pytest.raises(EngineUnavailableError, match="no server is there to load weights"):
        await weights.update([server], "/step1", 1)
    server.healthy = True
    assert await version_from(weights, server) == 0


async def test_lost_midway_before_any_other_weights_were_named() -> None:
    weights, server = PoolWeights(), FakeServer("a")
    server.errors = [ReplicaAwayError("lost"), ReplicaAwayError("lost")]
    with pytest.raises(EngineError, match="none of 1 replicas"):
        await weights.update([server], "/step1", 1)
    with pytest.raises(ReplicaAwayError, match="nobody knows which it has: update again"):
        await version_from(weights, server)
    await weights.update([server], "/step2", 2)
    assert await version_from(weights, server) == 2


async def test_a_server_that_was_started_anew_is_found_out() -> None:
    weights, servers = PoolWeights(), [FakeServer("a"), FakeServer("b")]
    await weights.update(servers, "/step5", 5)
    servers[0].version = 0  # in a quiet moment: no request shows that it was away
    with pytest.raises(ReplicaAwayError, match="weights of version 0, but had loaded version 5"):
        await version_from(weights, servers[0])
    assert await version_from(weights, servers[0]) == 5
    servers[1].healthy = False
    with pytest.raises(ReplicaAwayError, match="is away"):
        await version_from(weights, servers[1])
    servers[1].healthy, servers[1].version = True, 0
    assert await version_from(weights, servers[1]) == 5
    assert [server.loads for server in servers] == [[5, 5], [5, 5]]


async def test_new_requests_wait_and_updates_follow_each_other() -> None:
    weights, gate = PoolWeights(), asyncio.Event()
    servers = [FakeServer("a", gate=gate), FakeServer("b")]
    updates = [asyncio.create_task(weights.update(servers, f"/{i}", i)) for i in (1, 2)]
    while not servers[1].version:
        await asyncio.sleep(0)
    asked = asyncio.create_task(version_from(weights, servers[1]))
    await asyncio.sleep(0)
    assert not weights.is_settled
    assert servers[1].loads == [1]
    assert not asked.done()
    gate.set()
    await asyncio.gather(*updates)
    assert await asked in (1, 2)
    assert [server.most_busy for server in servers] == [1, 1]
    assert [server.loads for server in servers] == [[1, 2], [1, 2]]


async def test_a_cancelled_update_comes_to_its_end() -> None:
    weights, gate = PoolWeights(), asyncio.Event()
    servers = [FakeServer("a", gate=gate), FakeServer("b")]
    update = asyncio.create_task(weights.update(servers, "/1", 1))
    while not servers[1].version:
        await asyncio.sleep(0)
    update.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not update.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert [await version_from(weights, server) for server in servers] == [1, 1]
    assert [server.loads for server in servers] == [[1], [1]]


async def test_an_update_does_not_wait_for_one_that_is_not_healthy_or_loads_weights_of_before() -> None:
    weights, gate = PoolWeights(), asyncio.Event()
    servers = [FakeServer("a"), FakeServer("b"), FakeServer("c", healthy=False)]
    servers[1].errors = [TransientEngineError("disk full")] * 2
    await weights.update(servers, "/1", 1)
    servers[1].gate = servers[2].gate = gate
    late = asyncio.create_task(weights.bring_up(servers[1]))
    while not servers[1].busy:
        await asyncio.sleep(0)
    await asyncio.wait_for(weights.update(servers, "/2", 2), 5)
    assert [server.loads for server in servers] == [[1, 2], [1, 1, 1], []]
    gate.set()
    await late
    assert weights.ledger.owes("b") and weights.ledger.owes("c")
    servers[2].healthy = True
    assert [await version_from(weights, server) for server in servers] == [2, 2, 2]


async def test_base_weights_do_not_enter_a_run_that_began_with_others() -> None:
    """A trainer had updated the server before the run; nobody has told the run where those weights are."""
    weights, server = PoolWeights(), FakeServer("a", version=7)
    assert await version_from(weights, server) == 7
    server.healthy = False
    with pytest.raises(ReplicaAwayError, match="is away"):
        await version_from(weights, server)
    with pytest.raises(ReplicaAwayError, match="does not show the version of its weights: a is away"):
        await weights.bring_up(server)
    server.healthy, server.version = True, 0
    with pytest.raises(ReplicaAwayError, match=r"version 0, but it, .* had version 7 before"):
        await weights.bring_up(server)
    with pytest.raises(ReplicaAwayError, match="has no weights"):
        await weights.generate(server, request())
    server.version = 7  # it was given them again
    assert await version_from(weights, server) == 7
    server.version = 8  # the trainer goes on
    assert await version_from(weights, server) == 8
    server.version = 0  # in a quiet moment
    with pytest.raises(ReplicaAwayError, match=r"version 0, but it, .* had version 8 before"):
        await weights.generate(server, request())
    joins = FakeServer("b")
    weights.ledger.join("b")
    with pytest.raises(ReplicaAwayError, match=r"version 0, but it, .* had version 8 before"):
        await weights.bring_up(joins)
    joins.version = 9
    assert await version_from(weights, joins) == 9
    await weights.update([server, joins], "/x", 3)
    assert [await version_from(weights, one) for one in (server, joins)] == [3, 3]


async def test_servers_without_a_version_are_asked_for_nothing() -> None:
    weights, server = PoolWeights(), FakeServer("a")
    assert await version_from(weights, server) == 0
    server.healthy = False
    with pytest.raises(ReplicaAwayError, match="is away"):
        await weights.generate(server, request())
    assert not weights.ledger.owes("a")
    weights.ledger.join("b")
    assert not weights.ledger.owes("b")
