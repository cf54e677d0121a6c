"""The cap on in-flight work: by properties, and against a simulated engine (`bench.simulated_engine`)."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulated_engine import Lengths, Machine, Outcome, SimulatedEngine, lognormal, pareto, simulate
from rollstream.engine.base import EngineLoad
from rollstream.rollout.concurrency import ConcurrencyPolicy, Observation

MANY = 10**9
LONG_TAIL = pareto(200, 1.1)
SHORT = lognormal(500, 0.8)


def slots(number: int, replicas: int = 1) -> SimulatedEngine:
    """Memory is no limit; beyond `number` requests for each replica there is a queue."""
    return SimulatedEngine(Machine(slots=number, kv_tokens=MANY), replicas=replicas)


def changes(outcome: Outcome) -> int:
    return sum(a != b for (_, a), (_, b) in pairwise(outcome.caps))


def times(number: int, at: float = 0.0, **fields: object) -> list[Observation]:
    """Observations of a steady run, two seconds apart; 20 requests end between two of them."""
    base = Observation(at, 64, 64, 0)
    return [
        replace(base, at=at + 2 * i, finished=20 * i, **fields)  # type: ignore[arg-type]
        for i in range(number)
    ]


counts = st.integers(0, 5000)
loads = st.none() | st.builds(
    EngineLoad, counts, counts, st.none() | st.floats(0, 1), st.none() | st.integers(0, 10**6)
)
steps = st.tuples(st.floats(0.0, 1000.0), counts, counts, counts, counts, counts, loads)


@given(st.integers(1, 2000), st.lists(steps, max_size=60), st.sets(st.integers(0, 60)))
@settings(deadline=None, max_examples=300)
def test_the_cap_stays_within_bounds_whatever_is_observed(
    maximum: int, observed: list[tuple[object, ...]], outages: set[int]
) -> None:
    cap = ConcurrencyPolicy(maximum)
    at = finished = overloads = timeouts = 0.0
    for number, (dt, in_flight, calls, done, refused, late, load) in enumerate(observed):
        at, finished = at + dt, finished + done  # type: ignore[operator]
        overloads, timeouts = overloads + refused, timeouts + late  # type: ignore[operator]
        if number in outages:
            cap.interrupt()
        answer = cap.observe(
            Observation(at, in_flight, calls, finished, overloads, timeouts, load)  # type: ignore[arg-type]
        )
        assert answer == cap.cap
        assert 1 <= answer <= maximum


@given(st.integers(1, 64), st.sampled_from(["quiet", "silent", "queue"]), st.integers(4, 60))
def test_nothing_changes_without_evidence(maximum: int, engine: str, number: int) -> None:
    load = {
        "quiet": EngineLoad(64, 0, 0.5, 7),
        "silent": None,
        "queue": EngineLoad(20, 40, 0.99, 7),  # a full cache with a short queue is a busy engine
    }[engine]
    cap = ConcurrencyPolicy(maximum)
    assert {cap.observe(one) for one in times(number, in_flight=maximum, load=load)} == {maximum}


@pytest.mark.parametrize(
    "overload",
    [
        lambda i: {"overloads": 5 * i},
        lambda i: {"timeouts": 5 * i},
        lambda i: {"load": EngineLoad(60, 4, 0.99, 20 * i)},
    ],
    ids=["refused", "timed out", "preempted"],
)
def test_pure_overload_only_ever_shrinks_the_cap(overload: Callable[[int], dict[str, object]]) -> None:
    cap = ConcurrencyPolicy(1000)
    seen = [1000]
    for i, one in enumerate(times(400)):
        # The run follows the cap at once, and it never helps.
        seen.append(cap.observe(replace(one, in_flight=cap.cap, **overload(i))))  # type: ignore[arg-type]
        assert seen[-1] <= seen[-2]
    assert seen[-1] == 1 or (seen[-1] < 100 and "preempt" in cap.reason)


def test_one_refusal_in_a_hundred_is_no_overload() -> None:
    cap = ConcurrencyPolicy(64)
    for i, one in enumerate(times(100)):
        assert cap.observe(replace(one, overloads=i // 10, timeouts=i // 5)) == 64


def test_what_was_seen_before_a_change_took_effect_does_not_count() -> None:
    cap = ConcurrencyPolicy(64)
    observed = times(50)
    for i, one in enumerate(observed[:5]):
        cap.observe(replace(one, overloads=100 * i))
    lower = cap.cap
    assert 40 <= lower < 64
    for i, one in enumerate(observed[5:40]):  # 64 are in flight still, and more are refused
        assert cap.observe(replace(one, overloads=10_000 * i)) == lower
    assert cap.observe(replace(observed[40], in_flight=lower, overloads=10**6)) == lower
    for one in observed[41:44]:
        assert cap.observe(replace(one, in_flight=lower, overloads=10**6)) == lower


def test_an_outage_is_no_evidence() -> None:
    cap = ConcurrencyPolicy(64)
    for i, one in enumerate(times(100)):
        if i % 3 == 0:
            cap.interrupt()
        assert cap.observe(replace(one, overloads=1000 * (i // 3))) == 64


def test_a_queue_that_comes_and_goes_is_no_evidence() -> None:
    cap = ConcurrencyPolicy(1000)
    for i, one in enumerate(times(200)):
        queued = 900 if i % 4 else 0  # all come back from their tools at once
        assert cap.observe(replace(one, in_flight=1000, load=EngineLoad(50, queued, None, None))) == 1000


def test_a_queue_while_the_engine_takes_in_its_prompts_is_no_evidence() -> None:
    cap = ConcurrencyPolicy(1000)
    for i, one in enumerate(times(50)):
        running = 8 * i
        load = EngineLoad(running, 1000 - running, 0.5, 0)
        assert cap.observe(replace(one, in_flight=1000, load=load)) == 1000


def test_a_window_that_is_not_full_does_not_grow() -> None:
    cap = ConcurrencyPolicy(100)
    for i, one in enumerate(times(6)):
        cap.observe(replace(one, in_flight=100, overloads=20 * i))
    low = cap.cap
    assert low < 100
    for one in times(100, at=100.0, load=EngineLoad(3, 0, 0.1, 0)):
        assert cap.observe(replace(one, in_flight=low - 5)) == low
    for one in times(100, at=400.0, load=EngineLoad(3, 0, 0.1, 0)):
        cap.observe(replace(one, in_flight=cap.cap))
    assert cap.cap == 100


@pytest.mark.parametrize("says_load", [True, False])
@pytest.mark.parametrize("lengths", [LONG_TAIL, lognormal(300, 1.2)], ids=["pareto", "lognormal"])
@pytest.mark.parametrize("turns", [1, 4])
def test_an_engine_with_room_is_never_held_back(says_load: bool, lengths: Lengths, turns: int) -> None:
    outcome = simulate(
        slots(128),
        ConcurrencyPolicy(64),
        lengths=lengths,
        rollouts=1200 // turns,
        turns=turns,
        tool_s=lambda rng: rng.expovariate(0.1),
        says_load=says_load,
        until=2000,
    )
    assert {cap for _, cap in outcome.caps} == {64}


ENGINES: dict[str, Callable[[], SimulatedEngine]] = {
    "fast prefill": SimulatedEngine,
    "slow prefill": lambda: SimulatedEngine(Machine(prefill_s=0.0002)),
    "slots": lambda: slots(64),
    "refuses": lambda: SimulatedEngine(Machine(queue_limit=64)),
    "reserves": lambda: SimulatedEngine(Machine(reserves=True)),
}


LENGTHS = {"lognormal": lognormal(1500, 0.8), "pareto": pareto(600, 1.5)}


@cache
def best_rate(engine: str, lengths: str) -> float:
    """Of fixed caps."""
    return max(
        simulate(ENGINES[engine](), cap, lengths=LENGTHS[lengths], rollouts=1200).rate
        for cap in (32, 48, 64, 96, 128, 256)
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("says_load", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_throughput_is_within_a_tenth_of_the_best_fixed_cap(
    engine: str, says_load: bool, lengths: str
) -> None:
    cap = ConcurrencyPolicy(256)
    outcome = simulate(ENGINES[engine](), cap, lengths=LENGTHS[lengths], rollouts=1200, says_load=says_load)
    # Without a word from the engine, what is lost to preemptions is not seen.
    blind = 0.85 if engine == "slow prefill" and not says_load else 0.9
    assert outcome.rate >= blind * best_rate(engine, lengths)
    assert changes(outcome) <= outcome.seconds / 10


def test_a_lost_replica_and_its_return() -> None:
    finished: list[tuple[float, int]] = []
    outcome = simulate(
        slots(64, replicas=2),
        ConcurrencyPolicy(256),
        lengths=SHORT,
        rollouts=MANY,
        events={300: SimulatedEngine.lose_replica, 600: lambda engine: setattr(engine, "replicas", 2)},
        finished_at=finished,
        until=900,
    )
    caps = dict(outcome.caps)

    def cap_at(second: float) -> int:
        return min(caps.items(), key=lambda item: abs(item[0] - second))[1]

    assert cap_at(299) == 256
    fewest = min(cap for at, cap in outcome.caps if 300 < at < 600)
    assert 64 <= fewest <= 180  # fewer wait in vain
    assert cap_at(599) < 256
    assert cap_at(899) >= 128  # all slots of both are used
    before, after = (outcome.rate_between(a, b, finished) for a, b in ((100, 300), (700, 900)))
    assert outcome.rate_between(400, 600, finished) > 0.45 * before
    assert after > 0.95 * before


def test_an_engine_that_reports_no_load_gets_its_cap_back_after_refusals() -> None:
    cap = ConcurrencyPolicy(256)
    for i, one in enumerate(times(10)):
        cap.observe(replace(one, in_flight=cap.cap, overloads=10 * i))
    low = cap.cap
    assert low < 128
    for one in times(400, at=100.0, overloads=90):
        cap.observe(replace(one, in_flight=cap.cap))
    assert cap.cap == 256
