"""Whole runs of agents: the shipped model with a calculator, from command line to stored trajectory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from demo_model.chats import CALCULATOR
from rollstream.cli import main as cli
from rollstream.demo import MODEL_PATH
from rollstream.store.validate import validate_run
from tests.faults.runs import rows_of
from tests.support.forward import demo_module, logprobs_under

ROWS, N = 64, 2

TOOLS = '''
import re
from rollstream.agent.tools.base import Tool, ToolError

def evaluate(expression):
    terms = re.fullmatch(r"\\s*(-?\\d+)\\s*([-+])\\s*(-?\\d+)\\s*", expression)
    if terms is None:
        raise ToolError("only sums of two numbers")
    a, sign, b = terms.groups()
    return str(int(a) + int(b) if sign == "+" else int(a) - int(b))

class Calculator(Tool):
    """Keeps what each rollout has computed."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.computed = {}

    async def create(self, instance_id=None, **kwargs):
        self.computed[instance_id] = []
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.computed[instance_id].append(evaluate(parameters["expression"]))
        return self.computed[instance_id][-1], 0.1

    async def calc_reward(self, instance_id, **kwargs):
        return len(self.computed[instance_id])

    async def release(self, instance_id, **kwargs):
        del self.computed[instance_id]
'''

FUNCTION = f"""
from rollstream.agent.tools.functions import function_tool

{TOOLS.partition("class Calculator")[0]}

@function_tool(schema={CALCULATOR!r})
def calculator(expression):
    return evaluate(expression)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tools, a tool file, and what makes them."""
    folder = tmp_path_factory.mktemp("agents")
    write_tools(folder, TOOLS)
    (folder / "functions.py").write_text(FUNCTION)
    return folder


def write_tools(folder: Path, source: str) -> Path:
    (folder / "my_tools.py").write_text(source)
    entry = {
        "class_name": f"{folder / 'my_tools.py'}:Calculator",
        "config": {"type": "native"},
        "tool_schema": CALCULATOR,
    }
    file = folder / "tools.yaml"
    file.write_bytes(orjson.dumps({"tools": [entry]}))  # JSON is YAML
    return file


def words(run_dir: Path, *more: str, tools: Path | None = None, n: int = N) -> list[str]:
    chosen = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"actor_rollout_ref.rollout.n={n}",
        "actor_rollout_ref.rollout.response_length=256",
        "data.max_prompt_length=512",
        f"train_tasks=[{{name: reasoning_gym, dataset: chain_sum, size: {ROWS}, seed: 7, config: "
        "{min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 2}}]",
        f"trainer.default_local_dir={run_dir}",
        "generation.seed=1",
        "generation.show_progress=false",
        *more,
    ]
    if tools is not None:
        key = "function_tool_path" if tools.suffix == ".py" else "tool_config_path"
        chosen += [
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
            f"actor_rollout_ref.rollout.multi_turn.{key}={tools}",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
        ]
    return chosen


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollstream.cli", "generate", "--json", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "ROLLSTREAM_CACHE": str(folder / "cache")},
        check=False,
    )


def mean_reward(rows: list[dict[str, Any]]) -> float:
    return float(sum(row["reward"] for row in rows) / len(rows))


@pytest.fixture(scope="module")
def tool_run(folder: Path) -> Path:
    done = run(words(folder / "run", tools=folder / "tools.yaml"), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert orjson.loads(done.stdout)["completed"] == ROWS * N
    return folder / "run"


def test_the_calculator_makes_the_model_better(tool_run: Path) -> None:
    helped = rows_of(tool_run)
    assert len(helped) == ROWS * N
    # About 0.94, and 0.60 without it: three standard errors of 128 rollouts lie between the figure and its bound.
    assert mean_reward(helped) > 0.85
    assert validate_run(tool_run).sound
    called = [row for row in helped if row["metrics"]["tool_calls"]]
    assert len(called) > 0.9 * len(helped)
    for row in called:
        extra = orjson.loads(row["extra"])
        results = row["metrics"]["tool_calls"] - row["metrics"]["tool_errors"]
        assert extra.get("tool_rewards", []) == [0.1] * int(results)
        assert extra["tool_scores"] == {"calculator": results}
        roles = [message["role"] for message in orjson.loads(row["messages"])]
        assert roles[:3] == ["user", "assistant", "tool"]
        assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["response_logprobs"])
        assert {0, 1} == set(row["response_mask"])
        masks = zip(row["response_mask"], row["response_logprobs"], strict=True)
        assert all(logprob == 0.0 for mask, logprob in masks if not mask)
        assert len(row["response_ids"]) <= 256


def test_log_probs_are_the_models_own_over_all_turns(tool_run: Path) -> None:
    """Of each sampled token, given everything before it: template and tool tokens are where they belong."""
    pytest.importorskip("torch")
    worst = 0.0
    for row in rows_of(tool_run)[:12]:
        own = logprobs_under(demo_module(), row["prompt_ids"], row["response_ids"])
        sampled = np.array(row["response_mask"], bool)
        worst = max(worst, float(np.abs(own - np.array(row["response_logprobs"]))[sampled].max()))
    assert 0 < worst < 1e-4


def test_show_prints_the_turns_and_both_masks(tool_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called = next(row for row in rows_of(tool_run) if row["metrics"]["tool_calls"] == 1 and row["reward"])
    assert cli(["show", str(tool_run), str(called["index"]), str(called["repeat"]), "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "tool calls: " in shown
    assert "[1:<tool_call>\n" in shown
    assert "[0:\n<|im_start|>user\n<tool_response>\n" in shown
    assert "<|im_end|>]" in shown
    answer = orjson.loads(called["messages"])[-1]["content"]
    assert f"[1:{answer}<|im_end|>]" in shown
