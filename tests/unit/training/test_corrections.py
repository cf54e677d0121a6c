"""Against a direct computation, token by token, in plain Python."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from rollstream.training.corrections import (
    importance_ratios,
    is_stats,
    masked_is_weights,
    truncated_is_weights,
)

rows = st.integers(1, 3).flatmap(
    lambda tokens: st.lists(
        st.lists(
            st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.booleans()), min_size=tokens, max_size=tokens
        ),
        min_size=1,
        max_size=3,
    )
)


def directly(row: list[tuple[float, float, bool]], level: str) -> list[float]:
    logs = [p - q for p, q, sampled in row if sampled]
    ratios = []
    for p, q, sampled in row:
        if not sampled:
            ratios.append(0.0)
        elif level == "token":
            ratios.append(math.exp(p - q))
        elif level == "sequence":
            ratios.append(math.exp(max(-20.0, min(20.0, sum(logs)))))
        else:
            ratios.append(math.exp(sum(logs) / len(logs)))
    return ratios


def arrays(drawn: list[list[tuple[float, float, bool]]]) -> list[Any]:
    return [np.array([[one[part] for one in row] for row in drawn], dtype=np.float64) for part in range(3)]


@given(rows, st.sampled_from(["token", "sequence", "geometric"]))
@settings(deadline=None)
def test_ratios_and_weights(drawn: list[list[tuple[float, float, bool]]], level: Any) -> None:
    trainer, sampler, mask = arrays(drawn)
    expected = np.array([directly(row, level) for row in drawn])
    np.testing.assert_allclose(importance_ratios(trainer, sampler, mask, level=level), expected, rtol=1e-9)
    np.testing.assert_allclose(
        truncated_is_weights(trainer, sampler, mask, cap=1.5, level=level),
        np.minimum(expected, 1.5),
        rtol=1e-9,
    )
    masked = np.where((expected >= 0.5) & (expected <= 2.0), expected, 0.0)
    clear = (abs(expected - 0.5) > 1e-9) & (abs(expected - 2.0) > 1e-9)
    got = masked_is_weights(trainer, sampler, mask, low=0.5, high=2.0, level=level)
    np.testing.assert_allclose(got[clear], masked[clear], rtol=1e-9)


@given(rows, st.sampled_from(["token", "sequence", "geometric"]))
@settings(max_examples=30, deadline=None)
def test_torch_says_the_same(drawn: list[list[tuple[float, float, bool]]], level: Any) -> None:
    torch = pytest.importorskip("torch")
    plain = arrays(drawn)
    trainer, sampler, mask = (torch.tensor(array) for array in plain)
    trainer.requires_grad_()
    for function in (importance_ratios, truncated_is_weights, masked_is_weights):
        weights = function(trainer, sampler, mask.bool(), level=level)
        assert not weights.requires_grad
        np.testing.assert_allclose(weights.numpy(), function(*plain, level=level), rtol=1e-9)
    mine, theirs = is_stats(trainer, sampler, mask), is_stats(*plain)
    assert mine == pytest.approx(theirs)


def test_bfloat16_is_computed_in_float32() -> None:
    torch = pytest.importorskip("torch")
    trainer = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16)
    weights = truncated_is_weights(trainer, torch.tensor([[-1.5, -2.5]]), torch.ones(1, 2))
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_padding_does_not_count_even_if_it_is_not_a_number(level: Any) -> None:
    trainer = np.array([[-1.0, np.nan, -np.inf], [0.0, 0.0, 0.0]])
    sampler = np.array([[-1.5, -np.inf, -np.inf], [np.nan, 0.0, 0.0]])
    mask = np.array([[1, 0, 0], [0, 0, 0]])
    weights = truncated_is_weights(trainer, sampler, mask, level=level)
    np.testing.assert_allclose(weights, [[math.exp(0.5), 0, 0], [0, 0, 0]])


def test_extreme_ratios_stay_finite() -> None:
    ratios = importance_ratios(np.float32([[0.0, -800.0]]), np.float32([[-900.0, 0.0]]), np.ones((1, 2)))
    assert np.isfinite(ratios).all()
    assert ratios.dtype == np.float32


def test_stats() -> None:
    trainer, sampler = np.array([[-1.0, -2.0, 9.0]]), np.array([[-1.5, -1.0, 3.0]])
    stats = is_stats(trainer, sampler, np.array([[1, 1, 0]]))
    ratios = [math.exp(0.5), math.exp(-1.0)]
    assert stats["ratio_mean"] == pytest.approx(sum(ratios) / 2)
    assert (stats["ratio_min"], stats["ratio_max"]) == pytest.approx((ratios[1], ratios[0]))
    assert stats["kl_k1"] == pytest.approx(0.25)
    assert stats["kl_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 2)
    assert (stats["kl_beyond_bound"], stats["kl_ratio_beyond"]) == (1, 0.5)
    none = is_stats(trainer, sampler, np.zeros((1, 3)))
    assert set(none.values()) == {0.0} and none.keys() == stats.keys()


def test_nonsense_is_refused() -> None:
    one = np.zeros((1, 2))
    with pytest.raises(ConfigError, match="one shape"):
        importance_ratios(one, np.zeros((1, 3)), one)
    with pytest.raises(ConfigError, match="level"):
        importance_ratios(one, one, one, level="word")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cap"):
        truncated_is_weights(one, one, one, cap=0)
    with pytest.raises(ConfigError, match="low"):
        masked_is_weights(one, one, one, low=2, high=1)
