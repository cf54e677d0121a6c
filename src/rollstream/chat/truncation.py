"""Cutting a prompt that is too long."""

from typing import Literal, assert_never

from rollstream.errors import DataError

Truncation = Literal["error", "left", "right", "middle"]
"""Which side is cut off, as verl names it; `error` cuts nothing."""


def truncate(ids: list[int], max_length: int, how: Truncation) -> list[int]:
    """Cuts prompt ids to `max_length`, the way verl's `data.truncation` does.

    Args:
        ids: Token ids; not changed.
        max_length: Tokens, > 0.
        how: `left` cuts the beginning off and keeps the end; `right` keeps the beginning; `middle` keeps the
            first `max_length // 2` and from the end what then still fits; `error` raises.

    Returns:
        `ids` itself when it fits, else a new list of exactly `max_length`.

    Raises:
        DataError: `how` is `error` and `ids` does not fit.
        ValueError: `max_length` is not positive.
    """
    if max_length <= 0:
        raise ValueError(f"max_length must be positive, not {max_length}")
    if len(ids) <= max_length:
        return ids
    match how:
        case "left":
            return ids[-max_length:]
        case "right":
            return ids[:max_length]
        case "middle":
            head = max_length // 2
            return ids[:head] + ids[len(ids) - (max_length - head) :]
        case "error":
            raise DataError(
                f"the prompt has {len(ids)} tokens, more than data.max_prompt_length={max_length}; raise it, "
                "or set data.truncation (left, right, middle) or data.filter_overlong_prompts"
            )
    assert_never(how)
