"""Comparisons against their definitions and against values computed by hand."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.evaluate.compare import compare_samples, permutation_test, sign_test
from rollstream.evaluate.samples import Samples, samples_of
from tests.support.view_runs import failure, rollout


def samples(rewards: dict[int, list[float | None]]) -> Samples:
    return samples_of(
        rollout(index, at, reward=one) for index, some in rewards.items() for at, one in enumerate(some)
    )


def test_two_runs_by_hand() -> None:
    a = samples({0: [0.0, 0.0], 1: [1.0, 0.0], 2: [1.0], 3: [None], 4: [0.5]})
    b = samples({0: [1.0], 1: [1.0, 0.5], 2: [0.75], 3: [1.0], 5: [1.0], 6: [1.0]})
    found = compare_samples(a, b)
    assert (found.prompts, found.only_a, found.only_b, found.unscored) == (3, 1, 2, 1)
    assert (found.mean_a, found.mean_b) == (pytest.approx(0.5), pytest.approx(2.5 / 3))
    assert (found.won, found.lost, found.tied) == (2, 1, 0)
    assert found.difference is not None and found.difference.mean == pytest.approx(1 / 3)
    error = statistics.stdev([1.0, 0.25, -0.25]) / math.sqrt(3)
    assert found.difference.error == pytest.approx(error)
    assert found.difference.high == pytest.approx(1 / 3 + 4.302653 * error)
    assert found.sign_p == 1.0  # 2 of 3: a coin is always that uneven
    assert found.permutation_p == pytest.approx(6 / 8)  # 1.5, 1.0 and 1.0 of both signs; not 0.5


def test_runs_without_a_common_prompt() -> None:
    found = compare_samples(samples({0: [1.0]}), samples_of([failure(1, 0)]))
    assert (found.prompts, found.only_a, found.only_b, found.difference, found.mean_a) == (
        0,
        1,
        1,
        None,
        None,
    )
    assert (found.sign_p, found.permutation_p) == (1.0, 1.0)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_sign_test_is_the_binomial_one(won: int, lost: int) -> None:
    count = won + lost
    tail = sum(math.comb(count, fewer) for fewer in range(min(won, lost) + 1))
    assert sign_test(won, lost) == pytest.approx(float(min(Fraction(1), Fraction(2 * tail, 2**count))))


@pytest.mark.parametrize(
    ("won", "lost", "p"), [(9, 1, 0.021484375), (0, 5, 0.0625), (10_000, 10_400, 0.00525)]
)
def test_values_of_the_sign_test(won: int, lost: int, p: float) -> None:
    assert sign_test(won, lost) == pytest.approx(p, rel=2e-2)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 1.0]), max_size=9))
def test_the_permutation_test_counts_all_signs(differences: list[float]) -> None:
    observed = abs(sum(differences)) - 1e-9
    signs = itertools.product([1, -1], repeat=len(differences))
    sums = [sum(sign * one for sign, one in zip(some, differences, strict=True)) for some in signs]
    expected = sum(abs(one) >= observed for one in sums) / len(sums)
    assert permutation_test(np.array(differences)) == pytest.approx(expected)


def test_of_many_differences_it_is_close_to_that() -> None:
    drawn = np.random.default_rng(0).normal(0.3, 1, 20)
    signs = permutation_test(drawn)
    assert permutation_test(np.concatenate([drawn, [1e-9]])) == pytest.approx(signs, abs=0.02)
    assert permutation_test(np.full(1000, 0.01)) < 1e-100
