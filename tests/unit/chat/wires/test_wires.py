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
    assert asked.wishes["temperature"] == 0 and len(asked.wishes) == 2
    with pytest.raises(RequestError, match="sees none"):
        wire.read(BODIES[wire], images=False)


SHORT: dict[Wire, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}


@pytest.mark.parametrize(
    ("wire", "given", "words"),
    [
        (CHAT, {"n": 2}, "'n' is supported with the value 1 only"),
        (CHAT, {"tool_choice": "required"}, "use 'auto' or 'none'"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"logit_bias": {"3": 1}}, "logit_bias"),
        (CHAT, {"temperature": "hot"}, "temperature must be a number"),
        (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, "role is"),
        (CHAT, {"web_search_options": {}}, "'web_search_options' is not supported"),
        (RESPONSES, {"input": []}, "empty"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "send the item itself"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "only functions"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "add"}}, "use 'auto' or 'none'"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "follow a schema"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"conversation": "conv_1"}, "'conversation' is not supported"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools of the client's"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "follow a schema"),
        (
            MESSAGES,
            {"messages": [*SHORT[MESSAGES]["messages"], {"role": "assistant", "content": "It"}]},
            "prefill",
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        (
            MESSAGES,
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "redacted_thinking",
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
            "data: URL",
        ),
    ],
)
def test_what_would_change_an_answer_is_refused(wire: Wire, given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        wire.read({**SHORT[wire], **given}, images=True)


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


def test_log_probs_in_responses() -> None:
    message, completion, _ = ANSWERS["cut"]
    asked = RESPONSES.read({"input": "hi", "include": ["message.output_text.logprobs"]}, images=False)
    assert asked.logprobs
    (item,) = RESPONSES.body(asked, Answer("resp_1", "m", [1], message, completion))["output"]
    assert [one["logprob"] for one in item["content"][0]["logprobs"]] == [-0.5]


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
