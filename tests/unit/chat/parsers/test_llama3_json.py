import pytest

from rollstream.chat.parsers.llama3_json import Llama3JsonParser

GOOD = '{"name": "f", "parameters": {"a": "x; y"}}'


@pytest.mark.parametrize(
    "text",
    [
        "Call " + GOOD,
        '{"name": "Ann", "age": 7}',
        '{"parameters": {}}',
        '{"name": "Ann"',
        '{"a": 1}',
        "{x | x > 0} is a set; {y} too",
        '"name"',
        "[" + GOOD + "]",
        "{" * 2000,
        "```json\n" + GOOD + "\n```",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    parsed = Llama3JsonParser().parse(text + "<|eot_id|>")
    assert parsed.calls == () and parsed.content == text


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\n {GOOD}",
        f"<|python_tag|>{GOOD}",
        '{"type": "function", "name": "f", "parameters": {"a": "x; y"}}',
        '{"name": "f", "arguments": {"a": "x; y"}}',
    ],
)
def test_one_call(text: str) -> None:
    parsed = Llama3JsonParser().parse(text + "<|eom_id|>")
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.text) == ("f", {"a": "x; y"}, text.strip())
    assert parsed.content == ""


def test_several_calls_and_content_behind() -> None:
    parsed = Llama3JsonParser().parse(f"{GOOD}; {GOOD} ;\n{GOOD}; done")
    assert [call.text for call in parsed.calls] == [GOOD] * 3
    assert parsed.content == "; done"


def test_content_before_a_tag() -> None:
    parsed = Llama3JsonParser().parse(f"Let me see.<|python_tag|>{GOOD}<|python_tag|>{GOOD}")
    assert parsed.content == "Let me see." and len(parsed.calls) == 2


def test_a_tag_inside_a_string() -> None:
    tagged = '{"name": "f", "parameters": {"a": "<|python_tag|>"}}'
    parsed = Llama3JsonParser().parse(f"{tagged}; {GOOD}")
    assert [call.error for call in parsed.calls] == [None, None]
    assert parsed.calls[0].arguments == {"a": "<|python_tag|>"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "f", "parameters": {"a": "x', "the call is not valid JSON: Unterminated string"),
        (
            '{"type": "function", "name": "f", "parameters": {"a" 1}}',
            "the call is not valid JSON: Expecting ':'",
        ),
        ('{"name": 7, "parameters": {}}', 'the call has no "name" that is a string'),
        ('{"name": "f", "parameters": [1]}', "the arguments are not a JSON object"),
        ("<|python_tag|>", "the call is not valid JSON: Expecting value"),
        ('<|python_tag|>search.call(query="x")', "the call is not valid JSON: Expecting value"),
        ('<|python_tag|>{"name": "f"}', 'the call has no "parameters"'),
    ],
)
def test_broken_calls(text: str, error: str) -> None:
    parsed = Llama3JsonParser().parse(text + "<|eom_id|>")
    (call,) = parsed.calls
    assert call.text == text and parsed.content == ""
    assert call.error and call.error.startswith(error)


def test_a_broken_call_behind_a_good_one() -> None:
    good, broken = Llama3JsonParser().parse(GOOD + '; {"name": "g", "parameters": {').calls
    assert good.error is None
    assert broken.error and broken.text == '{"name": "g", "parameters": {'
