"""Kill -9 of `rollstream score` and `annotate`: what was done is there, and every rollout is done once."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from zlib import crc32

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.store.manifest import read_manifest
from rollstream.store.run import Run
from rollstream.store.scores import pass_folder, sidecar_table
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.faults.runs import stub_in_thread
from tests.integration.test_generation import PAIRS, write_sums
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
        assert not sidecar_table(run, "anew").exists()
        durable = now
    replace_text(gate, str(rollouts))
    done = subprocess.run([*words, "--json"], cwd=ROOT, check=True, capture_output=True)
    report = orjson.loads(done.stdout)
    assert (report["rollouts"], report["now"]) == (rollouts, rollouts - len(durable))
    table = pq.read_table(sidecar_table(run, "anew"))
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


def test_annotating_that_is_killed_goes_on(tmp_path: Path) -> None:
    rollouts = 240
    records = [rollout(at // 4, at % 4, prompt_ids=[1, 3 + at % 4, 10 + at // 4]) for at in range(rollouts)]
    run = write_run(tmp_path / "run", records, n=4, prompts=rollouts // 4, rows=rollouts // 3)
    folder, asked, gate = pass_folder(run, "teacher", "streams"), Counter[int](), [0]

    async def hold(ids: list[int]) -> None:
        at = 4 * (ids[2] - 10) + ids[1] - 3
        asked[at] += 1
        while at >= gate[0]:
            await asyncio.sleep(0.01)

    with stub_in_thread() as server:
        server.before_scores = hold
        words = [sys.executable, "-c", COMMAND, "annotate", str(run), "--name", "teacher"]
        words += ["--server", server.url, "--json"]
        for kill in range(1, KILLS + 1):
            gate[0] = rollouts * kill // (KILLS + 1)
            with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
                wait_until(lambda: len(keys_of(folder)) >= gate[0], "what the gate lets through")
                process.send_signal(signal.SIGKILL)
            assert keys_of(folder) == [divmod(at, 4) for at in range(gate[0])]
            assert not sidecar_table(run, "teacher", "streams").exists()
        durable, gate[0] = gate[0], rollouts
        done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    report = orjson.loads(done.stdout)
    assert (report["rollouts"], report["now"], report["failed"]) == (rollouts, rollouts - durable, 0)
    assert all(count <= 1 + KILLS for count in asked.values())
    assert all(asked[at] == 1 for at in range(rollouts // (KILLS + 1)))  # durable at the first kill
    table = pq.read_table(sidecar_table(run, "teacher", "streams"))
    assert [4 * one["index"] + one["repeat"] for one in table.to_pylist()] == list(range(rollouts))
    wanted = [-((crc32(b"default") + 31 * at) % 97) / 9 for at in range(3, 7)]
    assert all(values == pytest.approx(wanted) for values in table["values"].to_pylist())


def replace_text(path: Path, text: str) -> None:
    """At once: somebody reads it all the time."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


JUDGE = """
import os, signal
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    if os.path.exists({flag!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    ranked = sorted(solution_strs)
    return [{{"score": ranked.index(one) + 10.0, "of": len(ranked)}} for one in solution_strs]
"""


def test_a_kill_between_the_last_rollout_and_the_groups_reward_costs_no_rollout(tmp_path: Path) -> None:
    flag, judge, run = tmp_path / "flag", tmp_path / "judge.py", tmp_path / "run"
    judge.write_text(JUDGE.format(flag=str(flag)))
    prompts = write_sums(tmp_path / "sums.jsonl", PAIRS[:4])
    words = [sys.executable, "-c", COMMAND, "generate", "--model", str(MODEL_PATH), "--prompts", str(prompts)]
    words += ["--output", str(run), "--reward", str(judge), "actor_rollout_ref.rollout.n=3"]
    words += ["actor_rollout_ref.rollout.response_length=16", "generation.show_progress=false"]
    flag.touch()
    died = subprocess.run(words, cwd=ROOT, check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL
    before = [*Run.open(run).rollouts(np.arange(4))]
    assert len(before) == 12 and {one.final.reward for one in before} == {None}
    flag.unlink()
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    rows = pq.read_table(run / "trajectories.parquet").to_pylist()
    finished = {(one.index, one.repeat): one.finished_at for one in before}
    assert {(row["index"], row["repeat"]): row["finished_at"] for row in rows} == finished, (
        "none is made again"
    )
    for index in range(4):
        group = [row for row in rows if row["index"] == index]
        texts = sorted(orjson.loads(row["messages"])[-1]["content"] for row in group)
        wanted = [texts.index(orjson.loads(row["messages"])[-1]["content"]) + 10.0 for row in group]
        assert [row["reward"] for row in group] == wanted
    status = read_status(run)
    assert (status.unscored, status.stale) == (0, []) and validate_run(run).sound
    again = subprocess.run([*words, "--json"], cwd=ROOT, check=True, capture_output=True)
    assert orjson.loads(again.stdout)["mean_reward"] == status.mean_reward
