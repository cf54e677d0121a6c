"""Starts the executor of a run: one event loop in this process, or workers: processes here, actors on Ray."""

import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.config.settings import Settings
from rollstream.engine.base import Engine, HasReplicas
from rollstream.engine.launch.engine import LaunchedEngine
from rollstream.engine.launch.plan import OWN_KEYS, replica_resources
from rollstream.engine.pool import PoolEngine
from rollstream.engine.registry import engine_kind, replica_maker
from rollstream.errors import ConfigError, EngineError
from rollstream.generation.plan import GenerationPlan, executor_elsewhere, runs_in_workers
from rollstream.rollout.executor import Executor, Sink, WorkerBackend
from rollstream.rollout.processes import ProcessBackend
from rollstream.rollout.ray import RayBackend, default_workers, here
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, launches_on_ray, load_agents
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend, WorkerRecipe
from rollstream.stop_signals import StopSignals
from rollstream.store.records import EncodedRollout
from rollstream.store.turns import TurnStore
from rollstream.trajectory import Failure, LogprobKind, Rollout

logger = logging.getLogger(__name__)

_LAUNCHING = ("launch", *OWN_KEYS)
"""Settings of `actor_rollout_ref.rollout` for whoever launches servers: the driver, no worker."""

_PER_MINUTE = ("requests_per_minute", "tokens_per_minute")
"""Limits of an endpoint, which all workers share."""


@dataclass(frozen=True, slots=True)
class Execution:
    """An executor that is ready, and what is shown of it."""

    executor: Executor
    logprobs: LogprobKind | Literal["none"] | None
    """The distribution that the engine's log-probs are of."""
    replicas: Callable[[], tuple[int, int] | None] = lambda: None
    """How many replicas of the engine take requests, and how many it has; None where that is not known here."""


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that an executor is started with."""

    plan: GenerationPlan
    sink: Sink
    log_dir: Path
    """For the logs of engines."""
    stop: StopSignals
    """Ends the start early."""
    stack: AsyncExitStack
    """Releases everything, also after an error."""
    on_durable: Callable[[Rollout | EncodedRollout | Failure], None]
    turns: TurnStore | None = None
    """Keeps finished turns, where that is asked for."""

    async def start_engine(self, engine: Engine) -> None:
        """Starts it beside the reward, and checks that it can do what is asked for; `stack` closes it."""
        self.stack.push_async_callback(engine.close)
        self.plan.say_unscored()
        await self.stop.unless_stopped(self.plan.setup.start_engine(engine, self.plan.scored_sources))

    async def start_executor(
        self,
        backend: WorkerBackend,
        engine: Engine | None,
        *,
        workers: int = 1,
        urls: Callable[[], Sequence[str]] | None = None,
    ) -> Execution:
        """Starts the workers; `engine` is the one that they share."""
        settings, setup = self.plan.settings, self.plan.setup
        generation = settings.generation
        executor = Executor(
            self.sink,
            backend,
            load_row=lambda key: self.plan.dataset.row(key.index),
            max_in_flight=in_flight_limit(settings),
            workers=workers,
            attempt_timeout=generation.attempt_timeout,
            max_attempts=generation.max_attempts,
            engine_timeout=generation.engine_timeout,
            adaptive=generation.adaptive_in_flight,
            engine=engine,
            urls=urls,
            turns=self.turns,
            on_durable=self.on_durable,
        )
        self.stack.push_async_callback(executor.close)
        await self.stop.unless_stopped(executor.start())
        logprobs: LogprobKind | Literal["none"] | None
        if engine is not None:
            logprobs = engine.capabilities.logprobs
        elif setup.logprobs_temperature is not None:
            logprobs = "processed"
        else:
            logprobs = engine_kind(settings.actor_rollout_ref.rollout.name).logprobs
        # Of servers by URL the workers know whether they are there.
        known = isinstance(engine, LaunchedEngine) or (backend.is_local and isinstance(engine, HasReplicas))
        return Execution(
            executor, logprobs, cast(HasReplicas, engine).replica_counts if known else lambda: None
        )


async def start_execution(start: Start) -> Execution:
    """Starts the engine, and the workers where they are not here. Raises `RollstreamError` when it cannot be."""
    plan, settings = start.plan, start.plan.settings
    start.stack.push_async_callback(plan.setup.close)
    if (elsewhere := executor_elsewhere(settings)) is not None:
        execution: Execution = await elsewhere.start(start)
        return execution
    if runs_in_workers(settings):
        plan.check_rows()
        recipe = partial(
            SetupRecipe,
            loop_names=tuple(plan.loop_names),
            shows_images=plan.setup.shows_images,
            data_sources=tuple(plan.scored_sources[:1]),
            log_dir=str(start.log_dir.absolute()),
        )
        return await start_in_workers(start, recipe)
    if launches_on_ray(settings):
        await join_cluster(start)
    engine = plan.create_engine(start.log_dir)
    await start.start_engine(engine)
    plan.check_rows()
    return await start.start_executor(LocalBackend(plan.setup.make_worker(engine, plan.loop_names)), engine)


async def join_cluster(start: Start) -> None:
    """Joins or starts the cluster that `ray_kwargs` names; `start.stack` leaves it again. Raises `ConfigError`,
    `EngineUnavailableError`, see `RayCluster`.
    """
    ray_kwargs = start.plan.settings.ray_kwargs
    cluster = RayCluster(ray_kwargs.ray_init, ray_kwargs.timeline_json_file)
    start.stack.push_async_callback(cluster.close)
    await start.stop.unless_stopped(cluster.start())


@dataclass(frozen=True, slots=True)
class SetupRecipe:
    """A worker made from a run's configuration, as in the process that drives the run."""

    config_yaml: str
    """Resolved; with the URLs of servers that the driver has launched."""
    loop_names: tuple[str, ...]
    shows_images: bool
    data_sources: tuple[str, ...]
    """Their rules are tried at start."""
    log_dir: str
    """Of the run; its engine's log goes below it where the worker's machine has that folder."""
    follows: bool
    """Whether the URLs may change."""
    wrap: Callable[[RolloutSetup, Engine], Engine] = RolloutSetup.interruptible
    """Makes of the engine what rollouts use."""
    make: Callable[[RolloutSetup, Engine, list[str]], BuiltWorker] = RolloutSetup.make_worker

    async def build(self, number: int) -> BuiltWorker:
        """See `WorkerRecipe`."""
        config = OmegaConf.create(self.config_yaml)
        assert isinstance(config, DictConfig)
        settings = to_settings(config)
        setup = await build_setup(
            settings, await load_agents(settings), shows_images=self.shows_images, groups=True
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(setup.close)
            plain = setup.create_plain_engine(worker_log_dir(self.log_dir, number))
            engine = self.wrap(setup, plain)
            stack.push_async_callback(engine.close)
            await setup.start_engine(engine, self.data_sources)
            return replace(
                self.make(setup, engine, list(self.loop_names)),
                close=stack.pop_all().aclose,
                engine=engine if engine_kind(settings.actor_rollout_ref.rollout.name).is_embedded else None,
                follow=follower(setup, plain) if self.follows else None,
            )


def worker_log_dir(log_dir: str, number: int) -> Path:
    """For the logs of a worker's engine: below the run's, where the worker's machine has that folder."""
    if Path(log_dir).is_dir():
        folder = Path(log_dir) / f"worker-{number}"
        folder.mkdir(exist_ok=True)
        return folder
    return Path(tempfile.mkdtemp(prefix="rollstream-worker-"))


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
    plan, settings = start.plan, start.plan.settings
    rollout, on_ray = settings.actor_rollout_ref.rollout, launches_on_ray(settings)
    if on_ray:  # left last, so that what runs on it can end first
        await join_cluster(start)
    engine: Engine | None = None
    urls: Callable[[], Sequence[str]] | None = None
    if has_engine and not engine_kind(rollout.name).is_embedded:
        # Started here, too: what servers cannot give shows before a worker starts, and they are asked how
        # busy they are once, not by each worker. What is launched is launched here.
        engine = plan.setup.create_plain_engine(start.log_dir)
        await start.start_engine(engine)
        if isinstance(engine, LaunchedEngine):
            launched = engine
            urls = lambda: launched.replicas  # noqa: E731
    if settings.generation.executor != "local" and not on_ray:
        await join_cluster(start)  # after the engine: what is wrong with that shows sooner
    backend, workers = worker_backend(settings, plan.config, engine, make_recipe, urls)
    return await start.start_executor(backend, engine, workers=workers, urls=urls)


def worker_backend(
    settings: Settings,
    config: DictConfig,
    engine: Engine | None,
    make_recipe: Callable[..., WorkerRecipe],
    urls: Callable[[], Sequence[str]] | None,
) -> tuple[WorkerBackend, int]:
    """Makes workers as processes here, or as actors on the cluster that was joined; and says how many.

    For `make_recipe` see `start_in_workers`; `urls` gives those of the started engine's servers, where these change.
    """
    rollout, workers = settings.actor_rollout_ref.rollout, settings.generation.processes

    def next_recipe() -> WorkerRecipe:  # servers may be others by the time that a worker is replaced
        config_yaml = worker_config(config, workers, urls)
        return make_recipe(config_yaml=config_yaml, follows=urls is not None)

    if settings.generation.executor == "local":
        return ProcessBackend(next_recipe), workers
    is_launched = isinstance(engine, LaunchedEngine)
    claimed = 0.0  # CPUs that replicas hold
    if isinstance(engine, LaunchedEngine) and launches_on_ray(settings):
        claimed = len(engine.supervisors) * replica_resources(settings.ray_kwargs.replica).get("CPU", 0.0)
    workers = rollout.agent.num_workers or default_workers(claimed)
    options = dict(settings.ray_kwargs.worker)
    if is_launched and not launches_on_ray(settings):
        options = {"scheduling_strategy": here(), **options}  # launched servers listen on this machine
    return RayBackend(next_recipe, options), workers


def worker_config(config: DictConfig, workers: int, urls: Callable[[], Sequence[str]] | None) -> str:
    """The configuration of a run as one of its workers needs it that starts now.

    Args:
        config: of the run, resolved.
        workers: how many share the limits of an endpoint.
        urls: gives those of servers that the driver has launched.
    """
    tree: Any = config.copy()
    rollout = tree.actor_rollout_ref.rollout
    if urls is not None:
        rollout.server_urls = list(urls())
        defaults: Any = compose().actor_rollout_ref.rollout
        for key in _LAUNCHING:
            rollout[key] = defaults[key]
    for key in _PER_MINUTE if rollout.name == "openai" else ():
        if limit := rollout.engine_kwargs.get(key):
            if int(limit) < workers:
                raise ConfigError(
                    f"engine_kwargs.{key}={limit} is less than one for each of {workers} workers "
                    "(actor_rollout_ref.rollout.agent.num_workers, generation.processes)"
                )
            rollout.engine_kwargs[key] = int(limit) // workers
    return OmegaConf.to_yaml(tree, resolve=True)


def follower(setup: RolloutSetup, engine: Engine) -> Callable[[Sequence[str]], Awaitable[None]]:
    """Takes the URLs of servers that are launched anew, for an engine by URLs."""
    assert isinstance(engine, PoolEngine)
    pool, settings = engine, setup.settings.actor_rollout_ref
    assert settings.model.path is not None
    make = replica_maker(
        settings.rollout.name, model_path=settings.model.path, engine_kwargs=settings.rollout.engine_kwargs
    )

    async def follow(urls: Sequence[str]) -> None:
        """Takes in servers that have come and leaves out those that have gone."""
        for url in urls:
            if url not in pool.replicas:
                replica = make(url)
                try:
                    await pool.add_replica(replica)
                except EngineError as error:  # not there yet, or not any more: it is told again
                    logger.warning("cannot take in %s: %s", url, error)
                    await replica.close()
        for url in pool.replicas:
            if url not in urls:
                await pool.remove_replica(url)

    return follow
