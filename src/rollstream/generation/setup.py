"""From a configuration to everything a run is made of, short of the engine and the run directory's lock."""

import hashlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson
from omegaconf import DictConfig, OmegaConf

import rollstream
from rollstream import plugins
from rollstream.chat.parsers.registry import get_parser
from rollstream.chat.tool_schema import schema_digest, schema_json, with_row_tools
from rollstream.config.load import to_settings, to_stored_yaml
from rollstream.config.settings import RewardSettings, Settings
from rollstream.daemon_threads import in_daemon_thread
from rollstream.data.first_look import LOOKED_AT, first_look
from rollstream.data.prompts import (
    OTHER_SOURCES,
    KnownDataset,
    OverlongCount,
    PromptDataset,
    filter_overlong,
    load_prompts,
)
from rollstream.data.sources import RowSource
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.engine.ray_package import import_ray
from rollstream.engine.registry import data_deciding_kwargs, is_launched
from rollstream.errors import ConfigError, DataError
from rollstream.generation.export_images import RunImages
from rollstream.generation.exports import check_exports
from rollstream.generation.identity import build_identity
from rollstream.generation.tracking import check_trackers
from rollstream.memory import check_memory
from rollstream.reward.base import FunctionReward
from rollstream.reward.rules import RuleReward, find_rule
from rollstream.rollout.setup import (
    Agents,
    RolloutSetup,
    build_setup,
    has_tokenizer,
    launched_where,
    load_agents,
)
from rollstream.store.export.dataproto import ImageInputs
from rollstream.store.manifest import LOOP_IDENTITY, Manifest, new_manifest, read_manifest
from rollstream.trajectory import PromptRow

if TYPE_CHECKING:
    from rollstream.generation.execution import Execution, Start

logger = logging.getLogger(__name__)

_NOT_RECORDED = {"single_turn_agent", "tool_agent", "context_agent"}
"""Agent loops that call no program of `gateway`."""

EMBEDDED_ENGINES = ("hf", "openvino")
"""Engines that run in the process that uses them."""

_OWN_EXECUTORS = ("local", "ray")
"""The others are found by entry points (`rollstream.executors`)."""


_BYTES_A_ROLLOUT = 3
"""Its state, and what counting the states takes."""
_TRIED_ROWS = 16
"""Rows tried at start: when all of them fail, the configuration is wrong, not a row."""

_VERSIONED = ("transformers", "tokenizers", "torch", "openvino-genai", "reasoning-gym", "pyarrow")
"""Packages whose versions are worth knowing when two runs differ."""


@dataclass(slots=True)
class Prepared(RolloutSetup):
    """A run, resolved and checked, with nothing started."""

    config: DictConfig
    """The resolved configuration tree."""
    dataset: PromptDataset
    overlong: OverlongCount | None = None
    """What the length filter left out; None when it was not asked for."""
    manifest: Manifest = field(init=False)
    """As for a new run; its identity is compared with the run directory's."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(self.settings.trainer.default_local_dir).expanduser()

    def loop_name(self, row: PromptRow) -> str:
        """The agent loop of a row."""
        return row.agent_name or self.settings.actor_rollout_ref.rollout.agent.default_agent_loop

    def prompt_tools(self, row: PromptRow) -> list[dict[str, Any]] | None:
        """Schemas that a row's prompt shows; None if there are none."""
        show = self.settings.actor_rollout_ref.rollout.multi_turn.show_tools
        own = self.agents.prompt_tools(self.loop_name(row), show_tools=show)
        if own is not None and not show:
            return own
        return with_row_tools(self.prompts.tools if own is None else own, row.columns.get("tools"))

    @property
    def loop_names(self) -> list[str]:
        """The agent loops that rows use."""
        default = self.settings.actor_rollout_ref.rollout.agent.default_agent_loop
        return sorted({default, *self.dataset.agent_names()})

    @property
    def first_data_source(self) -> str:
        """Of the first row that is visited."""
        return self.dataset.row(int(self.dataset.order[0])).data_source

    @property
    def total(self) -> int:
        """Rollouts of the whole run."""
        return len(self.dataset.order) * self.settings.actor_rollout_ref.rollout.n

    def export_images(self) -> ImageInputs:
        """What reads images for a DataProto. Raises `ConfigError`."""
        settings, images = self.settings, self.images
        model = settings.actor_rollout_ref.model
        path = model.tokenizer_path or model.path
        if images is None or path is None:
            raise ConfigError("trajectories have images, and the model has no image processor")
        return RunImages(
            *(images.processor, path, self.dataset),
            allow_http=settings.data.fetch_images,
            trust_remote_code=model.trust_remote_code,
        )

    @property
    def config_yaml(self) -> str:
        """The resolved configuration, usable as input again from any folder."""
        return to_stored_yaml(self.config)

    async def prepare_reward(self) -> None:
        """Imports what the rules of the rows need, and says which rows no rule knows.

        Raises:
            ConfigError: a package is missing.
        """
        sources, unscored = self.dataset.data_sources(), self.unscored_sources
        for source in sources.keys() - unscored.keys() - {OTHER_SOURCES}:
            await self.prepare_reward_for(source)
        if unscored:
            rows, none_is_scored = sum(unscored.values()), len(unscored) == len(sources)
            logger.log(
                logging.INFO if none_is_scored else logging.WARNING,
                "%d of %d rows of the files are not scored, unless their agent loop does: no reward for %s",
                *(rows, sum(sources.values()), describe_sources(unscored)),
            )

    @property
    def unscored_sources(self) -> dict[str, int]:
        """Data sources that no reward rule knows, with their numbers of prompt rows."""
        if not isinstance(self.reward, RuleReward):
            return {}
        sources = self.dataset.data_sources()
        known = {source: rows for source, rows in sources.items() if source != OTHER_SOURCES}
        return {source: rows for source, rows in known.items() if find_rule(source) is None}

    def identity_files(self) -> dict[str, str]:
        """What to name for keys of the identity that are digests: the setting with its file."""
        model, data = self.settings.actor_rollout_ref.model, self.settings.data
        multi_turn = self.settings.actor_rollout_ref.rollout.multi_turn
        tools = multi_turn.tool_config_path or multi_turn.function_tool_path
        files = {
            "model.digest": f"the model {model.path}",
            "model.tokenizer": f"the tokenizer or chat template of {model.tokenizer_path or model.path}",
            "model.image_processor": f"the image processor of {model.tokenizer_path or model.path}",
            "reward": f"the reward function {self.settings.custom_reward_function.path or '(none)'}",
            "tools": f"the tool file {tools}",
            "data.tool_config": f"data.tool_config_path {data.tool_config_path}",
            "multi_turn.interactions": f"the interaction file {multi_turn.interaction_config_path}",
            "multi_turn.parser": f"the tool parser {multi_turn.format}",
        }
        for name in self.loop_names:
            loop = self.agents.loops.entry(name).loop
            own = loop.__module__.startswith("rollstream.")
            file = None if own else sys.modules[loop.__module__].__dict__.get("__file__")
            files[f"{LOOP_IDENTITY}{name}"] = (
                f"agent loop {name}{f' ({file})' if file else ''}: it, or its options,"
            )
        return files

    def visited_keys(self) -> Iterator[str | None]:
        """Prompt keys by index; None for a row that this run does not visit."""
        visited = np.zeros(len(self.dataset), bool)
        visited[self.dataset.order] = True
        for index, key in enumerate(self.dataset.prompt_keys()):
            yield key if visited[index] else None

    def look_at_rows(self) -> None:
        """Says what is probably wrong with the first rows."""
        indices = [int(index) for index in self.dataset.order[:LOOKED_AT]]
        lines = first_look(
            [self.dataset.row(index) for index in indices],
            self.tokenizer,
            scored=not isinstance(self.reward, RuleReward),
            prompts=[self.dataset.given_prompt(index) for index in indices],
        )
        for line in lines:
            logger.warning("%s", line)

    def number_truths(self) -> tuple[int, int]:
        """In how many of the first rows the ground truth is a number, which equals no text; of how many."""
        rows = [self.dataset.row(int(index)) for index in self.dataset.order[:LOOKED_AT]]
        return sum(type(row.ground_truth) in (int, float) for row in rows), len(rows)

    def check_rows(self) -> None:
        """Tries the first rows, so that what is wrong with all of them shows before anything is generated.

        Raises:
            ConfigError: none of them can be rendered within the limits.
        """
        self.look_at_rows()
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


Say = Callable[[str | None], object]
"""Is told what a start is busy with, from any thread; see `Waits.begin`."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """What a caller in Python gives instead of files."""

    prompts: RowSource | None = None
    reward: Callable[[RewardSettings], FunctionReward] | None = None
    """Makes the reward, by the settings that are left to configure."""

    def check(self, settings: Settings) -> None:
        """Raises `ConfigError` where others than this process would have to know it."""
        executor = settings.generation.executor
        if self.prompts is not None and executor not in _OWN_EXECUTORS:
            raise ConfigError(f"generation.executor={executor} reads its own prompts: name files")
        if self.reward is None:
            return
        if settings.custom_reward_function.path is not None:
            raise ConfigError("a reward is given in memory, so custom_reward_function.path stays unset")
        if executor not in _OWN_EXECUTORS or runs_in_workers(settings):
            raise ConfigError(
                "a reward given in memory is known in this process only, and generation.executor="
                f"{executor} with generation.processes={settings.generation.processes} scores in others: name a "
                "file by custom_reward_function.path"
            )


async def prepare(
    config: DictConfig,
    run_dir_manifest: Manifest | None = None,
    say: Say = lambda what: None,
    given: InMemory = InMemory(),
) -> Prepared:
    """Resolves tasks, data, tokenizer, reward and identity; slow parts run off the event loop.

    Args:
        config: the configuration tree; tasks are resolved into it.
        run_dir_manifest: of the run directory, if there is one: spares reading unchanged data files.
        say: is told what takes its time.
        given: prompts and reward that are in no file.

    Raises:
        ConfigError: the configuration cannot work.
        DataError: a file or row cannot be used.
    """
    settings = to_settings(config)
    given.check(settings)
    check_executor(settings)
    upload = bool(settings.generation.upload_artifact)
    say("looking whether trackers can work")
    await in_daemon_thread(partial(check_trackers, settings.trainer.logger, upload=upload))
    if settings.generation.executor != "local":
        say(f"loading the executor {settings.generation.executor}")
    if (elsewhere := executor_elsewhere(settings)) is not None:
        return await elsewhere.prepare(config)
    say("loading tools and agent loops")
    agents = await in_daemon_thread(load_agents, settings)
    await agents.tools.describe()
    return await in_daemon_thread(_prepare, config, run_dir_manifest, agents, say, given)


def _prepare(
    config: DictConfig, known_manifest: Manifest | None, agents: Agents, say: Say, given: InMemory
) -> Prepared:
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(resolved, DictConfig)
    if resolved.train_tasks:
        say("making the tasks' rows")
    resolve_tasks_into_config(resolved)
    settings = to_settings(resolved)
    check_exports(settings.generation.export)
    rollout, data = settings.actor_rollout_ref.rollout, settings.data

    known = None
    if known_manifest is not None and (facts := known_manifest.dataset).get("files"):
        known = KnownDataset(
            facts["files"],
            facts["fingerprint"],
            frozenset(facts["agent_names"]),
            facts["has_images"],
            facts.get("data_sources", {}),
        )
    say("reading the prompts")
    dataset = load_prompts(data, known=known, rows=given.prompts)
    has_ids = has_tokenizer(settings)
    check_exports(settings.generation.export, has_ids=has_ids)
    if has_ids:
        say("loading the tokenizer")
    reward = None if given.reward is None else given.reward(settings.custom_reward_function)
    setup = build_setup(settings, agents, shows_images=dataset.has_images(), reward=reward)
    prepared = Prepared(
        **{one.name: getattr(setup, one.name) for one in fields(setup)}, config=resolved, dataset=dataset
    )
    loop_names, tokenizer = prepared.loop_names, setup.tokenizer
    for name in sorted(dataset.agent_names()):
        try:
            agents.loops.entry(name)
        except ConfigError as error:
            raise ConfigError(f"{dataset.first_row_of(name)}: {error}") from error
    if (settings.gateway.command or settings.gateway.function) and {*loop_names} <= _NOT_RECORDED:
        logger.warning(
            "gateway.command and gateway.function are not used: the agent loop is %s; want "
            "actor_rollout_ref.rollout.agent.default_agent_loop=command_agent or function_agent?",
            ", ".join(loop_names),
        )
    if runs_in_workers(settings):
        _check_known_to_workers(prepared)
    if data.filter_overlong_prompts:
        say(f"looking for prompts of more than {rollout.prompt_length} tokens")
        prepared.overlong = filter_overlong(
            dataset,
            lambda rows: setup.prompts.lengths(rows, prepared.prompt_tools),
            rollout.prompt_length,
        )
        logger.info(
            "left out %d of %d prompts longer than %d tokens",
            *(prepared.overlong.removed, prepared.overlong.checked, rollout.prompt_length),
        )
    if (shard := settings.generation.shard_of) is not None:
        take_shard(dataset, *shard)
    said = (
        f"{len(dataset.order)} prompts and actor_rollout_ref.rollout.n={rollout.n}, {prepared.total} rollouts"
    )
    check_memory(_BYTES_A_ROLLOUT * prepared.total, said)
    agents.check(
        set(loop_names), tokenizer, show_tools=rollout.multi_turn.show_tools, images=dataset.has_images()
    )
    say("reading the model's files")
    identity = identity_of(setup, loop_names, fingerprint=dataset.fingerprint, rows=len(dataset))
    shown = [agents.prompt_tools(name, show_tools=rollout.multi_turn.show_tools) for name in loop_names]
    schemas = [*setup.shown_tools, *(one for each in shown for one in each or ())]
    tools = {schema_digest(one): orjson.loads(schema_json(one)) for one in schemas}
    prepared.manifest = manifest_for(
        resolved, dataset, identity, n=rollout.n, tools=tools, pad_token_id=tokenizer.pad_id
    )
    return prepared


def identity_of(
    setup: RolloutSetup, loop_names: Sequence[str], *, fingerprint: str, rows: int
) -> dict[str, Any]:
    """What decides the data of a run: its setup, the agent loops that are used, and its prompt rows."""
    settings, agents = setup.settings, setup.agents
    rollout = settings.actor_rollout_ref.rollout
    return build_identity(
        settings,
        tokenizer_digest=setup.tokenizer.digest() if has_tokenizer(settings) else None,
        agents=agents.identity(set(loop_names), rollout.multi_turn.format),
        images_digest=setup.images.processor.digest() if setup.images and setup.shows_images else None,
        tools_digest=agents.tools.digest if agents.tools.schemas else None,
        shown_tools_digest=_digest(setup.shown_tools) if setup.shown_tools else None,
        reward_digest=setup.reward.source_digest,
        dataset_fingerprint=fingerprint,
        dataset_rows=rows,
        engine_settings=data_deciding_kwargs(rollout.name, rollout.engine_kwargs),
    )


def manifest_for(
    resolved: DictConfig,
    dataset: PromptDataset,
    identity: dict[str, Any],
    *,
    n: int,
    packages: Sequence[str] = (),
    tools: Mapping[str, Any] | None = None,
    pad_token_id: int | None = None,
) -> Manifest:
    """The manifest of a new run.

    Args:
        resolved: the configuration.
        dataset: of the run.
        identity: see `identity_of`.
        n: rollouts of a prompt row.
        packages: further ones whose versions are worth knowing.
        tools: schemas of the tools that prompts may show, by digest.
        pad_token_id: of the run's tokenizer.
    """
    config = OmegaConf.to_container(resolved, resolve=True)
    assert isinstance(config, dict)
    return new_manifest(
        n=n,
        identity=identity,
        dataset={
            "files": dataset.file_digests,
            "fingerprint": dataset.fingerprint,
            "agent_names": sorted(dataset.agent_names()),
            "has_images": dataset.has_images(),
            "data_sources": dataset.data_sources(),
        },
        versions=_versions((*_VERSIONED, *packages)),
        config={str(key): value for key, value in config.items()},
        tools=tools,
        pad_token_id=pad_token_id,
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


def _versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {"rollstream": rollstream.__version__}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _digest(value: list[Any]) -> str:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def describe_sources(rows: Mapping[str, int], shown: int = 5) -> str:
    """Data sources with their numbers of rows, the largest first, for people."""
    largest = sorted(rows.items(), key=lambda item: -item[1])
    more = f" and {len(largest) - shown} more" if len(largest) > shown else ""
    return ", ".join(f"{source!r} ({count} rows)" for source, count in largest[:shown]) + more


class ExecutorElsewhere(Protocol):
    """An executor with rows and agent loops of its own kind."""

    def check_installed(self) -> None:
        """Raises `ConfigError` with the command that installs what is missing. Takes milliseconds."""
        ...

    async def prepare(self, config: DictConfig) -> "Prepared":
        """As `prepare`."""
        ...

    async def start(self, start: "Start") -> "Execution":
        """As `execution.start_execution`."""
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
    _check_processes(settings)
    if settings.generation.executor == "ray" or launches_on_ray(settings):
        import_ray()
    if (elsewhere := executor_elsewhere(settings)) is not None:
        elsewhere.check_installed()


def _check_processes(settings: Settings) -> None:
    """Refuses `generation.processes` where it cannot work. Raises `ConfigError`."""
    generation, engine = settings.generation, settings.actor_rollout_ref.rollout.name
    if generation.processes == 1:
        return
    if generation.executor != "local":
        raise ConfigError(
            f"generation.processes={generation.processes} is for generation.executor=local; with "
            f"{generation.executor} set actor_rollout_ref.rollout.agent.num_workers"
        )
    if engine in EMBEDDED_ENGINES:
        raise ConfigError(
            f"generation.processes={generation.processes}: engine {engine!r} runs in the process that uses it "
            "and takes all cores; for several processes start it as a server (rollstream serve) and give its "
            "URL by actor_rollout_ref.rollout.server_urls, or leave processes at 1"
        )


def runs_in_workers(settings: Settings) -> bool:
    """Whether rollouts run in worker processes, here or on Ray."""
    return settings.generation.executor == "ray" or settings.generation.processes > 1


def _check_known_to_workers(prepared: Prepared) -> None:
    """Refuses what a decorator has registered in this process: workers are processes of their own.

    Raises:
        ConfigError: naming the setting by which workers know it, too.
    """
    parser = prepared.settings.actor_rollout_ref.rollout.multi_turn.format
    found = [
        (
            f"agent loop {name!r} (@register)",
            "name it in actor_rollout_ref.rollout.agent.agent_loop_config_path",
        )
        for name in prepared.loop_names
        if not prepared.agents.loops.is_listed(name)
    ]
    if isinstance(prepared.reward, RuleReward):
        found += [
            (f"the reward of data source {source!r} (@register_reward)", "set custom_reward_function.path")
            for source in prepared.dataset.data_sources()
            if (rule := find_rule(source)) is not None and not _is_ours(rule.function)
        ]
    if parser and not _is_ours(type(get_parser(parser))):
        found.append((f"tool parser {parser!r} (@register_parser)", "run in one process"))
    for what, instead in found:
        raise ConfigError(
            f"{what} is known in this process only, and generation.executor=ray and generation.processes run "
            f"rollouts in others: {instead}"
        )


def _is_ours(code: Any) -> bool:
    return str(code.__module__).startswith("rollstream.")


def launches_on_ray(settings: Settings) -> bool:
    """Whether the run has servers to launch, and that on a Ray cluster."""
    rollout = settings.actor_rollout_ref.rollout
    return is_launched(rollout.name, rollout.server_urls) and launched_where(settings, os.environ) == "ray"
