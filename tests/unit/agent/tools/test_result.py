import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollstream.agent.tools.base import ToolResponse
from rollstream.agent.tools.result import ToolLimits, ToolResult, read_result
from rollstream.errors import ConfigError

LIMITS = ToolLimits(max_response_length=40, truncate_side="right")


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", ToolResult("a")),
        ({"a": "é"}, ToolResult('{"a": "é"}')),
        (None, ToolResult("None")),
        (3, ToolResult("3")),
        (b"\xffa", ToolResult("\ufffda")),
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


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"max_parallel_calls": 0}, "max_parallel_calls"),
        ({"max_response_length": 0}, "max_tool_response_length"),
        ({"timeout": math.nan}, "tool_timeout"),
        ({"truncate_side": "top"}, "tool_response_truncate_side"),
    ],
)
def test_limits_name_their_keys(limits: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"multi_turn.{key}"):
        ToolLimits(**limits)
