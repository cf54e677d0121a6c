"""A run before anything is started: its settings, rows, agent loops, reward and identity, read and checked."""

import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import orjson
from omegaconf import DictConfig, OmegaConf

import rollstream
from rollstream import plugins
from rollstream.chat.tool_schema import schema_digest, schema_json
from rollstream.config.load import to_settings, to_stored_yaml
from rollstream.config.settings import Settings
from rollstream.data.first_look import LOOKED_AT, first_look
from rollstream.data.mixed import source_rewards
from rollstream.data.prompts import (
    OTHER_SOURCES,
    KnownDataset,
    OverlongCount,
    PromptDataset,
    filter_overlong,
    load_prompts,
)
from rollstream.data.sources import RowSource
from rollstream.data.stored import STORED_RUN, pinned
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.engine.base import Engine
from rollstream.engine.ray_package import import_ray
from rollstream.engine.registry import engine_kind
from rollstream.errors import ConfigError, DataError
from rollstream.generation.export_images import RunImages
from rollstream.generation.identity import build_identity
from rollstream.generation.trackers import check_trackers
from rollstream.memory import check_memory
from rollstream.reward.custom import reward_of_function
from rollstream.reward.rules import RuleReward, find_rule
from rollstream.rollout.setup import RolloutSetup, build_setup, launches_on_ray, load_agents
from rollstream.store.export.dataproto import ImageInputs, check_packages
from rollstream.store.export.format import export_format
from rollstream.store.manifest import Manifest, new_manifest, read_manifest
from rollstream.trajectory import PromptRow
from rollstream.user_calls import in_daemon_thread

logger = logging.getLogger(__name__)

_NOT_RECORDED = {"single_turn_agent", "tool_agent", "context_agent", "chat_agent"}
"""Agent loops that call no program of `gateway`."""

_OWN_EXECUTORS = ("local", "ray")
"""The others are found by entry points (`rollstream.executors`)."""

_BYTES_A_ROLLOUT = 3
"""Its state, and what counting the states takes."""

_TRIED_ROWS = 16
"""Rows tried at start: when all of them fail, the configuration is wrong, not a row."""

_VERSIONED = ("transformers", "tokenizers", "torch", "openvino-genai", "reasoning-gym", "pyarrow")
"""Packages whose versions are worth knowing when two runs differ."""


@dataclass(slots=True)
class GenerationPlan:
    """All that is decided of a run before anything starts."""

    setup: RolloutSetup
    config: DictConfig
    """The resolved configuration tree."""
    dataset: PromptDataset
    manifest: Manifest
    """As for a new run; its identity is compared with the run directory's."""
    overlong: OverlongCount | None = None
    """What the length filter left out; None when it was not asked for."""

    @property
    def settings(self) -> Settings:
        return self.setup.settings

    @property
    def run_dir(self) -> Path:
        return Path(self.settings.trainer.default_local_dir).expanduser()

    @property
    def config_yaml(self) -> str:
        """The resolved configuration, usable as input again from any folder."""
        return to_stored_yaml(self.config)

    @property
    def total(self) -> int:
        """Rollouts of the whole run."""
        return len(self.dataset.order) * self.settings.actor_rollout_ref.rollout.n

    @property
    def loop_names(self) -> list[str]:
        """The agent loops that rows use."""
        return _loop_names(self.settings, self.dataset)

    def prompt_tools(self, row: PromptRow) -> list[dict[str, Any]] | None:
        """Schemas that a row's prompt shows; None if there are none."""
        return self.setup.prompt_tools(row)

    @property
    def scored_sources(self) -> list[str]:
        """Data sources of the rows that a rule knows."""
        if not isinstance(rules := self.setup.reward, RuleReward):
            return []
        return [
            source
            for source in self.dataset.data_sources()
            if source != OTHER_SOURCES and rules.knows(source)
        ]

    @property
    def unscored_sources(self) -> dict[str, int]:
        """Data sources that no reward rule knows, with their numbers of prompt rows."""
        if not isinstance(self.setup.reward, RuleReward):
            return {}
        known = {*self.scored_sources, OTHER_SOURCES}
        return {source: rows for source, rows in self.dataset.data_sources().items() if source not in known}

    def create_engine(self, log_dir: Path) -> Engine:
        """The run's engine, not started, to be asked what it can. Raises `ConfigError`."""
        return self.setup.create_engine(log_dir)

    def visited_keys(self) -> Iterator[str | None]:
        """Prompt keys by index; None for a row that this run does not visit."""
        visited = np.zeros(len(self.dataset), bool)
        visited[self.dataset.order] = True
        for index, key in enumerate(self.dataset.prompt_keys()):
            yield key if visited[index] else None

    def export_images(self) -> ImageInputs:
        """Reads images for a DataProto. Raises `ConfigError`."""
        model, images = self.settings.actor_rollout_ref.model, self.setup.images
        path = model.tokenizer_path or model.path
        if images is None or path is None:
            raise ConfigError("trajectories have images, and the model has no image processor")
        return RunImages(
            images.processor,
            path,
            self.dataset,
            allow_http=self.settings.data.fetch_images,
            trust_remote_code=model.trust_remote_code,
        )

    def check_rows(self) -> None:
        """Tries the first rows, and says what is probably wrong with them.

        Raises:
            ConfigError: none of them can be rendered within the limits.
        """
        indices = [int(index) for index in self.dataset.order[:LOOKED_AT]]
        for line in first_look(
            [self.dataset.row(index) for index in indices],
            self.setup.tokenizer,
            scored=not isinstance(self.setup.reward, RuleReward),
            prompts=[self.dataset.given_prompt(index) for index in indices],
        ):
            logger.warning("%s", line)
        if (prompts := self.setup.prompts) is None:
            return
        errors = []
        for index in indices[:_TRIED_ROWS]:
            row = self.dataset.row(index)
            if row.images:
                return  # reading images takes its time; what is wrong with them shows in each rollout
            tools = self.prompt_tools(row)
            try:
                if (stored := row.stored_prompt) is not None:
                    prompts.stored(stored, row.messages, prompts.tools if tools is None else tools)
                else:
                    prompts.render(row.messages, prompt_key=row.prompt_key, tools=tools)
            except DataError as error:
                errors.append(f"{self.dataset.location(index)}: {error}")
            else:
                return
        if errors:
            raise ConfigError(f"none of the first {len(errors)} prompts can be used; {errors[0]}")

    def say_unscored(self) -> None:
        """Logs which rows no reward rule knows."""
        if unscored := self.unscored_sources:
            few = ", ".join(f"{source!r} ({rows} rows)" for source, rows in [*unscored.items()][:5])
            level = logging.INFO if len(unscored) == len(self.dataset.data_sources()) else logging.WARNING
            logger.log(
                level,
                "rows of %d data sources are not scored, unless their agent loop does: %s",
                len(unscored),
                few,
            )


Say = Callable[[str | None], object]
"""Is told what a start is busy with, from any thread; see `Waits.begin`."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """Prompts and a reward that a caller in Python gives instead of files."""

    prompts: RowSource | None = None
    reward: Callable[..., Any] | None = None
    """As in `custom_reward_function.path`."""

    def check(self, settings: Settings) -> None:
        """Raises `ConfigError` where others than this process would have to know it."""
        executor = settings.generation.executor
        if self.prompts is not None and executor not in _OWN_EXECUTORS:
            raise ConfigError(f"generation.executor={executor} reads its own prompts: name files")
        if self.reward is None:
            return
        if source_rewards(settings.data.sources):
            raise ConfigError("a reward is given in memory, and others by data.sources")
        if settings.custom_reward_function.path is not None:
            raise ConfigError("a reward is given in memory, and by custom_reward_function.path")
        if executor not in _OWN_EXECUTORS or runs_in_workers(settings):
            raise ConfigError(
                f"generation.executor={executor}, generation.processes={settings.generation.processes}: a reward in "
                "memory is known in this process only: name a file by custom_reward_function.path"
            )


async def make_plan(
    config: DictConfig,
    run_dir_manifest: Manifest | None = None,
    say: Say = lambda what: None,
    given: InMemory = InMemory(),
    *,
    groups: bool = True,
) -> GenerationPlan:
    """Resolves tasks, data, tokenizer, reward and identity; slow parts run off the event loop.

    Args:
        config: the configuration tree; tasks are resolved into a copy of it.
        run_dir_manifest: of the run directory, if there is one: spares reading unchanged data files.
        say: is told what takes its time.
        given: prompts and reward that are in no file.
        groups: see `build_setup`.

    Raises:
        ConfigError: the configuration cannot work.
        DataError: a file or row cannot be used.
    """
    settings = to_settings(config)
    given.check(settings)
    if settings.generation.executor != "local":
        say(f"loading the executor {settings.generation.executor}")
    check_executor(settings)
    say("looking whether trackers can work")
    upload = bool(settings.generation.upload_artifact)
    await in_daemon_thread(partial(check_trackers, settings.trainer.logger, upload=upload))
    before = {} if run_dir_manifest is None else run_dir_manifest.config
    config = await in_daemon_thread(resolve, config, say, before)
    if (elsewhere := executor_elsewhere(settings)) is not None:
        return await elsewhere.plan(config)
    say("loading tools and agent loops")
    agents, settings = await load_agents(settings), to_settings(config)
    say("reading the prompts")
    known = None  # facts about the rows, for files that did not change
    if run_dir_manifest is not None and (facts := run_dir_manifest.dataset).get("files"):
        known = KnownDataset(
            facts["files"],
            facts["fingerprint"],
            frozenset(facts["agent_names"]),
            facts["has_images"],
            facts.get("data_sources", {}),
        )
    dataset = await in_daemon_thread(partial(load_prompts, settings.data, known=known, rows=given.prompts))
    say("loading the tokenizer")
    reward, how = None, settings.custom_reward_function
    if given.reward is not None:
        reward = reward_of_function(given.reward, how.reward_kwargs, how.timeout, how.max_concurrency)
    setup = await build_setup(
        settings, agents, shows_images=dataset.has_images(), reward=reward, groups=groups
    )
    return await in_daemon_thread(_make_plan, config, setup, dataset, say)


def resolve(
    config: DictConfig, say: Say = lambda what: None, before: Mapping[str, Any] = MappingProxyType({})
) -> DictConfig:
    """A copy of a configuration without interpolations, with the files that its tasks make, and stored rows pinned.

    Args:
        config: the configuration.
        say: see `make_plan`.
        before: that of an earlier start.
    """
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(resolved, DictConfig)
    if resolved.train_tasks:
        say("making the tasks' rows")
    resolve_tasks_into_config(resolved)
    known = [name for names in _named_files(before).values() for name in names]
    for place, names in _named_files(resolved).items():
        if any(name.startswith(STORED_RUN) for name in names):
            say("reading stored runs")
            OmegaConf.update(resolved, place, [pinned(name, known) for name in names])
    _check_exports(to_settings(resolved))
    return resolved


def _named_files(config: Mapping[str, Any] | DictConfig) -> dict[str, list[str]]:
    """The files of prompt rows that a configuration names, by the key that does."""
    data = config.get("data") or {}
    given = {"data.train_files": data.get("train_files")}
    given |= {
        f"data.sources[{at}].train_files": one.get("train_files")
        for at, one in enumerate(data.get("sources") or ())
    }
    return {key: [names] if isinstance(names, str) else list(names or ()) for key, names in given.items()}


def _check_exports(settings: Settings) -> None:
    """Raises `ConfigError` when a format of `generation.export` could not be written at the end."""
    names = settings.generation.export
    for name in names:
        export_format(name)
    if "dataproto" in names:
        check_packages()
        if not engine_kind(engine := settings.actor_rollout_ref.rollout.name).is_token_exact:
            raise ConfigError(
                f"generation.export=dataproto needs token ids, and engine {engine!r} gives none"
            )


def _make_plan(config: DictConfig, setup: RolloutSetup, dataset: PromptDataset, say: Say) -> GenerationPlan:
    settings, agents, tokenizer = setup.settings, setup.agents, setup.tokenizer
    rollout = settings.actor_rollout_ref.rollout
    show_tools = rollout.multi_turn.show_tools
    for name in sorted(dataset.agent_names()):
        try:
            agents.loops.entry(name)
        except ConfigError as error:
            raise ConfigError(f"{dataset.first_row_of(name)}: {error}") from error
    loop_names = _loop_names(settings, dataset)
    if (settings.gateway.command or settings.gateway.function) and {*loop_names} <= _NOT_RECORDED:
        logger.warning(
            "gateway.command and gateway.function are not used: the agent loop is %s; set actor_rollout_ref.rollout."
            "agent.default_agent_loop=command_agent (of a command) or function_agent",
            ", ".join(loop_names),
        )
    if loop_names == ["single_turn_agent"] and (
        rollout.multi_turn.tool_config_path or rollout.multi_turn.function_tool_path
    ):
        logger.warning(
            "the tools are not used: the agent loop is single_turn_agent; set actor_rollout_ref.rollout."
            "agent.default_agent_loop=tool_agent"
        )
    if runs_in_workers(settings) and isinstance(rules := setup.reward, RuleReward):
        for source in dataset.data_sources():
            rule = None if rules.function(source) is not None else find_rule(source)
            if rule is not None and not rule.function.__module__.startswith("rollstream."):
                raise ConfigError(
                    f"the reward of data source {source!r} (@register_reward) is known in this process only, and "
                    "rollouts run in others: set custom_reward_function.path"
                )
    overlong = None
    if settings.data.filter_overlong_prompts and (prompts := setup.prompts) is not None:
        say(f"looking for prompts of more than {rollout.prompt_length} tokens")
        overlong = filter_overlong(
            dataset,
            lambda rows: prompts.lengths(rows, setup.prompt_tools),
            rollout.prompt_length,
        )
        logger.info("left out %d of %d prompts that are too long", overlong.removed, overlong.checked)
    if (shard := settings.generation.shard_of) is not None:
        take_shard(dataset, *shard)
    total = len(dataset.order) * rollout.n
    check_memory(
        _BYTES_A_ROLLOUT * total,
        f"{len(dataset.order)} prompts and actor_rollout_ref.rollout.n={rollout.n}, {total} rollouts",
    )
    agents.check(set(loop_names), tokenizer, show_tools=show_tools, images=dataset.has_images())
    say("reading the model's files")
    identity = build_identity(
        setup,
        agents.identity(set(loop_names), rollout.multi_turn.format),
        fingerprint=dataset.fingerprint,
        rows=len(dataset),
    )
    tools = tool_schemas(setup, loop_names)
    return GenerationPlan(
        setup, config, dataset, manifest_for(config, setup, dataset, identity, tools=tools), overlong
    )


def _loop_names(settings: Settings, dataset: PromptDataset) -> list[str]:
    return sorted({settings.actor_rollout_ref.rollout.agent.default_agent_loop, *dataset.agent_names()})


def tool_schemas(setup: RolloutSetup, loop_names: Iterable[str]) -> dict[str, Any]:
    """The schemas of the tools that prompts of these agent loops may show, by digest."""
    show_tools = setup.settings.actor_rollout_ref.rollout.multi_turn.show_tools
    shown = [setup.agents.prompt_tools(name, show_tools=show_tools) or [] for name in loop_names]
    schemas = [*setup.shown_tools, *(schema for each in shown for schema in each)]
    return {schema_digest(schema): orjson.loads(schema_json(schema)) for schema in schemas}


def manifest_for(
    config: DictConfig,
    setup: RolloutSetup,
    dataset: PromptDataset | None,
    identity: dict[str, Any],
    *,
    packages: Sequence[str] = (),
    tools: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a new run.

    Args:
        config: the resolved configuration.
        setup: of the run.
        dataset: of the run; None where rows come later.
        identity: see `build_identity`.
        packages: further ones whose versions are worth knowing.
        tools: schemas of the tools that prompts may show, by digest.
    """
    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    versions = {"rollstream": rollstream.__version__}
    for name in (*_VERSIONED, *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {}
    if dataset is not None:
        facts = {
            "files": dataset.file_digests,
            "fingerprint": dataset.fingerprint,
            "agent_names": sorted(dataset.agent_names()),
            "has_images": dataset.has_images(),
            "data_sources": dataset.data_sources(),
        }
    return new_manifest(
        n=setup.settings.actor_rollout_ref.rollout.n,
        identity=identity,
        dataset=facts,
        versions=versions,
        config={str(key): value for key, value in tree.items()},
        tools=tools,
        pad_token_id=setup.pad_id,
        reward=setup.reward.source_digest,
    )


def take_shard(dataset: PromptDataset, number: int, count: int) -> None:
    """Leaves every `count`-th row of those that the whole run would visit: shards of about equal work."""
    if len(dataset.order) < count:
        raise ConfigError(
            f"generation.shard={number}/{count}: there are only {len(dataset.order)} prompt rows for {count} "
            "shards"
        )
    dataset.restrict(dataset.order[number::count])


def peek_manifest(config: DictConfig) -> Manifest | None:
    """The manifest of the configured run directory, if there is one. Raises `RunDirectoryError`."""
    return read_manifest(Path(to_settings(config).trainer.default_local_dir).expanduser())


class ExecutorElsewhere(Protocol):
    """An executor with rows and agent loops of its own kind (entry point `rollstream.executors`)."""

    def check_installed(self) -> None:
        """Raises `ConfigError` with the command that installs what is missing. Takes milliseconds."""
        ...

    async def plan(self, config: DictConfig) -> GenerationPlan:
        """As `make_plan`, from a resolved configuration."""
        ...

    async def start(self, start: Any) -> Any:
        """As `execution.start_execution`, from its `Start`."""
        ...


def executor_elsewhere(settings: Settings) -> ExecutorElsewhere | None:
    """The executor of a run, if it lives above this room."""
    name = settings.generation.executor
    if name in _OWN_EXECUTORS:
        return None
    executor: ExecutorElsewhere = plugins.load("rollstream.executors", name)()
    return executor


def check_executor(settings: Settings) -> None:
    """Refuses an executor that cannot work, before anything is made on disk.

    Raises:
        ConfigError: naming what to change, or the command that installs what is missing.
    """
    generation, rollout = settings.generation, settings.actor_rollout_ref.rollout
    engine = rollout.name
    if generation.processes > 1 and generation.executor != "local":
        raise ConfigError(
            f"generation.processes={generation.processes} is for generation.executor=local; with "
            f"{generation.executor} set actor_rollout_ref.rollout.agent.num_workers"
        )
    if generation.processes > 1 and engine_kind(engine).is_embedded and not rollout.server_urls:
        raise ConfigError(
            f"generation.processes={generation.processes}: engine {engine!r} runs in the process that uses it and "
            "takes all cores; start it as a server (rollstream serve), or leave processes at 1"
        )
    if generation.executor == "ray" or launches_on_ray(settings):
        import_ray()
    if (elsewhere := executor_elsewhere(settings)) is not None:
        if generation.keep_turns:
            raise ConfigError(
                f"generation.keep_turns: generation.executor={generation.executor} keeps no turns"
            )
        elsewhere.check_installed()


def runs_in_workers(settings: Settings) -> bool:
    """Whether rollouts run in worker processes, here or on Ray."""
    return settings.generation.executor == "ray" or settings.generation.processes > 1
