"""The reward of the training demo: the answer, character for character."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """1 for the right answer, 0 for any other."""
    return float(solution_str == ground_truth)
