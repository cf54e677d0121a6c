"""Actors that die while weights are on their way: who stands in for them has the newest, or says so.

The actors are played: what is tested is an order of events that real ones take by chance
(`tests/faults/test_training_ray.py` kills real ones).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from rollstream.errors import TransientError, WeightUpdateError
from rollstream.training import ray_groups
from rollstream.training.generator import CallableGenerator
from rollstream.training.plan import PlannedGroup
from rollstream.training.ray_groups import RayGroups

SOON_S = 10.0


class Death(Exception):
    """Of an actor."""


class Call:
    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.method = method

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self.method(*arguments))


class Actor:
    """Takes weights when `gates[id, source]` is open, or at once where there is no such gate."""

    def __init__(self, play: "Play") -> None:
        self.play = play
        self.id = len(play.actors)
        play.actors.append(self)
        self.weights: tuple[str, int] | None = None
        self.dead = asyncio.Event()
        self.start, self.close = Call(self._start), Call(self._start)
        self.generate, self.update_weights = Call(self._generate), Call(self._update)

    async def _start(self) -> None:
        await asyncio.sleep(0)

    async def _generate(self, group: PlannedGroup) -> Any:
        if self.dead.is_set():
            raise Death
        return [self.weights]

    async def _update(self, source: str, version: int) -> None:
        if self.dead.is_set():
            raise Death
        self.play.loading.append((self.id, source))
        gate = self.play.gates.get((self.id, source))
        if gate is not None:
            await asyncio.wait_for(gate.wait(), SOON_S)
        if source == self.play.deadly:
            self.dead.set()
        if (self.id, source) in self.play.refused:
            raise ValueError("shapes differ")
        if self.dead.is_set():
            raise Death
        self.weights = (source, version)


class Play:
    """Ray, and its cluster."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.gates: dict[tuple[int, str], asyncio.Event] = {}
        self.refused: set[tuple[int, str]] = set()
        self.deadly = ""
        self.cancelled = 0
        self.loading: list[tuple[int, str]] = []

    def gate(self, actor: int, source: str) -> asyncio.Event:
        self.gates[actor, source] = asyncio.Event()
        return self.gates[actor, source]

    def options(self, **options: Any) -> "Play":
        return self

    def remote(self, what: Any) -> Any:
        return self if what is ray_groups._GroupActor else Actor(self)

    def cancel(self, answer: "asyncio.Future[Any]") -> None:
        answer.cancel()
        self.cancelled += 1

    def kill(self, actor: Actor) -> None:
        actor.dead.set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    one = Play()
    monkeypatch.setattr(ray_groups, "import_ray", lambda: one)
    monkeypatch.setattr(ray_groups, "is_death", lambda error: isinstance(error, Death))
    monkeypatch.setattr(ray_groups, "cause_of", lambda error: error)
    yield one


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0)


async def started(play: Play, actors: int) -> RayGroups:
    groups = RayGroups(lambda: None, actors=actors, cluster=play)  # type: ignore[arg-type, return-value]
    await groups.start()
    await groups.update_weights("w1", 1)
    return groups


async def versions(groups: RayGroups) -> list[Any]:
    return [member.actor.weights for member in groups._members]


async def test_one_that_dies_before_an_update_and_comes_back_during_it(play: Play) -> None:
    groups = await started(play, 1)
    slow = play.gate(1, "w1")
    play.actors[0].dead.set()
    group = asyncio.ensure_future(groups.generate(PlannedGroup(0, 0, 0)))
    await until(lambda: (1, "w1") in play.loading)
    update = asyncio.ensure_future(groups.update_weights("w2", 2))
    await asyncio.sleep(0.01)
    assert not update.done()  # the one in its place does not have them
    slow.set()
    await asyncio.wait_for(update, SOON_S)
    with pytest.raises(TransientError):
        await group
    assert await groups.generate(PlannedGroup(1, 0, 0)) == [("w2", 2)]


async def test_one_that_dies_having_taken_an_update_that_others_still_load(play: Play) -> None:
    groups = await started(play, 2)
    others, again = play.gate(1, "w2"), play.gate(2, "w1")
    update = asyncio.ensure_future(groups.update_weights("w2", 2))
    await until(lambda: play.actors[0].weights == ("w2", 2) and (1, "w2") in play.loading)
    play.actors[0].dead.set()
    groups._members[1].in_flight += 1  # busy, so that the dead one is asked
    group = asyncio.ensure_future(groups.generate(PlannedGroup(0, 0, 0)))
    await until(lambda: (2, "w1") in play.loading)
    others.set()
    await asyncio.wait_for(update, SOON_S)
    again.set()
    with pytest.raises(TransientError):
        await group
    assert await versions(groups) == [("w2", 2), ("w2", 2)]


async def test_one_that_dies_while_it_loads(play: Play) -> None:
    groups = await started(play, 2)
    dies = play.gate(0, "w2")
    update = asyncio.ensure_future(groups.update_weights("w2", 2))
    await until(lambda: (0, "w2") in play.loading)
    play.actors[0].dead.set()
    dies.set()
    await asyncio.wait_for(update, SOON_S)
    assert groups.deaths == 1
    assert await versions(groups) == [("w2", 2), ("w2", 2)]


async def test_an_update_that_is_cut_off_is_cut_off_in_the_actors(play: Play) -> None:
    groups = await started(play, 2)
    play.gate(0, "w2")
    play.gate(1, "w2")
    update = asyncio.ensure_future(groups.update_weights("w2", 2))
    await until(lambda: {(0, "w2"), (1, "w2")} <= set(play.loading))
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert play.cancelled == 2
    await asyncio.wait_for(groups.update_weights("w3", 3), SOON_S)
    assert await versions(groups) == [("w3", 3), ("w3", 3)]


async def test_in_an_actor_one_update_comes_after_the_other() -> None:
    seen: list[str] = []
    begun, release = asyncio.Event(), asyncio.Event()

    async def update(source: str, version: int) -> None:
        seen.append(f"{source} begins")
        if source == "w1":
            begun.set()
            await release.wait()
        seen.append(f"{source} ends")

    async def generate(group: PlannedGroup) -> list[Any]:
        return []

    actor = ray_groups._GroupActor(lambda: CallableGenerator(generate, update_weights=update))
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(actor.update_weights("w1", 1))
        await begun.wait()
        tasks.create_task(actor.update_weights("w2", 2))
        await asyncio.sleep(0.01)
        release.set()
    assert seen == ["w1 begins", "w1 ends", "w2 begins", "w2 ends"]


async def test_weights_that_kill_whoever_loads_them_are_not_tried_for_ever(play: Play) -> None:
    groups = await started(play, 2)
    play.deadly = "w2"
    with pytest.raises(WeightUpdateError, match="some died 5 times"):
        await asyncio.wait_for(groups.update_weights("w2", 2), SOON_S)
    assert await versions(groups) == [("w1", 1), ("w1", 1)]


async def test_weights_that_one_refuses_are_not_what_a_new_one_gets(play: Play) -> None:
    groups = await started(play, 2)
    play.refused.add((0, "w2"))
    others = play.gate(1, "w2")
    update = asyncio.ensure_future(groups.update_weights("w2", 2))
    await until(lambda: (1, "w2") in play.loading)
    await asyncio.sleep(0.01)
    assert not update.done()  # what is on its way to the others must not come after something newer
    others.set()
    with pytest.raises(ValueError, match="shapes differ"):
        await asyncio.wait_for(update, SOON_S)
    play.actors[0].dead.set()
    groups._members[1].in_flight += 1
    with pytest.raises(TransientError):
        await groups.generate(PlannedGroup(0, 0, 0))
    assert groups._members[0].actor.weights == ("w1", 1)
    await groups.update_weights("w3", 3)
    assert await versions(groups) == [("w3", 3), ("w3", 3)]
