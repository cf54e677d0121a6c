"""What a tool says, as bounded text that can be stored."""

import inspect
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollstream.surrogates import replace_in_text

TruncateSide = Literal["left", "right", "middle"]
"""Which side of a text that is too long is cut off, as verl names it."""

ToolFailure = Literal["unknown_tool", "bad_arguments", "exception", "timeout"]
"""Why a call has no result. The text tells the model."""

MAX_METRICS = 64
"""Metrics of one call that are kept; more than this is data, which belongs elsewhere."""
METRIC_CHARACTERS = 200
"""Of a metric that is no number."""

_MARKERS: dict[TruncateSide, str] = {
    "left": "(truncated)...",
    "right": "...(truncated)",
    "middle": "...(truncated)...",
}
"""verl's, word for word: models may have been trained with them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of `actor_rollout_ref.rollout.multi_turn`."""

    max_parallel_calls: int = 8
    """Calls at once in one rollout, > 0. All calls of a turn run, in the order of their texts."""
    max_response_length: int = 4096
    """Characters of one result that the model sees, > 0."""
    truncate_side: TruncateSide = "middle"
    """What a longer result loses."""
    timeout: float = 60.0
    """Seconds for one call, making the instance included, and for each `calc_reward` and `release`; > 0.
    Waiting for another call to end does not count."""


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


def truncate_text(text: str, max_length: int, side: TruncateSide) -> str:
    """Cuts a text to exactly `max_length` characters, > 0, the marker that says so included, if it is longer.

    `left` cuts the beginning off, `right` the end, `middle` keeps half of both. When the marker would fill
    `max_length`, nothing marks the cut.
    """
    if len(text) <= max_length:
        return text
    marker = _MARKERS[side] if len(_MARKERS[side]) < max_length else ""
    keep = max_length - len(marker)
    head = {"left": 0, "right": keep, "middle": keep // 2}[side]
    return text[:head] + marker + text[len(text) - (keep - head) :]


def to_text(value: Any, max_length: int, side: TruncateSide) -> str:
    """Any value as text for the model, truncated.

    Text stays as it is, bytes are read as UTF-8, a dict becomes JSON, everything else what `str` makes of it.

    Raises:
        TypeError: A generator, which would say nothing.
        Exception: Whatever the value's own `__str__` raises.
    """
    if isinstance(value, str):
        text = str.__str__(value)  # of a subclass, too, whatever it overrides
    elif isinstance(value, bytes | bytearray):
        text = value.decode("utf-8", "replace")
    elif isinstance(value, dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    elif inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TypeError("the tool returned a generator, want text or a ToolResponse")
    else:
        text = str.__str__(str(value))
    return replace_in_text(truncate_text(text, max_length, side))


def error_text(error: BaseException, max_length: int) -> str:
    """What an error says, at most `max_length` characters of it. Never raises."""
    try:
        said = str.__str__(str(error))
    except BaseException:  # a __str__ of the user's
        said = "(its text cannot be read)"
    return replace_in_text(truncate_text(said, max_length, "right"))


def error_line(error: BaseException, max_length: int) -> str:
    """`ValueError: what it says`, in one line of at most `max_length` characters. Never raises."""
    said = " ".join(error_text(error, max_length).split())
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return truncate_text(line, max_length, "right")
