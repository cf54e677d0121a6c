from typing import Any

import pytest

from rollstream.chat.messages import MessageError, read_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": '{"city":"Lyon"}'}}
READ = {**CALL, "function": {"name": "rain", "arguments": {"city": "Lyon"}}}
PICTURE = {"type": "image", "image": "a.png"}


def read(*messages: Any, any_role: bool = False) -> list[dict[str, Any]]:
    return read_messages(messages, "messages", any_role=any_role)


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (
            {"role": "developer", "content": "be brief", "name": None},
            {"role": "system", "content": "be brief"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},
        ),
        (
            {"role": "user", "content": [PICTURE, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [PICTURE, {"type": "text", "text": "b"}]},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "assistant", "content": "", "tool_calls": [READ], "reasoning_content": "hm"},
        ),
        ({"role": "assistant", "content": [], "tool_calls": []}, {"role": "assistant", "content": ""}),
        ({"role": "tool", "tool_call_id": "c1"}, {"role": "tool", "tool_call_id": "c1", "content": ""}),
    ],
)
def test_a_message_as_templates_want_it(given: Any, held: Any) -> None:
    assert read(given) == [held]


def test_calls_of_the_old_form() -> None:
    call = {"name": "rain", "arguments": '{"city":"Lyon"}'}
    asked, result = read(
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "rain", "content": "none"},
    )
    (new,) = asked["tool_calls"]
    assert new["function"] == READ["function"]
    assert result == {"role": "tool", "name": "rain", "tool_call_id": new["id"], "content": "none"}


@pytest.mark.parametrize(
    ("arguments", "held"), [("", {}), (None, {}), ("{broken", "{broken"), ("[1]", "[1]"), ("5", "5")]
)
def test_arguments_that_are_no_object(arguments: Any, held: Any) -> None:
    call = {**CALL, "function": {"name": "rain", "arguments": arguments}}
    (message,) = read({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == held


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("hello", ""),
        ({"content": "a"}, ".role"),
        ({"role": "narrator", "content": "a"}, ".role"),
        ({"role": ["user"], "content": "a"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": ["a"]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, ".content[0].text"),
        ({"role": "user", "content": "a", "name": {"a": 1}}, ".name"),
        ({"role": "tool", "content": "a", "tool_call_id": ["x"]}, ".tool_call_id"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": ["a"]}, ".tool_calls[0]"),
        ({"role": "assistant", "function_call": "a"}, ".tool_calls[0]"),
    ],
)
def test_what_is_not_whole_is_named(message: Any, where: str) -> None:
    with pytest.raises(MessageError) as caught:
        read({"role": "user", "content": "hi"}, message)
    assert caught.value.where == "messages[1]" + where


def test_a_templates_own_role() -> None:
    message = {"role": "narrator", "content": "a"}
    assert read(message, any_role=True) == [message]
    with pytest.raises(MessageError, match="assistant"):
        read({"role": "asistant", "content": "x"}, any_role=True)
