"""How a worker with verl's loops is made: in a `WorkerHost`, as the workers of `executor=ray` are.

The actor, its reports and its window are rollstream's; inside it verl's own worker runs verl's own loops.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.daemon_threads import in_daemon_thread
from rollstream.engine.base import Capabilities
from rollstream.integrations.verl.loop import SampleWorker, VerlLoops, VerlServers
from rollstream.rollout.setup import Agents, RolloutSetup, build_setup, load_agents
from rollstream.rollout.worker_host import BuiltWorker

VERL_SERVERS = Capabilities(
    token_ids=True,
    logprobs="processed",
    seeds=False,
    stop_strings=True,
    stop_token_ids=True,
    images=True,
    update_weights=False,
    max_model_len=None,
)
"""What is believed of servers that verl starts: they don't say, and refuse what they can't. For seeds see
`verl_servers`."""


def verl_servers(name: str) -> Capabilities:
    """What servers that verl starts can, by verl's name of them.

    Sampling parameters go to them by the engine's own names: `seed` is vLLM's, SGLang's is another.
    """
    return replace(VERL_SERVERS, seeds=name == "vllm")


@dataclass(frozen=True, slots=True)
class VerlRecipe:
    """A worker with verl's loops."""

    config_yaml: str
    """rollstream's configuration, without loops and tools: see `plain_config`."""
    verl_config: DictConfig
    worker: Callable[[DictConfig, Any], Any]
    """Makes verl's own worker of `verl_config` and the client: a class, for it travels by its name."""
    client: Any
    """A `StreamingLLMServerClient`."""
    handles: tuple[Any, ...]
    """Of the servers."""
    loop_names: tuple[str, ...]
    first_data_source: str
    capabilities: Capabilities = VERL_SERVERS

    async def build(self, number: int) -> BuiltWorker:
        """See `WorkerRecipe`."""
        config = OmegaConf.create(self.config_yaml)
        assert isinstance(config, DictConfig)
        setup, worker = await asyncio.gather(
            in_daemon_thread(plain_setup, config), in_daemon_thread(self._verl_worker)
        )
        setup.agents = Agents(VerlLoops(worker), setup.agents.tools, interactions=setup.agents.interactions)
        async with AsyncExitStack() as stack:
            stack.callback(setup.reward.close)
            await setup.prepare_reward_for(self.first_data_source)
            servers = VerlServers(self.handles, self.capabilities, balancer=self.client.balancer)
            built = setup.make_worker(servers, list(self.loop_names))
            self.client.meter = built.instrumented
            return replace(
                built,
                worker=SampleWorker(built.worker),  # type: ignore[arg-type]
                close=stack.pop_all().aclose,
                owns_engine=False,
            )

    def _verl_worker(self) -> Any:
        worker = self.worker(self.verl_config, self.client)
        self.client.max_positions = _max_positions(worker.model_config.hf_config)
        return worker


def _max_positions(hf_config: Any) -> int | None:
    """What verl's servers take for `max_model_len` where nobody says it."""
    from verl.workers.rollout.utils import get_max_position_embeddings

    try:
        return int(get_max_position_embeddings(hf_config))
    except ValueError:  # a model without such a number: its servers are not verl's own, which refuse it
        return None


def plain_config(config: DictConfig) -> DictConfig:
    """The configuration without what is verl's: loops, tools, interactions and its dataset class.

    Those of verl's kind are no classes of rollstream's, and are loaded by verl alone.
    """
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(plain, DictConfig)
    rollout: Any = plain.actor_rollout_ref.rollout
    rollout.agent.agent_loop_config_path = None
    rollout.agent.default_agent_loop = "single_turn_agent"
    for key in ("tool_config_path", "function_tool_path", "interaction_config_path"):
        rollout.multi_turn[key] = None
    rollout.multi_turn.format = "hermes"
    data: Any = plain.data
    data.tool_config_path = None
    data.custom_cls.path = data.custom_cls.name = None
    return plain


def plain_setup(config: DictConfig) -> RolloutSetup:
    """What a worker has of rollstream's: tokenizer, reward, sampling. Slow. Raises `ConfigError`."""
    settings = to_settings(config)
    return build_setup(settings, load_agents(settings), shows_images=False)


def bare_recipe(manager: Any, *, max_attempts: int) -> VerlRecipe:
    """A recipe by verl's configuration alone: nothing is scored but by the loops themselves.

    Args:
        manager: a `GenerationLoopManager`.
        max_attempts: tries at one sample.
    """
    verl_config = manager.config
    rollout, model = verl_config.actor_rollout_ref.rollout, verl_config.actor_rollout_ref.model
    given: dict[str, Any] = {
        "actor_rollout_ref": {
            "model": {
                "path": str(Path(model.path).expanduser()),
                "tokenizer_path": model.tokenizer_path,
                "trust_remote_code": model.trust_remote_code,
            },
            "rollout": {
                "name": "sglang",
                "server_urls": ["http://verl.invalid"],  # verl's client knows them
                "temperature": float(rollout.temperature),
                "top_p": float(rollout.top_p),
                "top_k": int(rollout.top_k),
                "response_length": int(rollout.response_length),
                "calculate_log_probs": bool(rollout.calculate_log_probs),
            },
        },
        "data": {"max_prompt_length": int(rollout.prompt_length)},
        "generation": {"max_attempts": max_attempts},
    }
    return VerlRecipe(
        config_yaml=OmegaConf.to_yaml(compose(layers=[given])),
        verl_config=verl_config,
        worker=manager.worker_class,
        client=manager.llm_client,
        handles=tuple(manager.server_handles),
        loop_names=(rollout.agent.default_agent_loop,),
        first_data_source="unknown",
    )
