"""The rollouts of an environment: groups of a plan, and single rows beside them.

    settings --start--> engine, RolloutWorker
    generate(group), run_rows(rows) --> a place --> within its time --> Rollout, or a stand-in for one that failed

All of it runs in the event loop of `BatchesAhead`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.agent.turns import Turns
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.config.load import to_settings
from rollstream.config.settings import Settings
from rollstream.data.first_look import LOOKED_AT, first_look
from rollstream.data.mixed import SOURCE, source_limits
from rollstream.engine.base import Capabilities, Engine
from rollstream.engine.continuation import ContinuingEngine, OnUpdate
from rollstream.errors import ConfigError, GroupFailedError, TrainingError
from rollstream.generation.execution import SetupRecipe
from rollstream.integrations.configured_groups import (
    build_worker,
    check_scores,
    join_cluster,
    start_workers,
    store_facts,
)
from rollstream.integrations.trl.environment import RolloutEnvironment, refuse_sampling
from rollstream.reward.rules import RuleReward
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.group_reward import Judge
from rollstream.rollout.in_workers import WorkerRollouts
from rollstream.rollout.setup import (
    RolloutSetup,
    build_setup,
    configured_tokenizer,
    in_flight_limit,
    load_agents,
)
from rollstream.rollout.stats import WorkerStats
from rollstream.rollout.worker import make_failure
from rollstream.rollout.worker_host import BuiltWorker
from rollstream.scratch import ScratchFolder
from rollstream.training.group import GroupGenerator
from rollstream.training.plan import PlannedGroup
from rollstream.training.replay import ReplayGroups
from rollstream.training.store import StoreFacts
from rollstream.trajectory import Failure, PromptRow, Rollout, SamplingParams, Trajectory
from rollstream.user_calls import in_daemon_thread

if TYPE_CHECKING:
    from rollstream.integrations.trl.config import GRPOEnvConfig

logger = logging.getLogger(__name__)

ROLLOUT_SHARE = 0.8
"""The share of the time for a batch that one rollout of it may take. One that hangs has failed
then, while the batch can still come; most are begun before it is asked for, so little has to be left."""

_FAILED = "rollstream_failed"
"""In the `extra` of a stand-in's trajectory: the error."""


class EnvironmentGroups(GroupGenerator):
    """A `GroupGenerator` of an environment.

    Args:
        environment: what rollouts are made of.
        args: of the trainer.
        rows: how many prompt rows the training has.
        load_row: the prompt row of an index of the plan.
        model_path: the folder or name that the trainer's model was loaded from.
        tokenizer: the trainer's, of transformers: the environment's must be the same. None: nobody knows.
        lent_model: weights that the `hf` engine shares, instead of loading its own; None: it has its own.
        adapter_rank: of the adapter that the engine is given; 0: it is given the whole model.
        agent_names: of the loops that rows name, besides the default one: checked at start.
        scores: an environment that can score none of the rows does not start. False: somebody else scores.
    """

    bounds_groups = keeps_rollouts = True

    def __init__(
        self,
        environment: RolloutEnvironment,
        args: "GRPOEnvConfig",
        rows: int,
        load_row: Callable[[int], PromptRow],
        *,
        model_path: str | None,
        tokenizer: Any,
        lent_model: Any,
        adapter_rank: int,
        agent_names: set[str],
        scores: bool,
    ) -> None:
        self._environment = environment
        self._args = args
        self._rows = range(rows)
        self._load_row = load_row
        self._model_path = model_path
        self._tokenizer = tokenizer
        self._lent = lent_model
        self._adapter_rank = adapter_rank
        self._versions = 0  # that weights are pinned to
        self._agent_names = agent_names
        self._failed_groups = 0  # in a row
        self.replaces_failed = any(one.max_failed_share is not None for one in environment.sources)
        """Whether a group of which every rollout has failed is made by another one."""
        self._limits = source_limits(environment.sources)
        seconds = ROLLOUT_SHARE * args.async_generation_timeout
        self._rollout_timeout = None if environment.limits_attempts else seconds
        self._scores = scores
        self.group_size = args.num_generations
        self._facts: Callable[[], StoreFacts] | None = None
        self._judge: Judge | None = None
        self._built: BuiltWorker | None = None
        self._workers: WorkerRollouts | None = None
        self._opened = contextlib.AsyncExitStack()
        self._places = asyncio.Semaphore(0)
        self.engine: TrainedEngine | None = None
        """The engine; None before `start`."""

    def pin_weights(self, versions: int) -> None:
        """See `RolloutGroups.pin_weights`."""
        self._versions = versions

    async def start(self) -> None:
        resolve, rank = self._environment.resolve, self._adapter_rank
        config = await in_daemon_thread(resolve, self._args, self._model_path, rank)
        settings = to_settings(config)
        self.keep_turns = settings.generation.keep_turns
        setup = await build_setup(settings, await load_agents(settings), groups=True)
        self._opened.push_async_callback(setup.close)
        self._judge = setup.judge
        if self._scores:
            await in_daemon_thread(check_scores, setup, map(self._load_row, self._rows))
        refuse_sampling(setup.sampling, self._args.temperature)
        _check_tokenizer(self._tokenizer, setup.tokenizer, settings)
        first = [self._load_row(index) for index in self._rows[:LOOKED_AT]]
        for line in first_look(first, setup.tokenizer, scored=not isinstance(setup.reward, RuleReward)):
            logger.warning("%s", line)
        await join_cluster(settings, self._opened)
        logs = ScratchFolder("trl")
        self._opened.callback(logs.cleanup)
        self.engine = self._make_engine(setup, logs.path)
        self._opened.push_async_callback(self.engine.close)
        await self.engine.start()
        can, name = self.engine.capabilities, self._environment.engine_name
        if rank and self._lent is None and not can.adapters:
            raise ConfigError(
                f"engine {name!r} takes no LoRA adapters, and the trainer's model is one of PEFT's: docs/engines.md"
            )
        if not rank and not can.update_weights:
            raise ConfigError(f"engine {name!r} takes no new weights: it would stay at the first ones")
        if self._versions:
            self.engine.pin_weights(self._versions)
        names, temperature = sorted(self._agent_names), self._args.temperature
        self._built = _build_worker(setup, self.engine, names)
        wrap = partial(_trained_engine, temperature=temperature)
        recipe = partial(SetupRecipe, loop_names=tuple(names), wrap=wrap, make=_build_worker)
        self._workers = await start_workers(config, setup, self.engine, recipe, logs.path, self._opened)
        self._facts = partial(store_facts, config, setup, self.engine, self._agent_names)
        # One number of places for all: an evaluation comes while groups are generated ahead.
        self._places = asyncio.Semaphore(in_flight_limit(settings))

    def replay(self, store: str) -> ReplayGroups:
        """The groups of another training's store, in place of those of an engine. Comes without `start`.

        Raises:
            ConfigError: that training had batches of another size, or another tokenizer or chat template.
            RunDirectoryError: they cannot be read.
        """
        args, resolve = self._args, self._environment.resolve
        groups = ReplayGroups(
            store,
            prompt_key=lambda index: self.prompt_key(index) if index in self._rows else "there is none",
            stand_in=lambda failure: stand_in(self._load_row(failure.index), failure),
        )
        theirs, mine = groups.groups_per_step, args.groups_per_batch
        if (theirs, groups.manifest.n) != (mine, args.num_generations):
            raise ConfigError(
                f"the batches of {store} have {theirs} prompts and {groups.manifest.n} rollouts of each, those of this "
                f"training {mine} and {args.num_generations}"
            )
        settings = to_settings(resolve(args, self._model_path, self._adapter_rank))
        tokenizer = configured_tokenizer(settings)
        _check_tokenizer(self._tokenizer, tokenizer, settings)
        if tokenizer is None or groups.manifest.identity.get("model.tokenizer") != tokenizer.digest():
            raise ConfigError(f"the rollouts of {store} were made with another tokenizer or chat template")
        return groups

    def prompt_key(self, index: int) -> str:
        """The key of a row of the dataset."""
        return self._load_row(index).prompt_key

    def store_facts(self) -> StoreFacts:
        """See `GroupGenerator`."""
        assert self._facts is not None, "start() comes first"
        return self._facts()

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        row, n = self._load_row(group.index), self._args.num_generations
        kept = await self.keeper.kept(group)

        async def result(place: int) -> Rollout:
            made = kept.results.get(place)
            if made is None:
                turns = self.keeper.turns(group, place, row.prompt_key)
                made = await self._run(row, group.epoch * n + place, self._rollout_timeout, turns)
                made = await self.keeper.keep(group, place, made)
            return stand_in(row, made) if isinstance(made, Failure) else made.without_side_calls()

        rollouts, errors = await self._all(row, [result(place) for place in range(n)])
        done = [one for one in rollouts if failure_of(one) is None]
        if self._judge is not None and done and not (kept.is_judged and len(kept.results) == n):
            await self._judge(done)
            await self.keeper.keep_rewards(group, {one.repeat - group.epoch * n: one for one in done})
        if self.replaces_failed and len(errors) == n:
            raise GroupFailedError(f"all rollouts of row {group.index} failed, the last one: {errors[-1]}")
        self._failed_groups = self._failed_groups + 1 if len(errors) == n else 0
        if self._failed_groups > self._args.max_failed_groups:
            raise GroupFailedError(
                f"{self._failed_groups} groups in a row failed whole (max_failed_groups="
                f"{self._args.max_failed_groups}), the last one of row {group.index}: {errors[-1]}"
            )
        return rollouts

    async def run_rows(self, rows: Sequence[PromptRow]) -> list[Rollout]:
        """Makes one rollout of each row, in their order.

        Raises:
            TrainingError: all failed; with a cause.
        """

        async def result(row: PromptRow) -> Rollout:
            made = await self._run(row, 0, None)
            return stand_in(row, made) if isinstance(made, Failure) else made.without_side_calls()

        if not rows:
            return []
        rollouts, errors = await self._all(rows[0], [result(row) for row in rows])
        if len(errors) == len(rows):
            raise TrainingError(f"all {len(rows)} rollouts failed, the last one {errors[-1]}")
        for _, group in groupby(rollouts, key=lambda one: one.prompt_key):
            done = [one for one in group if failure_of(one) is None]
            if self._judge is not None and done:
                await self._judge(done)
        return rollouts

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the folder `source`; shared weights are there already, and only their version is told."""
        assert self.engine is not None, "start() comes first"
        if self._workers is not None:
            await self._workers.update_weights(self.engine.update_weights, source, version)
        elif self._lent is None:
            await self.engine.update_weights(source, version)
        else:
            async with unwrap_engine(self.engine).changing_weights(version):
                pass

    async def close(self) -> None:
        await self._opened.aclose()

    async def _all(
        self, first: PromptRow, results: Sequence[Coroutine[Any, Any, Rollout]]
    ) -> tuple[list[Rollout], list[str]]:
        """The rollouts, and the errors of those that failed."""
        tasks = [asyncio.ensure_future(one) for one in results]
        try:
            rollouts = await asyncio.gather(*tasks)  # not a TaskGroup: a lost engine is raised as it is
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors = [error for error in map(failure_of, rollouts) if error is not None]
        if errors:
            first_line = errors[-1].partition("\n")[0]
            message = "%d of %d rollouts, of row %d first, failed and do not count; the last one %s"
            logger.warning(message, len(errors), len(tasks), first.index, first_line)
        return rollouts, errors

    async def _run(
        self, row: PromptRow, repeat: int, seconds: float | None, turns: Turns | None = None
    ) -> Rollout | Failure:
        built = self._built
        assert built is not None and self.engine is not None, "start() comes first"
        # Before its time begins: who waits for a source that takes few at once has not been begun.
        async with self._limits.get(str(row.columns.get(SOURCE)), contextlib.nullcontext()), self._places:
            scoring = asyncio.Event()
            worker, engines = self._workers or built.worker, (self._workers or built).availability
            running = worker.run(row, repeat, on_scoring=scoring.set, turns=turns)
            try:
                result = await (running if seconds is None else within(running, seconds, engines))
            except TimeoutError:
                where = "agent loop" if self._workers is None else "agent loop or reward function"
                where = "reward function" if scoring.is_set() else where
                late = TrainingError(
                    f"it was cut off in its {where}: it took longer than {seconds:g} s, its share of "
                    "async_generation_timeout (for limits of each attempt alone set generation.attempt_timeout)"
                )
                result = make_failure(row.index, repeat, row.prompt_key, 1, "agent", late)
        self.engine.raise_refused()
        return result

    def _make_engine(self, setup: RolloutSetup, log_dir: Path) -> "TrainedEngine":
        model, rollout = setup.settings.actor_rollout_ref.model, setup.settings.actor_rollout_ref.rollout
        if self._lent is None:
            engine = setup.create_plain_engine(log_dir)
        else:
            from rollstream.engine.hf import HFEngine

            engine = HFEngine(
                model.tokenizer_path or model.path,
                model=self._lent,
                max_model_len=rollout.max_model_len,
                engine_kwargs=rollout.engine_kwargs,
            )
        return _trained_engine(setup, engine, temperature=self._args.temperature)


class TrainedEngine(ContinuingEngine):
    """The engine of a training: refuses sampling that the loss does not know of, wherever it comes from."""

    def __init__(self, engine: Engine, temperature: float, *, on_update: OnUpdate) -> None:
        super().__init__(engine, on_update=on_update, check=self._refuse)
        self._temperature = temperature
        self.refused: ConfigError | None = None
        """The first refusal. It ends the training: an agent may go on without an answer, and say nothing."""

    def raise_refused(self) -> None:
        """Raises the first refusal, if there is one."""
        if self.refused is not None:
            raise ConfigError(str(self.refused)) from self.refused

    def _refuse(self, _capabilities: Capabilities, sampling: SamplingParams) -> None:
        try:
            refuse_sampling(sampling, self._temperature)
        except ConfigError as error:
            self.refused = self.refused or error
            raise


def _trained_engine(setup: RolloutSetup, engine: Engine, *, temperature: float) -> TrainedEngine:
    on_update = setup.settings.actor_rollout_ref.rollout.on_weight_update
    return TrainedEngine(engine, temperature, on_update=on_update)


def _build_worker(setup: RolloutSetup, engine: Engine, agent_names: Iterable[str]) -> BuiltWorker:
    assert isinstance(engine, TrainedEngine)
    setup.images = None  # what a tool shows could not be trained on
    return replace(build_worker(setup, engine, agent_names), check=engine.raise_refused)


async def within(running: Any, seconds: float, availability: EngineAvailability | WorkerStats) -> Any:
    """Awaits a coroutine for so long.

    Raises:
        TimeoutError: it took longer; it is cut off. When the engine has been away meanwhile it has its time again.
    """
    task = asyncio.ensure_future(running)
    try:
        while True:
            returns = availability.returns
            await asyncio.wait([task], timeout=seconds)
            if task.done():
                return task.result()
            if availability.is_available and availability.returns == returns:
                raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def stand_in(row: PromptRow, failure: Failure) -> Rollout:
    """For a rollout that failed for good: neither prompt nor response, of no version, without a reward."""
    trajectory = Trajectory(
        prompt_ids=[],
        response_ids=[],
        response_mask=[],
        response_logprobs=[],
        messages=list(row.messages),
        finish_reason="aborted",
        policy_versions=[],
        extra={
            _FAILED: f"after {failure.attempts} attempts, {failure.error}\n{failure.traceback}",
            SOURCE: row.columns.get(SOURCE),
        },
    )
    return Rollout(
        row.index,
        failure.repeat,
        row.prompt_key,
        [trajectory],
        row.data_source,
        row.ground_truth,
        attempts=failure.attempts,
    )


def failure_of(rollout: Rollout) -> str | None:
    """Why it failed, if it stands in for a rollout that did."""
    error: str | None = rollout.final.extra.get(_FAILED)
    return error


def settled(rollout: Rollout) -> Rollout | Failure:
    """The rollout; of one that stands in for a failure, that failure."""
    if (error := failure_of(rollout)) is None:
        return rollout
    index, repeat, key = rollout.index, rollout.repeat, rollout.prompt_key
    return Failure(index, repeat, key, rollout.attempts, "agent", error, traceback="", failed_at=0.0)


def _check_tokenizer(trainers: Any, own: ChatTokenizer | None, settings: Settings) -> None:
    """Refuses a tokenizer of the environment that is not the trainer's.

    A chat template that the environment names, alone or with a tokenizer, is meant to be another one.
    """
    model = settings.actor_rollout_ref.model
    different = [] if trainers is None or own is None else own.differences(trainers)
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
