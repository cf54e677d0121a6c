"""Whether what a rollout gave can be trained on: checked before it is stored, whoever wrote the loop."""

import math
import struct
from collections.abc import Sequence
from itertools import compress
from operator import not_
from typing import Any

from rollstream.trajectory import Trajectory

FINISH_REASONS = ("stop", "length", "max_turns", "tool_overflow", "aborted")
"""Why a trajectory ended."""


def check_trajectories(
    trajectories: Sequence[Trajectory], *, logprobs: bool, ids: bool = True, vocab_size: int | None = None
) -> None:
    """Refuses trajectories of a rollout that cannot be trained on; makes their rewards plain floats.

    Args:
        trajectories: of one rollout.
        logprobs: whether log-probs were asked for.
        ids: whether there is a tokenizer, so that a prompt has ids.
        vocab_size: ids are below it; None: they fit 31 bits.

    Raises:
        ValueError: one stands there twice; the final one is a snapshot; no prompt ids, ids out of range, an unknown
            finish reason, arrays of different lengths, a mask value other than 0 and 1, log-probs that were asked
            for and are not there, that are not finite, or not 0 where the mask is; policy versions that do not
            describe the response; a reward that is not finite.
        TypeError: a reward that is no number, messages that are no list of mappings.
    """
    if len({id(trajectory) for trajectory in trajectories}) < len(trajectories):
        raise ValueError("the same trajectory stands there twice: its tokens would be trained on twice")
    if [trajectory.is_snapshot for trajectory in trajectories] != [True] * (len(trajectories) - 1) + [False]:
        raise ValueError("snapshots (is_snapshot=True) come first, and one final trajectory last")
    for trajectory in trajectories:
        _check(trajectory, logprobs=logprobs, ids=ids, end=vocab_size or 2**31)


def _check(trajectory: Trajectory, *, logprobs: bool, ids: bool, end: int) -> None:
    if trajectory.finish_reason not in FINISH_REASONS:
        raise ValueError(
            f"finish_reason is {trajectory.finish_reason!r}, want one of {', '.join(FINISH_REASONS)}"
        )
    if ids and not trajectory.prompt_ids:
        raise ValueError("prompt_ids is empty")
    for name in ("prompt_ids", "response_ids"):
        values = getattr(trajectory, name)
        if not _are_ids(values, end):
            wrong = next((value for value in values if not _are_ids([value], end)), values)
            raise ValueError(f"{name} has {wrong!r:.50}; ids are whole numbers from 0 to {end - 1}")
    if not isinstance(trajectory.messages, list) or not all(isinstance(m, dict) for m in trajectory.messages):
        raise TypeError("messages must be a list of mappings")
    length = len(trajectory.response_ids)
    lengths = {"response_mask": len(trajectory.response_mask)}
    if trajectory.response_logprobs is not None:
        lengths["response_logprobs"] = len(trajectory.response_logprobs)
    elif logprobs:
        raise ValueError("response_logprobs is None, but log-probs were asked for")
    for name, entries in lengths.items():
        if entries != length:
            raise ValueError(f"lengths differ: {length} response_ids, {entries} {name}")
    mask_values = set(trajectory.response_mask)
    if not mask_values <= {0, 1}:
        raise ValueError("response_mask has values other than 0 and 1")
    if trajectory.response_logprobs is not None and length:
        if not _are_finite(trajectory.response_logprobs):
            raise ValueError("response_logprobs has values that are not finite")
        if 0 in mask_values and any(
            compress(trajectory.response_logprobs, map(not_, trajectory.response_mask))
        ):
            raise ValueError("response_logprobs must be 0 where response_mask is 0")
    starts = [start for start, _ in trajectory.policy_versions]
    if starts != sorted(set(starts)) or any(not 0 <= start <= length for start in starts):
        raise ValueError(
            f"policy_versions must be (start, version) with ascending starts within the response of {length} "
            f"tokens, not {trajectory.policy_versions!r:.200}"
        )
    if trajectory.reward is not None:
        given: Any = trajectory.reward
        if isinstance(given, str | bytes):
            raise TypeError(f"the reward must be a number, not {given!r}")
        trajectory.reward = float(given)
        if not math.isfinite(trajectory.reward):
            raise ValueError(f"the reward must be finite, not {trajectory.reward}")


# Plain loops over lists: numpy would copy them first, and gives the GIL away above 500 values, which costs the
# event loop more than the check while other threads write.


def _are_ids(ids: Sequence[int], end: int) -> bool:
    """Whether all are whole numbers from 0 to below `end`, 2**31 at most."""
    try:
        struct.pack(f"{len(ids)}i", *ids)
    except struct.error:
        return False
    return len(ids) == 0 or (min(ids) >= 0 and max(ids) < end)


def _are_finite(values: Sequence[float]) -> bool:
    """Also as the 32-bit numbers that are stored."""
    try:
        struct.pack(f"{len(values)}f", *values)
    except (struct.error, OverflowError):
        return False
    return math.isfinite(sum(values))
