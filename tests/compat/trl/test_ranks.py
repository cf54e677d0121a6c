"""Several processes on gloo: one generates, each trains its slice, and a failure of one is everyone's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

ROOT = Path(__file__).parents[3]

ENDED_WITHIN_S = 280
"""Well below the time for which a batch is waited for."""


def run_ranks(folder: Path, ranks: int, mode: str) -> list[dict[str, Any]]:
    """What each process wrote; all end soon, whoever fails, and do not wait for what will never come."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]
    command += [str(Path(__file__).with_name("ranks_main.py")), str(folder), mode]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    missing = [file.name for file in files if not file.exists()]
    assert not missing, f"{missing} of {mode}: {done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_each_process_trains_its_slice(ranks: int, tmp_path: Path) -> None:
    said = run_ranks(tmp_path, ranks, "train")
    assert [one["error"] for one in said] == [None] * ranks
    for one in said:
        assert one["given"] == one["sampled"]  # what TRL's sampler dealt to this process
        assert len(one["given"]) == 3 and {len(batch) for batch in one["given"]} == {8 // ranks}
    assert len({one["weights"] for one in said}) == 1
    assert len(said[0]["rows"]) == 3 and not any(one["rows"] for one in said[1:])
    assert len(said[0]["rewards"]) == 3
    # Three rows of two rollouts: what fills up the batch of eight is not evaluated.
    assert {one["evaluated"]["eval_rollstream/rollouts"] for one in said} == {6}
    assert {one["evaluated"]["eval_rollstream/failed"] for one in said} == {0}


@pytest.mark.slow
def test_snapshots_are_dealt_to_the_processes(tmp_path: Path) -> None:
    said = run_ranks(tmp_path, 2, "snapshots")
    assert [one["error"] for one in said] == [None] * 2
    (first,), (second,) = (one["outputs"] for one in said)
    (trajectories,) = said[0]["trajectories"]
    snapshots = round(8 * trajectories) - 8
    assert snapshots > 0 and first["rows"] == second["rows"] == 4 + (snapshots + 1) // 2
    assert first["all_tokens"] == second["all_tokens"] == first["tokens"] + second["tokens"]
    assert said[0]["weights"] == said[1]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "first", "cause"),
    [
        ("reward", 1, "a reward broke"),
        ("again", 1, "a reward broke"),
        ("generation", 0, "no more prompts in the cupboard"),
        ("waiting", 1, "the disk is full"),
    ],
)
def test_a_failure_of_one_is_everyones(mode: str, first: int, cause: str, tmp_path: Path) -> None:
    said = run_ranks(tmp_path, 2, mode)
    assert all(cause in one["error"] for one in said), [one["error"] for one in said]
    assert said[1 - first]["error"].startswith("TrainingError")
