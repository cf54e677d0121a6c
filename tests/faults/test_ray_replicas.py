"""Replicas on a Ray cluster's nodes: their actors, nodes and driver killed, and no room for them.

The nodes are real (`ray.cluster_utils.Cluster`, a raylet each); the two GPUs of each are only said to be
there, which is enough for Ray to assign them.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.http_server import CONNECTION_KWARGS, HttpServer
from rollstream.engine.launch.plan import LaunchRequest, ReplicaPlan, launch_plan
from rollstream.engine.launch.ray import RayLauncher, RayProcess
from rollstream.errors import EngineError
from rollstream.generation.run import run_generation
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.faults.launches import LAUNCH, Launched, stub_python
from tests.faults.ray_nodes import add_node, lose_node, nodes
from tests.faults.runs import (
    Runner,
    check_each_is_there_once,
    has_rollouts,
    overrides,
    run_to_end,
    write_prompts,
)
from tests.support.until import PATIENCE_S, until, wait_until

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(2, 2, 2, gpus=2) as cluster:
        yield cluster


@pytest.fixture
def launched() -> Launched:
    return Launched(uuid4().hex)


def actors() -> list[psutil.Process]:
    """Those of replicas on the nodes of this program, and nobody else's."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::ReplicaHos"):
                found.append(process)
    return found


def hosts() -> dict[int, int]:
    """Actors of replicas that run: their pids, by replica's server pid."""
    found = {}
    for actor in actors():
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in actor.children(recursive=True):
                if one.cmdline()[1:3] == ["-m", "rollstream.testing.stub_server"]:
                    found[one.pid] = actor.pid
    return found


def server_at(url: str) -> int:
    """The server that listens there."""
    return next(pid for pid in hosts() if psutil.Process(pid).cmdline()[-1:] == [url.rpartition(":")[2]])


def groups(cluster: Any) -> list[dict[str, Any]]:
    """Placement groups that were not given back."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    table: dict[str, dict[str, Any]] = ray.util.placement_group_table()
    return [group for group in table.values() if group["state"] != "REMOVED"]


def on_cluster(cluster: Any, launched: Launched, **settings: object) -> dict[str, object]:
    return {
        "actor_rollout_ref__rollout__server_urls": "[]",
        f"{LAUNCH}env": launched.env,
        f"{LAUNCH}where": "ray",
        f"{LAUNCH}replicas": 2,
        "ray_kwargs__ray_init__address": cluster.address,
        "generation__show_progress": "false",
        **settings,
    }


@pytest.mark.slow
def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path, cluster: Any, launched: Launched) -> None:
    """Its own event loop here, two replicas there, which have processes in sessions of their own."""
    pytest.importorskip("openvino_genai")
    run = tmp_path / "run"
    arguments = overrides(
        run,
        write_prompts(tmp_path / "prompts.jsonl", 24),
        "",
        **on_cluster(
            cluster,
            launched,
            generation__max_in_flight=4,
            actor_rollout_ref__rollout__ignore_eos="true",
            actor_rollout_ref__rollout__response_length=256,
            **{f"{LAUNCH}server": "rollstream", f"{LAUNCH}args": "{engine_kwargs: {num_threads: 1}}"},
        ),
    )
    assert groups(cluster) == []  # joins the cluster now: later there is no time for it
    runner = Runner(arguments, log=tmp_path / "log")
    wait_until(lambda: has_rollouts(run) or runner.process.poll() is not None)
    assert runner.process.poll() is None, runner.output()
    assert len(launched.servers()) == len(launched.workers()) == 2
    assert [group["state"] for group in groups(cluster)] == ["CREATED", "CREATED"]
    runner.kill()
    assert launched.are_gone(), launched.processes()
    wait_until(lambda: not groups(cluster) and not actors())
    run_to_end(arguments, tmp_path / "resumed.log")
    assert read_status(run).completed == 24
    assert validate_run(run).sound
    assert not launched.processes()
    wait_until(lambda: not groups(cluster) and not actors())


def launcher(
    cluster: Any, folder: Path, launched: Launched, **request: Any
) -> tuple[RayLauncher, ReplicaPlan]:
    groups(cluster)  # joins
    mark = launched.env.strip("{}").split(": ")
    asked = LaunchRequest(
        where="ray",
        arguments={"tensor_model_parallel_size": 2},
        python=str(stub_python(folder, "fixed:0")),
        env={mark[0]: mark[1]},
        **request,
    )
    (plan,) = launch_plan(
        "sglang", model_path=str(MODEL_PATH), max_model_len=None, request=asked, log_dir=folder
    )
    return RayLauncher("sglang", asked, folder), plan


async def answers(process: RayProcess) -> bool:
    return (
        await HttpServer(process.url, {**CONNECTION_KWARGS, "health_timeout": 5.0}).answers("/health") == 200
    )


async def test_one_replica_is_started_found_and_stopped(
    tmp_path: Path, cluster: Any, launched: Launched
) -> None:
    one, plan = launcher(cluster, tmp_path, launched)
    try:
        plans = one.place([plan])
        assert [one.index for one in plans] == [0, 1, 2]  # six GPUs in pairs
        first, second = await asyncio.gather(one.start(plans[0]), one.start(plans[1]))
        await until(lambda: answers(first))
        await until(lambda: answers(second))
        assert "127.0.0.1" not in first.url
        bundles = [tuple(group["bundles_to_node_id"].values()) for group in groups(cluster)]
        assert len(set(bundles)) == len(bundles) == 2  # two GPUs each: on two nodes
        assert [group["strategy"] for group in groups(cluster)] == ["STRICT_PACK"] * 2
        assert (await first.last_words()).splitlines()[0] == "devices 0,1"
        # The actor's end is the replica's, and the next start has its devices, and a log that goes on.
        os.kill(hosts()[server_at(first.url)], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert "was lost with its actor or node" in await first.wait()
        await first.stop()
        again = await one.start(plans[0])
        assert len(launched.servers()) <= 2  # what the actor left behind was ended before
        await until(lambda: answers(again))
        assert len(launched.servers()) == 2
        assert again.url != first.url
        assert "devices 0,1" in await again.last_words()
        await again.stop()
        assert not await answers(again)
        await again.stop()
        await second.stop()
        assert not launched.processes()
    finally:
        await one.close()
    assert not groups(cluster)
    await one.close()


async def test_want_of_room_is_said_and_leaves_nothing(
    tmp_path: Path, cluster: Any, launched: Launched
) -> None:
    groups(cluster)
    others = [ray.util.placement_group([{"GPU": 2}]) for _ in range(3)]  # another program's
    for group in others:
        assert group.wait(PATIENCE_S)
    impatient, plan = launcher(cluster, tmp_path, launched, startup_timeout=1.0)
    one, _ = launcher(cluster, tmp_path, launched)  # an actor's process needs its time, too
    try:
        (plan, *_) = impatient.place([plan])
        with pytest.raises(EngineError, match=r"(?s)found no place .* within 1 s .*'GPU': 2\.0.*free are"):
            await impatient.start(plan)
        await impatient.close()
        (plan, *_) = one.place([plan])
        ray.util.remove_placement_group(others.pop())
        async with asyncio.timeout(PATIENCE_S):  # its place comes when there is room, and waits for a start
            while True:
                with contextlib.suppress(EngineError):
                    await (await one.start(plan)).stop()
                    break
    finally:
        await one.close()
        for group in others:
            ray.util.remove_placement_group(group)
    assert not launched.processes()


@pytest.mark.slow
def test_replicas_that_move_cost_nothing_but_time(tmp_path: Path, cluster: Any, launched: Launched) -> None:
    """An actor is killed, then a node goes: in the end none of the servers is where it was at first.

    Workers that go on to work have followed them; workers that died with the node have found them. The
    servers are slow until then: on a slow machine, too, there is work left to do.
    """
    rows, repeats = 400, 3
    ray.shutdown()
    arguments = overrides(
        tmp_path / "run",
        write_prompts(tmp_path / "prompts.jsonl", rows),
        "",
        **on_cluster(
            cluster,
            launched,
            actor_rollout_ref__rollout__n=repeats,
            actor_rollout_ref__rollout__tensor_model_parallel_size=2,
            generation__executor="ray",
            generation__max_in_flight=16,
            generation__adaptive_in_flight="false",
            actor_rollout_ref__rollout__agent__num_workers=2,
            **{f"{LAUNCH}python": stub_python(tmp_path, "fixed:2")},
        ),
    )
    trouble: list[BaseException] = []
    first: set[int] = set()

    def attack() -> None:
        try:
            wait_until(lambda: has_rollouts(tmp_path / "run"))
            servers = wait_until(lambda: len(found := hosts()) == 2 and found)
            first.update(servers)
            # The head's node cannot go: the driver is connected to it.
            stayed = next(pid for pid in servers if node_of(cluster, servers[pid]) != cluster.head_node)
            (killed,) = first - {stayed}
            os.kill(servers[killed], signal.SIGKILL)
            wait_until(lambda: len(hosts()) == 2 and set(hosts()) & first == {stayed})
            (tmp_path / "latency").write_text("fixed:0.01")  # what is left is done soon
            lose_node(cluster, node_of(cluster, hosts()[stayed]))
            wait_until(lambda: len(hosts()) == 2 and not set(hosts()) & first)
        except BaseException as error:
            trouble.append(error)

    attacker = threading.Thread(target=attack)
    attacker.start()
    result = run_generation(arguments)
    attacker.join(PATIENCE_S)
    add_node(cluster, num_cpus=2, num_gpus=2)  # in its place
    assert trouble == [] and not attacker.is_alive()
    assert (result.completed, result.failed) == (rows * repeats, 0)
    check_each_is_there_once(tmp_path / "run", rows, repeats)
    assert not launched.processes()
    wait_until(lambda: not groups(cluster) and not actors())


def node_of(cluster: Any, pid: int) -> Any:
    """The node whose raylet started a process."""
    parents = {parent.pid for parent in psutil.Process(pid).parents()}
    return next(
        node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid in parents
    )
