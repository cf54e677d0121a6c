"""From a configuration to everything a run is made of, short of the engine and the run directory's lock."""

import hashlib
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from omegaconf import DictConfig, OmegaConf

import rollstream
from rollstream.agent.base import AgentResources, TurnLimits
from rollstream.agent.images import ImageReader
from rollstream.agent.prompt import PromptRenderer
from rollstream.chat.processor import load_processor
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.config.load import to_settings, to_yaml
from rollstream.config.settings import RewardSettings, Settings
from rollstream.data.overlong import OverlongCount, filter_overlong
from rollstream.data.prompts import KnownDataset, PromptDataset, load_prompts
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.data.tool_schemas import load_tool_schemas
from rollstream.engine.base import Engine
from rollstream.engine.interruptible import InterruptibleEngine
from rollstream.engine.registry import (
    check_capabilities,
    create_engine,
    data_deciding_kwargs,
)
from rollstream.errors import ConfigError, DataError
from rollstream.generation.agents import Agents, load_agents
from rollstream.generation.identity import build_identity
from rollstream.generation.replicas import launch_request
from rollstream.generation.stopping import in_daemon_thread
from rollstream.reward.base import FunctionReward
from rollstream.reward.custom import load_reward
from rollstream.reward.rules import RuleReward
from rollstream.store.manifest import Manifest, new_manifest, read_manifest
from rollstream.trajectory import PromptRow, SamplingParams

logger = logging.getLogger(__name__)

_TRIED_ROWS = 16
"""Rows tried at start: when all of them fail, the configuration is wrong, not a row."""

_VERSIONED = ("transformers", "tokenizers", "torch", "openvino-genai", "reasoning-gym", "pyarrow")
"""Packages whose versions are worth knowing when two runs differ."""


@dataclass(slots=True)
class Prepared:
    """A run, resolved and checked, with nothing started."""

    config: DictConfig
    settings: Settings
    tokenizer: ChatTokenizer
    prompts: PromptRenderer
    agents: Agents
    images: ImageReader | None
    """None when the model, or the machine, cannot read images."""
    dataset: PromptDataset
    sampling: SamplingParams
    reward: FunctionReward | RuleReward
    overlong: OverlongCount | None
    """What the length filter left out; None when it was not asked for."""
    manifest: Manifest
    """As for a new run; its identity is compared with the run directory's."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(self.settings.trainer.default_local_dir).expanduser()

    def loop_name(self, row: PromptRow) -> str:
        """The agent loop of a row."""
        return row.agent_name or self.settings.actor_rollout_ref.rollout.agent.default_agent_loop

    def prompt_tools(self, row: PromptRow) -> list[dict[str, Any]] | None:
        """Schemas that a row's prompt shows; None: those of `data.tool_config_path`."""
        show = self.settings.actor_rollout_ref.rollout.multi_turn.show_tools
        return self.agents.prompt_tools(self.loop_name(row), show_tools=show)

    @property
    def loop_names(self) -> list[str]:
        """The agent loops that rows use."""
        default = self.settings.actor_rollout_ref.rollout.agent.default_agent_loop
        return sorted({default, *self.dataset.agent_names()})

    @property
    def total(self) -> int:
        """Rollouts of the whole run."""
        return len(self.dataset.order) * self.settings.actor_rollout_ref.rollout.n

    @property
    def config_yaml(self) -> str:
        """The resolved configuration, usable as input again."""
        return to_yaml(self.config)

    def create_engine(self, log_dir: Path) -> Engine:
        """The configured engine, not started. Raises `ConfigError`."""
        model, rollout = self.settings.actor_rollout_ref.model, self.settings.actor_rollout_ref.rollout
        engine = create_engine(
            rollout.name,
            model_path=model.path,
            server_urls=rollout.server_urls,
            max_model_len=rollout.max_model_len,
            engine_kwargs=rollout.engine_kwargs,
            launch=launch_request(self.settings),
            log_dir=log_dir,
        )
        return InterruptibleEngine(engine, on_update=rollout.on_weight_update)

    def check_engine(self, engine: Engine) -> None:
        """Refuses what a started engine cannot give (R8). Raises `ConfigError`."""
        rollout = self.settings.actor_rollout_ref.rollout
        if self.dataset.has_images() and not engine.capabilities.images:
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

    async def prepare_reward(self) -> None:
        """Imports what the first row's rule needs, so that what is missing shows at start.

        Raises:
            ConfigError: a package is missing.
        """
        if isinstance(self.reward, RuleReward):
            first = self.dataset.row(int(self.dataset.order[0]))
            if not await self.reward.prepare(first.data_source):
                logger.info("no reward for data source %r: rollouts are not scored", first.data_source)

    def visited_keys(self) -> Iterator[str | None]:
        """Prompt keys by index; None for a row that this run does not visit."""
        visited = np.zeros(len(self.dataset), bool)
        visited[self.dataset.order] = True
        for index, key in enumerate(self.dataset.prompt_keys()):
            yield key if visited[index] else None

    def check_rows(self) -> None:
        """Tries the first rows, so that what is wrong with all of them shows before anything is generated.

        Raises:
            ConfigError: none of them can be rendered within the limits.
        """
        rows = [int(index) for index in self.dataset.order[:_TRIED_ROWS]]
        errors = []
        for index in rows:
            row = self.dataset.row(index)
            if row.images:
                return  # reading images takes its time; what is wrong with them shows in each rollout
            try:
                self.prompts.render(row.messages, prompt_key=row.prompt_key, tools=self.prompt_tools(row))
            except DataError as error:
                errors.append(f"{self.dataset.location(index)}: {error}")
        if errors and len(errors) == len(rows):
            raise ConfigError(f"none of the first {len(rows)} prompts can be used; {errors[0]}")

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


async def prepare(config: DictConfig, run_dir_manifest: Manifest | None = None) -> Prepared:
    """Resolves tasks, data, tokenizer, reward and identity; slow parts run off the event loop.

    Args:
        config: the configuration tree; tasks are resolved into it.
        run_dir_manifest: of the run directory, if there is one: spares reading unchanged data files.

    Raises:
        ConfigError: the configuration cannot work.
        DataError: a file or row cannot be used.
    """
    agents = await in_daemon_thread(load_agents, config)
    await agents.tools.describe()
    return await in_daemon_thread(_prepare, config, run_dir_manifest, agents)


def _prepare(config: DictConfig, known_manifest: Manifest | None, agents: Agents) -> Prepared:
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(resolved, DictConfig)
    resolve_tasks_into_config(resolved)
    settings = to_settings(resolved)
    model, rollout, data = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout, settings.data

    shown = load_tool_schemas(data.tool_config_path) if data.tool_config_path else []
    known = None
    if known_manifest is not None and known_manifest.dataset.get("files"):
        facts = known_manifest.dataset
        known = KnownDataset(
            facts["files"],
            facts["fingerprint"],
            frozenset(facts["agent_names"]),
            facts["has_images"],
        )
    dataset = load_prompts(data, known=known)
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
    images = _load_images(settings, tokenizer, dataset, agents)
    prompts = PromptRenderer(
        tokenizer,
        prompt_length=rollout.prompt_length,
        truncation=data.truncation,
        tool_schemas=shown,
        images=images,
    )

    def tools_of(row: PromptRow) -> list[dict[str, Any]] | None:
        name = row.agent_name or rollout.agent.default_agent_loop
        return agents.prompt_tools(name, show_tools=rollout.multi_turn.show_tools)

    overlong = None
    if data.filter_overlong_prompts:
        overlong = filter_overlong(
            dataset,
            lambda rows: [prompts.length(row.messages, row.images, tools=tools_of(row)) for row in rows],
            rollout.prompt_length,
        )
        logger.info(
            "left out %d of %d prompts longer than %d tokens",
            *(overlong.removed, overlong.checked, rollout.prompt_length),
        )
    loop_names = {rollout.agent.default_agent_loop, *dataset.agent_names()}
    for name in sorted(dataset.agent_names()):
        try:
            agents.loops.entry(name)
        except ConfigError as error:
            raise ConfigError(f"{dataset.first_row_of(name)}: {error}") from error
    agents.check(
        loop_names,
        tokenizer,
        show_tools=rollout.multi_turn.show_tools,
        images=dataset.has_images(),
    )
    identity = build_identity(
        settings,
        tokenizer_digest=tokenizer.digest(),
        agents=agents.identity(loop_names, rollout.multi_turn.format),
        images_digest=images.processor.digest() if images and dataset.has_images() else None,
        tools_digest=agents.tools.digest if agents.tools.schemas else None,
        shown_tools_digest=_digest(shown) if shown else None,
        reward_digest=reward.source_digest,
        dataset_fingerprint=dataset.fingerprint,
        dataset_rows=len(dataset),
        engine_settings=data_deciding_kwargs(rollout.name, rollout.engine_kwargs),
    )
    resolved_config = OmegaConf.to_container(resolved, resolve=True)
    assert isinstance(resolved_config, dict)
    return Prepared(
        config=resolved,
        settings=settings,
        tokenizer=tokenizer,
        prompts=prompts,
        agents=agents,
        images=images,
        dataset=dataset,
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
        overlong=overlong,
        manifest=new_manifest(
            n=rollout.n,
            identity=identity,
            dataset={
                "files": dataset.file_digests,
                "fingerprint": dataset.fingerprint,
                "agent_names": sorted(dataset.agent_names()),
                "has_images": dataset.has_images(),
            },
            versions=_versions(),
            config={str(key): value for key, value in resolved_config.items()},
        ),
    )


def _load_images(
    settings: Settings, tokenizer: ChatTokenizer, dataset: PromptDataset, agents: Agents
) -> ImageReader | None:
    """What reads images, if rows have some or tools may return some."""
    needed = dataset.has_images()
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


def peek_manifest(config: DictConfig) -> Manifest | None:
    """The manifest of the configured run directory, if there is one. Raises `RunDirectoryError`."""
    return read_manifest(Path(to_settings(config).trainer.default_local_dir).expanduser())


def _versions() -> dict[str, str]:
    versions = {"rollstream": rollstream.__version__}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _digest(value: list[Mapping[str, Any]] | list[dict[str, Any]]) -> str:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
