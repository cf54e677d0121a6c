"""Which replica gets a request: a pure state machine, with a clock that the test turns."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollstream.engine.routing import Pick, Router


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def router(*names: str) -> tuple[Router, Clock]:
    clock = Clock()
    return Router(names, clock=clock, rng=random.Random(0)), clock


def answer(router: Router, clock: Clock, pick: Pick, *, seconds: float, tokens: int = 100) -> None:
    clock.now += seconds
    router.release(pick, "answered", tokens=tokens)


def pick(router: Router, session: str | None = None, tried: tuple[str, ...] = ()) -> Pick:
    found = router.pick(session, tried)
    assert found is not None
    return found


def test_the_least_loaded_one_is_taken_and_ties_are_random() -> None:
    routes, _ = router("a", "b", "c")
    for _ in range(10):
        assert {pick(routes).name for _ in range(3)} == {"a", "b", "c"}
    assert [state.in_flight for state in routes.replicas.values()] == [10, 10, 10]
    firsts = Counter(pick(router_with(seed)).name for seed in range(60))
    assert min(firsts["a"], firsts["b"]) > 10


def router_with(seed: int) -> Router:
    return Router(["a", "b"], clock=Clock(), rng=random.Random(seed))


def test_a_session_stays_where_it_was() -> None:
    routes, clock = router("a", "b", "c", "d")
    home = pick(routes, "s")
    for _ in range(20):
        answer(routes, clock, home, seconds=1.0)
        assert pick(routes, "s").name == home.name
    answer(routes, clock, Pick(home.name, False, clock.now), seconds=1.0)
    assert pick(routes, "s", (home.name,)).name != home.name


def test_a_session_leaves_a_replica_that_is_overloaded() -> None:
    routes, _ = router("a", "b")
    home = pick(routes, "s").name
    other = ({"a", "b"} - {home}).pop()
    for _ in range(12):
        pick(routes, None, (other,))
    assert pick(routes, "s").name == other


def test_a_slow_replica_gets_less() -> None:
    routes, clock = router("slow", "fast")
    for _ in range(20):
        answer(routes, clock, pick(routes, None, ("fast",)), seconds=3.0)
        answer(routes, clock, pick(routes, None, ("slow",)), seconds=1.0)
    taken = Counter(pick(routes).name for _ in range(40))
    assert 2.5 < taken["fast"] / taken["slow"] < 3.5


def test_one_that_is_away_gets_nothing_until_its_time_and_then_one_request() -> None:
    routes, clock = router("a", "b")
    routes.release(pick(routes, None, ("b",)), "away")
    assert [pick(routes).name for _ in range(5)] == ["b"] * 5
    clock.now += 1.01
    trial = pick(routes)
    assert (trial.name, trial.trial) == ("a", True)
    assert [pick(routes).name for _ in range(5)] == ["b"] * 5
    routes.release(trial, "away")
    clock.now += 1.01
    assert pick(routes).name == "b"  # twice as long this time
    clock.now += 1.01
    trial = pick(routes)
    assert trial.name == "a"
    routes.release(trial, "answered", tokens=10)
    assert Counter(pick(routes).name for _ in range(6))["a"] == 6  # it is idle, "b" is not


def test_what_was_in_flight_when_it_went_does_not_lengthen_the_wait() -> None:
    routes, clock = router("a", "b")
    crowd = [pick(routes, None, ("b",)) for _ in range(50)]
    for one in crowd:
        routes.release(one, "away")
    clock.now += 1.01
    assert pick(routes).trial


def test_when_all_are_away_they_are_tried_once_each() -> None:
    routes, _ = router("a", "b")
    for name in ("a", "b"):
        routes.release(pick(routes, None, tuple({"a", "b"} - {name})), "away")
    first = pick(routes)
    second = pick(routes, None, (first.name,))
    assert {first.name, second.name} == {"a", "b"}
    assert routes.pick(None, ("a", "b")) is None


def test_one_failure_is_an_accident_five_are_not() -> None:
    routes, _ = router("a", "b")
    for _ in range(4):
        routes.release(pick(routes, None, ("b",)), "failed")
    assert not routes.replicas["a"].is_open
    routes.release(pick(routes, None, ("b",)), "failed")
    assert [pick(routes).name for _ in range(3)] == ["b"] * 3


def test_one_that_hangs_gets_nothing_until_it_is_heard_of_and_then_one_request() -> None:
    routes, clock = router("a", "b")
    held = [pick(routes, None, ("b",)) for _ in range(3)]
    clock.now += 30
    assert routes.silent(29) == ["a"]
    assert routes.silent(31) == []
    routes.hang("a")
    for one in held:
        routes.release(one, "away")
    clock.now += 1000
    assert [pick(routes).name for _ in range(5)] == ["b"] * 5
    assert routes.pick(None, ("b",)) is None
    assert routes.take("a") is None
    routes.heard("a")
    assert pick(routes) == Pick("a", True)
    assert [pick(routes).name for _ in range(3)] == ["b"] * 3


def test_the_speed_is_that_of_all_tokens_not_of_single_answers() -> None:
    """One short quick answer says less than a long slow one."""
    routes, clock = router("a")
    answer(routes, clock, pick(routes), seconds=0.1, tokens=10)
    answer(routes, clock, pick(routes), seconds=10.0, tokens=500)
    assert routes.replicas["a"].tokens_per_second == pytest.approx((0.9 * 10 + 500) / (0.9 * 0.1 + 10))


def test_one_that_is_late_with_its_first_answer_counts_as_slow() -> None:
    routes, clock = router("new", "known")
    for _ in range(4):
        pick(routes, None, ("known",))
    for _ in range(10):
        answer(routes, clock, pick(routes, None, ("new",)), seconds=1.0)
    # 4 in flight for 10 s, where an answer of 100 tokens takes 1 s.
    assert routes.load("new") == pytest.approx(5 / (100 / 10))


def test_replicas_come_and_go() -> None:
    routes, _ = router("a")
    gone = pick(routes)
    routes.add("b")
    routes.remove("a")
    assert pick(routes).name == "b"
    routes.release(gone, "answered", tokens=10)
    assert set(routes.replicas) == {"b"}


class Routing(RuleBasedStateMachine):
    """Any sequence of requests, ends, waits, comings and goings."""

    def __init__(self) -> None:
        super().__init__()
        self.routes, self.clock = router("a", "b", "c")
        self.flights: list[Pick] = []

    @rule(session=st.sampled_from([None, "s", "t"]), tried=st.sets(st.sampled_from("abcd")))
    def ask(self, session: str | None, tried: set[str]) -> None:
        found = self.routes.pick(session, tried)
        left = set(self.routes.replicas) - tried - set(self.routes.hung)
        assert (found is None) == (not left)
        if found is not None:
            assert found.name in left
            self.flights.append(found)

    @rule(data=st.data(), seconds=st.floats(0.001, 50), tokens=st.integers(0, 500))
    def end(self, data: st.DataObject, seconds: float, tokens: int) -> None:
        if self.flights:
            flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
            self.clock.now += seconds
            outcome = data.draw(st.sampled_from(["answered", "failed", "away", "cancelled"]))
            self.routes.release(flight, outcome, tokens=tokens)

    @rule(name=st.sampled_from("abcd"))
    def seat(self, name: str) -> None:
        state = self.routes.replicas.get(name)
        found = self.routes.take(name)
        assert (found is None) == (state is None or state.is_open or state.is_hung)
        if found is not None:
            self.flights.append(found)

    @rule(name=st.sampled_from("abcd"), hangs=st.booleans())
    def hang_or_wake(self, name: str, hangs: bool) -> None:
        if hangs:
            self.routes.hang(name)
        else:
            self.routes.heard(name)
        assert (name in self.routes.hung) == (hangs and name in self.routes.replicas)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(name=st.sampled_from("abcd"))
    def come_or_go(self, name: str) -> None:
        if name not in self.routes.replicas:
            self.routes.add(name)
        elif len(self.routes.replicas) > 1 and not any(flight.name == name for flight in self.flights):
            self.routes.remove(name)

    @invariant()
    def counts_are_those_of_what_is_in_flight(self) -> None:
        counts = Counter(flight.name for flight in self.flights)
        trials = Counter(flight.name for flight in self.flights if flight.trial)
        for name, state in self.routes.replicas.items():
            assert state.in_flight == counts[name]
            assert state.tries == trials[name]
            assert state.open_for <= 15.0
            began = sum(flight.began for flight in self.flights if flight.name == name)
            assert abs(state.began - began) < 1e-6 * max(1.0, began)
        for lane in self.routes.lanes().values():
            assert lane.speed > 0
            assert lane.usual >= 0
        assert all(self.routes.replicas[name].in_flight for name in self.routes.silent(0.0))


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_shares_follow_speeds(latencies: list[float], seed: int) -> None:
    """With a steady window, a replica's share of the work in flight is near its share of the speed."""
    clock = Clock()
    names = [str(at) for at in range(len(latencies))]
    routes = Router(names, clock=clock, rng=random.Random(seed))
    for name, latency in zip(names, latencies, strict=True):
        for _ in range(30):
            chosen = pick(routes, None, tuple(set(names) - {name}))
            answer(routes, clock, chosen, seconds=latency)
    window = 60 * len(names)
    taken = Counter(pick(routes).name for _ in range(window))
    total = sum(1 / latency for latency in latencies)
    for name, latency in zip(names, latencies, strict=True):
        assert abs(taken[name] - window / latency / total) < 2 + 0.02 * window
