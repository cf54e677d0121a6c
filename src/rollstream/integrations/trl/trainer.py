"""`GRPOEnvTrainer`: TRL's GRPO on rollouts of an environment, generated ahead of the step.

    trainer's thread (every process)                    generation thread (main process)
    _generate_and_score_completions  <- next batch ---- groups of the sampler's next prompts
    forward, backward, optimizer step                   … meanwhile those of the batches after it
    on_step_end: the batch is trained;   -- weights --> the engine: version + 1

A *batch* here is what TRL calls a generation batch: `steps_per_generation * num_iterations` micro-steps long.
"""

import sys
import threading
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_utils import SaveStrategy

from rollstream.errors import ConfigError, GenerationStoppedError, TrainingError
from rollstream.integrations.trl.checkpoints import last_whole, read_state, write_state
from rollstream.integrations.trl.config import GRPOEnvConfig
from rollstream.integrations.trl.environment import (
    EnvironmentGroups,
    RolloutEnvironment,
    TrainerSays,
    read_row,
)
from rollstream.integrations.trl.fields import Fields, env_reward, take_slice, to_fields
from rollstream.integrations.trl.plan import SamplerReplay, dataset_digest
from rollstream.integrations.trl.ranks import failing_together, from_main
from rollstream.integrations.trl.row_numbers import RowNumbers
from rollstream.integrations.trl.scoring import ScoringTrainer
from rollstream.integrations.trl.session import EnvironmentThread, OfBatches, run_rows
from rollstream.integrations.trl.weights import FolderWeights, SharedWeights, lend
from rollstream.stop_signals import ending_on_sigterm
from rollstream.training.ahead import BatchesAhead
from rollstream.training.timing import StepTimes

_ROLLOUT_SHARE = 0.8
"""Of the time for which a batch is waited for, what one rollout of it may take. One that hangs has failed
then, while the batch can still come; most are begun before it is asked for, so little has to be left."""

_EVALUATION_S = 3600.0
"""For the rollouts of one evaluation batch; the attempts in it have limits of their own."""


class GRPOEnvTrainer(ScoringTrainer):
    """GRPO whose completions are rollouts of an environment.

    The dataset's rows are prompt rows, as in rollstream's data files: `prompt`, and what the agent loop and
    the reward need (`answer`, `reward_model`, `extra_info`, `agent_name`, …). Reward functions of TRL's may
    be added; they get `env_reward`, `env_messages`, `env_reward_extra` and `env_failed` of each rollout, and
    the columns. A rollout that failed for good has no token in the loss and no part in its group's mean.

    Args:
        model: as TRL takes it.
        environment: agent loop, rewards and engine.
        args: see `GRPOEnvConfig`.
        train_dataset: a `datasets.Dataset`; None: the environment's own data files and tasks.
        reward_funcs: added to the environment's reward.
        others: as `GRPOTrainer` takes them, but for `rollout_func`, `tools` and `environment_factory`.

    Raises:
        ConfigError: these do not go together.
    """

    _tag_names = ["trl", "grpo", "rollstream"]  # noqa: RUF012  # as in TRL

    def __init__(
        self,
        model: Any,
        environment: RolloutEnvironment,
        args: GRPOEnvConfig | None = None,
        train_dataset: Any = None,
        reward_funcs: Any = None,
        **others: Any,
    ) -> None:
        for name in ("rollout_func", "tools", "environment_factory"):
            if others.get(name) is not None:
                raise ConfigError(
                    f"{name} is TRL's own way to make rollouts: the environment makes them here"
                )
        if args is None:
            args = GRPOEnvConfig("grpo-env")
        dataset = environment.dataset() if train_dataset is None else train_dataset
        if not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                "train_dataset must be a datasets.Dataset: prompts ahead are taken by their index"
            )
        SamplerReplay(len(dataset), args.groups_per_batch, seed=0, shuffle=False)  # says if there are too few
        added = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] if reward_funcs else []
        super().__init__(
            model=model,
            reward_funcs=[env_reward, *added],
            args=args,
            train_dataset=dataset,
            **others,
        )
        self.rollout_func = _no_rollouts  # given to the constructor, TRL would warn of it
        self._environment = environment
        self._shares_weights = environment.engine_name == "hf"
        if self._shares_weights and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ConfigError(
                "engine 'hf' shares the trainer's weights, which are sharded here: use a server"
            )
        self._folder = FolderWeights(self.accelerator, args.weights_dir)
        self._shared: SharedWeights | None = None
        self._batches: BatchesAhead | None = None
        self._groups: EnvironmentGroups | None = None
        self._generating = False
        self._resumed: dict[str, Any] | None = None
        self._trained_batches = 0
        self._batch_step = -1
        self._failed = 0
        self._engine_step = -1
        self._saving_waits = self._evaluation_waits = False
        self._in_checkpoint = False
        self._evaluation_numbers = RowNumbers(len(dataset))
        self.add_callback(_StepEnds(self))

    @property
    def batches(self) -> BatchesAhead | None:
        """What generates ahead; None before the first batch, and in all but the main process."""
        return self._batches

    @property
    def step_times(self) -> StepTimes | None:
        """Where the time of each batch went; None where `batches` is."""
        return None if self._batches is None else self._batches.times

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """As `Trainer.train`. Generation ends with it, however it ends, by SIGTERM too (`SystemExit`).

        Raises:
            TrainingError: generation failed (the cause is attached), or another process did.
        """
        # A training that ended in the middle of a batch leaves the rest of it; one that was resumed and did
        # not start, what it was to go on from.
        self._step, self._buffered_inputs, self._batches, self._resumed = 0, None, None, None
        self._saving_waits = self._evaluation_waits = False
        with ending_on_sigterm(), failing_together(self.accelerator):
            try:
                if resume_from_checkpoint is True:
                    last = from_main(self.accelerator, lambda: last_whole(self.args.output_dir))
                    resume_from_checkpoint = True if last is None else last  # TRL says that there is none
                return super().train(resume_from_checkpoint, *arguments, **keywords)
            finally:
                self._end_generation()

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """As `Trainer.evaluate`; every evaluation of the same rows has the same seeds."""
        self._evaluation_numbers = RowNumbers(len(self.train_dataset))
        return super().evaluate(*arguments, **keywords)

    # --- rollouts in

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training:
            inputs, fields = self._next_batch(len(inputs))
        else:
            fields = self._rollouts_of(inputs)
        self.rollout_func = lambda prompts, trainer: fields
        return super()._generate_and_score_completions(inputs)

    def _next_batch(self, local: int) -> tuple[list[dict[str, Any]], Fields]:
        """The process's part of the next batch: the dataset's rows, and what became of them."""
        if not self._generating:
            self._begin_generation()
        indices, fields = from_main(self.accelerator, self._take_batch)
        self._failed = sum(fields["env_failed"])
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if len(indices) != local * ranks:
            raise TrainingError(f"a batch has {len(indices)} rollouts; {ranks} processes train {local} each")
        mine = indices[rank * local : (rank + 1) * local]
        # Rows are read once, and copied: TRL writes into them.
        examples = {index: self.train_dataset[index] for index in dict.fromkeys(mine)}
        return [dict(examples[index]) for index in mine], take_slice(fields, rank, ranks)

    def _take_batch(self) -> tuple[list[int], Fields]:
        """In the main process: the next batch, whole."""
        assert self._batches is not None
        batch = self._batches.next_batch(self.args.async_generation_timeout)
        self._batch_step = batch.step
        fields = to_fields(batch.rollouts, end_id=self._tokenizer.eos_token_id)
        indices = [group.index for group in batch.groups for _ in group.rollouts]
        return indices, fields

    def _log_batch(self) -> None:
        """In the main process, when a batch has been trained: what it was, beside TRL's own numbers of it."""
        step = None if self._batches is None else self._batches.under_way
        if step is None:
            return
        step.unscored = self._unscored  # other functions may have scored what the environment did not
        metrics = {**step.numbers(), "rollstream/failed": float(self._failed)}
        for staleness in range(self.args.steps_ahead + 1):
            share = step.staleness.count(staleness) / len(step.staleness)
            metrics[f"rollstream/staleness_{staleness}"] = share
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _rollouts_of(self, inputs: list[dict[str, Any]]) -> Fields:
        """Rollouts of the rows of all processes, made once; this process's part."""
        rows = [read_row(example, index) for index, example in enumerate(inputs)]
        every = gather_object(rows)
        end_id = self._tokenizer.eos_token_id
        folder = None
        if self._generating:
            if self._ends(self.control) and self._engine_step != self.state.global_step:
                self._give_weights()  # after the last step nobody else has
        elif not self._shares_weights:
            folder = self._folder.write(self.model, self.state.global_step)

        def run() -> Fields:
            numbered = self._evaluation_numbers.number(every)
            if self._generating:
                assert self._groups is not None and self._batches is not None
                running = OfBatches(self._batches)
                return to_fields(run_rows(self._groups, running, numbered, _EVALUATION_S), end_id=end_id)
            groups = self._make_groups(folder, version=0)
            own.append(EnvironmentThread(groups))
            if left.is_set():
                raise GenerationStoppedError("nobody waits for this evaluation any more")
            with own[0] as thread:
                return to_fields(run_rows(groups, thread, numbered, _EVALUATION_S), end_id=end_id)

        own, left = list[EnvironmentThread](), threading.Event()
        try:
            fields = from_main(self.accelerator, run)
        finally:
            left.set()
            for thread in own:  # `run` may be in another thread, which nobody waits for any more
                thread.stop()
        self._metrics["eval"]["rollstream/failed"].append(float(sum(fields["env_failed"])))
        return take_slice(fields, self.accelerator.process_index, self.accelerator.num_processes)

    # --- weights out

    def _hold_engine(self) -> None:
        if self._shared is not None:
            last = (self._step % self.args.generate_every) == 0
            self._shared.hold(self._trained_batches + (1 if last else 0))

    def _release_engine(self) -> None:
        if self._shared is not None:
            self._shared.release()

    def _step_ended(self, control: TrainerControl) -> None:
        """After an optimizer step: when it was a batch's last, the batch is trained and the engine is told.

        A checkpoint in the middle of a batch waits for its end, for what is half trained can neither be
        skipped nor trained again; an evaluation that decides on one waits with it. Those of the last step do
        not wait: a checkpoint owes its batch then.
        """
        if self._step % self.args.generate_every:
            if not self._ends(control):
                self._postpone(control)
            return
        control.should_save |= self._saving_waits
        control.should_evaluate |= self._evaluation_waits
        self._saving_waits = self._evaluation_waits = False
        self._trained_batches += 1
        if self._batches is not None:
            self._batches.trained(self._batch_step)
        if not self._ends(control):
            self._give_weights()
        self._log_batch()

    def _ends(self, control: TrainerControl) -> bool:
        return bool(self.state.global_step >= self.state.max_steps or control.should_training_stop)

    def _postpone(self, control: TrainerControl) -> None:
        decides = control.should_evaluate and self.args.save_strategy == SaveStrategy.BEST
        if control.should_save or decides:
            self._saving_waits |= control.should_save
            self._evaluation_waits |= control.should_evaluate
            control.should_save = control.should_evaluate = False

    def _give_weights(self) -> None:
        """The engine gets the weights as they are now, as those of the batches trained."""
        step = self.state.global_step
        folder = "" if self._shares_weights else self._folder.write(self.model, step)

        def push() -> None:
            assert self._batches is not None
            self._batches.update_weights(folder or "", timeout=self.args.weight_sync_timeout)

        from_main(self.accelerator, push)
        self._folder.forget_older()
        self._engine_step = step

    # --- the generation thread

    def _begin_generation(self) -> None:
        args = self.args
        batches_before = 0 if self._resumed is None else int(self._resumed["trained_batches"])
        self._trained_batches = batches_before
        self._engine_step = self.state.global_step
        folder = None if self._shares_weights else self._folder.write(self.model, self._engine_step)

        def begin() -> None:
            steps_a_batch = args.generate_every // args.gradient_accumulation_steps
            replay = SamplerReplay(
                len(self.train_dataset),
                args.groups_per_batch,
                seed=args.seed,
                shuffle=bool(self.shuffle_dataset),
                content=dataset_digest(self.train_dataset),
            )
            self._groups = self._make_groups(folder, version=batches_before)
            self._batches = BatchesAhead(
                replay.plan(length=-(-self.state.max_steps // steps_a_batch) * args.groups_per_batch),
                self._groups,
                groups_per_step=args.groups_per_batch,
                max_staleness=args.steps_ahead,
                ahead=args.batches_ahead,
                order=args.order,
                weights="in_flight" if self._shares_weights else args.weight_sync,
                weight_timeout=args.weight_sync_timeout,
            )
            if self._resumed is not None:
                self._batches.load_state_dict(self._resumed["batches"])
            if self._shares_weights:
                self._shared = SharedWeights(self._groups, OfBatches(self._batches), args.weight_sync_timeout)
            if not given_up.is_set():
                self._batches.start()

        given_up = threading.Event()
        try:
            from_main(self.accelerator, lambda: begin() if self.accelerator.is_main_process else None)
        except BaseException:
            given_up.set()  # `begin` may be in another thread; what it starts from now on, nobody would end
            raise
        self._generating, self._resumed = True, None

    def _make_groups(self, folder: str | None, *, version: int) -> EnvironmentGroups:
        args, dataset = self.args, self.train_dataset
        lent = lend(self.accelerator.unwrap_model(self.model)) if self._shares_weights else None
        named = dataset["agent_name"] if "agent_name" in dataset.column_names else []
        return EnvironmentGroups(
            self._environment,
            TrainerSays(
                model_path=self.model.config._name_or_path or None,
                temperature=args.temperature,
                response_length=args.max_completion_length,
                n=args.num_generations,
                seed=args.seed,
                template_kwargs=args.chat_template_kwargs or {},
                tokenizer=self._tokenizer,
            ),
            lambda index: read_row(dataset[index], index),
            lent_model=lent,
            first_weights=folder,
            first_version=version,
            agent_names={name for name in named if name},
            max_failed_groups=args.max_failed_groups,
            rollout_timeout=_ROLLOUT_SHARE * args.async_generation_timeout,
            to_score=None
            if len(self.reward_funcs) > 1
            else lambda: (read_row(dataset[index], index) for index in range(len(dataset))),
        )

    def _end_generation(self) -> None:
        if not self._generating:
            if self._batches is not None:
                self._batches.stop()  # another process failed while they were being started
            return
        self._generating = False
        if self._shared is not None:
            self._shared.let_go()  # an optimizer that failed leaves the engine held
            self._shared = None
        if self._batches is not None:
            self._batches.stop()
            if self._batches.times.steps:
                # Not by a logger: TRL's users see tables of their trainers, whatever the level of ours.
                sys.stderr.write(self._batches.times.table() + "\n")
        self._folder.close()

    # --- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._step % self.args.generate_every and not self._ends(self.control):
            self._saving_waits = True  # asked for by a callback after ours
            return
        self._in_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._in_checkpoint = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`. In a checkpoint, what was trained on follows the model at once.

        Not later: older checkpoints go at the end of one that is saved.
        """
        super().save_model(output_dir, _internal_call)
        if self._in_checkpoint and self._batches is not None and self._generating:
            state = {"trained_batches": self._trained_batches, "batches": self._batches.state_dict()}
            write_state(Path(output_dir or self.args.output_dir), state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._resumed = read_state(checkpoint)


class _StepEnds(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Tells the trainer when an optimizer step is about to be made, was made, and has ended."""

    def __init__(self, trainer: GRPOEnvTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._hold_engine()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._release_engine()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._step_ended(control)


def _no_rollouts(prompts: Any, trainer: Any) -> Any:
    raise TrainingError("the trainer takes its rollouts from its batches")
