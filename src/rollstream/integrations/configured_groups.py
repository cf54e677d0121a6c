"""Groups by the configuration keys of `rollstream generate`, for a training loop of one's own.

groups = ConfiguredGroups(["data.train_files=rows.jsonl", "actor_rollout_ref.rollout.n=8", …])
with BatchesAhead(ShuffledPlan(len(groups.rows)), groups, groups_per_step=32) as batches:
    …
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.daemon_threads import in_daemon_thread
from rollstream.data.prompts import load_prompts
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.engine.base import Engine
from rollstream.errors import ConfigError
from rollstream.reward.rules import RuleReward, find_rule
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, load_agents
from rollstream.rollout.worker import RolloutWorker
from rollstream.scratch import ScratchFolder
from rollstream.training.plan import PlannedGroup
from rollstream.training.rollout_groups import RolloutGroups
from rollstream.trajectory import PromptRow, Rollout


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
        ConfigError: keys that are unknown or cannot work, or `data.filter_overlong_prompts`.
        DataError: a file of prompt rows cannot be read.
    """

    bounds_groups = True
    """See `RolloutGroups`."""

    def __init__(
        self,
        overrides: Sequence[str] = (),
        *,
        config: Sequence[Mapping[str, Any] | Path] = (),
        **options: Any,
    ) -> None:
        resolved = OmegaConf.create(
            OmegaConf.to_container(compose(list(overrides), layers=list(config)), resolve=True)
        )
        assert isinstance(resolved, DictConfig)
        resolve_tasks_into_config(resolved)
        self._config = resolved
        self._settings = to_settings(resolved)
        if self._settings.data.filter_overlong_prompts:
            raise ConfigError(
                "data.filter_overlong_prompts filters what `rollstream generate` visits, not the rows of a "
                "plan: a prompt that is too long is a failed group here, which "
                "on_group_failure='drop_and_refill' replaces; or set data.truncation"
            )
        self._prompts = load_prompts(self._settings.data)
        self.rows = self._prompts.order
        """Indices of the prompt rows, in the data's order; a plan's index counts in it."""
        self._options = options
        self._groups: RolloutGroups | None = None
        self._logs: ScratchFolder | None = None
        self.engine: Engine | None = None
        """What generates; None before `start`."""

    def row(self, index: int) -> PromptRow:
        """The prompt row of a plan's index, 0 to `len(rows) - 1`."""
        return self._prompts.row(int(self.rows[index]))

    async def start(self) -> None:
        agents = await in_daemon_thread(load_agents, self._settings)
        await agents.tools.describe()
        images = self._prompts.has_images()
        setup = await in_daemon_thread(partial(build_setup, self._settings, agents, shows_images=images))
        await in_daemon_thread(check_scores, setup, map(self.row, range(len(self.rows))))
        self._logs = ScratchFolder("engine")
        self.engine = setup.create_engine(self._logs.path)
        self._groups = RolloutGroups(
            partial(self._make_worker, setup, self.engine),
            self.row,
            self._settings.actor_rollout_ref.rollout.n,
            engine=self.engine,
            **{"max_in_flight": in_flight_limit(self._settings), **self._options},
        )
        await self._groups.start()

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        assert self._groups is not None, "start() comes first"
        return await self._groups.generate(group)

    async def update_weights(self, source: str, version: int) -> None:
        assert self._groups is not None, "start() comes first"
        await self._groups.update_weights(source, version)

    async def close(self) -> None:
        if self._groups is not None:
            await self._groups.close()
        if self._logs is not None:
            self._logs.cleanup()

    async def _make_worker(self, setup: RolloutSetup, engine: Engine) -> RolloutWorker:
        rollout = self._settings.actor_rollout_ref.rollout
        setup.check_engine(engine)
        if not engine.capabilities.token_ids:
            raise ConfigError(
                f"engine {rollout.name!r} speaks messages: training needs the tokens that were sampled"
            )
        names = {rollout.agent.default_agent_loop, *self._prompts.agent_names()}
        setup.agents.check(
            names,
            setup.tokenizer,
            show_tools=rollout.multi_turn.show_tools,
            images=setup.shows_images,
        )
        return setup.make_worker(engine, sorted(names)).worker


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
