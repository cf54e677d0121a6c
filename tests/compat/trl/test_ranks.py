"""Several processes on gloo: one generates, each trains its slice, and a failure of one is everyone's."""

import json
import multiprocessing
import os
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from torch.distributed import TCPStore

from examples.edit_context import train as example
from examples.training import show
from tests.compat.trl.parts import load
from tests.compat.trl.ranks_main import PROBLEMS

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.compat.trl.ranks_main"])  # torch and trl are imported once for all

ENDED_WITHIN_S = 280
"""Well below the time for which a batch is waited for."""


def run_rank(rank: int, ranks: int, port: int, folder: Path, mode: str) -> None:
    """What `torchrun` sets for each process."""
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "CUDA_VISIBLE_DEVICES": "",
    }
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.compat.trl import ranks_main

    ranks_main.torch.set_num_threads(1)
    ranks_main.main(folder, mode)


def run_ranks(folder: Path, ranks: int, mode: str) -> list[dict[str, Any]]:
    """What each process wrote; all end soon, whoever fails.

    In mode "waiting" a process waits for what never comes, until the launcher ends it. In the others each ends by
    itself: a signal could come when its training is over and its file not yet written.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        FORKS.Process(target=run_rank, args=(i, ranks, store.port, folder, mode)) for i in range(ranks)
    ]
    deadline = time.monotonic() + ENDED_WITHIN_S
    try:
        for process in processes:
            process.start()
        if mode == "waiting":
            wait([process.sentinel for process in processes], ENDED_WITHIN_S)
            for process in processes:  # as torchrun does
                process.terminate()
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    missing = {file.name: file.with_suffix(".log").read_text()[-6000:] for file in files if not file.exists()}
    assert not missing, f"{mode}: {missing}"
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_each_process_trains_its_slice(ranks: int, tmp_path: Path) -> None:
    said = run_ranks(tmp_path, ranks, "train")
    assert [one["error"] for one in said] == [None] * ranks
    for one in said:
        assert one["given"] == one["sampled"]  # what TRL's sampler dealt to this process
        assert len(one["given"]) == 3 and {len(batch) for batch in one["given"]} == {8 // ranks}
        assert {size for size, _ in one["advantages"][:3]} == {8 // ranks}  # of tokens: there is a teacher
    assert len({one["weights"] for one in said}) == 1
    assert len(said[0]["teacher"]) == 3 and abs(said[0]["teacher"][0]) < 1e-6
    assert len(said[0]["rows"]) == 3 and not any(one["rows"] for one in said[1:])
    assert len(said[0]["rewards"]) == len(said[0]["kl"]) == 3 and abs(said[0]["kl"][0]) < 1e-9
    # Three rows of two rollouts: what fills up the batch of eight is not evaluated.
    assert {one["evaluated"]["eval_rollstream/rollouts"] for one in said} == {6}
    assert {one["evaluated"]["eval_rollstream/failed"] for one in said} == {0}


@pytest.mark.slow
def test_snapshots_are_dealt_to_the_processes(tmp_path: Path) -> None:
    model, tokenizer = load()
    torch.manual_seed(0)
    show(model, tokenizer, PROBLEMS, example.chats, 75, share=0.5, at_once=6)
    torch.save(model.state_dict(), tmp_path / "edits.pt")
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
        ("generation", 0, "no more prompts in the cupboard"),
        ("waiting", 1, "the disk is full"),
    ],
)
def test_a_failure_of_one_is_everyones(mode: str, first: int, cause: str, tmp_path: Path) -> None:
    said = run_ranks(tmp_path, 2, mode)
    assert all(cause in one["error"] for one in said), [one["error"] for one in said]
    assert said[1 - first]["error"].startswith("TrainingError")
