"""Workers as Ray actors, on any node of a cluster."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rollstream.childproc import ChildDiedError
from rollstream.engine.ray_package import (
    cause_of,
    import_ray,
    is_death,
    is_of_the_node,
    is_placed,
    one_line,
    submit,
)
from rollstream.errors import ConfigError
from rollstream.redaction import redact
from rollstream.rollout.worker_host import WorkerHost, WorkerPlace, WorkerRecipe, WorkerReport, WorkItem
from rollstream.trajectory import RolloutKey
from rollstream.user_calls import DaemonThreads

logger = logging.getLogger(__name__)

_LINGER_S = 0.02
"""How long a result waits for company. Short against any answer, and fifty reports a second at most."""

_WHY_S = 5.0
"""For Ray to find out whether a worker that does not answer has died, and why. Its node tells at once, if
that is there; what was in flight waits meanwhile."""

_ROOM_S = 30.0
"""After so long a worker that has no place yet is said, with what there is."""

_WORKERS_MAX = 8
"""verl's default. One worker does hundreds of rollouts a second, so more are rarely of use."""


class RayBackend:
    """Makes workers that are actors; see `WorkerBackend`. The cluster has been joined.

    Args:
        recipe: gives what a worker is made from, asked for each anew.
        options: of the actors, laid over `num_cpus=1` and spreading over nodes.
    """

    is_local = False
    shares_files = False

    def __init__(self, recipe: Callable[[], WorkerRecipe], options: Mapping[str, Any] | None = None) -> None:
        self._recipe = recipe
        self._options = {
            "num_cpus": 1,
            "scheduling_strategy": "SPREAD",
            **(options or {}),
            "max_restarts": 0,  # a slot's next worker is another worker: it owns none of the rollouts
            "max_task_retries": 0,
        }

    def spawn(self, number: int) -> "RayWorker":
        try:
            actor = import_ray().remote(WorkerHost).options(**self._options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"ray_kwargs.worker: Ray does not take {redact(self._options)}: {one_line(error)}"
            ) from error
        return RayWorker(
            actor.remote(self._recipe(), number, WorkerPlace.here(), linger_s=_LINGER_S), self._options
        )


class RayWorker:
    """The driver's end of one actor; see `WorkerHandle`."""

    def __init__(self, actor: Any, options: Mapping[str, Any] | None = None) -> None:
        self.actor = actor
        self._options = options or {}

    async def start(self) -> int:
        starting = asyncio.ensure_future(self._answer(self.actor.start))
        try:
            while not (await asyncio.wait({starting}, timeout=_ROOM_S))[0]:
                await self._warn_without_room()
        finally:
            starting.cancel()
        return int(starting.result())

    async def reports(self) -> AsyncGenerator[WorkerReport, None]:
        try:
            references = submit(self.actor.reports.options(num_returns="streaming"))
            while True:
                yield await (await anext(references))
        except Exception as error:
            raise await self._error(error) from None

    async def give(self, items: Sequence[WorkItem]) -> None:
        await self._answer(self.actor.give, items)

    async def follow(self, urls: Sequence[str]) -> None:
        with suppress(Exception):  # it is gone, as its reports will say
            submit(self.actor.follow, list(urls))

    async def drop(self) -> None:
        with suppress(Exception):
            submit(self.actor.drop)

    async def cut(self, key: RolloutKey) -> None:
        await self._answer(self.actor.cut, key)

    async def hold(self, number: int) -> None:
        try:
            await self._answer(self.actor.hold, number)
        except Exception:
            self.kill()

    async def release(self, urls: Sequence[str]) -> None:
        await self._answer(self.actor.release, list(urls))

    async def close(self) -> None:
        await self._answer(self.actor.close)

    def kill(self) -> None:
        with suppress(Exception):  # Ray may be gone
            import_ray().kill(self.actor)

    async def _warn_without_room(self) -> None:
        """Says what there is when Ray has found no node yet. In a thread: a cluster that is gone hangs."""
        if (await _STATES.start(partial(is_placed, self.actor))).value is not False:
            return
        ray = import_ray()
        logger.warning(
            "a worker waits for room: it asks for %s (ray_kwargs.worker); the cluster has %s, of which %s are free",
            redact(self._options),
            ray.cluster_resources(),
            ray.available_resources(),
        )

    async def _answer(self, method: Any, *args: Any) -> Any:
        try:
            return await submit(method, *args)
        except Exception as error:
            raise await self._error(error) from None

    async def _error(self, error: BaseException) -> BaseException:
        """What the worker raised, or `ChildDiedError`."""
        if not is_death(error):
            return cause_of(error)
        unavailable = import_ray().exceptions.ActorUnavailableError
        with suppress(TimeoutError):
            async with asyncio.timeout(_WHY_S):
                while isinstance(error, unavailable):  # at first Ray knows only that it does not answer
                    await asyncio.sleep(0.5)
                    try:
                        await submit(self.actor.__ray_ready__)
                    except Exception as again:
                        if is_death(again):
                            error = again
                    else:
                        break  # the way to it was lost for a moment: it is replaced, for its reports are lost
        return ChildDiedError(one_line(error), blameless=is_of_the_node(error))


_STATES = DaemonThreads("rollstream-ray-state")


def default_workers(claimed: float = 0.0) -> int:
    """One for each CPU of the cluster that was joined and not `claimed`, `_WORKERS_MAX` at most."""
    return min(_WORKERS_MAX, max(1, int(import_ray().cluster_resources().get("CPU", 1) - claimed)))


def here() -> Any:
    """How actors are scheduled that must run on this machine."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
