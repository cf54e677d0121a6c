from typing import Any

import pytest

from rollstream.chat.wires.openai_chat import ChatAnswer, Choice, read_chat, read_messages, read_tools
from rollstream.chat.wires.requests import RequestError
from rollstream.errors import ConfigError
from rollstream.trajectory import Completion

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def test_a_conversation_as_templates_want_it() -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    assert read_messages(messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "5"])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(arguments: str) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hello", r"messages\[1\] must be an object"),
        ({"content": "a"}, "role is None"),
        ({"role": "function", "content": "a"}, "role is 'function'"),
        ({"role": "user", "content": 5}, r"messages\[1\].content must be"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "sees none"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "only text"),
        ({"role": "user", "content": ["a"]}, "only text"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "must be a list"),
        ({"role": "assistant", "tool_calls": ["a"]}, "needs a function"),
        ({"role": "assistant", "function_call": {"name": "a"}}, "use tool_calls"),
    ],
)
def test_what_cannot_be_shown_is_refused(message: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_messages([{"role": "user", "content": "hi"}, message])


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        read_messages([])


def test_tools_are_whole_and_differ() -> None:
    tool = {"type": "function", "function": {"name": "add", "strict": True}}
    assert read_tools([tool]) == [tool]
    with pytest.raises(ConfigError, match="more than one tool named add"):
        read_tools([tool, tool])
    with pytest.raises(ConfigError, match=r"tools\[1\]"):
        read_tools([tool, {"type": "web_search"}])


def test_whoever_answers_refuses_what_it_cannot_honour() -> None:
    """A known parameter may be accepted with one value only."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "max_completion_tokens": 7}
    asked = read_chat({**body, "n": 1}, neutral={"n": 1})
    assert (asked.n, asked.max_tokens, asked.stops) == (1, 7, ())
    with pytest.raises(RequestError, match="with the value 1 only"):
        read_chat({**body, "n": 2}, neutral={"n": 1})


def test_an_answer_whole_and_in_pieces() -> None:
    """Tokens without a text of their own are named by their ids, in vLLM's way."""
    message = {"role": "assistant", "content": "hm", "tool_calls": [_read(CALL)]}
    completion = Completion([5, 6], [-0.5, -0.25], "stop", [(0, 3), (1, 4)], cached_prompt_tokens=1)
    answer = ChatAnswer("a", "m", [1, 2, 3], [Choice(message, completion)])
    how = {"logprobs": True, "return_token_ids": True, "stream": True}
    asked = read_chat({"messages": [{"role": "user", "content": "hi"}], **how})
    body = answer.body(asked)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hm", "tool_calls": [CALL]}
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["token_id:5", "token_id:6"]
    assert (choice["finish_reason"], choice["token_ids"], body["prompt_token_ids"]) == (
        "tool_calls",
        [5, 6],
        [1, 2, 3],
    )
    assert body["metadata"] == {"weight_version": "4"}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    chunks = answer.chunks(asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": None},
        {"content": "hm"},
        {"tool_calls": [{"index": 0, **CALL}]},
        {},
    ]
    assert chunks[-1]["choices"][0]["logprobs"] == choice["logprobs"]
    assert all("usage" not in chunk for chunk in chunks)


def _read(call: dict[str, Any]) -> dict[str, Any]:
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    read: dict[str, Any] = message["tool_calls"][0]
    return read
