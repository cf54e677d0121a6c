"""Problems with one right answer: one prompt, one response, scored by its final answer.

Start the server with `--generators builtin`, or copy this file as a template for a `NAME_generator.py` of
your own, in a folder given by `--generators`. A row of the input file (JSON Lines):

    {"instance_id": 17, "prompt": [{"role": "user", "content": "What is 12 + 34?"}], "label": "46"}

A row with a `data_source` that a rule of rollstream knows (such as those of the task `reasoning_gym`) is
scored by that rule; any other one by comparing what stands in the last `\\boxed{}`, or else the last number,
with its `label`.

To change what a trainer gets, define any of the hooks here, with these names: `get_group_data_meta_info`,
`is_valid_group`, `filter_item`, `normalize_group_data`, `pad_group_data`, `transform_group`.
"""

import re
from fractions import Fraction
from typing import Any

from rollstream.integrations.slime import run_generation
from rollstream.reward.rules import default_reward

TASK_TYPE = "math"

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+|/\d+)?")
_DIGITS = 200
"""A longer answer is compared as a text: it may be anything, and 1e999999999 fills a machine."""


def run_rollout(data: dict[str, Any]) -> None:
    """Generates what the payload asks for. Runs in a process of its own."""
    run_generation(data, agent_loop="single_turn_agent", reward=compute_score)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1 when the final answer is the label, else 0. What it raises marks the rollout as failed."""
    if (rule := default_reward(data_source)) is not None:
        return float(rule(data_source, solution_str, ground_truth, extra_info))
    if ground_truth is None:
        raise ValueError("the row has no label")
    return float(same_answer(final_answer(solution_str), str(ground_truth)))


def final_answer(text: str) -> str:
    """What stands in the last `\\boxed{}`, else the last number, else all of it."""
    if (start := text.rfind("\\boxed{")) >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for at in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[begin:at].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else text.strip()


def same_answer(answer: str, label: str) -> bool:
    """Whether two answers are the same number, or the same text."""
    ours, theirs = as_number(answer), as_number(label)
    if ours is not None and theirs is not None:
        return ours == theirs
    return answer.strip() == label.strip()


def as_number(text: str) -> Fraction | None:
    """The number that a text is, exactly; None when it is none."""
    plain = text.strip().strip("$").strip()
    if len(plain) > _DIGITS or not _NUMBER.fullmatch(plain):
        return None
    try:
        return Fraction(plain.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
