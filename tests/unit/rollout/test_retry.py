"""When to try again: pure decisions."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import (
    EngineError,
    EngineUnavailableError,
    TransientEngineError,
    TransientError,
)
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient


@given(st.integers(1, 100), st.floats(0.01, 100), st.floats(0.01, 100), st.randoms(use_true_random=False))
def test_wait_grows_within_its_bounds(attempt: int, delay: float, most: float, rng: random.Random) -> None:
    policy = RetryPolicy(5, delay, most)
    longest = min(most, delay * 2.0 ** min(attempt - 1, 30))
    assert longest / 2 <= policy.wait(attempt, rng) <= longest


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransientEngineError("503"), True),
        (EngineError("400"), False),
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (ValueError(), False),
        (ExceptionGroup("all", [TransientError("a"), TimeoutError()]), True),
        (ExceptionGroup("one is not", [TransientError("a"), ValueError()]), False),
    ],
)
def test_is_transient(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected


def test_find_unavailable_in_a_group() -> None:
    cause = EngineUnavailableError("gone")
    assert find_unavailable(ExceptionGroup("outer", [ValueError(), ExceptionGroup("in", [cause])])) is cause
    assert find_unavailable(ValueError()) is None
