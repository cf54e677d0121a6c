"""Leaving out prompts that are too long."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rollstream.data.prompts import PromptDataset
from rollstream.errors import DataError
from rollstream.trajectory import PromptRow


class OverlongCount(NamedTuple):
    """What `filter_overlong` did."""

    removed: int
    """Rows left out."""
    checked: int
    """Rows whose length was looked at; fewer than all when `max_samples` was reached before."""


def filter_overlong(
    dataset: PromptDataset,
    render: Callable[[list[PromptRow]], list[int]],
    max_prompt_length: int,
    *,
    batch_size: int = 256,
) -> OverlongCount:
    """Leaves prompts that are too long out of `dataset.order`, before it is cut to `max_samples`.

    So `max_samples` rows are visited whenever that many fit. (verl cuts first and filters what is left.)
    Rows are looked at in visiting order and only until `max_samples` of them fit.

    Args:
        dataset: Changed: its `order` afterwards has rows that fit, in the same order as before.
        render: Gives the prompt length of each row, in tokens.
        max_prompt_length: Tokens; a prompt of exactly this length stays.
        batch_size: Rows given to `render` at once.

    Returns:
        How many rows were left out, of how many looked at.

    Raises:
        DataError: No row fits, or a row cannot be used.
        ValueError: `render` did not give one length a row.
    """
    visiting = dataset.visiting
    kept: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    fitting = checked = 0
    shortest: int | None = None
    for start in range(0, len(visiting), batch_size):
        batch = visiting[start : start + batch_size]
        lengths = np.asarray(render([dataset.row(index) for index in batch.tolist()]))
        if lengths.shape != batch.shape:
            raise ValueError(f"render gave {lengths.shape} lengths for {batch.shape} rows")
        fits = batch[lengths <= max_prompt_length]
        kept.append(fits)
        fitting += len(fits)
        checked += len(batch)
        shortest = int(lengths.min()) if shortest is None else min(shortest, int(lengths.min()))
        if dataset.max_samples is not None and fitting >= dataset.max_samples:
            break
    if not fitting:
        raise DataError(
            f"all {checked} prompts are longer than data.max_prompt_length={max_prompt_length} tokens "
            f"(the shortest has {shortest}); raise it"
        )
    dataset.restrict(np.concatenate(kept))
    return OverlongCount(removed=checked - fitting, checked=checked)
