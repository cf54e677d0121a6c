"""verl's agent loop worker, one sample at a time: what a loop gave, before it is padded."""

import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_NOT_FOR_LOOPS = frozenset({"agent_name", "__do_sample__", "dummy_tensor"})
"""Of a row of verl's dataset: what its worker keeps to itself."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One generation of a sample, as the client saw it."""

    prompt_tokens: int
    tokens: int
    policy_versions: list[tuple[int, int]]
    """Run-length encoded `(start, version)` over the tokens."""
    finish_reason: str | None
    cached_prompt_tokens: int = 0


def token_limit(
    sampling: Mapping[str, Any],
    *,
    prompt_tokens: int,
    prompt_length: int,
    response_length: int,
    max_model_len: int | None,
) -> int:
    """Tokens that one of verl's own servers generates at most. Source: its `vLLMHttpServer.generate`.

    Args:
        sampling: parameters of the request.
        prompt_tokens: of the request.
        prompt_length: of `rollout`.
        response_length: of `rollout`.
        max_model_len: prompt and response together; None: nobody knows.
    """
    given = sampling.get("max_tokens", sampling.get("max_new_tokens"))
    limit = min(response_length, prompt_length + response_length - prompt_tokens) if given is None else given
    if max_model_len is not None:
        limit = min(limit, max_model_len - prompt_tokens)
    return max(1, int(limit))


@dataclass(slots=True)
class SampleCalls:
    """The generations of one attempt at a sample, in their order."""

    seed: int | None = None
    """Of the first generation; None: the engine's choice."""
    calls: list[EngineCall] = field(default_factory=list)
    """Those that are complete, in the order in which they began."""
    begun: int = 0
    """How many began, complete or not."""
    _numbers: list[int] = field(default_factory=list)
    """Of `calls`."""

    def begin(self) -> int:
        """The number of a generation that begins now, from 0. Several may be in flight at once."""
        self.begun += 1
        return self.begun - 1

    def complete(self, number: int, call: EngineCall) -> None:
        """Takes in a generation, by the number that it began with."""
        at = bisect.bisect(self._numbers, number)
        self._numbers.insert(at, number)
        self.calls.insert(at, call)


_current: ContextVar[SampleCalls | None] = ContextVar("rollstream_sample_calls", default=None)


def current_calls() -> SampleCalls | None:
    """The sample in whose name this code runs, also in tasks that its loop started; None outside of one."""
    return _current.get()


@contextmanager
def _sample(calls: SampleCalls) -> Iterator[None]:
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
        with _sample(SampleCalls() if calls is None else calls):
            given: Any = await self._run_agent_loop(  # type: ignore[attr-defined]
                {**self.sampling_params(), **(sampling_params or {})},
                {"step": -1, "sample_index": index, "rollout_n": repeat, "validate": False},
                agent_name=str(name),
                **row,
            )
        return list(given) if isinstance(given, list | tuple) else [given]

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        """Pads in verl; a sample of `run_sample` is only scored, where verl has somebody who scores."""
        if _current.get() is None:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]
        outputs = list(output) if isinstance(output, list | tuple) else [output]
        await self._compute_score(outputs, kwargs=kwargs)  # type: ignore[attr-defined]
        return output
