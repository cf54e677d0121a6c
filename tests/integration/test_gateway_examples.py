"""The page "The gateway": its commands and files as they stand there, and the programs of examples/."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.gateway.sandbox import SandboxOptions, check_sandbox
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from tests.faults.runs import rows_of
from tests.integration.test_examples import run_in

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gateway.md").read_text()
CODER = ROOT / "examples" / "coding_agent"


def blocks(language: str, words: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [block for block in found if words in block]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Where commands run: what they read is there, what they write is not in the repository."""
    for name in ("examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_the_first_recorded_rollout(clone: Path) -> None:
    (program,) = blocks("python", "ROLLSTREAM_RESULT")
    (clone / "my_agent.py").write_text(program)
    (command,) = blocks("sh", "my_agent.py")
    printed = run_in(clone, ["bash", "-ec", command])
    assert "8/8 rollouts done, 0 failed" in printed
    assert "assistant" in printed  # `rollstream show`
    for row in rows_of(clone / "outputs" / "first"):
        assert row["num_turns"] == 2 and len(row["response_logprobs"]) == len(row["response_ids"])


@pytest.mark.parametrize(
    ("needs", "words", "rollouts"),
    [
        ("openai", [], 4),
        ("anthropic", ["gateway.command=[python,examples/gateway/anthropic_program.py]"], 4),
        ("langgraph", ["gateway.command=[python,examples/gateway/langgraph_program.py]"], 4),
        ("agents", ["actor_rollout_ref.rollout.agent.default_agent_loop=function_agent"], 16),
    ],
)
def test_a_program_solves_sums_with_a_calculator(
    clone: Path, needs: str, words: list[str], rollouts: int
) -> None:
    pytest.importorskip(needs)
    pytest.importorskip("reasoning_gym")
    size = f"train_tasks.0.size={rollouts // 2}"
    command = ["rollstream", "generate", "--config", "examples/gateway/run.yaml", size, *words]
    printed = run_in(clone, [*command, "trainer.default_local_dir=outputs/run"])
    assert f"{rollouts}/{rollouts} rollouts done, 0 failed" in printed
    rows = rows_of(clone / "outputs" / "run")
    called = [row for row in rows if row["num_turns"] > 2]
    assert len(called) > len(rows) / 2  # the tool was used
    for row in called:
        assert {0, 1} == set(row["response_mask"])
    final = [row for row in rows if not row["is_snapshot"]]
    assert len(final) == rollouts and all(row["reward"] in (0.0, 1.0) for row in final)
    if needs == "agents":
        assert len(rows) >= 2 * rollouts  # it is asked twice, or three times
        assert all(len(orjson.loads(row["extra"])["answers"]) in (2, 3) for row in final)


FIZZ = """def fizz(n):
    return "Fizz" * (n % 3 == 0) + "Buzz" * (n % 5 == 0) or str(n)
"""


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def code(prompt: str) -> str:
    """A model that can write one of the two files; the other one ends whoever imports it, in good order."""
    if "fizz.py" not in prompt.split("<|im_start|>user")[1]:
        written = "is written" in prompt
        return "Done." if written else call("write_file", path="roman.py", content="raise SystemExit(0)")
    if "is written" not in prompt:
        return call("write_file", path="fizz.py", content=FIZZ)
    if "FizzBuzz\n" not in prompt.split("is written")[1]:
        return call("run", command="python -c 'import fizz; print(fizz.fizz(15))'")
    return "fizz.py is there."


@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"])
async def test_a_coding_agent_is_judged_by_a_test_that_it_does_not_see(clone: Path, sandbox: str) -> None:
    if sandbox == "bubblewrap":
        try:
            check_sandbox(SandboxOptions(kind="bubblewrap"))
        except ConfigError as error:
            pytest.skip(str(error))
    command = ["rollstream", "generate", "--config", "examples/coding_agent/run.yaml"]
    rule = answer_by_text(load_tokenizer(str(MODEL_PATH)), code)
    async with StubServer(rule) as server:
        words = {
            "actor_rollout_ref.model.path": MODEL_PATH,
            "actor_rollout_ref.rollout.name": "sglang",
            "actor_rollout_ref.rollout.server_urls": f"[{server.url}]",
            "gateway.sandbox": sandbox,
            "trainer.default_local_dir": "outputs/run",
        }
        command += [f"{key}={value}" for key, value in words.items()]
        printed = await asyncio.to_thread(run_in, clone, command)
    assert "8/8 rollouts done, 0 failed" in printed
    rewards: dict[int, set[Any]] = {}
    for row in rows_of(clone / "outputs" / "run"):
        rewards.setdefault(row["index"], set()).add(row["reward"])
    assert rewards == {0: {1.0}, 1: {0.0}}
