"""One sample by verl's agent loop worker: its generations are noted, what its loop gave becomes trajectories.

Needs no verl: the worker is whatever the mixin is put before, and outputs are read by their attributes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rollstream.data.values import BadRow, to_jsonable
from rollstream.trajectory import Message, Metrics, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids as text, without special tokens."""

_NOT_FOR_LOOPS = frozenset({"agent_name", "__do_sample__", "dummy_tensor", "sampling_params"})
"""Of a row: what a worker keeps to itself."""

_KEPT_ELSEWHERE = frozenset(
    {"raw_prompt", "reward_extra_info", "global_steps", "finish_reason", "messages", "prompt_messages"}
)
"""Of `extra_fields`: what has a place of its own in a trajectory."""

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
        """Those that are complete, in the order in which they began."""
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
        """What verl's worker gives a loop of a training batch."""
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
        """Runs the agent loop of one row, and returns what it gave, ragged.

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
        with noting(SampleCalls() if calls is None else calls):
            given: Any = await self._run_agent_loop(  # type: ignore[attr-defined]
                {**self.sampling_params(), **(sampling_params or {})},
                {"step": -1, "sample_index": index, "rollout_n": repeat, "validate": False},
                agent_name=str(name),
                trace=self._is_traced(index),
                **row,
            )
        return list(given) if isinstance(given, list | tuple) else [given]

    def _is_traced(self, index: int) -> bool:
        """Whether a sample is among those of `rollout.trace`: the first ones of this worker, all repeats."""
        trace = getattr(self.rollout_config, "trace", None)
        most = None if trace is None else trace.get("max_samples_per_step_per_worker")
        if most is None:
            return True
        if len(self._traced) < most:
            self._traced |= {index}
        return index in self._traced

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
    for at, output in enumerate(outputs, 1):
        is_final = at == len(outputs)
        own = _calls_of(output, [*left, *(call for call in calls if call not in left)])
        ours = [call for _, call, _ in own]
        trajectories.append(
            _trajectory(
                output,
                own,
                calls,
                [call for call in left if call in ours or is_final],  # or of none: a summary
                prompt=_prompt_messages(output, trajectories, messages, decode),
                is_final=is_final,
                decode=decode,
            )
        )
        left = [call for call in left if call not in ours]
    return trajectories


_OwnCalls = list[tuple[int, EngineCall, int]]
"""Generations that a response has: where each begins in it, and how many of its tokens are there."""


def _calls_of(output: Any, calls: Sequence[EngineCall]) -> _OwnCalls:
    """The generations whose tokens a response has, where their prompts say that they must be.

    Of several that begin at one place (answers side by side, to one prompt) it is the one that agrees longest.
    """
    response, found = output.response_ids, dict[int, tuple[EngineCall, int]]()
    for call in calls:
        begin = call.prompt_tokens - len(output.prompt_ids)
        if not 0 <= begin <= len(response):
            continue
        pairs = zip(call.token_ids, response[begin:], strict=False)
        agreed = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if agreed is None:
            agreed = min(len(call.token_ids), len(response) - begin)
        if not agreed and call.token_ids:
            continue
        if begin not in found or agreed > found[begin][1]:
            found[begin] = call, agreed
    return [(begin, *found[begin]) for begin in sorted(found)]


def _prompt_messages(
    output: Any, before: Sequence[Trajectory], messages: Sequence[Message], decode: Decode
) -> list[Message]:
    """What a prompt shows: the row's messages, an earlier conversation that goes on, or else its text."""
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
    counted: Sequence[EngineCall],
    *,
    prompt: list[Message],
    is_final: bool,
    decode: Decode,
) -> Trajectory:
    given: Mapping[str, Any] = output.extra_fields or {}
    said, metrics = output.metrics, Metrics()
    metrics.generate_s = float(said.generate_sequences)
    metrics.tool_s = float(said.tool_calls)
    metrics.reward_s = float(said.compute_score)
    metrics.engine_calls = len(counted)
    metrics.cached_prompt_tokens = sum(call.cached_prompt_tokens for call in counted)
    extra = _extra({key: value for key, value in given.items() if key not in _KEPT_ELSEWHERE})
    if getattr(said, "num_preempted", -1) > 0:
        extra["num_preempted"] = int(said.num_preempted)
    if (conversation := given.get("messages")) is None:
        answers = read_messages(output.response_ids, output.response_mask, decode)
        conversation = [*prompt, *answers]
        if not is_final or len(counted) != sum(message["role"] == "assistant" for message in answers):
            extra["prompt_messages"] = len(prompt)  # for exports, which else could not tell
    elif "prompt_messages" in given:
        extra["prompt_messages"] = int(given["prompt_messages"])
    ended = own[-1][1] if own else calls[-1] if calls and is_final else None
    return Trajectory(
        prompt_ids=list(output.prompt_ids),
        response_ids=list(output.response_ids),
        response_mask=list(output.response_mask),
        response_logprobs=None if output.response_logprobs is None else list(output.response_logprobs),
        messages=list(conversation),
        finish_reason=finish_reason(given.get("finish_reason") or (ended.finish_reason if ended else None)),
        policy_versions=_policy_versions(output.response_mask, own, calls),
        is_snapshot=not is_final,
        num_turns=int(output.num_turns),
        reward=None if output.reward_score is None else float(output.reward_score),
        reward_extra=_extra(given.get("reward_extra_info") or {}),
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


def finish_reason(said: str | None) -> str:
    """A trajectory's, by what an engine or a loop says of its end."""
    reason = "aborted" if said == "abort" else said
    return reason if reason in _FINISH_REASONS else "stop"


def _policy_versions(
    mask: Sequence[int], own: _OwnCalls, calls: Sequence[EngineCall]
) -> list[tuple[int, int]]:
    """The versions over a response; what stands between two generations takes that of the first.

    Where a loop has sampled tokens that are of no generation here, it is the lowest version for all of it.
    """
    versions: list[int | None] = [None] * len(mask)
    for begin, call, tokens in own:
        runs = call.policy_versions or [(0, 0)]
        for (start, version), end in zip(runs, [*(start for start, _ in runs[1:]), tokens], strict=True):
            versions[begin + start : begin + min(end, tokens)] = [version] * (min(end, tokens) - start)
    if not calls or any(one and version is None for one, version in zip(mask, versions, strict=True)):
        return [(0, min((v for call in calls for _, v in call.policy_versions), default=0))]
    first = calls[0].policy_versions[0][1] if calls[0].policy_versions else 0
    encoded = [(0, next((version for version in versions if version is not None), first))]
    for at, now in enumerate(versions):
        if now is not None and now != encoded[-1][1]:
            encoded.append((at, now))
    return encoded


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
