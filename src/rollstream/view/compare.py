"""Two runs against each other, prompt by prompt."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from rollstream.evaluate.compare import pair_prompts
from rollstream.store.columns import Array, RunColumns
from rollstream.view.overview import group_figures


def compare(a: RunColumns, b: RunColumns) -> tuple[dict[str, Any], dict[str, Array]]:
    """What is said of both, and columns over the prompts that are scored in both.

    Prompts are the same when their keys are. `difference` is b's mean reward less a's; `interval` is its.
    """
    (keys_a, index_a, means_a), (keys_b, index_b, means_b) = _by_prompt(a), _by_prompt(b)
    found, pairs = pair_prompts(keys_a, means_a, keys_b, means_b)
    columns = {
        "prompt_key": keys_a[pairs.at_a],
        "index_a": index_a[pairs.at_a],
        "index_b": index_b[pairs.at_b],
        "mean_a": means_a[pairs.at_a],
        "mean_b": means_b[pairs.at_b],
        "difference": pairs.difference,
    }
    change = found.difference
    interval = None if change is None or change.low is None else [change.low, change.high]
    return {
        **asdict(found),
        "difference": None if change is None else change.mean,
        "interval": interval,
    }, columns


def _by_prompt(run: RunColumns) -> tuple[Array, Array, Array]:
    """Prompt keys, the first index and the mean reward of each; a dataset may have a prompt several times."""
    groups = group_figures(run)
    of_groups = run.prompt_keys(groups["first"])
    keys, first, which = np.unique(of_groups, return_index=True, return_inverse=True)
    sums, counts = (np.bincount(which, groups[name], len(keys)) for name in ("total", "scored"))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    return keys, groups["index"][first], means
