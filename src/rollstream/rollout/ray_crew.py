"""The workers of a Ray run: started, listened to, replaced when they end, told which servers there are.

    slot (a number) --> actor --start--> member --reports--> ends --pause--> the next actor
                          +-- cannot start, too often in a row --> the slot is given up

The crew decides nothing about rollouts: who owns them is told when a worker joins, reports or is gone.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rollstream.daemon_threads import DaemonThreads
from rollstream.engine.ray_package import cause_of, import_ray, is_death, is_placed, one_line
from rollstream.engine.restarts import Restarts
from rollstream.errors import ConfigError, EngineLostError, EngineUnavailableError, RollstreamError
from rollstream.redaction import redact
from rollstream.rollout.fleet import Fleet
from rollstream.rollout.ray_worker import RayWorker, WorkerPlace, WorkerRecipe, WorkerReport, WorkItem

logger = logging.getLogger(__name__)

_FIRST_WORKER_S = 1200.0
"""For the first worker: a cluster that scales itself starts machines, an embedded engine loads a model."""

_WAITED_FOR_S = 30.0
"""A worker that takes longer to come has no places kept free for it: the cluster may have no room."""

_SAY_EVERY_S = 10.0
"""Between lines about a worker that has not come yet, until the first one has."""

_SILENCE_S = 60.0
"""Beyond the time limit of an attempt: a worker that reports nothing for so long hangs for good, since
whatever holds up its event loop holds up the limit as well."""

_CLOSE_S = 10.0
"""For a worker to release its engine and tools before it is killed."""

_WHY_S = 5.0
"""For Ray to find out whether a worker that does not answer has died, and why. Its node tells at once, if
that is there; what was in flight waits meanwhile."""

_URLS_EVERY_S = 1.0
"""Between looks at which servers there are; launched ones come back on other ports."""

_URLS_TOLD_EVERY = 10
"""Looks after which workers are told what has not changed: one may have found a new server still deaf."""

_OUTAGE_PAUSE_S = 5.0
"""Before a worker is started again that found no engine: to start one costs seconds of a CPU."""

_FIRST_RESTART_S = 0.5
_RESTART_S_MAX = 30.0
_MOST_FAILED_STARTS = 5
"""As for launched servers: a worker that cannot start so often in a row is given up."""


@dataclass(eq=False, slots=True)
class Slot:
    """A number that a worker has, and others after it."""

    number: int
    waiting_since: float
    """Since when no worker has it."""
    restarts: Restarts = field(
        default_factory=lambda: Restarts(
            first=_FIRST_RESTART_S, longest=_RESTART_S_MAX, most_failures=_MOST_FAILED_STARTS
        )
    )
    member: "Member | None" = None
    has_come: bool = False
    """Whether it ever had a worker."""
    given_up: BaseException | None = None
    outage_since: float | None = None
    """Since when its workers cannot start because no engine answers."""

    def is_expected(self, now: float) -> bool:
        """Whether its share of places is kept free."""
        return self.given_up is None and (self.member is not None or now - self.waiting_since < _WAITED_FOR_S)


@dataclass(eq=False, slots=True)
class Member:
    """A worker that runs."""

    id: int
    """Never used again."""
    slot: Slot
    actor: Any
    pid: int = 0


class CrewOwner(Protocol):
    """Who owns the rollouts that the crew works at."""

    def joined(self, member: Member) -> None:
        """A worker can be given work."""
        ...

    def reported(self, member: Member, report: WorkerReport) -> None:
        """A worker has said something."""
        ...

    def lost(self, member: Member, cause: BaseException) -> int:
        """A worker has ended; returns how many rollouts are owed again."""
        ...

    def given_up(self, slot: Slot) -> None:
        """A number will have no worker any more."""
        ...


class Crew:
    """Keeps workers running.

    Args:
        recipe: gives what they are made from, asked for each anew.
        owner: told what happens.
        options: of the actors, laid over `num_cpus=1` and spreading over nodes.
        attempt_timeout: seconds for one attempt.
        engine_timeout: seconds that a worker may find no engine at its start, once there was one.
        fleet: gets what the workers say of themselves.
        urls: of the servers that workers use, where these may change.
    """

    def __init__(
        self,
        recipe: Callable[[], WorkerRecipe],
        owner: CrewOwner,
        *,
        options: Mapping[str, Any],
        attempt_timeout: float,
        engine_timeout: float,
        fleet: Fleet,
        urls: Callable[[], Sequence[str]] | None,
    ) -> None:
        self._recipe = recipe
        self._owner = owner
        self._options = dict(options)
        self._engine_timeout = engine_timeout
        self._silence_s = attempt_timeout + _SILENCE_S
        self._fleet = fleet
        self._urls = urls
        self.slots: list[Slot] = []
        self.deaths = 0
        """Workers that ended while they were wanted."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the first cause for which the run cannot go on."""
        self._ids = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._closed = False
        self._asking = DaemonThreads("rollstream-ray-state")

    @property
    def members(self) -> dict[int, Member]:
        """The workers that run, by id."""
        return {slot.member.id: slot.member for slot in self.slots if slot.member is not None}

    def expected(self) -> int:
        """Workers that there are, or that will soon be."""
        now = time.monotonic()
        return sum(slot.is_expected(now) for slot in self.slots)

    async def start(self, count: int) -> None:
        """Starts workers; returns when one of them is ready.

        Raises:
            RollstreamError: a worker says why it cannot start, or none comes.
        """
        ray = import_ray()
        logger.info("starting %d workers", count)
        self.add(count)
        if self._urls is not None:
            self.own(self._follow_urls(self._urls))
        joined = asyncio.ensure_future(self._joined.wait())
        try:
            started: set[asyncio.Future[Any]] = {joined, self.failed}
            done, _ = await asyncio.wait(
                started, timeout=_FIRST_WORKER_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            joined.cancel()
        if self.failed.done():
            self.failed.result()
        if not done:
            raise RollstreamError(
                f"no worker could be started within {_FIRST_WORKER_S:g} s: the cluster has "
                f"{ray.cluster_resources()}, and free are {ray.available_resources()}; each worker asks for "
                f"{redact(self._actor_options())} (ray_kwargs.worker)"
            )

    def add(self, count: int) -> None:
        """Starts further workers."""
        for _ in range(count):
            slot = Slot(len(self.slots), time.monotonic())
            self.slots.append(slot)
            self.own(self._keep(slot))

    def give(self, member: Member, items: Sequence[WorkItem]) -> None:
        """Sends work to a worker; one that does not take it is taken for dead: its reports say so."""
        self.own(self._sent(member, member.actor.give.remote(items)))

    def drop(self) -> None:
        """Has all workers cut off what is in flight."""
        for member in self.members.values():
            member.actor.drop.remote()

    async def close(self) -> None:
        """Ends the workers. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.gather(*(self._close_member(member) for member in self.members.values()))
        finally:
            self._asking.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.failed.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends the run with its first cause (R10)."""
        if not self.failed.done() and not self._closed:
            self.failed.set_exception(error)
            self.failed.exception()  # whoever runs gets it; nobody may be running

    def own(self, work: Any) -> None:
        """Runs something until it ends or the crew is closed; what it raises ends the run."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)

    def _disown(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _close_member(self, member: Member) -> None:
        with suppress(Exception):  # it may be dying: then there is nothing to release
            async with asyncio.timeout(_CLOSE_S):
                await member.actor.close.remote()

    async def _sent(self, member: Member, reference: Any) -> None:
        try:
            await reference
        except Exception as error:
            logger.debug("worker %d takes no work: %s", member.slot.number, one_line(error))
            with suppress(Exception):
                import_ray().kill(member.actor)

    def _actor_options(self) -> dict[str, Any]:
        return {
            "num_cpus": 1,
            "scheduling_strategy": "SPREAD",
            **self._options,
            "max_restarts": 0,  # a number's next worker is another worker: it owns none of the keys
            "max_task_retries": 0,
        }

    async def _keep(self, slot: Slot) -> None:
        """Sees to it that the slot has a worker, until it is given up."""
        ray = import_ray()
        actor_class = ray.remote(RayWorker)
        while True:
            try:
                prepared = actor_class.options(**self._actor_options())
            except (TypeError, ValueError) as error:
                refused = f"ray_kwargs.worker: Ray does not take {redact(self._options)}: {one_line(error)}"
                raise ConfigError(refused) from error
            actor = prepared.remote(self._recipe(), slot.number, WorkerPlace.here())
            try:
                pause = await self._live(slot, actor)
            finally:
                with suppress(Exception):  # Ray may be gone
                    ray.kill(actor)
            if pause is None:
                return
            slot.waiting_since = time.monotonic()
            await asyncio.sleep(pause)

    async def _live(self, slot: Slot, actor: Any) -> float | None:
        """The life of one worker; returns the pause until the next, None when there is none."""
        saying = asyncio.ensure_future(self._say_what_it_waits_for(slot, actor))
        try:
            pid = await actor.start.remote()
        except Exception as error:
            return self._not_started(slot, cause_of(error))
        finally:
            saying.cancel()
        self._ids += 1
        member = Member(self._ids, slot, actor, pid)
        slot.member, slot.has_come = member, True
        began = time.monotonic()
        self._join(member)
        try:
            await self._listen(member)
        except Exception as error:
            return self._gone(member, await _why_gone(actor, cause_of(error)), time.monotonic() - began)
        finally:
            slot.member = None
        raise AssertionError("a worker reports until it ends")

    async def _say_what_it_waits_for(self, slot: Slot, actor: Any) -> None:
        """Until cancelled: while nobody works yet now and then, and once when its places go to others."""
        began, warned = time.monotonic(), False
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            waited = time.monotonic() - began
            # A cluster that is gone may not answer for long.
            placed = (await self._asking.start(partial(is_placed, actor)).future).value
            is_long = waited > _WAITED_FOR_S - 1 and not warned
            if placed:
                if is_long or not self._joined.is_set():
                    logger.info("worker %d is still starting, after %.0f s", slot.number, waited)
            elif is_long:
                logger.warning(
                    "worker %d still waits for room in the cluster, after %.0f s: it asks for %s "
                    "(ray_kwargs.worker)",
                    *(slot.number, waited, redact(self._actor_options())),
                )
            elif not self._joined.is_set():
                logger.info(
                    "worker %d still waits for room in the cluster, after %.0f s", slot.number, waited
                )
            warned = warned or is_long

    def _not_started(self, slot: Slot, cause: BaseException) -> float | None:
        if not self._joined.is_set() and not is_death(cause):
            self.fail(cause)  # the first of all: so it is with the others
            return None
        now = time.monotonic()
        if not isinstance(cause, EngineUnavailableError):
            slot.outage_since = None
        elif slot.outage_since is None or now - slot.outage_since < self._engine_timeout:
            # As a worker that runs waits for it, and no fault of this one.
            slot.outage_since = slot.outage_since or now
            logger.warning("worker %d waits for an engine: %s", slot.number, one_line(cause))
            return _OUTAGE_PAUSE_S
        pause = slot.restarts.after_failed_start()
        if pause is None:
            slot.given_up = cause
            logger.error("worker %d is given up: %s", slot.number, one_line(cause))
            self._owner.given_up(slot)
            if all(other.given_up is not None for other in self.slots):
                self.fail(
                    RollstreamError(
                        f"no worker can be started any more; the last cause: {one_line(cause)}. What is "
                        "done is safe; mend the cause and run the same command again."
                    )
                )
            return None
        logger.warning("worker %d could not start: %s; again in %.1f s", slot.number, one_line(cause), pause)
        return pause

    def _join(self, member: Member) -> None:
        logger.info("worker %d is ready (pid %d)", member.slot.number, member.pid)
        member.slot.restarts.failures = 0
        member.slot.outage_since = None
        self._joined.set()
        if self._urls is not None:
            member.actor.follow.remote(list(self._urls()))
        self._owner.joined(member)

    async def _listen(self, member: Member) -> None:
        """Takes reports. Raises when the worker ends."""
        reports = member.actor.reports.options(num_returns="streaming").remote()
        while True:
            async with asyncio.timeout(self._silence_s):
                reference = await anext(reports)
                report: WorkerReport = await reference
            for level, name, message in report.logs:
                logging.getLogger(name).log(level, "worker %d: %s", member.slot.number, message)
            self._fleet.tell(member.id, report.status)
            self._owner.reported(member, report)

    def _gone(self, member: Member, cause: BaseException, served_s: float) -> float | None:
        """A worker has ended; returns the pause until the next, None when there is none."""
        self._fleet.forget(member.id)
        if self._closed:
            return None
        self.deaths += 1
        lost = self._owner.lost(member, cause)
        if isinstance(cause, EngineLostError):
            now = time.monotonic()
            others = [slot for slot in self.slots if slot is not member.slot and slot.member is not None]
            # At the beginning the first may have waited in vain before the second is there.
            coming = [slot for slot in self.slots if not slot.has_come and slot.is_expected(now)]
            if not (others or coming) or self._fleet.all_wait:
                self.fail(cause)
                return None
        elif not is_death(cause):
            self.fail(cause)
            return None
        pause = member.slot.restarts.after_serving(served_s)
        logger.warning(
            "worker %d (pid %d) is gone: %s; its %d rollouts in flight are owed again; the next in %.1f s",
            *(member.slot.number, member.pid, one_line(cause), lost, pause),
        )
        return pause

    async def _follow_urls(self, current: Callable[[], Sequence[str]]) -> None:
        """Tells workers which servers there are, whenever that changes."""
        told: list[str] = []
        for look in itertools.count():
            urls = list(current())
            if urls != told or look % _URLS_TOLD_EVERY == 0:
                for member in self.members.values():
                    member.actor.follow.remote(urls)
                told = urls
            await asyncio.sleep(_URLS_EVERY_S)


async def _why_gone(actor: Any, cause: BaseException) -> BaseException:
    """What ended a worker, where Ray knows at first only that it does not answer.

    Its death tells whether its rollouts are suspects, see `is_of_the_node`.
    """
    unavailable = import_ray().exceptions.ActorUnavailableError
    with suppress(TimeoutError):
        async with asyncio.timeout(_WHY_S):
            while isinstance(cause, unavailable):
                await asyncio.sleep(0.5)
                try:
                    await actor.__ray_ready__.remote()
                except Exception as again:
                    if is_death(again):
                        cause = again
                else:
                    break  # the way to it was lost for a moment: it is replaced, for its reports are lost
    return cause
