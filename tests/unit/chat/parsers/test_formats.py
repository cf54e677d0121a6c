"""What holds for every format: calls, thinking and content are read as their templates write them."""

from collections.abc import Callable
from typing import Any

import pytest

from rollstream.chat.parsers.base import ParsedOutput
from rollstream.chat.parsers.registry import get_parser
from tests.unit.chat.parsers.formats import FORMATS, TOOLS, Calls, Format

ONE: Calls = [("search", {"query": "weather in Paris", "limit": 3})]
TRICKY: Calls = [
    (
        "search",
        {
            "query": 'a "quoted" {brace}} and ]; a \\ backslash, naïve 日本語 🙂\n```json\n{"x": 1}\n```',
            "weights": [1, 2.5, -3],
            "where": {"a": {"b": [{"c": "}"}]}},
            "factor": 0.5,
        },
    ),
    ("now", {}),
    ("search", {"query": "", "limit": 0}),
]


def form_fixture(where: Callable[[Format], bool] = lambda form: True) -> Any:
    forms = {name: form for name, form in FORMATS.items() if where(form)}
    return pytest.fixture(params=forms.values(), ids=forms.keys())(lambda request: request.param)


form = form_fixture()
json_form = form_fixture(lambda form: form.parser not in ("qwen3_coder", "glm45"))
"""The others write values as bare text."""


def read(form: Format, text: str, **kwargs: Any) -> ParsedOutput:
    parsed = get_parser(form.parser).parse(text, tools=TOOLS, **kwargs)
    assert "".join(segment.text for segment in parsed.segments) == text
    return parsed


def executable(parsed: ParsedOutput) -> Calls:
    assert [call.error for call in parsed.calls] == [None] * len(parsed.calls)
    return [(call.name, call.arguments or {}) for call in parsed.calls]


def test_parallel_calls_with_difficult_values(form: Format) -> None:
    parsed = read(form, form.turn(TRICKY))
    assert executable(parsed) == TRICKY
    assert parsed.content.strip() == ""
    assert [one.text for one in parsed.segments if one.kind == "call"] == [one.text for one in parsed.calls]


def test_thinking_and_content_before_calls(form: Format) -> None:
    content = "Let me look." if form.content_first else ""
    parsed = read(form, form.turn(ONE, content, thinking="What do I know?"))
    assert executable(parsed) == ONE
    assert parsed.reasoning.strip() == "What do I know?"
    assert parsed.content.strip() == content


def test_content_alone(form: Format) -> None:
    content = "It is <b>4 < 5</b>; [see] {this}."
    text = (
        f"<|channel|>final<|message|>{content}<|return|>" if form.parser == "gpt_oss" else content + form.end
    )
    parsed = read(form, text)
    assert parsed.content == content
    assert parsed.calls == () and parsed.reasoning == ""
    assert parsed.segments[-1].kind == "markup"


def test_the_prompt_opened_the_thinking(form: Format) -> None:
    _, closing = form.opened
    start = "<|start|>assistant" if form.parser == "gpt_oss" else ""
    parsed = read(form, f"I think.{closing}{start}{form.turn(ONE)}", in_thinking=True)
    assert parsed.reasoning == "I think."
    assert executable(parsed) == ONE


def test_a_call_in_thinking_is_no_call(form: Format) -> None:
    opening, closing = form.opened
    # A call ends the message of a harmony turn, so there thinking can hold only the begin of one.
    thought = "I could write " + form.calls(ONE).partition("<|call|>")[0]
    start = "<|start|>assistant" if form.parser == "gpt_oss" else ""
    for text, in_thinking in ((opening + thought, False), (thought, True)):
        unclosed = read(form, text, in_thinking=in_thinking)
        assert unclosed.calls == () and unclosed.content == ""
        assert unclosed.reasoning == thought
        closed = read(form, f"{text}{closing}{start}{form.turn(ONE)}", in_thinking=in_thinking)
        assert closed.reasoning == thought
        assert executable(closed) == ONE


@pytest.mark.parametrize("end", ["</s>", "<eos>", "[EOS]"])
def test_end_tokens_that_are_text_to_others(form: Format, end: str) -> None:
    own = {"mistral": "</s>", "kimi_k2": "[EOS]"}.get(form.parser)
    assert read(form, "It ends: " + end).content == ("It ends: " if end == own else "It ends: " + end)


def test_an_unclosed_thought_keeps_its_end_token_out(form: Format) -> None:
    end = "<|return|>" if form.parser == "gpt_oss" else form.end
    parsed = read(form, "hm" + end, in_thinking=True)
    assert [(segment.kind, segment.text) for segment in parsed.segments] == [
        ("thinking", "hm"),
        ("markup", end),
    ]


def test_a_stopped_call_without_its_end(json_form: Format) -> None:
    """Engines may leave out the token or string they stopped at; JSON shows by itself that it is whole."""
    text = json_form.calls(ONE)
    endings = ["\n</tool_call>", "<|call|>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "\n```", "]"]
    for ending in (*endings, "<|tool_calls_section_end|>", "<|tool_call_end|>"):
        text = text.removesuffix(ending)
        assert executable(read(json_form, text)) == ONE
    assert text.endswith("}")


@pytest.mark.parametrize(
    "payload", ["NaN", "-Infinity", "1e999", str(2**64), "9" * 6000, '"\\ud800"', "[" * 5000]
)
def test_values_that_cannot_be_stored(json_form: Format, payload: str) -> None:
    text = json_form.turn([("search", {"query": "HERE"})]).replace('"HERE"', payload)
    (call,) = read(json_form, text).calls
    assert call.arguments is None and call.error


@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ('"{\\"query\\": \\"x\\"}"', True),
        *((text, False) for text in ('"{\\"query\\": "', '"plain"', '"[1]"', "[1]", "null", '{"query": "x"')),
        ('{"query" "x"}', False),
    ],
)
def test_arguments_of_other_forms(json_form: Format, arguments: str, good: bool) -> None:
    text = json_form.turn([("search", {"HERE": 1})]).replace('{"HERE": 1}', arguments)
    (call,) = read(json_form, text).calls
    assert (call.arguments, call.error is None) == ({"query": "x"} if good else None, good)
