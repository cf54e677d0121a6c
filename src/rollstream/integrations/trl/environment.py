"""The environment: what a rollout of the training is made of, from the house's configuration.

Agent loop, tools, rewards and engine are those of `rollstream generate`, by the same keys. What the trainer
decides (sampling, lengths, seed, repeats) comes from its own arguments.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.daemon_threads import in_daemon_thread
from rollstream.data.prompts import load_prompts
from rollstream.data.row import parse_row
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.data.values import BadRow
from rollstream.engine.base import Engine
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import ConfigError, DataError, TrainingError
from rollstream.integrations.configured_groups import check_scores
from rollstream.integrations.trl.bounds import PlacedWorker, TimedWorker
from rollstream.integrations.trl.failures import FailedGroups, ForgivingWorker, failure_of
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, load_agents
from rollstream.rollout.worker import RolloutWorker
from rollstream.scratch import ScratchFolder
from rollstream.training.plan import PlannedGroup
from rollstream.training.rollout_groups import RolloutGroups
from rollstream.trajectory import Failure, PromptRow, Rollout

logger = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"

_TRAINERS_KEYS = {
    f"{_ROLLOUT}.temperature": "temperature",
    f"{_ROLLOUT}.top_p": "top_p",
    f"{_ROLLOUT}.top_k": "top_k",
    f"{_ROLLOUT}.n": "num_generations",
    f"{_ROLLOUT}.response_length": "max_completion_length",
    f"{_ROLLOUT}.calculate_log_probs": "sampler_correction",
    "generation.seed": "seed",
}
"""Keys that the trainer's arguments decide, and by which one."""

_SEEDED = ("hf", "openvino")
"""Engines that repeat themselves: with others the seed would be an error at start."""


@dataclass(frozen=True, slots=True)
class TrainerSays:
    """What the trainer decides of the rollouts."""

    model_path: str | None
    """Of the model as it was loaded; the environment's own key goes before it."""
    temperature: float
    response_length: int
    n: int
    """Rollouts of a group."""
    seed: int
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For every rendering of the chat template: `data.apply_chat_template_kwargs`."""
    tokenizer: Any = None
    """The trainer's, of transformers: the environment's must be the same. None: nobody knows."""


class RolloutEnvironment:
    """Agent loop, rewards and engine, by the keys of `rollstream generate`.

        RolloutEnvironment(
            ["actor_rollout_ref.rollout.name=openvino", "custom_reward_function.path=reward.py"],
        )

    Args:
        overrides: `key=value` words, as on the command line.
        config: layers under them: mappings, or YAML files.

    Raises:
        ConfigError: unknown key, one that the trainer's arguments decide, or `data.filter_overlong_prompts`.
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        *,
        config: Sequence[Mapping[str, Any] | Path] = (),
    ) -> None:
        self._overrides = list(overrides)
        self._layers = list(config)
        defaults, given = compose(), compose(self._overrides, layers=self._layers)
        for key, argument in _TRAINERS_KEYS.items():
            if OmegaConf.select(given, key) != OmegaConf.select(defaults, key):
                raise ConfigError(f"{key} is the trainer's to decide: set {argument} in its arguments")
        if OmegaConf.select(given, "data.filter_overlong_prompts"):
            raise ConfigError(
                "data.filter_overlong_prompts filters the files of `rollstream generate`, not a trainer's "
                "dataset: filter that before (a prompt that is too long is a failed rollout here, and not "
                "trained on), or set data.truncation"
            )
        self.engine_name: str = OmegaConf.select(given, f"{_ROLLOUT}.name")
        """Of the engine that generates."""
        other = {"generation": {"attempt_timeout": defaults.generation.attempt_timeout + 1}}
        said = compose(self._overrides, layers=[other, *self._layers])
        self.limits_attempts: bool = said.generation.attempt_timeout == given.generation.attempt_timeout
        """Whether `generation.attempt_timeout` is set, if to its default."""

    def resolve(self, trainer: TrainerSays) -> DictConfig:
        """The whole configuration. Builds the tasks' files, if there are any.

        Raises:
            ConfigError: trainer and environment give the chat template different arguments.
        """
        values = [
            f"{_ROLLOUT}.temperature={trainer.temperature}",
            f"{_ROLLOUT}.n={trainer.n}",
            f"{_ROLLOUT}.response_length={trainer.response_length}",
            f"{_ROLLOUT}.calculate_log_probs=true",
        ]
        if self.engine_name in _SEEDED:
            values.append(f"generation.seed={trainer.seed}")
        config = compose([*values, *self._overrides], layers=self._layers)
        if config.actor_rollout_ref.model.path is None:
            config.actor_rollout_ref.model.path = trainer.model_path
        if trainer.template_kwargs:
            given, own = dict(trainer.template_kwargs), config.data.apply_chat_template_kwargs
            if own and own != given:
                raise ConfigError(
                    f"data.apply_chat_template_kwargs={own} in the environment, and chat_template_kwargs="
                    f"{given} in the trainer's arguments: give one of them"
                )
            config.data.apply_chat_template_kwargs = given
        resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        assert isinstance(resolved, DictConfig)
        resolve_tasks_into_config(resolved)
        return resolved

    def dataset(self) -> Any:
        """The prompt rows of `data.train_files` and `train_tasks` as a `datasets.Dataset` for a trainer.

        Columns: `prompt` (messages), and `row` (JSON text), by which `read_row` gets the whole row back.

        Raises:
            ConfigError: no data is named.
            DataError: a file cannot be read.
        """
        import orjson
        from datasets import Dataset

        resolved = OmegaConf.create(
            OmegaConf.to_container(compose(self._overrides, layers=self._layers), resolve=True)
        )
        assert isinstance(resolved, DictConfig)
        resolve_tasks_into_config(resolved)
        rows = load_prompts(to_settings(resolved).data)
        return Dataset.from_list(
            [
                {
                    "prompt": row.messages,
                    "row": orjson.dumps(
                        {
                            "data_source": row.data_source,
                            "ground_truth": row.ground_truth,
                            "extra_info": row.extra_info,
                            "agent_name": row.agent_name,
                            "tools_kwargs": row.tools_kwargs,
                            **row.columns,
                        }
                    ).decode(),
                }
                for row in map(rows.row, rows.order)
            ]
        )


def read_row(example: Mapping[str, Any], index: int) -> PromptRow:
    """A dataset's example as a prompt row: columns of a data file, or of `RolloutEnvironment.dataset`.

    Raises:
        DataError: it is no prompt row.
    """
    import orjson

    columns = dict(example)
    packed = columns.pop("row", None)
    if isinstance(packed, str):
        columns = {
            **{key: value for key, value in orjson.loads(packed).items() if value is not None},
            **columns,
        }
    try:
        return parse_row(columns, index, "prompt")[0]
    except BadRow as error:
        raise DataError(f"row {index} of the dataset: {error}") from error


class EnvironmentGroups:
    """A `GroupGenerator` of an environment: groups of the plan, and single rows beside them.

    Args:
        environment: what rollouts are made of.
        trainer: what the trainer decides.
        load_row: the prompt row of an index of the plan.
        lent_model: weights that the `hf` engine shares, instead of loading its own.
        first_weights: a folder with the trainer's weights, loaded before the first group; None: what the
            engine has at `model.path` is what the trainer has.
        first_version: of those weights.
        agent_names: of the loops that rows name, besides the default one: checked at start.
        max_failed_groups: groups in a row of which no rollout is left that are let pass, with stand-ins for
            all rollouts that failed for good (see `failures`); None: a failed rollout is an error.
        rollout_timeout: seconds for a rollout of a group with all its attempts, unless the environment sets
            `generation.attempt_timeout`; None: none.
        to_score: gives the prompt rows; an environment that can score none of them does not start. None:
            somebody else scores.
    """

    bounds_groups = True
    """See `RolloutGroups`."""

    def __init__(
        self,
        environment: RolloutEnvironment,
        trainer: TrainerSays,
        load_row: Any,
        *,
        lent_model: Any = None,
        first_weights: str | None = None,
        first_version: int = 0,
        agent_names: Iterable[str] = (),
        max_failed_groups: int | None = None,
        rollout_timeout: float | None = None,
        to_score: Callable[[], Iterable[PromptRow]] | None = None,
    ) -> None:
        self._environment = environment
        self._trainer = trainer
        self._load_row = load_row
        self._lent = lent_model
        self.first_weights = first_weights
        """May be changed before `start`, as `first_version`."""
        self.first_version = first_version
        self._agent_names = set(agent_names)
        self._failed_groups = None if max_failed_groups is None else FailedGroups(max_failed_groups)
        self._rollout_timeout = None if environment.limits_attempts else rollout_timeout
        self._to_score = to_score
        self._groups: RolloutGroups | None = None
        self._worker: PlacedWorker | None = None  # of rows beside the plan
        self._logs: ScratchFolder | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """In which all coroutines run; None before `start`."""
        self.engine: Engine | None = None
        """What generates; None before `start`."""

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        config = await in_daemon_thread(self._environment.resolve, self._trainer)
        settings = to_settings(config)
        agents = await in_daemon_thread(load_agents, settings)
        await agents.tools.describe()
        setup = await in_daemon_thread(partial(build_setup, settings, agents, shows_images=False))
        _check_tokenizer(self._trainer.tokenizer, setup)
        if self._to_score is not None:
            await in_daemon_thread(check_scores, setup, self._to_score())
        self._logs = ScratchFolder("trl")
        engine = self._make_engine(setup, self._logs.path)
        self.engine = engine
        self._groups = RolloutGroups(
            partial(self._make_worker, setup, engine),
            self._load_row,
            self._trainer.n,
            engine=engine,
            max_in_flight=in_flight_limit(settings),
        )
        await self._groups.start()

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        assert self._groups is not None, "start() comes first"
        rollouts = await self._groups.generate(group)
        if self._failed_groups is not None:
            self._failed_groups.judge(group, rollouts)
        return rollouts

    async def run_rows(self, rows: Sequence[tuple[PromptRow, int]]) -> list[Rollout]:
        """One rollout of each row and repeat, in their order.

        Raises:
            TrainingError: one failed, or, with `max_failed_groups`, all did; with the cause.
        """
        assert self._worker is not None, "start() comes first"
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(self._worker.run(row, repeat)) for row, repeat in rows]
        done: list[Rollout] = []
        for task in tasks:
            result = task.result()
            if isinstance(result, Failure):
                raise TrainingError(
                    f"a rollout of row {result.index} failed after {result.attempts} attempts: "
                    f"{result.error}\n{result.traceback}"
                )
            done.append(result)
        errors = [error for error in map(failure_of, done) if error is not None]
        if rows and len(errors) == len(rows):
            raise TrainingError(f"all {len(rows)} rollouts failed, the last one {errors[-1]}")
        if errors:
            logger.warning(
                "%d of %d rollouts failed and do not count; the last one %s",
                *(len(errors), len(rows), errors[-1].partition("\n")[0]),
            )
        return done

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the folder `source`; "" is for weights that the engine shares, which are there already."""
        if source:
            assert self._groups is not None, "start() comes first"
            await self._groups.update_weights(source, version)
        elif self._lent is None:
            raise TrainingError(f"version {version}: the engine shares no weights, and no folder is given")

    async def close(self) -> None:
        if self._groups is not None:
            await self._groups.close()
        elif self.engine is not None:
            await self.engine.close()
        if self._logs is not None:
            self._logs.cleanup()

    def _make_engine(self, setup: RolloutSetup, log_dir: Path) -> Engine:
        if self._lent is None:
            return setup.create_engine(log_dir)
        from rollstream.engine.hf import HFEngine

        model, rollout = (
            setup.settings.actor_rollout_ref.model,
            setup.settings.actor_rollout_ref.rollout,
        )
        return setup.interruptible(
            HFEngine(
                model.tokenizer_path or model.path,
                model=self._lent,
                max_model_len=rollout.max_model_len,
                engine_kwargs=rollout.engine_kwargs,
            )
        )

    async def _make_worker(self, setup: RolloutSetup, engine: Engine) -> RolloutWorker:
        setup.check_engine(engine)
        self._check_engine(setup, engine)
        if self.first_weights is not None:
            await engine.update_weights(self.first_weights, self.first_version)
        elif self._lent is not None:
            async with unwrap_engine(engine).changing_weights(self.first_version):
                pass  # the weights are there; their version is not
        rollout = setup.settings.actor_rollout_ref.rollout
        names = {rollout.agent.default_agent_loop, *self._agent_names}
        show_tools = rollout.multi_turn.show_tools
        setup.agents.check(names, setup.tokenizer, show_tools=show_tools, images=False)
        built = setup.make_worker(engine, sorted(names))
        seconds, forgives = self._rollout_timeout, self._failed_groups is not None
        worker: RolloutWorker = built.worker
        timed = worker if seconds is None else TimedWorker(worker, built.availability, seconds)
        # One number of places for both: an evaluation comes while groups are generated ahead.
        places = asyncio.Semaphore(in_flight_limit(setup.settings))
        self._worker = PlacedWorker(ForgivingWorker(worker) if forgives else worker, places)
        of_groups = PlacedWorker(ForgivingWorker(timed) if forgives else timed, places)
        return cast(RolloutWorker, of_groups)  # all that is asked of it is `run`

    def _check_engine(self, setup: RolloutSetup, engine: Engine) -> None:
        can = engine.capabilities
        name = self._environment.engine_name
        if not can.token_ids:
            raise ConfigError(f"engine {name!r} speaks messages: training needs the tokens that were sampled")
        if not can.update_weights:
            raise ConfigError(f"engine {name!r} takes no new weights: it would stay at the first ones")
        if can.logprobs == "raw" and self._trainer.temperature != 1.0:
            raise ConfigError(
                f"engine {name!r} gives log-probs before temperature, and temperature is "
                f"{self._trainer.temperature}: the loss would compare two distributions. Set "
                "temperature=1.0, or use engine 'hf'"
            )
        if setup.settings.actor_rollout_ref.rollout.top_k != -1:
            raise ConfigError(f"{_ROLLOUT}.top_k changes the sampled distribution: leave it at -1")
        if setup.settings.actor_rollout_ref.rollout.extra_sampling:
            raise ConfigError(f"{_ROLLOUT}.extra_sampling changes the sampled distribution: leave it out")


def _check_tokenizer(trainers: Any, setup: RolloutSetup) -> None:
    """Refuses a tokenizer of the environment that is not the trainer's.

    A chat template that the environment names, alone or with a tokenizer, is meant to be another one.

    Raises:
        ConfigError: they differ.
    """
    if trainers is None:
        return
    model = setup.settings.actor_rollout_ref.model
    different = setup.tokenizer.differences(trainers)
    if model.custom_chat_template is not None or model.tokenizer_path is not None:
        different = [what for what in different if what != "chat template"]
    if different:
        raise ConfigError(
            f"the environment's tokenizer ({model.tokenizer_path or model.path}) has another "
            f"{' and another '.join(different)} than the trainer's processing_class, which makes no prompts "
            "here: save what you changed in it with the model, or name it by "
            "actor_rollout_ref.model.tokenizer_path or custom_chat_template"
        )


def unwrap_engine(engine: Engine | None) -> Any:
    """The engine inside of the one that outlives weight updates."""
    return engine.engine if isinstance(engine, ContinuingEngine) else engine
