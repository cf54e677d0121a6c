"""`generation.executor=verl`: verl's dataset and agent loops, rollstream's store, workers and engines.

    verl's dataset -> WorkersExecutor -> WorkerHost(verl's AgentLoopWorker -> verl's client -> engine)
                                        |
                                   trajectories -> StoreWriter

Which sample runs where, what a dead worker costs, what is tried again and what is durable is as with
`executor=ray`, by the same code.
"""

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.config.settings import Settings
from rollstream.daemon_threads import in_daemon_thread
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.engine.base import Engine
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.registry import check_capabilities, check_engine_config, data_deciding_kwargs
from rollstream.errors import ConfigError, DataError
from rollstream.generation.execution import Execution, Start, join_cluster
from rollstream.generation.exports import check_exports
from rollstream.generation.identity import build_identity
from rollstream.generation.setup import Prepared, manifest_for, take_shard
from rollstream.integrations.verl.compose import compose_verl, loop_entries, own_servers, verl_identity
from rollstream.integrations.verl.recipe import (
    VerlLoops,
    VerlRecipe,
    check_loop_names,
    plain_setup,
    verl_servers,
)
from rollstream.integrations.verl.rows import VerlDataset, VerlRows, create_dataset, shows_media
from rollstream.rollout.ray import RayBackend, default_workers, here
from rollstream.rollout.setup import RolloutSetup, in_flight_limit, launch_request
from rollstream.rollout.workers import WorkersExecutor
from rollstream.trajectory import PromptRow

logger = logging.getLogger(__name__)

_EMBEDDED = ("hf", "openvino")
"""Engines that `rollstream serve` puts before verl's loops."""

_NEEDED = ("verl", "ray", "torch", "tensordict", "cachetools", "uvicorn", "fastapi", "openai")
"""Some of them verl imports and does not ask for."""


class VerlExecutor:
    """See `rollstream.generation.setup.ExecutorElsewhere`."""

    def check_installed(self) -> None:
        """Raises `ConfigError` with what is missing."""
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"generation.executor=verl needs verl, and {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'rollstream[verl]'"
            )

    async def prepare(self, config: DictConfig) -> Prepared:
        """See `setup.prepare`."""
        return await in_daemon_thread(_prepare, config)

    async def start(self, start: Start) -> Execution:
        """See `execution.start_execution`."""
        assert isinstance(start.prepared, VerlPrepared)
        return await _start(start, start.prepared)


@dataclass(slots=True)
class VerlPrepared(Prepared):
    """A run whose rows and loops are verl's."""

    serving: RolloutSetup = field(kw_only=True)
    """Its settings are those of the engine behind verl's loops."""

    def create_plain_engine(self, log_dir: Path) -> Engine:
        if own_servers(self.settings):
            raise ConfigError("servers that verl starts show what they can when a run begins, not before")
        return self.serving.create_plain_engine(log_dir)

    def check_engine(self, engine: Engine, *, longest: bool = True) -> None:
        self.serving.check_engine(engine, longest=longest)

    def prompt_tools(self, row: PromptRow) -> list[dict[str, Any]] | None:
        return None  # verl's loops show their own

    def check_rows(self) -> None:
        """Nothing: verl's loops cut prompts that are too long."""


def _prepare(config: DictConfig) -> VerlPrepared:
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(resolved, DictConfig)
    resolve_tasks_into_config(resolved)
    settings = to_settings(resolved)
    check_exports(settings.generation.export)
    _check(settings)
    verl_config = compose_verl(settings)
    served = serving_settings(settings)
    setup = plain_setup(served, VerlLoops())
    if own_servers(settings):
        check_own_servers(settings, setup, str(verl_config.actor_rollout_ref.rollout.name))
    else:
        model, engine = served.actor_rollout_ref.model, served.actor_rollout_ref.rollout
        check_engine_config(
            engine.name,
            model_path=model.path,
            server_urls=engine.server_urls,
            engine_kwargs=engine.engine_kwargs,
            launch=launch_request(served),
        )
    dataset = VerlDataset(
        VerlRows(create_dataset(verl_config), settings.data.prompt_key),
        shuffle_seed=settings.data.seed if settings.data.shuffle else None,
    )
    with contextlib.suppress(DataError):  # a row that cannot be read fails by itself, later
        check_exports(
            settings.generation.export, shows_images=len(dataset) > 0 and shows_media(dataset.row(0))
        )
    if (shard := settings.generation.shard_of) is not None:
        take_shard(dataset, *shard)
    rollout = settings.actor_rollout_ref.rollout
    check_loop_names(
        {rollout.agent.default_agent_loop, *dataset.agent_names()},
        (str(entry.get("name")) for entry in loop_entries(rollout.agent.agent_loop_config_path)),
    )
    identity = build_identity(
        settings,
        tokenizer_digest=setup.tokenizer.digest(),
        agents=verl_identity(settings, served, verl_config),
        images_digest=None,
        tools_digest=None,
        shown_tools_digest=None,
        reward_digest=setup.reward.source_digest,
        dataset_fingerprint=dataset.fingerprint,
        dataset_rows=len(dataset),
        engine_settings=data_deciding_kwargs(rollout.name, rollout.engine_kwargs),
    )
    known = {one.name: getattr(setup, one.name) for one in fields(RolloutSetup)} | {"settings": settings}
    prepared = VerlPrepared(**known, config=resolved, dataset=dataset, serving=setup)
    packages = ("verl", "ray", "tensordict")
    prepared.manifest = manifest_for(resolved, dataset, identity, n=rollout.n, packages=packages)
    return prepared


def serving_settings(settings: Settings) -> Settings:
    """Those of the servers behind verl's loops.

    An embedded engine becomes servers of `rollstream serve` with that engine, since the workers are several
    processes and their servers one service.
    """
    model, rollout = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout
    if model.path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set: name the model's folder")
    if rollout.name in _EMBEDDED and not own_servers(settings):
        kwargs = {"engine-kwargs": rollout.engine_kwargs} if rollout.engine_kwargs else {}
        launch = replace(
            rollout.launch,
            server="rollstream",
            args={**rollout.launch.args, "engine": rollout.name, **kwargs},
        )
        rollout = replace(rollout, name="sglang", engine_kwargs={}, launch=launch)
    return replace(settings, actor_rollout_ref=replace(settings.actor_rollout_ref, rollout=rollout))


def _check(settings: Settings) -> None:
    rollout = settings.actor_rollout_ref.rollout
    if rollout.name == "openai":
        raise ConfigError(
            "generation.executor=verl needs token ids, which actor_rollout_ref.rollout.name=openai has none "
            "of: take sglang, vllm, openvino or hf"
        )
    if rollout.multi_turn.interaction_config_path is not None:
        raise ConfigError(
            "actor_rollout_ref.rollout.multi_turn.interaction_config_path is for rollstream's agent loops; "
            "generation.executor=verl runs verl's, which have no interactions: write them into a loop"
        )
    if rollout.launch.where == "ray":
        raise ConfigError(
            "actor_rollout_ref.rollout.launch.where=ray is for generation.executor=ray and local; with "
            "generation.executor=verl servers are launched on this machine (leave launch.where out), started "
            "elsewhere by you (actor_rollout_ref.rollout.server_urls), or by verl (generation.verl_overrides)"
        )
    if settings.data.truncation != "error":
        logger.info("verl's loops cut long prompts from the left, whatever data.truncation says")


def check_own_servers(settings: Settings, setup: RolloutSetup, name: str) -> None:
    """Refuses what servers that verl starts cannot do.

    Args:
        settings: of the run.
        setup: how it samples.
        name: of the servers, as verl has it.

    Raises:
        ConfigError: a seed, or a sampling parameter, for servers that do not take it by this name.
    """
    try:
        check_capabilities(
            verl_servers(name), setup.sampling, prompt_length=1, response_length=1, max_model_len=None
        )
    except ConfigError as error:
        seed = settings.generation.seed
        only = f"; generation.seed={seed} takes name=vllm" if seed is not None and name != "vllm" else ""
        raise ConfigError(
            f"servers that verl starts (generation.verl_overrides has {name}): {error}{only}"
        ) from error


async def _start(start: Start, prepared: VerlPrepared) -> Execution:
    settings, stack = prepared.settings, start.stack
    generation, rollout = settings.generation, settings.actor_rollout_ref.rollout
    stack.callback(prepared.reward.close)
    engine: Engine | None = None
    urls: Callable[[], Sequence[str]] | None = None
    options = dict(settings.ray_kwargs.worker)
    if not own_servers(settings):
        # Here, too: what the servers cannot give shows before a worker starts, and they are asked once how
        # busy they are. What is launched is launched here.
        engine = prepared.create_plain_engine(start.log_dir)
        await start.start_engine(engine)
        if isinstance(launched := engine, LaunchedEngine):
            urls = lambda: launched.replicas  # noqa: E731
            options = {"scheduling_strategy": here(), **options}  # they listen on this machine alone
    await join_cluster(start)
    config = compose_verl(settings)
    workers = rollout.agent.num_workers or default_workers()
    config.actor_rollout_ref.rollout.agent.num_workers = workers
    stream = await in_daemon_thread(importlib.import_module, "rollstream.integrations.verl.stream")
    client = None
    if engine is None:
        servers = stream.StreamingLLMServerManager(config)
        await start.stop.unless_stopped(start_servers(servers, stack))
        client = servers.get_client()
    recipe = VerlRecipe(
        settings=prepared.serving.settings,
        verl_config=config,
        worker=stream.StreamingAgentLoopWorker,
        client=client,
        loop_names=tuple(prepared.loop_names),
        first_data_source=prepared.first_data_source,
    )
    executor = WorkersExecutor(
        # Servers may be others by the time that a worker is replaced.
        lambda: replace(recipe, settings=with_servers(recipe.settings, urls())) if urls else recipe,
        start.writer,
        RayBackend(options),
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


def with_servers(settings: Settings, urls: Sequence[str]) -> Settings:
    """The settings of a worker whose engine's servers have been launched; it launches none itself."""
    rollout = settings.actor_rollout_ref.rollout
    launch = to_settings(compose()).actor_rollout_ref.rollout.launch
    rollout = replace(rollout, server_urls=list(urls), launch=launch)
    return replace(settings, actor_rollout_ref=replace(settings.actor_rollout_ref, rollout=rollout))


def start_servers(servers: Any, stack: AsyncExitStack) -> "asyncio.Task[None]":
    """Starts a `StreamingLLMServerManager`; `stack` ends what it began, also before it is done with it."""
    starting = asyncio.create_task(servers.start())

    async def end() -> None:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)  # what it began is known when it has ended
        servers.close()

    stack.push_async_callback(end)
    return starting
