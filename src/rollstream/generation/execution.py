"""What executes a run's rollouts: one event loop in this process, or workers: processes here, actors on Ray."""

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.config.settings import Settings
from rollstream.daemon_threads import in_daemon_thread
from rollstream.engine.base import Engine, HasReplicas
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.pool import PoolEngine
from rollstream.engine.ray_package import import_ray
from rollstream.engine.ray_plan import replica_resources
from rollstream.engine.registry import engine_kind, replica_maker
from rollstream.engine.replica import Replica
from rollstream.errors import ConfigError, EngineError
from rollstream.generation.setup import (
    EMBEDDED_ENGINES,
    Prepared,
    executor_elsewhere,
    launches_on_ray,
    runs_in_workers,
)
from rollstream.rollout.concurrency import ConcurrencyController
from rollstream.rollout.local import LocalExecutor
from rollstream.rollout.processes import ProcessBackend
from rollstream.rollout.ray import RayBackend, default_workers, here
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, load_agents
from rollstream.rollout.supervisor import WorkerBackend
from rollstream.rollout.worker_host import BuiltWorker, WorkerRecipe
from rollstream.rollout.workers import WorkersExecutor
from rollstream.stop_signals import StopSignals
from rollstream.store.records import EncodedRollout
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, LogprobKind, Rollout

logger = logging.getLogger(__name__)

_LAUNCHING = (
    "launch",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "dtype",
    "load_format",
)
"""Settings of `actor_rollout_ref.rollout` for whoever launches servers."""

_PER_MINUTE = ("requests_per_minute", "tokens_per_minute")
"""Limits of an endpoint, which all workers share."""


Executor = LocalExecutor | WorkersExecutor
"""Runs owed rollouts: in this process, or in workers."""


@dataclass(frozen=True, slots=True)
class Execution:
    """An executor that is ready, and what is shown of it."""

    executor: Executor
    waits: Callable[[], bool]
    """Whether work waits for an engine that is away."""
    retries: Callable[[], int]
    """Attempts that failed and were followed by another."""
    reward_failed: Callable[[], int]
    """Rollouts that completed but could not be scored."""
    logprobs: LogprobKind | Literal["none"] | None = None
    """The distribution that the engine's log-probs are of."""
    engine: object = None
    """Asked how busy it is, see `ask_load`."""
    replicas: Callable[[], tuple[int, int] | None] = lambda: None
    """How many replicas of the engine take requests, and how many it has; None when it does not say."""


OnDurable = Callable[[Rollout | EncodedRollout | Failure], None]


@dataclass(frozen=True, slots=True)
class Start:
    """What an execution is started with."""

    prepared: Prepared
    writer: StoreWriter
    log_dir: Path
    """For the logs of engines."""
    stop: StopSignals
    """Ends the start early."""
    stack: AsyncExitStack
    """Gets what releases everything, also after an error."""
    on_durable: OnDurable
    """Called for each rollout or failure once it is durable."""

    @property
    def settings(self) -> Settings:
        """Of the run."""
        return self.prepared.settings

    async def start_engine(self, engine: Engine) -> None:
        """Starts it beside the reward, and checks that it can do what is asked for; `stack` closes it."""
        self.stack.push_async_callback(engine.close)
        await self.stop.unless_stopped(asyncio.gather(engine.start(), self.prepared.prepare_reward()))
        self.prepared.check_engine(engine)

    async def start_workers(self, executor: WorkersExecutor, engine: Engine | None) -> Execution:
        """Starts workers; `engine`: the one that this process has for them, which `stack` closes after them."""
        self.stack.push_async_callback(executor.close)
        await self.stop.unless_stopped(executor.start())
        stats = executor.stats
        own = engine_kind(self.settings.actor_rollout_ref.rollout.name).logprobs
        if self.prepared.logprobs_temperature is not None:
            own = "processed"
        # Of servers by URL the workers know whether they are there, not this process.
        return Execution(
            executor,
            waits=lambda: not stats.is_available,
            retries=lambda: stats.counts.retries,
            reward_failed=lambda: stats.counts.reward_errors,
            logprobs=own if engine is None else engine.capabilities.logprobs,
            engine=stats.engine,
            replicas=engine.replica_counts if isinstance(engine, LaunchedEngine) else lambda: None,
        )


async def start_execution(start: Start) -> Execution:
    """Starts the engine, and the workers where they are not here. Raises `RollstreamError` when it cannot be."""
    if (elsewhere := executor_elsewhere(start.settings)) is not None:
        return await elsewhere.start(start)
    prepared = start.prepared
    start.stack.push_async_callback(prepared.close)
    if runs_in_workers(start.settings):
        return await _start_workers(start)
    if launches_on_ray(start.settings):
        await join_cluster(start)
    engine = prepared.create_engine(start.log_dir)
    await start.start_engine(engine)
    prepared.check_rows()
    built = prepared.make_worker(engine, prepared.loop_names)
    limit = in_flight_limit(start.settings)
    adaptive = start.settings.generation.adaptive_in_flight
    executor = LocalExecutor(
        built.worker,
        start.writer,
        load_row=prepared.dataset.row,
        max_in_flight=limit,
        on_durable=start.on_durable,
        controller=ConcurrencyController(limit, built) if adaptive else None,
    )
    return Execution(
        executor,
        waits=lambda: not built.is_available,
        retries=lambda: built.counts.retries,
        reward_failed=lambda: built.counts.reward_errors,
        logprobs=engine.capabilities.logprobs,
        engine=engine,
        replicas=engine.replica_counts if isinstance(engine, HasReplicas) else lambda: None,
    )


async def join_cluster(start: Start) -> RayCluster:
    """Joins or starts the cluster that `ray_kwargs` names; `start.stack` leaves it again.

    Raises:
        ConfigError: Ray does not take these arguments.
        EngineUnavailableError: no cluster is there.
    """
    ray_kwargs = start.settings.ray_kwargs
    cluster = RayCluster(ray_kwargs.ray_init, ray_kwargs.timeline_json_file)
    start.stack.push_async_callback(cluster.close)
    await start.stop.unless_stopped(cluster.start())
    return cluster


@dataclass(frozen=True, slots=True)
class SetupRecipe:
    """A worker made from a run's configuration, as in the process that drives the run."""

    config_yaml: str
    """Resolved; with the URLs of servers that the driver has launched."""
    loop_names: tuple[str, ...]
    shows_images: bool
    first_data_source: str
    log_dir: str
    """Of the run; its engine's log goes below it where the worker's machine has that folder."""
    follows: bool
    """Whether the URLs may change."""

    async def build(self, number: int) -> BuiltWorker:
        """See `WorkerRecipe`."""
        config = OmegaConf.create(self.config_yaml)
        assert isinstance(config, DictConfig)
        setup = await in_daemon_thread(self._build, config)
        rollout = setup.settings.actor_rollout_ref.rollout
        async with AsyncExitStack() as stack:
            stack.push_async_callback(setup.close)
            await setup.agents.tools.describe()
            plain = setup.create_plain_engine(worker_log_dir(self.log_dir, number))
            engine = setup.interruptible(plain)
            stack.push_async_callback(engine.close)
            await asyncio.gather(engine.start(), setup.prepare_reward_for(self.first_data_source))
            setup.check_engine(engine)
            return replace(
                setup.make_worker(engine, list(self.loop_names)),
                close=stack.pop_all().aclose,
                owns_engine=rollout.name in EMBEDDED_ENGINES,
                follow=follower(setup, plain) if self.follows else None,
            )

    def _build(self, config: DictConfig) -> RolloutSetup:
        settings = to_settings(config)
        return build_setup(settings, load_agents(settings), shows_images=self.shows_images)


def worker_log_dir(log_dir: str, number: int) -> Path:
    """For the logs of a worker's engine: below the run's, where the worker's machine has that folder."""
    if Path(log_dir).is_dir():
        folder = Path(log_dir) / f"worker-{number}"
        folder.mkdir(exist_ok=True)
        return folder
    return Path(tempfile.mkdtemp(prefix="rollstream-worker-"))


async def _start_workers(start: Start) -> Execution:
    prepared = start.prepared
    prepared.check_rows()
    recipe = partial(
        SetupRecipe,
        loop_names=tuple(prepared.loop_names),
        shows_images=prepared.shows_images,
        first_data_source=prepared.first_data_source,
        log_dir=str(start.log_dir.absolute()),
    )
    return await start_in_workers(start, recipe)


async def start_in_workers(
    start: Start, make_recipe: Callable[..., WorkerRecipe], *, has_engine: bool = True
) -> Execution:
    """Starts workers, as actors on Ray or as processes here, and what they need of the run's engine.

    Args:
        start: see there.
        make_recipe: gives the recipe of a worker, by `config_yaml`: the run's configuration as a worker needs it;
            and `follows`: whether the URLs in it may change.
        has_engine: whether workers use the run's engine.
    """
    prepared, settings = start.prepared, start.settings
    generation, rollout = settings.generation, settings.actor_rollout_ref.rollout
    on_ray = launches_on_ray(settings)
    if on_ray:  # left last, so that what runs on it can end first
        await join_cluster(start)
    engine: Engine | None = None
    urls: Callable[[], Sequence[str]] | None = None
    if has_engine and rollout.name not in EMBEDDED_ENGINES:
        # Started here, too: what servers cannot give shows before a worker starts, and they are asked how
        # busy they are once, not by each worker. What is launched is launched here.
        engine = prepared.create_plain_engine(start.log_dir)
        await start.start_engine(engine)
        if isinstance(engine, LaunchedEngine):
            launched = engine
            urls = lambda: launched.replicas  # noqa: E731
    backend: WorkerBackend
    if generation.executor != "local":
        if not on_ray:  # after the engine: what is wrong with that shows sooner
            await join_cluster(start)
        claimed = _claimed_cpus(prepared, engine) if on_ray else 0.0
        workers = rollout.agent.num_workers or default_workers(claimed)
        options = dict(settings.ray_kwargs.worker)
        if urls is not None and not on_ray:
            options = {"scheduling_strategy": here(), **options}  # launched servers listen on this machine
        backend = RayBackend(options)
    else:
        workers, backend = generation.processes, ProcessBackend()
    make_recipe = partial(make_recipe, follows=urls is not None)
    executor = WorkersExecutor(
        # Servers may be others by the time that a worker is replaced.
        lambda: make_recipe(config_yaml=_worker_config(prepared, workers, urls)),
        start.writer,
        backend,
        load_row=prepared.dataset.row,
        max_in_flight=in_flight_limit(settings),
        workers=workers,
        attempt_timeout=generation.attempt_timeout,
        max_attempts=generation.max_attempts,
        engine_timeout=generation.engine_timeout,
        adaptive=generation.adaptive_in_flight,
        engine=engine,
        urls=urls,
        on_durable=start.on_durable,
    )
    return await start.start_workers(executor, engine)


def _claimed_cpus(prepared: Prepared, engine: Engine | None) -> float:
    """CPUs of the cluster that replicas hold. Raises `ConfigError` when they leave none for a worker."""
    assert isinstance(engine, LaunchedEngine)
    each = replica_resources(prepared.settings.ray_kwargs.replica).get("CPU", 0.0)
    claimed = len(engine.supervisors) * each
    there = float(import_ray().cluster_resources().get("CPU", 0.0))
    if there - claimed < (needed := prepared.settings.ray_kwargs.worker.get("num_cpus", 1)):
        raise ConfigError(
            f"the cluster has {there:g} CPUs, of which {len(engine.supervisors)} replicas claim {each:g} "
            f"each: that leaves no worker the {needed} that it needs. Lower ray_kwargs.replica.num_cpus or "
            "ray_kwargs.worker.num_cpus; or set generation.executor=local, which needs no workers"
        )
    return claimed


def _worker_config(prepared: Prepared, workers: int, urls: Callable[[], Sequence[str]] | None) -> str:
    """The run's configuration as a worker needs it that starts now."""
    config = OmegaConf.create(OmegaConf.to_container(prepared.config, resolve=True))
    assert isinstance(config, DictConfig)
    rollout: Any = config.actor_rollout_ref.rollout
    if urls is not None:
        rollout.server_urls = list(urls())
        # What is said of launching is said to the driver; a worker would be told that it has servers.
        defaults: Any = compose().actor_rollout_ref.rollout
        for key in _LAUNCHING:
            rollout[key] = defaults[key]
    if rollout.name == "openai":
        for key in _PER_MINUTE:
            if limit := rollout.engine_kwargs.get(key):
                share = int(limit) // workers
                if share < 1:
                    raise ConfigError(
                        f"engine_kwargs.{key}={limit} is less than one for each of {workers} workers: set "
                        f"actor_rollout_ref.rollout.agent.num_workers (or generation.processes) to {limit} at most"
                    )
                rollout.engine_kwargs[key] = share
    return OmegaConf.to_yaml(config)


def follower(setup: RolloutSetup, engine: Engine) -> Callable[[Sequence[str]], Awaitable[None]]:
    """Takes the URLs of servers that are launched anew, for an engine by URLs."""
    assert isinstance(engine, PoolEngine)
    settings = setup.settings.actor_rollout_ref
    assert settings.model.path is not None
    make = replica_maker(
        settings.rollout.name, model_path=settings.model.path, engine_kwargs=settings.rollout.engine_kwargs
    )
    return partial(follow_urls, engine, make)


async def follow_urls(pool: PoolEngine, make: Callable[[str], Replica], urls: Sequence[str]) -> None:
    """Takes in servers that have come and leaves out those that have gone, all but the last one."""
    for url in urls:
        if url not in pool.replicas:
            replica = make(url)
            try:
                await pool.add_replica(replica)
            except EngineError as error:  # not there yet, or not any more: it is told again
                logger.warning("cannot take in %s: %s", url, error)
                await replica.close()
    for url in pool.replicas:
        if url not in urls and len(pool.replicas) > 1:
            await pool.remove_replica(url)
