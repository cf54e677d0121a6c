"""Rollouts as TRL takes them: lists of ids, masks and log-probs, one entry for each rollout."""

from collections.abc import Sequence
from typing import Any

from rollstream.errors import TrainingError
from rollstream.integrations.trl.failures import failure_of
from rollstream.trajectory import Rollout

Fields = dict[str, list[Any]]
"""What a `rollout_func` returns: `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (1: sampled by the
model), and, for reward functions, `env_reward`, `env_messages`, `env_reward_extra`, and `env_failed`: whether
it stands in for a rollout that failed."""


def to_fields(rollouts: Sequence[Rollout], *, end_id: int) -> Fields:
    """Rollouts, in their order, as TRL's fields.

    Args:
        rollouts: each of one trajectory.
        end_id: stands, masked, for a prompt or a response without any token, which TRL cannot hold.

    Raises:
        TrainingError: a rollout has snapshots, for which TRL has no place, or no log-probs.
    """
    fields: Fields = {
        name: []
        for name in (
            "prompt_ids",
            "completion_ids",
            "logprobs",
            "env_mask",
            "env_reward",
            "env_messages",
            "env_reward_extra",
            "env_failed",
        )
    }
    for rollout in rollouts:
        if len(rollout.trajectories) != 1:
            raise TrainingError(
                f"rollout ({rollout.index}, {rollout.repeat}) has {len(rollout.trajectories)} trajectories, "
                "and TRL trains one for each: use an agent loop that does not edit its context"
            )
        trajectory = rollout.final
        if trajectory.response_logprobs is None:
            raise TrainingError(f"rollout ({rollout.index}, {rollout.repeat}) has no log-probs")
        empty = not trajectory.response_ids
        fields["prompt_ids"].append(list(trajectory.prompt_ids) or [end_id])
        fields["completion_ids"].append([end_id] if empty else list(trajectory.response_ids))
        fields["logprobs"].append([0.0] if empty else list(trajectory.response_logprobs))
        fields["env_mask"].append([0] if empty else list(trajectory.response_mask))
        fields["env_reward"].append(trajectory.reward)
        fields["env_messages"].append(trajectory.messages)
        fields["env_reward_extra"].append(trajectory.reward_extra)
        fields["env_failed"].append(failure_of(rollout) is not None)
    return fields


def take_slice(fields: Fields, rank: int, ranks: int) -> Fields:
    """The part of one process: equal consecutive slices, in the order of the ranks."""
    total = len(fields["prompt_ids"])
    if total % ranks:
        raise TrainingError(f"{total} rollouts cannot be dealt to {ranks} processes evenly")
    size = total // ranks
    return {name: values[rank * size : (rank + 1) * size] for name, values in fields.items()}


def env_reward(*, env_reward: list[float | None], **_: Any) -> list[float | None]:
    """The environment's reward as a TRL reward function; None: not scored, left out of its group's mean."""
    return env_reward
