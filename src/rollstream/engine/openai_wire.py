"""The wire of `/v1/chat/completions`: messages out, a message back in pieces.

Source: https://platform.openai.com/docs/api-reference/chat; `reasoning_content` is DeepSeek's, SGLang's and
older vLLM's name for thinking, `reasoning` newer vLLM's and OpenRouter's. `continue_final_message` is vLLM's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from yarl import URL

from rollstream.engine.base import ChatPrompt
from rollstream.engine.http_server import base_url
from rollstream.errors import ConfigError, EngineError, TransientEngineError
from rollstream.sampling import bias_by_id, schema_text
from rollstream.trajectory import FinishReason, Message, SamplingParams

EXTRA_SAMPLING = ("frequency_penalty", "json_schema", "logit_bias", "presence_penalty")
"""Further sampling parameters that OpenAI's API has; others go by `extra_body`."""

OWN_FIELDS = frozenset(
    (
        *(
            "model",
            "messages",
            "tools",
            "stream",
            "stream_options",
            "n",
            "seed",
            "stop",
            "temperature",
            "top_p",
        ),
        *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
        *("continue_final_message", "add_generation_prompt"),
    )
)
"""Fields of a request that are said here, or that would change what an answer is read as."""

MAY_BE_OMITTED = ("temperature", "top_p", "stream_options", "seed")
"""Some models refuse a field even with the value that is its default."""

_STOPPED = frozenset(("stop", "tool_calls", "function_call", "eos", "end_turn", "stop_sequence"))
"""The first two are OpenAI's; the others are what endpoints say that pass on another server's word."""

_MAX_CALLS = 128
"""Calls in one answer, as OpenAI bounds tools. An index beyond is no index."""


def endpoint_url(url: str) -> str:
    """The URL in front of `/chat/completions`: as given, or with `/v1` where it names only a host.

    Raises:
        ConfigError: no such URL, or one that would put a secret into logs.
    """
    url = base_url(url)
    parsed = URL(url)
    if parsed.user or parsed.password or parsed.query_string or parsed.fragment:
        raise ConfigError(
            f"server URL of {parsed.host}: give the key by engine_kwargs.api_key_env, not in the URL, and "
            "neither user nor query: URLs are written into logs"
        )
    url = url.removesuffix("/chat/completions")
    return f"{url}/v1" if parsed.path in ("", "/") else url


def request_fields(
    model: str,
    prompt: ChatPrompt,
    sampling: SamplingParams,
    *,
    max_tokens_key: str,
    omit: Sequence[str] = (),
    extra_body: Mapping[str, Any] | None = None,
    send_reasoning: bool = False,
    partial: str = "",
    partial_tokens: int = 0,
) -> dict[str, Any]:
    """The body of a request.

    Args:
        model: as the endpoint calls it.
        prompt: what is asked.
        sampling: how. A chat endpoint knows no top-k, stop ids or log-probs of ids.
        max_tokens_key: `max_tokens` or `max_completion_tokens`.
        omit: of `MAY_BE_OMITTED`: left out where they have their default value.
        extra_body: further fields, as they are.
        send_reasoning: whether earlier answers are sent with their thinking.
        partial: text of an answer that was cut off, to be gone on with.
        partial_tokens: about as many tokens are in it.

    Raises:
        EngineError: asks for what no chat endpoint can give.
    """
    if sampling.logprobs or sampling.stop_token_ids or sampling.top_k != -1 or sampling.ignore_eos:
        raise EngineError(
            "a chat endpoint gives no log-probs of token ids and knows neither stop_token_ids, top_k nor "
            "ignore_eos"
        )
    messages = wire_messages(prompt.messages, prompt.images, send_reasoning=send_reasoning)
    fields: dict[str, Any] = {
        "model": model,
        "messages": messages,
        max_tokens_key: max(1, sampling.max_tokens - partial_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    extra = dict(sampling.extra)
    if "json_schema" in extra:
        schema = {
            "name": "answer",
            "schema": orjson.loads(schema_text(extra.pop("json_schema"))),
            "strict": True,
        }
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if "logit_bias" in extra:
        extra["logit_bias"] = bias_by_id(extra["logit_bias"])
    fields |= extra
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if prompt.tools:
        fields["tools"] = list(prompt.tools)
    if partial:
        messages.append({"role": "assistant", "content": partial})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    for name in omit:
        if name in ("stream_options", "seed") or fields.get(name) == 1.0:
            fields.pop(name, None)
    return {**fields, **(extra_body or {})}


def wire_messages(
    messages: Sequence[Message], images: Sequence[object] = (), *, send_reasoning: bool = False
) -> list[Message]:
    """Messages as endpoints take them: arguments of calls as JSON text, images as `data:` URLs.

    Raises:
        EngineError: another number of image parts than of images.
    """
    left = iter(images)
    try:
        sent = [_wire_message(message, left, send_reasoning=send_reasoning) for message in messages]
    except StopIteration:
        raise EngineError("the messages have more image parts than there are images") from None
    if next(left, None) is not None:
        raise EngineError("there are more images than image parts in the messages")
    return sent


def _wire_message(message: Message, images: Any, *, send_reasoning: bool) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = [_wire_part(part, images) for part in content]
    sent: Message = {"role": message["role"], "content": content}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            sent[name] = message[name]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_wire_call(call) for call in calls]
        sent["content"] = content or None
    if send_reasoning and message.get("reasoning_content"):
        sent["reasoning_content"] = message["reasoning_content"]
    return sent


def _wire_part(part: Any, images: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
        return {"type": "image_url", "image_url": {"url": next(images)}}
    return part


def _wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) and not isinstance(_json(arguments), dict):
        # What the model wrote is no JSON object. Some servers read the history and refuse it, so it is
        # wrapped; the result that follows says that it could not be read.
        arguments = {"unreadable": arguments}
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": text},
    }


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Turn:
    """An answer as it arrives. `content` may begin with what an earlier request got."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, _Call] = field(default_factory=dict)
    finish_reason: str | None = None
    pieces: int = 0
    """Chunks with text: a server that streams token by token has sent about as many tokens."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """As the endpoint counts them; None while it has not said."""
    cached_tokens: int = 0

    def begin_again(self, *, keep_text: bool) -> None:
        """Forgets a try that was cut off, but for the text if that can be gone on with."""
        if self.calls or self.reasoning or not keep_text:
            self.content, self.pieces = "", 0
        self.reasoning, self.calls, self.finish_reason = "", {}, None
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = None, None, 0

    @property
    def begun(self) -> bool:
        """Whether anything of an answer is there."""
        return bool(self.content or self.reasoning or self.calls)

    @property
    def total_tokens(self) -> int | None:
        """Of prompt and answer, as the endpoint counts them."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Takes in one chunk of a stream, or a whole answer.

        Raises:
            TransientEngineError: it is none.
        """
        try:
            self._add_usage(chunk.get("usage"))
            for choice in chunk.get("choices") or ():
                if choice.get("index", 0) != 0:
                    continue
                self._add_delta(choice.get("delta") or choice.get("message") or {})
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TransientEngineError(f"a chunk that cannot be read ({error!r})") from error

    def message(self) -> Message:
        """The answer so far; arguments of calls are text, as the model wrote them."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for _, call in sorted(self.calls.items())
            ]
        return message

    def _add_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _whole(usage.get("prompt_tokens"), self.prompt_tokens)
        self.completion_tokens = _whole(usage.get("completion_tokens"), self.completion_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _whole(details.get("cached_tokens"), None) or 0

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        text = _text(delta.get("content")) + _text(delta.get("refusal"))
        reasoning = _text(delta.get("reasoning_content") or delta.get("reasoning"))
        self.content += text
        self.reasoning += reasoning
        self.pieces += bool(text or reasoning)
        for at, part in enumerate(delta.get("tool_calls") or ()):
            self._add_call(at, part)

    def _add_call(self, at: int, part: Mapping[str, Any]) -> None:
        index = part.get("index")
        if index is None:
            # Some endpoints send whole calls without an index: one with an id begins a new call.
            index = len(self.calls) if part.get("id") or not self.calls else max(self.calls)
        if not isinstance(index, int) or not 0 <= index < _MAX_CALLS:
            raise ValueError(f"a tool call at index {index!r:.50}")
        call = self.calls.setdefault(index, _Call())
        function = part.get("function") or {}
        call.id = _text(part.get("id")) or call.id
        call.name += _text(function.get("name")) if not call.name else ""
        arguments = function.get("arguments")
        call.arguments += (
            arguments
            if isinstance(arguments, str)
            else ""
            if arguments is None
            else orjson.dumps(arguments).decode()
        )
        self.pieces += 1


def finish_reason(turn: Turn, server: str) -> FinishReason | None:
    """Why an answer ended; None for an end that nobody asked for (`abort`, or none said).

    Raises:
        EngineError: the endpoint's content filter ended it: asking again would not help.
        TransientEngineError: a reason that is not known.
    """
    reason: object = turn.finish_reason  # whatever the endpoint wrote there
    if isinstance(reason, str) and reason in _STOPPED:
        return "stop"
    if reason == "length":
        return "length"
    if reason == "content_filter":
        raise EngineError(f"{server}: the endpoint's content filter ended the answer (content_filter)")
    if reason is None or reason == "abort":
        return None
    raise TransientEngineError(f"{server}: the answer ended for an unknown reason: {reason!r:.100}")


DONE: dict[str, Any] = {}
"""What `read_event` gives for the end of a stream."""


def read_event(line: bytes, shown: Callable[[str], str] = str) -> dict[str, Any] | None:
    """The event in a line of a stream; `DONE` for its end, None where there is none.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html. Comments and other fields are
    passed over; each `data:` line is an event of its own, as every chat endpoint sends it. Half an event, in a
    last line without an end, counts as none: the answer was cut off there.

    Args:
        line: with its end.
        shown: a text of the endpoint's as it may be shown: some repeat the API key.

    Raises:
        TransientEngineError: the event is no JSON object.
    """
    if not line.startswith(b"data:"):
        return None
    payload = line[5:].strip()
    if payload == b"[DONE]":
        return DONE
    value = _json(payload)
    if isinstance(value, dict):
        return value
    if not line.endswith(b"\n"):
        return None
    text = shown(payload.decode(errors="replace"))  # whole: half a key would not be found
    raise TransientEngineError(f"an event that is no JSON object: {text[:100]!r}")


def error_code(payload: bytes | Mapping[str, Any]) -> str:
    """The code, or else the type, of an error in OpenAI's form; "" where there is none."""
    value = _json(payload) if isinstance(payload, bytes) else payload
    error = value.get("error") if isinstance(value, Mapping) else None
    if not isinstance(error, Mapping):
        return ""
    return str(error.get("code") or error.get("type") or "")


def _json(text: bytes | str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _text(value: Any) -> str:
    """Text, or the text of parts."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in value if isinstance(part, dict))
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text should be")
    return value


def _whole(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
