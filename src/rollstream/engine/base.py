"""What an engine promises, whoever it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from rollstream.trajectory import Completion, LogprobKind, Message, SamplingParams


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can give. Asking for more is an error at start, never a null later."""

    token_ids: bool
    """Takes and returns token ids exactly. If not, it is a `ChatEngine`: it speaks messages."""
    logprobs: LogprobKind | Literal["none"]
    seeds: bool
    """A seed per request makes its tokens repeatable."""
    stop_strings: bool
    stop_token_ids: bool
    images: bool
    update_weights: bool
    max_model_len: int | None
    """Prompt plus response tokens at most; None when the engine does not say."""
    vocab_size: int | None = None
    """Ids are below this; None when the engine does not say."""
    stop_token_ids_with_ignore_eos: bool = True
    """Stop ids end a generation also when `ignore_eos` is set."""
    extra_sampling: tuple[str, ...] = ()
    """Names that it takes in `SamplingParams.extra`."""
    scores: bool = False
    """Gives log-probs of given ids: it is a `ScoresIds`."""
    score_top_k: int = 0
    """Of that many likeliest ids in the place of each given one, at most."""
    adapters: int = 0
    """LoRA adapters that it can answer under at once; 0: it takes none."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, over all its replicas."""

    running: int
    """Requests that it works on."""
    queued: int
    """Requests that it has and does not work on yet, or not any more."""
    kv_usage: float | None = None
    """Share of its KV cache that is taken, 0 to 1; None when it does not say."""
    preemptions: int | None = None
    """How often it took a request's memory away for others: a counter; None when it does not say."""


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that says how busy it is; optional, see `load.ask_load`."""

    async def load(self) -> EngineLoad | None:
        """Its load now; None when it does not say. Answers within seconds."""
        ...


MOST_TOP = 64
"""Likeliest ids of a place, where the engine itself has no bound: answers are JSON, and so are theirs."""


class TopScores(NamedTuple):
    """Log-probs of given ids; where it was asked for, the likeliest ids in the place of each, the likeliest first."""

    logprobs: list[float]
    top_ids: Sequence[list[int]] = ()
    top_logprobs: Sequence[list[float]] = ()


@runtime_checkable
class ScoresIds(Protocol):
    """An engine that gives log-probs of given ids; optional, `Capabilities.scores` says whether it does."""

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        """Log-probs of `ids[start:]` in the model's own distribution, each after the ids before it; `start` > 0.

        `top_k`: so many likeliest ids besides, `Capabilities.score_top_k` at most.

        Raises:
            EngineError: as `Engine.generate`.
        """
        ...


@runtime_checkable
class HasReplicas(Protocol):
    """An engine that is made of replicas; optional."""

    def replica_counts(self) -> tuple[int, int] | None:
        """How many of its replicas take requests now, and how many it has; None when it has none."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Turns prompt ids into response ids.

    `generate` may be called many times at once from one event loop. It raises

    - `EngineUnavailableError` when no engine is there (nothing is charged to the rollout),
    - `TransientEngineError` when trying again may help,
    - `EngineError` when it won't.

    Cancelling `generate` aborts the request in the engine.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Known once `start` has returned."""
        ...

    async def start(self) -> None:
        """Gets ready to generate; raises `EngineError` with the cause when it cannot."""
        ...

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        """Samples one continuation of `prompt_ids`. `request_id` is unique among what is in flight."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its `generate` returns what was sampled, with finish reason `abort`.

        A request that is not in flight is left alone: it may just have ended.
        """
        ...

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the weights at `source` and stamps tokens with `version` from then on.

        Where `Capabilities.adapters` is not 0, a folder of a LoRA adapter will do.
        """
        ...

    async def health(self) -> bool:
        """Whether a request sent now would be served. Restarts an embedded engine that died."""
        ...

    async def close(self) -> None:
        """Releases everything; requests in flight end with `EngineUnavailableError`. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What an engine that speaks messages is asked."""

    messages: Sequence[Message]
    """The conversation so far, in OpenAI's form; arguments of calls are mappings, or text if unreadable."""
    tools: Sequence[dict[str, Any]] = ()
    """Schemas of the tools that the model may call."""
    images: Sequence[object] = ()
    """One for each image part of `messages`, in their order."""


@runtime_checkable
class ChatEngine(Engine, Protocol):
    """An engine with `Capabilities.token_ids` False: messages in, a message out. `generate` is refused."""

    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        """Lets the model answer; errors, aborts and cancellation are those of `generate`.

        Returns:
            a completion with a `message` and without ids.
        """
        ...
