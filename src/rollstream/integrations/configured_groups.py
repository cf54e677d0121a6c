"""Groups by the configuration keys of `rollstream generate`, for a training loop of one's own.

groups = ConfiguredGroups(["data.train_files=rows.jsonl", "actor_rollout_ref.rollout.n=8", …])
with BatchesAhead(ShuffledPlan(len(groups.rows)), groups, groups_per_step=32) as batches:
    …
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rollstream.config.load import compose, is_set, refuse_keys, to_settings
from rollstream.data.prompts import load_prompts
from rollstream.engine.base import Engine
from rollstream.engine.checks import refuse_raw_logprobs
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import ConfigError
from rollstream.generation.plan import resolve
from rollstream.reward.rules import RuleReward, find_rule
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, load_agents
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker
from rollstream.scratch import ScratchFolder
from rollstream.training.plan import PlannedGroup
from rollstream.training.rollout_groups import RolloutGroups
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
    ),
    "trainer": ("nnodes", "n_gpus_per_node"),
}
"""Keys of these sections that have an effect in a training loop. The others say how a run goes that writes files."""

_RUNS_ONLY = "no effect here: for a run of `rollstream generate` only"


class ConfiguredGroups:
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

    bounds_groups = True
    """See `RolloutGroups`."""

    def __init__(self, overrides: Sequence[str] = (), *, config: Layers = (), **options: Any) -> None:
        self._config = resolve_config(overrides, config)
        self._settings = to_settings(self._config)
        self._prompts = load_prompts(self._settings.data)
        self.rows = self._prompts.order
        """Indices of the prompt rows, in the data's order; a plan's index counts in it."""
        self._options = options
        self._groups: RolloutGroups | None = None
        self._opened = AsyncExitStack()
        self.engine: Engine | None = None
        """What generates; None before `start`."""

    def row(self, index: int) -> PromptRow:
        """The prompt row of a plan's index, 0 to `len(rows) - 1`."""
        return self._prompts.row(int(self.rows[index]))

    async def start(self) -> None:
        rollout, agents = self._settings.actor_rollout_ref.rollout, await load_agents(self._settings)
        setup = await build_setup(self._settings, agents, shows_images=self._prompts.has_images())
        self._opened.push_async_callback(setup.close)
        await in_daemon_thread(check_scores, setup, map(self.row, range(len(self.rows))))
        logs = ScratchFolder("engine")
        self._opened.callback(logs.cleanup)
        plain = setup.create_plain_engine(logs.path)
        engine = ContinuingEngine(plain, on_update=rollout.on_weight_update, check=refuse_raw_logprobs)
        self.engine = engine

        async def make_worker() -> RolloutWorker:
            return build_worker(setup, engine, self._prompts.agent_names()).worker

        options = {"max_in_flight": in_flight_limit(self._settings), **self._options}
        self._groups = RolloutGroups(make_worker, self.row, rollout.n, engine=engine, **options)
        self._opened.push_async_callback(self._groups.close)
        await self._groups.start()

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        assert self._groups is not None, "start() comes first"
        return await self._groups.generate(group)

    async def update_weights(self, source: str, version: int) -> None:
        assert self._groups is not None, "start() comes first"
        await self._groups.update_weights(source, version)

    async def close(self) -> None:
        await self._opened.aclose()


def resolve_config(overrides: Sequence[str], layers: Layers) -> DictConfig:
    """The whole configuration of groups for a trainer. Builds the tasks' files, if there are any.

    Raises:
        ConfigError: keys that are unknown or wrong, or have no effect in a training loop.
    """
    config = compose(list(overrides), layers=list(layers))
    refuse_without_effect(config, overrides, layers)
    return resolve(config)


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
    refuse_keys(config, [*keys, "actor_rollout_ref.rollout.agent.num_workers"], _RUNS_ONLY)
    if is_set(config, overrides, layers, "adaptive_in_flight", not defaults.generation.adaptive_in_flight):
        raise ConfigError(f"generation.adaptive_in_flight: {_RUNS_ONLY}")  # true asks for something, too


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
        if find_rule(row.data_source) is not None or not loop.__module__.startswith("rollstream.agent."):
            return
        sources.add(row.data_source)
    raise ConfigError(
        "nothing gives a reward, and without one nothing is learnt: no rule knows the rows' data_source "
        f"({', '.join(sorted(sources)[:5])}). Set custom_reward_function.path, or give a trainer of TRL's "
        "reward_funcs"
    )
