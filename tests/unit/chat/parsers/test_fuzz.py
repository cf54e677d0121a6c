"""Noise of all kinds: no parser raises, loses text, or lets through what cannot be executed."""

import random

import orjson
import pytest

from rollstream.chat.parsers.base import ParsedOutput
from rollstream.chat.parsers.registry import get_parser
from tests.unit.chat.parsers.formats import FORMATS, TOOLS, Calls, Format

SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]

MARKERS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|python_tag|>", ";"),
    *("<function=search>", "</function>", "<parameter=query>", "</parameter>", "<function=", "<parameter="),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "```json\n", "\n```", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|start|>assistant"),
    *("<|channel|>analysis", "<|channel|>commentary to=functions.search", "<|message|>", "<|end|>"),
    *("<|call|>", "<|return|>", "<|constrain|>json", "<|im_end|>", "</s>", "<|eot_id|>", "<|endoftext|>"),
    *('"', "\\", "{", "}", "[", "]", ",", ":", "\n", "\0", "\ud800", "\\ud800", "NaN", "1e999", "9" * 25),
    *('"name"', '"arguments"', '"parameters"', "null", "true", '{"name": "f", "parameters": {}}'),
]

VALUES = [
    *("x", "<think>", "[THINK] </think>", 'a "b" {c}', "日本🙂", "</tool_call>", ""),
    *(7, -1.5, True, None, [1, [2]], {"a": {"b": []}}),
]


def random_calls(rng: random.Random) -> Calls:
    keys = ["query", "limit", "weights", "where", "exact", "factor", "since", "other"]
    return [
        (
            rng.choice(["search", "now", "unknown"]),
            {key: rng.choice(VALUES) for key in rng.sample(keys, rng.randint(0, 3))},
        )
        for _ in range(rng.randint(1, 3))
    ]


def random_turn(rng: random.Random, form: Format) -> str:
    content = rng.choice(["", "Let me see. "])
    turn = form.turn(random_calls(rng), content, rng.choice(["", "", "Hm <tool_call> hm."]))
    return (rng.choice(["Hm. ", thought(rng, form)]) if rng.random() < 0.3 else "") + turn


def thought(rng: random.Random, form: Format) -> str:
    """A thinking block with a call in it."""
    # The end of a call would end a message of harmony, thinking or not.
    text = "Or " + form.calls([("hidden", {"query": "x"})]).partition("<|call|>")[0]
    blocks = [form.thinking, "<think>{}</think>"] if form.parser == "mistral" else [form.thinking]
    return rng.choice(blocks).replace("{}", text)


def scattered_turn(rng: random.Random, form: Format) -> tuple[str, Calls, int]:
    """A good turn with thinking blocks anywhere; its calls, and how many blocks."""
    calls, pieces, thoughts = random_calls(rng), [], 0
    groups = [[call] for call in calls] if form.content_first else [calls]
    for group in groups:
        for _ in range(rng.randint(0, 3)):
            if form.content_first and rng.random() < 0.5:
                pieces.append(form.content.replace("{}", "Let me see. "))
            else:
                pieces.append(thought(rng, form))
                thoughts += 1
        pieces += [form.calls(group), form.next_call]
    if rng.random() < 0.5:
        pieces.append(thought(rng, form))
        thoughts += 1
    return "".join(pieces).removesuffix(form.next_call or "\0") + form.end, calls, thoughts


def mutate(rng: random.Random, text: str, other: str) -> str:
    for _ in range(rng.randint(0, 4)):
        start, end = sorted(rng.randint(0, len(text)) for _ in range(2))
        end = min(end, start + rng.choice([1, 8, 200]))
        match rng.randrange(6):
            case 0:
                text = text[:start]
            case 1:
                text = text[:start] + text[end:]
            case 2:
                text = text[:end] + text[start:]
            case 3:
                text = text[:start] + rng.choice(MARKERS) + text[start:]
            case 4:
                text = text[:start] + other[start:end] + text[end:]
            case _:
                text = text[:start] + rng.randbytes(rng.randint(1, 6)).decode("latin-1") + text[start:]
    return text


def check(text: str, parsed: ParsedOutput) -> None:
    assert "".join(segment.text for segment in parsed.segments) == text
    assert all(segment.text for segment in parsed.segments)
    assert [call.text for call in parsed.calls] == [s.text for s in parsed.segments if s.kind == "call"]
    for call in parsed.calls:
        assert (call.error is None) == isinstance(call.arguments, dict)
        assert call.name or call.error
        stored = orjson.dumps([call.name, call.arguments, call.error, call.call_id])
        assert orjson.loads(stored) == [call.name, call.arguments, call.error, call.call_id]


THINKING = {"mistral": {"[THINK]": "[/THINK]", "<think>": "</think>"}, "gpt_oss": {}}
"""Markers of thinking blocks, of formats that have others than most."""
CALL_ENDS = ("</tool_call>", "</function>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")


def check_thinking(name: str, parsed: ParsedOutput, in_thinking: bool) -> None:
    """Thinking begins at every opener outside of calls and goes on to the end of its block."""
    closings = THINKING.get(name, {"<think>": "</think>"})
    before = ""
    for number, segment in enumerate(parsed.segments):
        opened = next((mark for mark in closings if before.endswith(mark)), None)
        match segment.kind:
            case "content":
                assert not any(mark in segment.text for mark in closings)
            case "thinking" if closings:
                assert opened or (in_thinking and number == 0)
                ends = set(closings.values()) if in_thinking and number <= 1 else {closings[opened or ""]}
                assert not any(mark in segment.text for mark in ends)
            case "call":
                # Nothing stands between the opener and a call but thinking, which may be empty.
                assert opened is None
        before = segment.text if segment.kind == "markup" else ""
    for call in parsed.calls:
        if call.error and "not valid JSON: " in call.error and "string that" not in call.error:
            assert call.text.endswith(CALL_ENDS) or not any(mark in call.text for mark in closings)


@pytest.mark.parametrize("rounds", [3_000, pytest.param(100_000, marks=SOAK)])
@pytest.mark.parametrize("name", sorted({form.parser for form in FORMATS.values()}))
def test_mutated_turns(name: str, rounds: int) -> None:
    rng = random.Random(f"parsers {name}")
    forms = [form for form in FORMATS.values() if form.parser == name]
    others = list(FORMATS.values())
    parser = get_parser(name)
    fine = broken = thoughts = 0
    for number in range(rounds):
        form = rng.choice(forms)
        text = mutate(rng, random_turn(rng, form), random_turn(rng, rng.choice(others)))
        if number % 10 == 0:
            text = "".join(rng.choices(MARKERS, k=rng.randint(0, 30)))
        in_thinking = rng.random() < 0.1
        parsed = parser.parse(text, in_thinking=in_thinking, tools=TOOLS)
        check(text, parsed)
        check_thinking(name, parsed, in_thinking)
        fine += any(call.error is None for call in parsed.calls)
        broken += any(call.error is not None for call in parsed.calls)
        thoughts += bool(parsed.reasoning)
    # Mutations that left nothing to read, or broke nothing, would prove nothing.
    assert min(fine, broken, thoughts) > rounds // 20


@pytest.mark.parametrize("name", FORMATS)
def test_thinking_anywhere_hides_its_calls(name: str) -> None:
    rng, form = random.Random(f"scattered {name}"), FORMATS[name]
    parser = get_parser(form.parser)
    several = 0
    for _ in range(500):
        text, calls, thoughts = scattered_turn(rng, form)
        parsed = parser.parse(text, tools=TOOLS)
        check(text, parsed)
        assert [(call.name, call.error) for call in parsed.calls] == [(name, None) for name, _ in calls]
        assert parsed.reasoning.count("Or ") == parsed.reasoning.count("hidden") == thoughts
        assert "hidden" not in parsed.content
        several += thoughts > 1
    assert several > 100


DS, DS1, KIMI = "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<|tool_call_begin|>"
PATHOLOGICAL: dict[str, list[str]] = {
    "hermes": [
        *("<tool_call>", "<tool_call><think></think>", '<tool_call>{"a": "', '<tool_call>{"</tool_call>'),
        *("<think>", "<think></think>", "<think>x</think>x", "<|im_end|>", "<|im_end|>x", " ", " x"),
    ],
    "qwen3_coder": ["<tool_call>", "<tool_call><function=f><parameter=a>", "<function=f></parameter>"],
    "glm45": ["<tool_call>", "<tool_call>f<arg_key>a</arg_key><arg_value>", "<tool_call>f<arg_key>"],
    "llama3_json": ["<|python_tag|>", '<|python_tag|>{"a": "', '{"name": "f", "parameters": {}};'],
    "mistral": [
        *("[TOOL_CALLS] [", '[TOOL_CALLS] [{"', '[TOOL_CALLS]f[ARGS]{"]'),
        *("[THINK]", "[THINK][/THINK]", "[THINK]<think>"),
    ],
    "deepseek_v3": [DS, "<｜tool▁calls▁begin｜>", DS + "<｜tool▁sep｜>f\n```\n{"],
    "deepseek_v3_1": [DS1 + '{"', DS1 + '{"<｜tool▁call▁end｜>'],
    "kimi_k2": [KIMI, KIMI + 'f<|tool_call_argument_begin|>{"<|tool_call_end|>'],
    "gpt_oss": ["<|channel|>", "<|end|>", "{<|call|>", '<|channel|>final to=f<|message|>{"a": "<|call|>'],
}
"""What, repeated, would make a careless reader read the rest of the text at each repetition."""

BEFORE = {
    "hermes": "<tool_call>",
    "llama3_json": '{"name": "f", "parameters": ',
    "mistral": "[TOOL_CALLS]f[ARGS]",
    "gpt_oss": "<|channel|>commentary to=functions.f<|message|>",
}
"""What makes JSON of what follows."""


@pytest.mark.parametrize("length", [100_000, pytest.param(3_000_000, marks=SOAK)])
@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_long_answer_of_anything_is_read(name: str, length: int) -> None:
    parser = get_parser(name)
    units = [(unit, "") for unit in PATHOLOGICAL[name]]
    units += [(unit, BEFORE[name]) for unit in ("[", '{"a":', "1", '"\\', "\n") if name in BEFORE]
    for unit, before in units:
        text = before + unit * (length // len(unit))
        parsed = parser.parse(text)
        assert sum(len(segment.text) for segment in parsed.segments) == len(text)
        assert all(call.error or unit.startswith('{"name"') for call in parsed.calls)
