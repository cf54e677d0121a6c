from typing import Any

import orjson
import pytest
from openai._models import construct_type
from openai.types.chat import ChatCompletionChunk

from rollstream.engine.base import ChatPrompt
from rollstream.engine.openai import (
    ENGINE_KWARGS,
    StreamedAnswer,
    endpoint_url,
    request_fields,
    retry_after,
    wire_messages,
)
from rollstream.errors import ConfigError, EngineError
from rollstream.trajectory import SamplingParams

HOW = SamplingParams(32, temperature=0.7, top_p=0.9, logprobs=False)
ASK = ChatPrompt([{"role": "user", "content": "2 + 3 ="}])


def fields(prompt: ChatPrompt = ASK, sampling: SamplingParams = HOW, **options: Any) -> dict[str, Any]:
    return request_fields("m", prompt, sampling, ENGINE_KWARGS | options)


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
        ChatPrompt(ASK.messages, tools=[{"type": "function"}]),
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
    with pytest.raises(EngineError, match="a chat endpoint has no"):
        fields(sampling=asked)


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


def add(answer: StreamedAnswer, delta: dict[str, Any] | None = None, **more: Any) -> None:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": None, **more}
    answer.add(construct_type(type_=ChatCompletionChunk, value={"choices": [choice]}))


def test_an_answer_is_put_together() -> None:
    answer = StreamedAnswer()
    for delta in [
        {"role": "assistant", "content": None},
        {"reasoning_content": "h"},
        {"reasoning": "m"},
        {"content": "I "},
        {"content": "add."},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x'}}]},
        {"tool_calls": [{"id": "b", "function": {"name": "sub"}}]},  # no index: a call of its own
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
    ]:
        add(answer, delta)
    add(answer, finish_reason="tool_calls")
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    answer.add(construct_type(type_=ChatCompletionChunk, value={"choices": [], "usage": usage}))
    completion = answer.completion(answer.end("s"))
    assert completion.message == {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}},
            {"type": "function", "id": "b", "function": {"name": "sub", "arguments": ""}},
        ],
    }
    assert (completion.usage, completion.finish_reason) == ((9, 4), "stop")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0.0),
    ],
)
def test_how_long_an_endpoint_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds
