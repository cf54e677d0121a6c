import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from rollstream.training.curriculum import Curriculum, easy_to_hard
from rollstream.training.group import Group
from rollstream.training.plan import PlannedGroup
from rollstream.training.selection import NoSignal, Priority, TokenBudget


def group(*rewards: float | None, index: int = 0, position: int = 0) -> Group:
    rollouts: list[Any] = [SimpleNamespace(reward=reward) for reward in rewards]
    return Group(PlannedGroup(position, 0, index), 0, rollouts)


def test_no_signal() -> None:
    policy = NoSignal()
    assert policy.drops(group(1.0, 1.0, 1.0)) is not None
    assert policy.drops(group(1.0, 0.0)) is None
    assert policy.drops(group(1.0, None)) is not None
    assert policy.drops(group(1.0, None, 0.0)) is None
    assert policy.drops(group(1.0, 0.9)) is None


def test_no_signal_sees_the_rewards_of_snapshots() -> None:
    def rollout(*rewards: float | None) -> Any:
        trajectories = [SimpleNamespace(reward=reward) for reward in rewards]
        return SimpleNamespace(trajectories=trajectories, final=trajectories[-1])

    def of(*rollouts: Any) -> Group:
        return Group(PlannedGroup(0, 0, 0), 0, list(rollouts))

    policy = NoSignal()
    assert policy.drops(of(rollout(0.5, 1.0), rollout(1.0))) is None
    assert policy.drops(of(rollout(1.0, 1.0), rollout(None, 1.0))) is not None


def test_priority() -> None:
    policy = Priority("reward", lambda one: one.rewards[0] or 0.0)
    assert policy.rank(group(3.0)) < policy.rank(group(1.0))


@pytest.mark.parametrize("wrong", [(0, 1, 1), (5, 0, 1), (5, 3, 2)])
def test_a_budget_that_cannot_be(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        TokenBudget(*wrong)


def test_a_curriculum_prefers_what_succeeds_half_of_the_time() -> None:
    plan = Curriculum(3)
    for _ in range(20):
        plan.observe(group(0.0, index=0))
        plan.observe(group(1.0, index=2))
    drawn = [plan.at(position).index for position in range(500)]
    assert drawn.count(1) > 430
    assert {0, 2} <= set(drawn)  # but all come now and then


def test_it_learns_from_what_was_trained_on() -> None:
    plan = Curriculum(2)
    for _ in range(60):
        plan.observe(group(1.0, 1.0, index=0))
        plan.observe(group(None, index=1))  # says nothing
    assert plan.success(0) > 0.99
    assert plan.success(1) == 0.5
    assert sum(plan.at(position).index for position in range(100)) > 85


def test_easy_comes_first_and_hard_last() -> None:
    plan = Curriculum(2, weigh=easy_to_hard(100))
    for _ in range(20):
        plan.observe_dropped(group(1.0, index=0))
        plan.observe_dropped(group(0.0, index=1))
    early = [plan.at(position).index for position in range(100)]
    for _ in range(100):
        plan.observe(group(1.0, index=0))
    late = [plan.at(position).index for position in range(100, 200)]
    assert early.count(0) > 90
    assert late.count(1) > 90
    with pytest.raises(ConfigError):
        easy_to_hard(0)


@given(st.integers(1, 20), st.integers(0, 2**30), st.lists(st.integers(0, 40), max_size=30))
@settings(deadline=None)
def test_decisions_are_kept_and_survive_a_restart(rows: int, seed: int, asked: list[int]) -> None:
    plan = Curriculum(rows, seed=seed)
    decided = {}
    for number, position in enumerate(asked):
        one = plan.at(position)
        assert decided.setdefault(position, one) == one
        if number % 3 == 0:
            plan.observe(group(1.0, index=one.index))
    assert len({(one.epoch, one.index) for one in decided.values()}) == len(decided)  # unique names
    again = Curriculum(rows, seed=seed)
    again.load_state_dict(json.loads(json.dumps(plan.state_dict())))
    assert {position: again.at(position) for position in decided} == decided
    assert [again.at(position) for position in range(41, 60)] == [
        plan.at(position) for position in range(41, 60)
    ]
    plan.forget(41)
    assert [position for position, _, _ in plan.state_dict()["decided"]] == list(range(41, 60))


def test_a_curriculum_that_cannot_be() -> None:
    with pytest.raises(ConfigError):
        Curriculum(0)
