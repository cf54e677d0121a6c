"""OpenAI's responses API: requests read, answers written, whole or as a stream.

Source: https://platform.openai.com/docs/api-reference/responses. An answer of the model is one message here and
several items there: its thinking, its text, each of its calls. Items that come back are joined again.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
import orjson

from rollstream.chat.messages import Part
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
from rollstream.chat.wires.requests import RequestError, error_body
from rollstream.trajectory import Message
from rollstream.web import HTTPError


class _InputBlock(msgspec.Struct, tag_field="type"):
    pass


class _AnyText(msgspec.Struct):
    text: str


class _InputText(_InputBlock, tag="input_text"):
    text: str


class _OutputText(_InputBlock, tag="output_text"):
    text: str


class _PlainText(_InputBlock, tag="text"):
    text: str


class _Refusal(_InputBlock, tag="refusal"):
    text: str = msgspec.field(name="refusal")


class _InputImage(_InputBlock, tag="input_image"):
    image_url: str | None = None


_Content = str | list[_InputText | _OutputText | _PlainText | _Refusal | _InputImage]


class _Said(_InputBlock, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class _Reasoning(_InputBlock, tag="reasoning"):
    """Thinking that was said here stands in `content`; other servers put a summary of it beside."""

    content: list[_AnyText] | None = None
    summary: list[_AnyText] | None = None


class _Called(_InputBlock, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _Output(_InputBlock, tag="function_call_output"):
    call_id: str
    output: _Content | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/responses`."""

    input: str | list[_Said | _Reasoning | _Called | _Output]
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
    tools: list[dict[str, Any]] = []


class ResponsesWire:
    """The API for agents whose calls are recorded."""

    prefix = "resp_"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: Mapping[str, Any], *, images: bool, strict: bool = False) -> Asked:
        given, notes = dict(body), Notes(strict=strict)
        sampling = take_sampling(given)
        if given.pop("parallel_tool_calls", None) is False:
            notes["parallel_tool_calls"] = False
        if isinstance(items := given.get("input"), list):  # a message need not say that it is one
            given["input"] = [
                {"type": "message", **item} if isinstance(item, dict) else item for item in items
            ]
        asked = notes.read(given, ResponsesRequest)
        if asked.reasoning:
            notes["reasoning"] = asked.reasoning
        if verbosity := asked.text.get("verbosity"):
            notes["verbosity"] = verbosity
        if (form := asked.text.get("format") or {"type": "text"}) != {"type": "text"}:
            notes.add("text.format", form, "nothing here makes an answer follow a schema")
        if "message.output_text.logprobs" in asked.include:
            notes.add("include", asked.include, "log-probs are given by the chat API")
        tools, namespaces = _read_tools(asked.tools, notes)
        messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        messages += _read_input(asked, images, {own: shown for shown, own in namespaces.items()})
        messages = conversation(messages, "input")
        if messages[-1]["role"] == "assistant":
            raise RequestError("the input must end with something to answer", param="input")
        return Asked(
            messages,
            tools if notes.shows_tools(asked.tool_choice) else [],
            asked.model,
            asked.max_output_tokens,
            stream=asked.stream,
            sampling=sampling,
            notes=notes,
            namespaces=namespaces,
            previous=asked.previous_response_id,
            has_instructions=bool(asked.instructions),
            raw=asked,
        )

    def body(self, asked: Asked, answer: Answer) -> dict[str, Any]:
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
        events = _events(self.body(asked, answer))
        return named_events({**event, "sequence_number": at} for at, event in enumerate(events))

    def error(self, error: HTTPError) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: HTTPError) -> bytes:
        """As OpenAI documents it, and with `error` as it sends it, which the official client raises."""
        body = error_body(error)
        kept = {name: body["error"][name] for name in ("code", "message", "param")}
        return named_events([{"type": "error", **kept, **body, "sequence_number": 0}])


def _read_tools(
    tools: list[dict[str, Any]], notes: Notes
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The functions, those of namespaces included, and the namespaces; see `Asked.namespaces`."""
    functions: list[tuple[str, dict[str, Any]]] = []
    for tool in tools:
        members = tool.get("tools")
        if tool.get("type") == "namespace" and isinstance(members, list) and not notes.strict:
            functions += [(str(tool.get("name")), member) for member in members if isinstance(member, dict)]
        else:
            functions.append(("", {"type": None, **tool}))
    for _, tool in functions:
        if tool.get("type", "function") != "function":
            notes.leave_out_tool(tool)
    functions = [(space, tool) for space, tool in functions if tool.get("type", "function") == "function"]
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


def _read_input(asked: ResponsesRequest, images: bool, names: Mapping[tuple[str, str], str]) -> list[Message]:
    """Items as messages of the chat API. `names` has those by which tools of namespaces are shown."""
    if isinstance(asked.input, str):
        return [{"role": "user", "content": asked.input}]
    messages: list[Message] = []
    open_turn: Message | None = None  # an answer's items go into one message
    for item in asked.input:
        if isinstance(item, _Reasoning):
            if thought := "".join(part.text for part in (*(item.content or ()), *(item.summary or ()))):
                open_turn = {"role": "assistant", "content": "", "reasoning_content": thought}
                messages.append(open_turn)
        elif isinstance(item, _Called):
            if open_turn is None:
                messages.append(open_turn := {"role": "assistant", "content": ""})
            name = names.get((str(item.namespace), item.name), item.name)
            function = {"name": name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            open_turn.setdefault("tool_calls", []).append(call)
        elif isinstance(item, _Output):
            content = _read_content(item.output or "", images)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            open_turn = None
        elif item.role != "assistant":
            messages.append({"role": item.role, "content": _read_content(item.content, images)})
            open_turn = None
        else:
            if open_turn is None or open_turn["content"] or "tool_calls" in open_turn:
                messages.append(open_turn := {"role": "assistant"})
            open_turn["content"] = _read_content(item.content, images)
    return messages


def _read_content(content: _Content, images: bool) -> str | list[Part]:
    if isinstance(content, str):
        return content
    return [
        image(part.image_url, "input", allowed=images)
        if isinstance(part, _InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


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


def _events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each item its beginning, its parts and its end, between those of the response."""
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    begun |= {"completed_at": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for at, item in enumerate(body["output"]):
        place = {"output_index": at, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        added = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": at, "item": added}
        if is_call:
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{kind}.delta", **place, "delta": arguments}
            yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
        else:
            place, part = {**place, "content_index": 0}, item["content"][0]
            text, kind = part["text"], f"response.{part['type']}"
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
            if text:
                yield {"type": f"{kind}.delta", **place, "delta": text, **more}
            yield {"type": f"{kind}.done", **place, "text": text, **more}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}
