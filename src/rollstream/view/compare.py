"""Two runs against each other, prompt by prompt."""

import math
from typing import Any

import numpy as np

from rollstream.view.columns import Array, RunColumns
from rollstream.view.overview import group_figures

_TIED = 1e-12
"""Means of the same rewards in another order differ by less."""


def compare(a: RunColumns, b: RunColumns) -> tuple[dict[str, Any], dict[str, Array]]:
    """What is said of both, and columns over the prompts that are scored in both.

    Prompts are the same when their keys are. `difference` is b's mean reward less a's; its interval is of 95 %,
    prompts being independent.
    """
    (keys_a, index_a, means_a), (keys_b, index_b, means_b) = _by_prompt(a), _by_prompt(b)
    shared, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    mean_a, mean_b = means_a[at_a], means_b[at_b]
    difference = mean_b - mean_a
    both = np.isfinite(difference)
    columns = {
        "prompt_key": shared,
        "index_a": index_a[at_a],
        "index_b": index_b[at_b],
        "mean_a": mean_a,
        "mean_b": mean_b,
        "difference": np.where(np.abs(difference) < _TIED, 0.0, difference),
    }
    columns = {name: values[both] for name, values in columns.items()}
    change = columns["difference"]
    count = len(change)
    error = 1.96 * float(change.std(ddof=1)) / math.sqrt(count) if count > 1 else None
    mean = float(change.mean()) if count else None
    said = {
        "prompts": count,
        "only_a": len(keys_a) - len(shared),
        "only_b": len(keys_b) - len(shared),
        "unscored": len(shared) - count,
        "mean_a": float(columns["mean_a"].mean()) if count else None,
        "mean_b": float(columns["mean_b"].mean()) if count else None,
        "difference": mean,
        "interval": None if mean is None or error is None else [mean - error, mean + error],
        "won": int((change > 0).sum()),
        "lost": int((change < 0).sum()),
        "tied": int((change == 0).sum()),
    }
    return said, columns


def _by_prompt(run: RunColumns) -> tuple[Array, Array, Array]:
    """Prompt keys, the first index and the mean reward of each; a dataset may have a prompt several times."""
    groups = group_figures(run)
    keys, first, which = np.unique(run["prompt_key"][groups["first"]], return_index=True, return_inverse=True)
    sums, counts = (np.bincount(which, groups[name], len(keys)) for name in ("total", "scored"))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    return keys, groups["index"][first], means
