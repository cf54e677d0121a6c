import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from rollstream.training.plan import FunctionPlan, Plan, ShuffledPlan


@given(st.integers(1, 40), st.integers(0, 2**40), st.lists(st.integers(0, 300), max_size=20))
@settings(deadline=None)
def test_a_pure_function_of_seed_and_position(rows: int, seed: int, asked: list[int]) -> None:
    """In whatever order positions are asked for, by whichever plan object."""
    in_order = ShuffledPlan(rows, seed=seed)
    everything = [in_order.at(position) for position in range(301)]
    jumping = ShuffledPlan(rows, seed=seed)
    assert [jumping.at(position) for position in asked] == [everything[position] for position in asked]


@given(st.integers(1, 40), st.integers(0, 2**40), st.booleans())
@settings(deadline=None)
def test_every_row_once_an_epoch(rows: int, seed: int, shuffle: bool) -> None:
    plan = ShuffledPlan(rows, seed=seed, shuffle=shuffle)
    for epoch in range(3):
        groups = [plan.at(epoch * rows + place) for place in range(rows)]
        assert {group.epoch for group in groups} == {epoch}
        assert sorted(group.index for group in groups) == list(range(rows))


def test_epochs_and_seeds_differ() -> None:
    plan, other = ShuffledPlan(50, seed=1), ShuffledPlan(50, seed=2)
    first, second = ([plan.at(p).index for p in range(e * 50, e * 50 + 50)] for e in (0, 1))
    assert first != second
    assert first != [other.at(p).index for p in range(50)]
    assert second != [other.at(p).index for p in range(50)]  # seed + epoch would be the same sum


def test_the_end() -> None:
    plan = ShuffledPlan(3, epochs=2)
    assert plan.length == 6
    assert plan.at(5).epoch == 1
    for outside in (-1, 6):
        with pytest.raises(IndexError):
            plan.at(outside)


def test_the_identity_is_json_and_says_what_differs() -> None:
    plans: list[Plan] = [
        ShuffledPlan(5, seed=1),
        ShuffledPlan(5, seed=2),
        ShuffledPlan(6, seed=1),
        ShuffledPlan(5, shuffle=False),
        FunctionPlan(lambda position: (0, position), identity={"sampler": "x"}),
    ]
    identities = [json.dumps(plan.identity()) for plan in plans]
    assert len(set(identities)) == len(plans)
    # Where the plan ends is not who it is: a run may be continued for more epochs.
    assert ShuffledPlan(5, seed=1, epochs=3).identity() == plans[0].identity()


def test_somebody_elses_sequence() -> None:
    plan = FunctionPlan(lambda position: divmod(position, 4), identity={}, length=8)
    group = plan.at(5)
    assert (group.position, group.epoch, group.index) == (5, 1, 1)
    with pytest.raises(IndexError):
        plan.at(8)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"rows": 3, "epochs": 0}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ShuffledPlan(**wrong)
