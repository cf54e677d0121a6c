import pytest

from rollstream.chat.parsers.base import ParsedOutput, Segment, ToolCall
from rollstream.chat.parsers.gpt_oss import GptOssParser

CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


def read(text: str) -> ParsedOutput:
    parsed = GptOssParser().parse(text)
    assert "".join(segment.text for segment in parsed.segments) == text
    return parsed


def test_a_turn_in_segments() -> None:
    parsed = read(f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{CALL}")
    assert parsed.segments == (
        Segment("markup", "<|channel|>analysis<|message|>"),
        Segment("thinking", "hm"),
        Segment("markup", "<|end|>"),
        Segment("call", "<|start|>assistant" + CALL),
    )
    assert parsed.calls == (ToolCall("f", {"a": 1}, "<|start|>assistant" + CALL),)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f",
        "<|channel|>analysis to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "<|start|>assistant to=functions.f<|channel|>commentary json",
        "assistant to=f<|channel|>commentary",
    ],
)
def test_places_of_the_recipient(header: str) -> None:
    (call,) = read(header + '<|message|>{"a": "<|call|>"}<|call|>').calls
    assert (call.name, call.arguments, call.error) == ("f", {"a": "<|call|>"}, None)


def test_preamble_and_final_are_content() -> None:
    first = "<|channel|>commentary<|message|>First.<|end|>"
    parsed = read(first + "<|start|>assistant<|channel|>final<|message|> Then.<|return|>")
    assert parsed.content == "First. Then." and parsed.calls == ()
    assert parsed.segments[-1] == Segment("markup", "<|return|>")


def test_text_without_any_header_is_content() -> None:
    assert read("Hello <b>there</b>").content == "Hello <b>there</b>"
    parsed = read("Hello<|channel|>final<|message|>, you<|return|>")
    assert parsed.content == "Hello, you"


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>analysis<|message|>I call<|start|>assistant" + CALL.removesuffix("<|call|>"),
        "<|channel|>analysis<|message|>I write to=functions.f {}<|call|>",
    ],
)
def test_thinking_holds_no_call(text: str) -> None:
    assert read(text).calls == ()


def test_a_tool_answer_that_the_model_invents_is_no_call() -> None:
    parsed = read("<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>")
    assert parsed.calls == () and parsed.content == "7"


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("<|channel|>commentary to=functions.f <|constrain|>js", "f", "no <|message|> in the call"),
        ("<|channel|>commentary to=functions.f<|call|>", "f", "no <|message|> in the call"),
        ("<|channel|>commentary to=functions.f<|message|>{<|call|>", "f", "the arguments are not valid JSON"),
        (
            "<|channel|>analysis to=python<|message|>print(1)<|call|>",
            "python",
            "the arguments are not valid JSON",
        ),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "", "the call has no name of a tool"),
        ("<|channel|>commentary<|message|>{}<|call|>", "", "the call has no recipient"),
    ],
)
def test_broken_calls(text: str, name: str, error: str) -> None:
    (call,) = read(text).calls
    assert (call.name, call.arguments, call.text) == (name, None, text)
    assert call.error and call.error.startswith(error)
