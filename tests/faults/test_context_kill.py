"""R3, R4: SIGKILL of runs whose rollouts yield several trajectories: each is there whole, or owed."""

import asyncio
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.cli import main as cli
from rollstream.demo import MODEL_PATH
from rollstream.store.paths import RunPaths
from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from tests.faults.runs import LONGEST_RUN_S, Runner, overrides, write_prompts

DELETIONS = (0, 1, 2, 0, 1, 2, 0, 1)
"""Of each row: three rows with none, three with one, two with two."""
EXPECTED = [
    (index, 0, trajectory, trajectory < deletions)
    for index, deletions in enumerate(DELETIONS)
    for trajectory in range(deletions + 1)
]
"""Index, repeat, trajectory, whether it is a snapshot: 8 final ones and 7 snapshots."""
KILL_AFTER = (3, 6, 5), (0, 3, 6, 5, 6, 5)
"""Requests that each process makes before it is killed, about; 22 make a run."""
COLUMNS = ["index", "repeat", "trajectory", "is_snapshot", "prompt_ids", "response_ids", "response_mask"]


def answer(prompt: str) -> str:
    """Writes a note, deletes as often as the row has it, and ends. Sees only what the model is shown."""
    row = re.search(r"What is (\d+) \+", prompt)
    assert row is not None, prompt
    turn = prompt.count("<|im_start|>assistant") - 1
    if turn == 0:
        return call("note", key="row", content=row[1])
    if turn <= DELETIONS[int(row[1])]:
        return call("deleteContext", msg_id=2 * turn)
    return f"done with {row[1]}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{orjson.dumps({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


def settings(run_dir: Path, prompts: Path, url: str) -> list[str]:
    return overrides(
        run_dir,
        prompts,
        url,
        data__max_prompt_length=2048,
        actor_rollout_ref__rollout__agent__default_agent_loop="context_agent",
        actor_rollout_ref__rollout__response_length=512,
        generation__max_in_flight=2,
        generation__save_batch_size=3,
        generation__show_progress="false",
        generation__export="[jsonl]",
    )


async def until(runner: Runner, condition: Callable[[], bool]) -> None:
    """Waits for a condition or the end of the process, while the server serves."""
    async with asyncio.timeout(LONGEST_RUN_S):
        while not condition() and runner.process.poll() is None:
            await asyncio.sleep(0.001)


async def run_to_end(arguments: list[str], log: Path) -> None:
    runner = Runner(arguments, log=log)
    await until(runner, lambda: False)
    assert runner.process.returncode == 0, runner.output()[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kill_after", [KILL_AFTER[0], pytest.param(KILL_AFTER[1], marks=pytest.mark.soak)], ids=len
)
async def test_kills_lose_no_snapshot_and_double_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kill_after: tuple[int, ...]
) -> None:
    assert (len(EXPECTED), sum(DELETIONS)) == (15, 7)
    rng = random.Random(4)
    prompts = write_prompts(tmp_path / "prompts.jsonl", len(DELETIONS))
    rule = answer_by_text(load_tokenizer(str(MODEL_PATH)), answer)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    async with StubServer(rule, latency=Latency("fixed", 0.03)) as server:
        await run_to_end(settings(whole, prompts, server.url), tmp_path / "whole.log")
        assert server.stats.answered == len(EXPECTED) + len(DELETIONS)
        first = server.stats.answered

        kills = 0
        command = settings(killed, prompts, server.url)
        for number, answers in enumerate(kill_after):
            runner = Runner(command, log=tmp_path / f"kill-{number}.log")
            target = server.stats.requests + answers
            await until(runner, lambda target=target: server.stats.requests > target)  # type: ignore[misc]
            await asyncio.sleep(rng.uniform(0.0, 0.06))
            if runner.process.poll() is not None:
                assert runner.process.returncode == 0, runner.output()[-3000:]
                break
            runner.kill()
            kills += 1
        await run_to_end(command, tmp_path / "last.log")
        again = server.stats.answered - 2 * first

    assert kills >= len(kill_after) - 2, kills
    assert 0 <= again <= kills * 2 * 4, "what was in flight: two rollouts of four answers at most"
    assert cli(["validate", str(killed)]) == 0
    assert "is sound: 8 rollouts" in capsys.readouterr().out
    assert not RunPaths(killed).damaged_files()
    ours = pq.read_table(killed / "trajectories.parquet")
    assert ours.num_rows == 15
    keys = zip(*(ours[name].to_pylist() for name in COLUMNS[:4]), strict=True)
    assert list(keys) == EXPECTED
    theirs = pq.read_table(whole / "trajectories.parquet")
    for name in [*COLUMNS, "response_logprobs", "messages", "finish_reason", "num_turns"]:
        assert ours[name].equals(theirs[name]), name
    for row in ours.to_pylist():
        check_trajectory(row)

    lines = [orjson.loads(line) for line in (killed / "trajectories.jsonl").read_bytes().splitlines()]
    assert [tuple(line[name] for name in COLUMNS[:4]) for line in lines] == EXPECTED
    assert [line["response_ids"] for line in lines] == ours["response_ids"].to_pylist()


def check_trajectory(row: dict[str, Any]) -> None:
    """The last answer is where the trajectory says that it ends; earlier edits are stubs."""
    messages = orjson.loads(row["messages"])
    index, number = row["index"], row["trajectory"]
    assert row["finish_reason"] == "stop"
    assert row["response_mask"][-1] == 1
    assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["response_logprobs"])
    assert [message["content"] for message in messages if "[deleted]" in message["content"]] == [
        f"[msg_id: {2 * at}] [deleted]" for at in range(1, number + 1)
    ]
    assert all(messages[2 * at]["content"].endswith("[deleted]") for at in range(1, number + 1))
    last = messages[-1]
    if row["is_snapshot"]:
        assert last["tool_calls"][0]["function"]["arguments"] == {"msg_id": 2 * (number + 1)}
        assert orjson.loads(row["extra"])["deleted_msg_ids"] == [2 * (number + 1)]
    else:
        assert last["content"].startswith(f"done with {index}")
