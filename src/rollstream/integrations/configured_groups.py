"""Groups by the configuration keys of `rollstream generate`, for a training loop of one's own.

groups = ConfiguredGroups(["data.train_files=rows.jsonl", "actor_rollout_ref.rollout.n=8", …])
with BatchesAhead(ShuffledPlan(len(groups.rows)), groups, groups_per_step=32) as batches:
    …
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig

from rollstream.config.load import compose, is_set, refuse_keys, to_settings, to_stored_yaml
from rollstream.config.settings import Settings
from rollstream.data.mixed import SourceConfig
from rollstream.data.prompts import load_prompts
from rollstream.engine.base import Engine
from rollstream.engine.checks import refuse_raw_logprobs
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.pool import PoolEngine
from rollstream.engine.registry import engine_kind
from rollstream.errors import ConfigError
from rollstream.generation.execution import SetupRecipe, worker_backend
from rollstream.generation.identity import build_identity
from rollstream.generation.plan import (
    check_executor,
    executor_elsewhere,
    manifest_for,
    resolve,
    runs_in_workers,
    tool_schemas,
)
from rollstream.reward.rules import RuleReward
from rollstream.rollout.in_workers import WorkerRollouts
from rollstream.rollout.ray_cluster import RayCluster
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, launches_on_ray, load_agents
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker, WorkerRecipe
from rollstream.scratch import ScratchFolder
from rollstream.training.group import GroupGenerator
from rollstream.training.mixture import Mixture, Source
from rollstream.training.plan import Plan, PlannedGroup, ShuffledPlan
from rollstream.training.rollout_groups import RolloutGroups
from rollstream.training.store import StoreFacts
from rollstream.trajectory import PromptRow, Rollout
from rollstream.user_calls import in_daemon_thread

Layers = Sequence[Mapping[str, Any] | Path]

_USED = {
    "generation": (
        "seed",
        "max_in_flight",
        "max_attempts",
        "attempt_timeout",
        "retry_delay",
        "retry_delay_max",
        "engine_timeout",
        "keep_turns",
        "processes",
        "executor",
    ),
    "trainer": ("nnodes", "n_gpus_per_node"),
}
"""Keys of these sections that have an effect in a training loop. The others say how a run goes that writes files."""

_RUNS_ONLY = "no effect here: for a run of `rollstream generate` only"


class ConfiguredGroups(GroupGenerator):
    """A `GroupGenerator`: agent loop, tools, reward, engine and prompt rows, all by configuration keys.

    Reads the rows when it is made; makes the engine and all else in `start`.

    Args:
        overrides: `key=value` words, as on the command line. `actor_rollout_ref.rollout.n` is the size of a
            group.
        config: layers under them: mappings, or YAML files.
        options: for `RolloutGroups`: `first`, `min_rollouts`, `deadline`, `late`, `push_weights`,
            `on_result`.

    Raises:
        ConfigError: keys that are unknown, cannot work, or have no effect here.
        DataError: a file of prompt rows cannot be read.
    """

    bounds_groups = keeps_rollouts = True

    def __init__(self, overrides: Sequence[str] = (), *, config: Layers = (), **options: Any) -> None:
        self._config = resolve_config(overrides, config)
        self._settings = to_settings(self._config)
        self._prompts = load_prompts(self._settings.data)
        self.rows = self._prompts.order
        """Indices of the prompt rows, in the data's order; a plan's index counts in it."""
        self._options = options
        self.group_size = self._settings.actor_rollout_ref.rollout.n
        self.keep_turns = self._settings.generation.keep_turns
        self._setup: RolloutSetup | None = None
        self._groups: RolloutGroups | None = None
        self._workers: WorkerRollouts | None = None
        self._versions = 0  # see `pin_weights`
        self._opened = AsyncExitStack()
        self.engine: Engine | None = None
        """What generates; None before `start`."""

    def row(self, index: int) -> PromptRow:
        """The prompt row of a plan's index, 0 to `len(rows) - 1`."""
        return self._prompts.row(int(self.rows[index]))

    def plan(self, *, seed: int = 0, shuffle: bool = True, length: int | None = None) -> Plan:
        """A plan over the rows: with `data.sources` each has its share of the groups."""
        if not (sources := self._prompts.sources):
            return ShuffledPlan(len(self.rows), seed=seed, shuffle=shuffle)
        return mixture_of(sources, self._prompts.source_names(), seed=seed, shuffle=shuffle, length=length)

    def pin_weights(self, versions: int) -> None:
        """See `RolloutGroups.pin_weights`."""
        self._versions = versions

    async def start(self) -> None:
        rollout, agents = self._settings.actor_rollout_ref.rollout, await load_agents(self._settings)
        setup = await build_setup(
            self._settings, agents, shows_images=self._prompts.has_images(), groups=True
        )
        self._opened.push_async_callback(setup.close)
        await in_daemon_thread(check_scores, setup, map(self.row, range(len(self.rows))))
        logs = ScratchFolder("engine")
        self._opened.callback(logs.cleanup)
        await join_cluster(self._settings, self._opened)
        self.engine = engine = _continuing(setup, setup.create_plain_engine(logs.path))
        names = sorted(self._prompts.agent_names())
        recipe = partial(SetupRecipe, loop_names=tuple(names), wrap=_continuing, make=build_worker)

        async def make_worker() -> RolloutWorker | WorkerRollouts:
            built = build_worker(setup, engine, names)
            self._workers = await start_workers(self._config, setup, engine, recipe, logs.path, self._opened)
            return self._workers or built.worker

        options = {"max_in_flight": in_flight_limit(self._settings), "judge": setup.judge, **self._options}
        self._groups = RolloutGroups(make_worker, self.row, rollout.n, engine=engine, **options)
        if self._versions:
            self._groups.pin_weights(self._versions)
        self._groups.keeper, self._setup = self.keeper, setup
        self._opened.push_async_callback(self._groups.close)
        await self._groups.start()

    def prompt_key(self, index: int) -> str:
        """The key of the prompt row of a plan's index."""
        return self.row(index).prompt_key

    def store_facts(self) -> StoreFacts:
        """See `GroupGenerator`."""
        assert self._setup is not None and self.engine is not None, "start() comes first"
        return store_facts(self._config, self._setup, self.engine, self._prompts.agent_names())

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        assert self._groups is not None, "start() comes first"
        return await self._groups.generate(group)

    async def update_weights(self, source: str, version: int) -> None:
        assert self._groups is not None, "start() comes first"
        if self._workers is None:
            await self._groups.update_weights(source, version)
        else:
            await self._workers.update_weights(self._groups.update_weights, source, version)

    async def close(self) -> None:
        await self._opened.aclose()


def mixture_of(sources: Sequence[SourceConfig], names: Iterable[str | None], **options: Any) -> Mixture:
    """The plan over the entries of `data.sources`; `names` are those of the rows, `options` those of `Mixture`."""
    rows: dict[str | None, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    found = [Source(one.name, rows.get(one.name, []), one.weight, one.max_failed_share) for one in sources]
    return Mixture([one for one in found if one.rows], **options)


def resolve_config(overrides: Sequence[str], layers: Layers) -> DictConfig:
    """The whole configuration of groups for a trainer. Builds the tasks' files, if there are any.

    Raises:
        ConfigError: keys that are unknown or wrong, or have no effect in a training loop.
    """
    config = compose(list(overrides), layers=list(layers))
    refuse_without_effect(config, overrides, layers)
    config = resolve(config)
    settings = to_settings(config)
    if runs_in_workers(settings) and engine_kind(settings.actor_rollout_ref.rollout.name).is_embedded:
        raise ConfigError(
            f"engine {settings.actor_rollout_ref.rollout.name!r} is in the trainer's process, and no worker of "
            "generation.processes or generation.executor reaches it there: take servers (sglang, vllm), or have the "
            "reward alone in processes (custom_reward_function.processes)"
        )
    check_executor(settings)
    if executor_elsewhere(settings) is not None:
        raise ConfigError(f"generation.executor={settings.generation.executor}: {_RUNS_ONLY}")
    return config


def refuse_without_effect(config: DictConfig, overrides: Sequence[str], layers: Layers) -> None:
    """Raises `ConfigError` naming keys that are set and would be taken silently."""
    defaults = compose()
    if config.data.filter_overlong_prompts:
        raise ConfigError(
            "data.filter_overlong_prompts filters what `rollstream generate` visits, not a trainer's rows: "
            "filter the dataset before (a prompt that is too long is a failed rollout here), or set "
            "data.truncation"
        )
    keys = [f"{name}.{key}" for name, used in _USED.items() for key in defaults[name] if key not in used]
    refuse_keys(config, keys, _RUNS_ONLY)
    if is_set(config, overrides, layers, "adaptive_in_flight", not defaults.generation.adaptive_in_flight):
        raise ConfigError(f"generation.adaptive_in_flight: {_RUNS_ONLY}")  # true asks for something, too


def _continuing(setup: RolloutSetup, engine: Engine) -> ContinuingEngine:
    on_update = setup.settings.actor_rollout_ref.rollout.on_weight_update
    return ContinuingEngine(engine, on_update=on_update, check=refuse_raw_logprobs)


async def join_cluster(settings: Settings, stack: AsyncExitStack) -> None:
    """Joins the cluster on which workers or servers run, if they do; `stack` leaves it. Comes before the engine."""
    if settings.generation.executor == "ray" or launches_on_ray(settings):
        cluster = RayCluster(settings.ray_kwargs.ray_init, settings.ray_kwargs.timeline_json_file)
        stack.push_async_callback(cluster.close)
        await cluster.start()


async def start_workers(
    config: DictConfig,
    setup: RolloutSetup,
    engine: ContinuingEngine,
    recipe: Callable[..., WorkerRecipe],
    log_dir: Path,
    stack: AsyncExitStack,
) -> WorkerRollouts | None:
    """Starts workers for the rollouts of a training, where the configuration asks for them; `stack` ends them.

    Args:
        config: resolved.
        setup: made of it.
        engine: started. The workers ask those of its servers that have the newest weights.
        recipe: of a `SetupRecipe`: `loop_names`, `wrap` and `make`.
        log_dir: for their engines' logs.
        stack: of the generator.
    """
    settings, pool = setup.settings, engine.engine
    if not runs_in_workers(settings):
        return None
    assert isinstance(pool, PoolEngine)
    recipe = partial(
        recipe, shows_images=setup.shows_images, data_sources=(), log_dir=str(log_dir.absolute())
    )
    backend, workers = worker_backend(settings, config, pool, recipe, lambda: pool.ready or pool.replicas)
    generation = settings.generation
    rollouts = WorkerRollouts(
        backend,
        recheck=pool.recheck,
        workers=workers,
        max_in_flight=in_flight_limit(settings),
        attempt_timeout=generation.attempt_timeout,
        max_attempts=generation.max_attempts,
        engine_timeout=generation.engine_timeout,
        engine=pool,
        urls=lambda: pool.ready,
    )
    stack.push_async_callback(rollouts.close)
    await rollouts.start()
    return rollouts


def build_worker(setup: RolloutSetup, engine: Engine, agent_names: Iterable[str]) -> BuiltWorker:
    """A worker on a started engine, for the default agent loop and those that rows name.

    Raises:
        ConfigError: engine or loops are not for training, or do not go together.
    """
    rollout = setup.settings.actor_rollout_ref.rollout
    setup.check_engine(engine)
    refuse_raw_logprobs(engine.capabilities, setup.sampling)
    if not engine.capabilities.token_ids:
        raise ConfigError(
            f"engine {rollout.name!r} speaks messages: training needs the tokens that were sampled"
        )
    names = {rollout.agent.default_agent_loop, *agent_names}
    images, show_tools = setup.shows_images, rollout.multi_turn.show_tools
    setup.agents.check(names, setup.tokenizer, show_tools=show_tools, images=images)
    return setup.make_worker(engine, sorted(names))


def store_facts(
    config: DictConfig, setup: RolloutSetup, engine: Engine, agent_names: Iterable[str]
) -> StoreFacts:
    """What a training's store says of rollouts by a worker of `build_worker`. Reads the model's files."""
    rollout = setup.settings.actor_rollout_ref.rollout
    names = {rollout.agent.default_agent_loop, *agent_names}
    agents = setup.agents.identity(names, rollout.multi_turn.format)
    identity = build_identity(setup, agents, fingerprint="of the training's plan", rows=0)
    del identity["model.digest"]  # a training changes the weights
    manifest = manifest_for(config, setup, None, identity, tools=tool_schemas(setup, sorted(names)))
    if (kind := engine.capabilities.logprobs) != "none":
        manifest = msgspec.structs.replace(manifest, logprobs=kind)
    return StoreFacts(manifest, to_stored_yaml(config), setup.stored_tokenizer())


def check_scores(setup: RolloutSetup, rows: Iterable[PromptRow]) -> None:
    """Refuses an environment that has no reward for any of the rows.

    An agent loop of the user's may score its own rollouts, and says so only then.

    Raises:
        ConfigError: there is neither a reward function nor a rule, and all loops are rollstream's own.
    """
    if not isinstance(setup.reward, RuleReward):
        return
    default = setup.settings.actor_rollout_ref.rollout.agent.default_agent_loop
    sources = set()
    for row in rows:
        loop = setup.agents.loops.entry(row.agent_name or default).loop
        if setup.reward.knows(row.data_source) or not loop.__module__.startswith("rollstream.agent."):
            return
        sources.add(row.data_source)
    raise ConfigError(
        "nothing gives a reward, and without one nothing is learnt: no rule knows the rows' data_source "
        f"({', '.join(sorted(sources)[:5])}). Set custom_reward_function.path, or give a trainer of TRL's "
        "reward_funcs"
    )
