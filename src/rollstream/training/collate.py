"""Trajectories as padded tensors: by the names of GRPO loops (TRL's), and as verl's DataProto."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rollstream.errors import ConfigError, DataError
from rollstream.store.batch import SCHEMA
from rollstream.store.export.dataproto import TENSORS, fill_tensors
from rollstream.trajectory import (
    CALL_TIMES,
    REWARD_STREAMS,
    STREAMS,
    Trajectory,
    of_rollout,
    reward_values,
    sampled_stretches,
)

if TYPE_CHECKING:
    import torch

_WHOLE = ("input_ids", "attention_mask", "position_ids")
"""Tensors of prompt and response together."""


def collate(trajectories: Sequence[Trajectory], *, pad_token_id: int = 0) -> "dict[str, torch.Tensor]":
    """Pads trajectories to one batch, by the names that TRL's GRPO loss and loops after it use.

    R rows; P and Q are the lengths of the longest prompt and response, at least 1.

    | name | shape, type | |
    |---|---|---|
    | `prompt_ids`, `prompt_mask` | (R, P), int64 | padded on the left |
    | `completion_ids`, `completion_mask` | (R, Q), int64 | padded on the right; the mask is 1 for every token |
    | `tool_mask` | (R, Q), int64 | 1 = sampled by the model; the loss is over `completion_mask * tool_mask` |
    | `sampling_per_token_logps` | (R, Q), float32 | if every row has log-probs; 0.0 where the mask is 0 |
    | `rewards` | (R,), float32 | NaN = not scored |
    | `step_rewards`, `token_rewards` | (R, Q), float32 | if a reward of any row says them (a turn's on each of its \
tokens); 0.0 where the mask is 0; a row without them is NaN where it is 1 |
    | `stream.NAME` | (R, Q), float32 | the same of each stream that rollouts came with, such as `stream.teacher` |

    Raises:
        DataError: there are none, or they have no token ids.
    """
    import torch

    tensors = pad(trajectories, pad_token_id)
    width = tensors["prompts"].shape[1]
    rewards = [np.nan if one.reward is None else one.reward for one in trajectories]
    named = {
        "prompt_ids": tensors["prompts"],
        "prompt_mask": tensors["attention_mask"][:, :width],
        "completion_ids": tensors["responses"],
        "completion_mask": tensors["attention_mask"][:, width:],
        "tool_mask": tensors["response_mask"],
        "rewards": np.array(rewards, np.float32),
    }
    if "rollout_log_probs" in tensors:
        named["sampling_per_token_logps"] = tensors["rollout_log_probs"]
    rows = {
        stream: [reward_values(stream, one.reward_extra, one.response_mask) for one in trajectories]
        for stream in REWARD_STREAMS
    }
    named |= _pad_streams(tensors, {**rows, **_own_streams(trajectories)})
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in named.items()}


def emission_views(trajectory: Trajectory) -> list[Trajectory]:
    """Splits a trajectory into its engine calls, a trajectory each: every token of a response is sampled.

    For loops that train on single calls: `collate([view for one in trajectories for view in emission_views(one)])`.
    Each has its own step reward and token rewards. The reward, messages and what else is known stay those of the whole.
    """
    views = []
    logprobs, mask = trajectory.response_logprobs, trajectory.response_mask
    steps, tokens = (reward_values(one, trajectory.reward_extra, mask) for one in REWARD_STREAMS)
    for start, end in sampled_stretches(mask):
        versions = [
            (max(at, start) - start, version)
            for (at, version), (until, _) in zip(
                trajectory.policy_versions, [*trajectory.policy_versions[1:], (end, 0)], strict=True
            )
            if at < end and max(until, at + 1) > start
        ]
        view = replace(
            trajectory,
            prompt_ids=trajectory.prompt_ids + trajectory.response_ids[:start],
            response_ids=trajectory.response_ids[start:end],
            response_mask=[1] * (end - start),
            response_logprobs=None if logprobs is None else logprobs[start:end],
            policy_versions=versions or [(0, 0)],
            reward_extra={
                **trajectory.reward_extra,
                **({} if steps is None else {"steps": steps[start : start + 1]}),
                **({} if tokens is None else {"tokens": tokens[start:end]}),
            },
        )
        if streams := trajectory.streams:
            cut = {name: values[start:end] for name, values in streams.items()}
            view.extra = {**trajectory.extra, STREAMS: cut}
        views.append(view)
    return views


def to_dataproto(
    trajectories: Sequence[Trajectory], *, uids: Sequence[str] | None = None, pad_token_id: int = 0
) -> Any:
    """A `verl.DataProto` of trajectories in memory: tensors as `rollstream export --format dataproto` has them.

    `rm_scores` are there if every trajectory has a reward; `stream.NAME` as `collate` has it. Beside the tensors:
    `messages`, `finish_reason`, `is_snapshot`, `__num_turns__`, `policy_versions`, `emission_views` (for each engine
    call the ids that the model saw, and those that it answered), the names of `extra`, those of `reward_extra`, and
    `uid`.

    Args:
        trajectories: at least one.
        uids: the group of each; None leaves `uid` out.
        pad_token_id: the tokenizer's.

    Raises:
        ConfigError: verl is not installed.
        DataError: there are none, or they have no token ids.
    """
    tensors = pad(trajectories, pad_token_id)
    try:
        from verl import DataProto
    except ImportError as error:
        raise ConfigError(
            f"to_dataproto makes verl's DataProto, and verl cannot be imported: {error}"
        ) from error
    import torch

    rewards = sorted({name for one in trajectories for name in one.reward_extra})
    extras = sorted({name for one in trajectories for name in one.extra} - {*TENSORS, STREAMS, CALL_TIMES})
    named: dict[str, list[Any]] = {name: [one.extra.get(name) for one in trajectories] for name in extras}
    named |= {name: [one.reward_extra.get(name) for one in trajectories] for name in rewards}
    named |= {
        name: [getattr(one, name) for one in trajectories]
        for name in ("messages", "finish_reason", "is_snapshot", "policy_versions")
    }
    named["__num_turns__"] = [one.num_turns for one in trajectories]
    named["emission_views"] = [list(one.generations()) for one in trajectories]
    if uids is not None:
        named["uid"] = list(uids)
    tensors |= _pad_streams(tensors, _own_streams(trajectories))
    others = {name: as_array(name, values) for name, values in named.items()}
    keys = sorted({name for one in trajectories for name in of_rollout(one.reward_extra)})
    meta = {"reward_extra_keys": keys} if "rm_scores" in tensors else {}
    return DataProto.from_dict(
        {name: torch.from_numpy(array) for name, array in tensors.items()}, others, meta
    )


def _own_streams(trajectories: Sequence[Trajectory]) -> dict[str, list[list[float] | None]]:
    """The streams that rollouts came with, by the name that `Run.rows` gives them."""
    names = sorted({name for one in trajectories for name in one.streams})
    return {f"stream.{name}": [one.streams.get(name) for one in trajectories] for name in names}


def _pad_streams(
    tensors: dict[str, Any], streams: Mapping[str, Sequence[Sequence[float] | None]]
) -> dict[str, Any]:
    """Those streams that a row has; NaN at the sampled tokens of rows that have none."""
    padded = {}
    for name, rows in streams.items():
        if any(row is not None for row in rows):
            padded[name] = np.where(tensors["response_mask"], np.float32(np.nan), np.float32(0))
            for into, row in zip(padded[name], rows, strict=True):
                into[: len(row or ())] = row or ()
    return padded


def as_array(name: str, values: Sequence[Any]) -> Any:
    """Values beside the tensors of a DataProto, in the type that their name has there."""
    array: Any = np.empty(len(values), {"is_snapshot": np.bool_, "__num_turns__": np.int32}.get(name, object))
    array[:] = values
    return array


def pad(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, prompt_width: int = 1, response_width: int = 1
) -> dict[str, Any]:
    """The tensors of a DataProto; wider than asked for where a prompt or a response is longer. Raises `DataError`."""
    if not trajectories or not all(one.prompt_ids for one in trajectories):
        raise DataError(
            "trajectories without token ids: their run had no tokenizer"
            if trajectories
            else "there are no trajectories to pad"
        )
    stored = {"prompt_ids": "prompts", "response_ids": "responses", "response_mask": "response_mask"}
    if all(one.response_logprobs is not None for one in trajectories):
        stored["response_logprobs"] = "rollout_log_probs"
    if all(one.reward is not None for one in trajectories):
        stored["reward"] = "rm_scores"
    prompt = max(prompt_width, *(len(one.prompt_ids) for one in trajectories))
    response = max(response_width, *(len(one.response_ids) for one in trajectories))
    widths = {"prompts": prompt, **dict.fromkeys(_WHOLE, prompt + response)}
    tensors = {
        name: np.zeros((len(trajectories), widths.get(name, response)), TENSORS[name])
        for name in (*stored.values(), *_WHOLE)
    }
    columns = [
        pa.array([getattr(one, name) for one in trajectories], SCHEMA.field(name).type) for name in stored
    ]
    fill_tensors(tensors, pa.table(columns, list(stored)), pad_token_id)
    return tensors
