"""A conversation as it grows: messages and exact tokens in step, or messages alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollstream.agent.base import AgentLoop
from rollstream.agent.chat_answer import identified, read_answer
from rollstream.agent.images import SeenImage
from rollstream.agent.tokens import TokenTrack
from rollstream.agent.turns import asked_digest
from rollstream.chat.messages import answer_message
from rollstream.chat.parsers.base import ToolCall
from rollstream.engine.base import ChatEngine, ChatPrompt
from rollstream.errors import EngineError
from rollstream.trajectory import Completion, Message, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model."""

    message: Message
    """Role, content and, where there are some, `tool_calls` and `reasoning_content`."""
    calls: Sequence[ToolCall]
    """The tool calls in it, those that cannot be read included."""
    completion: Completion
    sampled_at: int = 0
    """Where its tokens begin in the response."""


class Conversation:
    """One trajectory in the making.

    Example:
        prompt_ids = await self.render(messages, prompt_key=row["prompt_key"])
        conversation = Conversation(self, messages, prompt_ids)
        turn = await conversation.generate(sampling)
        if conversation.add([{"role": "user", "content": "Are you sure?"}]):
            turn = await conversation.generate(sampling)
        return conversation.trajectory(turn.completion.finish_reason)

    The prompt of every turn is the prompt of the turn before, the sampled ids, and the ids of what was added.
    """

    def __init__(
        self,
        loop: AgentLoop,
        messages: Sequence[Message],
        prompt_ids: list[int],
        *,
        logprobs: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        """A prompt of these messages, rendered by `AgentLoop.render` with these tools; `logprobs` are kept or not."""
        self._loop = loop
        self._tools = tools
        self.messages: list[Message] = list(messages)
        """The conversation so far. Add to it by `add` and `generate` only."""
        self.track = TokenTrack(prompt_ids, logprobs=logprobs)
        self.assistant_turns = 0
        self.user_turns = 0
        """How often something was added for the model to answer."""
        self._opened = loop.opened(prompt_ids)
        self._last: Turn | None = None
        self._given: tuple[list[int], list[Message]] = ([], [])
        """Added since the last answer."""
        self.resumed: Turn | None = None
        """The last answer of an earlier process, behind which the loop goes on; None: it begins."""
        self._asked = b"" if loop.turns is None else asked_digest(prompt_ids)
        for kept in loop.kept_turns(self._asked):
            if kept.given_messages:
                self._add_given(kept.given_ids, kept.given_messages)
            self.resumed = self._answered(kept.completion)

    @property
    def room(self) -> int:
        """Tokens that may still be added, sampled or given."""
        return self._loop.room(len(self.track.prompt_ids), len(self.track))

    async def generate(self, sampling: SamplingParams) -> Turn:
        """Lets the model answer, within `sampling.max_tokens` and the room that is left.

        Raises:
            EngineError: the engine's, or there is no room for a single token.
        """
        resources = self._loop.resources
        limit = min(sampling.max_tokens, self.room)
        if limit < 1:
            raise EngineError(
                f"a prompt of {len(self.track.prompt_ids)} and a response of {len(self.track)} tokens leave "
                f"no room for an answer: response_length is {resources.response_length}, max_model_len "
                f"{resources.max_model_len}"
            )
        stops = sampling.stop_token_ids
        if self._tools and (more := set(resources.parser_stop_ids) - set(stops)):
            stops = (*stops, *sorted(more))
        if limit != sampling.max_tokens or stops is not sampling.stop_token_ids:
            sampling = replace(sampling, max_tokens=limit, stop_token_ids=stops)
        turn = self._answered(await self._loop.generate(self.track.context, sampling))
        self._loop.keep_turn(self._asked, turn.completion, self._given)
        self._given = ([], [])
        return turn

    def _answered(self, completion: Completion) -> Turn:
        resources = self._loop.resources
        opened, self._opened = self._opened, []
        in_thinking = resources.template.in_thinking(self.track.context[: -len(opened) or None])
        sampled_at = len(self.track)
        self.track.add_sampled(completion)
        self.assistant_turns += 1
        parsed = resources.parse(
            opened + completion.token_ids, in_thinking=in_thinking, tools=self._tools or ()
        )
        calls = identified(parsed.calls, resources.template.takes_call_id, turn=self.assistant_turns)
        message = answer_message(parsed.content, parsed.reasoning, calls)
        self.messages.append(message)
        self._last = Turn(message, calls, completion, sampled_at)
        return self._last

    def add(self, messages: list[Message]) -> bool:
        """Adds what the model shall answer: tool results, or a user's message.

        False if it leaves no room for an answer: then nothing was added. Raises `DataError`: the chat template
        refuses the messages.
        """
        return self._append(messages, self._ids_after(messages, []))

    async def add_with_images(self, messages: list[Message], images: Sequence[SeenImage]) -> bool:
        """As `add`, for messages with an image part for each of `images`, in order."""
        if not images:
            return self.add(messages)
        ids = await asyncio.to_thread(self._ids_after, messages, [image.pixels for image in images])
        if not self._append(messages, ids):
            return False
        self._loop.images += [image.sent for image in images]
        self._loop.turns = None  # which have no place for images: what comes from here on is not kept
        return True

    def _ids_after(self, messages: list[Message], images: Sequence[Any]) -> list[int]:
        if self._last is None:
            raise RuntimeError(
                "the model answers what was added before more is added: hand over all messages at once"
            )
        return self._loop.resources.template.ids_after(
            self.messages,
            messages,
            sampled_ids=self._last.completion.token_ids,
            tools=self._tools,
            images=images,
        )

    def _append(self, messages: list[Message], ids: list[int]) -> bool:
        if len(ids) >= self.room:
            return False
        self._add_given(ids, messages)
        return True

    def _add_given(self, ids: list[int], messages: list[Message]) -> None:
        self.track.add_given(ids)
        self.messages += messages
        self.user_turns += 1
        self._last = None
        self._given = ids, messages

    def trajectory(self, finish_reason: str, *, extra: dict[str, Any] | None = None) -> Trajectory:
        """The trajectory so far; `extra` are JSON values to keep with it.

        `finish_reason` is `stop`, `length`, `max_turns`, `tool_overflow`, `aborted`, or an engine's `abort`.
        """
        return Trajectory(
            prompt_ids=self.track.prompt_ids,
            response_ids=self.track.response_ids,
            response_mask=list(self.track.response_mask),
            response_logprobs=None if (kept := self.track.response_logprobs) is None else list(kept),
            policy_versions=list(self.track.policy_versions),
            messages=list(self.messages),
            finish_reason="aborted" if finish_reason == "abort" else finish_reason,
            num_turns=self.assistant_turns + self.user_turns + 1,
            metrics=self._loop.metrics,
            extra=extra or {},
        )


class ChatConversation:
    """One trajectory in the making with an engine that speaks messages; it has no ids.

    Its length is what the endpoint counts. What was added since the last answer is not in it yet.
    """

    def __init__(
        self,
        loop: AgentLoop,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]],
        executes: bool,
    ) -> None:
        """`tools`: schemas to show; `executes`: whether somebody answers calls, or they end the conversation."""
        self._loop = loop
        self._tools = tools
        self._executes = executes
        self._usage: tuple[int, int] | None = None
        self.messages: list[Message] = list(messages)
        """The conversation so far."""
        self.assistant_turns = 0
        self.user_turns = 0
        """How often something was added for the model to answer."""
        self._given: list[Message] = []
        self.resumed: Turn | None = None
        """See `Conversation`."""
        self._asked = b"" if loop.turns is None else asked_digest([], self.messages, tools)
        for kept in loop.kept_turns(self._asked):
            if kept.given_messages:
                self.add(kept.given_messages)
            self.resumed = self._answered(kept.completion)

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._loop.room(*(self._usage or (0, 0)))

    async def generate(self, sampling: SamplingParams) -> Turn:
        """Lets the model answer, within `sampling.max_tokens` and the room that is left.

        Raises:
            EngineError: the engine's, or the endpoint counts no tokens.
        """
        if self.assistant_turns and self._usage is None:
            raise EngineError(
                "the endpoint does not say how many tokens it used (`usage`), and nothing else limits a conversation"
            )
        engine, request_id = self._loop.resources.engine, self._loop.request_id
        assert isinstance(engine, ChatEngine)
        prompt = ChatPrompt(list(self.messages), self._tools, tuple(self._loop.images))
        completion = await self._loop.counted(
            lambda how: engine.chat(prompt, how, request_id=request_id),
            replace(sampling, max_tokens=min(sampling.max_tokens, self.room)),
        )
        turn = self._answered(completion)
        self._loop.keep_turn(self._asked, completion, ((), self._given))
        self._given = []
        return turn

    def _answered(self, completion: Completion) -> Turn:
        self._count(completion.usage)
        self.assistant_turns += 1
        message, calls = read_answer(completion.message, turn=self.assistant_turns)
        self.messages.append(message)
        return Turn(message, calls if self._executes else (), completion)

    def add(self, messages: list[Message]) -> bool:
        """Adds what the model shall answer; False, and nothing is added, if there is no room for an answer."""
        if self.room <= 0:
            return False
        self.messages += messages
        self.user_turns += 1
        self._given = messages
        return True

    async def add_with_images(self, messages: list[Message], images: Sequence[SeenImage]) -> bool:
        """As `add`, for messages with an image part for each of `images`, in order."""
        if not self.add(messages):
            return False
        if images:
            self._loop.images += [image.sent for image in images]
            self._loop.turns = None  # as in `Conversation`
        return True

    def trajectory(self, finish_reason: str, *, extra: dict[str, Any] | None = None) -> Trajectory:
        """The trajectory so far; `extra` are JSON values to keep with it."""
        extra = extra or {}
        if self._usage is not None:
            extra |= {"usage": {"prompt_tokens": self._usage[0], "response_tokens": self._usage[1]}}
        return Trajectory(
            prompt_ids=[],
            response_ids=[],
            response_mask=[],
            response_logprobs=None,
            messages=list(self.messages),
            finish_reason="aborted" if finish_reason == "abort" else finish_reason,
            num_turns=self.assistant_turns + self.user_turns + 1,
            metrics=self._loop.metrics,
            extra=extra,
        )

    def _count(self, counted: tuple[int, int] | None) -> None:
        if counted is not None:
            prompt, response = self._usage or (counted[0], 0)
            # An endpoint leaves out the thinking of earlier answers: then it is asked for less than there was.
            counted = prompt, max(response, counted[0] - prompt) + counted[1]
        self._usage = counted
