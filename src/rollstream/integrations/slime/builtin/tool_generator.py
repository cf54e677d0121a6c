"""Rollouts that call tools: rollstream's `tool_agent`, scored like those of `math_generator.py`.

The payload names tools of the file that the server was started with: `"tools": ["calculator"]`, of
`--tools examples/calculator/tools.yaml`. It may bound the conversation by `max_assistant_turns` and
`max_user_turns`, and say how the model writes calls by `tool_format`.
"""

from typing import Any

from rollstream.integrations.slime.builtin.math_generator import compute_score
from rollstream.integrations.slime.generation import run_generation

TASK_TYPE = "tool"


def run_rollout(data: dict[str, Any]) -> None:
    """Generates what the payload asks for. Runs in a process of its own."""
    run_generation(data, agent_loop="tool_agent", reward=compute_score)
