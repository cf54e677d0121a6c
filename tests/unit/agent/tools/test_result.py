import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.agent.tools.base import ToolResponse
from rollstream.agent.tools.result import (
    ToolLimits,
    ToolResult,
    TruncateSide,
    error_line,
    error_text,
    read_result,
    truncate_text,
)

LIMITS = ToolLimits(max_response_length=40, truncate_side="right")


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no")


class Loud(str):
    def __str__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Loud("a"), ToolResult("a")),
        ({"a": "é", 1: {2}}, ToolResult('{"a": "é", "1": "{2}"}')),
        (None, ToolResult("None")),
        (3, ToolResult("3")),
        (bytearray(b"\xffa"), ToolResult("\ufffda")),
        ("\ud800", ToolResult("\ufffd")),
        (ToolResponse(), ToolResult("")),
        (ToolResponse(text="a"), ToolResult("a")),
        (ToolResponse(text=3), ToolResult("3")),  # type: ignore[arg-type]
        (ToolResponse(text="a", image=["i", None]), ToolResult("a", images=["i"])),
        (SimpleNamespace(text="verl's", image=None, video=None), ToolResult("verl's")),
        (("a",), ToolResult("a")),
        (("a", 0), ToolResult("a", reward=0.0)),
        ((ToolResponse("a"), np.float32(0.5)), ToolResult("a", reward=0.5)),
        (("a", None, None), ToolResult("a")),
        (({"b": 1}, True, {"c": 1}), ToolResult('{"b": 1}', reward=1.0, metrics={"c": 1.0})),
        (("a", 1, "no mapping"), ToolResult("a", reward=1.0)),
    ],
)
def test_what_tools_return(value: Any, expected: ToolResult) -> None:
    assert read_result(value, LIMITS) == expected


@pytest.mark.parametrize(
    "value", ["x" * 10_000_000, b"x" * 10_000_000, ToolResponse("x" * 10_000_000), ["x" * 99]]
)
def test_long_results_are_cut(value: Any) -> None:
    assert len(read_result(value, LIMITS).text) == 40


@pytest.mark.parametrize("reward", [math.nan, math.inf, "much", Silent(), [1, 2]])
def test_a_reward_that_is_none_is_none(reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_result(("a", reward), LIMITS) == ToolResult("a")
    assert "no finite number" in caplog.text


def test_metrics_are_kept_small() -> None:
    metrics = {
        "n": np.int64(3),
        "nan": math.nan,
        "flag": False,
        "none": None,
        "text": "x" * 1000,
        "list": [1, 2],
        "silent": Silent(),
        4: "\ud800",
    }
    read = read_result(("a", None, metrics), LIMITS).metrics
    assert len(read.pop("text")) == 200
    assert read == {
        "n": 3.0,
        "nan": None,
        "flag": False,
        "none": None,
        "list": "[1, 2]",
        "silent": "RuntimeError: no",
        "4": "\ufffd",
    }
    assert len(read_result(("a", None, dict.fromkeys(range(1000))), LIMITS).metrics) == 64


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ((), TypeError),
        ((1, 2, 3, 4), TypeError),
        (ToolResponse(video=[1]), NotImplementedError),
        (SimpleNamespace(text="a", image="no list", video=None), TypeError),
        ((x for x in ()), TypeError),
        (Silent(), RuntimeError),
    ],
)
def test_what_no_model_can_read(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_result(value, LIMITS)


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


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no")


def test_errors() -> None:
    assert error_line(ValueError("two\n lines"), 100) == "ValueError: two lines"
    assert error_line(KeyError("x"), 100) == "KeyError: 'x'"
    assert error_line(ValueError(), 100) == "ValueError"
    assert error_line(SilentError(), 100) == "SilentError: (its text cannot be read)"
    assert len(error_line(ValueError("x" * 10_000_000), 100)) == 100
    assert error_text(ValueError("two\nlines"), 100) == "two\nlines"
