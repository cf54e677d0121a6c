"""A plain `rollout_func` for TRL's own `GRPOTrainer`: rollouts of an environment, without any ahead."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from rollstream.errors import ConfigError, TrainingError
from rollstream.integrations.trl.config import check_distribution
from rollstream.integrations.trl.environment import RolloutEnvironment, TrainerSays, read_row
from rollstream.integrations.trl.groups import (
    EnvironmentGroups,
    cause_first,
    nothing_ahead,
    run_rows_from,
)
from rollstream.integrations.trl.ranks import from_main
from rollstream.integrations.trl.rows import Fields, RowNumbers, take_slice, to_rows
from rollstream.integrations.trl.weights import FolderWeights, lend
from rollstream.training.ahead import BatchesAhead
from rollstream.training.weight_updates import load_within
from rollstream.trajectory import PromptRow


class EnvRolloutFunction:
    """`GRPOTrainer(rollout_func=EnvRolloutFunction(environment), …)`.

    The engine starts at the first call and gets the trainer's weights whenever the trainer has made a step.
    TRL hands over prompts alone; with `rows`, what else the agent loop and the reward need is looked up by
    the prompt. Add `env_reward` of `rollstream.integrations.trl.rows` to `reward_funcs` for the environment's
    rewards. TRL ignores the sampler's log-probs here, and has no place for several trajectories of a rollout:
    `GRPOEnvTrainer` trains with both.

    Args:
        environment: agent loop, rewards and engine.
        rows: the training dataset, for the columns besides `prompt`.
        timeout: seconds for one call's rollouts.

    Raises:
        ConfigError: rows of one prompt differ in what a rollout or its reward needs.
    """

    def __init__(self, environment: RolloutEnvironment, *, rows: Any = None, timeout: float = 300.0) -> None:
        environment.refuse_data()
        self._environment = environment
        self._timeout = timeout
        self._columns = {} if rows is None else _by_prompt(rows)
        self._running: tuple[EnvironmentGroups, BatchesAhead] | None = None
        self._folder: FolderWeights | None = None
        self._seen_step = -1
        self._numbers = RowNumbers()

    def __call__(self, prompts: list[Any], trainer: Any) -> Fields:
        """See TRL's `rollout_func`.

        Raises:
            TrainingError: a rollout failed for good, or has several trajectories.
        """
        from accelerate.utils import gather_object

        every = gather_object([self._row(prompt) for prompt in prompts])
        step, shares = trainer.state.global_step, self._environment.engine_name == "hf"
        if self._folder is None:
            self._folder = FolderWeights(trainer.accelerator, None)
        folder = None
        if step != self._seen_step and not shares:
            folder = self._folder.write(trainer.model, step)

        def run() -> Fields:
            if self._running is None:
                self._running = self._begin(trainer, folder, shares=shares)
            elif folder is not None:  # shared ones are there: nothing is generated while the optimizer steps
                self._update(*self._running, folder, step)
            rollouts = run_rows_from(*self._running, self._numbers.number(every), self._timeout)
            made = to_rows(rollouts, end_id=trainer.processing_class.eos_token_id)
            if made.snapshots:
                raise TrainingError(
                    f"{len(rollouts)} rollouts have {made.trained} trajectories, and TRL trains one for each: "
                    "use GRPOEnvTrainer, or an agent loop that does not edit its context"
                )
            return made.fields

        fields = from_main(trainer.accelerator, run)
        self._seen_step = step
        return take_slice(fields, trainer.accelerator.process_index, trainer.accelerator.num_processes)

    def close(self) -> None:
        """Ends the engine."""
        if self._running is not None:
            self._running[1].stop()
            self._running = None
        if self._folder is not None:
            self._folder.close()

    def _begin(
        self, trainer: Any, folder: str | None, *, shares: bool
    ) -> tuple[EnvironmentGroups, BatchesAhead]:
        check_distribution(trainer.args)
        groups = EnvironmentGroups(
            self._environment,
            trainer_says(trainer),
            _no_plan,
            lent_model=lend(trainer.accelerator.unwrap_model(trainer.model)) if shares else None,
            first_weights=folder,
        )
        batches = nothing_ahead(groups)
        batches.start()
        return groups, batches

    def _update(self, groups: EnvironmentGroups, batches: BatchesAhead, folder: str, step: int) -> None:
        assert self._folder is not None
        with cause_first(batches):
            update = functools.partial(groups.update_weights, folder, step)
            load_within(batches.submit, update, step, self._timeout)
        self._folder.forget_older()

    def _row(self, prompt: Any) -> PromptRow:
        return read_row({**self._columns.get(repr(prompt), {}), "prompt": prompt}, 0)


def trainer_says(trainer: Any) -> TrainerSays:
    """What a `GRPOTrainer` decides of the rollouts."""
    args, tokenizer = trainer.args, trainer.processing_class
    return TrainerSays(
        model_path=trainer.model.config._name_or_path or None,
        temperature=args.temperature,
        response_length=args.max_completion_length,
        n=args.num_generations,
        seed=args.seed,
        template_kwargs=args.chat_template_kwargs or {},
        tokenizer=getattr(tokenizer, "tokenizer", tokenizer),
    )


def _by_prompt(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    columns, needs = dict[str, dict[str, Any]](), dict[str, Any]()
    for number, example in enumerate(rows):
        key, row = repr(example["prompt"]), read_row(example, number)
        need = (row.data_source, row.ground_truth, row.agent_name, row.tools_kwargs)
        if needs.setdefault(key, need) != need:
            raise ConfigError(
                f"row {number} has the prompt of an earlier one and another answer, data_source, agent_name or "
                "tools_kwargs: TRL hands over prompts alone, so they cannot be told apart. Use GRPOEnvTrainer"
            )
        columns[key] = dict(example)
    return columns


def _no_plan(index: int) -> PromptRow:
    raise TrainingError(f"a rollout_func has no plan, and so no row {index}")
