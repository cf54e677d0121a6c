"""The rule on its own: what is chosen is the best that is allowed."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from rollstream.training.group import Group
from rollstream.training.plan import PlannedGroup
from rollstream.training.staleness import StalenessRule, choose

groups = st.lists(
    st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 5)), min_size=0, max_size=7
)  # (start, finished, rank)


def valid(picked: tuple[Group, ...], must: list[tuple[int, int]]) -> bool:
    return all(sum(one.start <= version for one in picked) >= number for version, number in must)


@given(groups, st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_the_best_allowed_choice_is_made(
    drawn: list[tuple[int, bool, int]], size: int, data: st.DataObject
) -> None:
    """Against trying all subsets; starts rise with positions, as groups are begun in the plan's order."""
    drawn = sorted(drawn, key=lambda one: one[0])
    everyone = [
        Group(PlannedGroup(position, 0, 0), start, rank=rank)
        for position, (start, _, rank) in enumerate(drawn)
    ]
    finished = [one for one, (_, done, _) in zip(everyone, drawn, strict=True) if done]
    versions = sorted({one.start for one in everyone})
    must = []
    for version in versions:
        number = data.draw(st.integers(0, min(size, sum(one.start <= version for one in everyone))))
        if number:
            must.append((version, number))
    chosen = choose(finished, must, size=size)
    subsets = [picked for picked in itertools.combinations(finished, size) if valid(picked, must)]
    if not subsets:
        assert len(chosen) < size
    else:
        assert len(chosen) == size
        assert valid(tuple(chosen), must)
        best = min(sorted((one.rank, one.position) for one in picked) for picked in subsets)
        assert sorted((one.rank, one.position) for one in chosen) == best


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 6),
    st.dictionaries(st.integers(0, 6), st.integers(1, 9)),
)
@settings(deadline=None)
def test_what_a_batch_must_take_is_what_later_ones_cannot(
    size: int, most: int, step: int, starts: dict[int, int]
) -> None:
    """By Hall's condition for the batches after this one."""
    rule = StalenessRule(size, most, ahead=1)
    must = dict(rule.must_take(starts, next_step=step))
    for version in starts:
        before = sum(number for start, number in starts.items() if start <= version)
        later = max(0, version + most - step) * size
        assert must.get(version, 0) == max(0, before - later)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, -1, 1), (1, 1, -1), (4, 1, 1, 3), (4, 0, 1, 5)])
def test_nonsense_is_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        StalenessRule(*wrong)
