"""Training loops for tests: batches of a generator that is a function, and waiting for threads."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rollstream.rollout.retry import RetryPolicy
from rollstream.training import BatchesAhead, CallableGenerator, Plan, PlannedGroup, ShuffledPlan
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
