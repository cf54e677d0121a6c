import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.agent.tools.result import (
    TruncateSide,
    clean_text,
    error_line,
    error_text,
    to_text,
    truncate_text,
)

SIDES = st.sampled_from(["left", "right", "middle"])
MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}


@given(st.text(st.characters(exclude_characters="("), max_size=80), st.integers(1, 60), SIDES)
def test_truncation(text: str, max_length: int, side: TruncateSide) -> None:
    cut = truncate_text(text, max_length, side)
    if len(text) <= max_length:
        assert cut == text
        return
    assert len(cut) == max_length
    assert ("(" in cut) == (max_length > len(MARKERS[side]))
    before, marker, after = cut.partition(MARKERS[side])
    if marker:
        assert text.startswith(before) and text.endswith(after)
        kept = (len(before), len(after))
        assert {"left": kept[0] == 0, "right": kept[1] == 0, "middle": 0 <= kept[1] - kept[0] <= 1}[side]


@pytest.mark.parametrize(
    ("side", "length", "expected"),
    [
        ("left", 17, "(truncated)...rst"),
        ("right", 17, "abc...(truncated)"),
        ("middle", 20, "a...(truncated)...st"),
        ("left", 14, "ghijklmnopqrst"),
        ("right", 3, "abc"),
        ("middle", 3, "ast"),
    ],
)
def test_sides(side: TruncateSide, length: int, expected: str) -> None:
    assert truncate_text("abcdefghijklmnopqrst" * 2, length, side) == expected


@given(st.binary(max_size=300), st.integers(1, 20), SIDES)
def test_bytes_are_cut_like_their_text(data: bytes, max_length: int, side: TruncateSide) -> None:
    text = to_text(data, max_length, side)
    assert len(text) <= max_length
    whole = data.decode("utf-8", "replace")
    if "\ufffd" not in whole:
        assert text == truncate_text(whole, max_length, side)


@given(st.text(alphabet=st.characters(), max_size=30))
def test_what_is_cleaned_can_be_stored(text: str) -> None:
    cleaned = clean_text(text + "\ud800")
    assert json.loads(json.dumps(cleaned, ensure_ascii=False).encode()) == cleaned
    assert len(cleaned) == len(text) + 1


class Loud(str):
    def __str__(self) -> str:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no")


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no")


def test_values() -> None:
    assert to_text(Loud("loud"), 10, "left") == "loud"
    assert to_text({"a": "é", 1: {2}}, 99, "left") == '{"a": "é", "1": "{2}"}'
    assert to_text(None, 10, "left") == "None"
    assert to_text(bytearray(b"\xff!"), 10, "left") == "\ufffd!"
    with pytest.raises(TypeError, match="generator"):
        to_text((x for x in ()), 10, "left")
    with pytest.raises(RuntimeError):
        to_text(Silent(), 10, "left")


def test_errors() -> None:
    assert error_line(ValueError("two\n lines"), 100) == "ValueError: two lines"
    assert error_line(KeyError("x"), 100) == "KeyError: 'x'"
    assert error_line(ValueError(), 100) == "ValueError"
    assert error_line(SilentError(), 100) == "SilentError: (its text cannot be read)"
    assert len(error_line(ValueError("x" * 10_000_000), 100)) == 100
    assert error_text(ValueError("two\nlines"), 100) == "two\nlines"
