"""R2, R3, R5, R7: workers on several nodes that are killed one after the other, and a node that goes.

The nodes are real (`ray.cluster_utils.Cluster`, a raylet each), the kills are SIGKILLs, the servers are stub
servers over HTTP.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.generation.run import run_generation
from rollstream.store.summary import read_status
from rollstream.testing.stub_faults import Latency
from tests.faults.ray_nodes import lose_node, nodes, working_pids
from tests.faults.runs import (
    check_each_is_there_once,
    has_rollouts,
    overrides,
    rows_of,
    stub_in_thread,
    write_prompts,
)
from tests.support.until import wait_until

pytest.importorskip("ray")

REPEATS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(2, 2, 2) as cluster:
        yield cluster


def kill_at_times(run_dir: Path, kill_at: tuple[int, ...], ended: threading.Event, killed: list[int]) -> None:
    """Kills a worker that works, the oldest first, whenever so many rollouts are there.

    By progress, not by time: on any machine all of it happens while there is work.
    """
    for done in kill_at:
        while not ended.wait(0.1):
            if has_rollouts(run_dir) and read_status(run_dir).completed >= done and (pids := working_pids()):
                with contextlib.suppress(ProcessLookupError):  # it went with its node just now
                    os.kill(pids[0], signal.SIGKILL)
                    killed.append(pids[0])
                    break


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "kill_at"),
    [(200, (60, 200, 360)), pytest.param(500, (100, 300, 500, 800, 1100), marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_kills_cost_nothing_but_time(
    tmp_path: Path, cluster: Any, count: int, kill_at: tuple[int, ...]
) -> None:
    """On 4 workers. It takes its time: a worker comes back within seconds."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", count)
    same = {
        "actor_rollout_ref__rollout__n": REPEATS,
        "generation__show_progress": "false",
        "generation__max_in_flight": 64,
        "generation__adaptive_in_flight": "false",
    }
    with stub_in_thread(response_tokens=32, latency=Latency("lognormal", 1.0, 0.5)) as server:
        arguments = overrides(
            tmp_path / "ray",
            prompts,
            server.url,
            **same,
            generation__executor="ray",
            actor_rollout_ref__rollout__agent__num_workers=4,
            ray_kwargs__ray_init__address=cluster.address,
        )
        killed: list[int] = []
        ended = threading.Event()
        killer = threading.Thread(target=kill_at_times, args=(tmp_path / "ray", kill_at, ended, killed))

        lost: list[Any] = []

        def lose_one() -> None:
            wait_until(lambda: len(killed) >= 2 or ended.is_set(), seconds=300)
            if not ended.is_set():
                lost.append(next(iter(cluster.worker_nodes)))
                lose_node(cluster, lost[0])
            wait_until(lambda: len(killed) == len(kill_at) or ended.is_set(), seconds=300)
            server.latency = Latency()  # what is left is done soon

        loser = threading.Thread(target=lose_one)
        killer.start()
        loser.start()
        try:
            result = run_generation(arguments)
        finally:
            ended.set()
            killer.join()
            loser.join()
        requests = server.stats.requests
        local = run_generation(overrides(tmp_path / "local", prompts, server.url, **same))
    assert len(killed) == len(kill_at) and len(lost) == 1
    assert requests > count * REPEATS  # work was lost, and done again
    assert (result.completed, result.failed, result.artifact_rows) == (count * REPEATS, 0, count * REPEATS)
    check_each_is_there_once(tmp_path / "ray", count, REPEATS)
    assert local.completed == count * REPEATS
    ids = ("prompt_ids", "response_ids")
    assert rows_of(tmp_path / "ray", *ids) == rows_of(tmp_path / "local", *ids)
