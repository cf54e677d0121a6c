"""The agent loop: what happens within one rollout."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from rollstream.agent.images import ImageReader
from rollstream.agent.interactions import Interactions
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.agent.turns import Turns
from rollstream.chat.parsers.base import ParsedOutput, ToolCallParser
from rollstream.chat.parsers.registry import get_parser
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.chat.tool_schema import row_tools, schema_digest, with_row_tools
from rollstream.engine.base import Engine
from rollstream.errors import DataError
from rollstream.store.records import TurnRecord
from rollstream.trajectory import Completion, Message, Metrics, PromptRow, SamplingParams, Trajectory

SnapshotScoring = Literal["outcome", "own", "none"]
"""`outcome`: the reward of the rollout's final trajectory; `own`: the reward scores the snapshot's last
answer, told so by `extra_info["is_snapshot"]`; `none`: it stays without one."""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How many turns a rollout may take; None is no limit."""

    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    """Turns that are given to the model after the prompt: tool results count as one, as in verl."""


@dataclass(frozen=True)
class AgentResources:
    """What the loops of one worker share: built once, used by all."""

    engine: Engine
    tokenizer: ChatTokenizer | None
    """The model's; None with an engine that speaks messages."""
    prompts: PromptRenderer | None
    """None where there is no tokenizer."""
    response_length: int
    """Response tokens of a trajectory at most, tool results included."""
    max_model_len: int | None = None
    """Prompt plus response tokens at most; None: no limit is known."""
    tools: ToolBox = field(default_factory=ToolBox)
    shown_tools: Sequence[dict[str, Any]] = ()
    """Schemas that loops without tools show."""
    show_tools: bool = True
    """Whether the chat template is given the tools' schemas; if not, the prompts describe them."""
    turns: TurnLimits = TurnLimits()
    parser_name: str = "hermes"
    """How the model writes tool calls."""
    interactions: Interactions = field(default_factory=Interactions)
    images: ImageReader | None = None
    """Reads images that tools return; None: the model or its engine sees none."""

    def decode(self, ids: list[int]) -> str:
        """The text of sampled ids; none where there are no ids."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids)

    @cached_property
    def template(self) -> TurnTemplate:
        """What the chat template puts between turns."""
        assert self.tokenizer is not None
        return TurnTemplate(self.tokenizer, None if self.images is None else self.images.processor)

    @cached_property
    def parser(self) -> ToolCallParser:
        """Reads thinking and tool calls in what the model wrote."""
        return get_parser(self.parser_name)

    @cached_property
    def parser_stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn after a call, where the vocabulary has them."""
        assert self.tokenizer is not None
        ids = map(self.tokenizer.token_id, self.parser.stop_tokens)
        return tuple(token_id for token_id in ids if token_id is not None)

    @cached_property
    def vocab_size(self) -> int | None:
        """Ids are below it; None where that is not known: a model may have more of them than its tokenizer."""
        size = self.engine.capabilities.vocab_size
        return size if size is None or self.tokenizer is None else max(size, self.tokenizer.vocab_size)

    def parse(
        self, token_ids: list[int], *, in_thinking: bool, tools: Sequence[dict[str, Any]]
    ) -> ParsedOutput:
        """Text, thinking and calls in sampled ids, without the token that ended them, if one did."""
        assert self.tokenizer is not None
        is_ended = token_ids and token_ids[-1] in self.tokenizer.end_ids.union(self.parser_stop_ids)
        text = self.tokenizer.decode(token_ids[:-1] if is_ended else token_ids, skip_special_tokens=False)
        return self.parser.parse(text, in_thinking=in_thinking, tools=tools)

    @property
    def marks(self) -> dict[str, Any]:
        """What every trajectory's `extra` says: `token_exact: false` without token ids, else nothing."""
        return {} if self.engine.capabilities.token_ids else {"token_exact": False}


class AgentLoop(ABC):
    """One rollout's loop; instantiated for each attempt at a rollout.

    A subclass implements `run`. It asks the engine by `generate` only, so that time, calls, seeds and request
    ids are kept in one place; `Conversation` does the same and keeps messages and exact tokens, too.

    A subclass with options of its own (from the YAML of `agent_loop_config_path`) takes them as keywords:

        def __init__(self, *args, max_hints: int = 3, **kwargs):
            super().__init__(*args, **kwargs)
            self.max_hints = max_hints
    """

    snapshot_scoring: SnapshotScoring = "outcome"
    """Where a snapshot trajectory without a reward gets one from."""
    needs_tools: ClassVar[bool] = False
    """Whether a run without any tools and interactions makes no sense: an error at start, then."""
    sees_images: ClassVar[bool] = True
    """Whether this loop can show images; if not, rows with images are an error at start."""
    brings_images: ClassVar[bool] = False
    """Whether its conversations may have images that no row has: a program's own."""
    resumable: ClassVar[bool] = False
    """Whether a rollout goes on behind the turns that were finished when its process was killed
    (`generation.keep_turns`): `run` then begins with what `Conversation.resumed` says, or makes its calls again and is
    given the answers (`Turns.take`). What it holds besides is in `state`. A subclass says it anew."""
    speaks_messages: ClassVar[bool] = False
    """Whether it works with engines that speak messages, and with no others: it has no token ids then."""

    cannot_continue: ClassVar[str] = ""
    """Why a rollout cannot begin with a stored conversation; "": its prompt then is the ids that `render` gives."""

    def __init__(self, resources: AgentResources, *, request_id: str, shared: Any = None) -> None:
        """Args:
        resources: shared by all rollouts of the worker.
        request_id: the same over all turns, so that an engine can reuse its prefix cache.
        shared: what `build_shared` returned.
        """
        self.resources = resources
        self.request_id = request_id
        self.shared = shared
        self.metrics = Metrics()
        """Where the time goes; a loop that yields several trajectories starts a new one for each."""
        self.images: list[str] = []
        """Images that the context shows so far, as the engine takes them."""
        self.final_answer: str | None = None
        """What the reward scores; None: the text of the final trajectory's last answer."""
        self.turns: Turns | None = None
        """Where finished turns are kept; None: nowhere."""
        self.continues: PromptRow | None = None
        """The row, if its prompt is a stored conversation."""
        self.reward_info: dict[str, Any] = {}
        """What the reward is told besides, in its `extra_info`."""
        self.call_times: list[tuple[str, float, float]] = []
        """What took time, in the order of its ends: `generate` or `tool`, seconds since the attempt began, seconds."""
        self._began = time.monotonic()
        self._engine_calls = 0
        self._row_tools: dict[str, dict[str, Any]] = {}
        """Schemas that the row brings, by digest: they are not among the run's."""
        self._prompts: list[tuple[list[int], list[str]]] = []
        """Prompts, and digests of the schemas that they show."""

    @classmethod
    def build_shared(cls, resources: AgentResources, **options: Any) -> Any:
        """Builds what is too expensive for every rollout; called once per worker, before the first one.

        `options` are those of the YAML. The result is every instance's `self.shared`.
        """
        return None

    @classmethod
    def prompt_tools(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Schemas that the loop's prompts show, of a run with these tools; for measuring prompts beforehand.

        None: those of `data.tool_config_path`, if there are any. The run's tools are shown only by loops that
        execute them.
        """
        return None

    @classmethod
    def deciding_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of the YAML's options decides the data, as JSON values: a part of the run's identity."""
        return options

    @classmethod
    def says_resumable(cls) -> bool:
        """Whether this class, and not one that it is derived from, says that it is `resumable`."""
        return bool(vars(cls).get("resumable"))

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer with its chat template."""
        assert self.resources.tokenizer is not None
        return self.resources.tokenizer

    @property
    def prompts(self) -> PromptRenderer:
        """Renders prompts."""
        assert self.resources.prompts is not None
        return self.resources.prompts

    @abstractmethod
    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory | list[Trajectory]:
        """Executes the rollout.

        Args:
            sampling: how to sample; `max_tokens` is the response length.
            row: `raw_prompt` (messages), `prompt_key`, `index`, `data_source`, `ground_truth`,
                `extra_info`, `tools_kwargs`, `images`, and the prompt row's other columns.

        Returns:
            One trajectory, or several: snapshots first, the final one last.
        """

    def state(self) -> Any:
        """What a resumable loop holds besides its conversation and metrics, as JSON; kept with each turn."""
        return None

    def set_state(self, state: Any) -> None:
        """Takes what `state` gave, in another process."""
        return

    def kept_turns(self, asked: bytes) -> list[TurnRecord]:
        """The turns to go on behind; the loop has their counts and state from now on."""
        turns = [] if self.turns is None else self.turns.resume(asked)
        if turns:
            self.metrics = turns[-1].metrics
            self._engine_calls = int(self.metrics.engine_calls)
            self._began -= self.metrics.total_s
            self.set_state(turns[-1].state)
        return turns

    def keep_turn(
        self, asked: bytes, completion: Completion, given: tuple[Sequence[int], Sequence[Message]] = ((), ())
    ) -> None:
        """Keeps a finished turn, where turns are kept. For the arguments see `TurnRecord`."""
        if self.turns is not None:
            self.turns.add(asked, completion, self.metrics, *given, state=self.state())

    async def close(self) -> None:
        """Gives back what the attempt holds. Called once: after the reward, or when the attempt has failed."""
        return

    async def render(
        self,
        messages: list[Message],
        *,
        prompt_key: str,
        tools: list[dict[str, Any]] | None = None,
        images: Sequence[Any] = (),
    ) -> list[int]:
        """Ids of the first prompt, within `data.max_prompt_length`. Do not change the list.

        The images go to the engine with every generation from now on.

        Args:
            messages: the prompt.
            prompt_key: of the prompt row: its repeats are rendered once, as long as their messages are the same.
            tools: schemas to show; None shows those of `data.tool_config_path`, if there are any.
            images: the row's `images`, one for each image part of the messages.

        Raises:
            DataError: the template refuses the messages, an image cannot be read, or the prompt is too long
                and truncation is `error`.
        """
        prompts = self.prompts
        if self.continues is not None and (stored := self.continues.stored_prompt) is not None:
            if messages != self.continues.messages:
                raise DataError("the agent loop changes the messages of a stored conversation")
            ids = prompts.stored(stored, messages, prompts.tools if tools is None else tools)
        elif not images:
            ids = prompts.render(messages, prompt_key=prompt_key, tools=tools)
        else:
            prompt = await prompts.render_with_images(messages, images, prompt_key=prompt_key, tools=tools)
            self.images = list(prompt.images)
            ids = prompt.ids
        self.note_tools(ids, prompts.tools if tools is None else tools)
        return ids

    def with_row_tools(
        self, tools: Sequence[dict[str, Any]] | None, row: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Schemas for `render`: `tools`, and those of the row's column `tools` that have other names."""
        self._row_tools |= {schema_digest(schema): schema for schema in row_tools(row.get("tools"))}
        return with_row_tools(tools, row.get("tools"))

    def note_tools(self, prompt_ids: list[int], tools: Sequence[dict[str, Any]] | None) -> None:
        """Says which schemas a prompt shows; `render` does it. A trajectory of these ids is marked by them."""
        self._prompts.append((prompt_ids, [schema_digest(tool) for tool in tools or ()]))

    def tool_marks(self, prompt_ids: list[int]) -> dict[str, Any]:
        """`shown_tools` of the `extra` of a trajectory with this prompt: the schemas that it shows.

        The run's schemas stand there by their digests, a row's own as they are. Nothing where it shows none, or
        that is not known.
        """
        noted = [digests for ids, digests in self._prompts if ids == prompt_ids]
        if not noted or not noted[0] or noted.count(noted[0]) < len(noted):
            return {}
        return {"shown_tools": [self._row_tools.get(digest, digest) for digest in noted[0]]}

    def opened(self, prompt_ids: list[int]) -> list[int]:
        """The tokens at the end of a prompt that begin an answer, which was cut off when it was stored."""
        stored = None if self.continues is None else self.continues.stored_prompt
        if stored is None or not stored["opened"] or prompt_ids != stored["ids"]:
            return []
        return prompt_ids[-stored["opened"] :]

    def room(self, prompt_tokens: int, response_tokens: int) -> int:
        """Tokens that may still be added to a trajectory; may be negative."""
        room = self.resources.response_length - response_tokens
        if self.resources.max_model_len is not None:
            room = min(room, self.resources.max_model_len - prompt_tokens - response_tokens)
        return room

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, *, own_seed: bool = False
    ) -> Completion:
        """Asks the engine for one continuation and counts it.

        Args:
            prompt_ids: the prompt.
            sampling: how to sample.
            own_seed: the seed is this call's alone, and stays as it is.

        Raises:
            EngineError: the engine's.
        """
        engine = self.resources.engine
        images: list[object] | None = [*self.images] or None
        return await self.counted(
            lambda how: engine.generate(prompt_ids, how, request_id=self.request_id, images=images),
            sampling,
            own_seed=own_seed,
        )

    async def counted(
        self,
        ask: Callable[[SamplingParams], Awaitable[Completion]],
        sampling: SamplingParams,
        *,
        own_seed: bool = False,
    ) -> Completion:
        """Asks the engine by `ask`, and counts the call and its time.

        The seed of the first call is the rollout's; later calls have seeds derived from it, so that turns do
        not repeat each other's random numbers. With `own_seed` it stays as it is.
        """
        if sampling.seed is not None and not own_seed:
            sampling = replace(sampling, seed=turn_seed(sampling.seed, self._engine_calls))
        self._engine_calls += 1
        started = time.monotonic()
        try:
            completion = await ask(sampling)
        finally:
            self.metrics.generate_s += self._note_time("generate", started)
            self.metrics.engine_calls += 1
        self.metrics.cached_prompt_tokens += completion.cached_prompt_tokens
        return completion

    def _note_time(self, kind: str, started: float) -> float:
        """Notes in `call_times` what began then, by the monotonic clock, and ends now; returns its seconds."""
        seconds = time.monotonic() - started
        self.call_times.append((kind, round(started - self._began, 4), round(seconds, 4)))
        return seconds


def turn_seed(seed: int, call: int) -> int:
    """The seed of a rollout's `call`-th engine call, `0 <= seed < 2**31`; that of call 0 is `seed`."""
    if call == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
