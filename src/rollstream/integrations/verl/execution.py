"""`generation.executor=verl`: verl's dataset and agent loops, rollstream's store, workers and engines.

    verl's dataset -> WorkersExecutor -> WorkerHost(verl's AgentLoopWorker) -> verl's client, balancer
                                        |                                        |
                                   trajectories                      RollstreamReplica's actor
                                        v                                        v
                                   StoreWriter                       servers of rollstream's engine

Which sample runs where, what a dead worker costs, what is tried again and what is durable is as with
`executor=ray`, by the same code.
"""

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import to_settings
from rollstream.config.settings import Settings
from rollstream.daemon_threads import in_daemon_thread
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.engine.base import Engine
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.registry import data_deciding_kwargs
from rollstream.errors import ConfigError, DataError
from rollstream.generation.execution import Execution, Start, join_cluster
from rollstream.generation.exports import check_exports
from rollstream.generation.identity import build_identity
from rollstream.generation.setup import Prepared, manifest_for, take_shard
from rollstream.integrations.verl.composed import compose_verl, own_servers
from rollstream.integrations.verl.identity import loop_entries, verl_identity
from rollstream.integrations.verl.loop import VerlLoops, check_loop_names
from rollstream.integrations.verl.rows import VerlDataset, VerlRows, create_dataset, shows_media
from rollstream.integrations.verl.servers import end_verl, start_verl, tell_urls
from rollstream.integrations.verl.worker_recipe import (
    VerlRecipe,
    plain_config,
    plain_setup,
    verl_servers,
)
from rollstream.rollout.ray import default_workers, here
from rollstream.rollout.setup import Agents, RolloutSetup, in_flight_limit
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
    """Its configuration is that of the engine behind verl's loops."""

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
    verl_config = compose_verl(settings, urls=settings.actor_rollout_ref.rollout.server_urls or ["to come"])
    check_verl_servers(settings, str(verl_config.actor_rollout_ref.rollout.name))
    setup = plain_setup(serving_config(resolved))
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
        agents=verl_identity(settings, setup.settings),
        images_digest=None,
        tools_digest=None,
        shown_tools_digest=None,
        reward_digest=setup.reward.source_digest,
        dataset_fingerprint=dataset.fingerprint,
        dataset_rows=len(dataset),
        engine_settings=data_deciding_kwargs(rollout.name, rollout.engine_kwargs),
    )
    known = {one.name: getattr(setup, one.name) for one in fields(RolloutSetup)}
    known |= {"config": resolved, "settings": settings}
    known["agents"] = Agents(VerlLoops(), setup.agents.tools, setup.agents.interactions)
    prepared = VerlPrepared(**known, dataset=dataset, serving=setup)
    packages = ("verl", "ray", "tensordict")
    prepared.manifest = manifest_for(resolved, dataset, identity, n=rollout.n, packages=packages)
    return prepared


def serving_config(config: DictConfig) -> DictConfig:
    """The configuration of the servers behind verl's loops; of no servers, where verl starts them itself.

    An embedded engine becomes servers of `rollstream serve` with that engine, since the workers are several
    processes and their servers one service.
    """
    plain = plain_config(config)
    rollout: Any = plain.actor_rollout_ref.rollout
    if own_servers(to_settings(config)):
        return _worker_config(plain)
    if rollout.name in _EMBEDDED:
        kwargs = OmegaConf.to_container(rollout.engine_kwargs)
        given = OmegaConf.to_container(rollout.launch.args)
        assert isinstance(kwargs, dict) and isinstance(given, dict)
        rollout.launch.args = {
            **given,
            "engine": rollout.name,
            **({"engine-kwargs": kwargs} if kwargs else {}),
        }
        rollout.launch.server, rollout.name, rollout.engine_kwargs = "rollstream", "sglang", {}
    return plain


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
    if rollout.extra_sampling:
        raise ConfigError(
            "actor_rollout_ref.rollout.extra_sampling is for rollstream's agent loops: "
            "generation.executor=verl has no way to hand it to verl's"
        )
    if settings.data.truncation != "error":
        logger.info("verl's loops cut long prompts from the left, whatever data.truncation says")


def check_verl_servers(settings: Settings, name: str) -> None:
    """Refuses what servers that verl starts cannot do.

    Args:
        settings: of the run.
        name: of the servers, as verl has it.

    Raises:
        ConfigError: a seed, for servers that do not take one by this name.
    """
    if own_servers(settings) and settings.generation.seed is not None and not verl_servers(name).seeds:
        raise ConfigError(
            f"generation.seed={settings.generation.seed}: servers that verl starts take a seed for each "
            f"rollout with actor_rollout_ref.rollout.name=vllm only (generation.verl_overrides has {name}): "
            "leave the seed out, or use an engine of rollstream's"
        )


async def _start(start: Start, prepared: VerlPrepared) -> Execution:
    settings, stack = prepared.settings, start.stack
    stack.callback(prepared.reward.close)
    engine: Engine | None = None
    urls: Callable[[], Sequence[str]] | None = None
    if not own_servers(settings):
        # Here, too: what the servers cannot give shows before a worker starts, and they are asked once how
        # busy they are. What is launched is launched here.
        engine = prepared.create_plain_engine(start.log_dir)
        await start.start_engine(engine)
        launched = engine
        urls = (lambda: launched.replicas) if isinstance(launched, LaunchedEngine) else None
    await join_cluster(start)
    given = list(urls()) if urls is not None else settings.actor_rollout_ref.rollout.server_urls
    verl_config = _for_verl(prepared, given)
    starting = asyncio.create_task(start_verl(verl_config))
    stack.push_async_callback(_ended, starting)  # a stop waits for it to clean up, before the cluster is left
    servers, manager = await start.stop.unless_stopped(starting)
    stack.callback(end_verl, servers)
    if urls is not None:
        telling = asyncio.create_task(tell_urls(servers.server_handles, urls))
        stack.push_async_callback(_ended, telling)
    options = dict(settings.ray_kwargs.worker)
    if urls is not None:
        options = {"scheduling_strategy": here(), **options}  # launched servers listen on this machine alone
    recipe = VerlRecipe(
        config_yaml=OmegaConf.to_yaml(_worker_config(serving_config(prepared.config))),
        verl_config=verl_config,
        worker=manager.worker_class,
        client=manager.llm_client,
        handles=tuple(servers.server_handles),
        loop_names=tuple(prepared.loop_names),
        first_data_source=prepared.first_data_source,
        capabilities=(
            verl_servers(str(verl_config.actor_rollout_ref.rollout.name))
            if engine is None
            else engine.capabilities
        ),
    )
    generation = settings.generation
    executor = manager.make_executor(
        recipe,
        start.writer,
        load_row=prepared.dataset.row,
        max_in_flight=in_flight_limit(prepared.settings),
        attempt_timeout=generation.attempt_timeout,
        max_attempts=generation.max_attempts,
        options=options,
        adaptive=generation.adaptive_in_flight,
        engine=engine,
        on_durable=start.on_durable,
    )
    return await start.start_workers(executor, engine)


def _for_verl(prepared: VerlPrepared, urls: Sequence[str]) -> DictConfig:
    """The configuration of verl, with the engine that the servers speak as."""
    config = compose_verl(prepared.settings, urls=urls)
    rollout: Any = config.actor_rollout_ref.rollout
    rollout.agent.num_workers = (
        prepared.settings.actor_rollout_ref.rollout.agent.num_workers or default_workers()
    )
    if not own_servers(prepared.settings):
        serving = prepared.serving.settings.actor_rollout_ref.rollout
        rollout.custom.engine, rollout.custom.engine_kwargs = serving.name, serving.engine_kwargs
    return config


def _worker_config(config: DictConfig) -> DictConfig:
    """What a worker gets of the configuration. It has no engine: nothing in it may start one."""
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(plain, DictConfig)
    rollout: Any = plain.actor_rollout_ref.rollout
    rollout.name, rollout.server_urls, rollout.engine_kwargs = "sglang", ["http://verl.invalid"], {}
    rollout.launch.server, rollout.launch.replicas, rollout.launch.python = "auto", None, None
    rollout.launch.args, rollout.launch.env = {}, {}
    return plain


async def _ended(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
