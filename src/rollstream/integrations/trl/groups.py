"""The rollouts of an environment: groups of a plan, and single rows beside them.

    settings --start--> engine, RolloutWorker
    generate(group), run_rows(rows) --> a place --> within its time --> Rollout, or a stand-in for one that failed

All of it runs in the event loop of `BatchesAhead`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.config.load import to_settings
from rollstream.data.first_look import LOOKED_AT, first_look
from rollstream.engine.base import Capabilities, Engine
from rollstream.engine.continuation import ContinuingEngine, OnUpdate
from rollstream.errors import ConfigError, GroupFailedError, TrainingError
from rollstream.integrations.configured_groups import build_worker, check_scores
from rollstream.integrations.trl.environment import RolloutEnvironment, refuse_sampling
from rollstream.reward.rules import RuleReward
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.setup import RolloutSetup, build_setup, in_flight_limit, load_agents
from rollstream.rollout.worker import make_failure
from rollstream.rollout.worker_host import BuiltWorker
from rollstream.scratch import ScratchFolder
from rollstream.training.plan import PlannedGroup
from rollstream.trajectory import Failure, PromptRow, Rollout, SamplingParams, Trajectory
from rollstream.user_calls import in_daemon_thread

if TYPE_CHECKING:
    from rollstream.integrations.trl.config import GRPOEnvConfig

logger = logging.getLogger(__name__)

_ROLLOUT_SHARE = 0.8
"""The share of the time for a batch that one rollout of it may take. One that hangs has failed
then, while the batch can still come; most are begun before it is asked for, so little has to be left."""

_FAILED = "rollstream_failed"
"""In the `extra` of a stand-in's trajectory: the error."""


class EnvironmentGroups:
    """A `GroupGenerator` of an environment.

    Args:
        environment: what rollouts are made of.
        args: of the trainer.
        rows: how many prompt rows the training has.
        load_row: the prompt row of an index of the plan.
        model_path: the folder or name that the trainer's model was loaded from.
        tokenizer: the trainer's, of transformers: the environment's must be the same. None: nobody knows.
        lent_model: weights that the `hf` engine shares, instead of loading its own; None: it has its own.
        agent_names: of the loops that rows name, besides the default one: checked at start.
        scores: an environment that can score none of the rows does not start. False: somebody else scores.
    """

    bounds_groups = True
    """See `RolloutGroups`."""

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
        self._agent_names = agent_names
        self._failed_groups = 0  # in a row
        seconds = _ROLLOUT_SHARE * args.async_generation_timeout
        self._rollout_timeout = None if environment.limits_attempts else seconds
        self._scores = scores
        self._built: BuiltWorker | None = None
        self._opened = contextlib.AsyncExitStack()
        self._places = asyncio.Semaphore(0)
        self.engine: TrainedEngine | None = None
        """The engine; None before `start`."""

    async def start(self) -> None:
        resolve = self._environment.resolve
        settings = to_settings(await in_daemon_thread(resolve, self._args, self._model_path))
        setup = await build_setup(settings, await load_agents(settings))
        self._opened.push_async_callback(setup.close)
        if self._scores:
            await in_daemon_thread(check_scores, setup, map(self._load_row, self._rows))
        refuse_sampling(setup.sampling, self._args.temperature)
        setup.images = None  # what a tool shows could not be trained on
        _check_tokenizer(self._tokenizer, setup)
        first = [self._load_row(index) for index in self._rows[:LOOKED_AT]]
        for line in first_look(first, setup.tokenizer, scored=not isinstance(setup.reward, RuleReward)):
            logger.warning("%s", line)
        logs = ScratchFolder("trl")
        self._opened.callback(logs.cleanup)
        self.engine = self._make_engine(setup, logs.path)
        self._opened.push_async_callback(self.engine.close)
        await self.engine.start()
        if not self.engine.capabilities.update_weights:
            name = self._environment.engine_name
            raise ConfigError(f"engine {name!r} takes no new weights: it would stay at the first ones")
        self._built = build_worker(setup, self.engine, self._agent_names)
        # One number of places for all: an evaluation comes while groups are generated ahead.
        self._places = asyncio.Semaphore(in_flight_limit(settings))

    async def generate(self, group: PlannedGroup) -> Sequence[Rollout]:
        row, n = self._load_row(group.index), self._args.num_generations
        rows = [(row, group.epoch * n + place) for place in range(n)]
        rollouts, errors = await self._run_all(rows, self._rollout_timeout)
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
        rollouts, errors = await self._run_all([(row, 0) for row in rows], None)
        if rows and len(errors) == len(rows):
            raise TrainingError(f"all {len(rows)} rollouts failed, the last one {errors[-1]}")
        return rollouts

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the folder `source`; shared weights are there already, and only their version is told."""
        assert self.engine is not None, "start() comes first"
        if self._lent is None:
            await self.engine.update_weights(source, version)
        else:
            async with unwrap_engine(self.engine).changing_weights(version):
                pass

    async def close(self) -> None:
        await self._opened.aclose()

    async def _run_all(
        self, rows: Sequence[tuple[PromptRow, int]], seconds: float | None
    ) -> tuple[list[Rollout], list[str]]:
        """The rollouts, and the errors of those that failed."""
        tasks = [asyncio.ensure_future(self._run(row, repeat, seconds)) for row, repeat in rows]
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
            logger.warning(message, len(errors), len(rows), rows[0][0].index, first_line)
        return rollouts, errors

    async def _run(self, row: PromptRow, repeat: int, seconds: float | None) -> Rollout:
        built = self._built
        assert built is not None and self.engine is not None, "start() comes first"
        async with self._places:
            scoring = asyncio.Event()
            running = built.worker.run(row, repeat, on_scoring=scoring.set)
            try:
                result = await (running if seconds is None else within(running, seconds, built.availability))
            except TimeoutError:
                where = "reward function" if scoring.is_set() else "agent loop"
                late = TrainingError(
                    f"it was cut off in its {where}: it took longer than {seconds:g} s, its share of "
                    "async_generation_timeout (for limits of each attempt alone set generation.attempt_timeout)"
                )
                result = make_failure(row.index, repeat, row.prompt_key, 1, "agent", late)
        if self.engine.refused is not None:
            raise ConfigError(str(self.engine.refused)) from self.engine.refused
        return stand_in(row, result) if isinstance(result, Failure) else result.without_side_calls()

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
        return TrainedEngine(engine, self._args.temperature, on_update=rollout.on_weight_update)


class TrainedEngine(ContinuingEngine):
    """The engine of a training: refuses sampling that the loss does not know of, wherever it comes from."""

    def __init__(self, engine: Engine, temperature: float, *, on_update: OnUpdate) -> None:
        super().__init__(engine, on_update=on_update, check=self._refuse)
        self._temperature = temperature
        self.refused: ConfigError | None = None
        """The first refusal. It ends the training: an agent may go on without an answer, and say nothing."""

    def _refuse(self, _capabilities: Capabilities, sampling: SamplingParams) -> None:
        try:
            refuse_sampling(sampling, self._temperature)
        except ConfigError as error:
            self.refused = self.refused or error
            raise


async def within(running: Any, seconds: float, availability: EngineAvailability) -> Any:
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
        extra={_FAILED: f"after {failure.attempts} attempts, {failure.error}\n{failure.traceback}"},
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


def _check_tokenizer(trainers: Any, setup: RolloutSetup) -> None:
    """Refuses a tokenizer of the environment that is not the trainer's.

    A chat template that the environment names, alone or with a tokenizer, is meant to be another one.
    """
    model = setup.settings.actor_rollout_ref.model
    own = setup.tokenizer
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
