import pytest

from rollstream.chat.parsers.base import Segment, ToolCall
from rollstream.chat.parsers.hermes import HermesParser

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def calls(text: str) -> tuple[ToolCall, ...]:
    return HermesParser().parse(text).calls


def test_a_turn_in_segments() -> None:
    parsed = HermesParser().parse(f"<think>\nhm\n</think>\n\nSure.\n{GOOD}<|im_end|>")
    assert parsed.segments == (
        Segment("markup", "<think>"),
        Segment("thinking", "\nhm\n"),
        Segment("markup", "</think>"),
        Segment("content", "\n\nSure.\n"),
        Segment("call", GOOD),
        Segment("markup", "<|im_end|>"),
    )
    assert parsed.calls == (ToolCall("f", {"a": 1}, GOOD),)


def test_content_around_and_between_calls() -> None:
    parsed = HermesParser().parse(f"one {GOOD} two {GOOD} three")
    assert parsed.content == "one  two  three"
    assert [call.error for call in parsed.calls] == [None, None]


def test_markers_inside_strings() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>x</tool_call>"}}</tool_call> after'
    parsed = HermesParser().parse(text + GOOD)
    assert parsed.calls[0].arguments == {"a": "<tool_call>x</tool_call>"}
    assert len(parsed.calls) == 2 and parsed.content == " after"


def test_duplicate_keys_and_escapes_are_read_as_json_does() -> None:
    (call,) = calls(r'<tool_call>{"name": "f", "arguments": {"a": 1, "a": "\u00e9\ud83d\ude42"}}</tool_call>')
    assert call.arguments == {"a": "é🙂"}


@pytest.mark.parametrize(
    ("written", "name", "error"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "", "the call is not valid JSON: Expecting ',' delimiter"),
        (
            '{"name": "f", "arguments": {"a": 1}}}',
            "",
            "the call is not valid JSON: Extra data: line 1 column 37",
        ),
        ("{'name': 'f', 'arguments': {}}", "", "the call is not valid JSON: Expecting property name"),
        ("", "", "the call is not valid JSON: Expecting value: line 1 column 1"),
        ('[{"name": "f", "arguments": {}}]', "", "the call is not a JSON object"),
        ('{"arguments": {}}', "", 'the call has no "name" that is a string'),
        ('{"name": "", "arguments": {}}', "", 'the call has no "name" that is a string'),
        ('{"name": 3, "arguments": {}}', "", 'the call has no "name" that is a string'),
        ('{"name": "f"}', "f", 'the call has no "arguments"'),
        ('{"name": "f", "parameters": {}}', "f", 'the call has no "arguments"'),
        ('{"name": "f", "arguments": [1]}', "f", "the arguments are not a JSON object"),
        ('{"name": "f\\ud800", "arguments": {}}', "", "the call holds half a surrogate pair"),
    ],
)
def test_broken_calls(written: str, name: str, error: str) -> None:
    text = f"<tool_call>{written}</tool_call>"
    broken, good = calls(f"{text}\n{GOOD}")
    assert (broken.name, broken.arguments, broken.text) == (name, None, text)
    assert broken.error and broken.error.startswith(error)
    assert good.arguments == {"a": 1}


def test_a_call_that_lost_its_end_does_not_swallow_the_next() -> None:
    whole, cut, good = calls(
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "argum\n' + GOOD
    )
    assert whole.error is None and whole.name == "f"
    assert cut.error and cut.text == '<tool_call>{"name": "g", "argum\n'
    assert good.error is None
