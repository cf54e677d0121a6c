import pytest

from rollstream.chat.parsers.base import Segment, ToolCall
from rollstream.chat.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def v3(payload: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{payload}<｜tool▁call▁end｜>"


def v3_1(payload: str) -> str:
    return f"<｜tool▁call▁begin｜>{payload}<｜tool▁call▁end｜>"


def test_a_turn_in_segments() -> None:
    first, second = v3('f\n```json\n{"a": 1}\n```'), v3("g\n```json\n{}\n```")
    parsed = DeepSeekV3Parser().parse(
        f"Sure.{BEGIN}{first}\n{second}{END}<｜end▁of▁sentence｜>",
    )
    assert parsed.segments == (
        Segment("content", "Sure."),
        Segment("markup", BEGIN),
        Segment("call", first),
        Segment("markup", "\n"),
        Segment("call", second),
        Segment("markup", END + "<｜end▁of▁sentence｜>"),
    )
    assert parsed.calls == (ToolCall("f", {"a": 1}, first), ToolCall("g", {}, second))


def test_a_marker_or_fence_inside_a_string() -> None:
    value = '{"a": "```<｜tool▁call▁end｜>```"}'
    for parser, text in (
        (DeepSeekV3Parser(), v3(f"f\n```json\n{value}\n```")),
        (DeepSeekV31Parser(), v3_1(f"f<｜tool▁sep｜>{value}")),
    ):
        (call,) = parser.parse(BEGIN + text + END).calls
        assert call.arguments == {"a": "```<｜tool▁call▁end｜>```"} and call.text == text


@pytest.mark.parametrize(
    ("payload", "name", "error"),
    [
        ("f", "", "no name and ```json block in the call"),
        ('f\n{"a": 1}', "", "no name and ```json block in the call"),
        ("\n```json\n{}\n```", "", "the call has no name of a tool"),
        (
            'f\n```json\n{"a": \n```',
            "f",
            "the arguments are not valid JSON: Expecting value: line 2 column 1",
        ),
        ("f\n```json\n{}\n``` and", "f", "the arguments are not valid JSON: Extra data"),
        ("f\n```json\n7\n```", "f", "the arguments are not a JSON object"),
    ],
)
def test_broken_v3_calls(payload: str, name: str, error: str) -> None:
    text = v3(payload)
    broken, good = DeepSeekV3Parser().parse(BEGIN + text + v3("g\n```json\n{}\n```") + END).calls
    assert (broken.name, broken.arguments, broken.text) == (name, None, text)
    assert broken.error and broken.error.startswith(error)
    assert good.error is None


@pytest.mark.parametrize(
    ("payload", "name", "error"),
    [
        ('f{"a": 1}', "", "no <｜tool▁sep｜> in the call"),
        ("<｜tool▁sep｜>{}", "", "the call has no name of a tool"),
        ("f<｜tool▁sep｜>", "f", "the arguments are not valid JSON: Expecting value"),
        ("f<｜tool▁sep｜>{}}", "f", "the arguments are not valid JSON: Extra data: line 1 column 3"),
    ],
)
def test_broken_v3_1_calls(payload: str, name: str, error: str) -> None:
    text = v3_1(payload)
    broken, good = DeepSeekV31Parser().parse(BEGIN + text + v3_1("g<｜tool▁sep｜>{}") + END).calls
    assert (broken.name, broken.arguments, broken.text) == (name, None, text)
    assert broken.error and broken.error.startswith(error)
    assert good.error is None


@pytest.mark.parametrize("text", [BEGIN, f"{BEGIN}f{{}}{END}"])
def test_a_section_without_a_call_was_meant_as_one(text: str) -> None:
    parsed = DeepSeekV31Parser().parse("Sure." + text)
    (call,) = parsed.calls
    assert call.text == text and call.error == "a section of tool calls without a call"
    assert parsed.content == "Sure."


def test_a_call_outside_a_section() -> None:
    (call,) = DeepSeekV31Parser().parse(v3_1("f<｜tool▁sep｜>{}")).calls
    assert (call.name, call.error) == ("f", None)
