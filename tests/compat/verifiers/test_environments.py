"""Real environments of the installed verifiers on the demo model: exact tokens, rewards, failures."""

import asyncio
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("verifiers")
pytest.importorskip("openvino_genai")

from rollstream.agent.registry import AgentLoops, load_agent_loops
from rollstream.agent.tools.session import ToolLimits
from rollstream.agent.tools.toolbox import load_toolbox
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
from rollstream.integrations.verifiers import write_prompts
from rollstream.trajectory import Rollout
from tests.compat.verifiers.parts import (
    FILE,
    IS_V1,
    environment,
    listened,
    seen,
    text,
    turns,
    worker,
)
from tests.support.until import until
from tests.unit.agent.rollouts import END, completed, demo_tokenizer, failed, resources, started

TOOLS = """
from demo_model.chats import CALCULATOR
from rollstream.agent.tools.functions import function_tool

@function_tool(schema=CALCULATOR)
def calculator(expression):
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))
"""


async def run_all(work: Any, rows: list[Any], n: int = 1) -> list[Rollout]:
    results = await asyncio.gather(*(work.run(row, repeat) for row in rows for repeat in range(n)))
    return [completed(result) for result in results]


def check_heard(engine: Any, rollouts: list[Rollout]) -> None:
    """What is stored is what the engine sampled, each answer once, behind the prompt that it got."""
    owed = [(prompt, one.token_ids, one.logprobs) for prompt, one in engine.heard]
    for rollout in rollouts:
        for trajectory in rollout.trajectories:
            for before, ids, logprobs in turns(trajectory):
                owed.remove((before, ids, logprobs))
    assert not owed


def check_seen(rollouts: list[Rollout]) -> None:
    """The ids say what the environment saw."""
    told = [(one["content"], one["calls"]) for one in seen().values()]
    for rollout in rollouts:
        for trajectory in rollout.trajectories:
            for _, ids, _ in turns(trajectory):
                said = text(ids)
                call = re.search(r'"arguments": (\{.*\})\}', said)
                if call is None:
                    assert (said, []) in told
                else:
                    assert any(
                        calls and call[1].replace(" ", "") == calls[0].replace(" ", "") for _, calls in told
                    )


async def test_a_tool_environment_has_the_tokens_of_the_tool_agent(tmp_path: Path) -> None:
    """The same model, tool and seeds: token for token what the house's own loop gives."""
    (tmp_path / "tools.py").write_text(TOOLS)
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="tools", size=12)
        theirs = worker(engine, loops, seed=3)
        tools = load_toolbox(
            tool_config_path=None, function_tool_path=str(tmp_path / "tools.py"), limits=ToolLimits()
        )
        ours = worker(engine, tools=tools, seed=3)
        got = await run_all(theirs, rows, n=2)
        check_heard(engine, got)
        check_seen(got)
        plain = [replace(row, agent_name=None) for row in rows]
        native = await run_all(ours, plain, n=2)
    for mine, other in zip(got, native, strict=True):
        (a,), (b,) = mine.trajectories, other.trajectories
        assert (a.prompt_ids, a.response_ids, a.response_mask) == (
            b.prompt_ids,
            b.response_ids,
            b.response_mask,
        )
        assert a.response_logprobs == pytest.approx(b.response_logprobs, abs=1e-4)
        assert (a.finish_reason, a.num_turns) == (b.finish_reason, b.num_turns)
        assert a.messages == b.messages
    # Scored by the environment's rubric, and rightly.
    answers = [one.final.messages[-1]["content"] for one in got]
    truths = [
        row.columns["verifiers"].get("task", row.columns["verifiers"].get("input"))["answer"] for row in rows
    ]
    for at, rollout in enumerate(got):
        assert rollout.final.reward == float(answers[at] == truths[at // 2])
        assert rollout.final.reward_extra["right"] == rollout.final.reward
    assert sum(one.final.reward or 0.0 for one in got) > len(got) / 2
    assert all(any(m["role"] == "tool" for m in one.final.messages) for one in got)


@pytest.mark.parametrize("kind", ["checker", "rewrites"])
async def test_an_environment_that_answers(tmp_path: Path, kind: str) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind=kind, size=10)
        work = worker(engine, loops)
        rollouts = await run_all(work, rows, n=2)
        check_heard(engine, rollouts)
    check_seen(rollouts)
    lengths = [len(one.trajectories) for one in rollouts]
    assert max(len(turns(t)) for one in rollouts for t in one.trajectories) == (
        1 if kind == "rewrites" else 3
    )
    assert max(lengths) == (3 if kind == "rewrites" else 1)
    for rollout in rollouts:
        final = rollout.final
        answers = sum(len(turns(t)) for t in rollout.trajectories)
        # A snapshot's reward is the rollout's.
        assert {t.reward for t in rollout.trajectories} == {final.reward}
        assert final.extra["verifiers"]["environment"].endswith(":load_environment")
        if not IS_V1 and final.reward == 0.0:
            assert final.finish_reason == "max_turns"
        assert sum(t.metrics.engine_calls for t in rollout.trajectories) == answers
        assert final.metrics.generate_s > 0
    assert {one.final.reward for one in rollouts} == {0.0, 1.0}


@pytest.mark.skipif(not IS_V1, reason="clients of verifiers 0.2 don't stream")
async def test_a_harness_that_streams(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="tools", size=4, stream=True)
        rollouts = await run_all(worker(engine, loops), rows)
        check_heard(engine, rollouts)
    check_seen(rollouts)
    assert all(one.final.num_turns == 4 for one in rollouts)


@pytest.mark.skipif(not IS_V1, reason="agents are there from verifiers 0.3 on")
async def test_agents_that_train_are_kept(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="duel", size=2)
        rollouts = await run_all(worker(engine, loops), rows)
    for rollout in rollouts:
        first, last = rollout.trajectories
        assert (first.is_snapshot, last.is_snapshot) == (True, False)
        right = [t.reward_extra["right"] for t in (first, last)]
        assert [first.reward, last.reward] == [right[0] + 0.0, right[1] + 20.0]
        assert {t.extra["verifiers"]["agent"] for t in (first, last)} == {"solver"}
        assert [t.metrics.engine_calls for t in (first, last)] == [2, 2]
    assert sum(len(turns(t)) for one in rollouts for t in one.trajectories) * 3 == len(engine.heard) * 2


@pytest.mark.skipif(IS_V1, reason="from 0.3 on an environment has no token ids without a renderer")
async def test_the_environments_own_record_of_the_tokens_is_the_same(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="tools", size=4)
        rollouts = await run_all(worker(engine, loops), rows)
    told = [(one["prompt_ids"], one["ids"], one["logprobs"]) for one in seen().values()]
    for rollout in rollouts:
        for before, ids, logprobs in turns(rollout.final):
            assert (before, ids, pytest.approx(logprobs)) in told


async def test_a_broken_environment_fails_its_own_rollout_with_the_cause(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="checker", size=3, breaks_at=1)
        work = worker(engine, loops, max_attempts=2)
        results = await asyncio.gather(*(work.run(row, 0) for row in rows))
    completed(results[0])
    completed(results[2])
    failure = failed(results[1])
    if IS_V1:
        assert re.search("TaskError.*no such world", failure.error)
        assert failure.attempts == 1
    else:
        assert re.search("SandboxError.*the sandbox is gone", failure.error)
        assert failure.attempts == 2  # what is wrong with a sandbox may pass


async def test_errors_of_the_engine_are_the_engines(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="tools", size=1)
        work = worker(engine, loops, max_attempts=1)
        engine.fails = [EngineUnavailableError("away for a moment")]
        assert completed(await work.run(rows[0], 0)).attempts == 1  # an outage costs no attempt
        engine.fails = [EngineError("ids outside of the vocabulary")]
        failure = failed(await work.run(rows[0], 1))
    assert failure.stage == "engine"
    assert failure.error == "EngineError: ids outside of the vocabulary"


async def test_a_model_that_runs_out_of_room_is_no_failure(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="checker", size=10)
        rollouts = await run_all(worker(engine, loops, response_length=40), rows)
    short = [one.final for one in rollouts if one.final.finish_reason == "length"]
    assert short
    for trajectory in short:
        assert len(trajectory.response_ids) <= 40
        assert not trajectory.reward  # 0.4 does not score them: null, not zero


async def test_an_answer_with_nothing_in_it_is_scored(tmp_path: Path) -> None:
    engine = await started(lambda request: demo_tokenizer().encode(END))
    loops, rows = environment(tmp_path / "env", kind="tools", size=1)
    (rollout,) = await run_all(worker(engine, loops), rows)
    assert rollout.attempts == 1
    assert rollout.final.response_mask == [1]
    assert rollout.final.reward == 0.0


async def test_a_cancelled_rollout_leaves_nothing_behind(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="tools", size=2)
        work = worker(engine, loops)
        task = asyncio.create_task(work.run(rows[0], 0))
        await until(lambda: engine.heard)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await run_all(work, rows)


async def test_an_environment_that_hangs_ends_with_the_attempts_time(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        loops, rows = environment(tmp_path / "env", kind="tools", size=2)
        work = worker(engine, loops)
        completed(await work.run(rows[0], 0))  # what rollouts share is there
        engine.hangs = True
        hasty = worker(engine, loops, max_attempts=1, attempt_timeout=1.0)
        failure = failed(await hasty.run(rows[1], 0))
        engine.hangs = False
        completed(await work.run(rows[1], 1))
    assert "AttemptTimeoutError" in failure.error


def test_an_environment_is_loaded_in_any_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        assert len(threads.submit(environment, tmp_path / "env", size=2).result()[1]) == 2


def test_signals_stay_the_programs(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    environment(tmp_path / "env", size=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        write_prompts("no_such_environment", tmp_path)
    with pytest.raises(ConfigError, match="sise"):
        write_prompts("json:dumps", tmp_path, arguments={"sise": 3})
    with pytest.raises(ConfigError, match="is a dict"):
        (tmp_path / "wrong.py").write_text("def load_environment(): return {}")
        write_prompts(f"{tmp_path / 'wrong.py'}:load_environment", tmp_path)


def test_a_prompts_key_does_not_depend_on_its_position(tmp_path: Path) -> None:
    environment(tmp_path, size=4)
    lines = [orjson.loads(line) for line in (tmp_path / "prompts.jsonl").read_bytes().splitlines()]
    for at, line in enumerate(lines):
        assert line["extra_info"] in ({"index": at}, {})
        assert line["verifiers"].keys() == {
            "version",
            "input" if line["verifiers"]["version"] == 0 else "task",
        }
        assert not {"example_id", "idx", "artifact_max_bytes"} & {
            *line["verifiers"].get("input", {}),
            *line["verifiers"].get("task", {}),
        }


@pytest.mark.skipif(IS_V1, reason="from 0.3 on nothing couples the rollouts of a group")
def test_rewards_of_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole groups"):
        write_prompts(f"{FILE}:load_environment", tmp_path, arguments={"kind": "group"})


async def test_an_environment_whose_source_has_changed_is_refused(tmp_path: Path) -> None:
    async with listened(tmp_path) as engine:
        environment(tmp_path / "env", size=1)
        path = tmp_path / "env" / "agents.yaml"
        path.write_text(re.sub("digest: .*", "digest: '0'", path.read_text()))
        with pytest.raises(ConfigError, match="has changed"):
            AgentLoops(load_agent_loops(str(path))).check(["sums"], resources(engine))
