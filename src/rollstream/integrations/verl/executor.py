"""`generation.executor=verl`: verl's dataset and agent loops, rollstream's store, workers and engines.

    verl's dataset -> Executor -> WorkerHost(verl's AgentLoopWorker -> verl's client -> engine)
                                        |
                                   trajectories -> StoreWriter

Which sample runs where, what a dead worker costs, what is tried again and what is durable is as with
`executor=ray`, by the same code.
"""

import asyncio
import importlib.util
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.config.settings import Settings
from rollstream.engine.base import Engine
from rollstream.engine.checks import check_capabilities
from rollstream.engine.registry import check_engine_config
from rollstream.errors import ConfigError
from rollstream.generation.execution import Execution, Start, join_cluster, start_in_workers
from rollstream.generation.identity import build_identity
from rollstream.generation.plan import GenerationPlan, manifest_for, take_shard
from rollstream.integrations.verl.compose import compose_verl, loop_names, own_servers, verl_identity
from rollstream.integrations.verl.recipe import (
    VerlLoops,
    VerlRecipe,
    check_loop_names,
    plain_setup,
    verl_servers,
)
from rollstream.integrations.verl.rows import VerlDataset, VerlRows, create_dataset, shows_media
from rollstream.rollout.setup import RolloutSetup, launch_request
from rollstream.trajectory import PromptRow
from rollstream.user_calls import in_daemon_thread

logger = logging.getLogger(__name__)

_NEEDED = ("verl", "ray", "torch", "tensordict", "cachetools", "uvicorn", "fastapi", "openai")
"""Some of them verl imports and does not ask for."""


class VerlExecutor:
    """See `rollstream.generation.plan.ExecutorElsewhere`."""

    def check_installed(self) -> None:
        """Raises `ConfigError` with what is missing."""
        if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"generation.executor=verl: not installed: {', '.join(missing)}: pip install 'rollstream[verl]'"
            )

    async def plan(self, config: DictConfig) -> GenerationPlan:
        """See `ExecutorElsewhere`."""
        settings = to_settings(config)
        rollout = settings.actor_rollout_ref.rollout
        if settings.actor_rollout_ref.model.path is None:
            raise ConfigError("actor_rollout_ref.model.path is not set: name the model's folder (--model)")
        if rollout.name == "openai":
            raise ConfigError(
                "generation.executor=verl: actor_rollout_ref.rollout.name=openai has no token ids: take sglang, "
                "vllm, openvino or hf"
            )
        if rollout.multi_turn.interaction_config_path is not None:
            raise ConfigError(
                "actor_rollout_ref.rollout.multi_turn.interaction_config_path is for rollstream's agent loops; "
                "verl's have no interactions: write them into a loop"
            )
        if settings.data.truncation != "error":
            logger.info("verl's loops cut long prompts from the left, whatever data.truncation says")
        return await in_daemon_thread(_plan, config, settings, await plain_setup(settings, VerlLoops()))

    async def start(self, start: Start) -> Execution:
        """See `execution.start_execution`."""
        plan = start.plan
        config = compose_verl(plan.settings)
        stream = await in_daemon_thread(importlib.import_module, "rollstream.integrations.verl.stream")
        client = None
        if starts_servers := own_servers(plan.settings):
            await join_cluster(start)
            client_module = importlib.import_module("rollstream.integrations.verl.client")
            servers = client_module.StreamingLLMServerManager(config)
            await start.stop.unless_stopped(start_servers(servers, start.stack))
            client = servers.get_client()

        def recipe(config_yaml: str, follows: bool) -> VerlRecipe:
            return VerlRecipe(
                settings=to_settings(OmegaConf.create(config_yaml)),  # type: ignore[arg-type]
                verl_config=config,
                worker=stream.StreamingAgentLoopWorker,
                client=client,
                loop_names=tuple(plan.loop_names),
                data_sources=tuple(plan.scored_sources[:1]),
                log_dir=str(start.log_dir.absolute()),
                follows=follows,
            )

        execution = await start_in_workers(start, recipe, has_engine=not starts_servers)
        if not starts_servers:
            return execution
        raw = config.actor_rollout_ref.rollout.get("logprobs_mode") == "raw_logprobs"
        return replace(execution, logprobs="raw" if raw else "processed")


@dataclass(slots=True)
class VerlPlan(GenerationPlan):
    """A run whose rows and loops are verl's."""

    def create_engine(self, log_dir: Path) -> Engine:
        if own_servers(self.settings):
            raise ConfigError("servers that verl starts show what they can when a run begins, not before")
        return GenerationPlan.create_engine(self, log_dir)

    def prompt_tools(self, row: PromptRow) -> list[dict[str, Any]] | None:
        return None  # verl's loops show their own

    def check_rows(self) -> None:
        """Nothing: verl's loops cut prompts that are too long."""


def _plan(config: DictConfig, settings: Settings, setup: RolloutSetup) -> VerlPlan:
    rollout = settings.actor_rollout_ref.rollout
    verl_config = compose_verl(settings)
    if own_servers(settings):
        check_own_servers(settings, setup, str(verl_config.actor_rollout_ref.rollout.name))
    else:
        check_engine_config(
            rollout.name,
            model_path=settings.actor_rollout_ref.model.path,
            server_urls=rollout.server_urls,
            engine_kwargs=rollout.engine_kwargs,
            launch=launch_request(settings),
        )
    dataset = VerlDataset(
        VerlRows(create_dataset(verl_config), settings.data.prompt_key),
        shuffle_seed=settings.data.seed if settings.data.shuffle else None,
        truth_column=settings.data.ground_truth_key,
    )
    if "dataproto" in settings.generation.export and shows_media(dataset.row(0)):
        raise ConfigError(
            "generation.export=dataproto: the prompt rows have images, and of what verl's dataset reads "
            "none is kept (docs/images.md)"
        )
    if (shard := settings.generation.shard_of) is not None:
        take_shard(dataset, *shard)
    loops = {rollout.agent.default_agent_loop, *dataset.agent_names()}
    check_loop_names(loops, loop_names(rollout.agent.agent_loop_config_path))
    agents, rows = verl_identity(settings, verl_config), len(dataset)
    identity = build_identity(setup, agents, fingerprint=dataset.fingerprint, rows=rows)
    setup.settings = settings
    packages = ("verl", "ray", "tensordict")
    return VerlPlan(setup, config, dataset, manifest_for(config, setup, dataset, identity, packages=packages))


def check_own_servers(settings: Settings, setup: RolloutSetup, name: str) -> None:
    """Refuses what servers that verl starts, by this name, cannot do.

    Raises:
        ConfigError: a seed, or a sampling parameter, for servers that do not take it by this name; servers of
            rollstream's beside them.
    """
    rollout, defaults = settings.actor_rollout_ref.rollout, to_settings(compose()).actor_rollout_ref.rollout
    where = f"generation.verl_overrides has {name}"
    for key in ("server_urls", "engine_kwargs", "launch"):
        if getattr(rollout, key) != getattr(defaults, key):
            raise ConfigError(
                f"actor_rollout_ref.rollout.{key} is for rollstream's engines, and verl starts the servers "
                f"({where}): leave one of them out"
            )
    try:
        check_capabilities(
            verl_servers(name), setup.sampling, prompt_length=1, response_length=1, max_model_len=None
        )
    except ConfigError as error:
        takes = (
            "" if settings.generation.seed is None or name == "vllm" else "; generation.seed takes name=vllm"
        )
        raise ConfigError(f"servers that verl starts ({where}): {error}{takes}") from error


def start_servers(servers: Any, stack: AsyncExitStack) -> "asyncio.Task[None]":
    """Starts a `StreamingLLMServerManager`; `stack` ends what it began, also before it is done with it."""
    starting = asyncio.create_task(servers.start())

    async def end() -> None:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)  # what it began is known when it has ended
        servers.close()

    stack.push_async_callback(end)
    return starting
