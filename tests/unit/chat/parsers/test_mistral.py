import pytest

from rollstream.chat.parsers.mistral import MistralParser

LIST = (
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc123def"}, {"name": "g", "arguments": {}}]'
)


def test_a_list_of_calls() -> None:
    parsed = MistralParser().parse(LIST + "</s>")
    first, second = parsed.calls
    assert (first.name, first.arguments, first.call_id) == ("f", {"a": 1}, "abc123def")
    assert (second.name, second.call_id, second.text) == ("g", None, '{"name": "g", "arguments": {}}')
    assert parsed.content == ""


def test_named_calls_with_and_without_ids() -> None:
    text = '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]h{}'
    parsed = MistralParser().parse(text + "</s>")
    assert [(call.name, call.arguments, call.call_id) for call in parsed.calls] == [
        ("f", {"a": "[TOOL_CALLS]"}, "abc"),
        ("g", {}, None),
        ("h", {}, None),
    ]
    assert "".join(call.text for call in parsed.calls) == text


def test_thinking_between_content() -> None:
    parsed = MistralParser().parse("Hm.[THINK]a [TOOL_CALLS]f[ARGS]{}[/THINK]So.[THINK]b[/THINK]Yes.</s>")
    assert parsed.reasoning == "a [TOOL_CALLS]f[ARGS]{}\nb"
    assert parsed.content == "Hm.So.Yes." and parsed.calls == ()


@pytest.mark.parametrize(
    ("text", "in_thinking"),
    [
        ("<think>a</think>b", False),
        ("b<think>a</think>", False),
        ("a</think>b", True),
        ("a[/THINK]b</s>", True),
        ("[THINK]a[/THINK]b", True),
    ],
)
def test_both_ways_to_mark_thinking(text: str, in_thinking: bool) -> None:
    parsed = MistralParser().parse(text, in_thinking=in_thinking)
    assert (parsed.reasoning, parsed.content) == ("a", "b")


@pytest.mark.parametrize("call", ["", " [", "f[ARGS]{", "f[CALL_ID]", ' [{"name": "f"},'])
def test_a_broken_call_ends_before_thinking(call: str) -> None:
    parsed = MistralParser().parse(f"[TOOL_CALLS]{call}[THINK]or [TOOL_CALLS]g[ARGS]{{}}[/THINK]")
    assert parsed.calls and all(call.error for call in parsed.calls)
    assert parsed.reasoning == "or [TOOL_CALLS]g[ARGS]{}"


def test_an_empty_list_is_no_call() -> None:
    parsed = MistralParser().parse("Done.[TOOL_CALLS] []</s>")
    assert parsed.calls == () and parsed.content == "Done."


def test_a_marker_inside_a_string_of_a_list() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}}, {"name": "g", "arguments": {}}]'
    assert [call.error for call in MistralParser().parse(text).calls] == [None, None]


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("[TOOL_CALLS]", "", "neither a list of calls nor a name"),
        ("[TOOL_CALLS] [", "", "the list of calls is not valid JSON: Expecting value"),
        ('[TOOL_CALLS] [{"name": "f"', "", "the list of calls is not valid JSON: Expecting ','"),
        ("[TOOL_CALLS]f", "", "neither a list of calls nor a name"),
        ("[TOOL_CALLS]f[CALL_ID]abc", "", "neither a list of calls nor a name"),
        ("[TOOL_CALLS]f[ARGS]", "f", "the arguments are not valid JSON: Expecting value"),
        ('[TOOL_CALLS]f[ARGS]{"a": ', "f", "the arguments are not valid JSON: Expecting value"),
        ("[TOOL_CALLS]f[ARGS][1]", "f", "the arguments are not a JSON object"),
        ('[TOOL_CALLS]{"name": "f"}', "", "neither a list of calls nor a name"),
    ],
)
def test_broken_calls(text: str, name: str, error: str) -> None:
    broken, good = MistralParser().parse(f"{text}[TOOL_CALLS]g[ARGS]{{}}</s>").calls
    assert (broken.name, broken.arguments, broken.text) == (name, None, text)
    assert broken.error and broken.error.startswith(error)
    assert good.error is None


def test_the_whole_calls_of_a_broken_list_count() -> None:
    good, broken = MistralParser().parse(LIST[:-9]).calls
    assert good.arguments == {"a": 1}
    assert broken.error and broken.text.startswith(', {"name": "g"')
