"""R3, R5, R7: whatever dies when, every key is settled exactly once, and the window holds."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.rollout.dispatch import Dispatch
from rollstream.trajectory import RolloutKey

CAP = 6


def keys(count: int) -> list[RolloutKey]:
    return [RolloutKey(index, repeat) for index in range(count) for repeat in range(2)][:count]


class DispatchMachine(RuleBasedStateMachine):
    """Workers come, die and deliver, late ones too; the model holds who owns what."""

    def __init__(self) -> None:
        super().__init__()
        self.owed = keys(40)
        self.dispatch = Dispatch(iter(self.owed), cap=CAP, max_charges=2, free_deaths=3)
        self.alive: dict[int, set[RolloutKey]] = {}
        self.dead: dict[int, set[RolloutKey]] = {}
        self.at_store: list[RolloutKey] = []
        self.settled: Counter[RolloutKey] = Counter()
        self.failed: set[RolloutKey] = set()
        self.last = 0
        self.cap_now = CAP

    @rule()
    def add(self) -> None:
        if len(self.alive) < 4:
            self.last += 1
            self.dispatch.add(self.last)
            self.alive[self.last] = set()

    @rule(expected=st.integers(1, 4))
    def expect(self, expected: int) -> None:
        self.dispatch.expected = expected

    @rule(cap=st.integers(1, CAP))
    def change_cap(self, cap: int) -> None:
        self.dispatch.cap = self.cap_now = cap

    @rule()
    def assign(self) -> None:
        before = self.dispatch.in_flight
        share = self.dispatch.share
        loads = {worker: len(held) for worker, held in self.alive.items()}
        for worker, got in self.dispatch.assign().items():
            for key in got:
                assert all(key not in held for held in self.alive.values())
                assert key not in self.settled and key not in self.at_store
                self.alive[worker].add(key)
            assert len(self.alive[worker]) <= max(share, loads[worker])
        assert self.dispatch.in_flight <= max(before, self.cap_now)

    @precondition(lambda self: any(self.alive.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker, held in self.alive.items() if held]))
        key = data.draw(st.sampled_from(sorted(self.alive[worker])))
        assert self.dispatch.arrive(worker, key)
        self.alive[worker].remove(key)
        self.at_store.append(key)
        assert not self.dispatch.arrive(worker, key)  # the same again

    @precondition(lambda self: any(self.dead.values()))
    @rule(data=st.data())
    def deliver_late(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker, held in self.dead.items() if held]))
        assert not self.dispatch.arrive(worker, data.draw(st.sampled_from(sorted(self.dead[worker]))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        held = self.alive.pop(worker)
        self.dead[worker] = held
        for key, charges in self.dispatch.lose(worker):
            assert key in held and len(held) == 1 and charges == 2
            self.failed.add(key)
            self.at_store.append(key)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """For want of an engine: nobody is to blame."""
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.dead[worker] = self.alive.pop(worker)
        assert self.dispatch.lose(worker, suspect=False) == []

    @precondition(lambda self: self.at_store)
    @rule()
    def settle(self) -> None:
        key = self.at_store.pop(0)
        self.dispatch.settle(key)
        self.settled[key] += 1

    @invariant()
    def agrees(self) -> None:
        held = sum(map(len, self.alive.values()))
        assert self.dispatch.in_flight == held + len(self.at_store) <= CAP
        assert all(count == 1 for count in self.settled.values())
        for worker, own in self.alive.items():
            assert self.dispatch.held_by(worker) == own

    def teardown(self) -> None:
        """From any state, one worker that lives ends the run."""
        for worker in list(self.alive):
            self.dispatch.lose(worker)
            self.alive.pop(worker)
        self.at_store.extend(self.dispatch._at_store - set(self.at_store))
        self.last += 1
        self.dispatch.add(self.last)
        self.dispatch.expected = 1
        for _ in range(200):
            for key in self.at_store:
                self.dispatch.settle(key)
                self.settled[key] += 1
            self.at_store = []
            if self.dispatch.is_finished:
                break
            for got in self.dispatch.assign().values():
                for key in got:
                    assert self.dispatch.arrive(self.last, key)
                    self.at_store.append(key)
        assert self.dispatch.is_finished
        assert self.settled == Counter(self.owed)


DispatchMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestDispatch = DispatchMachine.TestCase


def run_alone(dispatch: Dispatch, poison: RolloutKey) -> tuple[int, list[tuple[RolloutKey, int]], int]:
    """Workers that die of `poison`; returns deaths, what was handed back, and what was delivered."""
    worker, deaths, delivered = 0, 0, 0
    dispatch.add(worker)
    handed_back: list[tuple[RolloutKey, int]] = []
    while not dispatch.is_finished:
        dispatch.assign()
        assert dispatch.held_by(worker) or dispatch.is_finished  # it never waits for nothing
        if poison in dispatch.held_by(worker):
            deaths += 1
            failed = dispatch.lose(worker)
            for key, _ in failed:
                dispatch.settle(key)
            handed_back += failed
            worker += 1
            dispatch.add(worker)
            continue
        for key in dispatch.held_by(worker):
            assert dispatch.arrive(worker, key)
            dispatch.settle(key)
            delivered += 1
    return deaths, handed_back, delivered


@given(st.integers(0, 19), st.integers(1, 8))
def test_what_kills_its_worker_is_found_and_hurts_itself_only(poison: int, cap: int) -> None:
    owed = keys(20)
    dispatch = Dispatch(iter(owed), cap=cap, max_charges=3, free_deaths=4)
    deaths, handed_back, delivered = run_alone(dispatch, owed[poison])
    assert handed_back == [(owed[poison], 3)]
    assert 4 + 3 <= deaths <= 4 + 3 + 3  # the last three: in company that gets smaller each time
    assert delivered == 19


@given(st.integers(0, 39), st.integers(1, 24), st.integers(1, 5), st.integers())
def test_among_several_workers_it_is_found_too(poison: int, cap: int, count: int, seed: int) -> None:
    """Whoever delivers or dies first: it alone is handed back, and what it costs is bounded."""
    owed, random = keys(40), Random(seed)
    dispatch = Dispatch(iter(owed), cap=cap, max_charges=3)
    workers, deaths, delivered = list(range(count)), 0, 0
    dispatch.expected = count
    for worker in workers:
        dispatch.add(worker)
    handed_back = []
    while not dispatch.is_finished:
        dispatch.assign()
        busy = [worker for worker in workers if dispatch.held_by(worker)]
        if not busy:  # it never waits for nothing
            assert dispatch.is_finished
            break
        worker = random.choice(busy)
        held = sorted(dispatch.held_by(worker))
        if owed[poison] in held and random.random() < 0.5:
            deaths += 1
            for key, _ in dispatch.lose(worker):
                handed_back.append(key)
                dispatch.settle(key)
            workers.remove(worker)
            workers.append(count + deaths)
            dispatch.add(count + deaths)
            continue
        for key in held:
            if key != owed[poison] and random.random() < 0.5:
                assert dispatch.arrive(worker, key)
                dispatch.settle(key)
                delivered += 1
    assert handed_back == [owed[poison]]
    assert delivered == 39
    assert deaths <= 4 + 3 + 12


def test_innocents_are_through_after_a_few_rounds() -> None:
    """Four workers lose all they have four times, through no fault of their 256 rollouts; then they live."""
    dispatch = Dispatch(iter(keys(256)), cap=256, max_charges=3)
    dispatch.expected = 4
    workers = iter(range(1000))
    for _ in range(4):
        alive = [next(workers) for _ in range(4)]
        for worker in alive:
            dispatch.add(worker)
        dispatch.assign()
        assert dispatch.at_workers == 256
        for worker in alive:
            assert dispatch.lose(worker) == []
    alive = [next(workers) for _ in range(4)]
    for worker in alive:
        dispatch.add(worker)
    in_flight = []
    while not dispatch.is_finished:
        dispatch.assign()
        in_flight.append(dispatch.at_workers)
        for worker in alive:
            for key in dispatch.held_by(worker):
                assert dispatch.arrive(worker, key)
                dispatch.settle(key)
    assert len(in_flight) <= 5
    assert in_flight[0] >= 2


def test_others_go_on_while_suspects_are_tried() -> None:
    dispatch = Dispatch(iter(keys(1000)), cap=64, max_charges=3, free_deaths=1)
    dispatch.expected = 4
    for worker in range(4):
        dispatch.add(worker)
    dispatch.assign()
    dispatch.lose(0)
    dispatch.add(4)
    dispatch.assign()
    assert len(dispatch.held_by(4)) == 1  # of 16 suspects
    for worker in (1, 2, 3):
        held = sorted(dispatch.held_by(worker))
        assert len(held) == 16
        dispatch.arrive(worker, held[0])
        dispatch.settle(held[0])
    given = dispatch.assign()
    # One more worker is being emptied for suspects; two have new work.
    assert sum(len(got) for got in given.values()) == 2


def test_places_are_kept_for_workers_that_are_about_to_come() -> None:
    dispatch = Dispatch(iter(keys(40)), cap=8, max_charges=3)
    dispatch.expected = 4
    dispatch.add(1)
    assert len(dispatch.assign()[1]) == 2
    dispatch.expected = 1  # they don't come
    assert len(dispatch.assign()[1]) == 6


def test_a_new_worker_gets_what_becomes_free() -> None:
    dispatch = Dispatch(iter(keys(40)), cap=8, max_charges=3)
    dispatch.add(1)
    held = dispatch.assign()[1]
    dispatch.add(2)
    for key in held[:4]:
        dispatch.arrive(1, key)
        dispatch.settle(key)
    assert {worker: len(got) for worker, got in dispatch.assign().items()} == {2: 4}


def test_after_a_stop_nothing_is_given_out_and_the_lost_stay_owed() -> None:
    dispatch = Dispatch(iter(keys(10)), cap=4, max_charges=3)
    dispatch.add(1)
    dispatch.add(2)
    first = dispatch.assign()
    dispatch.stop()
    dispatch.lose(1)
    assert dispatch.assign() == {}
    assert not dispatch.is_finished
    for key in first[2]:
        dispatch.arrive(2, key)
        dispatch.settle(key)
    assert dispatch.is_finished


def test_settling_what_has_not_arrived_is_a_mistake() -> None:
    dispatch = Dispatch(iter(keys(2)), cap=4, max_charges=3)
    dispatch.add(1)
    dispatch.assign()
    with pytest.raises(KeyError):
        dispatch.settle(RolloutKey(0, 0))


def test_who_leaves_for_want_of_an_engine_makes_nobody_a_suspect() -> None:
    """However often: each key is given out again, and in company."""
    dispatch = Dispatch(iter(keys(4)), cap=4, max_charges=1, free_deaths=1)
    for worker in range(20):
        dispatch.add(worker)
        assert len(dispatch.assign()[worker]) == 4
        assert dispatch.lose(worker, suspect=False) == []
    dispatch.add(20)
    dispatch.assign()
    dispatch.lose(20)  # one real death makes them suspects
    dispatch.add(21)
    (alone,) = dispatch.assign()[21]
    assert dispatch.lose(21, suspect=False) == []
    dispatch.add(22)
    assert dispatch.assign() == {22: [alone]}
    assert dispatch.lose(22) == [(alone, 1)]
