"""The schedule under any order of events: never too stale, never stuck, nothing skipped, nothing twice."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from rollstream.training.group import GroupBatch
from rollstream.training.plan import ShuffledPlan
from rollstream.training.schedule import GroupSchedule
from rollstream.training.staleness import StalenessRule


class Play:
    """A schedule, an engine that may lag, a trainer that may crash: what happens next is chance."""

    def __init__(self, make: Any, rng: random.Random, *, lag: bool, drops: bool, crashes: bool) -> None:
        self.make = make
        self.schedule: GroupSchedule = make()
        self.rng = rng
        self.lag, self.drops, self.crashes = lag, drops, crashes
        self.version = 0
        self.starts: dict[int, int] = {}
        """Of the positions that were begun and not delivered."""
        self.generating: list[int] = []
        self.taken: list[GroupBatch] = []
        self.sequence: list[list[int]] = []
        """Positions of each trained batch."""
        self.dropped: set[int] = set()
        self.saved = json.dumps(self.schedule.state_dict())
        self.saved_dropped: set[int] = set()
        self.stalest = 0
        self.finished = 0

    def run(self, steps: int) -> None:
        for _ in range(4000):
            if len(self.sequence) >= steps or (self.schedule.ended and not self.taken):
                return
            self.check_feasible()
            self.one()
        raise AssertionError("it does not end")

    def one(self) -> None:
        schedule, rng = self.schedule, self.rng
        moves = []
        if schedule.room(self.version):
            moves.append(self.admit)
        if self.generating:
            position = rng.choice(self.generating)
            moves += [lambda: self.finish(position)] * 2
            if self.drops and rng.random() < 0.2:
                moves.append(lambda: self.drop(position))
        if self.taken:
            moves.append(self.train)
        if len(self.taken) < rng.choice([1, 1, 1, 2]):
            moves.append(self.deliver)
        if self.version < schedule.trained_steps:
            moves.append(self.update)
        if self.crashes and rng.random() < 0.03:
            moves.append(self.crash)
        if rng.random() < 0.2:
            moves.append(self.save)
        rng.choice(moves)()

    def admit(self) -> None:
        group = self.schedule.admit(self.version)
        assert group is not None
        assert group.start == self.version
        self.starts[group.position] = group.start
        self.generating.append(group.position)

    def finish(self, position: int) -> None:
        self.finished += 1
        self.generating.remove(position)
        self.schedule.finish(position, rank=float(self.finished), tokens=self.tokens(position))

    def tokens(self, position: int) -> int:
        return self.rng.randint(1, 9)

    def drop(self, position: int) -> None:
        self.generating.remove(position)
        self.schedule.drop(position)
        self.dropped.add(position)
        del self.starts[position]

    def deliver(self) -> None:
        schedule = self.schedule
        if not self.lag and self.version < schedule.trained_steps:
            return  # the weights come first
        delivery = schedule.deliver(self.version)
        if delivery is not None:
            self.taken.append(delivery)
            for group in delivery.groups:
                assert self.starts.pop(group.position) == group.start
            self.stalest = max(self.stalest, *(delivery.step - group.start for group in delivery.groups))
            return
        blocked = schedule.blocked(self.version)
        if blocked is not None:
            # Said to be stuck: it is the trainer's or the engine's turn, and never nobody's.
            assert self.taken or self.version < schedule.trained_steps, blocked
            assert not schedule.room(self.version)
        elif not schedule.ended:
            assert schedule.generating or schedule.room(self.version)  # the groups' turn

    def train(self) -> None:
        delivery = self.taken.pop(0)
        self.schedule.trained(delivery.step)
        assert delivery.step == len(self.sequence)
        self.sequence.append([group.position for group in delivery.groups])

    def update(self) -> None:
        newest = self.schedule.trained_steps
        self.version = self.rng.randint(self.version + 1, newest) if self.lag else newest

    def save(self) -> None:
        self.saved = json.dumps(self.schedule.state_dict())
        self.saved_dropped = set(self.dropped)

    def crash(self) -> None:
        state = json.loads(self.saved)
        self.schedule = self.make()
        self.schedule.load_state_dict(state)
        self.taken.clear()
        self.starts.clear()
        self.generating.clear()
        del self.sequence[state["step"] :]
        self.dropped = set(self.saved_dropped)
        self.version = state["step"]

    def check_feasible(self) -> None:
        """Hall's condition, from the definition."""
        schedule, rule = self.schedule, self.schedule.rule
        if rule.largest_step is not None:
            return  # a batch of a dynamic size has taken some of them
        for version in set(self.starts.values()):
            batches = version + rule.max_staleness - schedule.next_step + 1
            assert sum(start <= version for start in self.starts.values()) <= batches * rule.groups_per_step


chance = st.integers(0, 2**32).map(random.Random)
rules = st.builds(StalenessRule, st.integers(1, 4), max_staleness=st.integers(0, 3), ahead=st.integers(0, 4))
orders = st.sampled_from(["plan", "first"])


@given(
    rules, orders, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([None, 1, 3]),
    st.integers(1, 9), chance,
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_never_too_stale_never_stuck_nothing_twice(
    rule: StalenessRule,
    order: Any,
    lag: bool,
    drops: bool,
    crashes: bool,
    epochs: int | None,
    rows: int,
    rng: random.Random,
) -> None:
    def make() -> GroupSchedule:
        return GroupSchedule(ShuffledPlan(rows, seed=3, epochs=epochs), rule, order=order)

    play = Play(make, rng, lag=lag, drops=drops, crashes=crashes)
    play.run(steps=12)
    assert play.stalest <= rule.max_staleness
    if order == "plan" and not lag:
        assert play.stalest <= rule.ahead
    trained = [position for batch in play.sequence for position in batch]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & play.dropped
    whole = play.sequence[:-1] if epochs else play.sequence
    assert all(len(batch) == rule.groups_per_step for batch in whole)
    settled = sorted({*trained, *play.dropped})
    assert settled[: play.schedule.watermark] == list(range(play.schedule.watermark))
    if play.schedule.ended and not play.taken:  # it may be stopped before the last batch is trained
        assert settled == list(range(rows * epochs))  # type: ignore[operator]
    if order == "plan":
        assert trained == sorted(trained)
        assert trained == [p for p in range(trained[-1] + 1 if trained else 0) if p not in play.dropped]


@given(
    st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), orders, st.booleans(),
    st.integers(1, 40), chance,
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_batches_of_a_dynamic_size_keep_the_bound(
    smallest: int, more: int, most: int, ahead: int, order: Any, drops: bool, budget: int, rng: random.Random
) -> None:
    rule = StalenessRule(smallest, most, ahead, smallest + more)

    def make() -> GroupSchedule:
        return GroupSchedule(ShuffledPlan(5), rule, order=order, token_budget=budget)

    play = Play(make, rng, lag=True, drops=drops, crashes=True)
    deliver = play.deliver

    def checked() -> None:
        before = len(play.taken)
        deliver()
        if len(play.taken) > before:
            batch = play.taken[-1].groups
            assert smallest <= len(batch) <= smallest + more
            if len(batch) > smallest:
                assert sum(group.tokens for group in batch) <= budget

    play.deliver = checked  # type: ignore[method-assign]
    play.run(steps=10)
    assert play.stalest <= most
    trained = [position for batch in play.sequence for position in batch]
    assert len(set(trained)) == len(trained)


@given(st.integers(1, 3), st.integers(0, 6), st.integers(1, 3), st.integers(0, 3), st.integers(1, 40), chance)
@settings(max_examples=100, deadline=None)
def test_batches_by_tokens_are_as_full_as_the_budget_lets_them_be(
    smallest: int, more: int, most: int, ahead: int, budget: int, rng: random.Random
) -> None:
    """In the plan's order, whatever finishes when: a function of the groups' tokens alone."""
    rule = StalenessRule(smallest, most, ahead, smallest + more)
    tokens = [rng.randint(1, 9) for _ in range(400)]
    full, end = [], 0
    for _ in range(10):
        begin, end = end, end + smallest
        while end - begin < smallest + more and sum(tokens[begin : end + 1]) <= budget:
            end += 1
        full.append(list(range(begin, end)))

    play = Play(
        lambda: GroupSchedule(ShuffledPlan(5), rule, token_budget=budget),
        rng, lag=False, drops=False, crashes=True,
    )  # fmt: skip

    play.tokens = tokens.__getitem__  # type: ignore[method-assign]
    deliver = play.deliver
    # Asked before the one before it is trained, a batch comes with what there may be by then.
    play.deliver = lambda: None if play.taken else deliver()  # type: ignore[method-assign]
    play.run(steps=10)
    assert play.sequence == full


def synchronous() -> GroupSchedule:
    return GroupSchedule(ShuffledPlan(10), StalenessRule(2, 0, 0))


def test_a_synchronous_run_generates_only_between_the_steps() -> None:
    schedule = synchronous()
    for step in range(3):
        groups = [schedule.admit(step), schedule.admit(step)]
        assert schedule.admit(step) is None
        for group in groups:
            assert group is not None
            schedule.finish(group.position)
        assert schedule.deliver(step) is not None
        assert schedule.admit(step) is None  # while it is trained
        schedule.trained(step)
        assert schedule.admit(step) is None  # the engine has old weights
        assert "give the engine newer weights" in str(schedule.blocked(step))


def test_a_state_of_another_plan_is_refused_and_changes_nothing() -> None:
    state = GroupSchedule(ShuffledPlan(10, seed=1), StalenessRule(2)).state_dict()
    schedule = synchronous()
    with pytest.raises(ConfigError, match="seed was 1, is 0"):
        schedule.load_state_dict(state)
    assert schedule.state_dict() == synchronous().state_dict()
    for wrong in ({**state, "format": 99}, {"format": 1}):
        with pytest.raises(ConfigError, match="no saved state"):
            schedule.load_state_dict(wrong)


def test_a_state_may_be_taken_up_with_other_numbers() -> None:
    schedule = GroupSchedule(ShuffledPlan(10), StalenessRule(2))
    for _ in range(2):
        group = schedule.admit(0)
        assert group is not None
        schedule.finish(group.position)
    schedule.deliver(0)
    schedule.trained(0)
    other = GroupSchedule(ShuffledPlan(10), StalenessRule(5, 3, 2), order="first")
    other.load_state_dict(schedule.state_dict())
    group = other.admit(1)
    assert group is not None
    assert group.position == 2


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ((2,), {"order": "last"}, "order"),
        ((2, 0, 0, 4), {"token_budget": 9}, "dynamic size need a max_staleness"),
        ((2, 1, 1, 4), {}, "token budget"),
    ],
)
def test_what_does_not_go_together_is_refused(rule: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupSchedule(ShuffledPlan(3), StalenessRule(*rule), **options)
