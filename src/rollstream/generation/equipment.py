"""What a rollout worker is made of, short of the prompt rows: the same in this process and in others."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rollstream.agent.base import AgentResources, TurnLimits
from rollstream.agent.images import ImageReader
from rollstream.agent.prompt import PromptRenderer
from rollstream.chat.processor import load_processor
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.config.settings import RewardSettings, Settings
from rollstream.data.tool_schemas import load_tool_schemas
from rollstream.engine.base import Engine
from rollstream.engine.interruptible import InterruptibleEngine
from rollstream.engine.registry import check_capabilities, create_engine
from rollstream.errors import ConfigError
from rollstream.generation.agents import Agents
from rollstream.generation.replicas import launch_request
from rollstream.reward.base import FunctionReward
from rollstream.reward.custom import load_reward
from rollstream.reward.rules import RuleReward
from rollstream.rollout.gate import EngineGate
from rollstream.rollout.meter import MeteredEngine
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker
from rollstream.trajectory import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Equipment:
    """What rollouts are executed with; nothing of it is started."""

    config: DictConfig
    settings: Settings
    tokenizer: ChatTokenizer
    prompts: PromptRenderer
    agents: Agents
    images: ImageReader | None
    """None when the model, or the machine, cannot read images."""
    shows_images: bool
    """Whether prompt rows have images."""
    shown_tools: list[dict[str, Any]]
    """Schemas that loops without tools show in their prompts."""
    sampling: SamplingParams
    reward: FunctionReward | RuleReward

    def create_engine(self, log_dir: Path) -> Engine:
        """The configured engine, not started. Raises `ConfigError`."""
        return self.interruptible(self.create_plain_engine(log_dir))

    def interruptible(self, engine: Engine) -> Engine:
        """The engine, as rollouts use it: generations live through weight updates."""
        return InterruptibleEngine(engine, on_update=self.settings.actor_rollout_ref.rollout.on_weight_update)

    def create_plain_engine(self, log_dir: Path) -> Engine:
        """The configured engine by itself, not started. Raises `ConfigError`."""
        model, rollout = self.settings.actor_rollout_ref.model, self.settings.actor_rollout_ref.rollout
        return create_engine(
            rollout.name,
            model_path=model.path,
            server_urls=rollout.server_urls,
            max_model_len=rollout.max_model_len,
            engine_kwargs=rollout.engine_kwargs,
            launch=launch_request(self.settings),
            log_dir=log_dir,
        )

    async def prepare_reward_for(self, data_source: str) -> None:
        """Imports what the rule of a data source needs, so that what is missing shows at start.

        Raises:
            ConfigError: a package is missing.
        """
        if isinstance(self.reward, RuleReward) and not await self.reward.prepare(data_source):
            logger.info("no reward for data source %r: rollouts are not scored", data_source)

    def check_engine(self, engine: Engine) -> None:
        """Refuses what a started engine cannot give (R8). Raises `ConfigError`."""
        rollout = self.settings.actor_rollout_ref.rollout
        if self.shows_images and not engine.capabilities.images:
            raise ConfigError(
                f"the prompt rows have images, but engine {rollout.name!r} takes none: see docs/images.md"
            )
        stops = self.sampling.stop_token_ids
        if not engine.capabilities.token_ids:
            self._check_chat(engine)
        elif self.agents.tools.schemas:
            stops = (*stops, *self.agent_resources(engine).parser_stop_ids)
        check_capabilities(
            engine.capabilities,
            replace(self.sampling, stop_token_ids=stops),
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_model_len=rollout.max_model_len,
        )

    def _check_chat(self, engine: Engine) -> None:
        """Refuses what is done to ids here and would not reach an engine that speaks messages."""
        if self.settings.data.truncation != "error":
            raise ConfigError(
                f"data.truncation={self.settings.data.truncation} cuts prompt ids, but this engine is sent "
                "messages: set data.truncation=error, and data.filter_overlong_prompts=true to leave long "
                "prompts out"
            )
        if self.agents.tools.schemas and not self.agent_resources(engine).template.has_tool_role:
            raise ConfigError(
                "the local chat template has no role for tool results, which a chat endpoint must be given: "
                "name another tokenizer (actor_rollout_ref.model.tokenizer_path) or template "
                "(custom_chat_template)"
            )
        if self.settings.data.apply_chat_template_kwargs:
            logger.warning(
                "data.apply_chat_template_kwargs reaches the local tokenizer only; an endpoint that knows "
                "them takes them by engine_kwargs.extra_body={chat_template_kwargs: {...}}"
            )

    def agent_resources(self, engine: Engine) -> AgentResources:
        """What the agent loops share, for a started engine."""
        rollout = self.settings.actor_rollout_ref.rollout
        limits = [limit for limit in (rollout.max_model_len, engine.capabilities.max_model_len) if limit]
        return AgentResources(
            engine=engine,
            tokenizer=self.tokenizer,
            prompts=self.prompts,
            response_length=rollout.response_length,
            max_model_len=min(limits, default=None),
            tools=self.agents.tools,
            show_tools=rollout.multi_turn.show_tools,
            turns=TurnLimits(rollout.multi_turn.max_assistant_turns, rollout.multi_turn.max_user_turns),
            parser_name=rollout.multi_turn.format,
            interactions=self.agents.interactions,
            images=self.images if engine.capabilities.images else None,
        )

    def make_worker(
        self, engine: Engine, loop_names: list[str]
    ) -> tuple[RolloutWorker, MeteredEngine, EngineGate]:
        """A worker on a started engine, with what counts its requests and the gate before it.

        Raises:
            ConfigError: one of the agent loops cannot work with this engine.
        """
        settings = self.settings.generation
        gate = EngineGate(engine, timeout=settings.engine_timeout)
        metered = MeteredEngine(engine)
        resources = self.agent_resources(metered)
        self.agents.loops.check(loop_names, resources)
        worker = RolloutWorker(
            resources,
            sampling=self.sampling,
            seed=settings.seed,
            default_agent_loop=self.settings.actor_rollout_ref.rollout.agent.default_agent_loop,
            retry=RetryPolicy(settings.max_attempts, settings.retry_delay, settings.retry_delay_max),
            attempt_timeout=settings.attempt_timeout,
            gate=gate,
            reward=self.reward,
            loops=self.agents.loops,
            refusal_patience=settings.engine_timeout,
        )
        return worker, metered, gate


def equip(config: DictConfig, settings: Settings, agents: Agents, *, shows_images: bool) -> Equipment:
    """Loads tokenizer, reward and what else rollouts are executed with. Slow: call it off the event loop.

    Args:
        config: the resolved configuration tree.
        settings: the same, typed.
        agents: loaded from it.
        shows_images: whether prompt rows have images.

    Raises:
        ConfigError: the configuration cannot work.
    """
    model, rollout, data = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout, settings.data
    shown = load_tool_schemas(data.tool_config_path) if data.tool_config_path else []
    reward = _load_reward(settings.custom_reward_function)
    assert model.path is not None
    if rollout.name == "openai" and not (model.tokenizer_path or Path(model.path).expanduser().is_dir()):
        raise ConfigError(
            f"engine 'openai' needs a local tokenizer, and {model.path!r} is the endpoint's name of a model: "
            "set actor_rollout_ref.model.tokenizer_path to a folder or hub name, best of the same model"
        )
    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path,
        custom_chat_template=model.custom_chat_template,
        template_kwargs=data.apply_chat_template_kwargs,
        trust_remote_code=model.trust_remote_code,
    )
    images = _load_images(settings, tokenizer, agents, needed=shows_images)
    return Equipment(
        config=config,
        settings=settings,
        tokenizer=tokenizer,
        prompts=PromptRenderer(
            tokenizer,
            prompt_length=rollout.prompt_length,
            truncation=data.truncation,
            tool_schemas=shown,
            images=images,
        ),
        agents=agents,
        images=images,
        shows_images=shows_images,
        shown_tools=shown,
        sampling=SamplingParams(
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            logprobs=rollout.calculate_log_probs,
            seed=settings.generation.seed if settings.generation.seed is None else 0,
            stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids),
            ignore_eos=rollout.ignore_eos,
        ),
        reward=reward,
    )


def _load_images(
    settings: Settings, tokenizer: ChatTokenizer, agents: Agents, *, needed: bool
) -> ImageReader | None:
    """What reads images, if rows have some or tools may return some."""
    if not needed and not agents.tools.schemas:
        return None
    model = settings.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    assert path is not None
    try:
        processor = load_processor(path, tokenizer, trust_remote_code=model.trust_remote_code)
    except ConfigError as error:
        if needed:
            raise
        logger.warning("images that tools return are not shown to the model: %s", error)
        return None
    if processor is None:
        if needed:
            raise ConfigError(
                f"the prompt rows have images, but {path!r} has no image processor "
                "(preprocessor_config.json): it is a model for text"
            )
        return None
    return ImageReader(processor, allow_http=settings.data.fetch_images)


def _load_reward(settings: RewardSettings) -> FunctionReward | RuleReward:
    if settings.path is None:
        return RuleReward(settings.timeout, settings.max_concurrency)
    return load_reward(
        settings.path,
        settings.name,
        settings.reward_kwargs,
        timeout=settings.timeout,
        max_concurrency=settings.max_concurrency,
    )
