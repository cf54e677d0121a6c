from typing import Any

import pytest

from rollstream.chat.wires.openai_chat import read_messages, read_tools
from rollstream.chat.wires.requests import RequestError
from rollstream.errors import ConfigError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


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
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
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
