"""From what a verl loop gives to a `Trajectory`. Needs no verl: it reads attributes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.data.values import BadRow, to_jsonable
from rollstream.integrations.verl.streaming import EngineCall, SampleCalls
from rollstream.trajectory import Message, Metrics, Trajectory

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Token ids as text, without special tokens."""

_KEPT_ELSEWHERE = frozenset({"raw_prompt", "reward_extra_info", "global_steps", "finish_reason"})
"""Of `extra_fields`: they are in the messages, `reward_extra`, `policy_versions` and `finish_reason`."""


def to_trajectories(
    outputs: Sequence[Any], calls: SampleCalls, *, messages: Sequence[Message], decode: Decode
) -> list[Trajectory]:
    """One trajectory for each `AgentLoopOutput`, the final one last.

    Ids, mask and log-probs are the loop's, untouched. The rest is what verl says:

    | Trajectory | of `AgentLoopOutput` |
    |---|---|
    | reward | `reward_score`; None: not scored yet |
    | reward_extra | `extra_fields["reward_extra_info"]` |
    | num_turns | `num_turns` |
    | metrics | `generate_sequences`, `tool_calls`, `compute_score` seconds; calls by the client |
    | policy_versions, finish_reason | by the client: a loop's output does not say |
    | messages | the prompt, and the response cut at its mask: see `read_messages` |
    | extra | `extra_fields` as far as JSON knows them; `verl_dropped` names the others |

    Args:
        outputs: of one sample, at least one.
        calls: its generations; those of the final output are the last ones.
        messages: of the prompt.
        decode: the tokenizer's.
    """
    return [
        _trajectory(
            output,
            calls if at == len(outputs) - 1 else SampleCalls(),
            messages=messages,
            decode=decode,
            is_snapshot=at < len(outputs) - 1,
        )
        for at, output in enumerate(outputs)
    ]


def _trajectory(
    output: Any, calls: SampleCalls, *, messages: Sequence[Message], decode: Decode, is_snapshot: bool
) -> Trajectory:
    fields: Mapping[str, Any] = output.extra_fields or {}
    said, metrics = output.metrics, Metrics()
    metrics.generate_s = float(said.generate_sequences)
    metrics.tool_s = float(said.tool_calls)
    metrics.reward_s = float(said.compute_score)
    metrics.engine_calls = len(calls.calls)
    metrics.cached_prompt_tokens = sum(call.cached_prompt_tokens for call in calls.calls)
    extra = _extra({key: value for key, value in fields.items() if key not in _KEPT_ELSEWHERE})
    if getattr(said, "num_preempted", -1) > 0:
        extra["num_preempted"] = int(said.num_preempted)
    answers = read_messages(output.response_ids, output.response_mask, decode)
    if len(calls.calls) != sum(message["role"] == "assistant" for message in answers):
        extra["prompt_messages"] = len(messages)  # for exports, which else could not tell
    return Trajectory(
        prompt_ids=list(output.prompt_ids),
        response_ids=list(output.response_ids),
        response_mask=list(output.response_mask),
        response_logprobs=None if output.response_logprobs is None else list(output.response_logprobs),
        messages=[*messages, *answers],
        finish_reason=finish_reason(calls.calls),
        policy_versions=policy_versions(
            calls.calls, prompt_tokens=len(output.prompt_ids), response_tokens=len(output.response_ids)
        ),
        is_snapshot=is_snapshot,
        num_turns=int(output.num_turns),
        reward=None if output.reward_score is None else float(output.reward_score),
        reward_extra=_extra(fields.get("reward_extra_info") or {}),
        metrics=metrics,
        extra=extra,
    )


def read_messages(ids: Sequence[int], mask: Sequence[int], decode: Decode) -> list[Message]:
    """The response as messages: what the model wrote is `assistant`, what was put between is `tool`.

    A loop's output has no messages, so these are its tokens as text: what the template puts around a message
    is in the text of the one between.
    """
    messages: list[Message] = []
    start = 0
    while start < len(ids):
        end = start
        while end < len(ids) and mask[end] == mask[start]:
            end += 1
        text = decode(ids[start:end])
        if mask[start]:
            messages.append({"role": "assistant", "content": text})
        elif text.strip():
            messages.append({"role": "tool", "content": text})
        start = end
    return messages


def finish_reason(calls: Sequence[EngineCall]) -> str:
    """Why the trajectory ended: as its last generation did, which is all that is known of it."""
    last = calls[-1].finish_reason if calls else None
    return {"length": "length", "abort": "aborted", "aborted": "aborted"}.get(last or "stop", "stop")


def policy_versions(
    calls: Sequence[EngineCall], *, prompt_tokens: int, response_tokens: int
) -> list[tuple[int, int]]:
    """The versions of the generations, over the whole response; what stands between takes the one before.

    A loop that asks for something else than the next part of its response (a second opinion, a summary)
    cannot be followed: then it is the lowest version for all of it.

    Args:
        calls: in their order.
        prompt_tokens: of the trajectory: from there on a generation's prompt is response.
        response_tokens: of the trajectory.
    """
    if not calls:
        return [(0, 0)]
    runs: list[tuple[int, int]] = []
    end = 0
    for call in calls:
        begin = call.prompt_tokens - prompt_tokens
        if begin < end:
            return [(0, min(version for one in calls for _, version in one.policy_versions))]
        for start, version in call.policy_versions or [(0, 0)]:
            at = begin + start if runs else 0
            if at < max(1, response_tokens) and (not runs or runs[-1][1] != version):
                runs.append((at, version))
        end = begin + call.tokens
    return runs


def _extra(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept, dropped = {}, []
    for key, value in fields.items():
        try:
            kept[str(key)] = to_jsonable(value)
        except BadRow:
            dropped.append(str(key))
    if dropped:
        kept["verl_dropped"] = sorted(dropped)
    return kept
