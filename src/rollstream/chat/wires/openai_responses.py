"""OpenAI's responses API: requests read, answers written, whole or as a stream.

Source: https://platform.openai.com/docs/api-reference/responses. An answer of the model is one message here and
several items there: its thinking, its text, each of its calls. Items that come back are joined again.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from rollstream.chat.messages import Part
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
from rollstream.chat.wires.openai_chat import token_names
from rollstream.chat.wires.requests import RequestError, error_body
from rollstream.trajectory import Message
from rollstream.web import HTTPError

_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("system", "developer", "user", "assistant")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/responses`."""

    input: Any
    include: list[Any] = []
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    stream: bool = False
    stream_options: Any = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[Any] = []


class ResponsesWire:
    """The API for agents whose calls are recorded."""

    prefix = "resp_"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: Mapping[str, Any], *, images: bool, strict: bool = False) -> Asked:
        """Reads a request."""
        given, notes = dict(body), Notes(strict=strict)
        sampling = take_sampling(given)
        if given.pop("parallel_tool_calls", None) is False:
            notes["parallel_tool_calls"] = False
        asked = notes.read(given, ResponsesRequest)
        if asked.reasoning:
            notes["reasoning"] = asked.reasoning
        if verbosity := asked.text.get("verbosity"):
            notes["verbosity"] = verbosity
        if (form := asked.text.get("format") or {"type": "text"}) != {"type": "text"}:
            notes.add("text.format", form, "nothing here makes an answer follow a schema")
        tools, namespaces = _read_tools(asked.tools, notes)
        messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        messages += _read_input(asked.input, images, {own: shown for shown, own in namespaces.items()})
        messages = conversation(messages, "input")
        if messages[-1]["role"] == "assistant":
            raise RequestError("the input must end with something to answer", param="input")
        return Asked(
            messages,
            tools if notes.shows_tools(asked.tool_choice) else [],
            asked.model,
            asked.max_output_tokens,
            stream=asked.stream,
            logprobs=_LOGPROBS in asked.include,
            sampling=sampling,
            notes=notes,
            namespaces=namespaces,
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


def _read_tools(tools: Any, notes: Notes) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The functions, those of namespaces included, and the namespaces; see `Asked.namespaces`."""
    functions: list[tuple[str, Mapping[str, Any]]] = []
    for where, tool in listed(tools, "tools"):
        if tool.get("type") == "function":
            functions.append(("", tool))
        elif tool.get("type") == "namespace" and not notes.strict:
            for place, member in listed(tool.get("tools"), f"{where}.tools"):
                if member.get("type", "function") == "function":
                    functions.append((text_of(tool, "name", where), member))
                else:
                    notes.leave_out_tool(member, place)
        else:
            notes.leave_out_tool(tool, where)
    names = Counter(str(tool.get("name")) for _, tool in functions)
    shown, namespaces = [], {}
    for namespace, function in functions:
        schema, name = tool_schema(function, "parameters"), str(function.get("name"))
        if namespace:
            shown_name = name if names[name] == 1 else f"{namespace}__{name}"
            schema["function"]["name"] = shown_name
            namespaces[shown_name] = namespace, name
        shown.append(schema)
    return read_tools(shown), namespaces


def _read_input(given: Any, images: bool, names: Mapping[tuple[str, str], str]) -> list[Message]:
    """Items as messages of the chat API. `names` has those by which tools of namespaces are shown."""
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
            name = text_of(item, "name", where)
            function = {"name": names.get((str(item.get("namespace")), name), name)}
            call = {
                "id": text_of(item, "call_id", where),
                "type": "function",
                "function": {**function, "arguments": text_of(item, "arguments", where)},
            }
            open_turn.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _read_content(item.get("output") or "", f"{where}.output", images)
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
        if function in asked.namespaces:
            called["namespace"], called["name"] = asked.namespaces[function]
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
