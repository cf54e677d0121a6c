"""Two runs against each other, prompt by prompt. Pure functions of arrays.

Prompts are the same when their keys are. A difference by prompt takes away what the prompts themselves differ
by, so its interval is narrower than that of two means (Miller, arXiv 2411.00640, section 4.2).
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rollstream.evaluate.metrics import SUMS_MAY_OVERFLOW, Estimate, mean_of
from rollstream.evaluate.samples import Samples

Array = npt.NDArray[Any]

_TIED: Final = 1e-12
"""Means of the same rewards in another order differ by less."""
_ENUMERATED: Final = 20
"""Differences of which all 2^n signs are tried: a million sums."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What b is against a, over the prompts that are scored in both."""

    prompts: int
    only_a: int
    only_b: int
    unscored: int
    """Prompts of both that one of them, or both, have no reward for."""
    mean_a: float | None
    """Mean over the prompts of their mean rewards."""
    mean_b: float | None
    difference: Estimate | None
    """Of the means, b's less a's."""
    won: int
    """Prompts for which b's mean reward is higher."""
    lost: int
    tied: int
    sign_p: float
    """`sign_test` of won and lost."""
    permutation_p: float
    """`permutation_test` of the differences."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The prompts that are scored in both. Arrays of shape (prompts,)."""

    at_a: Array
    """Places in a's prompts."""
    at_b: Array
    difference: Array


def compare_samples(a: Samples, b: Samples) -> Comparison:
    """Two runs, paired by prompt."""
    return pair_prompts(a.keys, a.prompt_means(), b.keys, b.prompt_means())[0]


@SUMS_MAY_OVERFLOW
def pair_prompts(keys_a: Array, means_a: Array, keys_b: Array, means_b: Array) -> tuple[Comparison, Pairs]:
    """The same from the keys of prompts, each once, and their mean rewards, NaN where nothing is scored."""
    shared, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    change = means_b[at_b] - means_a[at_a]
    both = np.isfinite(change)
    at_a, at_b, change = at_a[both], at_b[both], change[both]
    change = np.where(np.abs(change) < _TIED, 0.0, change)
    won, lost, count = int((change > 0).sum()), int((change < 0).sum()), len(change)
    return Comparison(
        prompts=count,
        only_a=len(keys_a) - len(shared),
        only_b=len(keys_b) - len(shared),
        unscored=len(shared) - count,
        mean_a=float(means_a[at_a].mean()) if count else None,
        mean_b=float(means_b[at_b].mean()) if count else None,
        difference=mean_of(change, np.arange(count)),
        won=won,
        lost=lost,
        tied=count - won - lost,
        sign_p=sign_test(won, lost),
        permutation_p=permutation_test(change),
    ), Pairs(at_a, at_b, change)


def sign_test(won: int, lost: int) -> float:
    """The chance that a fair coin is as uneven as this, or more; exact, two-sided. Ties are left out."""
    count = won + lost
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])  # of factorials
    fewer = np.arange(min(won, lost) + 1)
    tail = np.exp(logs[count] - logs[fewer] - logs[count - fewer] - count * math.log(2)).sum()
    return min(1.0, 2 * float(tail))


@SUMS_MAY_OVERFLOW
def permutation_test(differences: Array) -> float:
    """The chance of a mean difference as large as this, or larger, were the two runs' names drawn by prompt.

    Two-sided. Exact up to 20 differences that are not 0: all signs are tried. Of more it is the normal
    distribution with the same variance, to which that of the signs comes close.
    """
    some = np.asarray(differences[differences != 0], np.float64)
    if not len(some):
        return 1.0
    observed = abs(float(some.sum()))
    if len(some) > _ENUMERATED:
        return math.erfc(observed / math.sqrt(2 * float((some**2).sum())))
    sums = some[:1]  # the other sign mirrors them
    for one in some[1:]:
        sums = np.concatenate([sums + one, sums - one])
    return float((np.abs(sums) >= observed - _TIED * np.abs(some).sum()).mean())
