"""Rollouts that take too long."""

import asyncio
from typing import Any

import pytest

from rollstream.errors import EngineUnavailableError
from rollstream.integrations.trl.bounds import TimedWorker
from rollstream.rollout.availability import EngineAvailability
from rollstream.trajectory import Failure, PromptRow

ROW = PromptRow(index=4, prompt_key="k", messages=[{"role": "user", "content": "?"}], data_source="sums")


class Health:
    async def health(self) -> bool:
        return True


class Work:
    """Waits, and says how that ended."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.cut_off = False

    async def run(self, row: PromptRow, repeat: int) -> Any:
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cut_off = True
            raise
        return (row.index, repeat)


def make_gate() -> EngineAvailability:
    return EngineAvailability(Health(), timeout=60.0)  # type: ignore[arg-type]


async def test_a_rollout_that_hangs_has_failed() -> None:
    work = Work()
    result = await TimedWorker(work, make_gate(), 0.05).run(ROW, 3)  # type: ignore[arg-type]
    assert isinstance(result, Failure) and (result.index, result.repeat) == (4, 3)
    assert "took longer than 0.05 s" in result.error and work.cut_off


async def test_one_that_ends_in_time_is_given_on() -> None:
    work = Work()
    work.go_on.set()
    assert await TimedWorker(work, make_gate(), 60.0).run(ROW, 3) == (4, 3)  # type: ignore[arg-type, comparison-overlap]


async def test_one_that_is_cut_off_from_outside_is_cut_off_inside() -> None:
    work = Work()
    running = asyncio.create_task(TimedWorker(work, make_gate(), 60.0).run(ROW, 3))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.cut_off


async def test_the_time_without_an_engine_is_charged_to_nobody() -> None:
    work, availability = Work(), make_gate()
    availability.mark_away(EngineUnavailableError("restarts"), availability.returns)
    running = asyncio.create_task(TimedWorker(work, availability, 0.02).run(ROW, 3))  # type: ignore[arg-type]
    await asyncio.sleep(0.2)
    assert not running.done()
    await availability.wait()  # opens it: from now on the time is the rollout's
    assert isinstance(await running, Failure)
