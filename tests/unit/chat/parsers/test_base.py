import re

import pytest

from rollstream.chat.parsers.base import (
    ParsedOutput,
    Segment,
    get_parser,
    parser_names,
    register_parser,
)
from rollstream.chat.parsers.hermes import HermesParser
from rollstream.errors import ConfigError


def test_names_and_other_spellings() -> None:
    names = parser_names()
    assert {"hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v3_1"} <= set(names)
    assert names == sorted(names)
    for other, name in (("gpt-oss", "gpt_oss"), ("glm", "glm45"), ("kimi", "kimi_k2")):
        assert type(get_parser(other)) is type(get_parser(name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("herms", "unknown tool parser 'herms'; did you mean 'hermes'? Known: deepseek_v3, "),
        ("??", "unknown tool parser '??'. Known: deepseek_v3, "),
    ],
)
def test_an_unknown_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        get_parser(name)


def test_a_parser_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.chat.parsers.base._parsers", {})

    @register_parser("own")
    class Own(HermesParser):
        stop_tokens: tuple[str, ...] = ("<stop>",)

    assert parser_names() == ["own"]
    assert get_parser("own").stop_tokens == ("<stop>",)


def test_stop_tokens() -> None:
    assert get_parser("gpt_oss").stop_tokens == ("<|call|>",)
    assert get_parser("glm45").stop_tokens == ("<|observation|>",)
    assert get_parser("llama3_json").stop_tokens == ("<|eom_id|>",)
    assert get_parser("hermes").stop_tokens == ()


def test_content_and_reasoning_are_joined_from_their_segments() -> None:
    parsed = ParsedOutput(
        (
            Segment("thinking", "a"),
            Segment("markup", "|"),
            Segment("content", " b"),
            Segment("thinking", "c"),
            Segment("content", "d "),
        ),
        (),
    )
    assert parsed.content == " bd "
    assert parsed.reasoning == "a\nc"
