"""Each format by examples: what is read, what is a broken call, what is neither."""

from collections.abc import Callable
from typing import Any

import pytest

from rollstream.chat.parsers.base import ParsedOutput, Stretch, ToolCall
from rollstream.chat.parsers.registry import get_parser
from tests.unit.chat.parsers.formats import TOOLS

HERMES = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": "x; y"}}'
DS, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ARGS = "<|tool_call_argument_begin|>"
OSS = "<|channel|>commentary to=functions.f"


def v3(payload: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{payload}<｜tool▁call▁end｜>"


def v3_1(payload: str) -> str:
    return f"<｜tool▁call▁begin｜>{payload}<｜tool▁call▁end｜>"


def kimi(payload: str) -> str:
    return f"<|tool_call_begin|>{payload}<|tool_call_end|>"


def qwen(payload: str) -> str:
    return f"<tool_call>{payload}</tool_call>"


def read(name: str, text: str, *, in_thinking: bool = False) -> ParsedOutput:
    parsed = get_parser(name).parse(text, in_thinking=in_thinking, tools=TOOLS)
    assert "".join(segment.text for segment in parsed.segments) == text
    return parsed


def test_a_turn_in_segments() -> None:
    call = HERMES.replace("{", "\n{", 1)
    parsed = read("hermes", f"<think>\nhm\n</think>\n\nSure.\n{call} and {HERMES}<|im_end|>\n<|endoftext|>")
    assert parsed.segments == (
        Stretch("markup", "<think>"),
        Stretch("thinking", "\nhm\n"),
        Stretch("markup", "</think>"),
        Stretch("content", "\n\nSure.\n"),
        Stretch("call", call),
        Stretch("content", " and "),
        Stretch("call", HERMES),
        Stretch("markup", "<|im_end|>\n<|endoftext|>"),
    )
    assert parsed.calls == (ToolCall("f", {"a": 1}, call), ToolCall("f", {"a": 1}, HERMES))
    assert (parsed.content, parsed.reasoning) == ("\n\nSure.\n and ", "\nhm\n")


TOOL_CALLS = (
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}}, {"name": "g", "arguments": {}}]'
)
CODE = "\n def f():\n    return '</function>'\n"
TYPED = (
    "<tool_call>search<arg_key>query</arg_key><arg_value>5 </arg_value>"
    "<arg_key>limit</arg_key><arg_value>5</arg_value>"
    '<arg_key>where</arg_key><arg_value>{"a": "</tool_call>"}</arg_value>'
    "<arg_key>other</arg_key><arg_value>[1]</arg_value>"
    "<arg_key>free</arg_key><arg_value>[1</arg_value></tool_call>"
)
MISTRAL_CALLS = 'Hm.[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]h{}'
NO_LLAMA_CALLS = [
    *(
        "Call " + LLAMA,
        '{"name": "Ann", "age": 7}',
        '{"parameters": {}}',
        '{"name": "Ann"',
        '{"a": 1}',
        '"name"',
    ),
    *("{x | x > 0} is a set; {y} too", f"[{LLAMA}]", "{" * 2000, f"```json\n{LLAMA}\n```"),
]
FIRST, THEN = (
    "<|channel|>commentary<|message|>First.<|end|>",
    "<|start|>assistant<|channel|>final<|message|> Then.",
)
INVENTED = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>"
READ: dict[str, list[tuple[str, list[tuple[str, dict[str, Any]]], str]]] = {
    "hermes": [
        ("no <tool_response> call", [], "no <tool_response> call"),
        (HERMES.replace("1", '"<tool_call>x</tool_call>"'), [("f", {"a": "<tool_call>x</tool_call>"})], ""),
        (HERMES.replace("1", r'1, "a": "\u00e9\ud83d\ude42"'), [("f", {"a": "é🙂"})], ""),  # the last one
    ],
    "qwen3_coder": [
        ("Sure. <function=now>\n</function>\n</tool_call>", [("now", {})], "Sure. "),
        (
            f"<tool_call>\n<function=search>\n<parameter=query>\n{CODE}\n</parameter>\n"
            "<parameter=limit>\n7\n</parameter>\n</function>\n</tool_call>",
            [("search", {"query": CODE, "limit": 7})],
            "",
        ),
        *(  # does not fit; has no type
            (
                qwen(f"<function={tool}><parameter=limit>{value}</parameter></function>"),
                [(tool, {"limit": value})],
                "",
            )
            for tool, value in [("search", "many"), ("other", "7")]
        ),
    ],
    "glm45": [
        ("\n<think></think>\nSure.\n<tool_call>now\n</tool_call>", [("now", {})], "\nSure.\n"),
        (
            TYPED,
            [
                (
                    "search",
                    {"query": "5 ", "limit": 5, "where": {"a": "</tool_call>"}, "other": [1], "free": "[1"},
                )
            ],
            "",
        ),
    ],
    "llama3_json": [
        *(
            (text, [("f", {"a": "x; y"})], "")
            for text in [
                LLAMA,
                f"\n {LLAMA}",
                f"<|python_tag|>{LLAMA}",
                LLAMA.replace("parameters", "arguments"),
                LLAMA.replace("{", '{"type": "function", ', 1),
            ]
        ),
        (f"{LLAMA}; {LLAMA} ;\n{LLAMA}; done", [("f", {"a": "x; y"})] * 3, "; done"),
        (f"{LLAMA}\n{LLAMA} {LLAMA}\n\n{LLAMA}{LLAMA}", [("f", {"a": "x; y"})] * 5, ""),
        (f"{LLAMA}\nThat was one, {LLAMA}", [("f", {"a": "x; y"})], f"\nThat was one, {LLAMA}"),
        (f"See.<|python_tag|>{LLAMA}<|python_tag|>{LLAMA}", [("f", {"a": "x; y"})] * 2, "See."),
        (LLAMA.replace("x; y", "<|python_tag|>"), [("f", {"a": "<|python_tag|>"})], ""),
        *((text, [], text) for text in NO_LLAMA_CALLS),
    ],
    "mistral": [
        (TOOL_CALLS, [("f", {"a": "[TOOL_CALLS]"}), ("g", {})], ""),
        (MISTRAL_CALLS, [("f", {"a": "[TOOL_CALLS]"}), ("g", {}), ("h", {})], "Hm."),
        ("Done.[TOOL_CALLS] []</s>", [], "Done."),
    ],
    "deepseek_v3": [
        (
            v3('f\n```json\n{"a": "```<｜tool▁call▁end｜>```"}\n```'),
            [("f", {"a": "```<｜tool▁call▁end｜>```"})],
            "",
        )
    ],
    "deepseek_v3_1": [
        (v3_1('f<｜tool▁sep｜>{"a": "<｜tool▁call▁end｜>"}'), [("f", {"a": "<｜tool▁call▁end｜>"})], "")
    ],
    "gpt_oss": [
        (f"{FIRST}{THEN}<|return|>", [], "First. Then."),
        ("Hello <b>there</b>", [], "Hello <b>there</b>"),
        ("Hello<|channel|>final<|message|>, you<|return|>", [], "Hello, you"),
        (INVENTED, [], "7"),
        ("<|channel|>analysis<|message|>I call<|start|>assistant" + OSS + "<|message|>{}", [], ""),
        ("<|channel|>analysis<|message|>I write to=functions.f {}<|call|>", [], ""),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"), [(name, *row) for name, rows in READ.items() for row in rows]
)
def test_what_is_read(name: str, text: str, calls: list[tuple[str, dict[str, Any]]], content: str) -> None:
    parsed = read(name, text)
    assert [(one.name, one.arguments, one.error) for one in parsed.calls] == [(*call, None) for call in calls]
    assert parsed.content == content


@pytest.mark.parametrize(
    "header",
    [
        *(f"{OSS}{rest}" for rest in (" <|constrain|>json", "<|constrain|>json", " json", "")),
        "<|channel|>analysis to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "<|start|>assistant to=functions.f<|channel|>commentary json",
        "assistant to=f<|channel|>commentary",
    ],
)
def test_places_of_the_recipient(header: str) -> None:
    (call,) = read("gpt_oss", header + '<|message|>{"a": "<|call|>"}<|call|>').calls
    assert (call.name, call.arguments, call.error) == ("f", {"a": "<|call|>"}, None)


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}, {"name": "g", "arguments": {}}]',
            ["abc", None],
        ),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}[TOOL_CALLS]g[ARGS]{}", ["abc", None]),
        *(
            ("kimi_k2", kimi(call_id + ARGS + "{}"), [call_id.strip()])
            for call_id in ("functions.f:0", "functions.f:12", "f:1", " f ")
        ),
    ],
)
def test_the_models_own_ids(name: str, text: str, ids: list[str | None]) -> None:
    calls = read(name, text).calls
    assert [(call.name, call.call_id) for call in calls] == list(zip("fg", ids, strict=False))


BROKEN: dict[str, tuple[Callable[[str], str], str, list[tuple[str, str]]]] = {
    "hermes": (
        qwen,
        HERMES,
        [
            *(
                (text, "")
                for text in (
                    *('{"name": "f", "arguments": {"a": 1}', '{"name": "f", "arguments": {"a": 1}}}', ""),
                    *('[{"name": "f", "arguments": {}}]', '{"name": "", "arguments": {}}'),
                    *('{"name": 3, "arguments": {}}', '{"name": "f\\ud800", "arguments": {}}'),
                )
            ),
            ('{"name": "f", "parameters": {}}', "f"),
            ('{"name": "f", "arguments": [1]}', "f"),
        ],
    ),
    "qwen3_coder": (
        qwen,
        qwen("<function=f><parameter=b>2</parameter></function>"),
        [
            ("", ""),
            ("<function=></function>", ""),
            ("<function=now>\n<parameter=a>1</parameter>\n", "now"),
            ("<function=now><parameter=a>1</function>", "now"),
        ],
    ),
    "glm45": (
        qwen,
        qwen("f"),
        [
            ("", ""),
            ('{"name": "now"}', ""),
            ("now\n<arg_key>a", "now"),
            ("now<arg_key>a</arg_key>", "now"),
            ("now<arg_key>a</arg_key><arg_value>1", "now"),
            ("now<arg_key>a</arg_key><arg_value>1</arg_value> x", "now"),
        ],
    ),
    "deepseek_v3": (
        v3,
        v3("f\n```json\n{}\n```"),
        [
            ("f", ""),
            ('f\n{"a": 1}', ""),
            ("\n```json\n{}\n```", ""),
            ('f\n```json\n{"a": \n```', "f"),
            ("f\n```json\n7\n```", "f"),
        ],
    ),
    "deepseek_v3_1": (
        v3_1,
        v3_1("f<｜tool▁sep｜>{}"),
        [('f{"a": 1}', ""), ("<｜tool▁sep｜>{}", ""), ("f<｜tool▁sep｜>{}}", "f")],
    ),
    "kimi_k2": (
        kimi,
        kimi(f"f:1{ARGS}{{}}"),
        [("functions.f:0{}", ""), (f"functions.:0{ARGS}{{}}", ""), (f"functions.f:0{ARGS}{{", "f")],
    ),
    "mistral": (
        "[TOOL_CALLS]".__add__,
        "[TOOL_CALLS]f[ARGS]{}",
        [
            *((text, "") for text in ("", "f", "f[CALL_ID]abc", '{"name": "f"}', ' [{"name": "f"')),
            ('f[ARGS]{"a": ', "f"),
            ("f[ARGS][1]", "f"),
        ],
    ),
    "llama3_json": (
        str,
        "",
        [
            ('{"name": "f", "parameters": {"a": "x', ""),
            ('{"type": "function", "name": "f", "parameters": {"a" 1}}', ""),
            ('{"name": 7, "parameters": {}}', ""),
            ('{"name": "f", "parameters": [1]}', "f"),
            ('<|python_tag|>search.call(query="x")', ""),
            ('<|python_tag|>{"name": "f"}', "f"),
        ],
    ),
    "gpt_oss": (
        str,
        "",
        [
            *((OSS + rest, "f") for rest in (" <|constrain|>js", "<|call|>", "<|message|>{<|call|>")),
            ("<|channel|>analysis to=python<|message|>print(1)<|call|>", "python"),
            ("<|channel|>commentary to=functions.<|message|>{}<|call|>", ""),
            ("<|channel|>commentary<|message|>{}<|call|>", ""),
        ],
    ),
}
"""What makes a call of a text, a good call that may follow a broken one, and broken ones with their tools."""


@pytest.mark.parametrize(
    ("name", "text", "good", "tool"),
    [
        (name, whole(written), good, tool)
        for name, (whole, good, rows) in BROKEN.items()
        for written, tool in rows
    ],
)
def test_broken_calls(name: str, text: str, good: str, tool: str) -> None:
    broken, *others = read(name, text + good).calls
    assert (broken.name, broken.arguments, broken.text) == (tool, None, text)
    assert broken.error
    assert [(call.name, call.text, call.error) for call in others] == ([("f", good, None)] if good else [])


@pytest.mark.parametrize(
    ("name", "text", "fine", "broken"),
    [
        (
            "hermes",
            HERMES.removesuffix("</tool_call>") + '<tool_call>{"name": "g", "argum\n' + HERMES,
            2,
            '<tool_call>{"name": "g", "argum\n',
        ),
        ("hermes", qwen('{"a": "1</tool_call> and "}, more'), 0, '<tool_call>{"a": "1</tool_call>'),
        ("glm45", "<tool_call>now\n", 0, "<tool_call>now\n"),
        ("llama3_json", LLAMA + '; {"name": "g", "parameters": {', 1, '{"name": "g", "parameters": {'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"', 1, ', {"name": "g"'),
        ("deepseek_v3_1", DS, 0, DS),
        ("deepseek_v3_1", f"{DS}f{{}}{DS_END}", 0, f"{DS}f{{}}{DS_END}"),
    ],
)
def test_calls_that_were_cut(name: str, text: str, fine: int, broken: str) -> None:
    """The whole calls count; a section without a call was meant as one."""
    calls = read(name, text).calls
    assert [call.text for call in calls if call.error] == [broken] and len(calls) == fine + 1


@pytest.mark.parametrize(
    ("name", "text", "in_thinking", "reasoning", "content"),
    [
        ("hermes", "<think>a</think>\n<think>c</think>b", False, "a\nc", "b"),
        ("hermes", "before<think>a", False, "a", "before"),
        ("hermes", "a</think>b<think>c</think>d", True, "a\nc", "bd"),
        ("hermes", "\n a</think>b</think>c", True, "\n a", "b</think>c"),
        ("hermes", "<think>a</think>b", True, "a", "b"),
        ("hermes", "\n</think>\n\nb", False, "", "\n\nb"),
        ("mistral", "<think>a</think>b", False, "a", "b"),
        ("mistral", "b<think>a</think>", False, "a", "b"),
        ("mistral", "a</think>b", True, "a", "b"),
        ("mistral", "a[/THINK]b</s>", True, "a", "b"),
        ("mistral", "[THINK]a[/THINK]b", True, "a", "b"),
        *(
            (
                "mistral",
                f"[TOOL_CALLS]{call}[THINK]or [TOOL_CALLS]g[ARGS]{{}}[/THINK]",
                False,
                "or [TOOL_CALLS]g[ARGS]{}",
                "",
            )
            for call in ["", " [", "f[ARGS]{", "f[CALL_ID]", ' [{"name": "f"},']
        ),
    ],
)
def test_thinking(name: str, text: str, in_thinking: bool, reasoning: str, content: str) -> None:
    parsed = read(name, text, in_thinking=in_thinking)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert all(call.error for call in parsed.calls)
