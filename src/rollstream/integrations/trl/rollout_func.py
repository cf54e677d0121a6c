"""A plain `rollout_func` for TRL's own `GRPOTrainer`: rollouts of an environment, without any ahead."""

import functools
from collections.abc import Callable
from typing import Any

from rollstream.errors import TrainingError
from rollstream.integrations.trl.config import check_distribution
from rollstream.integrations.trl.environment import (
    EnvironmentGroups,
    RolloutEnvironment,
    TrainerSays,
    read_row,
)
from rollstream.integrations.trl.fields import Fields, take_slice, to_fields
from rollstream.integrations.trl.ranks import from_main
from rollstream.integrations.trl.row_numbers import RowNumbers
from rollstream.integrations.trl.session import EnvironmentThread, cause_first, run_rows
from rollstream.integrations.trl.weights import FolderWeights, lend
from rollstream.training.weight_updates import load_within
from rollstream.trajectory import PromptRow


class EnvRolloutFunction:
    """`GRPOTrainer(rollout_func=EnvRolloutFunction(environment), …)`.

    The engine starts at the first call and gets the trainer's weights whenever the trainer has made a step.
    TRL hands over prompts alone; with `rows`, what else the agent loop and the reward need is looked up by
    the prompt. Add `env_reward` of `rollstream.integrations.trl.fields` to `reward_funcs` for the
    environment's rewards. TRL ignores the sampler's log-probs here: `GRPOEnvTrainer` uses them.

    Args:
        environment: agent loop, rewards and engine.
        rows: the training dataset, for the columns besides `prompt`.
        timeout: seconds for one call's rollouts.
    """

    def __init__(self, environment: RolloutEnvironment, *, rows: Any = None, timeout: float = 300.0) -> None:
        self._environment = environment
        self._timeout = timeout
        self._columns = {} if rows is None else {_key(row["prompt"]): dict(row) for row in rows}
        self._thread: EnvironmentThread | None = None
        self._groups: EnvironmentGroups | None = None
        self._folder: FolderWeights | None = None
        self._seen_step = -1
        self._numbers = RowNumbers()

    def __call__(self, prompts: list[Any], trainer: Any) -> Fields:
        """See TRL's `rollout_func`."""
        from accelerate.utils import gather_object

        every = gather_object([self._row(prompt) for prompt in prompts])
        step = trainer.state.global_step
        shares = self._environment.engine_name == "hf"
        if self._folder is None:
            self._folder = FolderWeights(trainer.accelerator, None)
        folder = None
        if step != self._seen_step and not shares:
            folder = self._folder.write(trainer.model, step)
        end_id = trainer.processing_class.eos_token_id

        def run() -> Fields:
            if self._thread is None:
                self._begin(trainer, folder, shares=shares)
            elif step != self._seen_step:
                self._update(folder, step)
            assert self._groups is not None and self._thread is not None
            rows = self._numbers.number(every)
            return to_fields(run_rows(self._groups, self._thread, rows, self._timeout), end_id=end_id)

        fields = from_main(trainer.accelerator, run)
        self._seen_step = step
        return take_slice(fields, trainer.accelerator.process_index, trainer.accelerator.num_processes)

    def close(self) -> None:
        """Ends the engine."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        if self._folder is not None:
            self._folder.close()

    def _begin(self, trainer: Any, folder: str | None, *, shares: bool) -> None:
        args = trainer.args
        check_distribution(args)
        self._groups = EnvironmentGroups(
            self._environment,
            TrainerSays(
                model_path=trainer.model.config._name_or_path or None,
                temperature=args.temperature,
                response_length=args.max_completion_length,
                n=args.num_generations,
                seed=args.seed,
                template_kwargs=args.chat_template_kwargs or {},
                tokenizer=getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
            ),
            _no_plan,
            lent_model=lend(trainer.accelerator.unwrap_model(trainer.model)) if shares else None,
            first_weights=folder,
        )
        self._thread = EnvironmentThread(self._groups)
        self._thread.start()

    def _update(self, folder: str | None, step: int) -> None:
        assert self._groups is not None and self._thread is not None and self._folder is not None
        if folder is None:
            return  # shared, and nothing is generated while the optimizer steps
        update = functools.partial(self._groups.update_weights, folder, step)
        with cause_first(self._thread):
            load_within(self._thread.submit, update, step, self._timeout)
        self._folder.forget_older()

    def _row(self, prompt: Any) -> PromptRow:
        return read_row({**self._columns.get(_key(prompt), {}), "prompt": prompt}, 0)


def _key(prompt: Any) -> str:
    return repr(prompt)


def _no_plan(index: int) -> PromptRow:
    raise TrainingError(f"a rollout_func has no plan, and so no row {index}")


RolloutFunc = Callable[[list[Any], Any], Fields]
"""What TRL takes for `rollout_func`."""
