"""Groups that are generated in Ray actors: rollouts, tools and rewards leave the trainer's machine alone.

    generation thread --generate(group, newest weights)--> the actor with least to do --> its own generator
                      --update_weights-------------------> all of them

Ray restarts an actor that dies. What the new one lacks it makes up for before its first group: it starts its
generator, and loads the weights that come with the group, if they are newer than its own.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollstream.engine.ray_package import cause_of, import_ray, is_death, one_line, submit
from rollstream.errors import ConfigError, EngineUnavailableError, TransientError
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.training.group import GroupGenerator
from rollstream.training.plan import PlannedGroup

_OPTIONS = {
    "num_cpus": 1,
    "max_restarts": -1,
    "max_task_retries": 1,  # waits for the restart; who dies twice of the same group fails an attempt at it
    "max_concurrency": 10_000,  # how many groups there are is decided before
}

_CLOSE_S = 10.0
"""For an actor's generator to close; then it is killed."""


class _GroupActor:
    """Runs in a Ray actor."""

    def __init__(self, make: Callable[[], GroupGenerator]) -> None:
        self._make = make
        self._generator: GroupGenerator | None = None
        self._version = -1  # of the weights that were loaded
        self._changing = asyncio.Lock()

    async def get_ready(self, weights: tuple[str, int] | None = None, *, anew: bool = False) -> None:
        """Starts the generator and loads `weights`, if its own are older; with `anew` in any case."""
        async with self._changing:  # one that was cut off may still be at it
            if self._generator is None:
                generator = self._make()
                try:
                    await generator.start()
                except BaseException:
                    await generator.close()
                    raise
                self._generator = generator
            if weights is not None and (anew or self._version < weights[1]):
                await self._generator.update_weights(*weights)
                self._version = weights[1]

    async def generate(self, group: PlannedGroup, weights: tuple[str, int] | None) -> Sequence[Any]:
        if self._generator is None or (weights is not None and self._version < weights[1]):
            await self.get_ready(weights)
        assert self._generator is not None
        return await self._generator.generate(group)

    async def close(self) -> None:
        if self._generator is not None:
            await self._generator.close()


class RayGroups(GroupGenerator):
    """A `GroupGenerator` over actors that each have one.

    Args:
        make: makes an actor's generator, in the actor: pickled, with what it refers to.
        actors: how many.
        cluster: where; joined by `start`, left by `close`.
        options: of the actors (`num_cpus`, `num_gpus`, …), laid over `num_cpus=1`.
    """

    bounds_groups = False  # an actor may hang as a whole

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
        self._options = {**_OPTIONS, **(options or {})}
        self._actors: list[Any] = []
        self._in_flight: Counter[int] = Counter()  # groups, by actor
        self._weights: tuple[str, int] | None = None  # of the last update

    async def start(self) -> None:
        await self._cluster.start()
        self._joined = True
        kind = import_ray().remote(_GroupActor).options(**self._options)
        self._actors = [kind.remote(self._make) for _ in range(self._count)]
        await asyncio.gather(*(_answer(actor.get_ready) for actor in self._actors))

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        number = min(range(self._count), key=self._in_flight.__getitem__)
        self._in_flight[number] += 1
        try:
            return await _answer(self._actors[number].generate, group, self._weights)  # type: ignore[no-any-return]
        finally:
            self._in_flight[number] -= 1

    async def update_weights(self, source: str, version: int) -> None:
        weights = (source, version)
        loads = [_answer(actor.get_ready, weights, anew=True) for actor in self._actors]
        # All of them are waited for, if one fails too: what came late would overwrite what is newer.
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(outcome, TransientError):  # an actor is away until Ray has restarted it
                raise EngineUnavailableError(str(outcome)) from outcome
            if isinstance(outcome, BaseException):
                raise outcome
        self._weights = weights

    async def close(self) -> None:
        closing = [_answer(actor.close) for actor in self._actors]
        with suppress(TimeoutError):  # one that hangs
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*closing, return_exceptions=True)
        for actor in self._actors:
            import_ray().kill(actor)
        if self._joined:
            await self._cluster.close()


async def _answer(method: Any, *args: Any, **options: Any) -> Any:
    """Awaits an actor's answer.

    Raises:
        TransientError: it died; Ray restarts it.
        Exception: as it was raised in the actor.
    """
    try:
        reference = submit(method, *args, **options)
        return await reference
    except asyncio.CancelledError:
        import_ray().cancel(reference)
        raise
    except Exception as error:
        if is_death(error):
            raise TransientError(f"an actor died: {one_line(error)}") from error
        raise cause_of(error) from None
