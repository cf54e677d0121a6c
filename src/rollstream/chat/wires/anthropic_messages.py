"""Anthropic's messages API: requests read, answers written, whole or as a stream.

Source: https://platform.claude.com/docs/en/api/messages.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import orjson

from rollstream.chat.messages import Part
from rollstream.chat.tool_schema import schema_json
from rollstream.chat.wires.exchange import (
    Answer,
    Asked,
    Notes,
    conversation,
    image,
    listed,
    named_events,
    read_tools,
    take_sampling,
    text_of,
    tool_schema,
)
from rollstream.chat.wires.requests import RequestError
from rollstream.trajectory import Message
from rollstream.web import HTTPError

_HINTS = ("thinking", "context_management")
"""How much to think, and what to forget of it: the model and its template decide that."""
_BILLING = "x-anthropic-billing-header:"
"""Begins Claude Code's system prompt: a line for the provider, with another checksum in each call."""
_NO_THREADS = "thread_unsupported_request"
"""By this code, the tool runner of the official client goes on without one."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/messages`."""

    messages: list[Any]
    max_tokens: int
    model: str | None = None
    output_config: dict[str, Any] = {}
    stop_sequences: list[str] = []
    stream: bool = False
    system: Any = ""
    tool_choice: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "auto"})
    tools: list[Any] = []


class MessagesWire:
    """The API for agents whose calls are recorded."""

    prefix = "msg_"
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Mapping[str, Any], *, images: bool, strict: bool = False) -> Asked:
        """Reads a request."""
        given, notes = dict(body), Notes(strict=strict)
        if given.get("thread"):
            raise RequestError(
                "threads are not held here: send all messages", param="thread", code=_NO_THREADS
            )
        sampling = take_sampling(given)
        notes.update({name: value for name in _HINTS if (value := given.pop(name, None)) is not None})
        asked = notes.read(given, MessagesRequest)
        if (form := asked.output_config.get("format")) is not None:
            notes.add("output_config.format", form, "nothing here makes an answer follow a schema")
        if effort := asked.output_config.get("effort"):
            notes["effort"] = effort
        if asked.tool_choice.get("disable_parallel_tool_use"):
            notes["parallel_tool_calls"] = False
        tools, deferred = _read_tools(asked.tools, notes)
        system = _read_content(asked.system, "system", images=False)
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        if blocks and blocks[0]["text"].startswith(_BILLING):
            rest = blocks[0]["text"].partition("\n")[2].lstrip("\n")
            system = [{"type": "text", "text": rest}, *blocks[1:]] if rest else blocks[1:]
            notes["billing header"] = "left out"
        read: list[Message] = [{"role": "system", "content": system}] if system else []
        for where, message in listed(asked.messages, "messages"):
            read += _read_message(message, where, images, deferred)
        messages = conversation(read, "messages")
        if messages[-1]["role"] == "assistant":
            raise RequestError(
                "the conversation must end with a user message: an answer that is begun already (prefill) is "
                "not supported",
                param="messages",
            )
        shows_tools = notes.shows_tools(asked.tool_choice)
        return Asked(
            messages,
            tools if shows_tools else [],
            asked.model,
            asked.max_tokens,
            tuple(asked.stop_sequences),
            asked.stream,
            sampling=sampling,
            notes=notes,
            deferred=[*deferred.values()] if shows_tools else [],
            raw=asked,
        )

    def body(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        cached = answer.completion.cached_prompt_tokens
        reason = "end_turn"
        if answer.calls:
            reason = "tool_use"
        elif answer.stop is not None:
            reason = "stop_sequence"
        return {
            "id": answer.name,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": _blocks(answer),
            "stop_reason": "max_tokens" if answer.cut else reason,
            "stop_sequence": answer.stop,
            "usage": {
                "input_tokens": len(answer.prompt_ids) - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": len(answer.completion.token_ids),
            },
        }

    def stream(self, asked: Asked, answer: Answer) -> bytes:
        """The answer as events."""
        return named_events(_events(self.body(asked, answer)))

    def error(self, error: HTTPError) -> dict[str, Any]:
        """Anthropic's shape and types."""
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
        text = str(error)
        if error.code == "context_length_exceeded":
            text = f"prompt is too long: {text}"  # the words that clients look for
        body: dict[str, Any] = {"type": _KINDS.get(error.status, kind), "message": text}
        if error.code == _NO_THREADS:
            body["details"] = {"error_code": _NO_THREADS, "unsupported": ["thread"]}
        return {"type": "error", "error": body}

    def error_event(self, error: HTTPError) -> bytes:
        """The official client raises it."""
        return named_events([self.error(error)])


def _read_tools(tools: Any, notes: Notes) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The client's tools, and by name those that are shown when a message refers to them."""
    schemas, is_deferred = [], []
    for where, tool in listed(tools, "tools"):
        if tool.get("type") not in (None, "custom") or (notes.strict and tool.get("defer_loading")):
            notes.leave_out_tool(tool, where)
        else:
            schemas.append(tool_schema(tool, "input_schema"))
            is_deferred.append(bool(tool.get("defer_loading")))
    read = [*zip(read_tools(schemas), is_deferred, strict=True)]
    deferred = {schema["function"]["name"]: schema for schema, later in read if later}
    return [schema for schema, later in read if not later], deferred


def _read_content(
    content: Any, where: str, images: bool, deferred: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> str | list[Part]:
    if isinstance(content, str):
        return content
    parts = []
    for place, block in listed(content, where):
        if block.get("type") == "tool_reference":  # what a search for tools has found is shown there
            name = text_of(block, "tool_name", place)
            text = schema_json(deferred[name]).decode() if name in deferred else name
            parts.append({"type": "text", "text": text})
        else:
            parts.append(_read_part(block, place, images))
    return parts


def _read_message(
    message: Mapping[str, Any], where: str, images: bool, deferred: Mapping[str, dict[str, Any]]
) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return [{"role": "system", "content": _read_content(content, f"{where}.content", images=False)}]
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role is {role!r}, want user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = listed(content, f"{where}.content")
    return [_read_answer(blocks)] if role == "assistant" else list(_read_user(blocks, images, deferred))


def _read_answer(blocks: Iterator[tuple[str, dict[str, Any]]]) -> Message:
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(text_of(block, "text", where))
        elif kind == "thinking":
            thoughts.append(text_of(block, "thinking", where))
        elif kind == "tool_use" and isinstance(block.get("input"), dict):
            function = {"name": text_of(block, "name", where), "arguments": block["input"]}
            calls.append({"id": text_of(block, "id", where), "type": "function", "function": function})
        else:
            raise RequestError(f"{where} is of type {kind!r}, which an answer of here has not", param=where)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(
    blocks: Iterator[tuple[str, dict[str, Any]]], images: bool, deferred: Mapping[str, dict[str, Any]]
) -> Iterator[Message]:
    """A user's message; results of tools in it are messages of their own."""
    parts: list[Part] = []
    some = False
    for where, block in blocks:
        some = True
        if block.get("type") != "tool_result":
            parts.append(_read_part(block, where, images))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        content = _read_content(block.get("content") or "", f"{where}.content", images, deferred)
        yield {"role": "tool", "tool_call_id": text_of(block, "tool_use_id", where), "content": content}
    if parts or not some:
        yield {"role": "user", "content": parts}


def _read_part(block: Mapping[str, Any], where: str, images: bool) -> Part:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": text_of(block, "text", where)}
    if kind != "image" or not isinstance(source, dict):
        raise RequestError(f"{where} is of type {kind!r}; only text and images are supported", param=where)
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return image(url, where, allowed=images)


# Answers


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thought := answer.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if answer.message["content"]:
        blocks.append({"type": "text", "text": answer.message["content"]})
    return blocks + [
        {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        for call_id, name, arguments in answer.calls
    ]


def _events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**body, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**body["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": begun}
    for at, block in enumerate(body["content"]):
        kind = block["type"]
        empty: dict[str, Any]
        if kind == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        elif kind == "thinking":
            empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            partial = orjson.dumps(block["input"]).decode()
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": partial}
        yield {"type": "content_block_start", "index": at, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": body["usage"]}
    yield {"type": "message_stop"}
