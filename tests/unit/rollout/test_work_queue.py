"""R3, R5, R7: whatever dies when, every key is settled exactly once, and the window holds."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.rollout.work_queue import WorkQueue
from rollstream.trajectory import RolloutKey

CAP = 6


def keys(count: int) -> list[RolloutKey]:
    return [RolloutKey(index, repeat) for index in range(count) for repeat in range(2)][:count]


class DispatchMachine(RuleBasedStateMachine):
    """Workers come, die and deliver, late ones too; the model holds who owns what."""

    def __init__(self) -> None:
        super().__init__()
        self.owed = keys(40)
        self.queue = WorkQueue(iter(self.owed), cap=CAP, max_charges=2, free_deaths=3)
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
            self.queue.add(self.last)
            self.alive[self.last] = set()

    @rule(expected=st.integers(1, 4))
    def expect(self, expected: int) -> None:
        self.queue.expected = expected

    @rule(cap=st.integers(1, CAP))
    def change_cap(self, cap: int) -> None:
        self.queue.cap = self.cap_now = cap

    @rule()
    def assign(self) -> None:
        before = self.queue.in_flight
        share = self.queue.share
        loads = {worker: len(held) for worker, held in self.alive.items()}
        for worker, got in self.queue.assign().items():
            for key in got:
                assert all(key not in held for held in self.alive.values())
                assert key not in self.settled and key not in self.at_store
                self.alive[worker].add(key)
            assert len(self.alive[worker]) <= max(share, loads[worker])
        assert self.queue.in_flight <= max(before, self.cap_now)

    @precondition(lambda self: any(self.alive.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker, held in self.alive.items() if held]))
        key = data.draw(st.sampled_from(sorted(self.alive[worker])))
        assert self.queue.receive(worker, key)
        self.alive[worker].remove(key)
        self.at_store.append(key)
        assert not self.queue.receive(worker, key)  # the same again

    @precondition(lambda self: any(self.dead.values()))
    @rule(data=st.data())
    def deliver_late(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker, held in self.dead.items() if held]))
        assert not self.queue.receive(worker, data.draw(st.sampled_from(sorted(self.dead[worker]))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        held = self.alive.pop(worker)
        self.dead[worker] = held
        for key, charges in self.queue.worker_lost(worker):
            assert key in held and len(held) == 1 and charges == 2
            self.failed.add(key)
            self.at_store.append(key)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """For want of an engine: nobody is to blame."""
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.dead[worker] = self.alive.pop(worker)
        assert self.queue.worker_lost(worker, suspect=False) == []

    @precondition(lambda self: self.at_store)
    @rule()
    def settle(self) -> None:
        key = self.at_store.pop(0)
        self.queue.commit(key)
        self.settled[key] += 1

    @invariant()
    def agrees(self) -> None:
        held = sum(map(len, self.alive.values()))
        assert self.queue.in_flight == held + len(self.at_store) <= CAP
        assert all(count == 1 for count in self.settled.values())
        for worker, own in self.alive.items():
            assert self.queue.held_by(worker) == own

    def teardown(self) -> None:
        """From any state, one worker that lives ends the run."""
        for worker in list(self.alive):
            self.at_store += [key for key, _ in self.queue.worker_lost(worker)]
            self.alive.pop(worker)
        self.last += 1
        self.queue.add(self.last)
        self.queue.expected = 1
        for _ in range(200):
            for key in self.at_store:
                self.queue.commit(key)
                self.settled[key] += 1
            self.at_store = []
            if self.queue.is_finished:
                break
            for got in self.queue.assign().values():
                for key in got:
                    assert self.queue.receive(self.last, key)
                    self.at_store.append(key)
        assert self.queue.is_finished
        assert self.settled == Counter(self.owed)


DispatchMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=60, deadline=None)
TestDispatch = DispatchMachine.TestCase


@given(st.integers(0, 39), st.integers(1, 24), st.integers(1, 5), st.integers())
def test_among_several_workers_it_is_found_too(poison: int, cap: int, count: int, seed: int) -> None:
    """Whoever delivers or dies first: it alone is handed back, and what it costs is bounded."""
    owed, random = keys(40), Random(seed)
    queue = WorkQueue(iter(owed), cap=cap, max_charges=3)
    workers, deaths, delivered = list(range(count)), 0, 0
    queue.expected = count
    for worker in workers:
        queue.add(worker)
    handed_back = []
    while not queue.is_finished:
        queue.assign()
        busy = [worker for worker in workers if queue.held_by(worker)]
        if not busy:  # it never waits for nothing
            assert queue.is_finished
            break
        worker = random.choice(busy)
        held = sorted(queue.held_by(worker))
        if owed[poison] in held and random.random() < 0.5:
            deaths += 1
            for key, _ in queue.worker_lost(worker):
                handed_back.append(key)
                queue.commit(key)
            workers.remove(worker)
            workers.append(count + deaths)
            queue.add(count + deaths)
            continue
        for key in held:
            if key != owed[poison] and random.random() < 0.5:
                assert queue.receive(worker, key)
                queue.commit(key)
                delivered += 1
    assert handed_back == [owed[poison]]
    assert delivered == 39
    assert deaths <= 4 + 3 + 12


def test_others_go_on_while_suspects_are_tried() -> None:
    queue = WorkQueue(iter(keys(1000)), cap=64, max_charges=3, free_deaths=1)
    queue.expected = 4
    for worker in range(4):
        queue.add(worker)
    queue.assign()
    queue.worker_lost(0)
    queue.add(4)
    queue.assign()
    assert len(queue.held_by(4)) == 1  # of 16 suspects
    for worker in (1, 2, 3):
        held = sorted(queue.held_by(worker))
        assert len(held) == 16
        queue.receive(worker, held[0])
        queue.commit(held[0])
    given = queue.assign()
    assert sum(len(got) for got in given.values()) == 3


def test_after_a_stop_nothing_is_given_out_and_the_lost_stay_owed() -> None:
    queue = WorkQueue(iter(keys(10)), cap=4, max_charges=3)
    queue.add(1)
    queue.add(2)
    first = queue.assign()
    queue.stop()
    queue.worker_lost(1)
    assert queue.assign() == {}
    assert not queue.is_finished
    for key in first[2]:
        queue.receive(2, key)
        queue.commit(key)
    assert queue.is_finished


def test_who_leaves_for_want_of_an_engine_makes_nobody_a_suspect() -> None:
    """However often: each key is given out again, and in company."""
    queue = WorkQueue(iter(keys(4)), cap=4, max_charges=1, free_deaths=1)
    for worker in range(20):
        queue.add(worker)
        assert len(queue.assign()[worker]) == 4
        assert queue.worker_lost(worker, suspect=False) == []
    queue.add(20)
    queue.assign()
    queue.worker_lost(20)  # one real death makes them suspects
    queue.add(21)
    (alone,) = queue.assign()[21]
    assert queue.worker_lost(21, suspect=False) == []
    queue.add(22)
    assert queue.assign() == {22: [alone]}
    assert queue.worker_lost(22) == [(alone, 1)]
