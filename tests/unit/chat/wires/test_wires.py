"""The APIs that agents speak: one conversation in three forms, what is refused, and garbage."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.chat.wires.anthropic_messages import MessagesWire
from rollstream.chat.wires.exchange import Answer, Wire
from rollstream.chat.wires.openai_chat import ChatWire
from rollstream.chat.wires.openai_responses import ResponsesWire
from rollstream.chat.wires.requests import RequestError
from rollstream.errors import ConfigError
from rollstream.trajectory import Completion
from rollstream.web import HTTPError

CHAT, RESPONSES, MESSAGES = ChatWire(), ResponsesWire(), MessagesWire()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
TOOL = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HEARD = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is\n1 + 1?"},
    {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]},
]
"""What each of `BODIES` says."""

BODIES: dict[Wire, dict[str, Any]] = {
    CHAT: {
        "model": "theirs",
        "max_completion_tokens": 9,
        "temperature": 0,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": TOOL}],
        "messages": [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "1 + 1?"}],
            },
            {
                "role": "assistant",
                "content": "I add.",
                "reasoning_content": "hm",
                "tool_calls": [
                    {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}],
            },
        ],
    },
    RESPONSES: {
        "model": "theirs",
        "max_output_tokens": 9,
        "temperature": 0,
        "reasoning": {"effort": "low"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "instructions": "be brief",
        "tools": [{"type": "function", **TOOL, "strict": True}],
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what is"},
                    {"type": "input_text", "text": "1 + 1?"},
                ],
            },
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
            },
            {"type": "function_call", "id": "fc", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]},
        ],
    },
    MESSAGES: {
        "model": "theirs",
        "max_tokens": 9,
        "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "1"},
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA, "type": "custom"}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "1 + 1?"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": PIXEL.partition(",")[2],
                        },
                    },
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("wire", BODIES)
def test_a_conversation_is_the_same_by_whatever_api_it_comes(wire: Wire) -> None:
    asked = wire.read(BODIES[wire], images=True)
    assert asked.messages == HEARD
    assert asked.tools == [{"type": "function", "function": TOOL}]
    assert (asked.model, asked.max_tokens, asked.stream) == ("theirs", 9, False)
    assert asked.sampling == {"temperature": 0}
    with pytest.raises(RequestError, match="sees none"):
        wire.read(BODIES[wire], images=False)


SHORT: dict[Wire, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}


@pytest.mark.parametrize(
    ("wire", "given", "param"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"logit_bias": {"3": 1}}, "logit_bias"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (
            CHAT,
            {"messages": [*SHORT[CHAT]["messages"], {"role": "assistant", "content": "It", "prefix": True}]},
            "messages",
        ),
        (CHAT, {"functions": [{"name": "add"}]}, "functions"),
        (CHAT, {"documents": [{"text": "x"}]}, "documents"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": []}, "messages"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"role": "assistant", "content": "It"}]}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (RESPONSES, {"conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
        ),
        (MESSAGES, {"max_tokens": None}, None),
        (MESSAGES, {"thread": {"id": "t"}}, "thread"),
        (
            MESSAGES,
            {"messages": [*SHORT[MESSAGES]["messages"], {"role": "assistant", "content": "It"}]},
            "messages",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0]",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0]",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "url", "url": "/etc/passwd"}}],
                    }
                ]
            },
            "messages[0].content[0]",
        ),
    ],
)
def test_what_would_be_another_request_is_refused(
    wire: Wire, given: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(RequestError) as caught:
        wire.read({**SHORT[wire], **given}, images=True)
    if param is not None:
        assert (caught.value.param or "").startswith(param.partition("[")[0])


SCHEMA_FORM = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("wire", "given", "noted"),
    [
        (CHAT, {"tool_choice": "required"}, {"tool_choice"}),
        (CHAT, {"response_format": {"type": "json_object"}}, {"response_format"}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs"}),
        (CHAT, {"web_search_options": {}, "store": False}, {"web_search_options", "store"}),
        (CHAT, {"stream_options": {"include_usage": True}, "modalities": ["text"]}, set()),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "patch"}}]}, {"tool patch"}),
        (RESPONSES, {"client_metadata": {"x": "1"}, "background": True}, {"client_metadata", "background"}),
        (RESPONSES, {"text": {"format": SCHEMA_FORM, "verbosity": "low"}}, {"text.format", "verbosity"}),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "add"}}, {"tool_choice"}),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, {"include"}),
        (
            RESPONSES,
            {"tools": [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "local_shell"}]},
            {"tool web_search", "tool patch", "tool local_shell"},
        ),
        (MESSAGES, {"tool_choice": {"type": "any"}}, {"tool_choice"}),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, {"tool bash"}),
        (
            MESSAGES,
            {"output_config": {"format": SCHEMA_FORM, "effort": "high"}},
            {"output_config.format", "effort"},
        ),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "container": "c"}, {"thinking", "container"}),
    ],
)
def test_what_changes_no_answer_is_noted(wire: Wire, given: dict[str, Any], noted: set[str]) -> None:
    asked = wire.read({**SHORT[wire], **given}, images=True)
    assert (set(asked.notes), asked.tools) == (noted, [])
    if noted - {"store", "verbosity", "effort", "thinking", "client_metadata"}:
        with pytest.raises(RequestError):
            wire.read({**SHORT[wire], **given}, images=True, strict=True)


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
@pytest.mark.parametrize("wire", BODIES)
def test_a_tool_without_arguments(wire: Wire, parameters: Any) -> None:
    flat = {"name": "now", "parameters": parameters}
    tool = {
        CHAT: {"type": "function", "function": flat},
        RESPONSES: {"type": "function", **flat},
        MESSAGES: {"name": "now", "input_schema": parameters},
    }[wire]
    (read,) = wire.read({**SHORT[wire], "tools": [tool]}, images=False).tools
    assert read["function"] == {"name": "now", "parameters": {"type": "object", "properties": {}}}


def test_tools_of_a_namespace_are_functions() -> None:
    """They keep their names where these differ, and their calls name the namespace, as Codex reads it."""

    def space(name: str, *tools: str) -> dict[str, Any]:
        members = [{"type": "function", "name": tool, "parameters": SCHEMA} for tool in tools]
        return {"type": "namespace", "name": name, "description": "", "tools": members}

    tools = [{"type": "function", "name": "find", "parameters": SCHEMA}, space("team", "ask", "find")]
    called = {
        "type": "function_call",
        "call_id": "c1",
        "namespace": "team",
        "name": "find",
        "arguments": "{}",
    }
    result = {"type": "function_call_output", "call_id": "c1", "output": "7"}
    asked = RESPONSES.read({"tools": tools, "input": [called, result]}, images=False)
    assert [tool["function"]["name"] for tool in asked.tools] == ["find", "ask", "team__find"]
    message = asked.messages[0]
    assert message["tool_calls"][0]["function"]["name"] == "team__find"
    answer = Answer("resp_1", "m", [1], message, Completion([5], [-0.5], "stop"))
    (item,) = RESPONSES.body(asked, answer)["output"]
    assert {**item, **called} == item
    assert b'"namespace":"team"' in RESPONSES.stream(asked, answer)


def test_a_deferred_tool_is_shown_where_a_result_names_it() -> None:
    def tool(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "input_schema": SCHEMA, **more}

    found = [{"type": "tool_reference", "tool_name": "late"}]
    call = {"type": "tool_use", "id": "c1", "name": "search", "input": {}}
    messages = [
        *SHORT[MESSAGES]["messages"],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": found}]},
    ]
    tools = [tool("search"), tool("late", defer_loading=True), tool("later", defer_loading=True)]
    asked = MESSAGES.read({**SHORT[MESSAGES], "tools": tools, "messages": messages}, images=False)
    assert [one["function"]["name"] for one in asked.tools] == ["search"]
    assert orjson.loads(asked.messages[-1]["content"]) == asked.deferred[0]
    assert "later" not in asked.messages[-1]["content"]


BILLING = "x-anthropic-billing-header: v=1; c=0f3;"


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": text} for text in (BILLING, "be brief")],
        [{"type": "text", "text": f"{BILLING}\nbe brief"}],
        f"{BILLING}\n\nbe brief",
    ],
)
def test_a_billing_line_is_left_out_and_a_system_message_may_be_the_last(role: str, system: Any) -> None:
    messages = [*SHORT[MESSAGES]["messages"], {"role": role, "content": "in /tmp"}]
    asked = MESSAGES.read({**SHORT[MESSAGES], "system": system, "messages": messages}, images=False)
    assert [message["content"] for message in asked.messages] == ["be brief", "hi", "in /tmp"]


def test_answers_that_follow_each_other_stay_apart() -> None:
    """Items of one answer are joined; the next thinking, or text behind a text or a call, begins another one."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "a"}
    called = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{broken"}
    items = [said, called, said, thought, thought, called, {"role": "user", "content": "b"}]
    read = RESPONSES.read({"input": items}, images=False).messages
    call = {**CALL, "function": {"name": "add", "arguments": "{broken"}}
    empty = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert read == [{**said, "tool_calls": [call]}, said, empty, {**empty, "tool_calls": [call]}, items[-1]]


ANSWERS = {
    "call": (
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        Completion([5, 6], [-0.5, -0.25], "stop", cached_prompt_tokens=1),
        None,
    ),
    "empty": ({"role": "assistant", "content": ""}, Completion([6], [-1.0], "stop"), None),
    "cut": ({"role": "assistant", "content": "ab"}, Completion([5], [-0.5], "length"), None),
    "stopped": ({"role": "assistant", "content": "ab"}, Completion([5], [-0.5], "stop"), "\n"),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("wire", BODIES)
def test_an_answer_that_is_echoed_is_the_same_message(wire: Wire, kind: str) -> None:
    message, completion, stop = ANSWERS[kind]
    asked = wire.read({**SHORT[wire], "stream": True}, images=False)
    body = wire.body(asked, Answer(wire.prefix + "1", "m", [1, 2, 3], message, completion, stop))
    echo: dict[str, Any]
    if wire is CHAT:
        (choice,) = body["choices"]
        echo = {"messages": [choice["message"], *SHORT[CHAT]["messages"]]}
        end = choice["finish_reason"], choice["stop_reason"]
        expected = {"call": ("tool_calls", None), "cut": ("length", None), "stopped": ("stop", "\n")}
    elif wire is RESPONSES:
        echo = {"input": [*body["output"], {"role": "user", "content": "hi"}]}
        end = body["status"], (body["incomplete_details"] or {}).get("reason")
        expected = {"cut": ("incomplete", "max_output_tokens"), "empty": ("completed", None)}
    else:
        echo = {"messages": [{"role": "assistant", "content": body["content"]}, *SHORT[MESSAGES]["messages"]]}
        end = body["stop_reason"], body["stop_sequence"]
        expected = {
            "call": ("tool_use", None),
            "empty": ("end_turn", None),
            "cut": ("max_tokens", None),
            "stopped": ("stop_sequence", "\n"),
        }
    assert wire.read({**SHORT[wire], **echo}, images=False).messages[0] == message
    assert end == expected.get(kind, end)
    usage = body["usage"]
    if wire is MESSAGES:
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 3
    assert 3 + len(completion.token_ids) in (usage.get("total_tokens"), 3 + usage.get("output_tokens", 0))


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "bad_request", "invalid_request_error"),
        (401, "unauthorized", "authentication_error"),
        (404, "not_found", "not_found_error"),
        (413, "too_large", "request_too_large"),
        (429, "rate_limit_exceeded", "rate_limit_error"),
        (500, "internal", "api_error"),
        (503, "busy", "overloaded_error"),
    ],
)
def test_errors_have_the_types_that_anthropics_client_knows(status: int, code: str, kind: str) -> None:
    body = MESSAGES.error(HTTPError(status, "why", code))
    assert body == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_a_prompt_that_is_too_long_is_said_in_the_words_of_each_api() -> None:
    error = HTTPError(400, "no room", "context_length_exceeded", "messages")
    assert MESSAGES.error(error)["error"]["message"].startswith("prompt is too long")
    assert RESPONSES.error(error)["error"]["code"] == "context_length_exceeded"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLACES = st.lists(st.integers(0, 9), min_size=1, max_size=7)
ROUTES = {CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses", MESSAGES: "/v1/messages"}


def changed(value: Any, where: list[int], by: Any) -> Any:
    """The value with something else in one place."""
    if not where or not value or not isinstance(value, dict | list):
        return by
    keys = list(value) if isinstance(value, dict) else range(len(value))
    at = keys[where[0] % len(keys)]
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[at] = changed(value[at], where[1:], by)
    return copy


@given(st.sampled_from(list(BODIES)), PLACES, JSON)
@settings(max_examples=300)
def test_garbage_is_refused_or_read(wire: Wire, where: list[int], by: Any) -> None:
    body = changed(BODIES[wire], where, by)
    try:
        asked = wire.read(body, images=True)
    except (HTTPError, ConfigError):
        return
    orjson.dumps([asked.messages, asked.tools])
