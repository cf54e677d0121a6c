"""What executes a run's rollouts: one event loop in this process, or workers on a Ray cluster."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollstream.engine.base import HasReplicas
from rollstream.generation.executors import executor_elsewhere
from rollstream.generation.ray_cluster import join_cluster
from rollstream.generation.replicas import launches_on_ray
from rollstream.generation.setup import Prepared
from rollstream.generation.stopping import StopSignals
from rollstream.rollout.adaptation import Adaptation
from rollstream.rollout.local import LocalExecutor, WindowCounters
from rollstream.store.records import EncodedRollout
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, Rollout, RolloutKey


class Executor(Protocol):
    """Runs owed rollouts; see `LocalExecutor` and `RayExecutor`."""

    counters: WindowCounters

    @property
    def cap(self) -> int:
        """Rollouts in flight at most, now."""
        ...

    async def run(self, keys: Iterator[RolloutKey]) -> None:
        """Works off `keys`; returns when all are durable, or after a stop when nothing is in flight."""
        ...

    def stop(self) -> None:
        """Takes no further keys; what is in flight goes on."""
        ...

    def drop(self) -> None:
        """Cuts off what is in flight."""
        ...


@dataclass(frozen=True, slots=True)
class Execution:
    """An executor that is ready, and what is shown of it."""

    executor: Executor
    waits: Callable[[], bool]
    """Whether work waits for an engine that is away."""
    retries: Callable[[], int]
    """Attempts that failed and were followed by another."""
    unscored: Callable[[], int]
    """Rollouts that completed but could not be scored."""
    engine: object = None
    """Asked how busy it is, see `ask_load`."""
    replicas: Callable[[], tuple[int, int] | None] = lambda: None
    """How many replicas of the engine take requests, and how many it has; None when it does not say."""


OnDurable = Callable[[Rollout | EncodedRollout | Failure], None]


async def start_execution(
    prepared: Prepared,
    writer: StoreWriter,
    *,
    log_dir: Path,
    stop: StopSignals,
    stack: AsyncExitStack,
    on_durable: OnDurable,
) -> Execution:
    """Starts the engine, and the workers where they are not here.

    Args:
        prepared: the run.
        writer: makes rollouts durable.
        log_dir: for the logs of engines.
        stop: ends the start early.
        stack: gets what releases everything, also after an error here.
        on_durable: called for each rollout or failure once it is durable.

    Raises:
        RollstreamError: it cannot be.
    """
    if (elsewhere := executor_elsewhere(prepared.settings)) is not None:
        return await elsewhere.start(
            prepared, writer, log_dir=log_dir, stop=stop, stack=stack, on_durable=on_durable
        )
    stack.push_async_callback(prepared.close)
    if prepared.settings.generation.executor == "ray":
        from rollstream.generation.ray_execution import start_ray

        return await start_ray(
            prepared, writer, log_dir=log_dir, stop=stop, stack=stack, on_durable=on_durable
        )
    settings = prepared.settings.generation
    if launches_on_ray(prepared.settings):
        await join_cluster(prepared.settings, stop=stop, stack=stack)
    engine = prepared.create_engine(log_dir)
    stack.push_async_callback(engine.close)
    await stop.unless_stopped(asyncio.gather(engine.start(), prepared.prepare_reward()))
    prepared.check_engine(engine)
    prepared.check_rows()
    worker, metered, gate = prepared.make_worker(engine, prepared.loop_names)
    adaptation = None
    if settings.adaptive_in_flight:
        adaptation = Adaptation(settings.max_in_flight, metered, gate, worker.counters)
    executor = LocalExecutor(
        worker,
        writer,
        load_row=prepared.dataset.row,
        max_in_flight=settings.max_in_flight,
        on_durable=on_durable,
        adaptation=adaptation,
    )
    return Execution(
        executor,
        waits=lambda: not gate.is_open,
        retries=lambda: worker.counters.retries,
        unscored=lambda: worker.counters.reward_errors,
        engine=engine,
        replicas=engine.replica_counts if isinstance(engine, HasReplicas) else lambda: None,
    )
