import pytest

from rollstream.chat.parsers.kimi_k2 import KimiK2Parser

ARGUMENTS = "<|tool_call_argument_begin|>"


def section(*calls: str) -> str:
    written = "".join(f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.get_weather:0", "get_weather"),
        ("functions.server.tool:12", "server.tool"),
        ("get_weather:1", "get_weather"),
        (" get_weather ", "get_weather"),
    ],
)
def test_names_from_ids(call_id: str, name: str) -> None:
    parsed = KimiK2Parser().parse(f"Sure.{section(call_id + ARGUMENTS + '{}')}<|im_end|>")
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.call_id, call.error) == (name, {}, call_id.strip(), None)
    assert parsed.content == "Sure."


@pytest.mark.parametrize(
    ("written", "name", "error"),
    [
        ("functions.f:0{}", "", "no <|tool_call_argument_begin|> in the call"),
        (f"functions.:0{ARGUMENTS}{{}}", "", "the call has no name of a tool"),
        (f"functions.f:0{ARGUMENTS}{{", "f", "the arguments are not valid JSON: Expecting property name"),
        (f"functions.f:0{ARGUMENTS}[]", "f", "the arguments are not a JSON object"),
    ],
)
def test_broken_calls(written: str, name: str, error: str) -> None:
    broken, good = KimiK2Parser().parse(section(written, f"functions.g:1{ARGUMENTS}{{}}")).calls
    assert (broken.name, broken.arguments) == (name, None)
    assert broken.error and broken.error.startswith(error)
    assert (good.name, good.error) == ("g", None)
