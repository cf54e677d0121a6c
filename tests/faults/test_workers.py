"""R2, R3, R5, R7 with several worker processes: some die, some lose their engine, one rollout is poison."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.errors import DataError, EngineLostError
from rollstream.rollout.processes import ProcessBackend
from rollstream.store.summary import read_failures
from rollstream.trajectory import PromptRow
from tests.faults import worker_scenarios as scenarios
from tests.support.until import PATIENCE_S, until
from tests.support.workers import Harness, ScriptedRecipe, every_key, load_row
from tests.unit.store.fabric import keys_on_disk


async def test_a_rollout_that_kills_its_worker_hurts_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scenarios.a_poison_rollout_hurts_itself_only(tmp_path, ProcessBackend(), monkeypatch)


async def test_workers_are_added_and_killed_while_it_runs(tmp_path: Path) -> None:
    async with Harness(tmp_path, ProcessBackend(), ScriptedRecipe(latency=0.3), workers=1) as harness:
        executor = harness.executor
        await executor.start()
        assert list(executor.pids) == [0]
        rows = 0

        def until_one_has_died() -> Iterator[int]:
            nonlocal rows
            while not executor.deaths:
                rows += 1
                yield rows - 1

        keys = harness.run.state.keys.owed(until_one_has_died(), retry_failed=False)
        work = asyncio.create_task(executor.run(keys))
        executor.add_workers(1)
        await until(lambda: len(executor.pids) == 2)
        os.kill(executor.pids[0], signal.SIGKILL)
        await work
        assert executor.deaths == 1
        assert executor.counters.completed == 2 * rows
    assert keys_on_disk(tmp_path) == every_key(rows)


async def test_a_stop_finishes_what_is_in_flight_and_a_drop_does_not(tmp_path: Path) -> None:
    async with Harness(tmp_path, ProcessBackend(), ScriptedRecipe(latency=0.3), max_in_flight=8) as harness:
        executor = harness.executor
        await executor.start()
        work = asyncio.create_task(harness.work(100))
        await until(lambda: executor.counters.completed >= 8)
        executor.stop()
        in_flight = executor.in_flight
        done = executor.counters.completed
        await work
        assert executor.counters.completed == done + in_flight
        assert executor.counters.dropped == 0
    async with Harness(tmp_path, ProcessBackend(), ScriptedRecipe(latency=1e6), max_in_flight=8) as harness:
        executor = harness.executor
        await executor.start()
        work = asyncio.create_task(harness.work(100))
        await until(lambda: executor.in_flight == 8)
        executor.drop()
        await work
        assert executor.counters.dropped == 8
        assert executor.counters.completed == 0


async def test_who_has_lost_its_engine_leaves_its_work_to_others(tmp_path: Path) -> None:
    await scenarios.who_has_lost_its_engine_leaves_its_work_to_others(tmp_path, ProcessBackend())


async def test_when_all_have_lost_their_engine_the_run_says_so(tmp_path: Path) -> None:
    async with Harness(tmp_path, ProcessBackend(), ScriptedRecipe(lost=(0, 1))) as harness:
        await harness.executor.start()
        with pytest.raises(EngineLostError, match="it has gone"):
            async with asyncio.timeout(PATIENCE_S):
                await harness.work(20)
    assert list(read_failures(tmp_path)) == []


async def test_the_cap_falls_where_the_workers_engines_are_full(tmp_path: Path) -> None:
    recipe = ScriptedRecipe(latency=0.05, full=True)
    async with Harness(tmp_path, ProcessBackend(), recipe, adaptive=True, max_in_flight=64) as harness:
        executor = harness.executor
        await executor.start()
        work = asyncio.create_task(harness.work(2000))
        await until(lambda: executor.cap < 64)
        executor.stop()
        await work
        assert executor.stats.counts.overloads > 0
        assert executor.counters.failed == 0


async def test_rows_that_cannot_travel_fail_alone(tmp_path: Path) -> None:
    def rows(index: int) -> PromptRow:
        if index == 2:
            raise DataError("row 2 is no row")
        row = load_row(index)
        if index == 4:
            row.columns["lock"] = asyncio.Lock().acquire  # no pickle of it
            row.columns["function"] = lambda: None
        return row

    async with Harness(tmp_path, ProcessBackend(), ScriptedRecipe(), workers=1, load_row=rows) as harness:
        await harness.executor.start()
        async with asyncio.timeout(PATIENCE_S):
            await harness.work(6)
    failures = {(one.index, one.repeat): one for one in read_failures(tmp_path)}
    assert set(failures) == {(2, 0), (2, 1), (4, 0), (4, 1)}
    assert {one.stage for one in failures.values()} == {"prompt"}
    assert failures[4, 0].prompt_key == load_row(4).prompt_key
    assert keys_on_disk(tmp_path) == [key for key in every_key(6) if key[0] not in (2, 4)]


async def test_what_is_wrong_with_the_configuration_is_said_at_start(tmp_path: Path) -> None:
    await scenarios.a_broken_configuration_is_said_at_start(tmp_path, ProcessBackend())
