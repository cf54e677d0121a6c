"""Training loops for tests: batches of a generator that is a function, and waiting for threads."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rollstream.rollout.retry import RetryPolicy
from rollstream.store.manifest import new_manifest
from rollstream.training import BatchesAhead, CallableGenerator, Plan, PlannedGroup, ShuffledPlan
from rollstream.training.group import GroupGenerator
from rollstream.training.store import StoreFacts
from rollstream.trajectory import Failure, Rollout, Trajectory
from tests.support.until import PATIENCE_S, wait_until

LONG_S = PATIENCE_S

QUICK = RetryPolicy(max_attempts=3, delay=0.01, delay_max=0.02)

Generate = Callable[[PlannedGroup], Awaitable[Sequence[Any]]]


async def echo(group: PlannedGroup) -> list[int]:
    await asyncio.sleep(0.001 * (group.position * 7 % 5))
    return [group.index]


def batches_of(
    generate: Generate = echo,
    *,
    plan: Plan | None = None,
    rows: int = 10,
    epochs: int | None = None,
    **options: Any,
) -> BatchesAhead:
    """Of four groups, tried again quickly; `update`, `start` and `close` are the generator's."""
    parts = {"update_weights": "update", "start": "start", "close": "close"}
    given = {part: options.pop(name) for part, name in parts.items() if name in options}
    generator = CallableGenerator(generate, **given)
    options = {"groups_per_step": 4, "retry": QUICK, "weight_timeout": LONG_S, **options}
    return BatchesAhead(
        ShuffledPlan(rows, seed=5, epochs=epochs) if plan is None else plan, generator, **options
    )


class StoredGroups(GroupGenerator):
    """Makes groups of three rollouts, each in its own time, and gives each to the store.

    Args:
        made: told `position place` of each rollout, once it was durable.
        fails: groups that never work.
        stopped: rollouts that are not made: they hang.
        facts: what the store says of the rollouts.
    """

    group_size = 3
    keeps_rollouts = True

    def __init__(
        self,
        made: Callable[[str], object] = lambda line: None,
        *,
        fails: Callable[[PlannedGroup], bool] = lambda group: False,
        stopped: Callable[[int, int], bool] = lambda position, place: False,
        facts: dict[str, Any] | None = None,
        key: str = "",
    ) -> None:
        self._made, self._fails, self._stopped, self._facts, self._key = (
            made,
            fails,
            stopped,
            facts or {},
            key,
        )
        self._version = 0

    async def update_weights(self, source: str, version: int) -> None:
        self._version = version

    def store_facts(self) -> StoreFacts:
        empty: dict[str, Any] = {"identity": {}, "dataset": {}, "versions": {}, "config": {}}
        return StoreFacts(new_manifest(n=self.group_size, **{**empty, **self._facts}))

    def prompt_key(self, index: int) -> str:
        return f"{self._key}{index:0{32 - len(self._key)}x}"

    async def generate(self, group: PlannedGroup) -> list[Rollout]:
        if self._fails(group):
            raise ValueError("this prompt never works")
        kept = await self.keeper.kept(group)
        missing = (
            [] if kept.is_whole else [place for place in range(self.group_size) if place not in kept.results]
        )
        made = await asyncio.gather(*(self._one(group, place) for place in missing))
        rollouts = [one for one in (*kept.results.values(), *made) if isinstance(one, Rollout)]
        return sorted(rollouts, key=lambda rollout: rollout.repeat)

    async def _one(self, group: PlannedGroup, place: int) -> Rollout | Failure:
        await asyncio.sleep(random.random() * 0.01)
        while self._stopped(group.position, place):
            await asyncio.sleep(0.002)
        ids = [random.randrange(1000) for _ in range(5)]
        trajectory = Trajectory(
            [1], ids, [1] * 5, [-0.5] * 5, [], "stop", [(0, self._version)], reward=random.random()
        )
        rollout = Rollout(
            group.index, 3 * group.epoch + place, self.prompt_key(group.index), [trajectory], "sums"
        )
        kept = await self.keeper.keep(group, place, rollout)
        self._made(f"{group.position} {place}\n")
        return kept


def train(batches: BatchesAhead, steps: int, source: str = "") -> list[list[int]]:
    """Positions of each batch."""
    sequence = []
    for _ in range(steps):
        batch = batches.next_batch(LONG_S)
        sequence.append([group.position for group in batch.groups])
        batches.trained(batch.step)
        batches.update_weights(source)
    return sequence


def scored(*rewards: float | None) -> list[Any]:
    """As much of a group's rollouts as filters look at."""
    return [SimpleNamespace(reward=reward) for reward in rewards]


def rollout_of(tokens: int = 1, versions: Sequence[int] = ()) -> Any:
    """As much of a `Rollout` as is counted: one trajectory."""
    one = SimpleNamespace(
        prompt_ids=[],
        response_ids=[0] * tokens,
        policy_versions=[(3 * place, version) for place, version in enumerate(versions)],
        reward=1.0,
    )
    return SimpleNamespace(trajectories=[one], final=one)


def causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def eventually(condition: Callable[[], object]) -> None:
    """Waits, in a thread, until another one has made it true."""
    wait_until(condition, every=0.002)


class Gate(threading.Event):
    """Coroutines wait for it, and another thread opens it."""

    async def passed(self) -> None:
        while not self.is_set():
            await asyncio.sleep(0.002)
