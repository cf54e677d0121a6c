"""R2, R3, R5, R7: workers on several nodes that are killed one after the other, and a node that goes.

The nodes are real (`ray.cluster_utils.Cluster`, a raylet each), the kills are SIGKILLs, the servers are stub
servers over HTTP.
"""

import asyncio
import os
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.errors import ConfigError
from rollstream.generation.runner import run_generation
from rollstream.rollout import supervisor
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.store.summary import read_failures, read_status
from tests.faults.ray_nodes import lose_node, nodes, wait_for, working_pids
from tests.faults.runs import has_rollouts, overrides, stub_server, write_prompts
from tests.support.workers import Harness, ScriptedRecipe, every_key
from tests.unit.store.fabric import keys_on_disk

pytest.importorskip("ray")

from rollstream.rollout.ray import RayBackend

REPEATS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(2, 2, 2) as cluster:
        yield cluster


def artifact(run_dir: Path, *columns: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run_dir / "trajectories.parquet").select(columns).to_pylist()
    return rows


def kill_at_times(run_dir: Path, kill_at: tuple[int, ...], ended: threading.Event, killed: list[int]) -> None:
    """Kills a worker that works, the oldest first, whenever so many rollouts are there.

    By progress, not by time: on any machine all of it happens while there is work.
    """
    for done in kill_at:
        while not ended.wait(0.1):
            if has_rollouts(run_dir) and read_status(run_dir).completed >= done and (pids := working_pids()):
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
    with stub_server("--response-tokens", "32", "--latency", "lognormal:0.4,0.5") as url:
        arguments = overrides(
            tmp_path / "ray",
            prompts,
            url,
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
            wait_for(lambda: len(killed) >= 2 or ended.is_set(), 300)
            if not ended.is_set():
                lost.append(next(iter(cluster.worker_nodes)))
                lose_node(cluster, lost[0])

        loser = threading.Thread(target=lose_one)
        killer.start()
        loser.start()
        try:
            result = run_generation(arguments)
        finally:
            ended.set()
            killer.join()
            loser.join()
        requests = orjson.loads(urllib.request.urlopen(f"{url}/stub/stats").read())["requests"]
    with stub_server("--response-tokens", "32") as url:  # the same answers, at once
        local = run_generation(overrides(tmp_path / "local", prompts, url, **same))
    assert len(killed) == len(kill_at) and len(lost) == 1
    assert requests > count * REPEATS  # work was lost, and done again
    assert (result.completed, result.failed, result.artifact_rows) == (count * REPEATS, 0, count * REPEATS)
    rows = artifact(tmp_path / "ray", "index", "repeat", "attempts", "prompt_ids", "response_ids")
    assert Counter((row["index"], row["repeat"]) for row in rows) == {
        (index, repeat): 1 for index in range(count) for repeat in range(REPEATS)
    }
    assert {row["attempts"] for row in rows} == {1}
    assert local.completed == count * REPEATS
    assert rows == artifact(tmp_path / "local", "index", "repeat", "attempts", "prompt_ids", "response_ids")


@pytest.fixture
async def joined(cluster: Any) -> AsyncIterator[None]:
    """This process is a driver of the cluster."""
    connection = RayCluster({"address": cluster.address})
    await connection.start()
    yield
    await connection.close()


async def test_a_rollout_that_kills_its_worker_hurts_itself_only(
    tmp_path: Path, joined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RESTART_S_MAX", 0.5)  # it dies again and again, and soon
    recipe = ScriptedRecipe(loop="deadly_agent")
    async with Harness(tmp_path, RayBackend(), recipe, workers=2, max_attempts=1) as harness:
        await harness.executor.start()
        async with asyncio.timeout(300):
            await harness.work(12)
        deaths = harness.executor.deaths
    failures = list(read_failures(tmp_path))
    assert {(failure.index, failure.repeat) for failure in failures} == {(7, 0), (7, 1)}
    assert all("WorkerDiedError" in failure.error for failure in failures)
    # Four unsuspected ones, which both repeats may share, some in company that gets smaller, one alone each.
    assert 5 <= deaths <= 18
    assert keys_on_disk(tmp_path) == [key for key in every_key(12) if key[0] != 7]


async def test_who_has_lost_its_engine_leaves_its_work_to_others(tmp_path: Path, joined: None) -> None:
    """However often it comes back without: no rollout is charged, and none taken for what killed it."""
    recipe = ScriptedRecipe(latency=0.05, lost=(0,))
    async with Harness(tmp_path, RayBackend(), recipe, max_attempts=1, max_in_flight=4) as harness:
        await harness.start(2)
        async with asyncio.timeout(200):
            await harness.work(150)
        assert harness.executor.counters.failed == 0
        assert harness.executor.deaths >= 1
    assert keys_on_disk(tmp_path) == every_key(150)


async def test_what_is_wrong_with_the_configuration_is_said_at_start(tmp_path: Path, joined: None) -> None:
    async with Harness(tmp_path, RayBackend(), ScriptedRecipe(broken="no such tool")) as harness:
        with pytest.raises(ConfigError, match="no such tool"):
            async with asyncio.timeout(60):
                await harness.executor.start()
