"""Rollouts as the buffer's items: slime's fields, and the exact tokens."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollstream.buffer.items import InstanceId
from rollstream.trajectory import Failure, PromptRow, Rollout, Trajectory

_FAILED_REWARD = -1.0
"""Outside of 0 to 1: the default filter lets no failed rollout through to a trainer."""


def rollout_item(
    result: Rollout | Failure,
    row: PromptRow | None,
    *,
    uid: str,
    instance_id: InstanceId,
    info: Mapping[str, Any],
) -> dict[str, Any]:
    """A result as an item: slime's fields, and the exact tokens. `info`: more for `extra_info`.

    A rollout that could not be scored is a failed one, with its messages and tokens. Side calls are left out.
    """
    extra_info: dict[str, Any] = {}
    if row is not None:
        extra_info = {**row.columns, **row.extra_info, "label": row.ground_truth}
        extra_info |= {"data_source": row.data_source}
        extra_info.pop("instance_id", None)
    extra_info |= {**info, "timestamp": str(time.time()), "finish_reason": "failed"}
    item: dict[str, Any] = {
        "uid": uid,
        "instance_id": instance_id,
        "prompt_key": result.prompt_key,
        "messages": row.messages if row is not None else [{"role": "user", "content": ""}],
        "reward": None,
        "extra_info": extra_info,
    }
    if isinstance(result, Rollout):
        *snapshots, final = result.without_side_calls().trajectories
        item |= _trajectory(final)
        extra_info |= {"finish_reason": final.finish_reason, "num_turns": final.num_turns}
        extra_info["attempts"] = result.attempts
        if final.reward_extra:
            extra_info["reward_extra"] = final.reward_extra
        if not final.extra.get("token_exact", True):
            extra_info["token_exact"] = False
        if snapshots:
            item["snapshots"] = [
                {**_trajectory(one), "finish_reason": one.finish_reason, "num_turns": one.num_turns}
                for one in snapshots
            ]
    extra_info["round_number"] = sum(message.get("role") == "assistant" for message in item["messages"])
    if (failure := failure_of(result)) is not None:
        item["reward"], extra_info["failure"] = _FAILED_REWARD, failure
    return item


def _trajectory(one: Trajectory) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": one.messages, "reward": one.reward, "metrics": asdict(one.metrics)}
    if one.extra.get("token_exact", True):  # else there are none
        fields |= {key: getattr(one, key) for key in ("prompt_ids", "response_ids", "response_mask")}
        fields |= {} if one.response_logprobs is None else {"response_logprobs": one.response_logprobs}
        fields["policy_versions"] = [list(run) for run in one.policy_versions]
        fields["policy_version"] = min((version for _, version in one.policy_versions), default=0)
    return fields


def failure_of(result: Rollout | Failure) -> dict[str, Any] | None:
    """Why a rollout failed; one that could not be scored has, too."""
    if isinstance(result, Failure):
        return {"error": result.error, "stage": result.stage, "attempts": result.attempts}
    error = result.final.reward_extra.get("error") if result.final.reward is None else None
    return {"error": str(error), "stage": "reward", "attempts": result.attempts} if error else None
