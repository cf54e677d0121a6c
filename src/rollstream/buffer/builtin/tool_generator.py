"""Rollouts that call tools: rollstream's `tool_agent`, scored like those of `math_generator.py`.

The payload of `/start_rollout` names the tools, as verl's files do: `tool_config_path` (a YAML file, see
examples/calculator/tools.yaml) or `function_tool_path` (a Python file with functions); and may bound the
conversation by `max_assistant_turns` and `max_user_turns`, and name how the model writes calls by
`tool_format`.
"""

from typing import Any

from rollstream.buffer.builtin.math_generator import compute_score
from rollstream.buffer.generation import run_generation

TASK_TYPE = "tool"


def run_rollout(data: dict[str, Any]) -> None:
    """Generates what the payload asks for. Runs in a process of its own."""
    run_generation(data, agent_loop="tool_agent", reward=compute_score, needs_label=True)
