"""The Ray executor: workers as actors on a cluster, dispatched late, durable here.

    this process: keys --Dispatch--> give --> [ worker 0 ] --\\
                        ^                  --> [ worker 1 ] ---> reports --> StoreWriter --> settled
                        +---------------------------------------------------------------------+

The driver owns the keys, the store and its lock; the workers own attempts, retries and the gate before their
engine (`worker`); `Crew` keeps the workers running. A worker that ends, with its node or alone, costs what
was in flight there: that is owed again and charged to no rollout, and another worker takes its number. Which
key is whose is decided by `Dispatch` alone. Workers that the cluster has no room for wait until it has: nodes
may be added at any time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rollstream.chat.images import as_bytes, is_file
from rollstream.engine.ray_package import import_ray, is_of_the_node, one_line
from rollstream.errors import DataError, EngineLostError, RollstreamError
from rollstream.rollout.adaptation import Adaptation
from rollstream.rollout.dispatch import Dispatch
from rollstream.rollout.fleet import Fleet
from rollstream.rollout.local import WindowCounters
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.rollout.ray_crew import Crew, Member, Slot
from rollstream.rollout.ray_worker import WorkerRecipe, WorkerReport, WorkItem
from rollstream.rollout.worker import make_failure
from rollstream.store.records import EncodedRollout, EncodingError
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, PromptRow, RolloutKey

logger = logging.getLogger(__name__)

_WORKERS_MAX = 8
"""verl's default. One worker does hundreds of rollouts a second, so more are rarely of use."""


class WorkerDiedError(RollstreamError):
    """The worker process ended under a rollout that was alone in it, time after time."""


class RayExecutor:
    """Runs owed rollouts on Ray workers until there are no more or it is told to stop.

    Args:
        recipe: what workers are made from; or what gives that for each worker anew, where it changes.
        writer: makes rollouts durable.
        load_row: the prompt row of an index; may raise `DataError`.
        max_in_flight: rollouts at once, over all workers.
        workers: how many; None: one for each CPU of the cluster, eight at most.
        cluster: where; it is joined by `start` and left by `close`.
        options: of the actors, laid over `num_cpus=1` and spreading over nodes.
        attempt_timeout: seconds for one attempt.
        max_attempts: workers that a rollout may bring down, alone in them, before it is recorded as failed.
        engine_timeout: seconds that workers which start may find no engine, once there was one.
        adaptive: keeps fewer in flight while the engines are overloaded.
        engine: asked how busy it is, where workers share one; None: they have their own.
        urls: of the servers that workers use, where these may change.
        on_durable: called for each rollout or failure once it is durable (R2).
    """

    def __init__(
        self,
        recipe: WorkerRecipe | Callable[[], WorkerRecipe],
        writer: StoreWriter,
        *,
        load_row: Callable[[int], PromptRow],
        max_in_flight: int,
        workers: int | None,
        cluster: RayCluster,
        options: Mapping[str, Any] | None = None,
        attempt_timeout: float,
        max_attempts: int = 3,
        engine_timeout: float = 600.0,
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
        self._attempt_timeout = attempt_timeout
        self._engine_timeout = engine_timeout
        self._max_charges = max_attempts
        self._urls = urls
        self._on_durable = on_durable
        self.fleet = Fleet(shared_engine=engine)
        """What the workers say."""
        self.counters = WindowCounters()
        self._adaptation = Adaptation(max_in_flight, self.fleet, self.fleet, self.fleet) if adaptive else None
        self._crew: Crew | None = None
        self._commits: set[asyncio.Future[None]] = set()
        self._dispatch: Dispatch | None = None
        self._pumping = False
        self._stopping = False
        self._dropped = False
        self._joined_cluster = False
        self._ended = asyncio.Event()
        """Of the keys: nothing is in flight and nothing more will be, or all was dropped."""

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
        return {} if self._crew is None else {one.slot.number: one.pid for one in self._crew.members.values()}

    @property
    def deaths(self) -> int:
        """Workers that ended while they were wanted."""
        return 0 if self._crew is None else self._crew.deaths

    async def start(self) -> None:
        """Joins the cluster and starts the workers; returns when one of them is ready.

        Raises:
            ConfigError: no Ray, or a worker cannot be made as configured.
            RollstreamError: a worker says why it cannot start, or none comes.
        """
        self._joined_cluster = True
        await self._cluster.start()
        recipe = self._recipe
        self._crew = Crew(
            recipe if callable(recipe) else lambda: recipe,
            self,
            options=self._options,
            attempt_timeout=self._attempt_timeout,
            engine_timeout=self._engine_timeout,
            fleet=self.fleet,
            urls=self._urls,
        )
        await self._crew.start(self._workers or default_workers())

    def add_workers(self, count: int) -> None:
        """Starts further workers, also while rollouts run."""
        self._running.add(count)

    async def run(self, keys: Iterator[RolloutKey]) -> None:
        """Works off `keys`; returns when all are durable, or after a stop when nothing is in flight.

        Raises:
            StorageError: the writer is broken.
            EngineLostError: the engine stayed away too long.
            RollstreamError: no worker can be started any more.
        """
        failed = self._running.failed
        dispatch = Dispatch(keys, cap=self._cap, max_charges=self._max_charges)
        for member in self._running.members:
            dispatch.add(member)
        self._dispatch = dispatch
        self._ended.clear()
        if self._stopping:
            dispatch.stop()
        ended = asyncio.ensure_future(self._ended.wait())
        adapting = None if self._adaptation is None else asyncio.ensure_future(self._adaptation.run(self))
        self._pump()
        try:
            waiting: set[asyncio.Future[Any]] = {ended, failed}
            if adapting is not None:
                waiting.add(adapting)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
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
            if self._crew is not None:
                self._crew.drop()
        self._ended.set()

    async def close(self) -> None:
        """Ends the workers, and leaves the cluster. May be called twice."""
        if self._crew is not None:
            await self._crew.close()
        if self._joined_cluster:
            self._joined_cluster = False
            await self._cluster.close()

    @property
    def _running(self) -> Crew:
        assert self._crew is not None, "start() first"
        return self._crew

    # -- what the crew tells, see `CrewOwner`

    def joined(self, member: Member) -> None:
        if self._dispatch is not None:
            self._dispatch.add(member.id)
            self._pump_soon()

    def reported(self, member: Member, report: WorkerReport) -> None:
        dispatch = self._dispatch
        if dispatch is None:
            return  # dropped: what it delivers is owed again
        for result in report.results:
            if dispatch.arrive(member.id, result.key):
                self._commit(dispatch, result)
        self._pump_soon()  # who is waited for changes with time

    def lost(self, member: Member, cause: BaseException) -> int:
        dispatch = self._dispatch
        if dispatch is None:
            return 0
        lost = len(dispatch.held_by(member.id))
        innocent = isinstance(cause, EngineLostError) or is_of_the_node(cause)
        for key, charges in dispatch.lose(member.id, suspect=not innocent):
            self._commit(dispatch, self._blame(key, charges, cause))
        self._pump_soon()
        return lost

    def given_up(self, slot: Slot) -> None:
        self._pump_soon()

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
        dispatch.expected = self._running.expected()
        members = self._running.members
        try:
            for worker, keys in dispatch.assign().items():
                self._give(dispatch, members[worker], keys)
        except Exception as error:
            self._running.fail(error)
            return
        self.counters.in_flight = dispatch.in_flight
        if dispatch.is_finished:
            self._ended.set()

    def _give(self, dispatch: Dispatch, member: Member, keys: Sequence[RolloutKey]) -> None:
        items, shown = [], []
        for key in keys:
            prompt_key = ""
            try:
                row = self._load_row(key.index)
                prompt_key = row.prompt_key
                if any(map(is_file, row.images)):
                    shown.append((key, row))
                else:
                    items.append(WorkItem.of(row, key.repeat))
            except Exception as error:
                if not prompt_key and not isinstance(error, DataError):
                    raise
                # A row that cannot be read, or that a user's dataset class filled with what cannot travel.
                dispatch.arrive(member.id, key)
                self._commit(dispatch, make_failure(key.index, key.repeat, prompt_key, 1, "prompt", error))
        if items:
            self._running.give(member, items)
        if shown:
            self._running.own(self._give_with_images(dispatch, member, shown))

    async def _give_with_images(
        self, dispatch: Dispatch, member: Member, rows: Sequence[tuple[RolloutKey, PromptRow]]
    ) -> None:
        """Gives rows whose images are files, which travel as bytes: a node need not have the files.

        One that has not would fail them all at once, and so be given nearly all there are. What the row's
        messages say of the images stays as it is.
        """
        for key, row in rows:
            item: WorkItem | Exception
            try:
                item = await asyncio.to_thread(_item_with_images, row, key.repeat)
            except Exception as error:  # as in `_give`
                item = error
            # Meanwhile the worker may have died, which gave the key to another, or all may be over.
            if self._dispatch is not dispatch or self._dropped:
                return
            if key not in dispatch.held_by(member.id):
                continue
            if isinstance(item, WorkItem):
                self._running.give(member, [item])
            elif dispatch.arrive(member.id, key):
                self._commit(dispatch, make_failure(key.index, key.repeat, row.prompt_key, 1, "prompt", item))

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
            self._running.fail(error)
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
                self._running.fail(own)
        self._pump_soon()

    def _blame(self, key: RolloutKey, charges: int, cause: BaseException) -> Failure:
        died = WorkerDiedError(
            f"its worker died {charges} times while nothing else was in flight there; the last time: "
            f"{one_line(cause)}"
        )
        prompt_key = ""
        with suppress(DataError):
            prompt_key = self._load_row(key.index).prompt_key
        return make_failure(key.index, key.repeat, prompt_key, charges, "agent", died)


def _item_with_images(row: PromptRow, repeat: int) -> WorkItem:
    return WorkItem.of(replace(row, images=[as_bytes(image) for image in row.images]), repeat)


def default_workers(claimed: float = 0.0) -> int:
    """One for each CPU of the cluster that was joined and not `claimed`, `_WORKERS_MAX` at most."""
    return min(_WORKERS_MAX, max(1, int(import_ray().cluster_resources().get("CPU", 1) - claimed)))


def here() -> Any:
    """How actors are scheduled that must run on this machine."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
