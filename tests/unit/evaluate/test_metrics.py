"""Figures against values that were computed by hand or stand in tables, and against their definitions."""

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.evaluate.metrics import mean_of, pass_at_k, pass_hat_k, summarize, t_quantile
from rollstream.evaluate.samples import joined, samples_of
from rollstream.trajectory import Failure, Metrics, Rollout
from tests.support.view_runs import failure, rollout


@pytest.mark.parametrize(
    ("freedom", "value"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (9, 2.262),
        (10, 2.228),
        (30, 2.042),
        (120, 1.980),
        (10**6, 1.960),
    ],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=6e-4)


def test_a_mean_with_its_clustered_interval_by_hand() -> None:
    # Prompts of 1, 1 / 0, 1 / 0: mean 0.6; sums of residuals 0.8, -0.2, -0.6; sqrt((.64+.04+.36) * 3 / 2) / 5
    found = mean_of(np.array([1, 1, 0, 1, 0.0, math.nan]), np.array([0, 0, 1, 1, 2, 3]))
    assert found is not None and (found.count, found.clusters) == (5, 3)
    error = math.sqrt(1.04 * 3 / 2) / 5
    assert (found.mean, found.error) == (pytest.approx(0.6), pytest.approx(error))
    assert found.low == pytest.approx(0.6 - 4.302653 * error) and found.high == pytest.approx(
        0.6 + 4.302653 * error
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_of_one_rollout_a_prompt_the_error_is_the_plain_one(values: list[float]) -> None:
    found = mean_of(np.array(values), np.arange(len(values)))
    assert found is not None and found.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found.error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-6)


def test_the_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    """Of prompts as different as they can be, four rollouts each; the numbers drawn are always the same."""
    rng, prompts, held = np.random.default_rng(0), np.repeat(np.arange(30), 4), 0
    for _ in range(1000):
        chance = np.repeat(rng.beta(0.5, 0.5, 30), 4)
        found = mean_of((rng.random(120) < chance).astype(float), prompts)
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 0.5 <= found.high
    assert 930 <= held <= 970


def test_a_single_prompt_has_no_interval_and_nothing_no_mean() -> None:
    found = mean_of(np.array([0.0, 1.0]), np.array([4, 4]))
    assert found is not None and (found.mean, found.error, found.low, found.high) == (0.5, None, None, None)
    assert mean_of(np.array([math.nan]), np.array([0])) is None
    assert mean_of(np.zeros(0), np.zeros(0, int)) is None


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_all_draws(solved: list[bool], k: int) -> None:
    counts, right = np.array([len(solved)]), np.array([sum(solved)])
    any_one, every = pass_at_k(counts, right, k)[0], pass_hat_k(counts, right, k)[0]
    if k > len(solved):
        assert math.isnan(any_one) and math.isnan(every)
        return
    draws = list(itertools.combinations(solved, k))
    assert any_one == pytest.approx(sum(map(any, draws)) / len(draws))
    assert every == pytest.approx(sum(map(all, draws)) / len(draws))


def test_pass_at_k_of_very_many_rollouts() -> None:
    assert pass_at_k(np.array([10_000]), np.array([5]), 100)[0] == pytest.approx(1 - 0.99**5, rel=0.01)


def records() -> list[Rollout | Failure]:
    """Three prompts: 2 of 3 solved, one not scored; 0 of 2, one failed; one rollout, with a snapshot."""
    snapshot, final = rollout(2, 0, reward=1.0, length=10), rollout(2, 0, reward=1.0, length=6)
    snapshot.final.is_snapshot, snapshot.final.metrics = True, Metrics(tool_calls=2, tool_errors=1)
    final.final.metrics = Metrics(tool_calls=2)
    final.trajectories = [snapshot.final, final.final]
    return [
        *(rollout(0, at, reward=one, length=4) for at, one in enumerate([1.0, 0.0, 1.0, None])),
        rollout(1, 0, reward=0.25, finish="length", length=9),
        rollout(1, 1, reward=0.0, finish="length", length=9),
        failure(1, 2),
        final,
    ]


def test_a_summary_says_what_has_no_part_in_what() -> None:
    found = summarize(samples_of(records()))
    counted: Any = (found.rollouts, found.prompts, found.scored, found.unscored, found.failed, found.partial)
    assert counted == (8, 3, 6, 1, 1, 1)
    assert found.reward is not None and found.reward.mean == pytest.approx(3.25 / 6)
    assert [(one.k, one.left_out) for one in found.passes] == [(1, 0), (2, 1), (3, 2)]
    first, second, third = found.passes
    assert first.pass_at is not None and first.pass_at.mean == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert second.pass_at is not None and second.pass_at.mean == pytest.approx((1 + 0) / 2)
    assert second.pass_hat is not None and second.pass_hat.mean == pytest.approx((1 / 3 + 0) / 2)
    assert third.pass_at is not None and (third.pass_at.mean, third.pass_at.low) == (1.0, None)
    assert found.truncated == pytest.approx(2 / 7) and found.failure_rate == pytest.approx(1 / 8)
    assert (found.tool_calls, found.tool_error_rate) == (4, 0.25)  # those of the snapshot, too
    assert (found.tokens, found.tokens_p95, found.turns) == (pytest.approx((4 * 4 + 9 + 9 + 6) / 7), 9, 2)
    numbers = found.numbers()
    assert numbers["pass_hat_2"] == second.pass_hat.mean and numbers["reward_high"] == found.reward.high
    assert "pass_at_3_low" not in numbers and None not in numbers.values()


def test_failed_and_unscored_rollouts_may_count_as_a_reward() -> None:
    found = summarize(samples_of(records()).with_missing(0.0), solved_at=0.25, ks=[4])
    assert found.reward is not None and found.reward.mean == pytest.approx(3.25 / 8)
    assert (found.scored, found.unscored, found.failed) == (8, 0, 1)
    nothing = summarize(samples_of([rollout(0, 0, reward=1.0), rollout(1, 0, reward=None)]))
    assert [one.left_out for one in nothing.passes] == [1], "a prompt without scores"
    (only,) = found.passes
    assert (
        only.left_out == 2
        and only.pass_at is not None
        and (only.pass_at.mean, only.pass_at.clusters) == (1.0, 1)
    )


def test_parts_joined_are_the_whole_and_nothing_is_nothing() -> None:
    whole = records()
    parts = [samples_of(whole[:3]), samples_of([]), samples_of(whole[3:])]
    assert summarize(joined(parts)) == summarize(samples_of(whole))
    empty = summarize(joined([]))
    assert (empty.rollouts, empty.reward, empty.passes, empty.tokens, empty.failure_rate) == (
        0,
        None,
        [],
        None,
        None,
    )
    infinite = summarize(samples_of([rollout(0, 0, reward=math.inf), rollout(0, 1, reward=1.0)]))
    assert (infinite.unscored, infinite.scored) == (1, 1)
