"""One sample by verl's agent loop worker: its generations are noted, its loop's outputs become trajectories.

Needs no verl: the worker is whatever the mixin is put before, and outputs are read by their attributes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rollstream.data.values import BadRow, to_jsonable
from rollstream.trajectory import Message, Metrics, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids as text, without special tokens."""

_NOT_FOR_LOOPS = frozenset({"agent_name", "__do_sample__", "dummy_tensor", "sampling_params"})
"""Keys of a row that a worker keeps to itself."""

_KEPT_ELSEWHERE = frozenset(
    {"raw_prompt", "reward_extra_info", "global_steps", "finish_reason", "messages", "prompt_messages"}
)
"""`extra_fields` that have a place of their own in a trajectory."""

_FINISH_REASONS = frozenset({"stop", "length", "max_turns", "tool_overflow", "aborted"})


@dataclass(frozen=True, slots=True, eq=False)
class EngineCall:
    """One generation of a sample, as the client saw it. Equal to itself alone."""

    prompt_tokens: int
    token_ids: Sequence[int]
    policy_versions: list[tuple[int, int]]
    """Run-length encoded `(start, version)` over the tokens."""
    finish_reason: str | None
    cached_prompt_tokens: int = 0


class SampleCalls:
    """The generations of one attempt at a sample. Several may be in flight at once.

    Args:
        seed: of the first generation; None: the engine's choice.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._calls: list[EngineCall | None] = []

    def begin(self) -> int:
        """The number of a generation that begins now, from 0."""
        self._calls.append(None)
        return len(self._calls) - 1

    def complete(self, number: int, call: EngineCall) -> None:
        """Takes in a generation, by the number that it began with."""
        self._calls[number] = call

    @property
    def calls(self) -> list[EngineCall]:
        """The complete ones, in the order in which they began."""
        return [call for call in self._calls if call is not None]


_current: ContextVar[SampleCalls | None] = ContextVar("rollstream_sample_calls", default=None)


def current_calls() -> SampleCalls | None:
    """The sample in whose name this code runs, also in tasks that its loop started; None outside of one."""
    return _current.get()


@contextmanager
def noting(calls: SampleCalls) -> Iterator[None]:
    """Generations inside are those of one sample."""
    token = _current.set(calls)
    try:
        yield
    finally:
        _current.reset(token)


class StreamingAgentLoopWorkerMixin:
    """To be put before `AgentLoopWorker`, or a subclass of it: `run_sample` beside `generate_sequences`.

        class MyWorker(StreamingAgentLoopWorkerMixin, MyAgentLoopWorker): ...

    `generate_sequences` stays as it is.
    """

    rollout_config: Any
    """verl's `RolloutConfig`, which the worker has."""

    _traced: frozenset[int] = frozenset()

    def sampling_params(self) -> dict[str, Any]:
        """The parameters that verl's worker gives a loop of a training batch."""
        config = self.rollout_config
        return {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
        }

    async def run_sample(
        self,
        sample: Mapping[str, Any],
        *,
        index: int,
        repeat: int = 0,
        sampling_params: Mapping[str, Any] | None = None,
        calls: SampleCalls | None = None,
    ) -> list[Any]:
        """Runs the agent loop of one row, and returns its outputs, ragged.

        Args:
            sample: a row of verl's dataset: `raw_prompt` and what else the loop wants.
            index: of the row. It replaces the row's own, which is 0 for every row that does not say.
            repeat: which of the rollouts of that row.
            sampling_params: laid over `sampling_params()`.
            calls: gets the generations.

        Returns:
            `AgentLoopOutput`s: one, or those of a loop that returns a list, the final one last.

        Raises:
            Exception: whatever the loop raises; other samples are not concerned.
        """
        row = {key: value for key, value in sample.items() if key not in _NOT_FOR_LOOPS}
        row |= {"index": index, "priority": index}
        name = sample.get("agent_name") or self.rollout_config.agent.default_agent_loop
        with noting(calls or SampleCalls()):
            result: Any = await self._run_agent_loop(  # type: ignore[attr-defined]
                {**self.sampling_params(), **(sampling_params or {})},
                {"step": -1, "sample_index": index, "rollout_n": repeat, "validate": False},
                agent_name=str(name),
                trace=self._is_traced(index),
                **row,
            )
        return list(result) if isinstance(result, list | tuple) else [result]

    def _is_traced(self, index: int) -> bool:
        """Whether a sample is among those of `rollout.trace`: the first ones of this worker, all repeats."""
        trace = getattr(self.rollout_config, "trace", None)
        most = None if trace is None else trace.get("max_samples_per_step_per_worker")
        if most is not None and len(self._traced) < most:
            self._traced |= {index}
        return most is None or index in self._traced

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        """Pads in verl; a sample of `run_sample` is only scored, where verl has somebody who scores."""
        if _current.get() is None:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]
        outputs = list(output) if isinstance(output, list | tuple) else [output]
        await self._compute_score(outputs, kwargs=kwargs)  # type: ignore[attr-defined]
        return output


def to_trajectories(
    outputs: Sequence[Any], calls: Sequence[EngineCall], *, messages: Sequence[Message], decode: Decode
) -> list[Trajectory]:
    """One trajectory for each `AgentLoopOutput`, the final one last.

    Ids, mask and log-probs are the loop's, untouched. The rest is what verl and its client say:

    | Trajectory | of `AgentLoopOutput` |
    |---|---|
    | reward, reward_extra | `reward_score` (None: not scored yet), `extra_fields["reward_extra_info"]` |
    | metrics | `generate_sequences`, `tool_calls`, `compute_score` seconds; calls by the client |
    | policy_versions, finish_reason | of the generations whose tokens it has; a reason in `extra_fields` comes first |
    | messages | `extra_fields["messages"]`; else the prompt, and the response cut at its mask |
    | extra | `extra_fields` as far as JSON knows them; `verl_dropped` names the others |

    Args:
        outputs: of one sample, at least one.
        calls: its generations, in the order in which they began.
        messages: of the row's prompt.
        decode: the tokenizer's.
    """
    trajectories: list[Trajectory] = []
    left = list(calls)
    for output in outputs:
        is_final = len(trajectories) == len(outputs) - 1
        own = _calls_of(output, [*left, *calls])
        own_calls = [call for _, call, _ in own]
        # Each generation counts once; the final trajectory has also those of none, such as a summary.
        counted = [call for call in left if call in own_calls or is_final]
        left = [call for call in left if call not in own_calls]
        prompt = _prompt_messages(output, trajectories, messages, decode)
        trajectory = _trajectory(output, own, calls, len(counted), prompt, decode, is_final=is_final)
        trajectory.metrics.cached_prompt_tokens = sum(call.cached_prompt_tokens for call in counted)
        trajectories.append(trajectory)
    return trajectories


_OwnCalls = list[tuple[int, EngineCall, int]]
"""Generations that a response has: where each begins in it, and how many of its tokens are there."""


def _calls_of(output: Any, calls: Sequence[EngineCall]) -> _OwnCalls:
    """The generations whose tokens a response has, where their prompts say that they must be.

    Of several that begin at one place (answers side by side, to one prompt) it is the one that agrees longest.
    """
    best: dict[int, tuple[EngineCall, int]] = {}
    for call in calls:
        begin = call.prompt_tokens - len(output.prompt_ids)
        if not 0 <= begin <= len(output.response_ids):
            continue
        pairs = list(zip(call.token_ids, output.response_ids[begin:], strict=False))
        agreed = next((at for at, (own, there) in enumerate(pairs) if own != there), len(pairs))
        if (agreed or not call.token_ids) and (begin not in best or agreed > best[begin][1]):
            best[begin] = call, agreed
    return [(begin, *best[begin]) for begin in sorted(best)]


def _prompt_messages(
    output: Any, before: Sequence[Trajectory], messages: Sequence[Message], decode: Decode
) -> list[Message]:
    """The messages that a prompt shows: the row's, an earlier conversation that goes on, or else its text."""
    if not before or output.prompt_ids == before[0].prompt_ids:
        return list(messages)
    for earlier in reversed(before):
        seen = [*earlier.prompt_ids, *earlier.response_ids]
        if output.prompt_ids[: len(seen)] == seen:
            added = decode(output.prompt_ids[len(seen) :])
            return [*earlier.messages, *([{"role": "tool", "content": added}] if added.strip() else [])]
    return [{"role": "user", "content": decode(output.prompt_ids)}]


def _trajectory(
    output: Any,
    own: _OwnCalls,
    calls: Sequence[EngineCall],
    engine_calls: int,
    prompt: list[Message],
    decode: Decode,
    *,
    is_final: bool,
) -> Trajectory:
    fields: Mapping[str, Any] = output.extra_fields or {}
    extra = _extra({key: value for key, value in fields.items() if key not in _KEPT_ELSEWHERE})
    if getattr(output.metrics, "num_preempted", -1) > 0:
        extra["num_preempted"] = int(output.metrics.num_preempted)
    conversation = fields.get("messages")
    if conversation is None:
        answers = read_messages(output.response_ids, output.response_mask, decode)
        conversation = [*prompt, *answers]
        if not is_final or engine_calls != sum(message["role"] == "assistant" for message in answers):
            extra["prompt_messages"] = len(prompt)  # for exports, which else could not tell
    elif "prompt_messages" in fields:
        extra["prompt_messages"] = int(fields["prompt_messages"])
    last = own[-1][1] if own else calls[-1] if calls and is_final else None
    return Trajectory(
        prompt_ids=list(output.prompt_ids),
        response_ids=list(output.response_ids),
        response_mask=list(output.response_mask),
        response_logprobs=None if output.response_logprobs is None else list(output.response_logprobs),
        messages=list(conversation),
        finish_reason=finish_reason(fields.get("finish_reason") or (last.finish_reason if last else None)),
        policy_versions=_policy_versions(output.response_mask, own, calls),
        is_snapshot=not is_final,
        num_turns=int(output.num_turns),
        reward=None if output.reward_score is None else float(output.reward_score),
        reward_extra=_extra(fields.get("reward_extra_info") or {}),
        metrics=Metrics(
            generate_s=float(output.metrics.generate_sequences),
            tool_s=float(output.metrics.tool_calls),
            reward_s=float(output.metrics.compute_score),
            engine_calls=engine_calls,
        ),
        extra=extra,
    )


def read_messages(ids: Sequence[int], mask: Sequence[int], decode: Decode) -> list[Message]:
    """The response as messages: the model's tokens are `assistant`, what was put between is `tool`.

    A loop's output has no messages, so these are its tokens as text: what the template puts around a message
    is in the text of the one between.
    """
    messages: list[Message] = []
    for is_sampled, pairs in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        text = decode([token for token, _ in pairs])
        if is_sampled or text.strip():
            messages.append({"role": "assistant" if is_sampled else "tool", "content": text})
    return messages


def finish_reason(reason: str | None) -> str:
    """The trajectory's reason for an engine's or a loop's."""
    if reason == "abort":
        return "aborted"
    return reason if reason in _FINISH_REASONS else "stop"


def _policy_versions(
    mask: Sequence[int], own: _OwnCalls, calls: Sequence[EngineCall]
) -> list[tuple[int, int]]:
    """The versions over a response; what stands between two generations takes that of the first.

    Where a loop has sampled tokens that are of no generation here, it is the lowest version for all of it.
    """
    versions: list[int | None] = [None] * len(mask)
    for begin, call, tokens in own:
        for start, version in call.policy_versions or [(0, 0)]:
            versions[begin + start : begin + tokens] = [version] * (tokens - start)
    if not calls or any(sampled and version is None for sampled, version in zip(mask, versions, strict=True)):
        return [(0, min((version for call in calls for _, version in call.policy_versions), default=0))]
    known = [version for version in versions if version is not None]
    encoded = [(0, known[0] if known else calls[0].policy_versions[0][1] if calls[0].policy_versions else 0)]
    for at, now in enumerate(versions):
        if now is not None and now != encoded[-1][1]:
            encoded.append((at, now))
    return encoded


def _extra(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    dropped = []
    for key, value in fields.items():
        try:
            kept[str(key)] = to_jsonable(value)
        except BadRow:
            dropped.append(str(key))
    return kept | ({"verl_dropped": sorted(dropped)} if dropped else {})
