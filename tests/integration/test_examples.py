"""The page "Agents": its commands, programs and files, exactly as they stand there."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.agent.base import AgentResources
from rollstream.agent.context import ContextAgent
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import AgentLoops, load_agent_loops
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.generation.run import run_generation
from rollstream.testing.scripted import ScriptedEngine
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import SamplingParams
from tests.faults.runs import rows_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Where the commands run: what they read is there, what they write is not in the repository."""
    for name in ("examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_in(clone: Path, command: list[str]) -> str:
    """What it prints. The folder of this Python comes first on PATH, as in an activated environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stored(run: Path) -> list[dict[str, Any]]:
    return [{**row, "extra": orjson.loads(row["extra"])} for row in rows_of(run)]


def command(words: str) -> str:
    (found,) = (block for block in blocks("sh") if words in block)
    return found


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = re.findall(
        r"`(examples/[^`]+)`:\n\n(?:<!-- .*? -->\n)?```\w+\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE
    )
    assert dict(shown) == {
        path: (ROOT / path).read_text()
        for path in (
            "examples/interaction/interactions.yaml",
            "examples/try_again/try_again.py",
            "examples/try_again/loops.yaml",
        )
    }


def test_the_example_loop_runs_and_a_second_try_is_told_so(clone: Path) -> None:
    printed = run_in(clone, ["bash", "-ec", command("=try_again")])
    assert "64/64 rollouts done, 0 failed" in printed
    assert "assistant" in printed.split("index 0")[1]  # `rollstream show`
    assert "2 passed" in printed  # its test
    rows = stored(clone / "outputs" / "try_again")
    assert {row["finish_reason"] for row in rows} == {"stop", "max_turns"}
    for row in rows:
        scores = row["extra"]["turn_scores"]
        assert row["num_turns"] == 2 * len(scores)
        assert row["reward"] == pytest.approx(scores[-1] * (1 - 0.2 * (len(scores) - 1)))
        asked = [one for one in orjson.loads(row["messages"]) if one["role"] == "user"][1:]
        assert [one["content"] for one in asked] == ["Your answer is wrong. Try again."] * (len(scores) - 1)
    assert any(row["extra"]["turn_scores"] == [0.0, 1.0] for row in rows)


def test_the_example_interaction_runs(clone: Path) -> None:
    assert "64/64 rollouts done, 0 failed" in run_in(
        clone, ["bash", "-ec", command("interaction_config_path")]
    )
    rows = stored(clone / "outputs" / "interaction")
    for row in rows:
        answers, scores = row["num_turns"] // 2, row["extra"]["turn_scores"]
        unseen = row["finish_reason"] in ("max_turns", "length")  # nobody looks at the last answer then
        assert len(scores) == answers - unseen
        assert not scores or row["extra"]["interaction_score"] == 1 / len(scores)
    assert any(row["extra"]["turn_scores"] == [0.0, 1.0] for row in rows)


async def test_the_options_of_the_context_agent_do_what_the_page_says(tmp_path: Path) -> None:
    (text,) = (block for block in blocks("yaml") if "ContextAgent" in block)
    (tmp_path / "loops.yaml").write_text(text)
    loops = AgentLoops(load_agent_loops(str(tmp_path / "loops.yaml")))
    tokenizer = load_tokenizer(str(MODEL_PATH))
    deletion = '<tool_call>\n{"name": "deleteContext", "arguments": {"msg_id": 0}}\n</tool_call>'
    rule = answer_by_text(tokenizer, lambda prompt: "5" if "[deleted]" in prompt else deletion)
    engine = ScriptedEngine(rule)
    await engine.start()
    prompts = PromptRenderer(tokenizer, prompt_length=4096, truncation="error")
    resources = AgentResources(engine, tokenizer, prompts, response_length=2048)
    loop = loops.create("careful_context", resources, request_id="0-0-1")
    assert isinstance(loop, ContextAgent)
    assert (loop.max_snapshots, loop.snapshot_scoring) == (4, "outcome")
    question = [{"role": "user", "content": "2 + 3 ="}, {"role": "user", "content": "1 " * 1000}]
    result = await loop.run(SamplingParams(2048), raw_prompt=question, prompt_key="q")
    assert isinstance(result, list)
    snapshot, final = result
    assert snapshot.extra == {"deleted_msg_ids": [0], "tool_counts": {"deleteContext": [1, 0]}}
    tokens = len(snapshot.prompt_ids) + len(snapshot.response_ids)
    assert snapshot.reward == pytest.approx(-0.001 * max(0, tokens - 2048))
    assert tokens > 2048
    assert (snapshot.is_snapshot, final.is_snapshot, final.reward) == (True, False, None)
    prompt = tokenizer.decode(final.prompt_ids, skip_special_tokens=False)
    assert "[msg_id: 0] [deleted]<|im_end|>" in prompt
    assert "[msg_id: 1]\n1 1" in prompt


async def test_a_rule_of_texts_serves_a_whole_run_over_http(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(MODEL_PATH))
    rule = answer_by_text(tokenizer, lambda prompt: "131" if "Try again." in prompt else "13")
    async with StubServer(rule) as server:
        result = await asyncio.to_thread(
            run_generation,
            [
                f"actor_rollout_ref.model.path={MODEL_PATH}",
                "actor_rollout_ref.rollout.name=sglang",
                f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
                "actor_rollout_ref.rollout.agent.default_agent_loop=try_again",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT}/examples/try_again/loops.yaml",
                f"data.train_files={ROOT}/examples/try_again/prompts.jsonl",
                f"trainer.default_local_dir={tmp_path}/run",
                "generation.show_progress=false",
            ],
        )
    assert (result.completed, result.failed) == (16, 0)
    rows = stored(tmp_path / "run")
    scores = {orjson.loads(row["ground_truth"]): row["extra"]["turn_scores"] for row in rows}
    assert scores.pop("131") == [0.0, 1.0]
    assert set(map(tuple, scores.values())) == {(0.0, 0.0, 0.0)}


def test_the_calculator_is_used(clone: Path) -> None:
    pytest.importorskip("reasoning_gym")
    printed = run_in(clone, ["bash", "-ec", command("calculator")])
    assert "16/16 rollouts done, 0 failed" in printed
    assert "tools: 16 calls" in printed
