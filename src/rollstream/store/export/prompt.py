"""Which messages of a trajectory are its prompt."""

from collections.abc import Sequence
from typing import Any

PROMPT_MESSAGES = "prompt_messages"
"""Key of a trajectory's `extra` by which an agent loop says how many of `messages` the prompt shows."""


def prompt_messages(
    messages: Sequence[dict[str, Any]],
    *,
    stated: object,
    engine_calls: int,
    sampled_stretches: int,
    aborted: bool = False,
) -> list[dict[str, Any]] | None:
    """The messages that `prompt_ids` show; None where that cannot be known.

    An artifact has the whole conversation in one list. What the loop states counts. Otherwise every engine
    call must have given an assistant message and a stretch of sampled tokens, as it does in a `Conversation`:
    then the prompt ends before as many assistant messages from the end.

    Args:
        messages: the whole conversation.
        stated: `extra[PROMPT_MESSAGES]`, or None.
        engine_calls: generations of this trajectory.
        sampled_stretches: runs of ones in the response mask.
        aborted: whether the last call may have given no tokens.
    """
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated <= len(messages):
        return list(messages[:stated])
    if sampled_stretches != engine_calls and not (aborted and sampled_stretches == engine_calls - 1):
        return None
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    if not 0 < engine_calls <= len(answers):
        return None
    return list(messages[: answers[-engine_calls]])
