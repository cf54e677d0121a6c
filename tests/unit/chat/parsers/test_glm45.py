import pytest

from rollstream.chat.parsers.glm45 import Glm45Parser
from tests.unit.chat.parsers.formats import TOOLS


def test_values_by_type() -> None:
    text = (
        "<tool_call>search<arg_key>query</arg_key><arg_value>5 </arg_value>"
        "<arg_key>limit</arg_key><arg_value>5</arg_value>"
        '<arg_key>where</arg_key><arg_value>{"a": "</tool_call>"}</arg_value>'
        "<arg_key>other</arg_key><arg_value>[1]</arg_value>"
        "<arg_key>free</arg_key><arg_value>[1</arg_value></tool_call>"
    )
    (call,) = Glm45Parser().parse(text, tools=TOOLS).calls
    assert call.error is None and call.text == text
    assert call.arguments == {
        "query": "5 ",
        "limit": 5,
        "where": {"a": "</tool_call>"},
        "other": [1],
        "free": "[1",
    }


def test_a_call_without_arguments() -> None:
    parsed = Glm45Parser().parse("\n<think></think>\nSure.\n<tool_call>now\n</tool_call><|observation|>")
    (call,) = parsed.calls
    assert (call.name, call.arguments) == ("now", {})
    assert parsed.content == "\nSure.\n" and parsed.reasoning == ""


@pytest.mark.parametrize(
    ("written", "name", "error"),
    [
        ("", "", "no name of a tool where the call begins"),
        ('{"name": "now"}', "", "no name of a tool where the call begins"),
        ("now\n<arg_key>a", "now", "a key is not closed by </arg_key>"),
        ("now<arg_key>a</arg_key>", "now", "no <arg_value> for the key 'a'"),
        ("now<arg_key>a</arg_key><arg_value>1", "now", "the value of 'a' is not closed by </arg_value>"),
        (
            "now<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>",
            "now",
            "the value of 'a' is not closed by </arg_value>",
        ),
        (
            "now<arg_key>a</arg_key><arg_value>1</arg_value> and",
            "now",
            "the call is not closed by </tool_call>",
        ),
    ],
)
def test_broken_calls(written: str, name: str, error: str) -> None:
    text, good = f"<tool_call>{written}</tool_call>", "<tool_call>now</tool_call>"
    broken, whole = Glm45Parser().parse(text + good).calls
    assert (broken.name, broken.arguments, broken.text, broken.error) == (name, None, text, error)
    assert whole.text == good


def test_a_cut_call() -> None:
    (call,) = Glm45Parser().parse("<tool_call>now\n").calls
    assert call.error == "the call is not closed by </tool_call>"
