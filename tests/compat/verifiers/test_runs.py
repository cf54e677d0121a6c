"""R3: runs of an environment on `rollstream serve`, killed by SIGKILL and resumed: every rollout once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

pytest.importorskip("verifiers")
pytest.importorskip("openvino_genai")

from rollstream.cli import main as cli
from tests.compat.verifiers.parts import FILE
from tests.faults.runs import Runner, file_size, overrides, run_to_end

ROWS, REPEATS = 25, 2
KILL_AT_BYTES = (200, 12_000)
"""Of the journal and the batches: with the first rollouts, and half-way. All of them are about 25,000."""
COLUMNS = ("response_ids", "response_mask", "reward", "messages", "finish_reason")


@pytest.fixture
def served() -> Iterator[str]:
    command = [sys.executable, "-m", "rollstream.cli", "serve", "--port", "0", "--json"]
    process = subprocess.Popen([*command, "--engine-kwargs", "num_threads=1"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(60)


def kept_bytes(run_dir: Path) -> int:
    return sum(
        file_size(path) for path in (*run_dir.glob("journal/*.rsj"), *run_dir.glob("batches/*.parquet"))
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_resumed(tmp_path: Path, served: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["verifiers", f"{FILE}:load_environment", "--output", str(tmp_path / "env")]
    assert cli([*made, "--arguments", "kind=tools", f"size={ROWS}", "--name", "sums"]) == 0
    assert f"{ROWS} prompts" in capsys.readouterr().out

    def settings(run_dir: Path) -> list[str]:
        return overrides(
            run_dir,
            tmp_path / "env" / "prompts.jsonl",
            served,
            data__max_prompt_length=256,
            actor_rollout_ref__rollout__response_length=256,
            actor_rollout_ref__rollout__n=REPEATS,
            actor_rollout_ref__rollout__agent__agent_loop_config_path=tmp_path / "env" / "agents.yaml",
            generation__max_in_flight=4,
            generation__save_batch_size=12,
            generation__show_progress="false",
        )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_to_end(settings(whole), tmp_path / "whole.log")
    kills = 0
    for target in KILL_AT_BYTES:
        runner = Runner(settings(killed), log=tmp_path / f"kill-{target}.log")
        if not runner.wait_until(lambda target=target: kept_bytes(killed) > target):  # type: ignore[misc]
            break
        runner.kill()
        kills += 1
    run_to_end(settings(killed), tmp_path / "last.log")
    assert kills == len(KILL_AT_BYTES), (kills, kept_bytes(killed))
    assert cli(["validate", str(killed)]) == 0
    assert f"is sound: {ROWS * REPEATS} rollouts" in capsys.readouterr().out
    ours, theirs = (pq.read_table(one / "trajectories.parquet") for one in (killed, whole))
    keys = list(zip(ours["index"].to_pylist(), ours["repeat"].to_pylist(), strict=True))
    assert keys == [(index, repeat) for index in range(ROWS) for repeat in range(REPEATS)]
    for name in COLUMNS:
        assert ours[name].equals(theirs[name]), name
    for one, other in zip(*(table["response_logprobs"].to_pylist() for table in (ours, theirs)), strict=True):
        assert one == pytest.approx(other, abs=1e-4)  # the last bits depend on what ran beside
    assert set(ours["reward"].to_pylist()) <= {0.0, 1.0}
    assert sum(ours["reward"].to_pylist()) > ROWS

    # With another environment it is another run.
    with (tmp_path / "env" / "agents.yaml").open("a") as file:
        file.write("  model: another\n")
    other = subprocess.run(
        [sys.executable, "-m", "rollstream.generation.main", *settings(killed)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
        check=False,
    )
    assert other.returncode == 2
    assert "agent loop sums" in other.stderr
