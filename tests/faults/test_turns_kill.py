"""R1, R3: SIGKILL of a real model's tool agents: what they have finished of a rollout is not done again."""

import random
import sys
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.cli import main as cli
from rollstream.demo import MODEL_PATH
from rollstream.store.records import RecordCodec
from rollstream.store.run import Run
from rollstream.store.turns import TurnFiles
from rollstream.testing.stub_faults import Latency
from rollstream.trajectory import CALL_TIMES, RolloutKey
from tests.faults.runs import Runner, overrides, run_to_end, stub_in_thread, write_prompts
from tests.integration.test_agents import FUNCTION
from tests.support.forward import demo_module, logprobs_under

pytest.importorskip("openvino_genai")

ROWS, N, IN_FLIGHT = 6, 2, 4

LOOP = """
import asyncio
from rollstream.agent.tool_agent import State, ToolAgent

class Quiz(ToolAgent):
    '''Asks for another sum after each answer: some ten turns. Notes what the engine has answered.'''

    resumable = True

    async def counted(self, ask, sampling, **how):
        completion = await super().counted(ask, sampling, **how)
        with open({log!r}, "a") as log:
            log.write(f"{{self.request_id}}\\n")
        await asyncio.sleep(0.03)
        return completion

    def after_answer(self):
        state = super().after_answer()
        if state is State.TERMINATED and self.finish_reason == "stop" and self.conversation.user_turns < 8:
            return State.INTERACTING
        return state

    async def interact(self):
        a = 10 + 7 * self.conversation.user_turns
        text = f"State the final answer to the following arithmetic problem: {{a}} + 41 ="
        return State.GENERATING if self.conversation.add([self.users_message(text)]) else self.end("length")
"""


def words(folder: Path, name: str) -> list[str]:
    (folder / f"{name}.py").write_text(LOOP.format(log=str(folder / f"{name}.calls")))
    (folder / f"{name}.calls").touch()
    (folder / f"{name}.yaml").write_text(f"- {{name: quiz, _target_: {folder / name}.py:Quiz}}\n")
    chosen: dict[str, Any] = {
        "actor_rollout_ref.model.path": MODEL_PATH,
        "actor_rollout_ref.rollout.n": N,
        "actor_rollout_ref.rollout.response_length": 1500,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "quiz",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": folder / f"{name}.yaml",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path": folder / "functions.py",
        "data.max_prompt_length": 512,
        "data.train_files": folder / "prompts.jsonl",
        "trainer.default_local_dir": folder / name,
        "generation.seed": 5,
        "generation.keep_turns": "true",
        "generation.max_in_flight": IN_FLIGHT,
        "generation.save_batch_size": 3,
        "generation.show_progress": "false",
    }
    return [f"{key}={value}" for key, value in chosen.items()]


def kept_turns(root: Path) -> dict[RolloutKey, list[tuple[list[int], list[float] | None]]]:
    """The ids and log-probs of the turns that a run keeps, by rollout."""
    run, codec = Run.open(root), RecordCodec()
    files = TurnFiles(run.paths, run.manifest.run_id_bytes, run.state().turns)
    found = {}
    for key in (RolloutKey(index, repeat) for index in range(ROWS) for repeat in range(N)):
        turns = [codec.decode_turn(body).completion for body in files.turns_of(key)]
        if turns:
            found[key] = [(turn.token_ids, turn.logprobs) for turn in turns]
    return found


def calls_of_finished(root: Path) -> int:
    return sum(
        int(row["engine_calls"])
        for table in Run.open(root).rows(["metrics"])
        for row in table["metrics"].to_pylist()
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.soak)])
def test_kills_cost_no_turn_that_was_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int
) -> None:
    chance = random.Random()
    (tmp_path / "functions.py").write_text(FUNCTION)
    lines = [
        {"prompt": f"State the final answer to the following arithmetic problem: {21 + row} + 34 ="}
        for row in range(ROWS)
    ]
    (tmp_path / "prompts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    run_to_end(words(tmp_path, "whole"), tmp_path / "whole.log")
    calls = (tmp_path / "whole.calls").read_text().split()
    assert len(calls) > 60, "there are not several turns in a rollout"

    command, root, log = words(tmp_path, "killed"), tmp_path / "killed", tmp_path / "killed.calls"
    kept, lost = list[dict[RolloutKey, Any]](), [0]
    for number in range(kills):
        runner = Runner(command, log=tmp_path / f"kill-{number}.log")
        target = len(log.read_text().split()) + chance.randrange(8, 40)
        if not runner.wait_until(lambda target=target: len(log.read_text().split()) >= target):  # type: ignore[misc]
            assert runner.process.returncode == 0, runner.output()[-3000:]
            break
        runner.kill()
        kept.append(kept_turns(root))
        there = sum(map(len, kept[-1].values())) + calls_of_finished(root)
        lost.append(len(log.read_text().split()) - there)
        assert (
            lost[-1] >= lost[-2]
        )  # no loop waits for the disk: how many are on their way there depends on it
        assert cli(["validate", str(root)]) == 0, capsys.readouterr().out
        capsys.readouterr()
        assert cli(["status", "--json", str(root)]) == 0
        assert orjson.loads(capsys.readouterr().out)["half_done"] == len(kept[-1]) <= IN_FLIGHT
    run_to_end(command, tmp_path / "last.log")

    assert any(kept)
    again = len(log.read_text().split()) - len(calls)
    assert again == lost[-1], "a turn that was kept is generated again"
    assert list((root / "turns").iterdir()) == []
    columns = ["index", "repeat", "prompt_ids", "response_ids", "response_mask", "response_logprobs"]
    columns += ["policy_versions", "messages", "num_turns", "finish_reason", "extra", "attempts"]
    ours, theirs = (
        [row for table in Run.open(tmp_path / name).rows([*columns, "metrics"]) for row in table.to_pylist()]
        for name in ("killed", "whole")
    )
    for run in (ours, theirs):
        run.sort(key=lambda row: (row["index"], row["repeat"]))
        for row in run:
            row["extra"] = {key: one for key, one in orjson.loads(row["extra"]).items() if key != CALL_TIMES}
    assert len(ours) == ROWS * N
    module = demo_module()
    for mine, other in zip(ours, theirs, strict=True):
        for name in set(columns) - {"response_logprobs"}:
            assert mine[name] == other[name], name
        for name in ("engine_calls", "tool_calls", "tool_errors"):
            assert mine["metrics"][name] == other["metrics"][name]
        scored = logprobs_under(module, mine["prompt_ids"], mine["response_ids"])
        sampled = [value for value, mask in zip(scored, mine["response_mask"], strict=True) if mask]
        own = [
            value
            for value, mask in zip(mine["response_logprobs"], mine["response_mask"], strict=True)
            if mask
        ]
        assert own == pytest.approx(sampled, abs=1e-3)
        for turns in (found.get(RolloutKey(mine["index"], mine["repeat"]), []) for found in kept):
            at = 0
            for ids, logprobs in turns:
                assert own[at : at + len(ids)] == [*array("f", logprobs)], (
                    "a turn that was kept is there as it was"
                )
                at += len(ids)


PROGRAM = """
import json, os, urllib.request

row = json.load(open(os.environ["ROLLSTREAM_ROW"]))
messages = row["prompt"]
for number in range(8):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages, "max_tokens": 24}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {number}?"}]
json.dump({"reward": len(messages)}, open(os.environ["ROLLSTREAM_RESULT"], "w"))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_that_begins_again_is_told_what_it_was_told(tmp_path: Path) -> None:
    chance = random.Random()
    (tmp_path / "agent.py").write_text(PROGRAM)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 5)
    with stub_in_thread(latency=Latency("fixed", 0.05)) as server:

        def command(name: str) -> list[str]:
            return overrides(
                tmp_path / name,
                prompts,
                server.url,
                actor_rollout_ref__rollout__agent__default_agent_loop="command_agent",
                actor_rollout_ref__rollout__response_length=1000,
                gateway__command=f"[{sys.executable},{tmp_path}/agent.py]",
                generation__keep_turns="true",
                generation__max_in_flight=3,
                generation__show_progress="false",
            )

        run_to_end(command("whole"), tmp_path / "whole.log")
        assert server.stats.answered == 5 * 8
        kills = 3
        for number in range(kills):
            runner = Runner(command("killed"), log=tmp_path / f"kill-{number}.log")
            target = server.stats.answered + chance.randrange(3, 12)
            if not runner.wait_until(lambda target=target: server.stats.answered >= target):  # type: ignore[misc]
                assert runner.process.returncode == 0, runner.output()[-3000:]
                break
            runner.kill()
        run_to_end(command("killed"), tmp_path / "last.log")
        again = server.stats.answered - 2 * 5 * 8
    # An answer is in flight until its turn is on the disk: at most one, and the next one's, of each rollout.
    assert 0 <= again <= kills * 3 * 2
    columns = [
        "index",
        "prompt_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "messages",
        "reward",
    ]
    ours, theirs = (
        [row for table in Run.open(tmp_path / name).rows(columns) for row in table.to_pylist()]
        for name in ("killed", "whole")
    )
    assert sorted(ours, key=lambda row: row["index"]) == sorted(theirs, key=lambda row: row["index"])
    assert len(ours) == 5
