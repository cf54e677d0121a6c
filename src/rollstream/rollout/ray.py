"""The Ray executor: workers as actors on a cluster, dispatched late, durable here.

    this process: keys --Dispatch--> give --> [ worker 0 ] --\\
                        ^                  --> [ worker 1 ] ---> reports --> StoreWriter --> settled
                        +---------------------------------------------------------------------+

The driver owns the keys, the store and its lock; the workers own attempts, retries and the gate before their
engine (`worker`). A worker that ends, with its node or alone, costs what was in flight there: that is owed
again and charged to no rollout, and another worker takes its number. Which key is whose is decided by
`Dispatch` alone. Workers that the cluster has no room for wait until it has: nodes may be added at any time.
"""

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollstream.engine.restarts import Restarts
from rollstream.errors import DataError, EngineLostError, RollstreamError
from rollstream.rollout.adaptation import Adaptation
from rollstream.rollout.dispatch import Dispatch
from rollstream.rollout.fleet import Fleet
from rollstream.rollout.local import WindowCounters
from rollstream.rollout.ray_cluster import RayCluster, import_ray
from rollstream.rollout.ray_worker import RayWorker, WorkerPlace, WorkerRecipe, WorkerReport, WorkItem
from rollstream.rollout.worker import make_failure
from rollstream.store.records import EncodedRollout, EncodingError
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, PromptRow, RolloutKey

logger = logging.getLogger(__name__)

_FIRST_WORKER_S = 1200.0
"""For the first worker: a cluster that scales itself starts machines, an embedded engine loads a model."""

_WAITED_FOR_S = 30.0
"""A worker that takes longer to come has no places kept free for it: the cluster may have no room."""

_SILENCE_S = 60.0
"""Beyond the time limit of an attempt: a worker that reports nothing for so long hangs for good, since
whatever holds up its event loop holds up the limit as well."""

_CLOSE_S = 10.0
"""For a worker to release its engine and tools before it is killed."""

_URLS_EVERY_S = 1.0
"""Between looks at which servers there are; launched ones come back on other ports."""

_URLS_TOLD_EVERY = 10
"""Looks after which workers are told what has not changed: one may have found a new server still deaf."""

_WORKERS_MAX = 8
"""verl's default. One worker does hundreds of rollouts a second, so more are rarely of use."""

_FIRST_RESTART_S = 0.5
_RESTART_S_MAX = 30.0
_MOST_FAILED_STARTS = 5
"""As for launched servers: a worker that cannot start so often in a row is given up."""


class WorkerDiedError(RollstreamError):
    """The worker process ended under a rollout that was alone in it, time after time."""


@dataclass(eq=False, slots=True)
class _Slot:
    """A number that a worker has, and others after it."""

    number: int
    waiting_since: float
    """Since when no worker has it."""
    restarts: Restarts = field(
        default_factory=lambda: Restarts(
            first=_FIRST_RESTART_S, longest=_RESTART_S_MAX, most_failures=_MOST_FAILED_STARTS
        )
    )
    member: "_Member | None" = None
    given_up: BaseException | None = None

    def is_expected(self, now: float) -> bool:
        """Whether its share of places is kept free."""
        return self.given_up is None and (self.member is not None or now - self.waiting_since < _WAITED_FOR_S)


@dataclass(eq=False, slots=True)
class _Member:
    """A worker that runs."""

    id: int
    """Never used again."""
    slot: _Slot
    actor: Any
    pid: int = 0


class RayExecutor:
    """Runs owed rollouts on Ray workers until there are no more or it is told to stop.

    Args:
        recipe: what workers are made from.
        writer: makes rollouts durable.
        load_row: the prompt row of an index; may raise `DataError`.
        max_in_flight: rollouts at once, over all workers.
        workers: how many; None: one for each CPU of the cluster, eight at most.
        cluster: where; it is joined by `start` and left by `close`.
        options: of the actors, laid over `num_cpus=1` and spreading over nodes.
        attempt_timeout: seconds for one attempt.
        max_attempts: workers that a rollout may bring down, alone in them, before it is recorded as failed.
        adaptive: keeps fewer in flight while the engines are overloaded.
        engine: asked how busy it is, where workers share one; None: they have their own.
        urls: of the servers that workers use, where these may change.
        on_durable: called for each rollout or failure once it is durable (R2).
    """

    def __init__(
        self,
        recipe: WorkerRecipe,
        writer: StoreWriter,
        *,
        load_row: Callable[[int], PromptRow],
        max_in_flight: int,
        workers: int | None,
        cluster: RayCluster,
        options: Mapping[str, Any] | None = None,
        attempt_timeout: float,
        max_attempts: int = 3,
        adaptive: bool = False,
        engine: object = None,
        urls: Callable[[], Sequence[str]] | None = None,
        on_durable: Callable[[EncodedRollout | Failure], None] | None = None,
    ) -> None:
        self._recipe = recipe
        self._writer = writer
        self._load_row = load_row
        self._cap = max_in_flight
        self._workers = workers
        self._cluster = cluster
        self._options = dict(options or {})
        self._silence_s = attempt_timeout + _SILENCE_S
        self._max_charges = max_attempts
        self._urls = urls
        self._on_durable = on_durable
        self.fleet = Fleet(shared_engine=engine)
        """What the workers say."""
        self.counters = WindowCounters()
        self.deaths = 0
        """Workers that ended while they were wanted."""
        self._adaptation = Adaptation(max_in_flight, self.fleet, self.fleet, self.fleet) if adaptive else None
        self._slots: list[_Slot] = []
        self._ids = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._commits: set[asyncio.Future[None]] = set()
        self._dispatch: Dispatch | None = None
        self._pumping = False
        self._stopping = False
        self._dropped = False
        self._closed = False
        self._ended = asyncio.Event()
        """Of the keys: nothing is in flight and nothing more will be, or all was dropped."""
        self._joined = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None

    @property
    def cap(self) -> int:
        """Rollouts in flight at most, now."""
        return self._cap

    @cap.setter
    def cap(self, cap: int) -> None:
        self._cap = cap
        if self._dispatch is not None:
            self._dispatch.cap = cap
            self._pump_soon()

    @property
    def in_flight(self) -> int:
        """Rollouts dispatched and not durable yet."""
        return self._dispatch.in_flight if self._dispatch is not None else 0

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that run, by number."""
        return {slot.number: slot.member.pid for slot in self._slots if slot.member is not None}

    async def start(self) -> None:
        """Joins the cluster and starts the workers; returns when one of them is ready.

        Raises:
            ConfigError: no Ray, or a worker cannot be made as configured.
            RollstreamError: a worker says why it cannot start, or none comes.
        """
        self._failed = asyncio.get_running_loop().create_future()
        await self._cluster.start()
        ray = import_ray()
        self.add_workers(self._workers or default_workers())
        if self._urls is not None:
            self._own(self._follow_urls(self._urls))
        joined = asyncio.ensure_future(self._joined.wait())
        try:
            started: set[asyncio.Future[Any]] = {joined, self._failed}
            done, _ = await asyncio.wait(
                started, timeout=_FIRST_WORKER_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            joined.cancel()
        if self._failed.done():
            self._failed.result()
        if not done:
            raise RollstreamError(
                f"no worker could be started within {_FIRST_WORKER_S:g} s: the cluster has "
                f"{ray.cluster_resources()}, and free are {ray.available_resources()}; each worker asks for "
                f"{self._actor_options()} (ray_kwargs.worker)"
            )

    def add_workers(self, count: int) -> None:
        """Starts further workers, also while rollouts run."""
        for _ in range(count):
            slot = _Slot(len(self._slots), time.monotonic())
            self._slots.append(slot)
            self._own(self._keep(slot))

    async def run(self, keys: Iterator[RolloutKey]) -> None:
        """Works off `keys`; returns when all are durable, or after a stop when nothing is in flight.

        Raises:
            StorageError: the writer is broken.
            EngineLostError: the engine stayed away too long.
            RollstreamError: no worker can be started any more.
        """
        assert self._failed is not None, "start() first"
        dispatch = Dispatch(keys, cap=self._cap, max_charges=self._max_charges)
        for slot in self._slots:
            if slot.member is not None:
                dispatch.add(slot.member.id)
        self._dispatch = dispatch
        self._ended.clear()
        if self._stopping:
            dispatch.stop()
        ended = asyncio.ensure_future(self._ended.wait())
        adapting = None if self._adaptation is None else asyncio.ensure_future(self._adaptation.run(self))
        self._pump()
        try:
            waiting: set[asyncio.Future[Any]] = {ended, self._failed}
            if adapting is not None:
                waiting.add(adapting)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if adapting is not None and adapting.done():
                adapting.result()
        finally:
            ended.cancel()
            if adapting is not None:
                adapting.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({adapting})
            # What is in the writer's hands becomes durable, and is counted.
            while self._commits:
                await asyncio.wait(set(self._commits))
                await asyncio.sleep(0)
            self._dispatch = None
            self.counters.dropped += dispatch.at_workers
            self.counters.in_flight = 0

    def stop(self) -> None:
        """Gives out nothing more; what is in flight goes on. Idempotent."""
        self._stopping = True
        if self._dispatch is not None:
            self._dispatch.stop()
            self._pump_soon()

    def drop(self) -> None:
        """Cuts off what is in flight. Idempotent."""
        self.stop()
        if not self._dropped:
            self._dropped = True
            for slot in self._slots:
                if slot.member is not None:
                    slot.member.actor.drop.remote()
        self._ended.set()

    async def close(self) -> None:
        """Ends the workers, and leaves the cluster. May be called twice."""
        if not self._closed:
            self._closed = True
            members = [slot.member for slot in self._slots if slot.member is not None]
            try:
                await asyncio.gather(*(self._close_member(member) for member in members))
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                if self._failed is not None:
                    self._failed.cancel()
        await self._cluster.close()

    async def _close_member(self, member: _Member) -> None:
        with suppress(Exception):  # it may be dying: then there is nothing to release
            async with asyncio.timeout(_CLOSE_S):
                await member.actor.close.remote()

    def _own(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)

    def _disown(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Ends the run with its first cause (R10)."""
        if self._failed is not None and not self._failed.done() and not self._closed:
            self._failed.set_exception(error)
            self._failed.exception()  # whoever runs gets it; nobody may be running

    # -- workers

    def _actor_options(self) -> dict[str, Any]:
        return {
            "num_cpus": 1,
            "scheduling_strategy": "SPREAD",
            **self._options,
            "max_restarts": 0,  # a number's next worker is another worker: it owns none of the keys
            "max_task_retries": 0,
        }

    async def _keep(self, slot: _Slot) -> None:
        """Sees to it that the slot has a worker, until it is given up."""
        ray = import_ray()
        actor_class = ray.remote(RayWorker)
        while True:
            actor = actor_class.options(**self._actor_options()).remote(
                self._recipe, slot.number, WorkerPlace.here()
            )
            try:
                pause = await self._live(slot, actor)
            finally:
                with suppress(Exception):  # Ray may be gone
                    ray.kill(actor)
            if pause is None:
                return
            slot.waiting_since = time.monotonic()
            await asyncio.sleep(pause)

    async def _live(self, slot: _Slot, actor: Any) -> float | None:
        """The life of one worker; returns the pause until the next, None when there is none."""
        said = asyncio.get_running_loop().call_later(
            _WAITED_FOR_S,
            logger.warning,
            "worker %d has not started within %g s: has the cluster room for it? (ray_kwargs.worker)",
            *(slot.number, _WAITED_FOR_S),
        )
        try:
            pid = await actor.start.remote()
        except Exception as error:
            return self._not_started(slot, _cause(error))
        finally:
            said.cancel()
        self._ids += 1
        member = _Member(self._ids, slot, actor, pid)
        slot.member = member
        began = time.monotonic()
        self._join(member)
        try:
            await self._listen(member)
        except Exception as error:
            return self._gone(member, _cause(error), time.monotonic() - began)
        finally:
            slot.member = None
        raise AssertionError("a worker reports until it ends")

    def _not_started(self, slot: _Slot, cause: BaseException) -> float | None:
        if not self._joined.is_set() and not _is_death(cause):
            self._fail(cause)  # the first of all: so it is with the others
            return None
        pause = slot.restarts.after_failed_start()
        if pause is None:
            slot.given_up = cause
            logger.error("worker %d is given up: %s", slot.number, _one_line(cause))
            self._pump_soon()
            if all(other.given_up is not None for other in self._slots):
                self._fail(
                    RollstreamError(
                        f"no worker can be started any more; the last cause: {_one_line(cause)}. What is "
                        "done is safe; mend the cause and run the same command again."
                    )
                )
            return None
        logger.warning("worker %d could not start: %s; again in %.1f s", slot.number, _one_line(cause), pause)
        return pause

    def _join(self, member: _Member) -> None:
        logger.info("worker %d is ready (pid %d)", member.slot.number, member.pid)
        member.slot.restarts.failures = 0
        self._joined.set()
        if self._urls is not None:
            member.actor.follow.remote(list(self._urls()))
        if self._dispatch is not None:
            self._dispatch.add(member.id)
            self._pump_soon()

    async def _listen(self, member: _Member) -> None:
        """Takes reports. Raises when the worker ends."""
        reports = member.actor.reports.options(num_returns="streaming").remote()
        while True:
            async with asyncio.timeout(self._silence_s):
                reference = await anext(reports)
                report: WorkerReport = await reference
            self._take(member, report)

    def _take(self, member: _Member, report: WorkerReport) -> None:
        for level, name, message in report.logs:
            logging.getLogger(name).log(level, "worker %d: %s", member.slot.number, message)
        self.fleet.tell(member.id, report.status)
        dispatch = self._dispatch
        if dispatch is None:
            return  # dropped: what it delivers is owed again
        for result in report.results:
            if dispatch.arrive(member.id, result.key):
                self._commit(dispatch, result)
        self._pump_soon()  # who is waited for changes with time

    def _gone(self, member: _Member, cause: BaseException, served_s: float) -> float | None:
        """A worker has ended: its keys are owed again."""
        self.fleet.forget(member.id)
        if self._closed:
            return None
        self.deaths += 1
        lost = 0
        if (dispatch := self._dispatch) is not None:
            lost = len(dispatch.held_by(member.id))
            for key, charges in dispatch.lose(member.id):
                self._commit(dispatch, self._blame(key, charges, cause))
            self._pump_soon()
        if isinstance(cause, EngineLostError):
            others = [slot for slot in self._slots if slot.member not in (None, member)]
            if not others or self.fleet.all_wait:
                self._fail(cause)
                return None
        elif not _is_death(cause):
            self._fail(cause)
            return None
        pause = member.slot.restarts.after_serving(served_s)
        logger.warning(
            "worker %d (pid %d) is gone: %s; its %d rollouts in flight are owed again; the next in %.1f s",
            *(member.slot.number, member.pid, _one_line(cause), lost, pause),
        )
        return pause

    async def _follow_urls(self, current: Callable[[], Sequence[str]]) -> None:
        """Tells workers which servers there are, whenever that changes."""
        told: list[str] = []
        for look in itertools.count():
            urls = list(current())
            if urls != told or look % _URLS_TOLD_EVERY == 0:
                for slot in self._slots:
                    if slot.member is not None:
                        slot.member.actor.follow.remote(urls)
                told = urls
            await asyncio.sleep(_URLS_EVERY_S)

    # -- rollouts

    def _pump_soon(self) -> None:
        """Gives out work once for all that happens in this round of the event loop."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        dispatch = self._dispatch
        if dispatch is None or self._dropped:
            return
        now = time.monotonic()
        dispatch.expected = sum(slot.is_expected(now) for slot in self._slots)
        members = {slot.member.id: slot.member for slot in self._slots if slot.member is not None}
        try:
            for worker, keys in dispatch.assign().items():
                self._give(dispatch, members[worker], keys)
        except Exception as error:
            self._fail(error)
            return
        self.counters.in_flight = dispatch.in_flight
        if dispatch.is_finished:
            self._ended.set()

    def _give(self, dispatch: Dispatch, member: _Member, keys: Sequence[RolloutKey]) -> None:
        items = []
        for key in keys:
            prompt_key = ""
            try:
                row = self._load_row(key.index)
                prompt_key = row.prompt_key
                items.append(WorkItem.of(row, key.repeat))
            except Exception as error:
                if not prompt_key and not isinstance(error, DataError):
                    raise
                # A row that cannot be read, or that a user's dataset class filled with what cannot travel.
                dispatch.arrive(member.id, key)
                self._commit(dispatch, make_failure(key.index, key.repeat, prompt_key, 1, "prompt", error))
        if items:
            self._own(self._sent(member, member.actor.give.remote(items)))

    async def _sent(self, member: _Member, reference: Any) -> None:
        """What was sent arrives, or the worker is taken for dead: its reports say so."""
        try:
            await reference
        except Exception as error:
            logger.debug("worker %d takes no work: %s", member.slot.number, _one_line(error))
            with suppress(Exception):
                import_ray().kill(member.actor)

    def _commit(self, dispatch: Dispatch, result: EncodedRollout | Failure) -> None:
        future = self._writer.submit(result)
        self._commits.add(future)
        future.add_done_callback(partial(self._committed, dispatch, result))

    def _committed(
        self, dispatch: Dispatch, result: EncodedRollout | Failure, future: "asyncio.Future[None]"
    ) -> None:
        self._commits.discard(future)
        error = future.exception()
        if isinstance(error, EncodingError) and not (isinstance(result, Failure) and result.stage == "store"):
            self._commit(dispatch, make_failure(result.index, result.repeat, "", 1, "store", error))
            return
        if error is not None:
            self._fail(error)
            return
        dispatch.settle(result.key)
        if isinstance(result, Failure):
            self.counters.failed += 1
        else:
            self.counters.completed += 1
        if self._on_durable is not None:
            try:
                self._on_durable(result)
            except Exception as own:
                self._fail(own)
        self._pump_soon()

    def _blame(self, key: RolloutKey, charges: int, cause: BaseException) -> Failure:
        died = WorkerDiedError(
            f"its worker died {charges} times while nothing else was in flight there; the last time: "
            f"{_one_line(cause)}"
        )
        prompt_key = ""
        with suppress(DataError):
            prompt_key = self._load_row(key.index).prompt_key
        return make_failure(key.index, key.repeat, prompt_key, charges, "agent", died)


def default_workers() -> int:
    """One for each CPU of the cluster that was joined, `_WORKERS_MAX` at most."""
    return min(_WORKERS_MAX, max(1, int(import_ray().cluster_resources().get("CPU", 1))))


def here() -> Any:
    """How actors are scheduled that must run on this machine."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _cause(error: BaseException) -> BaseException:
    """The error as it was raised in the worker."""
    ray = import_ray()
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        cause: BaseException = error.cause
        cause.__cause__ = None
        cause.add_note(str(error)[-4000:])  # where in the worker
        return cause
    return error


def _is_death(error: BaseException) -> bool:
    """Whether the worker ended, or its node, or what it said got lost on the way; not what it said itself."""
    ray = import_ray()
    task_error = isinstance(error, ray.exceptions.RayTaskError)
    return isinstance(error, ray.exceptions.RayError | TimeoutError | StopAsyncIteration) and not task_error


_WHY_IT_DIED = re.compile(r"The actor (?:is dead|died) because[^.\n]*")
"""Of what Ray says of a dead actor, which fills a screen."""


def _one_line(error: BaseException) -> str:
    if why := _WHY_IT_DIED.search(str(error)):
        return f"{type(error).__name__}: {why[0]}"
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
