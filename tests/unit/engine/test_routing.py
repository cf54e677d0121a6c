"""Which replica gets a request: a pure state machine, with a clock that the test turns."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollstream.engine import routing
from rollstream.engine.routing import Outcome, Pick, Router


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def router(*names: str, seed: int = 0) -> tuple[Router, Clock]:
    clock = Clock()
    return Router(names, clock=clock, rng=random.Random(seed)), clock


def answer(router: Router, clock: Clock, pick: Pick, *, seconds: float, tokens: int = 100) -> None:
    clock.now += seconds
    router.release(pick, "answered", tokens=tokens)


_counter = iter(range(10**9))


def pick(router: Router, session: str | None = None, among: tuple[str, ...] = ()) -> Pick:
    found = router.pick(among or list(router.replicas), session or f"session {next(_counter)}")
    assert found is not None
    return found


def test_the_least_loaded_one_is_taken_and_ties_are_random() -> None:
    routes, _ = router("a", "b", "c")
    for _ in range(10):
        assert {pick(routes).name for _ in range(3)} == {"a", "b", "c"}
    assert [stats.in_flight for stats in routes.replicas.values()] == [10, 10, 10]
    firsts = Counter(pick(router("a", "b", seed=seed)[0]).name for seed in range(60))
    assert min(firsts["a"], firsts["b"]) > 10
    assert routes.pick([], "s") is None


def test_a_session_stays_where_it_was() -> None:
    routes, clock = router("a", "b", "c", "d")
    home = pick(routes, "s")
    for _ in range(20):
        answer(routes, clock, home, seconds=1.0)
        home = pick(routes, "s")
    assert len({home.name, pick(routes, "s").name}) == 1
    others = tuple({"a", "b", "c", "d"} - {home.name})
    assert pick(routes, "s", others).name != home.name


def test_a_session_leaves_a_replica_that_is_overloaded() -> None:
    routes, _ = router("a", "b")
    home = pick(routes, "s").name
    for _ in range(12):
        pick(routes, None, (home,))
    assert pick(routes, "s").name != home


def test_only_the_newest_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_REMEMBERED_SESSIONS", 4)
    routes, clock = router("a", "b")
    home = pick(routes, "s")
    for _ in range(4):
        answer(routes, clock, pick(routes, None, (home.name,)), seconds=1.0)
    assert pick(routes, "s").name != home.name  # it goes where there is less to do


def test_a_slow_replica_gets_less() -> None:
    routes, clock = router("slow", "fast")
    for _ in range(20):
        answer(routes, clock, pick(routes, None, ("slow",)), seconds=3.0)
        answer(routes, clock, pick(routes, None, ("fast",)), seconds=1.0)
    taken = Counter(pick(routes).name for _ in range(40))
    assert 2.5 < taken["fast"] / taken["slow"] < 3.5


def test_the_speed_is_that_of_all_tokens_not_of_single_answers() -> None:
    """One short quick answer says less than a long slow one."""
    routes, clock = router("a")
    answer(routes, clock, pick(routes), seconds=0.1, tokens=10)
    answer(routes, clock, pick(routes), seconds=10.0, tokens=500)
    assert routes.loads("a")["a"].speed == pytest.approx((0.9 * 10 + 500) / (0.9 * 0.1 + 10))


def test_one_that_is_late_with_its_first_answer_counts_as_slow() -> None:
    routes, clock = router("new", "known")
    for _ in range(4):
        pick(routes, None, ("new",))
    for _ in range(10):
        answer(routes, clock, pick(routes, None, ("known",)), seconds=1.0)
    # In flight for 10 s, where an answer of 100 tokens takes 1 s.
    assert routes.loads(["new"])["new"].speed == pytest.approx(100 / 10)


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
        self.picks: list[Pick] = []

    @rule(session=st.sampled_from("st"), unready=st.sets(st.sampled_from("abcd")))
    def ask(self, session: str, unready: set[str]) -> None:
        left = set(self.routes.replicas) - unready
        found = self.routes.pick(left, session)
        assert (found is None) == (not left)
        if found is not None:
            assert found.name in left
            self.picks.append(found)

    @rule(
        data=st.data(),
        seconds=st.floats(0.001, 50),
        tokens=st.integers(0, 500),
        outcome=st.sampled_from(("answered", "failed", "cancelled")),
    )
    def end(self, data: st.DataObject, seconds: float, tokens: int, outcome: Outcome) -> None:
        if self.picks:
            one = self.picks.pop(data.draw(st.integers(0, len(self.picks) - 1)))
            self.clock.now += seconds
            self.routes.release(one, outcome, tokens=tokens)

    @rule(name=st.sampled_from("abcd"))
    def reserve(self, name: str) -> None:
        if name in self.routes.replicas:
            self.picks.append(self.routes.take(name, "s"))

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(name=st.sampled_from("abcd"))
    def come_or_go(self, name: str) -> None:
        if name not in self.routes.replicas:
            self.routes.add(name)
        elif not any(one.name == name for one in self.picks):
            self.routes.remove(name)

    @invariant()
    def counts_are_those_of_what_is_in_flight(self) -> None:
        counts = Counter(one.name for one in self.picks)
        for name, stats in self.routes.replicas.items():
            assert stats.in_flight == counts[name]
            began = sum(one.began for one in self.picks if one.name == name)
            assert abs(stats.began - began) < 1e-6 * max(1.0, began)
        for load in self.routes.loads(self.routes.replicas).values():
            assert load.speed > 0
            assert load.typical_in_flight >= 0
        assert all(self.routes.replicas[name].in_flight for name in self.routes.silent_for(0.0))


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_shares_follow_speeds(latencies: list[float], seed: int) -> None:
    """With a steady window, a replica's share of the work in flight is near its share of the speed."""
    names = [str(at) for at in range(len(latencies))]
    routes, clock = router(*names, seed=seed)
    for name, latency in zip(names, latencies, strict=True):
        for _ in range(30):
            answer(routes, clock, pick(routes, None, (name,)), seconds=latency)
    window = 60 * len(names)
    taken = Counter(pick(routes).name for _ in range(window))
    total = sum(1 / latency for latency in latencies)
    for name, latency in zip(names, latencies, strict=True):
        assert abs(taken[name] - window / latency / total) < 2 + 0.02 * window
