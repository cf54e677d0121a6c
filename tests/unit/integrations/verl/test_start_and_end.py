"""What verl started is ended, with what it holds of the cluster."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
import ray.util

from rollstream.integrations.verl import executor
from rollstream.integrations.verl.executor import end_verl, start_verl


@pytest.fixture(autouse=True)
def _ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


def test_actors_workers_and_placement_groups_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def end(what: str) -> None:
        ended.append(what)
        if what in ("worker 1", "group 1"):
            raise RuntimeError("it is gone already")

    monkeypatch.setattr(ray, "kill", end)
    monkeypatch.setattr(ray.util, "remove_placement_group", end)

    def replica(number: int, pool: Any) -> Any:
        return SimpleNamespace(servers=[f"server {number}"], workers=[f"worker {number}"], resource_pool=pool)

    end_verl(
        SimpleNamespace(
            global_load_balancer="balancer",
            server_handles=["server 1", "server 2", "server 3"],
            rollout_replicas=[
                replica(1, SimpleNamespace(pgs=["group 1", "group 2"])),
                replica(2, SimpleNamespace(pgs=None)),
                replica(3, None),
            ],
        )
    )
    wanted = {"balancer", "group 1", "group 2"}
    wanted |= {f"{what} {number}" for what in ("server", "worker") for number in (1, 2, 3)}
    assert set(ended) == wanted


class Servers:
    """verl's manager of servers, of which one gets no further than its workers."""

    def __init__(self, config: Any) -> None:
        self.half_made = asyncio.Event()
        self.goes_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.rollout_replicas = [
            SimpleNamespace(
                servers=["server"], workers=["worker"], resource_pool=SimpleNamespace(pgs=["group"])
            ),
            SimpleNamespace(servers=[], workers=["other worker"], resource_pool=None),
        ]
        self.half_made.set()
        await self.goes_on
        self.server_handles, self.global_load_balancer = ["server"], "balancer"

    def get_client(self, client_cls: Any) -> Any:
        return None


class LoopManager:
    @staticmethod
    async def create(config: Any, client: Any) -> Any:
        raise RuntimeError("no loops")


@pytest.mark.parametrize("how", ["cut off", "no servers", "no loops"])
async def test_a_start_that_comes_to_nothing_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nobody else knows what was started by then, and on a cluster that stays it would keep its GPUs."""
    ended: list[str] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(ray.util, "remove_placement_group", ended.append)
    made: list[Servers] = []

    def manager(config: Any) -> Servers:
        made.append(Servers(config))
        return made[-1]

    verl = SimpleNamespace(
        StreamingLLMServerManager=manager, GenerationLoopManager=LoopManager, StreamingLLMServerClient=None
    )
    monkeypatch.setattr(executor, "_import_stream", lambda: verl)
    starting = asyncio.ensure_future(start_verl(None))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        while not made:
            await asyncio.sleep(0)
        await made[0].half_made.wait()
        if how == "cut off":
            starting.cancel()
        elif how == "no servers":
            made[0].goes_on.set_exception(RuntimeError("no servers"))
        else:
            made[0].goes_on.set_result(None)
        with pytest.raises(asyncio.CancelledError if how == "cut off" else RuntimeError):
            await starting
    wanted = {"server", "worker", "group", "other worker"}
    assert set(ended) == wanted | ({"balancer"} if how == "no loops" else set())


def test_nothing_is_ended_where_ray_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would start a cluster to kill an actor in."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "kill", lambda actor: pytest.fail("Ray is asked"))
    end_verl(SimpleNamespace(global_load_balancer="balancer", server_handles=["server"], rollout_replicas=[]))
