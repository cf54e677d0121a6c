"""The model behind a session: the run's engine answers its calls, and the session keeps the tokens."""

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson

from rollstream.agent.base import AgentLoop
from rollstream.agent.chat_answer import calls_of, identified
from rollstream.chat.wires.openai_chat import assistant_message
from rollstream.errors import ConfigError, DataError
from rollstream.gateway.sessions import Ask, Session, Turn
from rollstream.trajectory import Completion, Message, SamplingParams
from rollstream.web import HTTPError


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asks for, whatever API it speaks."""

    messages: list[Message]
    """As chat templates want them."""
    tools: list[dict[str, Any]]
    """Schemas to show."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class Recorder:
    """Answers the calls of one agent in one attempt at a rollout. `answer` may be called many times at once."""

    def __init__(
        self, loop: AgentLoop, sampling: SamplingParams, *, name: str, broken: "asyncio.Future[Exception]"
    ) -> None:
        """Args:
        loop: of the attempt; its engine, template and limits are used, its metrics count.
        sampling: of the rollout.
        name: request ids begin with it.
        broken: is given the first error that is not the agent's to handle: the engine's, or a bug.
        """
        self.sampling = sampling
        self.session = Session(_Templates(loop), name=name, logprobs=sampling.logprobs)
        self.refusal: Exception | None = None
        """Why the last refused call was refused: a fault of the call itself."""
        self.ran_out_of_room = False
        """Whether a call was refused because nothing would fit behind it."""
        self._loop = loop
        self._broken = broken

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes why a call gets no answer, in `refusal` or `broken`, and raises it."""
        try:
            yield
        except Exception as error:
            # The rollout's own prompt, if it cannot be rendered, is an error as with every other loop.
            own_prompt = isinstance(error, DataError) and not self.session.has_begun
            if isinstance(error, HTTPError | ConfigError | DataError) and not own_prompt:
                self.refusal = error
            elif not self._broken.done():
                self._broken.set_result(error)
            raise

    async def answer(self, call: Call, *, gone: Callable[[], bool] = lambda: False) -> tuple[Turn, list[int]]:
        """Lets the model answer.

        Args:
            call: what is asked for.
            gone: whether the client went away: then the answer is not kept, for nobody will have read it.

        Returns:
            The call with its answer, and the prompt that the engine got.

        Raises:
            HTTPError: there is no room for an answer, or the engine cannot do what is asked.
            DataError: the chat template refuses the messages.
            EngineError: the engine's.
            CancelledError: the client went away.
        """
        ask = self.session.begin(call.messages, call.tools)
        try:
            track = ask.track(logprobs=self.sampling.logprobs)
            sampling = self._sampling_of(call, len(track.prompt_ids), len(track))
            in_thinking = self._loop.resources.template.in_thinking(track.context)
            # Calls that are open at once have ids of their own. `generate` reads the id before it waits.
            self._loop.request_id = ask.request_id
            completion = await self._loop.generate(
                track.context, sampling, messages=ask.messages, tools=call.tools or None
            )
            message = self._read(completion, ask, in_thinking=in_thinking)
            if gone():
                raise asyncio.CancelledError  # as the server is about to cancel it
        except BaseException:
            self.session.give_up(ask)
            raise
        turn = self.session.answer(ask, f"chatcmpl-{uuid.uuid4().hex}", message, completion)
        return turn, track.context

    def _sampling_of(self, call: Call, prompt_tokens: int, response_tokens: int) -> SamplingParams:
        resources, run = self._loop.resources, self.sampling
        room = self._loop.room(prompt_tokens, response_tokens)
        if room < 1:
            self.ran_out_of_room = True
            raise HTTPError(
                400,
                f"a prompt of {prompt_tokens} and a response of {response_tokens} tokens leave no room for an "
                f"answer within the context length: response_length is {resources.response_length}, "
                f"max_model_len {resources.max_model_len}",
                code="context_length_exceeded",
                where="messages",
            )
        if call.stop and not resources.engine.capabilities.stop_strings:
            raise HTTPError(400, "the run's engine knows no stop strings", where="stop")
        parser_stops = resources.parser_stop_ids if call.tools and resources.token_exact else ()
        return replace(
            run,
            max_tokens=min(run.max_tokens, room, call.max_tokens or room),
            stop=tuple(dict.fromkeys((*run.stop, *call.stop))),
            stop_token_ids=tuple(dict.fromkeys((*run.stop_token_ids, *parser_stops))),
        )

    def _read(self, completion: Completion, ask: Ask, *, in_thinking: bool) -> Message:
        """The answer as a message. Only calls that can be executed are `tool_calls`."""
        resources, tokenizer = self._loop.resources, self._loop.tokenizer
        if completion.message is not None:
            message = {**completion.message, "content": completion.message.get("content") or ""}
            if calls := message.pop("tool_calls", None):
                given = zip(calls, calls_of(completion.message), strict=True)
                if readable := [call for call, read in given if read.error is None]:
                    message["tool_calls"] = readable
            return message
        parsed = resources.parse(completion.token_ids, in_thinking=in_thinking, tools=ask.tools)
        calls = identified(parsed.calls, resources.template, turn=len(ask.before) + 1)
        special = sorted(tokenizer.special_ids.intersection(completion.token_ids))
        return assistant_message(
            replace(parsed, calls=tuple(calls)),
            [tokenizer.decode([token], skip_special_tokens=False) for token in special],
            tools=bool(ask.tools),
        )


class _Templates:
    """Renders by the model's chat template; no special token in a message ends a turn or begins one."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, first: bool
    ) -> tuple[Sequence[Message], Sequence[int]]:
        schemas = list(tools)
        if not first:  # a rewritten history, or a helper's prompt: as long as it may be
            shown = [self._escaped(message) for message in messages]
            return shown, self._loop.tokenizer.render(shown, tools=schemas or None)
        form = orjson.dumps([messages, schemas], option=orjson.OPT_SORT_KEYS)
        key = hashlib.blake2b(form, digest_size=16).hexdigest()
        return messages, self._loop.resources.prompts.render(list(messages), prompt_key=key, tools=schemas)

    def after(self, turn: Turn, messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[int]]:
        template = self._loop.resources.template
        calls = {call["id"]: call for call in turn.message.get("tool_calls") or ()}
        shown: list[Message] = []
        results: list[tuple[dict[str, Any], Any]] = []
        for message in map(self._escaped, messages):
            call = calls.get(message.get("tool_call_id"))
            if message["role"] != "tool" or call is None:
                shown.append(message)
            elif template.has_tool_role:
                shown.append({"name": call["function"]["name"], **message})
            else:
                results.append((call, message["content"]))
        if results:  # they stand in a user's message
            shown[:0] = template.tool_messages(
                [call for call, _ in results], [content for _, content in results]
            )
        ids = template.ids_after(
            turn.message, shown, sampled_ids=turn.completion.token_ids, tools=list(turn.ask.tools) or None
        )
        return shown, ids

    def _escaped(self, message: Message) -> Message:
        if message["role"] not in ("user", "tool"):
            return message
        return {**message, "content": self._loop.tokenizer.escape_special_tokens(message["content"])}
