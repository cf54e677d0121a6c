"""Rollouts that take too long."""

import asyncio

import pytest

from rollstream.errors import EngineUnavailableError
from rollstream.integrations.trl.groups import within
from rollstream.rollout.availability import EngineAvailability


class Health:
    async def health(self) -> bool:
        return True


class Work:
    """Waits, and says how that ended."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.cut_off = False

    async def run(self) -> int:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cut_off = True
            raise
        return 3


def make_gate() -> EngineAvailability:
    return EngineAvailability(Health(), timeout=60.0)  # type: ignore[arg-type]


async def test_a_rollout_that_hangs_is_cut_off() -> None:
    work = Work()
    with pytest.raises(TimeoutError):
        await within(work.run(), 0.05, make_gate())
    assert work.cut_off


async def test_one_that_ends_in_time_is_given_on() -> None:
    work = Work()
    work.go_on.set()
    assert await within(work.run(), 60.0, make_gate()) == 3


async def test_one_that_is_cut_off_from_outside_is_cut_off_inside() -> None:
    work = Work()
    running = asyncio.create_task(within(work.run(), 60.0, make_gate()))
    await work.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.cut_off


async def test_the_time_without_an_engine_is_charged_to_nobody() -> None:
    work, availability = Work(), make_gate()
    availability.mark_away(EngineUnavailableError("restarts"), availability.returns)
    running = asyncio.create_task(within(work.run(), 0.02, availability))
    assert not (await asyncio.wait([running], timeout=0.2))[0]
    await availability.wait()  # opens it: from now on the time is the rollout's
    with pytest.raises(TimeoutError):
        await running
