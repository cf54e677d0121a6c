"""Joining and leaving a cluster: whoever does it, Ray is there once in a process."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError
from rollstream.rollout import ray_cluster
from rollstream.rollout.ray_cluster import RayCluster


class FakeRay:
    """Ray's connection of a process, and what was done to it."""

    def __init__(self) -> None:
        self.is_up = False
        self.done: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.during_init: Callable[[], None] = lambda: None

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **_: Any) -> None:
        assert not self.is_up, "a second connection"
        self.during_init()
        self.is_up = True
        self.threads.add(threading.current_thread())
        self.done.append("init")

    def shutdown(self) -> None:
        self.is_up = False
        self.threads.add(threading.current_thread())
        self.done.append("shutdown")

    def timeline(self, path: str) -> None:
        self.done.append(f"timeline {Path(path).name}")

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def nodes(self) -> list[Any]:
        return []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: ray)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return ray


async def test_who_started_the_cluster_does_not_end_it_under_another(fake: FakeRay) -> None:
    first, second = RayCluster({}), RayCluster({})
    await first.start()
    await second.start()
    await second.start()  # its workers and its replicas
    await first.close()
    await first.close()  # once too often
    assert fake.is_up
    await second.close()
    assert fake.is_up
    await second.close()
    assert fake.done == ["init", "shutdown"]
    assert len(fake.threads) == 1  # a cluster on this machine ends with the thread that started it
    await first.start()
    await first.close()
    assert fake.done == ["init", "shutdown"] * 2


async def test_runs_of_several_threads_share_it(fake: FakeRay) -> None:
    """Each with an event loop of its own, and all at once."""
    fake.during_init = lambda: time.sleep(0.05)
    together = threading.Barrier(4)
    down: list[int] = []

    async def run(number: int) -> None:
        cluster = RayCluster({})
        await cluster.start()
        await asyncio.to_thread(together.wait, 60)
        for _ in range(number):
            await asyncio.sleep(0.01)
            if not fake.is_up:
                down.append(number)
        await cluster.close()

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, run(number)) for number in range(4)))
    assert not down
    assert fake.done == ["init", "shutdown"]


async def test_a_connection_that_was_there_stays(fake: FakeRay, tmp_path: Path) -> None:
    fake.is_up = True
    cluster = RayCluster({}, str(tmp_path / "trace.json"))
    await cluster.start()
    await cluster.close()
    assert fake.is_up
    assert fake.done == ["timeline trace.json"]


async def test_a_start_that_is_cut_off_is_undone(fake: FakeRay) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        goes_on.wait(60)

    fake.during_init = wait
    cluster = RayCluster({})
    starting = asyncio.ensure_future(cluster.start())
    await asyncio.to_thread(began.wait, 60)
    starting.cancel()
    closing = asyncio.ensure_future(cluster.close())
    goes_on.set()
    await closing
    assert fake.done == ["init", "shutdown"]


async def test_who_could_not_join_has_nothing_to_leave(fake: FakeRay) -> None:
    other, cluster = RayCluster({}), RayCluster({})

    def refuse() -> None:
        raise ValueError("no such argument")

    fake.during_init = refuse
    with pytest.raises(ConfigError, match="no such argument"):
        await cluster.start()
    fake.during_init = lambda: None
    await other.start()
    await cluster.close()
    assert fake.is_up
    await other.close()
    assert fake.done == ["init", "shutdown"]
