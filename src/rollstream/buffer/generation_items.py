"""Rollouts as items of the buffer. Pure.

An item is as slime's wire has it (`uid`, `instance_id`, `messages`, `reward`, `extra_info`), with the exact
tokens beside it.
"""

import time
from typing import Any

from rollstream.buffer.generation_plan import Work
from rollstream.trajectory import Failure, Message, PromptRow, Rollout, Trajectory

FAILED_REWARD = -1.0
"""Of a failed rollout: outside of 0 to 1, so that the default filter never lets it through to a trainer."""


def completed_item(work: Work, rollout: Rollout, row: PromptRow, *, task_type: str) -> dict[str, Any]:
    """The item of a rollout that completed.

    Its trajectory is the final one; those before a context edit are in `snapshots`. A rollout that could not
    be scored is a failed one (stage `reward`): its messages and tokens are there, its reward is the marker.
    """
    final = rollout.final
    item = _item(work, final.messages, final.reward, task_type=task_type)
    item["extra_info"] = {
        **_row_info(row),
        **_facts(work, final.messages),
        "finish_reason": final.finish_reason,
        "num_turns": final.num_turns,
        "attempts": rollout.attempts,
        **({"reward_extra": final.reward_extra} if final.reward_extra else {}),
    }
    if not final.extra.get("token_exact", True):
        item["extra_info"]["token_exact"] = False
    item |= _tokens(final)
    if snapshots := rollout.trajectories[:-1]:
        item["snapshots"] = [
            {**_tokens(one), "messages": one.messages, "reward": one.reward} for one in snapshots
        ]
    if final.reward is None and (error := final.reward_extra.get("error")):
        item["reward"] = FAILED_REWARD
        item["extra_info"]["failure"] = {
            "error": str(error),
            "stage": "reward",
            "attempts": rollout.attempts,
        }
    return item


def failed_item(work: Work, failure: Failure, row: PromptRow | None, *, task_type: str) -> dict[str, Any]:
    """The item of a rollout that failed: it counts in its group and is never trained on.

    Args:
        work: what was to be generated.
        failure: its cause.
        row: the prompt row; None when it cannot be read.
        task_type: of the generator.
    """
    messages = row.messages if row is not None else [{"role": "user", "content": ""}]
    item = _item(work, messages, FAILED_REWARD, task_type=task_type)
    item["extra_info"] = {
        **(_row_info(row) if row is not None else {}),
        **_facts(work, messages),
        "finish_reason": "failed",
        "failure": {"error": failure.error, "stage": failure.stage, "attempts": failure.attempts},
    }
    return item


def _item(work: Work, messages: list[Message], reward: float | None, *, task_type: str) -> dict[str, Any]:
    return {
        "uid": work.uid,
        "instance_id": work.instance_id,
        "messages": messages,
        "reward": reward,
        "extra_info": {},
        "task_type": task_type,
        "rollout_id": work.rollout_id,
    }


def _row_info(row: PromptRow) -> dict[str, Any]:
    """What the input file says of an instance, its ground truth as `label`, as in slime."""
    columns = {key: value for key, value in row.columns.items() if key != "instance_id"}
    source = {} if row.data_source == "unknown" else {"data_source": row.data_source}
    return {**columns, **row.extra_info, "label": row.ground_truth, **source}


def _facts(work: Work, messages: list[Message]) -> dict[str, Any]:
    return {
        "epoch": work.epoch,
        "rollout_index": work.repeat,
        "timestamp": str(time.time()),
        "round_number": sum(message.get("role") == "assistant" for message in messages),
    }


def _tokens(trajectory: Trajectory) -> dict[str, Any]:
    if not trajectory.extra.get("token_exact", True):
        return {}  # ids of the local tokenizer are not what was sampled
    tokens: dict[str, Any] = {
        "prompt_ids": trajectory.prompt_ids,
        "response_ids": trajectory.response_ids,
        "response_mask": trajectory.response_mask,
        "policy_versions": [list(run) for run in trajectory.policy_versions],
        "policy_version": min((version for _, version in trajectory.policy_versions), default=0),
    }
    if trajectory.response_logprobs is not None:
        tokens["response_logprobs"] = trajectory.response_logprobs
    return tokens
