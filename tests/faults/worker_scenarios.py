"""What must hold of several workers wherever they run: as processes of this machine, as Ray actors."""

import asyncio
from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from rollstream.rollout import supervisor
from rollstream.rollout.supervisor import WorkerBackend
from rollstream.store.summary import read_failures
from tests.support.until import PATIENCE_S
from tests.support.workers import Harness, ScriptedRecipe, every_key
from tests.unit.store.fabric import keys_on_disk


async def a_poison_rollout_hurts_itself_only(
    tmp_path: Path, backend: WorkerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RESTART_S_MAX", 0.5)  # it dies again and again, and soon
    recipe = ScriptedRecipe(loop="deadly_agent")
    async with Harness(tmp_path, backend, recipe, workers=2, max_attempts=1) as harness:
        await harness.executor.start()
        async with asyncio.timeout(300):
            await harness.work(12)
        deaths = harness.executor.deaths
    failures = list(read_failures(tmp_path))
    assert {(failure.index, failure.repeat) for failure in failures} == {(7, 0), (7, 1)}
    assert all("WorkerDiedError" in failure.error for failure in failures)
    # Four unsuspected ones, which both repeats may share, some in company that gets smaller, one alone each. Company
    # grows again only when an innocent one has passed, and there are 22: how often is a matter of who meets whom.
    assert 5 <= deaths <= 2 * 4 + 22 + 2
    assert keys_on_disk(tmp_path) == [key for key in every_key(12) if key[0] != 7]


async def who_has_lost_its_engine_leaves_its_work_to_others(tmp_path: Path, backend: WorkerBackend) -> None:
    """However often it comes back without: no rollout is charged, and none taken for what killed it."""
    recipe = ScriptedRecipe(latency=0.05, lost=(0,))
    async with Harness(tmp_path, backend, recipe, max_attempts=1, max_in_flight=4) as harness:
        await harness.start(2)
        async with asyncio.timeout(200):
            await harness.work(150)
        assert harness.executor.counters.failed == 0
        assert harness.executor.deaths >= 1
    assert keys_on_disk(tmp_path) == every_key(150)


async def a_broken_configuration_is_said_at_start(tmp_path: Path, backend: WorkerBackend) -> None:
    async with Harness(tmp_path, backend, ScriptedRecipe(broken="no such tool")) as harness:
        with pytest.raises(ConfigError, match="no such tool"):
            async with asyncio.timeout(PATIENCE_S):
                await harness.executor.start()
