from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollstream.engine.base import ChatPrompt
from rollstream.engine.openai_wire import (
    DONE,
    Turn,
    endpoint_url,
    error_code,
    finish_reason,
    read_event,
    request_fields,
    wire_messages,
)
from rollstream.errors import ConfigError, EngineError, TransientEngineError
from rollstream.trajectory import SamplingParams

HOW = SamplingParams(32, temperature=0.7, top_p=0.9, logprobs=False)
ASK = ChatPrompt([{"role": "user", "content": "2 + 3 ="}], [1, 2, 3])


def fields(prompt: ChatPrompt = ASK, sampling: SamplingParams = HOW, **options: Any) -> dict[str, Any]:
    return request_fields("m", prompt, sampling, **{"max_tokens_key": "max_tokens", **options})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://openrouter.ai/api/v1", "https://openrouter.ai/api/v1"),
        ("https://x.com/v1beta/openai", "https://x.com/v1beta/openai"),
        ("https://x.com/v1/chat/completions", "https://x.com/v1"),
    ],
)
def test_urls_with_and_without_v1(url: str, expected: str) -> None:
    assert endpoint_url(url) == expected


@pytest.mark.parametrize("url", ["https://key:secret@x.com/v1", "https://x.com/v1?key=secret", "x.com/v1"])
def test_no_secret_in_a_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint_url(url)
    assert "secret" not in str(caught.value)


def test_a_request_says_how_to_sample() -> None:
    assert fields() == {
        "model": "m",
        "messages": [{"role": "user", "content": "2 + 3 ="}],
        "max_tokens": 32,
        "temperature": 0.7,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    more = fields(
        ChatPrompt(ASK.messages, [1], tools=[{"type": "function"}]),
        SamplingParams(5, logprobs=False, seed=3, stop=("a", "b"), extra={"presence_penalty": 0.5}),
        max_tokens_key="max_completion_tokens",
        omit=["temperature", "top_p", "stream_options"],
        extra_body={"top_k": 20},
    )
    assert more == {
        "model": "m",
        "messages": [{"role": "user", "content": "2 + 3 ="}],
        "max_completion_tokens": 5,
        "seed": 3,
        "stop": ["a", "b"],
        "presence_penalty": 0.5,
        "tools": [{"type": "function"}],
        "stream": True,
        "top_k": 20,
    }
    kept = fields(omit=["temperature", "top_p"])  # asked for: the endpoint is to say that it cannot
    assert (kept["temperature"], kept["top_p"]) == (0.7, 0.9)


@pytest.mark.parametrize(
    "asked",
    [
        SamplingParams(5),
        SamplingParams(5, logprobs=False, top_k=3),
        SamplingParams(5, logprobs=False, stop_token_ids=(1,)),
        SamplingParams(5, logprobs=False, ignore_eos=True),
    ],
)
def test_what_no_endpoint_gives_is_refused(asked: SamplingParams) -> None:
    with pytest.raises(EngineError, match="a chat endpoint gives no"):
        fields(sampling=asked)


def test_a_partial_answer_is_gone_on_with() -> None:
    sent = fields(partial="the ans", partial_tokens=2)
    assert sent["messages"][-1] == {"role": "assistant", "content": "the ans"}
    assert (sent["continue_final_message"], sent["add_generation_prompt"], sent["max_tokens"]) == (
        True,
        False,
        30,
    )
    assert fields(partial="x", partial_tokens=99)["max_tokens"] == 1


def test_messages_as_endpoints_take_them() -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": [1, "ä"]}}}
    broken = {"type": "function", "id": "c2", "function": {"name": "f", "arguments": '{"x": 1'}}
    as_text = {"type": "function", "id": "c3", "function": {"name": "f", "arguments": '{"x": 1}'}}
    thinking = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    sent = wire_messages(
        [
            {"role": "user", "content": "q", "weight": 3},
            {**thinking, "tool_calls": [call, broken, as_text]},
            {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"},
        ]
    )
    assert sent[0] == {"role": "user", "content": "q"}
    assert sent[1]["content"] is None
    assert "reasoning_content" not in sent[1]
    arguments = [one["function"]["arguments"] for one in sent[1]["tool_calls"]]
    assert arguments == ['{"x":[1,"ä"]}', '{"unreadable":"{\\"x\\": 1"}', '{"x": 1}']
    assert all(isinstance(orjson.loads(one), dict) for one in arguments)
    assert sent[2] == {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"}
    (back,) = wire_messages([thinking], send_reasoning=True)
    assert back == thinking


def test_images_take_the_places_of_their_parts() -> None:
    message = {
        "role": "user",
        "content": [
            {"type": "image", "image": "a.png"},
            {"type": "text", "text": "?"},
            {"type": "image_url"},
        ],
    }
    (sent,) = wire_messages([message], ["data:1", "data:2"])
    assert sent["content"] == [
        {"type": "image_url", "image_url": {"url": "data:1"}},
        {"type": "text", "text": "?"},
        {"type": "image_url", "image_url": {"url": "data:2"}},
    ]
    for images in (["data:1"], ["data:1", "data:2", "data:3"]):
        with pytest.raises(EngineError, match="more image"):
            wire_messages([message], images)


def chunk(delta: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": None, **more}]}


def test_a_turn_is_put_together() -> None:
    turn = Turn()
    for delta in [
        {"role": "assistant", "content": None},
        {"reasoning_content": "h"},
        {"reasoning": "m"},
        {"content": "I "},
        {"content": "add."},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "sub"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
    ]:
        turn.add(chunk(delta))
    turn.add(chunk(finish_reason="tool_calls"))
    turn.add({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
    assert turn.message() == {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}},
            {"type": "function", "id": "b", "function": {"name": "sub", "arguments": ""}},
        ],
    }
    assert (turn.total_tokens, finish_reason(turn, "s")) == (13, "stop")


def test_calls_without_an_index_and_with_arguments_as_an_object() -> None:
    turn = Turn()
    turn.add(chunk({"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}]}))
    turn.add(chunk({"tool_calls": [{"id": "b", "function": {"name": "g", "arguments": "{"}}]}))
    turn.add(chunk({"tool_calls": [{"function": {"arguments": "}"}}]}))
    calls = [call["function"] for call in turn.message()["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"x":1}'}, {"name": "g", "arguments": "{}"}]


def test_ends() -> None:
    meanings = {"stop": "stop", "length": "length", "tool_calls": "stop", "abort": None, None: None}
    for said, meant in meanings.items():
        assert finish_reason(Turn(finish_reason=said), "s") == meant
    with pytest.raises(EngineError, match="content_filter") as caught:
        finish_reason(Turn(finish_reason="content_filter"), "s")
    assert not isinstance(caught.value, TransientEngineError)
    with pytest.raises(TransientEngineError, match="unknown reason: 'odd'"):
        finish_reason(Turn(finish_reason="odd"), "s")


def test_lines_of_a_stream() -> None:
    for line, expected in [
        (b'data: {"a": 1}\r\n', {"a": 1}),
        (b'data:{"a": 1}\n', {"a": 1}),
        (b'data: {"a": 1}', {"a": 1}),
        (b'data: {"a"', None),  # half an event is none
        (b": comment\n", None),
        (b"event: x\n", None),
        (b"\n", None),
    ]:
        assert read_event(line) == expected
    assert read_event(b"data: [DONE]\n") is DONE


@pytest.mark.parametrize("before", [0, 95, 200])
def test_what_is_no_event_is_shown_without_the_key_wherever_it_stands(before: int) -> None:
    with pytest.raises(TransientEngineError, match="no JSON object") as raised:
        read_event(b"data: " + b"x" * before + b"sk-SECRET\n", lambda text: text.replace("sk-SECRET", "***"))
    assert "sk-" not in str(raised.value)


NAMES = (
    *("choices", "delta", "message", "tool_calls", "function", "index", "id", "arguments", "name", "usage"),
    *("content", "reasoning", "finish_reason", "prompt_tokens", "prompt_tokens_details", "text"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["choices", "usage"]), json_values))
@example({"choices": [{"finish_reason": [None]}]})
def test_a_chunk_of_anything_is_read_or_refused(value: dict[str, Any]) -> None:
    turn = Turn()
    try:
        turn.add(value)
        finish_reason(turn, "s")
    except EngineError:
        return
    message = turn.message()
    assert isinstance(message["content"], str)
    for call in message.get("tool_calls", ()):
        assert isinstance(call["function"]["arguments"], str)


def test_error_codes() -> None:
    assert error_code(b'{"error": {"code": "insufficient_quota", "type": "x"}}') == "insufficient_quota"
    assert error_code(b'{"error": {"type": "rate_limit_error"}}') == "rate_limit_error"
    for payload in (b"", b"[]", b'{"error": "text"}', b'{"error": null}'):
        assert error_code(payload) == ""
