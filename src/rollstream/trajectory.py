"""The nouns every room shares. Ragged: nothing is padded anywhere but in an exporter that needs it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

FinishReason = Literal["stop", "length", "abort"]
"""Why an engine stopped: an end token or stop string, the token limit, or an abort."""

LogprobKind = Literal["raw", "processed"]
"""Log-probs are of the model's own distribution (raw), or of the one that was drawn from (processed)."""

REWARD_STREAMS: Final = {"step_rewards": "steps", "token_rewards": "tokens"}
"""Numbers per token that a reward gives: what they are called in its `reward_extra`."""

OWN_REWARD: Final = "own_reward"
"""In a trajectory's `extra`: `reward` and `extra` as its agent gave them, which a function that sees groups leaves."""

CONTINUES: Final = "continues"
"""The column of a row that goes on with a stored conversation: which one, from where."""

Message = dict[str, Any]
"""A chat message: `role`, `content`, and what else the chat template knows (`tool_calls`, ...)."""


STREAMS: Final = "token_streams"
"""Key of a trajectory's `extra`: numbers per response token, by the name of their stream."""


CALL_TIMES: Final = "call_times"
"""Key of a trajectory's `extra`: when a rollout of several engine calls did what, see `AgentLoop.call_times`. To be
looked at: no trainer gets it."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """Identifies one rollout of a run."""

    index: int
    """Position of the prompt row in the dataset."""
    repeat: int
    """Which of the `n` rollouts of the row, `0 <= repeat < n`."""


@dataclass(slots=True)
class PromptRow:
    """A row of the dataset."""

    index: int
    """Position in the concatenated data files, before filtering and shuffling."""
    prompt_key: str
    """Hash of the row's content: 32 hexadecimal digits."""
    messages: list[Message]
    """The conversation so far; a prompt given as text is one user message."""
    data_source: str
    """The source of the row, which chooses the reward. `"unknown"` when the row does not say."""
    ground_truth: Any = None
    """`reward_model.ground_truth`, or the column `ground_truth`: whatever the reward compares with."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Handed to the reward function as it is."""
    agent_name: str | None = None
    """The agent loop for this row; None takes the default one."""
    tools_kwargs: dict[str, Any] = field(default_factory=dict)
    """Per-tool arguments for this row."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    images: list[str | bytes] = field(default_factory=list)
    """The image of each image part of `messages`, in their order: a path or URL, or the bytes of an image file.
    They are never stored: the image parts of `messages` say which they were."""

    @property
    def stored_prompt(self) -> dict[str, Any] | None:
        """The token ids that are the prompt, and what they suppose, see `data.stored`; None: it is rendered."""
        given = self.columns.get(CONTINUES)
        prompt = given.get("prompt") if isinstance(given, dict) else None
        return prompt if isinstance(prompt, dict) else None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one generation."""

    max_tokens: int
    """At most this many new tokens, > 0."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = -1
    """-1 is off."""
    logprobs: bool = True
    """Return the log-prob of each sampled token."""
    seed: int | None = None
    """Seed of this request, `0 <= seed < 2**31`; None leaves the choice to the engine."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's end token until `max_tokens`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters, those of `Capabilities.extra_sampling`: see `rollstream.sampling`."""

    @property
    def can_be_continued(self) -> bool:
        """Whether a generation that is cut off may go on in another request.

        Not with stop texts: one may stand across the cut. Not with penalties and the like: they count the
        tokens of one request. Not with a grammar: an answer has to follow it from its beginning.
        """
        return not self.stop and not set(self.extra) - {"logit_bias", "min_p"}


@dataclass(slots=True)
class Completion:
    """An engine's answer to one request."""

    token_ids: list[int]
    """Sampled ids, the end token included where the engine gives it."""
    logprobs: list[float] | None
    """Natural-log probability of each id, same length; None when not asked for."""
    finish_reason: FinishReason
    policy_versions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Run-length encoded `(start, version)` over `token_ids`."""
    cached_prompt_tokens: int = 0
    """Prompt tokens the engine had in its prefix cache."""
    message: Message | None = None
    """The assistant's message, of an engine that speaks messages; None of one that speaks ids."""
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the answer as a chat endpoint counts them; None when it does not say."""


@dataclass(slots=True)
class Metrics:
    """Times (seconds) and counts. Those of a rollout are the sums over its trajectories.

    `context_agent` gives each trajectory its own part; the gateway and verifiers give all to the last one.
    """

    queue_s: float = 0.0
    """From dispatch until the attempt that succeeded began."""
    generate_s: float = 0.0
    tool_s: float = 0.0
    """Tools and interactions; of a program or function, its own time."""
    reward_s: float = 0.0
    total_s: float = 0.0
    """From dispatch to scored, waits and earlier attempts included."""
    engine_calls: float = 0.0
    cached_prompt_tokens: float = 0.0
    tool_calls: float = 0.0
    tool_errors: float = 0.0
    """Calls of unknown tools, with unreadable arguments, that raised or took too long."""


@dataclass(slots=True)
class Trajectory:
    """A training row. Arrays over the response have the length of `response_ids`."""

    prompt_ids: list[int]
    """The ids sent to the engine for the first generation. A hosted model gives no ids: this and the
    arrays over the response are empty, and the lengths are in `extra["usage"]`."""
    response_ids: list[int]
    """Everything after the prompt: model tokens and tool, user and template tokens."""
    response_mask: list[int]
    """1 = sampled by the model, 0 = not."""
    response_logprobs: list[float] | None
    """0.0 where the mask is 0; None when not asked for."""
    messages: list[Message]
    """The conversation, the model's answers included."""
    finish_reason: str
    """stop, length, max_turns, tool_overflow, aborted."""
    policy_versions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Run-length encoded `(start, version)` over the response."""
    is_snapshot: bool = False
    """True for a trajectory cut off by a context edit; the final one of a rollout is False."""
    num_turns: int = 0
    """Messages in the conversation after the system prompt, as verl counts them."""
    reward: float | None = None
    """`None`: not scored."""
    reward_extra: dict[str, Any] = field(default_factory=dict)
    """The reward's other results; `error` when scoring failed."""
    metrics: Metrics = field(default_factory=Metrics)
    extra: dict[str, Any] = field(default_factory=dict)
    """The prompt row's other columns, plus what the loop adds."""

    @property
    def is_side_call(self) -> bool:
        """Whether it had no part in its rollout's answer: trainers do not get it."""
        return is_side_call(self.extra)

    @property
    def streams(self) -> dict[str, list[float]]:
        """Numbers per response token that were asked for beside the log-probs, or that the loop gave: by name."""
        found = self.extra.get(STREAMS)
        return found if isinstance(found, dict) else {}

    @property
    def response_length(self) -> int:
        """Tokens of the response; those that the endpoint counts where there are no ids."""
        if self.prompt_ids:
            return len(self.response_ids)
        return int(self.extra.get("usage", {}).get("response_tokens", 0))

    def generations(self) -> Iterator[tuple[list[int], list[int]]]:
        """For each run of sampled tokens: the ids that the model saw, and the ids that it answered.

        Answers with no token between them, such as one that was continued after a weight update, are one run.
        """
        for start, end in sampled_stretches(self.response_mask):
            yield self.prompt_ids + self.response_ids[:start], self.response_ids[start:end]


def is_side_call(extra: Mapping[str, Any]) -> bool:
    """Whether the `extra` of a trajectory says that it had no part in its rollout's answer (docs/gateway.md)."""
    about = extra.get("gateway")
    return isinstance(about, Mapping) and about.get("side_call") is True


def sampled_stretches(response_mask: Iterable[int]) -> list[tuple[int, int]]:
    """Start and end of each run of sampled tokens."""
    return [found.span() for found in re.finditer(b"[^\0]+", bytes(response_mask))]


def turn_values(response_mask: Sequence[int], turns: Sequence[float]) -> list[float]:
    """The number of each turn of the model on all of its tokens, 0.0 on the others."""
    values = [0.0] * len(response_mask)
    for (start, end), value in zip(sampled_stretches(response_mask), turns, strict=True):
        values[start:end] = [value] * (end - start)
    return values


def reward_values(
    stream: str, reward_extra: Mapping[str, Any], response_mask: Sequence[int]
) -> list[float] | None:
    """One of `REWARD_STREAMS`, 0.0 where the mask is 0; None where the reward gave none that fit.

    `step_rewards` has the number of each turn on all of its tokens.
    """
    values = reward_extra.get(REWARD_STREAMS[stream])
    if not isinstance(values, list) or not all(isinstance(one, int | float) for one in values):
        return None
    if stream == "step_rewards":
        fits = len(values) == len(sampled_stretches(response_mask))
        return turn_values(response_mask, values) if fits else None
    if len(values) != len(response_mask):
        return None
    return [float(value) if sampled else 0.0 for value, sampled in zip(values, response_mask, strict=True)]


def of_rollout(reward_extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward says of the whole: trainers that make a mean of each part take no lists of turns and tokens."""
    lists = {name for name in REWARD_STREAMS.values() if isinstance(reward_extra.get(name), list)}
    return {name: value for name, value in reward_extra.items() if name not in lists}


@dataclass(slots=True)
class Rollout:
    """A completed execution of an agent loop for one prompt row."""

    index: int
    repeat: int
    prompt_key: str
    trajectories: list[Trajectory]
    """At least one; snapshots first, the final one last."""
    data_source: str
    ground_truth: Any = None
    attempts: int = 1
    """Attempts it took, the successful one included."""
    finished_at: float | None = None
    """Unix time, seconds; None: when it is stored."""

    @property
    def key(self) -> RolloutKey:
        """Its `(index, repeat)`."""
        return RolloutKey(self.index, self.repeat)

    @property
    def final(self) -> Trajectory:
        """The trajectory that ends the rollout."""
        return self.trajectories[-1]

    def without_side_calls(self) -> "Rollout":
        """The rollout as trainers get it."""
        return replace(self, trajectories=[one for one in self.trajectories if not one.is_side_call])


@dataclass(slots=True)
class Failure:
    """A rollout that failed, with its cause."""

    index: int
    repeat: int
    prompt_key: str
    attempts: int
    stage: str
    """The stage that failed: `prompt`, `agent` (the loop and its tools), `engine`."""
    error: str
    """`ErrorClass: message` of the last attempt."""
    traceback: str
    failed_at: float
    """Unix time, seconds."""

    @property
    def key(self) -> RolloutKey:
        """Its `(index, repeat)`."""
        return RolloutKey(self.index, self.repeat)


def failure_cause(error: str) -> str:
    """A key that failures of the same cause share: the first line of the error, without its numbers."""
    return re.sub(r"\d+", "N", error.partition("\n")[0].strip())[:200]
