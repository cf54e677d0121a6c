"""A conversation as it grows: messages and exact tokens in step."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollstream.agent.base import AgentLoop
from rollstream.agent.chat_answer import calls_of, identified, openai_call
from rollstream.agent.images import SeenImage
from rollstream.agent.tokens import TokenTrack
from rollstream.chat.parsers.base import ParsedOutput, ToolCall
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
    sampled_at: int
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
        self._last: Turn | None = None

    @property
    def room(self) -> int:
        """Tokens that may still be added, sampled or given; without ids, by the endpoint's count."""
        if not self._loop.resources.tokenizer.makes_ids:
            return self._loop.room(*(self.track.usage or (0, 0)))
        return self._loop.room(len(self.track.prompt_ids), len(self.track))

    async def generate(self, sampling: SamplingParams) -> Turn:
        """Lets the model answer, within `sampling.max_tokens` and the room that is left.

        Raises:
            EngineError: the engine's, or there is no room for a single token.
        """
        resources = self._loop.resources
        if not resources.tokenizer.makes_ids and self.assistant_turns and self.track.usage is None:
            raise EngineError(
                "the endpoint does not say how many tokens it used (`usage`), and without a tokenizer nothing "
                "else limits a conversation: set actor_rollout_ref.model.tokenizer_path"
            )
        limit = min(sampling.max_tokens, self.room)
        if limit < 1:
            raise EngineError(
                f"a prompt of {len(self.track.prompt_ids)} and a response of {len(self.track)} tokens leave "
                f"no room for an answer: response_length is {resources.response_length}, max_model_len "
                f"{resources.max_model_len}"
            )
        stops = sampling.stop_token_ids
        if self._tools and resources.token_exact and (more := set(resources.parser_stop_ids) - set(stops)):
            stops = (*stops, *sorted(more))
        if limit != sampling.max_tokens or stops is not sampling.stop_token_ids:
            sampling = replace(sampling, max_tokens=limit, stop_token_ids=stops)
        in_thinking = resources.template.in_thinking(self.track.context)
        completion = await self._loop.generate(
            self.track.context, sampling, messages=self.messages, tools=self._tools
        )
        sampled_at = len(self.track)
        self.track.add_sampled(completion)
        self.assistant_turns += 1
        if completion.message is None:
            parsed = resources.parse(completion.token_ids, in_thinking=in_thinking, tools=self._tools or ())
            message, calls = self._read(parsed)
        elif self._tools or completion.message.get("tool_calls"):
            message, calls = completion.message, calls_of(completion.message)
        else:  # the prompt describes the tools, if there are some: calls are written as text
            message, calls = self._read(resources.parser.parse(completion.message["content"]))
            message = {**completion.message, **message}
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
        return True

    def _read(self, parsed: ParsedOutput) -> tuple[Message, list[ToolCall]]:
        """The message in what a model wrote, and its calls."""
        calls = identified(parsed.calls, self._loop.resources.template, turn=self.assistant_turns)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning or calls:
            message["content"] = parsed.content.strip()
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if calls:
            message["tool_calls"] = [openai_call(call) for call in calls]
        return message, calls

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
        self.track.add_given(ids)
        self.messages += messages
        self.user_turns += 1
        self._last = None
        return True

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
            extra={**(extra or {}), **self.track.marks},
        )
