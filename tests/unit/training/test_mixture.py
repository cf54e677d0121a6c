"""Shares of sources: under any order of what is finished, thrown away and begun again after a restart."""

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.data.shares import Shares
from rollstream.errors import ConfigError, TrainingError
from rollstream.training.group import Group
from rollstream.training.mixture import Mixture, Source
from rollstream.training.plan import PlannedGroup
from rollstream.training.schedule import GroupSchedule
from rollstream.training.staleness import StalenessRule
from tests.support.training import batches_of, train

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=7)


def owed_by(shares: Shares) -> list[float]:
    unit, *owed = map(int, shares.state())
    return [one / unit for one in owed]


@given(WEIGHTS, st.integers(1, 300))
@settings(deadline=None)
def test_nobody_is_a_whole_place_behind_or_ahead(weights: list[float], places: int) -> None:
    shares, had = Shares(weights), [0] * len(weights)
    for place in range(1, places + 1):
        had[shares.take()] += 1
        for weight, count, owed in zip(weights, had, owed_by(shares), strict=True):
            assert abs(weight / sum(weights) * place - count - owed) < 1e-6
            assert abs(owed) < 1


def test_batches_of_whole_shares_have_them_exactly() -> None:
    shares = Shares([0.5, 0.25, 0.125, 0.125])
    for _ in range(1000):
        batch = [shares.take() for _ in range(8)]
        assert [batch.count(one) for one in range(4)] == [4, 2, 1, 1]


@given(WEIGHTS, st.lists(st.integers(0, 6), max_size=40), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_places_given_back_come_again_and_a_paused_members_go_to_the_others(
    weights: list[float], back: list[int], rng: random.Random
) -> None:
    shares, had = Shares(weights), [0] * len(weights)
    for member in back:
        had[shares.take()] += 1
        if member < len(weights) and had[member]:
            shares.give(member, -1)
            had[member] -= 1
    for _ in range(40 * len(weights)):
        had[shares.take()] += 1
    total = sum(had)
    assert all(
        abs(w / sum(weights) * total - count) < 1 + 1e-6 for w, count in zip(weights, had, strict=True)
    )
    if len(weights) > 1:
        paused = rng.randrange(len(weights))
        shares.pause(paused)
        after = [shares.take() for _ in range(200)]
        rest = sum(weights) - weights[paused]
        for member, weight in enumerate(weights):
            assert abs(after.count(member) - 200 * weight / rest * (member != paused)) < 4


def mixture(**how: Any) -> Mixture:
    sources = [Source("a", range(5), 3.0), Source("b", [9, 5, 7], 2.0), Source("c", range(20, 40), 1.0)]
    return Mixture(sources, **how)


def counts(plan: Mixture, positions: range) -> dict[str, int]:
    names = [plan.source_of(plan.at(position).index) for position in positions]
    return {name: names.count(name) for name in sorted(set(names))}


def test_each_row_of_a_source_once_an_epoch_whatever_the_others_do() -> None:
    plan = mixture(seed=4)
    groups = [plan.at(position) for position in range(600)]
    assert counts(plan, range(600)) == {"a": 300, "b": 200, "c": 100}
    for name, rows in (("a", 5), ("b", 3), ("c", 20)):
        mine = [group for group in groups if plan.source_of(group.index) == name]
        for epoch in range(len(mine) // rows):
            assert {group.epoch for group in mine[epoch * rows : (epoch + 1) * rows]} == {epoch}
            assert len({group.index for group in mine[epoch * rows : (epoch + 1) * rows]}) == rows


class Play:
    """A training over a schedule: begins, finishes, throws away and trains by chance; notes what a store notes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.schedule = GroupSchedule(mixture(seed=seed), StalenessRule(4, 3, 3), order="first")
        self.saved = json.dumps(self.schedule.state_dict())
        self.begun: dict[int, Group] = {}
        self.open: list[int] = []
        self.next = 0
        self.dropped: dict[int, bool] = {}
        self.batches: list[list[int]] = []
        self.rows: list[list[int]] = []

    def go_on(self, moves: int) -> None:
        for _ in range(moves):
            version = self.schedule.trained_steps
            while (group := self.schedule.admit(version)) is not None:
                self.begun[group.position] = group
                self.open.append(group.position)
                self.next = max(self.next, group.position + 1)
            if self.open and self.rng.random() < 0.8:
                position = self.open.pop(self.rng.randrange(len(self.open)))
                if self.begun[position].index < 5 and self.rng.random() < 0.5:  # of source a
                    failed = self.dropped[position] = self.rng.random() < 0.5
                    self.schedule.drop(position, failed=failed)
                else:
                    self.schedule.finish(position)
            elif (batch := self.schedule.deliver(version)) is not None:
                self.schedule.trained(batch.step)
                self.batches.append([group.position for group in batch.groups])
                self.rows.append([group.index for group in batch.groups])
                if self.rng.random() < 0.3:
                    self.saved = json.dumps(self.schedule.state_dict())
                    self.begun = {at: self.begun[at] for at in self.begun if not self.schedule.settled(at)}
                    self.dropped = {}


@given(st.integers(0, 10_000), st.integers(0, 200))
@settings(deadline=None)
def test_a_resume_replays_what_was_decided_and_decides_as_it_would_have(seed: int, moves: int) -> None:
    play = Play(seed)
    play.go_on(moves)
    survivor, before = play.schedule.plan, copy.deepcopy(play.schedule.plan)
    again = mixture(seed=seed)
    schedule = GroupSchedule(again, StalenessRule(4, 3, 3), order="first")
    schedule.load_state_dict(json.loads(play.saved))
    for group in play.begun.values():
        again.restore(group.planned)
    schedule.restore([], dropped=play.dropped)
    assert all(again.at(at) == group.planned for at, group in play.begun.items() if at not in play.dropped)
    for position in range(play.next, play.next + 60):
        assert again.at(position) == before.at(position) == survivor.at(position)


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_what_is_trained_has_the_shares_whatever_was_finished_first(seed: int) -> None:
    play = Play(seed)
    play.go_on(600)
    plan = play.schedule.plan
    assert isinstance(plan, Mixture)
    trained = [position for batch in play.batches for position in batch]
    assert len(trained) == len(set(trained)) >= 200
    names = [plan.source_of(row) for batch in play.rows for row in batch]
    for name, share in (("a", 3 / 6), ("b", 2 / 6), ("c", 1 / 6)):
        assert abs(names.count(name) - share * len(names)) <= 20  # by what is on its way
    shares = Shares([3, 2, 1])
    shares.set_state(plan.state_dict()["shares"])
    assert abs(sum(owed_by(shares))) < 1e-9 and all(abs(one) < 3 for one in owed_by(shares))


def test_a_source_over_its_budget_is_paused_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        if group.index >= 10:
            raise RuntimeError("the sandbox is gone")
        return [group.index]

    plan = Mixture([Source("good", range(10)), Source("bad", range(10, 20), max_failed_share=0.3)], seed=1)
    with batches_of(generate, plan=plan, groups_per_step=4, on_group_failure="drop_and_refill") as batches:
        trained = train(batches, 12)
    assert all(len(batch) == 4 for batch in trained)
    assert list(plan.paused) == ["bad"]
    assert "4 of " in caplog.text and "groups of bad failed (max_failed_share=0.3)" in caplog.text
    again = Mixture([Source("good", range(10)), Source("bad", range(10, 20), max_failed_share=0.3)], seed=1)
    again.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    assert list(again.paused) == ["bad"]
    assert counts(again, range(1000, 1020)) == {"good": 20}


def test_nothing_is_left_when_all_sources_are_paused() -> None:
    plan = Mixture([Source("bad", range(3), max_failed_share=0.0)])
    plan.at(0)
    plan.dropped(0, failed=True)
    with pytest.raises(TrainingError, match="all sources are paused: 1 of 1 groups of bad failed"):
        plan.at(1)


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [Source("a", range(0))],
        [Source("a", range(3), 0.0)],
        [Source("a", range(3)), Source("a", range(3, 5))],
        [Source("a", range(3)), Source("b", range(2, 5))],
    ],
)
def test_nonsense_is_refused(sources: list[Source]) -> None:
    with pytest.raises(ConfigError):
        Mixture(sources)
