"""What rollouts say of a model: means with intervals, pass@k, rates. Pure functions of arrays.

Rollouts of one prompt resemble each other, so a mean's error is that of its prompts, not of its rollouts.
Sources: Miller, "Adding Error Bars to Evals", 2024 (arXiv 2411.00640); Chen et al., "Evaluating Large Language
Models Trained on Code", 2021 (arXiv 2107.03374); Yao et al., "τ-bench", 2024 (arXiv 2406.12045).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rollstream.evaluate.samples import Samples

Array = npt.NDArray[Any]

SOLVED_AT: Final = 0.5
"""A reward from here on counts as solved; right for rewards of 0 and 1, of -1 and 1, and for most shares."""

_LEVEL: Final = 0.95
_NORMAL_FROM: Final = 1000
"""Degrees of freedom from which Student's t is the normal distribution, to three digits."""

SUMS_MAY_OVERFLOW: Final = np.errstate(over="ignore", invalid="ignore")
"""Sums of rewards may be infinite."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and how far it may be off by luck."""

    mean: float
    error: float | None
    """Standard error; None of a single cluster."""
    low: float | None
    """The 95 % interval goes from here, by Student's t with a degree of freedom less than clusters, …"""
    high: float | None
    """… to here."""
    count: int
    clusters: int
    """Prompts that the values are of."""


@dataclass(frozen=True, slots=True)
class PassRate:
    """How often `k` rollouts of a prompt solve it."""

    k: int
    pass_at: Estimate | None
    """pass@k: at least one of them does. None where no prompt has `k` scored rollouts."""
    pass_hat: Estimate | None
    """pass^k: each of them does."""
    left_out: int
    """Prompts with fewer than `k` scored rollouts, or none: they have no part in it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of some rollouts. Rates are shares of 0 to 1, None where there is nothing to count."""

    rollouts: int
    """Completed and failed ones; snapshots are no rollouts."""
    prompts: int
    """By prompt key."""
    scored: int
    unscored: int
    """Completed without a reward."""
    failed: int
    reward: Estimate | None
    """Mean reward of the scored rollouts."""
    solved_at: float
    partial: int
    """Scored rollouts whose reward is neither 0, 1 nor -1: what counts as solved is then a choice."""
    passes: list[PassRate]
    truncated: float | None
    """Of the completed rollouts those that were cut off at their length."""
    failure_rate: float | None
    tool_calls: int
    tool_error_rate: float | None
    """Of the tool calls."""
    tokens: float | None
    """Mean length of the final trajectories' responses."""
    tokens_p95: float | None
    """95 % of them are at most as long."""
    turns: float | None
    """Mean of the completed rollouts."""

    def numbers(self) -> dict[str, float]:
        """The same as flat numbers for a tracker; what there is none of is left out."""
        found: dict[str, float | None] = {
            "rollouts": self.rollouts,
            "unscored_rate": self.unscored / self.rollouts if self.rollouts else None,
            "failure_rate": self.failure_rate,
            "truncated": self.truncated,
            "tool_error_rate": self.tool_error_rate,
            "tokens": self.tokens,
            "tokens_p95": self.tokens_p95,
        }
        estimates = {"reward": self.reward}
        for rate in self.passes:
            estimates |= {f"pass_at_{rate.k}": rate.pass_at, f"pass_hat_{rate.k}": rate.pass_hat}
        for name, one in estimates.items():
            if one is not None:
                found |= {name: one.mean, f"{name}_low": one.low, f"{name}_high": one.high}
        return {name: value for name, value in found.items() if value is not None}


def mean_of(values: Array, clusters: Array) -> Estimate | None:
    """The mean of values, clustered; NaN is left out. None where nothing is left.

    Args:
        values: shape (N,).
        clusters: shape (N,), whole numbers from 0: equal ones depend on each other.
    """
    known = ~np.isnan(values)
    size = int(clusters.max()) + 1 if len(clusters) else 0
    sums = np.bincount(clusters[known], values[known], size)
    return mean_of_sums(sums, np.bincount(clusters[known], minlength=size))


@SUMS_MAY_OVERFLOW
def mean_of_sums(sums: Array, counts: Array) -> Estimate | None:
    """The same from each cluster's sum of values and their number; clusters of none are left out.

    The error is that of Miller's appendix A with C / (C - 1) for C clusters, as inspect_ai's `stderr(cluster=…)`.
    """
    count, clusters = int(counts.sum()), int((counts > 0).sum())
    if not count:
        return None
    mean = float(sums.sum() / count)
    if clusters < 2:
        return Estimate(mean, None, None, None, count, clusters)
    residuals = float(((sums - mean * counts) ** 2).sum())
    error = math.sqrt(residuals * clusters / (clusters - 1)) / count
    reach = t_quantile(clusters - 1) * error
    return Estimate(mean, error, mean - reach, mean + reach, count, clusters)


@functools.cache
def t_quantile(freedom: int) -> float:
    """Student's t below which 97.5 % lie, for whole degrees of freedom from 1."""
    tail = (1 + _LEVEL) / 2
    if freedom >= _NORMAL_FROM:
        return NormalDist().inv_cdf(tail)
    low, high = 1.0, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_between(middle, freedom) < _LEVEL else (low, middle)
    return (low + high) / 2


def _t_between(t: float, freedom: int) -> float:
    """How much of Student's distribution lies between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = (cosine if odd else 1.0) if freedom > 1 else 0.0
    for at in range(2 if odd else 1, freedom - 2, 2):
        term *= at / (at + 1) * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def pass_at_k(counts: Array, solved: Array, k: int) -> Array:
    """For each prompt the chance that one of `k` of its rollouts or more solves it, `1 - C(n-c, k) / C(n, k)`.

    Unbiased (Chen et al.); NaN where there are fewer than `k` rollouts.

    Args:
        counts: scored rollouts of each prompt, n. Shape (P,).
        solved: those that solved it, c. Shape (P,).
        k: from 1.
    """
    return _by_counts(counts, solved, k, lambda n, c: 1 - math.comb(n - c, k) / math.comb(n, k))


def pass_hat_k(counts: Array, solved: Array, k: int) -> Array:
    """For each prompt the chance that all of `k` of its rollouts solve it: pass^k, `C(c, k) / C(n, k)`.

    Unbiased (τ-bench); NaN where there are fewer than `k` rollouts. Arguments as of `pass_at_k`.
    """
    return _by_counts(counts, solved, k, lambda n, c: math.comb(c, k) / math.comb(n, k))


def _by_counts(counts: Array, solved: Array, k: int, chance: Callable[[int, int], float]) -> Array:
    """The chance of each prompt; prompts with the same numbers are computed once."""
    pairs, which = np.unique(np.stack([counts, solved]), axis=1, return_inverse=True)
    found = [chance(n, c) if n >= k else math.nan for n, c in pairs.T.tolist()]
    return np.array(found, np.float64)[which.reshape(-1)]


def pass_rates(counts: Array, solved: Array, ks: Sequence[int]) -> list[PassRate]:
    """pass@k and pass^k over prompts, each prompt with the same weight. Arguments as of `pass_at_k`."""
    prompts = np.arange(len(counts))
    return [
        PassRate(
            k,
            _chance(mean_of(pass_at_k(counts, solved, k), prompts)),
            _chance(mean_of(pass_hat_k(counts, solved, k), prompts)),
            int((counts < k).sum()),
        )
        for k in ks
    ]


def _chance(one: Estimate | None) -> Estimate | None:
    """Its interval within 0 and 1."""
    if one is None or one.low is None or one.high is None:
        return one
    return replace(one, low=max(0.0, one.low), high=min(1.0, one.high))


def default_ks(most: int) -> list[int]:
    """1, 2, 4, … and the number itself."""
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})


def summarize(samples: Samples, solved_at: float = SOLVED_AT, ks: Sequence[int] | None = None) -> Summary:
    """All figures of some rollouts.

    A rollout that failed, or was not scored, has no part in the mean nor in pass@k (`Samples.with_missing` says
    otherwise): both are counted.

    Args:
        samples: the rollouts.
        solved_at: a reward from here on counts as solved.
        ks: of pass@k; None: 1, 2, 4, … up to the most scored rollouts that a prompt has.
    """
    reward, completed = samples.reward, ~samples.failed
    scored = ~np.isnan(reward)
    # Only prompts that are there: the samples may be a few of many.
    present, prompt = np.unique(samples.prompt, return_inverse=True)
    counts = np.bincount(prompt[scored], minlength=len(present))
    solved = np.bincount(prompt[scored & (reward >= solved_at)], minlength=len(present))
    if ks is None:
        ks = default_ks(int(counts.max(initial=0)))
    calls = float(samples.tool_calls.sum())
    lengths = samples.tokens[completed]
    return Summary(
        rollouts=len(reward),
        prompts=len(present),
        scored=int(scored.sum()),
        unscored=int((completed & ~scored).sum()),
        failed=int(samples.failed.sum()),
        reward=mean_of(reward, prompt),
        solved_at=solved_at,
        partial=int((scored & ~np.isin(reward, (-1.0, 0.0, 1.0))).sum()),
        passes=pass_rates(counts, solved, ks),
        truncated=_mean(samples.truncated[completed]),
        failure_rate=_mean(samples.failed),
        tool_calls=int(calls),
        tool_error_rate=float(samples.tool_errors.sum()) / calls if calls else None,
        tokens=_mean(lengths),
        tokens_p95=float(np.percentile(lengths, 95)) if len(lengths) else None,
        turns=_mean(samples.turns[completed]),
    )


def summarize_by(
    samples: Samples,
    labels: Sequence[str | None],
    solved_at: float = SOLVED_AT,
    ks: Sequence[int] | None = None,
) -> dict[str | None, Summary]:
    """The figures of the rollouts of each label: numbers in their order, then texts, then None."""
    values = sorted(set(labels), key=_in_order)
    codes = {value: code for code, value in enumerate(values)}
    which = np.array([codes[label] for label in labels], np.int64)
    order = np.argsort(which, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(which, minlength=len(values)))[:-1])
    return {
        value: summarize(samples.take(part), solved_at, ks) for value, part in zip(values, parts, strict=True)
    }


def _in_order(value: str | None) -> tuple[int, float, str]:
    try:
        return 0, float(value or "none"), ""
    except ValueError:
        return 2 if value is None else 1, 0.0, value or ""


def _mean(values: Array) -> float | None:
    return float(values.mean()) if len(values) else None
