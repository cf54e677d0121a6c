"""Bounds of an environment's rollouts: how long one may take, and how many run at once."""

import asyncio
from typing import Protocol

from rollstream.errors import TrainingError
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.worker import RolloutWorker, make_failure
from rollstream.trajectory import Failure, PromptRow, Rollout


class Runs(Protocol):
    """What runs rollouts."""

    async def run(self, row: PromptRow, repeat: int) -> Rollout | Failure:
        """See `RolloutWorker.run`."""
        ...


class PlacedWorker:
    """A rollout worker whose rollouts wait for a place among all that run.

    Args:
        worker: runs the rollouts.
        places: shared with other workers.
    """

    def __init__(self, worker: Runs, places: asyncio.Semaphore) -> None:
        self._worker = worker
        self._places = places

    async def run(self, row: PromptRow, repeat: int) -> Rollout | Failure:
        """See `RolloutWorker.run`."""
        async with self._places:
            return await self._worker.run(row, repeat)


class TimedWorker:
    """A rollout worker for which a rollout that takes too long has failed, whatever is left of its attempts.

    Args:
        worker: runs the rollouts.
        availability: of the engine of that worker. A rollout that saw the engine go away has its time again.
        seconds: for a rollout with all its attempts.
    """

    def __init__(self, worker: RolloutWorker, availability: EngineAvailability, seconds: float) -> None:
        self._worker = worker
        self._availability = availability
        self._seconds = seconds

    async def run(self, row: PromptRow, repeat: int) -> Rollout | Failure:
        """See `RolloutWorker.run`."""
        running = asyncio.create_task(self._worker.run(row, repeat))
        try:
            while True:
                returns = self._availability.returns
                await asyncio.wait([running], timeout=self._seconds)
                if running.done():
                    return running.result()
                if self._availability.is_available and self._availability.returns == returns:
                    break
        finally:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        late = TrainingError(
            f"it took longer than {self._seconds:g} s, its share of async_generation_timeout (for limits of "
            "each attempt alone set generation.attempt_timeout)"
        )
        return make_failure(row.index, repeat, row.prompt_key, 1, "agent", late)
