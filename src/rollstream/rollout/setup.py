"""Builds what rollouts are executed with, from a run's settings: the one way to do it, for every door.

settings -> load_agents -> Agents (agent loops, tools, interactions)
-> build_setup -> RolloutSetup (with tokenizer, prompts, sampling, reward)
-> create_engine, start_engine, make_worker
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rollstream.agent.base import AgentResources, TurnLimits
from rollstream.agent.chat_agent import ChatAgent
from rollstream.agent.images import ImageReader
from rollstream.agent.interactions import Interactions, load_interactions
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import AgentLoops, LoopEntry, load_agent_loops
from rollstream.agent.single_turn import SingleTurnAgent
from rollstream.agent.tools.session import ToolLimits
from rollstream.agent.tools.toolbox import ToolBox, load_toolbox
from rollstream.chat.images import require_pillow
from rollstream.chat.parsers.registry import get_parser
from rollstream.chat.processor import load_processor
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.chat.tool_schema import load_tool_schemas, with_row_tools
from rollstream.config.settings import RewardSettings, Settings
from rollstream.data.mixed import chosen_data_sources, read_sources, source_limits, source_rewards
from rollstream.engine.base import Engine
from rollstream.engine.checks import check_capabilities
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.launch.plan import OWN_KEYS, LaunchRequest, refuse_secrets
from rollstream.engine.load import RequestMeter
from rollstream.engine.registry import (
    check_engine_config,
    create_engine,
    engine_kind,
    is_launched,
)
from rollstream.errors import ConfigError
from rollstream.gateway.agents import RecordedAgent, gateway_options, merged_options
from rollstream.gateway.command_agent import CommandAgent
from rollstream.gateway.function_agent import FunctionAgent
from rollstream.reward.base import FunctionReward
from rollstream.reward.custom import load_reward
from rollstream.reward.processes import ProcessReward
from rollstream.reward.rules import RuleReward
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.group_reward import GroupReward, Judge, score_group
from rollstream.rollout.ray_cluster import joins_cluster
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker
from rollstream.sampling import sampling_changes
from rollstream.trajectory import PromptRow, SamplingParams
from rollstream.user_calls import in_daemon_thread
from rollstream.user_code import source_digest

logger = logging.getLogger(__name__)

_IN_FLIGHT = 256
"""Rollouts in flight where nothing says how many: what one server of a model with some billion parameters takes."""

_STAND_INS = dict.fromkeys(("single_turn_agent", "tool_agent"), LoopEntry(ChatAgent))
"""With an engine that speaks messages; it asks once, or over turns, by whether there are tools."""

_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"


Reward = FunctionReward | ProcessReward | RuleReward
"""That a configuration can ask for."""


@dataclass(slots=True)
class Agents:
    """The agent loops of a run, and what they work with."""

    loops: AgentLoops
    tools: ToolBox
    interactions: Interactions

    def check(
        self, names: set[str], tokenizer: ChatTokenizer | None, *, show_tools: bool, images: bool
    ) -> None:
        """Refuses loops that cannot work.

        Args:
            names: of the loops that rows use.
            tokenizer: its template has to show the tools; None with an engine that speaks messages.
            show_tools: whether it is asked to.
            images: whether rows have images.

        Raises:
            ConfigError: naming what to change.
        """
        template = None if tokenizer is None else TurnTemplate(tokenizer)
        if template is not None and show_tools:
            for schema in self.tools.schemas:
                if not template.shows_tool(schema):
                    raise ConfigError(
                        f"the chat template does not tell the model of tool {schema['function']['name']!r}: give "
                        f"another ({_MODEL}.custom_chat_template), or describe the tools in the prompts and set "
                        f"{_ROLLOUT}.multi_turn.show_tools=false"
                    )
        for name in sorted(names):
            self.loops.check_options(name)
            loop = self.loops.entry(name).loop
            if template is None and not loop.speaks_messages:
                raise ConfigError(
                    f"agent loop {name!r} works with token ids, and a hosted model has none: chat_agent is its loop"
                )
            if template is not None and loop.speaks_messages:
                raise ConfigError(
                    f"agent loop {name!r} works with messages only: it is for {_ROLLOUT}.name=openai"
                )
            if images and not loop.sees_images:
                raise ConfigError(f"agent loop {name!r} shows no images, and rows have some")
            if loop.needs_tools and not self.tools.schemas and not self.interactions.by_name:
                raise ConfigError(
                    f"agent loop {name!r} has neither tools nor interactions: set tool_config_path, "
                    f"function_tool_path or interaction_config_path of {_ROLLOUT}.multi_turn"
                )
            if template is None:
                continue
            # A chat template by which the loop's turns cannot follow each other; nobody knows which a program takes.
            run = loop.prompt_tools(self.tools.schemas)
            is_program = run is None and loop is not SingleTurnAgent
            shown = self.prompt_tools(name, show_tools=show_tools) or None
            takes_answers = self.interactions.by_name and run is not None
            for calls in (False, True):
                if (is_program or (run if calls else takes_answers)) and (
                    reason := template.why_not(calls=calls, tools=shown)
                ):
                    if not is_program:
                        raise ConfigError(f"agent loop {name!r}: {reason}")
                    logger.warning("agent loop %r may have one turn only: %s", name, reason)
                    break
        if template is not None and self.tools.schemas and not template.has_tool_role:
            logger.warning(
                "the chat template has no role for tool results: the model gets them as a user's message"
            )

    def prompt_tools(self, name: str, *, show_tools: bool) -> list[dict[str, Any]] | None:
        """Schemas that a loop's prompts show; None: those of `data.tool_config_path`."""
        return self.loops.entry(name).loop.prompt_tools(self.tools.schemas if show_tools else [])

    def identity(self, names: set[str], parser_name: str) -> dict[str, str]:
        """What the loops' code and partners decide, as part of a run's identity."""
        identity = {f"agent.loops.{name}": self.loops.entry(name).digest for name in sorted(names)}
        if any(self.loops.entry(name).loop is not SingleTurnAgent for name in names):
            identity["multi_turn.interactions"] = self.interactions.digest
            identity["multi_turn.parser"] = source_digest(type(get_parser(parser_name)))
        return identity


async def load_agents(
    settings: Settings, *, loops: AgentLoops | None = None, tools: Sequence[str] | None = None
) -> Agents:
    """The agent loops and tools of a run, tool servers asked for theirs.

    Args:
        settings: of the run.
        loops: None takes those that are registered, and those of `agent_loop_config_path`.
        tools: names of those that are used; None takes all.

    Raises:
        ConfigError: what is quick to check and cannot work, engine and model path included.
    """
    agents = await in_daemon_thread(_load_agents, settings, loops, tools)
    await agents.tools.describe()
    return agents


def _load_agents(settings: Settings, loops: AgentLoops | None, tools: Sequence[str] | None) -> Agents:
    model, rollout = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout
    multi_turn = rollout.multi_turn
    if model.path is None:
        raise ConfigError(f"{_MODEL}.path is not set: name the model's folder (--model)")
    for path in (model.path, model.tokenizer_path or ""):
        if "://" in path:
            raise ConfigError(f"{_MODEL}: {path}: nothing is downloaded from addresses")
    check_engine_config(
        rollout.name,
        model_path=model.path,
        server_urls=rollout.server_urls,
        engine_kwargs=rollout.engine_kwargs,
        launch=launch_request(settings),
    )
    if loops is None:
        entries = {
            "command_agent": LoopEntry(CommandAgent),
            "function_agent": LoopEntry(FunctionAgent),
            **({} if engine_kind(rollout.name).is_token_exact else _STAND_INS),
            **load_agent_loops(rollout.agent.agent_loop_config_path),
        }
        for name, entry in entries.items():
            if issubclass(entry.loop, RecordedAgent):
                entries[name] = LoopEntry(
                    entry.loop, merged_options(gateway_options(settings), entry.options)
                )
        loops = AgentLoops(entries)
    loops.entry(rollout.agent.default_agent_loop)
    get_parser(multi_turn.format)
    toolbox = load_toolbox(
        tool_config_path=multi_turn.tool_config_path,
        function_tool_path=multi_turn.function_tool_path,
        limits=ToolLimits(
            max_parallel_calls=multi_turn.max_parallel_calls,
            max_response_length=multi_turn.max_tool_response_length,
            truncate_side=multi_turn.tool_response_truncate_side,
            timeout=multi_turn.tool_timeout,
        ),
        names=tools,
    )
    interactions = load_interactions(
        multi_turn.interaction_config_path, timeout=multi_turn.interaction_timeout
    )
    return Agents(loops, toolbox, interactions)


@dataclass(slots=True)
class RolloutSetup:
    """What rollouts are executed with. Nothing of it is started."""

    settings: Settings
    tokenizer: ChatTokenizer | None
    """None with an engine that speaks messages."""
    prompts: PromptRenderer | None
    """None without a tokenizer."""
    agents: Agents
    images: ImageReader | None
    """None when the model, or the machine, cannot read images."""
    shows_images: bool
    """Whether prompt rows have images."""
    shown_tools: list[dict[str, Any]]
    """Schemas that loops without tools show in their prompts."""
    sampling: SamplingParams
    reward: Reward

    @property
    def pad_id(self) -> int | None:
        """The tokenizer's padding token."""
        return None if self.tokenizer is None else self.tokenizer.pad_id

    def stored_tokenizer(self) -> bytes | None:
        """The tokenizer as a run directory keeps it."""
        return None if self.tokenizer is None else self.tokenizer.to_json()

    def create_engine(self, log_dir: Path) -> Engine:
        """The configured engine, not started. Raises `ConfigError`."""
        return self.interruptible(self.create_plain_engine(log_dir))

    def interruptible(self, engine: Engine) -> Engine:
        """The engine, as rollouts use it: generations live through weight updates."""
        return ContinuingEngine(engine, on_update=self.settings.actor_rollout_ref.rollout.on_weight_update)

    def create_plain_engine(self, log_dir: Path) -> Engine:
        """The configured engine by itself, not started. Raises `ConfigError`."""
        rollout = self.settings.actor_rollout_ref.rollout
        return create_engine(
            rollout.name,
            model_path=self.settings.actor_rollout_ref.model.path,
            server_urls=rollout.server_urls,
            max_model_len=rollout.max_model_len,
            engine_kwargs=rollout.engine_kwargs,
            launch=launch_request(self.settings),
            log_dir=log_dir,
            logprobs_temperature=self.logprobs_temperature,
        )

    @property
    def logprobs_temperature(self) -> float | None:
        """The run's temperature, where an engine of raw log-probs is to give those of it."""
        rollout = self.settings.actor_rollout_ref.rollout
        if rollout.logprobs_mode != "processed_logprobs" or engine_kind(rollout.name).logprobs != "raw":
            return None
        if self.sampling.temperature <= 0 or {*sampling_changes(self.sampling)} != {"temperature"}:
            return None
        return self.sampling.temperature

    async def start_engine(
        self, engine: Engine, data_sources: Iterable[str] = (), *, longest: bool = True
    ) -> None:
        """Starts an engine beside the reward (see `prepare_reward`), and checks it, see `check_engine`."""
        await asyncio.gather(engine.start(), self.prepare_reward(data_sources))
        self.check_engine(engine, longest=longest)

    @property
    def group_reward(self) -> GroupReward | None:
        """The reward, if it sees groups."""
        return None if isinstance(self.reward, RuleReward) or not self.reward.sees_group else self.reward

    @property
    def judge(self) -> Judge | None:
        """Gives the rollouts of a prompt the rewards of `group_reward`, in place; see `score_group`."""
        if self.group_reward is None or self.tokenizer is None:
            return None
        return partial(score_group, self.group_reward, decode=self.tokenizer.decode)

    async def prepare_reward(self, data_sources: Iterable[str]) -> None:
        """Imports what the rules of data sources need. Raises `ConfigError` where a package is missing."""
        if isinstance(self.reward, RuleReward):
            for source in data_sources:
                await self.reward.prepare(source)

    async def close(self) -> None:
        """Ends what tools, interactions and the reward have started."""
        self.reward.close()
        self.agents.interactions.close()
        await self.agents.tools.close()

    def check_engine(self, engine: Engine, *, longest: bool = True) -> None:
        """Refuses what a started engine cannot give (R8).

        Args:
            engine: has been started.
            longest: also refuse lengths of which the longest prompt and the longest response together do not
                fit. Without it such a response ends early, and a prompt that leaves no room fails.

        Raises:
            ConfigError: naming what to change.
        """
        rollout = self.settings.actor_rollout_ref.rollout
        if self.shows_images and not engine.capabilities.images:
            raise ConfigError(f"the prompt rows have images, but engine {rollout.name!r} takes none")
        stops = self.sampling.stop_token_ids
        if self.tokenizer is not None and self.agents.tools.schemas:
            stops = (*stops, *self.agent_resources(engine).parser_stop_ids)
        check_capabilities(
            engine.capabilities,
            replace(self.sampling, stop_token_ids=stops),
            prompt_length=rollout.prompt_length if longest else 1,
            response_length=rollout.response_length if longest else 1,
            max_model_len=rollout.max_model_len,
            logprobs_mode=rollout.logprobs_mode,
        )

    def prompt_tools(self, row: PromptRow) -> list[dict[str, Any]] | None:
        """Schemas that a row's prompt shows; None if there are none."""
        rollout = self.settings.actor_rollout_ref.rollout
        show = rollout.multi_turn.show_tools
        own = self.agents.prompt_tools(row.agent_name or rollout.agent.default_agent_loop, show_tools=show)
        if own is not None and not show:
            return own
        return with_row_tools((self.shown_tools or None) if own is None else own, row.columns.get("tools"))

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
            shown_tools=self.shown_tools,
            show_tools=rollout.multi_turn.show_tools,
            turns=TurnLimits(rollout.multi_turn.max_assistant_turns, rollout.multi_turn.max_user_turns),
            parser_name=rollout.multi_turn.format,
            interactions=self.agents.interactions,
            images=self.images if engine.capabilities.images else None,
        )

    def make_worker(self, engine: Engine, loop_names: list[str]) -> BuiltWorker:
        """A worker on a started engine.

        Raises:
            ConfigError: one of the agent loops cannot work with this engine.
        """
        settings = self.settings.generation
        availability = EngineAvailability(engine, timeout=settings.engine_timeout)
        meter = engine.meter if isinstance(engine, ContinuingEngine) else RequestMeter()
        resources = self.agent_resources(engine)
        self.agents.loops.check(loop_names, resources)
        worker = RolloutWorker(
            resources,
            sampling=self.sampling,
            seed=settings.seed,
            default_agent_loop=self.settings.actor_rollout_ref.rollout.agent.default_agent_loop,
            retry=RetryPolicy(settings.max_attempts, settings.retry_delay, settings.retry_delay_max),
            attempt_timeout=settings.attempt_timeout,
            availability=availability,
            reward=self.reward,
            loops=self.agents.loops,
            refusal_patience=settings.engine_timeout,
            limits=source_limits(read_sources(self.settings.data.sources)),
            counts=meter.counts,
        )
        continuing = engine if isinstance(engine, ContinuingEngine) else None
        return BuiltWorker(worker, meter, availability, engine=engine, continuing=continuing)


async def build_setup(
    settings: Settings,
    agents: Agents,
    *,
    shows_images: bool = False,
    reward: Reward | None = None,
    groups: bool = False,
) -> RolloutSetup:
    """Loads tokenizer, reward and what else rollouts are executed with.

    Args:
        settings: of the run.
        agents: loaded from them.
        shows_images: whether prompt rows have images.
        reward: scores the rollouts; None loads `custom_reward_function`, or takes the rules.
        groups: whether the caller has a reward that sees groups score them.

    Raises:
        ConfigError: the configuration cannot work.
    """
    setup = await in_daemon_thread(_build_setup, settings, agents, shows_images, reward)
    if setup.group_reward is not None and not groups:
        raise ConfigError(
            "custom_reward_function: it takes solution_strs, those of all rollouts of a prompt, and nothing here waits "
            "for them: it is for `rollstream generate`, `rollstream score` and trainings"
        )
    return setup


def _build_setup(
    settings: Settings, agents: Agents, shows_images: bool, reward: Reward | None
) -> RolloutSetup:
    rollout, data = settings.actor_rollout_ref.rollout, settings.data
    shown = load_tool_schemas(data.tool_config_path) if data.tool_config_path else []
    if reward is None:
        reward = load_configured_reward(reward_settings(settings))
    tokenizer = configured_tokenizer(settings)
    images = _load_images(settings, tokenizer, agents, needed=shows_images)
    return RolloutSetup(
        settings=settings,
        tokenizer=tokenizer,
        prompts=None
        if tokenizer is None
        else PromptRenderer(
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
            extra=rollout.extra_sampling,
        ),
        reward=reward,
    )


def configured_tokenizer(settings: Settings) -> ChatTokenizer | None:
    """The model's tokenizer; None, and what would need one is refused, with an engine that speaks messages."""
    model, data, rollout = settings.actor_rollout_ref.model, settings.data, settings.actor_rollout_ref.rollout
    path = model.tokenizer_path or model.path
    assert path is not None
    if engine_kind(rollout.name).is_token_exact:
        return load_tokenizer(
            path,
            custom_chat_template=model.custom_chat_template,
            template_kwargs=data.apply_chat_template_kwargs,
            trust_remote_code=model.trust_remote_code,
        )
    needing = {
        f"{_MODEL}.tokenizer_path": model.tokenizer_path,
        f"{_MODEL}.custom_chat_template": model.custom_chat_template,
        "data.apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        "data.filter_overlong_prompts": data.filter_overlong_prompts,
        f"data.truncation={data.truncation}": data.truncation != "error",
        f"{_ROLLOUT}.multi_turn.show_tools=false": not rollout.multi_turn.show_tools,
    }
    if names := [name for name, needs in needing.items() if needs]:
        raise ConfigError(
            f"{' and '.join(names)}: engine {rollout.name!r} is sent messages, and the endpoint makes the prompt"
        )
    return None


def _load_images(
    settings: Settings, tokenizer: ChatTokenizer | None, agents: Agents, *, needed: bool
) -> ImageReader | None:
    """What reads images, if rows have some, or tools and agents may."""
    default = settings.actor_rollout_ref.rollout.agent.default_agent_loop
    may_come = bool(agents.tools.schemas) or agents.loops.entry(default).loop.brings_images
    if not (needed or may_come):
        return None
    model = settings.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    assert path is not None
    if tokenizer is None:
        if needed:
            require_pillow()
        return ImageReader(None, allow_http=settings.data.fetch_images)
    try:
        processor = load_processor(path, tokenizer, trust_remote_code=model.trust_remote_code)
    except ConfigError as error:
        if needed:
            raise
        logger.warning("images of tools and agents are not shown to the model: %s", error)
        return None
    if processor is None and needed:
        raise ConfigError(
            f"the prompt rows have images, but {path!r} has no image processor (preprocessor_config.json)"
        )
    return None if processor is None else ImageReader(processor, allow_http=settings.data.fetch_images)


def reward_settings(settings: Settings) -> RewardSettings:
    """The reward that a configuration names, with those of its `data.sources`. Raises `ConfigError`."""
    sources = settings.data.sources
    return replace(
        settings.custom_reward_function,
        of_sources=source_rewards(sources),
        data_sources=chosen_data_sources(sources),
    )


def load_configured_reward(settings: RewardSettings) -> Reward:
    """The reward that settings name, or the rules. Raises `ConfigError`."""
    if settings.path is None and settings.processes and not settings.of_sources:
        raise ConfigError(
            "custom_reward_function.processes is for a function: set custom_reward_function.path"
        )
    limits = settings.timeout, settings.max_concurrency

    def load(path: str, name: str, kwargs: Mapping[str, Any]) -> FunctionReward | ProcessReward:
        if settings.processes:
            return ProcessReward(path, name, kwargs, settings.timeout, settings.processes)
        return load_reward(path, name, kwargs, *limits)

    own = None if settings.path is None else load(settings.path, settings.name, settings.reward_kwargs)
    if own is not None and not settings.of_sources:
        return own
    functions = dict[str, FunctionReward | ProcessReward]()
    for key, one in settings.of_sources.items():
        try:
            functions[key] = load(one.path, one.name, one.reward_kwargs)
        except ConfigError as error:
            raise ConfigError(f"data.sources, the reward of {key!r}: {error}") from error
    if settings.of_sources and any(one is not None and one.sees_group for one in (own, *functions.values())):
        raise ConfigError(
            "data.sources: a reward that takes solution_strs is for all rows: set custom_reward_function, and the "
            "reward of no source"
        )
    return RuleReward(*limits, functions, own)


def in_flight_limit(settings: Settings) -> int:
    """Rollouts in flight at most: `generation.max_in_flight`, or what suits the engine.

    An embedded engine that is never out of requests needs more than it works on at once: while rollouts are
    scored and stored, others have to wait for their place.
    """
    rollout = settings.actor_rollout_ref.rollout
    if settings.generation.max_in_flight is not None:
        return settings.generation.max_in_flight
    if rollout.name != "openvino":
        return _IN_FLIGHT
    from rollstream.engine.openvino import ENGINE_KWARGS

    return 2 * int(rollout.engine_kwargs.get("max_num_seqs", ENGINE_KWARGS["max_num_seqs"]))


def launch_request(settings: Settings) -> LaunchRequest | None:
    """What to launch; None when the engine needs no launch. Raises `ConfigError`."""
    model, rollout = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout
    launch = rollout.launch
    refuse_secrets(launch.args, launch.env)  # they would be in the run directory, launched or not
    if not is_launched(rollout.name, rollout.server_urls):
        chosen = {"server": launch.server != "auto", "where": launch.where != "auto"}
        chosen |= {name: bool(getattr(launch, name)) for name in ("replicas", "python", "args", "env")}
        if names := ", ".join(name for name, is_set in chosen.items() if is_set):
            raise ConfigError(f"{_ROLLOUT}.launch.* ({names}): nothing is launched for this {_ROLLOUT}.name")
        return None
    for name, value in launch.env.items():
        if isinstance(value, dict | list):
            raise ConfigError(f"{_ROLLOUT}.launch.env.{name} must be a text (it is {value!r})")
    return LaunchRequest(
        server=launch.server,
        where=launched_where(settings),
        actor_options=settings.ray_kwargs.replica,
        nodes=settings.trainer.nnodes,
        devices_per_node=settings.trainer.n_gpus_per_node,
        replicas=launch.replicas,
        arguments={key: getattr(rollout, key) for key in OWN_KEYS}
        | {
            "logprobs_mode": rollout.logprobs_mode,
            "trust_remote_code": model.trust_remote_code,
            "lora_rank": model.lora_rank,
            "sends_weights": rollout.weight_transfer != "folder",
            "tokenizer_path": model.tokenizer_path,
            "seeds": settings.generation.seed is not None,
        },
        python=launch.python,
        args=launch.args,
        env={str(name): "" if value is None else str(value) for name, value in launch.env.items()},
        startup_timeout=launch.startup_timeout,
        unhealthy_timeout=launch.unhealthy_timeout,
        max_restarts=launch.max_restarts,
        restart_delay=launch.restart_delay,
        restart_delay_max=launch.restart_delay_max,
    )


def launched_where(settings: Settings) -> Literal["local", "ray"]:
    """Where servers are launched: with workers on a cluster that is joined, on its nodes."""
    where = settings.actor_rollout_ref.rollout.launch.where
    if where != "auto":
        return where
    joins = settings.generation.executor == "ray" and joins_cluster(settings.ray_kwargs.ray_init, os.environ)
    return "ray" if joins else "local"


def launches_on_ray(settings: Settings) -> bool:
    """Whether there are servers to launch, and that on a Ray cluster."""
    rollout = settings.actor_rollout_ref.rollout
    return is_launched(rollout.name, rollout.server_urls) and launched_where(settings) == "ray"
