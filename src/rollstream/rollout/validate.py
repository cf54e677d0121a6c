"""Whether what a rollout gave can be trained on: checked before it is stored, whoever wrote the loop."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.trajectory import Trajectory

FINISH_REASONS = ("stop", "length", "max_turns", "tool_overflow", "aborted")
"""Why a trajectory ended."""


def check_trajectories(trajectories: Sequence[Trajectory], *, logprobs: bool, ids: bool = True) -> None:
    """Refuses trajectories of a rollout that cannot be trained on; makes their rewards plain floats.

    Args:
        trajectories: of one rollout.
        logprobs: whether log-probs were asked for.
        ids: whether there is a tokenizer, so that a prompt has ids.

    Raises:
        ValueError: one stands there twice, the final one is a snapshot, or see `check_trajectory`.
        TypeError: see there.
    """
    if len({id(trajectory) for trajectory in trajectories}) < len(trajectories):
        raise ValueError("the same trajectory stands there twice: its tokens would be trained on twice")
    if [trajectory.is_snapshot for trajectory in trajectories] != [True] * (len(trajectories) - 1) + [False]:
        raise ValueError("snapshots (is_snapshot=True) come first, and one final trajectory last")
    for trajectory in trajectories:
        check_trajectory(trajectory, logprobs=logprobs, ids=ids)


def check_trajectory(trajectory: Trajectory, *, logprobs: bool, ids: bool = True) -> None:
    """Refuses a trajectory that cannot be trained on; makes its reward a plain float.

    Raises:
        ValueError: no prompt ids, ids out of range, an unknown finish reason, arrays of different lengths, a
            mask value other than 0 and 1, log-probs that were asked for and are not there, that are not
            finite, or not 0 where the mask is; policy versions that do not describe the response; a reward
            that is not finite.
        TypeError: a reward that is no number, messages that are no list of mappings.
    """
    if trajectory.finish_reason not in FINISH_REASONS:
        raise ValueError(
            f"finish_reason is {trajectory.finish_reason!r}, want one of {', '.join(FINISH_REASONS)}"
        )
    if ids and not trajectory.prompt_ids:
        raise ValueError("prompt_ids is empty")
    for name in ("prompt_ids", "response_ids"):
        found_ids = _as_array("i", getattr(trajectory, name))
        if found_ids is None or (len(found_ids) and found_ids.min() < 0):
            raise ValueError(f"{name} has an id below 0, or of more than 31 bits")
    if not isinstance(trajectory.messages, list) or not all(isinstance(m, dict) for m in trajectory.messages):
        raise TypeError("messages must be a list of mappings")
    length = len(trajectory.response_ids)
    lengths = {"response_mask": len(trajectory.response_mask)}
    if trajectory.response_logprobs is not None:
        lengths["response_logprobs"] = len(trajectory.response_logprobs)
    elif logprobs:
        raise ValueError("response_logprobs is None, but log-probs were asked for")
    for name, found in lengths.items():
        if found != length:
            raise ValueError(f"lengths differ: {length} response_ids, {found} {name}")
    mask_values = set(trajectory.response_mask)
    if not mask_values <= {0, 1}:
        raise ValueError("response_mask has values other than 0 and 1")
    if trajectory.response_logprobs is not None and length:
        values = _as_array("f", trajectory.response_logprobs)
        if values is None or not np.isfinite(values).all():
            raise ValueError("response_logprobs has values that are not finite")
        if 0 in mask_values and values[np.asarray(trajectory.response_mask) == 0].any():
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


def _as_array(code: str, values: Sequence[float]) -> npt.NDArray[Any] | None:
    """Numbers as an array of 32-bit ones; None when one does not fit.

    `struct` reads a list of Python numbers in a third of the time that numpy takes.
    """
    try:
        return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), code)
    except (struct.error, OverflowError):
        return None
