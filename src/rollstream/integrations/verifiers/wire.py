"""OpenAI's chat API, as an environment speaks it: requests read, answers written.

Source: https://platform.openai.com/docs/api-reference/chat; `return_token_ids` is vLLM's.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from rollstream.chat.parsers.base import ParsedOutput
from rollstream.serving import openai_wire
from rollstream.serving.chat_messages import read_messages, read_tools
from rollstream.serving.parameters import read_parameters
from rollstream.serving.refusals import RequestError
from rollstream.trajectory import Completion, Message, SamplingParams

_HARMLESS = frozenset(
    (
        *openai_wire.HARMLESS,
        "seed",  # a rollout's seeds are the run's
        "return_tokens_as_token_ids",
        "return_token_ids",
        "reasoning_effort",
    )
)
_NEUTRAL: dict[str, Any] = {
    **openai_wire.NEUTRAL,
    "n": 1,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "chat_template_kwargs": {},
}


class _Request(msgspec.Struct):
    messages: list[Any]
    model: str | None = None
    tools: list[Any] = []
    tool_choice: Any = "auto"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] = []
    logprobs: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an environment asks for."""

    messages: list[Message]
    """As chat templates want them."""
    tools: list[dict[str, Any]]
    """Schemas to show; none where calls are forbidden (`tool_choice: none`)."""
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: bool
    """Answer with log-probs and token ids, too."""
    stream: bool
    with_usage: bool
    """End a stream with a chunk of usage."""


def read_request(given: Mapping[str, Any], run: SamplingParams) -> TurnRequest:
    """Reads the body of a request.

    How to sample is the run's affair: log-probs and seeds are of its distribution. A request that asks for
    another one is refused, not passed over.

    Args:
        given: the body.
        run: how the run samples.

    Raises:
        RequestError: it cannot be answered as it is.
        ConfigError: a tool's schema is not whole.
    """
    asked = read_parameters(given, _Request, harmless=_HARMLESS, neutral=_NEUTRAL)
    for name in ("temperature", "top_p", "top_k"):
        value, ours = getattr(asked, name), getattr(run, name)
        if value is not None and value != ours and not (name == "top_k" and value <= 0 and ours <= 0):
            raise RequestError(
                f"{name} is {value} and the run's is {ours}: leave it out, or set "
                f"actor_rollout_ref.rollout.{name}",
                param=name,
            )
    if asked.tool_choice not in ("auto", "none"):
        raise RequestError(
            f"tool_choice {asked.tool_choice!r} is not supported: nothing here forces a model to call a "
            "tool; use 'auto' or 'none'",
            param="tool_choice",
        )
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    if limit is not None and limit < 1:
        raise RequestError(f"max_tokens must be at least 1, not {limit}", param="max_tokens")
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    return TurnRequest(
        messages=read_messages(asked.messages),
        tools=read_tools(asked.tools) if asked.tool_choice == "auto" else [],
        max_tokens=limit,
        stop=tuple(text for text in stop if text),
        logprobs=asked.logprobs,
        stream=asked.stream,
        with_usage=openai_wire.wants_usage(asked.stream, asked.stream_options),
    )


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """An answer, and what belongs to it."""

    id: str
    model: str
    message: Message
    """As chat templates want it: arguments of calls are mappings."""
    prompt_ids: list[int]
    completion: Completion

    def body(self, request: TurnRequest) -> dict[str, Any]:
        """The whole answer."""
        choice = {"index": 0, "message": self._wire_message(), **self._rest(request)}
        more = {"prompt_token_ids": self.prompt_ids} if request.logprobs else {}
        return self._around("chat.completion", [choice], usage=self._usage(), **more)

    def events(self, request: TurnRequest) -> bytes:
        """The whole answer as server-sent events: the engine gives it at once, so they come at once."""
        message = self._wire_message()
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"]}]
        if "reasoning_content" in message:
            deltas.append({"reasoning_content": message["reasoning_content"]})
        deltas += [
            {"tool_calls": [{"index": at, **call}]} for at, call in enumerate(message.get("tool_calls") or ())
        ]
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, **self._rest(request)})
        chunks = [self._around("chat.completion.chunk", [choice]) for choice in choices]
        if request.with_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
            chunks.append(self._around("chat.completion.chunk", [], usage=self._usage()))
        return openai_wire.event_stream(chunks)

    def _around(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return openai_wire.Envelope(self.id, kind, self.model, int(time.time())).around(choices, **more)

    def _usage(self) -> dict[str, Any]:
        return openai_wire.usage([self.prompt_ids], [self.completion])

    def _wire_message(self) -> dict[str, Any]:
        message = dict(self.message)
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [_wire_call(call) for call in calls]
            message["content"] = message["content"] or None
        return message

    def _rest(self, request: TurnRequest) -> dict[str, Any]:
        reason = self.completion.finish_reason
        called = "tool_calls" in self.message and reason == "stop"
        # Cut off by an abort: for the environment an answer that is not whole.
        finish = "tool_calls" if called else "length" if reason == "abort" else reason
        rest: dict[str, Any] = {"finish_reason": finish, "logprobs": None}
        if request.logprobs:
            rest["token_ids"] = self.completion.token_ids
            if (logprobs := self.completion.logprobs) is not None:
                pairs = zip(self.completion.token_ids, logprobs, strict=True)
                rest["logprobs"] = {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                        for token, logprob in pairs
                    ],
                    "refusal": None,
                }
        return rest


def content_of(parsed: ParsedOutput, special_texts: Sequence[str], *, tools: bool) -> str:
    """What a model says, as an environment is told.

    A call that cannot be executed has no place in `tool_calls`, and without tools there are no calls: what
    the model wrote stands in the content then.

    Args:
        parsed: the turn.
        special_texts: special tokens as text; structure, which is left out.
        tools: whether the prompt showed some.
    """
    if tools:
        content = parsed.content + "".join(call.text for call in parsed.calls if call.error is not None)
        executable = any(call.error is None for call in parsed.calls)
    else:
        content = "".join(part.text for part in parsed.segments if part.kind in ("content", "call"))
        executable = False
    for text in special_texts:
        content = content.replace(text, "")
    return content.strip() if parsed.reasoning or executable else content


def _wire_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {**call, "function": {**function, "arguments": text}}
