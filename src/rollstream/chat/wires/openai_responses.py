"""OpenAI's responses API: requests read, answers written, whole or as a stream.

Source: https://platform.openai.com/docs/api-reference/responses. An answer of the model is one message here and
several items there: its thinking, its text, each of its calls. Items that come back are joined again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from rollstream.chat.messages import Part
from rollstream.chat.wires.exchange import (
    Answer,
    Asked,
    as_it_is,
    conversation,
    image,
    listed,
    may_call,
    named_events,
    take_wishes,
    text_of,
    tool_schema,
)
from rollstream.chat.wires.openai_chat import read_tools, token_names
from rollstream.chat.wires.requests import RequestError, error_body, read_parameters
from rollstream.trajectory import Message
from rollstream.web import HTTPError

_HARMLESS = frozenset(
    (
        "include",  # log-probs are read below; everything else is about tools that are not here
        "max_tool_calls",  # of OpenAI's own tools
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",  # a session knows its answers, whatever this says
        "stream_options",  # obfuscation
        "truncation",  # a conversation that is too long is refused, and so nothing is cut off unseen
        "user",
    )
)
_NEUTRAL: dict[str, Any] = {
    "background": False,
    "context_management": [],
    "top_logprobs": 0,
}
_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("system", "developer", "user", "assistant")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/responses`."""

    input: Any
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    stream: bool = False
    text: dict[str, Any] | None = None
    tool_choice: Any = "auto"
    tools: list[Any] = []


class ResponsesWire:
    """The API for agents whose calls are recorded."""

    prefix = "resp_"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: Mapping[str, Any], *, images: bool) -> Asked:
        """Reads a request."""
        given = dict(body)
        wishes = take_wishes(given, ("reasoning", "parallel_tool_calls"))
        asked = read_parameters(given, ResponsesRequest, harmless=_HARMLESS, neutral=_NEUTRAL)
        if asked.text and (verbosity := asked.text.get("verbosity")):
            wishes["verbosity"] = verbosity
        if ((asked.text or {}).get("format") or {"type": "text"}) != {"type": "text"}:
            raise RequestError(
                "text.format is supported with the value {'type': 'text'} only: nothing here makes an answer "
                "follow a schema",
                param="text.format",
            )
        tools = read_tools([_tool(one, where) for where, one in listed(asked.tools, "tools")])
        messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        messages = conversation([*messages, *_read_input(asked.input, images)], "input", as_it_is)
        if messages[-1]["role"] == "assistant":
            raise RequestError("the input must end with something to answer", param="input")
        include = given.get("include")
        return Asked(
            messages,
            tools if may_call(asked.tool_choice, asked.tool_choice) else [],
            asked.model,
            asked.max_output_tokens,
            stream=asked.stream,
            logprobs=isinstance(include, list) and _LOGPROBS in include,
            wishes=wishes,
            previous=asked.previous_response_id,
            has_instructions=bool(asked.instructions),
            raw=asked,
        )

    def body(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        whole = answer.completion
        usage = {
            "input_tokens": len(answer.prompt_ids),
            "input_tokens_details": {
                "cached_tokens": whole.cached_prompt_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": len(whole.token_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(answer.prompt_ids) + len(whole.token_ids),
        }
        return {
            **_head(asked, answer),
            "status": "incomplete" if answer.cut else "completed",
            "completed_at": None if answer.cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
            "output": _items(asked, answer),
            "usage": usage,
        }

    def stream(self, asked: Asked, answer: Answer) -> bytes:
        """The answer as events."""
        events = _events(self.body(asked, answer))
        return named_events({**event, "sequence_number": at} for at, event in enumerate(events))

    def error(self, error: HTTPError) -> dict[str, Any]:
        """OpenAI's shape."""
        return error_body(error)

    def error_event(self, error: HTTPError) -> bytes:
        """As OpenAI documents it, and with `error` as it sends it, which the official client raises."""
        body = error_body(error)
        kept = {name: body["error"][name] for name in ("code", "message", "param")}
        return named_events([{"type": "error", **kept, **body, "sequence_number": 0}])


def _tool(one: Mapping[str, Any], where: str) -> dict[str, Any]:
    if one.get("type") != "function":
        raise RequestError(
            f"{where} is of type {one.get('type')!r}: only functions of the client's are supported",
            param=where,
        )
    return tool_schema(one, "parameters")


def _read_input(given: Any, images: bool) -> list[Message]:
    """Items as messages of the chat API."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    open_turn: Message | None = None  # an answer's items go into one message
    for where, item in listed(given, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise RequestError(f"{where}.role is {role!r}, want one of {', '.join(_ROLES)}", param=where)
            content = _read_content(item.get("content"), f"{where}.content", images)
            if role != "assistant":
                messages.append({"role": role, "content": content})
                open_turn = None
                continue
            if open_turn is None or open_turn["content"] or "tool_calls" in open_turn:
                messages.append(open_turn := {"role": "assistant"})
            open_turn["content"] = content
        elif kind == "reasoning":
            if thought := _read_reasoning(item, where):
                messages.append(
                    open_turn := {"role": "assistant", "content": "", "reasoning_content": thought}
                )
        elif kind == "function_call":
            if open_turn is None:
                messages.append(open_turn := {"role": "assistant", "content": ""})
            function = {"name": text_of(item, "name", where)}
            call = {
                "id": text_of(item, "call_id", where),
                "type": "function",
                "function": {**function, "arguments": text_of(item, "arguments", where)},
            }
            open_turn.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _read_content(item.get("output"), f"{where}.output", images)
            messages.append(
                {"role": "tool", "tool_call_id": text_of(item, "call_id", where), "content": content}
            )
            open_turn = None
        else:
            more = ": send the item itself" if kind == "item_reference" else ""
            raise RequestError(f"{where} is of type {kind!r}, which is not supported{more}", param=where)
    return messages


def _read_content(content: Any, where: str, images: bool) -> str | list[Part]:
    if isinstance(content, str):
        return content
    parts: list[Part] = []
    for place, part in listed(content, where):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": text_of(part, "text", place)})
        elif kind == "refusal":
            parts.append({"type": "text", "text": text_of(part, "refusal", place)})
        elif kind == "input_image" and part.get("file_id") is None:
            parts.append(image(part.get("image_url"), place, allowed=images))
        else:
            raise RequestError(
                f"{place} is of type {kind!r}; only text and images are supported", param=place
            )
    return parts


def _read_reasoning(item: Mapping[str, Any], where: str) -> str:
    """Thinking that was said here stands in `content`; other servers put a summary of it beside."""
    parts = [*listed(item.get("content") or [], where), *listed(item.get("summary") or [], where)]
    return "".join(text_of(part, "text", place) for place, part in parts)


# Answers


def _head(asked: Asked, answer: Answer) -> dict[str, Any]:
    """What a response says from its beginning."""
    raw: ResponsesRequest = asked.raw
    return {
        "id": answer.name,
        "object": "response",
        "created_at": int(time.time()),
        "model": answer.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": raw.instructions,
        "max_output_tokens": raw.max_output_tokens,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": raw.previous_response_id,
        "text": {"format": {"type": "text"}},
        "tool_choice": raw.tool_choice,
        "tools": raw.tools,
        "truncation": "disabled",
        "usage": None,
    }


def _items(asked: Asked, answer: Answer) -> list[dict[str, Any]]:
    message, name = answer.message, answer.name.removeprefix(ResponsesWire.prefix)
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if message["content"] or not answer.calls:
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        if asked.logprobs:
            text["logprobs"] = _logprobs(answer)
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [text]})
    for at, (call_id, function, arguments) in enumerate(answer.calls):
        called = {"call_id": call_id, "name": function, "arguments": orjson.dumps(arguments).decode()}
        items.append({"type": "function_call", "id": f"fc_{name}_{at}", **called})
    last = len(items) - 1
    return [
        {**item, "status": "incomplete" if answer.cut and at == last else "completed"}
        for at, item in enumerate(items)
    ]


def _logprobs(answer: Answer) -> Sequence[dict[str, Any]]:
    """Of all sampled tokens, named by their ids as in the chat API; the text is what they make together."""
    ids = answer.completion.token_ids
    return [
        {"token": name, "logprob": logprob, "bytes": [], "top_logprobs": []}
        for name, logprob in zip(
            token_names(ids, None, as_ids=True), answer.completion.logprobs or (), strict=True
        )
    ]


def _events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each item its beginning, its parts and its end, between those of the response."""
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    begun |= {"completed_at": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for at, item in enumerate(body["output"]):
        place = {"output_index": at, "item_id": item["id"]}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {
            "type": "response.output_item.added",
            "output_index": at,
            "item": {**item, **empty, "status": "in_progress"},
        }
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
            yield {
                "type": "response.function_call_arguments.done",
                **place,
                "name": item["name"],
                "arguments": arguments,
            }
        else:
            yield from _content_events(item["content"][0], {**place, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _content_events(part: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    text, kind = part["text"], part["type"]
    more = {"logprobs": part.get("logprobs", [])} if kind == "output_text" else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    if text:
        yield {"type": f"response.{kind}.delta", **place, "delta": text, **more}
    yield {"type": f"response.{kind}.done", **place, "text": text, **more}
    yield {"type": "response.content_part.done", **place, "part": part}
