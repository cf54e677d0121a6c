"""OpenAI's chat completions: requests read, answers written, whole or as a stream.

Source: https://platform.openai.com/docs/api-reference/chat. From vLLM: `return_token_ids`, `request_id`,
`return_tokens_as_token_ids`, `top_k`, `stop_token_ids`, `ignore_eos`, `continue_final_message`; from SGLang:
`rid`, `metadata.weight_version`.
"""

import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from rollstream.chat.messages import Part, answer_message
from rollstream.chat.parsers.base import ParsedOutput
from rollstream.chat.wires.exchange import (
    Answer,
    Asked,
    Notes,
    conversation,
    image,
    read_tools,
    take_sampling,
)
from rollstream.chat.wires.requests import NEUTRAL, RequestError, Sampling, error_body, unsupported
from rollstream.trajectory import Completion, Message
from rollstream.web import HTTPError

_NEUTRAL_AGENT: dict[str, Any] = {
    "n": 1,
    "stop_token_ids": [],
    "ignore_eos": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
}
"""Known parameters, which have to have these values where an agent's calls are recorded."""

_BEGUN = ("prefix", "partial")
"""By these, DeepSeek's, Mistral's and Moonshot's APIs go on with the last message."""


class OpenAIRequest(Sampling):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    rid: str | None = None
    request_id: str | None = None

    def answer_id(self, prefix: str) -> str:
        """What the answer is called: SGLang's by `rid`, vLLM's by a prefix and `request_id`."""
        return self.rid or f"{prefix}-{self.request_id or uuid.uuid4().hex}"

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def check_stream_options(self) -> None:
        """Raises `RequestError`: options for a stream where none is asked for, or unknown ones."""
        if self.stream_options is None:
            return
        if not self.stream:
            raise RequestError("stream_options is for stream=true only", param="stream_options")
        for name, value in self.stream_options.items():
            if name not in ("include_usage", "include_obfuscation") and value:
                raise RequestError(f"stream_options.{name} is not supported", param="stream_options")


class ChatRequest(OpenAIRequest, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Any]
    """As chat templates want them, once `read_chat` has read them."""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Schemas to show the model; none where it may not call any, as in SGLang."""
    tool_choice: Any = "auto"
    max_completion_tokens: int | None = None
    logprobs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def read_chat(given: Mapping[str, Any], *, notes: Notes | None = None, images: bool = False) -> ChatRequest:
    """Reads the body of a request.

    Args:
        given: the body.
        notes: gets what is not done; None: that is refused.
        images: whether messages may show some.

    Raises:
        RequestError: it cannot be answered as it is.
        ConfigError: a tool's schema is not whole.
    """
    notes = Notes(strict=True) if notes is None else notes
    asked = notes.read(given, ChatRequest)
    if notes.strict:
        asked.check_stream_options()
    if asked.max_completion_tokens is not None:
        asked.max_tokens = asked.max_completion_tokens
    shows_tools = notes.shows_tools(asked.tool_choice)

    def read_part(part: Part, where: str) -> Part:
        if part["type"] != "image_url":
            why = f"is of type {part['type']!r}; only text and images are supported"
            raise RequestError(f"{where} {why}", param=where)
        shown = part.get("image_url")
        return image(shown.get("url") if isinstance(shown, dict) else shown, where, allowed=images)

    asked.messages = conversation(asked.messages, "messages", read_part)
    functions = []
    for tool in asked.tools:
        if tool.get("type", "function") == "function":
            functions.append(tool)
        else:
            notes.leave_out_tool(tool)
    asked.tools = read_tools(functions) if shows_tools else []
    if asked.add_generation_prompt is asked.continue_final_message:
        raise RequestError(
            "an answer either begins (add_generation_prompt) or goes on (continue_final_message): exactly "
            "one of them has to be true",
            param="add_generation_prompt",
        )
    if asked.continue_final_message and asked.messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message goes on with the last message, which must be an assistant's",
            param="continue_final_message",
        )
    return asked


# Answers


def assistant_message(parsed: ParsedOutput, special_texts: Iterable[str], *, tools: bool) -> Message:
    """What a model says, thinks and calls, as a message whose arguments of calls are mappings.

    A call that cannot be executed has no place in `tool_calls`, and without tools there are no calls: what
    the model wrote stands in the content then.

    Args:
        parsed: the turn.
        special_texts: special tokens as text; structure, which is left out.
        tools: whether the prompt showed some.
    """
    # Nine letters and digits: Mistral's templates take no other id.
    calls = [
        replace(call, call_id=call.call_id or f"c{secrets.token_hex(4)}")
        for call in parsed.calls
        if tools and call.error is None
    ]
    if tools:
        content = parsed.content + "".join(call.text for call in parsed.calls if call.error is not None)
    else:
        content = "".join(part.text for part in parsed.segments if part.kind in ("content", "call"))
    for text in special_texts:
        content = content.replace(text, "")
    return answer_message(content, parsed.reasoning, calls)


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample of an answer."""

    message: Message
    """Arguments of calls are mappings, or text where they could not be read."""
    completion: Completion
    token_texts: Sequence[str] | None = None
    """The text of each sampled token; None names tokens by their ids, in vLLM's way."""
    stop_reason: str | int | None = None
    """The stop text or token id that ended it, as vLLM says it."""

    def wire_message(self) -> Message:
        """The message as clients read it: arguments are JSON text."""
        message = dict(self.message)
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = [_wire_call(call) for call in calls]
            message["content"] = message["content"] or None
        return message

    def rest(self, asked: ChatRequest) -> dict[str, Any]:
        """What stands beside the message, or in the last chunk of a stream."""
        completion = self.completion
        reason = completion.finish_reason
        rest: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": "tool_calls" if reason == "stop" and "tool_calls" in self.message else reason,
            "stop_reason": self.stop_reason,
        }
        if asked.logprobs and completion.logprobs is not None:
            ids, texts = completion.token_ids, self.token_texts
            names = token_names(ids, texts, as_ids=asked.return_tokens_as_token_ids)
            # Of a token that ends inside a character, only its character's last token knows its bytes.
            content = [
                {"token": name, "logprob": logprob, "bytes": list(text.encode()) or None, "top_logprobs": []}
                for name, logprob, text in zip(
                    names, completion.logprobs, texts or [""] * len(ids), strict=True
                )
            ]
            rest["logprobs"] = {"content": content, "refusal": None}
        if asked.return_token_ids:
            rest["token_ids"] = completion.token_ids
        return rest


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A whole answer: the engines here give it at once."""

    id: str
    model: str
    prompt_ids: list[int]
    choices: Sequence[Choice]

    def body(self, asked: ChatRequest) -> dict[str, Any]:
        """The answer as one object."""
        choices = [
            {"index": at, "message": choice.wire_message(), **choice.rest(asked)}
            for at, choice in enumerate(self.choices)
        ]
        more = {"prompt_token_ids": self.prompt_ids} if asked.return_token_ids else {}
        return {
            **envelope("chat.completion", self.id, self.model, self._completions),
            "choices": choices,
            "usage": usage([self.prompt_ids], self._completions),
            **more,
        }

    def chunks(self, asked: ChatRequest) -> list[dict[str, Any]]:
        """The answer in pieces: of each choice its role, thinking, content, calls, and its end."""
        head = envelope("chat.completion.chunk", self.id, self.model, self._completions)
        chunks = []
        for at, choice in enumerate(self.choices):
            message = choice.wire_message()
            calls = message.get("tool_calls") or ()
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if calls else ""}]
            deltas += [
                {name: message[name]} for name in ("reasoning_content", "content") if message.get(name)
            ]
            deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
            pieces = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
            pieces.append({"delta": {}, **choice.rest(asked)})
            chunks += [{**head, "choices": [{"index": at, **piece}]} for piece in pieces]
        if asked.return_token_ids:
            chunks[0]["prompt_token_ids"] = self.prompt_ids
        return with_usage(chunks, asked, head, usage([self.prompt_ids], self._completions))

    @property
    def _completions(self) -> list[Completion]:
        return [choice.completion for choice in self.choices]


def _wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {**call, "function": {**function, "arguments": text}}


def envelope(kind: str, name: str, model: str, completions: Sequence[Completion]) -> dict[str, Any]:
    """What an answer and its chunks begin with; `metadata` has the newest weights that had a part in it."""
    newest = max(completion.policy_versions[-1][1] for completion in completions)
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "metadata": {"weight_version": str(newest)},
    }


def usage(prompts: Iterable[Sequence[int]], completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens: of each prompt once, whatever the number of its samples; of every sample all sampled ones."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached_prompt_tokens for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def with_usage(
    chunks: list[dict[str, Any]], asked: OpenAIRequest, head: Mapping[str, Any], used: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The chunks, and one of usage at their end if it is asked for."""
    if not asked.wants_usage:
        return chunks
    return [*({**chunk, "usage": None} for chunk in chunks), {**head, "choices": [], "usage": used}]


def token_names(ids: Sequence[int], texts: Sequence[str] | None, *, as_ids: bool) -> list[str]:
    """What tokens are called beside their log-probs; by id where a text may be of several."""
    return [f"token_id:{token}" for token in ids] if as_ids or texts is None else list(texts)


def event_stream(chunks: Iterable[Any]) -> bytes:
    """Server-sent events, with the end that OpenAI and SGLang both have."""
    events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])


class ChatWire:
    """The API for agents whose calls are recorded."""

    prefix = "chatcmpl-"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: Mapping[str, Any], *, images: bool, strict: bool = False) -> Asked:
        """Reads a request; with log-probs the client is told the token ids, too."""
        given, notes = dict(body), Notes(strict=strict)
        sampling = take_sampling(given)
        for name in ("reasoning_effort", "verbosity", "parallel_tool_calls"):
            if name in given and given[name] != NEUTRAL.get(name):
                notes[name] = given.pop(name)
        for name, value in _NEUTRAL_AGENT.items():
            if given.get(name) not in (None, value):
                raise unsupported(name, f"is supported with the value {value!r} only")
        asked = read_chat(given, notes=notes, images=images)
        last = asked.messages[-1]
        if begun := [name for name in _BEGUN if last["role"] == "assistant" and last.get(name)]:
            raise RequestError(
                f"messages[-1].{begun[0]}: an answer that is begun already is not supported", param="messages"
            )
        asked.return_token_ids |= asked.logprobs
        return Asked(
            asked.messages,
            asked.tools,
            asked.model,
            asked.max_tokens,
            asked.stops,
            asked.stream,
            asked.logprobs,
            sampling,
            notes,
            raw=asked,
        )

    def body(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        return self._whole(answer).body(asked.raw)

    def stream(self, asked: Asked, answer: Answer) -> bytes:
        """The answer as events without names."""
        return event_stream(self._whole(answer).chunks(asked.raw))

    def error(self, error: HTTPError) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: HTTPError) -> bytes:
        """The official client raises what stands under `error`."""
        return event_stream([error_body(error)])

    def _whole(self, answer: Answer) -> ChatAnswer:
        choice = Choice(answer.message, answer.completion, stop_reason=answer.stop)
        return ChatAnswer(answer.name, answer.model, list(answer.prompt_ids), [choice])
