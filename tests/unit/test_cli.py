"""Command lines: words between options, resume commands that can be pasted, and quick, quiet endings."""

import os
import queue
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from omegaconf import OmegaConf

from rollstream.cli import build_parser, main
from rollstream.command_line import parse
from rollstream.demo import MODEL_PATH
from rollstream.generation.command import command_line, summarise
from rollstream.generation.run import GenerationResult
from rollstream.stderr_log import at_work
from rollstream.store.paths import RunPaths
from rollstream.trajectory import Failure
from tests.unit.store.fabric import commit_all, rollout
from tests.unit.store.test_export import finished


@pytest.mark.parametrize("name", [b"run-\xff", b"\xed\xa0\x80.jsonl"])
def test_a_name_that_is_not_utf8_is_said(
    name: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / os.fsdecode(name)
    root.mkdir()
    (root / "run.json").write_text("{}")
    for command in ("status", "show", "eval", "export", "score", "generate --output", "generate --prompts"):
        with pytest.raises(SystemExit) as left:
            main([*command.split(), str(root)])
        said = capsys.readouterr().err
        assert left.value.code == 2 and "\\udc" in said and "is not valid UTF-8; rename" in said, said
    assert main(["eval", str(tmp_path)]) == 2  # it holds such a run
    said = capsys.readouterr().err
    assert "\\udc" in said and "is not valid UTF-8; rename the folder" in said


@pytest.mark.parametrize(
    "line",
    [
        "a=b c=d --config f.yaml --dry-run",
        "a=b --config f.yaml c=d --dry-run",
        "--config f.yaml a=b --dry-run c=d",
        "--dry-run --config f.yaml a=b c=d",
        "a=b --dry-run c=d --config=f.yaml",
    ],
)
def test_words_may_stand_between_options(line: str) -> None:
    for command in ("generate", "demo"):
        options = parse(build_parser(), [command, *line.split()])
        assert (options.overrides, options.config) == (["a=b", "c=d"], [Path("f.yaml")]) and options.dry_run


def test_short_flags_are_names_of_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They lie over files, and `key=value` words over them."""
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref: {rollout: {n: 2, temperature: 0.5}}\n")
    line = "--model M data.seed=3 --prompts a,b.jsonl -n 8 --reward r.py --output [o] "
    line += "--engine vllm --server http://a --server http://b --max-tokens 7"
    assert main(["generate", "--config", str(file), "--show-config", "--json", *line.split()]) == 0
    shown = orjson.loads(capsys.readouterr().out)
    rollout = shown["actor_rollout_ref"]["rollout"]
    assert shown["actor_rollout_ref"]["model"]["path"] == "M"
    assert (rollout["n"], rollout["temperature"], shown["data"]["seed"]) == (8, 0.5, 3)
    assert (rollout["name"], rollout["response_length"]) == ("vllm", 7)
    assert rollout["server_urls"] == ["http://a", "http://b"]
    assert shown["data"]["train_files"] == ["a,b.jsonl"]
    assert shown["custom_reward_function"]["path"] == "r.py"
    assert shown["trainer"]["default_local_dir"] == "[o]"
    main(["demo", "-n", "3", "actor_rollout_ref.rollout.n=5", "--show-config", "--json"])
    assert orjson.loads(capsys.readouterr().out)["actor_rollout_ref"]["rollout"]["n"] == 5
    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1 ="}')
    words = ["--model", str(MODEL_PATH), "--prompts", str(tmp_path / "p.jsonl"), "--server", "http://a"]
    assert main(["generate", *words, "--output", str(tmp_path / "run"), "--dry-run"]) == 2
    assert "--engine sglang, vllm or openai" in capsys.readouterr().err
    bounds = {"0": ">= 1", str(10**12): "<= 1000000000", str(10**20): ""}
    for n, bound in bounds.items():
        assert main(["generate", "-n", n, "--show-config"]) == 2
        assert "actor_rollout_ref.rollout.n must be" in (told := capsys.readouterr().err) and bound in told
    words = ["demo", "-n", str(10**9), "train_tasks.0.size=5000", "--output", str(tmp_path), "--dry-run"]
    assert main(words) == 2
    assert "5000 prompts and actor_rollout_ref.rollout.n=1000000000" in (said := capsys.readouterr().err)
    assert "needs 15,000 GB of memory; this machine has" in said


def test_a_command_of_an_agent_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--agent", "python 'my agent.py'", "-n", "2", "--show-config"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown.gateway.command == ["python", "my agent.py"]
    rollout = shown.actor_rollout_ref.rollout
    assert (rollout.agent.default_agent_loop, rollout.n) == ("command_agent", 2)


@pytest.mark.parametrize(
    ("word", "loop"),
    [
        ("gateway.command=[python,agent.py]", "command_agent"),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path=functions.py", "tool_agent"),
    ],
)
def test_what_the_agent_loop_does_not_use_is_said_with_the_loop_that_does(
    word: str, loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1 ="}')
    tool = "from rollstream.agent.tools.functions import function_tool\n\n\n@function_tool\ndef add():\n"
    (tmp_path / "functions.py").write_text(f'{tool}    """Adds."""')
    assert main(["generate", "--model", str(MODEL_PATH), "--prompts", "p.jsonl", word, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "not used: the agent loop is single_turn_agent" in said and f"default_agent_loop={loop}" in said


@pytest.mark.parametrize(
    "line",
    ["generate a=b --jsn c=d", "status run --jsn", "generate a=b -x", "status run c=d", "show run 1 2 3"],
)
def test_unknown_words_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert f"usage: rollstream {line.split()[0]}" in printed
    assert "unrecognized arguments: " in printed
    assert ("did you mean --json?" in printed) == ("--jsn" in line)


def test_options_of_hydra_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--config-name=run", "a=b"])
    assert "--config FILE" in capsys.readouterr().err


def test_the_command_line_as_a_person_types_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "rollstream"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    module = tmp_path / "cli.py"
    module.touch()
    words = ["demo", "a=b c"]
    monkeypatch.chdir(tmp_path)

    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "argv", ["bin/rollstream", *words])
    assert command_line() == ["bin/rollstream", "demo", "a=b c"]
    monkeypatch.setenv("PATH", f"/usr/bin:{program.parent}")
    monkeypatch.setattr(sys, "argv", [str(program), *words])
    assert command_line() == ["rollstream", "demo", "a=b c"]
    other = tmp_path / "other" / "rollstream"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    monkeypatch.setattr(sys, "argv", [str(other), *words])
    assert command_line() == [str(other), "demo", "a=b c"]

    monkeypatch.setattr(sys, "argv", [str(module), *words])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "rollstream.cli", *words])
    assert shlex.join(command_line()) == "python -m rollstream.cli demo 'a=b c'"


def result(**changes: object) -> GenerationResult:
    values = {
        "run_dir": Path("a run"),
        "total": 30,
        "completed": 30,
        "failed": 0,
        "unscored": 0,
        "generated": 0,
        "failed_now": 0,
        "mean_reward": None,
        "artifact": None,
        "artifact_rows": 0,
        "elapsed_s": 3.0,
        "damage": [],
    }
    return GenerationResult(**{**values, **changes})  # type: ignore[arg-type]


def test_the_summary_says_what_this_call_did() -> None:
    assert summarise(result()).startswith("nothing left to do: 30/30 rollouts done, 0 failed\n")
    assert summarise(result(generated=30)).startswith(
        "done: 30/30 rollouts done, 0 failed; 30 generated in 3s"
    )
    all_failed = summarise(result(completed=0, failed=30, failed_now=30))
    assert all_failed.startswith("done: 0/30 rollouts done, 30 failed; 0 generated and 30 failed in 3s")
    assert "rollstream status --failed 'a run'" in all_failed
    assert summarise(result(completed=9, generated=2, signal=2)).startswith("stopped: 9/30 rollouts done")
    assert summarise(result(completed=9, generated=2)).startswith("ended: 9/30")
    assert summarise(result()).endswith("\nlook at it in a browser: rollstream view 'a run' --open")
    assert "view" not in all_failed


def test_the_summary_counts_what_is_not_scored() -> None:
    some = result(unscored=26, reward_failed=2, mean_reward=0.5, unscored_sources={"a": 20, "b": 4})
    assert "mean reward 0.5000 over 4 scored" in summarise(some)
    assert "24 of 30 rollouts are not scored: no reward for 'a', 'b'" in summarise(some)
    assert "30 of 30 rollouts are not scored: a run's end scores whole groups" in summarise(
        result(unscored=30)
    )
    assert "the reward failed on 2 rollouts" in summarise(some)
    assert "rollstream score 'a run' --reward FILE" in summarise(some)
    assert (some.exit_code, result(unscored=24).exit_code) == (1, 0)


def test_the_summary_says_that_all_rewards_are_equal() -> None:
    equal = summarise(result(mean_reward=0.0, equal_rewards=0.0))
    assert "all 30 rewards are 0: " in equal


def test_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help-config"]) == 0
    assert "# rollouts per prompt row" in capsys.readouterr().out
    for words in (["--show-config"], ["--cfg", "job"], ["-c", "job", "--resolve"]):
        assert main(["generate", "generation.seed=3", *words]) == 0
        assert "  seed: 3\n" in capsys.readouterr().out
    assert main(["generate", "generation.seed=3", "--show-config", "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["generation"]["seed"] == 3
    assert main(["generate", "generation.bogus=3", "--show-config"]) == 2
    for words, said in (
        (["-cn", "mine"], "-cn is not taken"),
        (["-cp=mine"], "-cp is not taken"),
        (["--cfg", "hydra"], "want job, not 'hydra'"),
        (["--config-name", "mine"], "unrecognized arguments: --config-name"),
        (["--config-dir=conf"], "unrecognized arguments: --config-dir=conf"),
        (["--multirun", "generation.seed=1,2"], "unrecognized arguments: --multirun"),
        (["-m", "generation.seed=1,2"], "unrecognized arguments: -m"),
        (["--hydra-help"], "unrecognized arguments: --hydra-help"),
    ):
        with pytest.raises(SystemExit):
            main(["generate", *words])
        told = capsys.readouterr().err
        assert said in told and "--config FILE" in told


async def test_a_side_call_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = rollout(0, trajectories=2)
    both.trajectories[0].extra = {"gateway": {"side_call": True}}
    await commit_all(tmp_path, [both])
    assert main(["show", str(tmp_path), "0", "0", "--trajectory", "0"]) == 0
    assert main(["show", str(tmp_path), "0"]) == 0
    told = capsys.readouterr().out
    assert "trajectory 0 (side call, of 2)" in told and "trajectory 1 (final, of 2)" in told


async def test_a_rollout_whose_reward_sees_whole_groups_is_unscored_for_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await commit_all(tmp_path, [rollout(0, reward=None)])
    assert main(["status", str(tmp_path)]) == 0
    assert "no reward for data source" in capsys.readouterr().out
    path = tmp_path / "run.json"
    path.write_bytes(
        orjson.dumps(
            orjson.loads(path.read_bytes()) | {"config": {"custom_reward_function": {"path": "j.py"}}}
        )
    )
    assert main(["status", str(tmp_path)]) == 0
    assert "its reward sees whole groups" in capsys.readouterr().out


async def test_failed_and_unscored_rollouts_are_lines_for_people_and_json_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Failure(3, 1, "k" * 32, 2, "agent", "ValueError: no\nmore of it", "Traceback …", 1.0)
    await commit_all(tmp_path, [rollout(0, reward=None), failed])

    def printed(*arguments: str) -> list[str]:
        assert main(["status", str(tmp_path), *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    heading, line = printed("--failed")
    assert heading.split() == ["index", "repeat", "stage", "attempts", "error"]
    assert line.split() == ["3", "1", "agent", "2", "ValueError:", "no"]
    [line] = printed("--failed", "--json")
    assert orjson.loads(line) == asdict(failed)
    heading, line = printed("--unscored")
    assert heading.split()[-2:] == ["data_source", "cause"] and line.startswith("0  ")
    [line] = printed("--unscored", "--json")
    assert orjson.loads(line)["index"] == 0


async def test_damaged_files_are_errors_not_tracebacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await commit_all(tmp_path, [rollout(i) for i in range(20)])
    batch = RunPaths(tmp_path).batch(0)
    whole = batch.read_bytes()
    commands = [["show", "RUN"], ["show", "RUN", "7", "--json"], ["status", "RUN"], ["validate", "RUN"]]
    commands.append(["export", "RUN", "--format", "jsonl", "--output", str(tmp_path / "../x"), "--force"])
    for at in range(0, len(whole), 97):
        batch.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        codes = [main([str(tmp_path) if word == "RUN" else word for word in command]) for command in commands]
        assert codes[3] == 1  # a checksum of the whole file; the others read what they need
        assert set(codes) <= {0, 1, 2}
    capsys.readouterr()


ENTRIES = [["-m", "rollstream.generation.main"], ["-m", "rollstream.cli", "generate"]]


@pytest.mark.parametrize("entry", ENTRIES, ids=["module", "command"])
def test_an_interrupt_at_any_time_of_the_start_is_one_line(entry: list[str]) -> None:
    """Interrupts come while the imports go on: when a module is loaded that is loaded late or early."""
    for module in ("omegaconf", "rollstream.store.batch", "rich.live"):
        code = (
            "import os, runpy, signal, sys\n"
            "class Interrupt:\n"
            "    def find_spec(self, name, *_):\n"
            f"        if name == {module!r}:\n"
            "            os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.meta_path.insert(0, Interrupt())\n"
            f"sys.argv = ['x', *{entry[2:]!r}]\n"
            f"runpy.run_module({entry[1]!r}, run_name='__main__')\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        lines = [
            line for line in ended.stderr.splitlines() if not line.startswith(("rollstream ", "loading "))
        ]
        assert (ended.returncode, lines) == (130, ["interrupted"])


def test_importing_the_command_line_is_light() -> None:
    heavy = {"hydra", "omegaconf", "pyarrow", "rich", "numpy"}
    code = f"import sys, rollstream.cli; print(sorted({heavy!r} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rollstream.cli", "generate", "--help-config"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--format", "sft", "--pairs", "all"], "--pairs: for --format preference, not sft"),
        (["--format", "jsonl", "--min-reward", "0", "--tokens"], "--min-reward, --tokens: for --format sft"),
        (["--format", "sft", "--best", "0"], "--best must be at least 1"),
        (["--format", "preference", "--min-margin", "-1"], "--min-margin must be at least 0"),
    ],
)
async def test_an_exports_options_are_for_their_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    run = await finished(tmp_path / "run")
    assert main(["export", str(run), *words]) == 2
    assert why in capsys.readouterr().err
    assert main(["export", str(run), "--format", "sft", "--best", "1", "--min-reward", "-9"]) == 0
    assert "trajectories_sft.jsonl (3 rows)" in capsys.readouterr().out


def test_a_command_that_takes_long_says_on_a_terminal_that_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    said = queue.SimpleQueue[str]()
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True, write=said.put))
    with at_work("rollstream export", pauses=[0, 0]):
        for _ in range(2):
            assert re.fullmatch(r"rollstream export: working … \d+s\n", said.get(timeout=60))
