"""The loop that runs tools over many turns.

PENDING --> GENERATING --> PROCESSING_TOOLS --+
             ^   |   |                        |
             |   |   +--> INTERACTING --+     |   results, or the partner's answer
             |   |                      |     |   fit into the limits
             +---|----------------------+-----+
                 v                      |     |
             TERMINATED <---------------+-----+
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from enum import Enum
from typing import Any

from rollstream.agent.base import AgentLoop
from rollstream.agent.conversation import ChatConversation, Conversation, Turn
from rollstream.agent.images import SeenImage
from rollstream.agent.interactions import InteractionSession
from rollstream.agent.tools.session import ToolResult, ToolSession
from rollstream.chat.parsers.base import ToolCall
from rollstream.errors import DataError, TransientError
from rollstream.trajectory import Message, SamplingParams, Trajectory

logger = logging.getLogger(__name__)


class State(Enum):
    """Where a rollout is."""

    PENDING = "pending"
    """The prompt is rendered next."""
    GENERATING = "generating"
    """The model answers next."""
    PROCESSING_TOOLS = "processing_tools"
    """The answer has calls; they are executed next."""
    INTERACTING = "interacting"
    """The answer has none; the simulated user answers next."""
    TERMINATED = "terminated"


class ToolAgent(AgentLoop):
    """Generates, executes the calls in the answer, gives the results to the model, and so on.

    Ends when an answer has no calls and nobody answers it (`stop`), the response is full (`length`), a turn
    limit is reached (`max_turns`), results do not fit (`tool_overflow`; they are left out), or the engine
    aborted (`aborted`). The trajectory's `extra` has `tool_counts` (`{name: [calls, errors]}`), `tool_rewards` and
    `tool_metrics` (of calls that gave some, in order), `tool_scores` (each tool's reward for the rollout) and
    `turn_scores` of an interaction.
    """

    needs_tools = True
    resumable = True

    @classmethod
    def prompt_tools(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return tools

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampling: SamplingParams
        self.row: dict[str, Any] = {}
        self.conversation: Conversation | ChatConversation
        self.session: ToolSession
        self.tools: list[dict[str, Any]] = []
        """Schemas that the prompt shows."""
        self.interaction: InteractionSession | None = None
        self.turn: Turn
        self.tool_counts: dict[str, list[int]] = {}
        """Calls and errors by tool; under "" those of names that are no tool's."""
        self.tool_rewards: list[float] = []
        self.tool_metrics: list[dict[str, Any]] = []
        self.finish_reason = "stop"

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory | list[Trajectory]:
        self.sampling, self.row = sampling, row
        extra_info = row.get("extra_info") or {}
        handlers: dict[State, Callable[[], Awaitable[State]]] = {
            State.PENDING: self.start,
            State.GENERATING: self.answer,
            State.PROCESSING_TOOLS: self.process_tools,
            State.INTERACTING: self.interact,
        }
        async with AsyncExitStack() as stack:
            self.interaction = self.resources.interactions.open(
                extra_info.get("interaction_kwargs") or {}, request_id=self.request_id
            )
            if self.interaction is not None:
                stack.push_async_callback(self.interaction.close)
            self.session = self.resources.tools.session(
                tools_kwargs=row.get("tools_kwargs") or {},
                selection=extra_info.get("tool_selection"),
                request_id=self.request_id,
            )
            stack.push_async_callback(self.session.close)
            if self.interaction is not None or not self.session.is_stateless:
                self.turns = None  # they would not know of the turns before
                if any(message["role"] == "assistant" for message in row["raw_prompt"]) and self.continues:
                    raise DataError(
                        "a stored conversation cannot be continued with an interaction, or a tool that has a state "
                        "(stateless = True says that it has none): they know nothing of the turns before"
                    )
            state = State.PENDING
            while state is not State.TERMINATED:
                state = await handlers[state]()
            if self.interaction is not None:
                await self.interaction.finish()
            scores = await self.timed(self.session.close())
        return self.finish(scores)

    async def start(self) -> State:
        """PENDING: renders the prompt."""
        messages = self.prompt_messages()
        self.tools = self.shown_tools()
        prompt_ids = await self.render(
            messages,
            prompt_key=self.row["prompt_key"],
            tools=self.tools,
            images=self.row.get("images") or (),
        )
        self.conversation = Conversation(
            self, messages, prompt_ids, logprobs=self.sampling.logprobs, tools=self.tools
        )
        return self.first_state()

    async def answer(self) -> State:
        """GENERATING: lets the model answer."""
        self.turn = await self.conversation.generate(self.sampling)
        return self.after_answer()

    def first_state(self) -> State:
        """What comes first: an answer, unless an earlier process has heard some."""
        if self.conversation.resumed is None:
            return State.GENERATING
        self.turn = self.conversation.resumed
        return self.after_answer()

    def after_answer(self) -> State:
        """Decides what the last answer asks for."""
        if self.turn.completion.finish_reason != "stop":
            return self.end(self.turn.completion.finish_reason)
        if not self.turn.calls and self.interaction is None:
            return self.end("stop")
        if self._turns_are_used_up():
            return self.end("max_turns")
        return State.PROCESSING_TOOLS if self.turn.calls else State.INTERACTING

    async def process_tools(self) -> State:
        """PROCESSING_TOOLS: executes the calls of the last answer; the results go to the model, in order."""
        results = await self.timed(self.session.run(self.turn.calls, messages=self.conversation.messages))
        self.count(self.turn.calls, results)
        contents, images = await self.show(results)
        added = self.tool_messages(self.turn.message["tool_calls"], contents)
        if not await self.conversation.add_with_images(added, images):
            return self.end("tool_overflow")
        return State.GENERATING

    async def interact(self) -> State:
        """INTERACTING: the simulated user answers, or ends the conversation."""
        assert self.interaction is not None
        ended, text = await self.timed(self.interaction.respond(self.conversation.messages))
        if ended:
            return self.end("stop")
        if not self.conversation.add([self.users_message(text)]):
            return self.end("length")
        return State.GENERATING

    def prompt_messages(self) -> list[Message]:
        """The messages of the prompt, as the model is shown them."""
        messages: list[Message] = self.row["raw_prompt"]
        return messages

    def shown_tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the prompt shows: the loop's and the row's, which nobody executes."""
        if not self.resources.show_tools:
            return []
        return self.with_row_tools(self.session.schemas, self.row) or []

    def users_message(self, text: str) -> Message:
        """What an interaction said, as a message."""
        return {"role": "user", "content": self.given_text(text)}

    def tool_messages(self, calls: list[dict[str, Any]], contents: list[Any]) -> list[Message]:
        """Tool results as messages."""
        return self.resources.template.tool_messages(calls, contents)

    def given_text(self, text: str) -> str:
        """A tool's or a user's text without special tokens, so that it can neither end a turn nor begin one."""
        return self.tokenizer.escape_special_tokens(text)

    def count(self, calls: Sequence[ToolCall], results: list[ToolResult]) -> None:
        """Counts results and keeps their rewards."""
        known = {tool["function"]["name"] for tool in (*self.session.schemas, *self.tools)}
        for call, result in zip(calls, results, strict=True):
            counts = self.tool_counts.setdefault(call.name if call.name in known else "", [0, 0])
            counts[0] += 1
            counts[1] += result.error is not None
            self.metrics.tool_calls += 1
            self.metrics.tool_errors += result.error is not None
        self.tool_rewards += [result.reward for result in results if result.reward is not None]
        self.tool_metrics += [result.metrics for result in results if result.metrics]

    async def show(self, results: list[ToolResult]) -> tuple[list[Any], list[SeenImage]]:
        """Contents of the messages that show results to the model, and the images in them, in order.

        An image that cannot be shown is a line of text in its place.
        """
        contents: list[Any] = []
        images: list[SeenImage] = []
        reader = self.resources.images if self.sees_images else None
        for result in results:
            parts: list[dict[str, Any]] = []
            for source in result.images:
                try:
                    if reader is None:
                        raise DataError("this model sees no images")
                    images += await reader.read([source])
                    parts.append(images[-1].part)
                except (DataError, TransientError) as error:
                    parts.append({"type": "text", "text": f"[an image that cannot be shown: {error}]\n"})
            if result.text:
                parts.append({"type": "text", "text": self.given_text(result.text)})
            has_images = any(part["type"] != "text" for part in parts)
            contents.append(parts if has_images else "".join(part["text"] for part in parts))
        return contents, images

    def end(self, finish_reason: str) -> State:
        """TERMINATED: remembers why."""
        self.finish_reason = finish_reason
        return State.TERMINATED

    def state(self) -> Any:
        return [self.tool_counts, self.tool_rewards, self.tool_metrics]

    def set_state(self, state: Any) -> None:
        self.tool_counts, self.tool_rewards, self.tool_metrics = state

    def finish(self, tool_scores: dict[str, float]) -> Trajectory | list[Trajectory]:
        """The result, once everything has ended. `tool_scores`: each used tool's reward for the rollout."""
        kept = {
            "tool_counts": self.tool_counts,
            "tool_rewards": self.tool_rewards,
            "tool_metrics": self.tool_metrics,
            "tool_scores": tool_scores,
        }
        extra: dict[str, Any] = {name: value for name, value in kept.items() if value}
        if self.interaction is not None:
            extra["turn_scores"] = self.interaction.turn_scores
            if self.interaction.score is not None:
                extra["interaction_score"] = self.interaction.score
        return self.conversation.trajectory(self.finish_reason, extra=extra)

    def _turns_are_used_up(self) -> bool:
        turns, now = self.resources.turns, self.conversation
        limits = (now.assistant_turns, turns.max_assistant_turns), (now.user_turns, turns.max_user_turns)
        return any(most is not None and taken >= most for taken, most in limits)

    async def timed(self, work: Awaitable[Any]) -> Any:
        """Awaits and counts as tool time."""
        started = time.monotonic()
        try:
            return await work
        finally:
            self.metrics.tool_s += self._note_time("tool", started)
