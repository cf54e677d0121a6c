"""Reading what a reward function returned."""

import math
from typing import Any, NamedTuple

from rollstream.errors import RewardError


class Score(NamedTuple):
    """What a rollout is worth."""

    reward: float | None
    """Finite; None when no rule knows the row's data source: not scored."""
    extra: dict[str, Any]
    """What else the reward function said; values that JSON knows."""


def read_score(returned: Any) -> Score:
    """Reads a number, or a dict with `score`, whose other items become `extra`.

    Numbers are int, float, bool, and what numpy and torch have for them. In `extra`, arrays become lists and
    NaN and infinities None.

    Raises:
        RewardError: Anything else, a score that is not finite, or an item that JSON does not know.
    """
    if isinstance(returned, dict):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "(none)"
            raise RewardError(f"returned a dict without score; its keys are: {keys}")
        extra = {str(key): _jsonable(item, str(key)) for key, item in returned.items() if key != "score"}
        return Score(_number(returned["score"], "a score of "), extra)
    return Score(_number(returned, ""), {})


def _number(value: Any, what: str) -> float:
    plain = value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy and torch scalars
        plain = value.item()
    if not isinstance(plain, int | float):
        raise RewardError(
            f"returned {what}{_shown(value)} ({type(value).__name__}), want a number or a dict with score"
        )
    try:
        number = float(plain)
    except OverflowError as error:
        raise RewardError(f"returned {what}an integer too large for a float") from error
    if not math.isfinite(number):
        raise RewardError(f"returned {what}{number}, want a finite number")
    return number


def _jsonable(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return int(value)
        raise RewardError(f"returned an integer beyond 64 bits in {where}; return it as text")
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _jsonable(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy and torch
        return _jsonable(value.tolist(), where)
    raise RewardError(
        f"returned a {type(value).__name__} in {where}, which JSON does not know: {_shown(value)}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
