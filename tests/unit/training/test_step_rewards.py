"""Step rewards: pure helpers, and what becomes of them between reward and batch."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import DataError
from rollstream.training import collate, discounted_returns, emission_views, step_advantages
from rollstream.training.step_rewards import token_advantages
from rollstream.trajectory import STREAMS, Trajectory
from tests.unit.store.export.artifacts import trajectory

pytest.importorskip("torch")

NUMBERS = st.floats(-100, 100, width=32)
GROUPS = st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=6)


@given(st.lists(NUMBERS, max_size=8), st.floats(0, 1))
def test_a_return_is_the_discounted_sum_from_a_turn_on(steps: list[float], gamma: float) -> None:
    wanted = [
        math.fsum(step * gamma**later for later, step in enumerate(steps[at:])) for at in range(len(steps))
    ]
    assert discounted_returns(steps, gamma) == pytest.approx(wanted, abs=1e-6)


@given(GROUPS, st.data(), st.booleans())
def test_turns_are_compared_with_those_in_the_same_state(
    group: list[list[float]], data: Any, scale: bool
) -> None:
    states = [
        data.draw(st.lists(st.sampled_from("abc"), min_size=len(one), max_size=len(one))) for one in group
    ]
    found = step_advantages(group, states=states, scale=scale)
    assert [*map(len, found)] == [*map(len, group)]
    turns = [
        (state, value, advantage)
        for own, values, advantages in zip(states, group, found, strict=True)
        for state, value, advantage in zip(own, values, advantages, strict=True)
    ]
    for state in "abc":
        same = [(value, advantage) for one, value, advantage in turns if one == state]
        assert math.fsum(advantage for _, advantage in same) == pytest.approx(0, abs=1e-3)
        # The better turn never has the smaller advantage, and differences are kept where nothing is scaled.
        for value, advantage in same:
            for other, less in same:
                assert value <= other or advantage >= less
                if not scale:
                    assert advantage - less == pytest.approx(value - other, abs=1e-6)
        if len(same) == 1:
            assert same[0][1] == 0
        if scale:
            assert sum(advantage**2 for _, advantage in same) <= max(0, len(same) - 1) + 1e-6


@given(GROUPS)
def test_without_states_turns_of_one_number_are_compared(group: list[list[float]]) -> None:
    assert step_advantages(group) == step_advantages(group, states=[range(len(one)) for one in group])


def test_states_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match="one for each turn"):
        step_advantages([[1.0], [2.0]], states=[["a"], []])


def test_they_reach_the_batch_of_a_loop() -> None:
    both = trajectory(
        [1], [[4, 5], [6], [7]], reward_extra={"steps": [1, -2], "tokens": [1.0, 2.0, 3.0, 4.0]}
    )
    short = trajectory([1], [[4]], reward_extra={"steps": [0.5], "tokens": "no list"})
    batch = collate([both, short, trajectory([1], [[4, 5]], reward_extra={"steps": 7})])
    assert batch["step_rewards"].tolist()[:2] == [[1, 1, 0, -2], [0.5, 0, 0, 0]]
    assert batch["token_rewards"].tolist()[0] == [1, 2, 0, 4], "0 where the model did not sample"
    assert batch["step_rewards"][2].isnan().tolist() == [True, True, False, False]
    assert batch["token_rewards"][1].isnan().tolist() == [True, False, False, False]
    assert "step_rewards" not in collate([trajectory()])
    views = collate(emission_views(both))
    assert views["step_rewards"].tolist() == [[1, 1], [-2, 0]]
    assert views["token_rewards"].tolist() == [[1, 2], [4, 0]]


def test_what_they_add_to_the_advantages_of_tokens() -> None:
    one = trajectory([1], [[4, 5], [6], [7]], reward_extra={"steps": [1, 2], "tokens": [1.0, 0.0, 9.0, 1.0]})
    other = trajectory([1], [[4], [5], [6]], reward_extra={"steps": [0, 4]})
    without = trajectory([1], [[4]])
    found = token_advantages(
        [one, other, without], step_weight=2.0, gamma=0.5, token_weight=10.0, scale=False
    )
    # Returns: 1 + 0.5 * 2 = 2, 2; and 0 + 0.5 * 4 = 2, 4. The first turns are equal, the second ones 1 apart from 3.
    assert found == [[10.0, 0.0, 0.0, 8.0], [0.0, 0.0, 2.0], [0.0]]


def test_a_teacher_adds_the_reverse_kl_of_sampled_tokens() -> None:
    taught, untaught = (
        Trajectory(
            [1], [2, 3, 4], [1, 0, 1], [-1.0, 0.0, -1.0], [], "stop", reward_extra={"steps": [1.0, 0.0]}
        )
        for _ in range(2)
    )
    taught.extra = {STREAMS: {"teacher": [-0.5, 0.0, -3.0]}}
    found = token_advantages([taught, untaught], step_weight=0.0, distill_coef=0.5)
    assert found == [[0.25, 0.0, -1.0], [0.0, 0.0, 0.0]]
    taught.response_logprobs = None
    assert token_advantages([taught], step_weight=0.0, distill_coef=0.5) == [[0.0] * 3]
