"""Anthropic's messages API: requests read, answers written, whole or as a stream.

Source: https://platform.claude.com/docs/en/api/messages.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

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
    named_events,
    read_tools,
    take_sampling,
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


class _Block(msgspec.Struct, tag_field="type"):
    pass


class _Message(msgspec.Struct, tag_field="role"):
    pass


class _Text(_Block, tag="text"):
    text: str


class _Thinking(_Block, tag="thinking"):
    thinking: str


class _ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _ImageSource(msgspec.Struct):
    type: Literal["base64", "url"]
    url: str | None = None
    media_type: str | None = None
    data: str | None = None


class _Image(_Block, tag="image"):
    source: _ImageSource


class _ToolReference(_Block, tag="tool_reference"):
    tool_name: str


class _ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text | _Image | _ToolReference] | None = None


class _System(_Message, tag="system"):
    content: str | list[_Text]


class _User(_Message, tag="user"):
    content: str | list[_Text | _Image | _ToolResultBlock]


class _Assistant(_Message, tag="assistant"):
    content: str | list[_Text | _Thinking | _ToolUse]


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/messages`."""

    messages: list[_System | _User | _Assistant]
    max_tokens: int
    model: str | None = None
    output_config: dict[str, Any] = {}
    stop_sequences: list[str] = []
    stream: bool = False
    system: str | list[_Text] = ""
    tool_choice: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "auto"})
    tools: list[dict[str, Any]] = []


class MessagesWire:
    """The API for agents whose calls are recorded."""

    prefix = "msg_"
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Mapping[str, Any], *, images: bool, strict: bool = False) -> Asked:
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
        texts = [asked.system] if isinstance(asked.system, str) else [block.text for block in asked.system]
        if texts and texts[0].startswith(_BILLING):
            texts[0] = texts[0].partition("\n")[2].lstrip("\n")
            notes["billing header"] = "left out"
        system = "\n".join(filter(None, texts))
        read: list[Message] = [{"role": "system", "content": system}] if system else []
        for message in asked.messages:
            read += _read_message(message, images, deferred)
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


def _read_tools(
    tools: list[dict[str, Any]], notes: Notes
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The client's tools, and by name those that are shown when a message refers to them."""
    schemas, is_deferred = [], []
    for tool in tools:
        if tool.get("type") not in (None, "custom") or (notes.strict and tool.get("defer_loading")):
            notes.leave_out_tool(tool)
        else:
            schemas.append(tool_schema(tool, "input_schema"))
            is_deferred.append(bool(tool.get("defer_loading")))
    read = [*zip(read_tools(schemas), is_deferred, strict=True)]
    deferred = {schema["function"]["name"]: schema for schema, later in read if later}
    return [schema for schema, later in read if not later], deferred


def _read_message(
    message: _System | _User | _Assistant, images: bool, deferred: Mapping[str, dict[str, Any]]
) -> Iterator[Message]:
    """Messages of the chat API: results of tools are messages of their own there."""
    if isinstance(message, _Assistant):
        yield _read_answer(message)
        return
    role = "user" if isinstance(message, _User) else "system"
    if isinstance(message.content, str):
        yield {"role": role, "content": message.content}
        return
    parts: list[Part] = []
    for block in message.content:
        if not isinstance(block, _ToolResultBlock):
            parts.append(_read_part(block, images, deferred))
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        content: Any = block.content or ""
        if not isinstance(content, str):
            content = [_read_part(part, images, deferred) for part in content]
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if parts or not message.content:
        yield {"role": role, "content": parts}


def _read_answer(answer: _Assistant) -> Message:
    blocks = [_Text(answer.content)] if isinstance(answer.content, str) else answer.content
    texts = [block.text for block in blocks if isinstance(block, _Text)]
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, _Thinking)]:
        message["reasoning_content"] = "".join(thoughts)
    if uses := [block for block in blocks if isinstance(block, _ToolUse)]:
        message["tool_calls"] = [
            {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.input}}
            for use in uses
        ]
    return message


def _read_part(
    block: _Text | _Image | _ToolReference, images: bool, deferred: Mapping[str, dict[str, Any]]
) -> Part:
    if isinstance(block, _Image):
        source = block.source
        is_data = source.type == "base64"
        url = f"data:{source.media_type};base64,{source.data}" if is_data else source.url
        return image(url, "messages", allowed=images)
    if isinstance(block, _Text):
        return {"type": "text", "text": block.text}
    schema = deferred.get(block.tool_name)  # what a search for tools has found is shown there
    return {"type": "text", "text": schema_json(schema).decode() if schema else block.tool_name}


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
        if block["type"] == "tool_use":
            partial = orjson.dumps(block["input"]).decode()
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": partial}
        else:
            kind = block["type"]  # text, or thinking: the key has the same name
            empty, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        yield {"type": "content_block_start", "index": at, "content_block": empty}
        yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": body["usage"]}
    yield {"type": "message_stop"}
