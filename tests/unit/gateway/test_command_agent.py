"""A program as an agent loop: what it is given, what becomes of its result, what its reward sees."""

import asyncio
import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.registry import LoopEntry
from rollstream.config.load import compose, to_settings
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, EngineError
from rollstream.gateway import command_agent
from rollstream.gateway.agents import read_options
from rollstream.gateway.command_agent import CommandAgent
from rollstream.gateway.sandbox import Sandbox
from rollstream.reward.base import FunctionReward
from rollstream.rollout.setup import load_agents
from rollstream.testing.scripted import ScriptedRequest
from tests.support.processes import running
from tests.support.programs import PRELUDE, command_worker, program
from tests.support.until import until
from tests.unit.agent.rollouts import completed, failed, make_row, resources, says, started

ANSWERS = "answer = ask(row['prompt'])\n"


async def test_a_program_gets_its_row_and_gives_a_result(tmp_path: Path) -> None:
    script = """
first = ask(row["prompt"])
second = ask([*row["prompt"], {"role": "assistant", "content": first}, {"role": "user", "content": "sure?"}])
result(answer=second, reward=0.5, reward_extra={"calls": 2},
       extra={"row": row, "cwd": os.listdir("."), "home": os.listdir(os.environ["HOME"]),
              "secrets": [name for name in os.environ if "TOKEN" in name]})
"""
    worker = command_worker(await started(says("one", "two")), program(tmp_path, script))
    row = make_row(
        5,
        ground_truth="12",
        extra_info={
            "level": 3,
            "answer": "12",
            "entry": ' {"answer": "12"}',
            "parts": [{"solution": "1", "text": '{"x" : 1}'}],
            "list": '[{"answer": "12"}]',
        },
        columns={"solution": "12"},
    )
    (final,) = completed(await worker.run(row, 0)).trajectories
    assert (final.reward, final.reward_extra, final.num_turns) == (0.5, {"calls": 2}, 4)
    assert final.extra["gateway"]["answer"] == "two"
    assert final.extra["row"] == {
        "prompt": row.messages,
        "index": 5,
        "data_source": "test",
        "extra_info": {"level": 3, "entry": "{}", "parts": [{"text": '{"x" : 1}'}], "list": "[{}]"},
    }
    assert (final.extra["cwd"], final.extra["home"], final.extra["secrets"]) == ([], [], [])
    assert [message["role"] for message in final.messages] == ["user", "assistant", "user", "assistant"]
    assert final.metrics.engine_calls == 2


async def test_a_program_may_be_a_word_longer_than_any_file_name() -> None:
    command = ["python", "-c", PRELUDE + ANSWERS]
    worker = command_worker(await started(says("one")), command)
    assert completed(await worker.run(make_row(), 0)).final.num_turns == 2
    assert CommandAgent.deciding_options({"command": command})["command"] == command


async def test_conversations_are_trajectories_of_one_rollout(tmp_path: Path) -> None:
    script = "ask([{'role': 'user', 'content': 'plan'}])\n" + ANSWERS + "result(reward=1)"
    worker = command_worker(await started(says("so")), program(tmp_path, script))
    plan, final = completed(await worker.run(make_row(), 0)).trajectories
    assert (plan.is_snapshot, final.is_snapshot, plan.reward, final.reward) == (True, False, 1.0, 1.0)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("ask(row['prompt']); print('so it went'); sys.exit(3)", {}, ["exit code 3", "so it went"]),
        ("os.kill(os.getpid(), 9)", {}, ["was killed by signal 9"]),
        (ANSWERS, {"outcome": "result"}, ["wrote no file ROLLSTREAM_RESULT"]),
        ("print('why'); result(answer='guessed')", {}, ["without an answer of the model: why"]),
        (
            ANSWERS + "open(os.environ['ROLLSTREAM_RESULT'], 'w').write('{')",
            {},
            ["result cannot be used", "it printed nothing"],
        ),
        (ANSWERS + "result(reward='high')", {}, ["reward"]),
        (ANSWERS + "result(rewards=1)", {}, ["rewards"]),
        (ANSWERS + "sys.exit(2)", {"outcome": "exit_code"}, ["exit code 2"]),
        ("ask('nothing')", {}, ["last refused call"]),
        ("print(os.environ['OPENAI_BASE_URL']); sys.exit(1)", {}, ["/s/***/v1"]),
    ],
    ids=[
        "code",
        "signal",
        "demanded",
        "no-call",
        "no-json",
        "reward",
        "field",
        "exit-code",
        "refused",
        "secret",
    ],
)
async def test_a_program_that_fails_says_why(
    tmp_path: Path, script: str, options: dict[str, Any], words: list[str]
) -> None:
    worker = command_worker(await started(says("so")), program(tmp_path, script), **options)
    failure = failed(await worker.run(make_row(), 0))
    assert (failure.stage, failure.attempts) == ("agent", 1)
    for word in words:
        assert word in failure.error


async def test_a_secret_that_was_passed_on_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame")
    script = ANSWERS + "print(os.environ['MY_API_KEY']); sys.exit(1)"
    options = {"pass_env": ["MY_API_KEY"], "keep_workdir": "failed", "workdirs": str(tmp_path / "kept")}
    worker = command_worker(await started(says("so")), program(tmp_path, script), **options)
    assert "sesame" not in failed(await worker.run(make_row(), 0)).error
    (output,) = tmp_path.glob("kept/*/output.txt")
    assert output.read_text() == "***" and output.stat().st_mode & 0o777 == 0o600


async def test_a_program_that_hangs_is_ended_and_tried_again(tmp_path: Path) -> None:
    script = ANSWERS + "time.sleep(600)"
    worker = command_worker(await started(says("so")), program(tmp_path, script), timeout=0.5, max_attempts=2)
    failure = failed(await worker.run(make_row(), 0))
    assert (failure.attempts, failure.stage) == (2, "agent")
    assert "took longer than 0.5 s (gateway.timeout)" in failure.error


async def test_a_disk_that_is_full_for_a_while_fails_no_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [OSError(errno.ENOSPC, "No space left on device")]

    class Full(Sandbox):
        def _put(self, path: str, data: bytes) -> None:
            if faults:
                raise faults.pop()
            super()._put(path, data)

    monkeypatch.setattr(command_agent, "Sandbox", Full)
    command = program(tmp_path, ANSWERS + "result(reward=1)")
    worker = command_worker(await started(says("so")), command, max_attempts=2)
    assert completed(await worker.run(make_row(), 0)).final.reward == 1.0


async def test_a_rollout_that_is_cancelled_ends_its_program(tmp_path: Path) -> None:
    command = program(tmp_path, ANSWERS + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    engine = await started(says("so"))
    rollout = asyncio.create_task(command_worker(engine, command).run(make_row(), 0))
    await until(lambda: engine.completions)
    assert running(command[-1])
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert running(command[-1]) == []


async def test_an_engine_s_error_is_told_whatever_the_program_makes_of_it(tmp_path: Path) -> None:
    def refuse(request: ScriptedRequest) -> list[int]:
        raise EngineError("no such ids")

    script = "try:\n    ask(row['prompt'])\nexcept Exception:\n    result(reward=1); time.sleep(600)"
    worker = command_worker(await started(refuse), program(tmp_path, script))
    failure = failed(await worker.run(make_row(), 0))
    assert (failure.stage, failure.error) == ("engine", "EngineError: no such ids")


async def test_a_listed_loop_has_the_settings_of_the_run_under_its_own(tmp_path: Path) -> None:
    listed = tmp_path / "agents.yaml"
    listed.write_text(
        "- {name: planner, _target_: rollstream.gateway.command_agent.CommandAgent, command: [plan],\n"
        "   limits: {memory: 100}}\n"
    )
    settings = to_settings(
        compose(
            [
                f"actor_rollout_ref.model.path={MODEL_PATH}",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={listed}",
                "gateway.command=[act]",
                "gateway.outcome=result",
                "generation.attempt_timeout=100",
            ]
        )
    )
    loops = (await load_agents(settings)).loops
    planner, plain = (read_options(loops.entry(name).options) for name in ("planner", "command_agent"))
    assert (planner.command, plain.command) == (["plan"], ["act"])
    assert (planner.outcome, planner.timeout, planner.limits.memory) == ("result", 95.0, 100)
    assert planner.limits.processes == plain.limits.processes == settings.gateway.limits.processes


@pytest.mark.parametrize(("code", "reward"), [(0, 1.0), (1, 0.0)])
async def test_an_exit_code_is_a_reward(tmp_path: Path, code: int, reward: float) -> None:
    command = program(tmp_path, ANSWERS + f"sys.exit({code})")
    worker = command_worker(await started(says("so")), command, outcome="exit_code")
    (final,) = completed(await worker.run(make_row(), 0)).trajectories
    assert final.reward == reward


@pytest.mark.parametrize("keep", ["never", "failed", "always"])
@pytest.mark.parametrize("fails", [False, True])
async def test_the_reward_sees_the_folder_which_then_goes(tmp_path: Path, keep: str, fails: bool) -> None:
    seen: dict[str, Any] = {}

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        seen.update(extra_info, solution=solution_str)
        seen["file"] = Path(extra_info["workdir"], "made.txt").read_text()
        return 0.25

    reward = FunctionReward(score, label="score", source_digest="")
    script = ANSWERS + "open('made.txt', 'w').write('by hand'); result(answer='found')"
    command = program(tmp_path, script + ("; sys.exit(1)" if fails else ""))
    options = {"keep_workdir": keep, "workdirs": str(tmp_path / "kept")}
    worker = command_worker(await started(says("so")), command, reward=reward, **options)
    result = await worker.run(make_row(7), 1)
    kept = list(tmp_path.glob("kept/*/*/made.txt"))
    assert len(kept) == (keep == "always" or (keep == "failed" and fails))
    if fails:
        failed(result)
        return
    assert completed(result).trajectories[-1].reward == 0.25
    assert (seen["solution"], seen["file"]) == ("found", "by hand")
    assert [message["role"] for message in seen["messages"]] == ["user", "assistant"]
    assert seen["sandbox"]["kind"] == "none"
    assert not Path(seen["workdir"]).exists()


def test_what_decides_the_data_is_in_the_identity(tmp_path: Path) -> None:
    command = program(tmp_path, "first")

    def digest(**options: Any) -> str:
        return LoopEntry(CommandAgent, {"command": command, **options}).digest

    before = digest()
    assert digest(keep_workdir="always", timeout=3.0, workdirs="elsewhere") == before
    assert digest(sandbox="bubblewrap") != before
    assert digest(limits={"memory": 100}) != before
    moved = tmp_path / "moved"
    moved.mkdir()
    assert LoopEntry(CommandAgent, {"command": program(moved, "first")}).digest == before
    program(tmp_path, "second")
    assert digest() != before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": []}, "gateway.command"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": ["python", "-u", "mistyped.py"]}, "no file mistyped.py"),
        ({"comand": ["true"]}, "did you mean 'command'"),
        ({"command": ["true"], "sandbox": "docker"}, "needs gateway.image"),
        ({"command": ["true"], "image": "x"}, "none takes none"),
        ({"command": ["true"], "network": "gateway"}, "without a sandbox"),
        ({"command": ["true"], "mounts": ["/usr"]}, "sees everything"),
        ({"command": ["true"], "pass_env": ["NOT_SET_HERE"]}, "NOT_SET_HERE is not set"),
        ({"command": ["true"], "sandbox": "bubblewrap", "mounts": ["/not/there"]}, "there is no /not/there"),
        ({"command": "python agent.py"}, "gateway.command"),
    ],
)
async def test_what_cannot_work_is_an_error_at_start(options: dict[str, Any], words: str) -> None:
    given = resources(await started())
    with pytest.raises(ConfigError, match=words):
        CommandAgent.build_shared(given, **options)


async def test_a_temporary_folder_too_deep_for_sockets_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"command": ["true"], "sandbox": "bubblewrap"}
    given = resources(await started())
    try:
        CommandAgent.build_shared(given, **options)
    except ConfigError as error:
        pytest.skip(str(error))
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        CommandAgent.build_shared(given, **options)
