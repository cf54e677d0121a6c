"""What verl started is ended, with what it holds of the cluster."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
import ray.util

from rollstream.integrations.verl.servers import end_verl


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
