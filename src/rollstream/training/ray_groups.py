"""Groups that are generated in Ray actors: rollouts, tools and rewards leave the trainer's machine alone.

    generation thread --generate(group)--> the actor with least to do --> a `GroupGenerator` of its own
                      --update_weights---> all of them

An actor that dies costs its groups an attempt; another takes its place, with the weights of the last update.
An update is done when all that stand there then have it, whoever died and was replaced meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollstream.engine.ray_package import cause_of, import_ray, is_death, one_line
from rollstream.errors import ConfigError, TransientError, WeightUpdateError
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.training.generator import GroupGenerator
from rollstream.training.plan import PlannedGroup

logger = logging.getLogger(__name__)

_CONCURRENT = 10_000
"""Calls at once in an actor: how many groups there are is decided before it."""

_LOADS = 5
"""Times that an update begins anew because actors died under it: more often, it is the update that kills."""

_CLOSE_S = 10.0
"""For an actor's generator to close; then it is killed."""


class _GroupActor:
    """What runs in an actor."""

    def __init__(self, make: Callable[[], GroupGenerator]) -> None:
        self._generator = make()
        self._loading = asyncio.Lock()

    async def start(self) -> None:
        await self._generator.start()

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        return await self._generator.generate(group)

    async def update_weights(self, source: str, version: int) -> None:
        async with self._loading:  # one that was cut off may still be at it
            await self._generator.update_weights(source, version)

    async def close(self) -> None:
        await self._generator.close()


@dataclass(slots=True, eq=False)
class _Member:
    actor: Any
    in_flight: int = 0


class RayGroups:
    """A `GroupGenerator` over actors that each have one.

    Args:
        make: makes an actor's generator, in the actor: pickled, with what it refers to.
        actors: how many.
        cluster: where; joined by `start`, left by `close`.
        options: of the actors (`num_cpus`, `num_gpus`, …), laid over `num_cpus=1`.
    """

    bounds_groups = False
    """An actor may hang as a whole: see `BatchesAhead(group_timeout=)`."""

    def __init__(
        self,
        make: Callable[[], GroupGenerator],
        *,
        actors: int = 1,
        cluster: RayCluster | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if actors < 1:
            raise ConfigError(f"actors={actors}: at least 1")
        self._make = make
        self._count = actors
        self._cluster = RayCluster({}) if cluster is None else cluster
        self._joined = False
        self._options = {"num_cpus": 1, **(options or {}), "max_concurrency": _CONCURRENT}
        self._members: list[_Member] = []
        self._replacing = asyncio.Lock()
        self._weights: tuple[str, int] | None = None  # that all members have, or something newer
        self.deaths = 0
        """Actors that died and were replaced."""

    async def start(self) -> None:
        await self._cluster.start()
        self._joined = True
        self._members = list(await asyncio.gather(*(self._begin() for _ in range(self._count))))

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        member = min(self._members, key=lambda one: one.in_flight)
        member.in_flight += 1
        answer = member.actor.generate.remote(group)
        try:
            return await answer  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            import_ray().cancel(answer)
            raise
        except Exception as error:
            if not is_death(error):
                raise cause_of(error) from None
            await self._replace(member, error)
            raise TransientError(f"the actor of group {group.position} died: {one_line(error)}") from error
        finally:
            member.in_flight -= 1

    async def update_weights(self, source: str, version: int) -> None:
        weights = (source, version)
        taken: set[_Member] = set()
        for _ in range(_LOADS):
            coming = [member for member in self._members if member not in taken]
            loads = [self._load(member, weights) for member in coming]
            # All of them are waited for, if one fails too: what came late would overwrite what is newer.
            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            for member, outcome in zip(coming, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome:
                    taken.add(member)
            if taken.issuperset(self._members):
                self._weights = weights
                return
        raise WeightUpdateError(
            f"of {len(self._members)} actors some died {_LOADS} times, one after the other, under the update "
            f"to version {version}: is there memory enough to load weights?"
        )

    async def close(self) -> None:
        ray = import_ray()
        members, self._members = self._members, []
        closing = [member.actor.close.remote() for member in members]
        with suppress(Exception):  # one that hangs, or is dead
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(_result(one) for one in closing), return_exceptions=True)
        for member in members:
            ray.kill(member.actor)
        if self._joined:
            await self._cluster.close()

    async def _begin(self) -> _Member:
        actor = import_ray().remote(_GroupActor).options(**self._options).remote(self._make)
        try:
            await actor.start.remote()
            weights = None
            while self._weights is not None and weights is not self._weights:  # it may change meanwhile
                weights = self._weights
                await actor.update_weights.remote(*weights)
        except Exception as error:
            raise cause_of(error) from None
        return _Member(actor)

    async def _load(self, member: _Member, weights: tuple[str, int]) -> bool:
        """Whether the member has them; if it died, another stands in its place, which has older ones."""
        answer = member.actor.update_weights.remote(*weights)
        try:
            await answer
        except asyncio.CancelledError:
            import_ray().cancel(answer)
            raise
        except Exception as error:
            if not is_death(error):
                raise cause_of(error) from None
            await self._replace(member, error)
            return False
        return True

    async def _replace(self, dead: _Member, error: BaseException) -> None:
        async with self._replacing:
            if dead not in self._members:
                return  # another of its groups was here first
            self.deaths += 1
            logger.warning("an actor died and is replaced: %s", one_line(error))
            self._members[self._members.index(dead)] = await self._begin()


async def _result(reference: Any) -> Any:
    return await reference
