"""Statistics of a run: sums that say the same as the values, in memory that does not grow."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.generation.statistics import MOST_NAMES, OTHER, Moments, Statistics
from rollstream.store.records import RecordCodec
from rollstream.trajectory import Failure, Metrics, Rollout, Trajectory

finite = st.floats(-1e6, 1e6)


def rollout(lengths: list[int], reward: float | None = None, source: str = "sums", **more: Any) -> Rollout:
    trajectories = [
        Trajectory(
            prompt_ids=[1],
            response_ids=[2] * length,
            response_mask=[1] * length,
            response_logprobs=None,
            messages=[],
            finish_reason=more.get("finish_reason", "stop"),
            policy_versions=more.get("versions", [(0, 0)]),
            is_snapshot=at < len(lengths) - 1,
            reward=reward,
            metrics=Metrics(total_s=more.get("seconds", 1.0), tool_calls=2.0, tool_errors=1.0),
        )
        for at, length in enumerate(lengths)
    ]
    return Rollout(0, 0, "k", trajectories, source)


def failure(error: str) -> Failure:
    return Failure(0, 0, "k", 1, "agent", error, "", 0.0)


@given(st.lists(finite, min_size=1))
def test_moments_are_those_of_the_values(values: list[float]) -> None:
    moments = Moments()
    for value in [*values, math.nan, math.inf]:
        moments.add(value)
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert moments.std == pytest.approx(np.std(values), rel=1e-6, abs=1e-4)
    assert moments.largest == max(values)


def test_moments_of_large_values_that_differ_little() -> None:
    moments = Moments()
    for value in (1e9, 1e9 + 1, 1e9 + 2):
        moments.add(value)
    assert moments.std == pytest.approx(math.sqrt(2 / 3))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.none() | finite, st.booleans()),
        max_size=30,
    )
)
def test_encoded_rollouts_count_as_the_rollouts_they_were(given_ones: list[Any]) -> None:
    plain, encoded = Statistics(), Statistics()
    codec = RecordCodec()
    for lengths, reward, encode_first in given_ones:
        one = rollout(lengths, reward)
        plain.add(one)
        encoded.add(codec.encode(one) if encode_first else one)
    assert (plain.tokens, plain.tool_calls, plain.tool_errors) == (
        encoded.tokens,
        encoded.tool_calls,
        encoded.tool_errors,
    )
    assert plain.lengths.counts == encoded.lengths.counts
    assert sum(plain.lengths.counts) == sum(len(lengths) for lengths, _, _ in given_ones)
    assert plain.take_window() == encoded.take_window()


def test_a_window_begins_where_the_last_one_ended() -> None:
    statistics = Statistics()
    statistics.add(rollout([3], 1.0))
    statistics.add(rollout([5, 7], 0.0, source="other sums", finish_reason="length"))
    first = statistics.take_window()
    assert (first.rewards.count, first.rewards.mean, first.rewards.std) == (2, 0.5, 0.5)
    assert {source: one.mean for source, one in first.by_source.items()} == {"sums": 1.0, "other sums": 0.0}
    assert (first.lengths.mean, first.lengths.largest, first.at_limit) == (5.0, 7, 2)
    statistics.add(rollout([1], None))
    second = statistics.take_window()
    assert (second.completed, second.rewards.count, second.lengths.largest) == (1, 0, 1)
    assert (statistics.completed, statistics.scored, statistics.tokens) == (3, 2, 16)


def test_versions_are_the_lowest_and_the_highest() -> None:
    statistics = Statistics()
    assert statistics.versions is None
    statistics.add(rollout([4], versions=[(0, 5), (2, 6)]))
    statistics.add(rollout([4], versions=[(0, 3)]))
    assert statistics.versions == (3, 6)


@given(st.lists(st.text(max_size=20), max_size=100))
def test_names_do_not_fill_the_memory(names: list[str]) -> None:
    statistics = Statistics()
    for name in names:
        statistics.add(rollout([1], 1.0, source=name))
        statistics.add_failure(failure(f"{name}: what happened"))
    window = statistics.take_window()
    assert len(window.by_source) <= MOST_NAMES + 1
    assert sum(one.count for one in window.by_source.values()) == len(names)
    assert len(statistics.failures) <= MOST_NAMES + 1
    assert sum(statistics.failures.values()) == len(names)


def test_failures_are_told_apart_by_the_class_of_their_error() -> None:
    statistics = Statistics()
    for error in ("TimeoutError: 600 s", "TimeoutError: other", "DataError: no", "not a class: x", ""):
        statistics.add_failure(failure(error))
    assert statistics.failures == {"TimeoutError": 2, "DataError": 1, OTHER: 2}
