"""Generation in Ray actors, one of which is killed."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import GenerationFailedError
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.rollout.retry import RetryPolicy
from rollstream.training.ahead import BatchesAhead
from rollstream.training.plan import PlannedGroup, ShuffledPlan

pytest.importorskip("ray")

from rollstream.training.ray_groups import RayGroups

RETRY = RetryPolicy(max_attempts=3, delay=0.05, delay_max=0.1)


class Killed:
    """Its process is killed under one group, once; it answers with the weights it has."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.version = -1

    async def start(self) -> None:
        self.version = 0

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        await asyncio.sleep(0.01)
        if group.position == 10 and not self.mark.exists():  # begun when there were new weights
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if group.position == 13:
            while self.version < 3:  # what the loop asks for is delivered before its cause is told
                await asyncio.sleep(0.01)
            raise KeyError("the environment is broken")
        return [group.index, self.version, os.getpid()]

    async def update_weights(self, source: str, version: int) -> None:
        assert source == f"weights {version}"
        assert version > self.version
        self.version = version

    async def close(self) -> None:
        """Nothing to release."""


@pytest.mark.slow
def test_an_actor_that_dies_is_replaced_and_has_the_weights(tmp_path: Path) -> None:
    cluster = RayCluster({"num_cpus": 2, "include_dashboard": False, "object_store_memory": 128 << 20})
    mark = tmp_path / "killed"
    generator = RayGroups(lambda: Killed(mark), actors=2, cluster=cluster, options={"num_cpus": 0.5})
    plan = ShuffledPlan(9)
    batches = BatchesAhead(plan, generator, groups_per_step=4, weights="in_flight", retry=RETRY)
    with batches:
        pids = set()
        for step in range(3):
            batch = batches.next_batch(120)
            assert [group.position for group in batch.groups] == list(range(4 * step, 4 * step + 4))
            for group in batch.groups:
                index, version, pid = group.rollouts
                assert index == plan.at(group.position).index
                assert version >= group.start >= step - 1
                pids.add(pid)
            batches.trained(step)
            batches.update_weights(f"weights {step + 1}")
        assert mark.exists()
        assert len(pids) >= 2
        with pytest.raises(GenerationFailedError, match="the environment is broken") as raised:
            batches.next_batch(120)
        assert isinstance(raised.value.__cause__, KeyError)
