"""R2, R3, R5, R7 wherever workers run: some die, some lose their engine, one rollout is poison."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError, DataError, EngineLostError
from rollstream.rollout import concurrency, executor
from rollstream.rollout.executor import WorkerBackend
from rollstream.rollout.processes import ProcessBackend
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend, WorkerRecipe
from rollstream.store.run import Run
from rollstream.trajectory import PromptRow, RolloutKey
from tests.faults.ray_nodes import nodes
from tests.support.until import PATIENCE_S, until
from tests.support.workers import Harness, ScriptedRecipe, every_key, load_row
from tests.unit.store.fabric import keys_on_disk

Backend = Callable[[Callable[[], WorkerRecipe]], WorkerBackend]


class Here(LocalBackend):
    """Makes the worker that the recipe describes, in this event loop."""

    def __init__(self, recipe: Callable[[], WorkerRecipe]) -> None:
        self.recipe = recipe

    async def build(self, number: int) -> BuiltWorker:
        return await self.recipe().build(number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    with nodes(2, 2) as cluster:
        yield cluster


@pytest.fixture
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    if request.param != "ray":
        yield {"local": Here, "processes": ProcessBackend}[request.param]
        return
    address = request.getfixturevalue("cluster").address
    from rollstream.rollout.ray import RayBackend
    from rollstream.rollout.ray_cluster import RayCluster

    connection = RayCluster({"address": address})
    await connection.start()
    yield RayBackend
    await connection.close()


everywhere = pytest.mark.parametrize("backend", ["local", "processes", "ray"], indirect=True)
elsewhere = pytest.mark.parametrize("backend", ["processes", "ray"], indirect=True)


@elsewhere
async def test_a_rollout_that_kills_its_worker_hurts_itself_only(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_RESTART_S_MAX", 0.5)  # it dies again and again, and soon
    recipe = ScriptedRecipe(loop="deadly_agent")
    async with Harness(tmp_path, backend, recipe, max_attempts=1) as harness:
        await harness.executor.start()
        async with asyncio.timeout(300):
            await harness.work(12)
        deaths = harness.executor.deaths
    failures = list(Run.open(tmp_path).failures())
    assert {(failure.index, failure.repeat) for failure in failures} == {(7, 0), (7, 1)}
    assert all("WorkerDiedError" in failure.error for failure in failures)
    # Four unsuspected ones, which both repeats may share, some in company that gets smaller, one alone each. Company
    # grows again only when an innocent one has passed, and there are 22: how often is a matter of who meets whom.
    assert 5 <= deaths <= 2 * 4 + 22 + 2
    assert keys_on_disk(tmp_path) == [key for key in every_key(12) if key[0] != 7]


@elsewhere
async def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, backend: Backend) -> None:
    async with Harness(tmp_path, backend, ScriptedRecipe(latency=0.3)) as harness:
        await harness.start(2)
        rows = 0

        def until_one_has_died() -> Iterator[int]:
            nonlocal rows
            while not harness.executor.deaths:
                rows += 1
                yield rows - 1

        keys = harness.run.state.keys.owed(until_one_has_died(), retry_failed=False)
        work = asyncio.create_task(harness.executor.run(keys))
        await until(lambda: harness.executor.counters.completed)
        os.kill(harness.executor.pids[0], signal.SIGKILL)
        await work
        assert harness.executor.deaths == 1
        assert harness.executor.counters.completed == 2 * rows
    assert keys_on_disk(tmp_path) == every_key(rows)


@elsewhere
async def test_what_a_killed_worker_had_finished_of_rollouts_goes_on(
    tmp_path: Path, backend: Backend
) -> None:
    async with Harness(tmp_path, backend, ScriptedRecipe(loop="patient_agent"), workers=1) as harness:
        harness.executor.turns = harness.writer
        await harness.start()
        work = asyncio.create_task(harness.work(3))
        keys = [RolloutKey(index, repeat) for index, repeat, _ in every_key(3)]
        await until(lambda: all(len(harness.writer.turns_of(key)) == 2 for key in keys))
        os.kill(harness.executor.pids[0], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await work
        assert not harness.run.state.turns
    for row in (
        row for table in Run.open(tmp_path).rows(["metrics", "response_mask"]) for row in table.to_pylist()
    ):
        assert (row["metrics"]["engine_calls"], row["response_mask"]) == (3.0, [1] * 12)


@everywhere
async def test_a_stop_finishes_what_is_in_flight(tmp_path: Path, backend: Backend) -> None:
    async with Harness(tmp_path, backend, ScriptedRecipe(latency=0.3), workers=1, max_in_flight=8) as harness:
        work = asyncio.create_task(harness.work(100))
        await until(lambda: harness.executor.counters.completed >= 8)
        harness.executor.stop()
        in_flight, done = harness.executor.in_flight, harness.executor.counters.completed
        await work
        assert harness.executor.counters.completed == done + in_flight
        assert harness.executor.counters.dropped == 0


@everywhere
@pytest.mark.parametrize("how", ["drop", "cancel"])
async def test_a_drop_cuts_off_what_is_in_flight(tmp_path: Path, backend: Backend, how: str) -> None:
    async with Harness(tmp_path, backend, ScriptedRecipe(latency=1e6), workers=1, max_in_flight=8) as harness:
        work = asyncio.create_task(harness.work(100))
        await until(lambda: harness.executor.in_flight == 8)
        harness.executor.drop() if how == "drop" else work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        counters = harness.executor.counters
        assert (counters.dropped, counters.completed, harness.executor.in_flight) == (8, 0, 0)


@elsewhere
async def test_who_has_lost_its_engine_leaves_its_work_to_others(tmp_path: Path, backend: Backend) -> None:
    """However often it comes back without: no rollout is charged, and none taken for what killed it."""
    recipe = ScriptedRecipe(latency=0.05, lost=(0,))
    async with Harness(tmp_path, backend, recipe, max_attempts=1, max_in_flight=4) as harness:
        await harness.start(2)
        async with asyncio.timeout(200):
            await harness.work(150)
        assert harness.executor.counters.failed == 0
        assert harness.executor.deaths >= 1
    assert keys_on_disk(tmp_path) == every_key(150)


@everywhere
async def test_when_all_have_lost_their_engine_the_run_says_so(tmp_path: Path, backend: Backend) -> None:
    workers = 1 if backend is Here else 2
    async with Harness(tmp_path, backend, ScriptedRecipe(lost=(0, 1)), workers=workers) as harness:
        with pytest.raises(EngineLostError, match="it has gone"):
            async with asyncio.timeout(PATIENCE_S):
                await harness.work(20)
    assert list(Run.open(tmp_path).failures()) == []


@pytest.mark.parametrize("backend", ["local", "processes"], indirect=True)
async def test_the_cap_falls_where_the_workers_engines_are_full(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "EVERY_S", 0.5)
    recipe = ScriptedRecipe(latency=0.05, full=True)
    async with Harness(tmp_path, backend, recipe, adaptive=True, workers=1, max_in_flight=64) as harness:
        work = asyncio.create_task(harness.work(2000))
        await until(lambda: harness.executor.cap < 64)
        harness.executor.stop()
        await work
        assert harness.executor.stats.counts.overloads > 0
        assert harness.executor.counters.failed == 0


@everywhere
async def test_rows_that_cannot_be_read_or_travel_fail_alone(tmp_path: Path, backend: Backend) -> None:
    def rows(key: RolloutKey) -> PromptRow:
        if key.index == 2:
            raise DataError("row 2 is no row")
        row = load_row(key.index)
        if key.index == 4 and backend is not Here:
            row.columns["lock"] = asyncio.Lock().acquire  # no pickle of it
            row.columns["function"] = lambda: None
        return row

    async with Harness(tmp_path, backend, ScriptedRecipe(), workers=1, load_row=rows) as harness:
        async with asyncio.timeout(PATIENCE_S):
            await harness.work(6)
    bad = {2} if backend is Here else {2, 4}
    failures = {(one.index, one.repeat): one for one in Run.open(tmp_path).failures()}
    assert set(failures) == {(index, repeat) for index in bad for repeat in range(2)}
    assert {one.stage for one in failures.values()} == {"prompt"}
    if 4 in bad:
        assert failures[4, 0].prompt_key == load_row(4).prompt_key
    assert keys_on_disk(tmp_path) == [key for key in every_key(6) if key[0] not in bad]


@everywhere
async def test_what_is_wrong_with_the_configuration_is_said_at_start(
    tmp_path: Path, backend: Backend
) -> None:
    async with Harness(tmp_path, backend, ScriptedRecipe(broken="no such tool")) as harness:
        with pytest.raises(ConfigError, match="no such tool"):
            async with asyncio.timeout(PATIENCE_S):
                await harness.executor.start()
