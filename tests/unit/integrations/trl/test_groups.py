"""Rollouts that take too long, and sampling that the loss does not know of."""

import asyncio

import pytest

from rollstream.errors import ConfigError, EngineUnavailableError
from rollstream.integrations.trl.groups import TrainedEngine, within
from rollstream.rollout.availability import EngineAvailability
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams


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


async def test_the_time_without_an_engine_is_charged_to_nobody() -> None:
    work, availability = Work(), make_gate()
    availability.mark_away(EngineUnavailableError("restarts"), availability.returns)
    running = asyncio.create_task(within(work.run(), 0.02, availability))
    assert not (await asyncio.wait([running], timeout=0.2))[0]
    await availability.wait()  # opens it: from now on the time is the rollout's
    with pytest.raises(TimeoutError):
        await running


async def test_only_the_trainers_sampling_reaches_the_trained_engine() -> None:
    inside = ScriptedEngine()
    engine = TrainedEngine(inside, 0.7, on_update="continue")
    await engine.start()
    known = SamplingParams(8, temperature=0.7, seed=3, ignore_eos=True, stop_token_ids=(5,))
    await engine.generate([1, 2], known, request_id="a")
    assert engine.refused is None
    for asked in (
        SamplingParams(8, temperature=1.0),
        SamplingParams(8, temperature=0.0),
        SamplingParams(8, temperature=0.7, top_p=0.9),
        SamplingParams(8, temperature=0.7, top_k=20),
        SamplingParams(8, temperature=0.7, extra={"min_p": 0.1}),
    ):
        with pytest.raises(ConfigError):
            await engine.generate([1, 2], asked, request_id="b")
    assert isinstance(engine.refused, ConfigError) and len(inside.requests) == 1
    await engine.close()
