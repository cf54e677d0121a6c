"""Half of the reward is for the right answer, half for one that was given without the note in the context."""

from typing import Any

_TURNS_WITH_NOTE = 3
"""Note, question, answer. A deletion brings two messages more."""


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **_: Any) -> float:
    """0, 0.5 or 1; nothing where the model does not come to an answer."""
    if not solution_str.strip():
        return 0.0
    right = solution_str.strip() == str(ground_truth)
    return 0.5 * right + 0.5 * (extra_info["num_turns"] > _TURNS_WITH_NOTE)
