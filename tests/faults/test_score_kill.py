"""Kill -9 of `rollstream score`: what was scored is there, and every rollout is scored once."""

import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.store.manifest import read_manifest
from rollstream.store.run import Run
from rollstream.store.scores import pass_folder, score_table
from tests.support.until import wait_until
from tests.support.view_runs import rollout, write_run

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from rollstream.cli import main; sys.exit(main())"
KILLS = 3

REWARD = """
import time
from pathlib import Path
def compute_score(data_source, solution_str, ground_truth, extra_info):
    while int(solution_str) >= int(Path({gate!r}).read_text()):
        time.sleep(0.01)
    return {{"score": int(solution_str) / 8, "at": solution_str}}
"""
"""What is beyond the gate waits."""


def keys_of(folder: Path) -> list[tuple[int, int]]:
    """The rollouts that are scored, durably."""
    if read_manifest(folder) is None:
        return []
    tables = list(Run.open(folder).rows(["index", "repeat"]))
    return sorted((row["index"], row["repeat"]) for table in tables for row in table.to_pylist())


@pytest.mark.parametrize("rollouts", [400, pytest.param(20_000, marks=pytest.mark.soak)])
def test_scoring_that_is_killed_goes_on(tmp_path: Path, rollouts: int) -> None:
    records = [rollout(at // 4, at % 4, str(at)) for at in range(rollouts)]
    run = write_run(tmp_path / "run", records, n=4, prompts=rollouts // 4, rows=rollouts // 4)
    gate, reward, paths = tmp_path / "gate", tmp_path / "reward.py", pass_folder(run, "anew")
    reward.write_text(REWARD.format(gate=str(gate)))
    words = [sys.executable, "-c", COMMAND, "score", str(run), "--reward", str(reward), "--name", "anew"]
    words += ["--processes", "2", "--max-concurrency", "4", "--timeout", "600"]
    durable: list[tuple[int, int]] = []
    for kill in range(1, KILLS + 1):
        open_to = rollouts * kill // (KILLS + 1)
        replace_text(gate, str(open_to))
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            wait_until(lambda: len(keys_of(paths)) >= open_to, "what the gate lets through")  # noqa: B023
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        now = keys_of(paths)
        assert now == [divmod(at, 4) for at in range(open_to)]
        assert not score_table(run, "anew").exists()
        durable = now
    replace_text(gate, str(rollouts))
    done = subprocess.run([*words, "--json"], cwd=ROOT, check=True, capture_output=True)
    report = orjson.loads(done.stdout)
    assert (report["rollouts"], report["now"]) == (rollouts, rollouts - len(durable))
    table = pq.read_table(score_table(run, "anew"))
    assert [4 * one["index"] + one["repeat"] for one in table.to_pylist()] == list(range(rollouts))
    assert table["reward"].to_pylist() == [at / 8 for at in range(rollouts)]


def test_a_reward_that_ends_its_process_leaves_its_rollout_unscored(tmp_path: Path) -> None:
    run, reward = write_run(tmp_path / "run", [rollout(0, 0)], n=1, prompts=1), tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    __import__('os')._exit(3)\n")
    words = [
        sys.executable,
        "-c",
        COMMAND,
        "score",
        str(run),
        "--reward",
        str(reward),
        "--processes",
        "1",
        "--json",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True)
    report = orjson.loads(done.stdout)
    assert (done.returncode, report["rollouts"], report["failed"]) == (1, 1, 1)
    assert "exit code 3" in next(iter(report["causes"]))


def replace_text(path: Path, text: str) -> None:
    """At once: somebody reads it all the time."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)
