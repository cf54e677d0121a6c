"""What an answer is worth. Called once for each rollout, by keyword arguments."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float | dict[str, Any]:
    """1 where the last number of the answer is the true one, else 0.

    A number is the reward. Of a dict, `score` is; the rest is kept beside it, in reward_extra. A function
    that raises leaves its rollout without a reward, never at zero.
    """
    numbers = re.findall(r"-?\d+", solution_str)
    answer = numbers[-1] if numbers else None
    return {"score": float(answer == str(ground_truth)), "answer": answer}
