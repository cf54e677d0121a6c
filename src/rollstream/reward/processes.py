"""`custom_reward_function.processes`: a reward function in processes of its own.

A function in Python holds the interpreter's lock of its process: in a training that is the trainer's. Each process
scores one answer at a time, so that one that hangs or brings its process down costs no other answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rollstream.childproc import PICKLE, Child, ChildDiedError, Parent, portable
from rollstream.errors import RewardError
from rollstream.reward.base import SCORED, Score
from rollstream.reward.custom import load_reward
from rollstream.trajectory import PromptRow

_GRACE_S: Final = 5.0
"""Beyond the time of a call, which the process itself bounds: a function that holds the lock keeps it from that."""


class ProcessReward:
    """A `RewardFunction`: that of `load_reward`, in so many processes.

    Args:
        path, name, reward_kwargs, timeout: see `load_reward`.
        processes: how many; they are started when they are needed.

    Raises:
        ConfigError: see `load_reward`.
    """

    def __init__(
        self, path: str, name: str, reward_kwargs: Mapping[str, Any] | None, timeout: float, processes: int
    ) -> None:
        self._order = path, name, dict(reward_kwargs or {}), timeout
        loaded = load_reward(*self._order)  # so that what is wrong with it is said at once
        loaded.close()
        self.label, self.source_digest = loaded.label, loaded.source_digest
        self.takes_trajectory, self.sees_group = loaded.takes_trajectory, loaded.sees_group
        self._timeout = timeout
        self._free: asyncio.Queue[Child | None] = asyncio.Queue()
        for _ in range(processes):
            self._free.put_nowait(None)
        self._children: set[Child] = set()

    async def score(self, row: PromptRow, solution_str: str) -> Score:
        if self.sees_group:
            return Score(None, {})
        score: Score = await self._ask(self._told(row), solution_str, row)
        return score

    async def score_group(self, rows: Sequence[PromptRow], answers: Sequence[str]) -> list[Score]:
        """See `FunctionReward.score_group`."""
        scores: list[Score] = await self._ask([self._told(row) for row in rows], [*answers], rows[0])
        return scores

    def _told(self, row: PromptRow) -> PromptRow:
        known = {SCORED: row.columns.get(SCORED)} if self.takes_trajectory else {}
        return replace(row, messages=[], columns=known, images=[])

    async def _ask(self, told: Any, answers: Any, row: PromptRow) -> Any:
        child = await self._free.get()
        try:
            if child is None:
                child = await Child.start(f"{__name__}:main")
                self._children.add(child)
                await child.send(self._order)
            return await child.ask((told, answers), timeout=self._timeout + _GRACE_S)
        except RewardError:
            raise  # the function's: its process is well
        except BaseException as error:
            if child is not None:
                self._children.discard(child)
                child.kill()
                child = None
            where = f"{self.label}, row {row.index} ({row.data_source})"
            if isinstance(error, TimeoutError):
                raise RewardError(f"{where}: took longer than {self._timeout:g} seconds") from error
            if isinstance(error, ChildDiedError):
                raise RewardError(f"{where}: its process {error}") from error
            raise
        finally:
            self._free.put_nowait(child)

    def close(self) -> None:
        while self._children:
            self._children.pop().kill()


def main(number: int) -> None:
    """A process that scores."""
    parent = Parent(number, PICKLE)
    reward = None
    with asyncio.Runner() as runner:
        while True:
            for message in parent.receive():
                if reward is None:
                    reward = load_reward(*message)
                    continue
                told, answers = message
                score: Any = reward.score_group if isinstance(told, list) else reward.score
                try:
                    parent.send(runner.run(score(told, answers)))
                except Exception as error:
                    parent.send(portable(error))
