import pytest

from rollstream.chat.parsers.qwen3_coder import Qwen3CoderParser
from tests.unit.chat.parsers.formats import TOOLS


def one(text: str, content: str = "") -> tuple[str, object, str | None]:
    parsed = Qwen3CoderParser().parse(text, tools=TOOLS)
    (call,) = parsed.calls
    assert parsed.content == content
    return call.name, call.arguments, call.error


def test_values_keep_their_lines() -> None:
    text = (
        "<tool_call>\n<function=search>\n<parameter=query>\n\n def f():\n    return '</function>'\n\n"
        "</parameter>\n<parameter=limit>\n7\n</parameter>\n</function>\n</tool_call>"
    )
    assert one(text) == ("search", {"query": "\n def f():\n    return '</function>'\n", "limit": 7}, None)


def test_a_value_that_does_not_fit_stays_text() -> None:
    text = "<tool_call><function=search><parameter=limit>many</parameter></function></tool_call>"
    assert one(text) == ("search", {"limit": "many"}, None)


def test_an_unknown_tool_has_text_only() -> None:
    text = "<tool_call><function=other><parameter=limit>7</parameter></function></tool_call>"
    assert one(text) == ("other", {"limit": "7"}, None)


def test_without_the_outer_tag() -> None:
    text = "Sure. <function=now>\n</function>\n</tool_call>"
    assert one(text, content="Sure. ") == ("now", {}, None)


@pytest.mark.parametrize(
    ("written", "name", "error"),
    [
        ("", "", "no <function=name> where the call begins"),
        ('{"name": "now"}', "", "no <function=name> where the call begins"),
        ("<function=>\n</function>", "", "no <function=name> where the call begins"),
        ("<function=now>", "now", "the call is not closed by </function>"),
        ("<function=now>\n<parameter=a>1</parameter>\n", "now", "the call is not closed by </function>"),
        ("<function=now><parameter=a>1</function>", "now", "parameter 'a' is not closed by </parameter>"),
        (
            "<function=now><parameter=a>1<parameter=b>2</parameter></function>",
            "now",
            "parameter 'a' is not closed by </parameter>",
        ),
    ],
)
def test_broken_calls(written: str, name: str, error: str) -> None:
    good = "<tool_call><function=now></function></tool_call>"
    text = f"<tool_call>{written}</tool_call>"
    broken, whole = Qwen3CoderParser().parse(text + good).calls
    assert (broken.name, broken.arguments, broken.text, broken.error) == (name, None, text, error)
    assert (whole.name, whole.text) == ("now", good)


def test_a_broken_call_does_not_take_values_of_the_next() -> None:
    text = "<tool_call><function=f><parameter=a>1</function></tool_call>"
    good = "<tool_call><function=g><parameter=b>2</parameter></function></tool_call>"
    broken, whole = Qwen3CoderParser().parse(text + good).calls
    assert broken.error and broken.text == text
    assert whole.arguments == {"b": "2"}
