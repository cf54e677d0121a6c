"""The result of a tool call, read from whatever the tool returned."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollstream.agent.tools.limits import ToolLimits
from rollstream.agent.tools.text import error_line, to_text

ToolFailure = Literal["unknown_tool", "bad_arguments", "exception", "timeout"]
"""Why a call has no result. The text tells the model."""

MAX_METRICS = 64
"""Metrics of one call that are kept; more than this is data, which belongs elsewhere."""
METRIC_CHARACTERS = 200
"""Of a metric that is no number."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ToolResult:
    """How one call ended."""

    text: str
    """What the model sees: truncated, storable as UTF-8."""
    images: list[Any] = field(default_factory=list)
    """As the tool gave them; those of MCP servers are `data:` URLs."""
    reward: float | None = None
    """Of this call; finite. None: the tool said nothing."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What else the tool said: finite numbers, short texts, booleans, None."""
    error: ToolFailure | None = None
    """None: it went well."""


def read_result(value: Any, limits: ToolLimits) -> ToolResult:
    """Reads what a tool returned: a response, or a tuple of response, reward and metrics.

    A response is a `ToolResponse` (or anything with its fields), text, bytes, a dict, or whatever has a text.

    Raises:
        TypeError: A tuple of another length, a generator, or images that are no list.
        NotImplementedError: A video.
        Exception: Whatever the value itself raises when it is looked at.
    """
    reward = metrics = None
    if isinstance(value, tuple):
        if not 1 <= len(value) <= 3:
            raise TypeError(
                f"the tool returned a tuple of {len(value)}, want (response,), (response, reward) or "
                "(response, reward, metrics)"
            )
        value, reward, metrics = (*value, None, None)[:3]
    result = ToolResult("", reward=read_reward(reward), metrics=_read_metrics(metrics))
    if _is_response(value):
        if value.video:
            raise NotImplementedError("the tool returned a video, which no agent loop can show to a model")
        if value.image is not None and not isinstance(value.image, list):
            raise TypeError(f"the tool returned {type(value.image).__name__} as image, want a list")
        result.images = [image for image in value.image or [] if image is not None]
        value = "" if value.text is None else value.text
    result.text = to_text(value, limits.max_response_length, limits.truncate_side)
    return result


def read_reward(value: Any) -> float | None:
    """A reward as a finite number, or None; one that is neither a number nor None is logged."""
    if value is None:
        return None
    try:
        reward = float(value)
    except Exception:
        reward = math.nan
    if math.isfinite(reward):
        return reward
    logger.warning("a tool gave a reward that is no finite number (%s); taken as none", type(value).__name__)
    return None


def _is_response(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("text", "image", "video"))


def _read_metrics(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        return {}
    names = list(metrics)[:MAX_METRICS]
    return {_short(name): _read_metric(metrics[name]) for name in names}


def _read_metric(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str | bytes | bytearray) and hasattr(value, "__float__"):
        try:
            number = float(value)
        except Exception:
            return _short(value)
        return number if math.isfinite(number) else None
    return _short(value)


def _short(value: Any) -> str:
    try:
        return to_text(value, METRIC_CHARACTERS, "right")
    except Exception as error:
        return error_line(error, METRIC_CHARACTERS)
