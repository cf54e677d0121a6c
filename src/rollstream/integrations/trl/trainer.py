"""`GRPOEnvTrainer`: TRL's GRPO on rollouts of an environment, generated ahead of the step.

    trainer's thread (every process)                    generation thread (main process)
    _generate_and_score_completions  <- next batch ---- groups of the next prompts
    forward, backward, optimizer step                   … meanwhile those of the batches after it
    on_step_end: the batch is trained;   -- weights --> the engine: version + 1

A *batch* here is what TRL calls a generation batch: `steps_per_generation * num_iterations` micro-steps long.
"""

import itertools
import math
import sys
from collections.abc import Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_utils import SaveStrategy
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from rollstream.data.mixed import SOURCE
from rollstream.engine.weight_channel import WeightChannel
from rollstream.engine.weight_deltas import DeltaChannel
from rollstream.errors import ConfigError, TrainingError
from rollstream.evaluate import Samples, joined, samples_of, summarize
from rollstream.integrations.configured_groups import mixture_of
from rollstream.integrations.trl import checkpoints, ranks
from rollstream.integrations.trl.config import GRPOEnvConfig
from rollstream.integrations.trl.environment import (
    IMAGE_COLUMNS,
    RolloutEnvironment,
    check_dataset,
    datasets_of,
    read_row,
)
from rollstream.integrations.trl.group_log import GroupLog, group_records
from rollstream.integrations.trl.groups import (
    ROLLOUT_SHARE,
    EnvironmentGroups,
    failure_of,
    settled,
    stand_in,
)
from rollstream.integrations.trl.plan import (
    SamplerReplay,
    check_prompts,
    make_plan,
    make_policies,
    refuse_later_rewards,
    sample_prompts,
)
from rollstream.integrations.trl.rows import (
    BatchRows,
    Fields,
    Row,
    append_rows,
    empty_row,
    env_reward,
    snapshot_advantages,
    take_slice,
    to_rows,
    with_added,
)
from rollstream.integrations.trl.weights import FolderWeights, SharedWeights, adapter_rank, lend
from rollstream.mismatch import FIGURES, figure_sums, means_of
from rollstream.rollout import teachers
from rollstream.rollout.teachers import Teachers
from rollstream.rollout.worker import make_failure
from rollstream.stop_signals import ending_on_sigterm
from rollstream.store.scores import notes_path
from rollstream.training.ahead import BatchesAhead
from rollstream.training.corrections import is_stats, masked_is_weights, truncated_is_weights
from rollstream.training.group import GroupBatch
from rollstream.training.plan import FunctionPlan, Plan
from rollstream.training.step_rewards import token_advantages
from rollstream.training.store import TrainingStore
from rollstream.training.timing import StepTimes
from rollstream.trajectory import PromptRow, Rollout, SamplingParams

_FILLS = TrainingError("it only fills up a batch")

_EVALUATION_S = 3600.0
"""For the rollouts of one evaluation batch; the attempts in it have limits of their own."""

_MEANS_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""TRL's losses that divide by the number of rows. The others divide by tokens, of which an empty row has none."""

_TRLS_OWN = ("rollout_func", "tools", "environment_factory")


class GRPOEnvTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is not followed by the type checker
    """GRPO whose completions are rollouts of an environment.

    The dataset's rows are prompt rows, as in rollstream's data files: `prompt`, and what the agent loop and
    the reward need (`answer`, `reward_model`, `extra_info`, `agent_name`, …). Reward functions of TRL's may
    be added; they get `env_reward`, `env_messages`, `env_reward_extra` and `env_failed` of each rollout, and
    the columns. A rollout that failed for good has no token in the loss and no part in its group's mean. Each
    trajectory of a rollout is a row of its own in the loss, weighted alike; a group's mean and deviation are those of
    its final trajectories, and of the snapshots with a reward of their own.

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
        if own := [name for name in _TRLS_OWN if others.get(name) is not None]:
            raise ConfigError(f"{', '.join(own)}: the environment makes the rollouts, with tools of its own")
        if not isinstance(environment, RolloutEnvironment):
            raise ConfigError(
                f"the second argument is the RolloutEnvironment, not {environment!r:.100}; reward functions "
                "are reward_funcs=…"
            )
        args = GRPOEnvConfig("grpo-env") if args is None else args
        if not isinstance(args, GRPOEnvConfig):
            raise ConfigError(f"args must be a GRPOEnvConfig; it is a {type(args).__name__}")
        if train_dataset is not None:
            environment.refuse_data()
        dataset = environment.dataset() if train_dataset is None else train_dataset
        sampling = SamplingParams(args.max_completion_length, args.temperature)
        every = [dataset, *datasets_of(others.get("eval_dataset"))]
        self._agent_names = set().union(*(check_dataset(one, sampling) for one in every))
        # What the training would refuse when it begins is refused here.
        SamplerReplay(len(dataset), args.groups_per_batch, seed=0, shuffle=False)
        make_plan(args, len(dataset), batches=1, shuffle=False)
        make_policies(args)
        if environment.sources and args.curriculum is not None:
            raise ConfigError(f"curriculum={args.curriculum!r} and data.sources: both say which prompts come")
        added = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] if reward_funcs else []
        refuse_later_rewards(args, len(added))
        funcs = [env_reward, *added]
        super().__init__(model=model, reward_funcs=funcs, args=args, train_dataset=dataset, **others)
        self.rollout_func = _no_rollouts  # given to the constructor, TRL would warn of it
        self._environment = environment
        self._adapter_rank = adapter_rank(self.accelerator.unwrap_model(self.model))
        pinned = args.weight_sync == "pinned"
        if pinned and not self._adapter_rank:
            raise ConfigError("weight_sync='pinned' takes a PEFT model: see peft_config, docs/trl.md")
        self._shares_weights = environment.engine_name == "hf" and not pinned
        if self._shares_weights and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ConfigError(
                "engine 'hf' shares the trainer's weights, which are sharded here: use a server"
            )
        self._rank, self._ranks = self.accelerator.process_index, self.accelerator.num_processes
        if args.batch_tokens is not None and args.num_generations % self._ranks:
            raise ConfigError(
                f"batch_tokens on {self._ranks} processes needs num_generations to be a multiple of that"
            )
        # What rollouts are pinned to is there for a server that has to load it again.
        kept = args.steps_ahead + 1 if pinned else 1
        transport: Any = args.weight_transfer
        channel: WeightChannel | DeltaChannel | None = None
        if transport == "deltas":
            dtype = "bfloat16" if args.bf16 else None
            channel = DeltaChannel(args.weights_dir or "", dtype=dtype, timeout=args.weight_sync_timeout)
        elif transport != "folder":
            channel = WeightChannel(transport)
        self._folder = FolderWeights(self.accelerator, args.weights_dir, kept, channel)
        self._shared: SharedWeights | None = None
        self._batches: BatchesAhead | None = None
        self._groups: EnvironmentGroups | None = None
        self._generating = False
        self._resumed: dict[str, Any] | None = None
        self._replays = True
        self._continues = False
        self._prompts: list[str] = []
        self._trained_batches = 0
        self._last_batch: float = math.inf  # of a replay
        self._delivered: GroupBatch | None = None  # the batch that is being trained, in the main process
        self._rows: BatchRows | None = None  # its rollouts
        self._scored: list[list[Rollout]] = []  # with the rewards of several functions
        self._group_log = GroupLog(self.args.output_dir)
        self._rewards = torch.empty(0)
        self._unscored = 0.0
        self._skips_old_policy = False
        self._compared: dict[str, Any] | None = (
            None  # whose loss is being computed, if the sampler is looked at
        )
        self._mismatch = np.zeros(1 + len(FIGURES))  # of the batch so far, in this process
        self._engine_step = self._saved_step = -1
        self._saving_waits = self._evaluation_waits = False
        self._interrupt = checkpoints.Interrupt(enabled=args.save_on_interrupt)
        # Outside of a training an evaluation has an engine of its own.
        self._evaluated_by: tuple[EnvironmentGroups, BatchesAhead] | None = None
        self._judged: list[Samples] = []  # of an evaluation so far, in the main process
        events = {
            "on_pre_optimizer_step": self._hold_engine,
            "on_optimizer_step": self._release_engine,
            "on_step_end": self._step_ended,
        }
        self.add_callback(_Callback(**events))

    @property
    def batches(self) -> BatchesAhead | None:
        """The batches that are generated ahead; None before the first one, and in all but the main process."""
        return self._batches

    async_generator = batches
    """The same: `get_pending_count()`, `get_average_generation_time()`."""

    @property
    def step_times(self) -> StepTimes | None:
        """The times of each batch; None where `batches` is."""
        return None if self._batches is None else self._batches.times

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Trains as `Trainer.train` does. Generation ends with it, however it ends, by SIGTERM too (`SystemExit`).

        Raises:
            TrainingError: generation failed (the cause is attached), or another process did.
            KeyboardInterrupt: Ctrl-C, see `save_on_interrupt`.
        """
        # A training that ended in the middle of a batch leaves the rest of it; one that was resumed and did
        # not start, what it was to go on from.
        self._step, self._buffered_inputs, self._batches, self._resumed = 0, None, None, None
        self._saving_waits = self._evaluation_waits = self._continues = False
        self._saved_step = -1
        folder = self.args.output_dir
        try:
            with ending_on_sigterm(), ranks.failing_together(self.accelerator), self._interrupt:
                try:
                    if resume_from_checkpoint is True:
                        resume_from_checkpoint = self._from_main(lambda: checkpoints.last_whole(folder))
                        if (
                            resume_from_checkpoint is None
                        ):  # of none, and no store, TRL says that there is none
                            self._continues = self._from_main(self._has_store)
                            resume_from_checkpoint = None if self._continues else True
                    trained = super().train(resume_from_checkpoint, *arguments, **keywords)
                    if self._is_interrupted():
                        if self._saved_step != self.state.global_step:
                            self._save_checkpoint(self.model, trial=None)  # it came after the last step
                        raise KeyboardInterrupt
                    return trained
                finally:
                    self._end_generation()
        except (KeyboardInterrupt, SystemExit):
            if self.accelerator.is_main_process:
                sys.stderr.write(checkpoints.how_to_resume(folder, self.state.global_step) + "\n")
            raise

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **keywords: Any) -> Any:
        """Evaluates as `Trainer.evaluation_loop` does; the same rows have the same indices, and so seeds, each time.

        Engine hf has the trainer's present weights, other engines have those of the last batch's end. Outside of a
        training an engine is started for it, and ends with it. The metrics also have the figures of `rollstream
        eval`, of the environment's reward. No teacher is asked.
        """
        self._evaluation_indices = itertools.count(len(self.train_dataset))  # those below are the training's
        self._judged = []
        rows = dataloader.dataset
        if self._generating and self.args.rollout_replay is not None:
            raise ConfigError("rollout_replay has no engine to evaluate with: evaluate when it has ended")
        self._to_evaluate = len(rows) * self.num_generations_eval if isinstance(rows, Sized) else sys.maxsize
        try:
            if not self._generating:
                folder = self._write_weights()
                self._from_main(lambda: self._begin_evaluation(folder))
            elif self._ends(self.control) and self._engine_step != self.state.global_step:
                self._give_weights()  # after the last step nobody else has
            output = super().evaluation_loop(dataloader, *arguments, **keywords)
            figures = self._from_main(lambda: summarize(joined(self._judged)).numbers())
            prefix = keywords.get("metric_key_prefix", "eval")
            output.metrics.update({f"{prefix}_rollstream/{name}": one for name, one in figures.items()})
            return output
        finally:
            if self._evaluated_by is not None:
                self._evaluated_by[1].stop()
            self._evaluated_by = None
            if not self._generating:
                self._folder.close()

    def _begin_evaluation(self, folder: str) -> None:
        """In the main process: starts an engine with batches of nothing, for `run_rows` alone."""
        groups, timeout = self._make_groups(), self.args.weight_sync_timeout
        nothing = FunctionPlan(lambda position: (0, position), identity={}, length=0)
        batches = BatchesAhead(nothing, groups, groups_per_step=1, weight_timeout=timeout)
        self._evaluated_by = groups, batches
        batches.start(weights=folder)

    def _from_main(self, make: Any) -> Any:
        return ranks.from_main(self.accelerator, make)

    # --- rollouts in

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = None
        if self.model.training:
            inputs, fields = self._next_batch(len(inputs))
            rows = self._rows
        else:
            fields = self._rollouts_of(inputs)
        # There are none in them, but TRL would prepare the prompts for images.
        inputs = [{name: one[name] for name in one if name not in IMAGE_COLUMNS} for one in inputs]
        self.rollout_func = lambda prompts, trainer: fields
        # TRL computes the old policy of the final trajectories first; it is computed below, of all, if it is.
        self._skips_old_policy = self._lasts_several_steps
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._skips_old_policy = False
        output.pop("old_per_token_logps", None)
        if rows is not None:
            if self._delivered is not None:
                self._log_groups(self._delivered)
            output = self._with_snapshots(output, rows)
            if rows.added:
                finals = len(rows.fields["prompt_ids"])
                mine = self._slice({**rows.fields, "added": rows.added[:finals]})["added"]
                output = with_added(output, mine + rows.added[finals:][self._rank :: self._ranks])
        return self._use_sampler_logprobs(output)

    @property
    def _lasts_several_steps(self) -> bool:
        """Whether a batch is trained on by more than one optimizer step: then the loss needs the old policy."""
        return bool(self.args.gradient_accumulation_steps % self.args.generate_every)

    def _next_batch(self, local: int) -> tuple[list[dict[str, Any]], Fields]:
        """The process's part of the next batch: the dataset's rows, and what became of them."""
        if not self._generating:
            self._begin_generation()
        indices, self._rows = self._from_main(self._take_batch)
        if self.args.batch_tokens is not None:
            local = len(indices) // self._ranks
        if len(indices) != local * self._ranks:
            raise TrainingError(
                f"a batch has {len(indices)} rollouts; {self._ranks} processes train {local} each"
            )
        mine = indices[self._rank * local : (self._rank + 1) * local]
        # Rows are read once, and copied: TRL writes into them.
        examples = {index: self.train_dataset[index] for index in dict.fromkeys(mine)}
        return [dict(examples[index]) for index in mine], self._slice(self._rows.fields)

    def _slice(self, fields: Fields) -> Fields:
        return take_slice(fields, self._rank, self._ranks)

    def _take_batch(self) -> tuple[list[int], BatchRows]:
        """In the main process: the next batch, whole."""
        assert self._batches is not None
        batch = self._delivered = self._batches.next_batch(self.args.async_generation_timeout)
        rows = to_rows(batch.rollouts, end_id=self._tokenizer.eos_token_id)
        if self.args.distill_coef:
            self._check_taught(batch.rollouts, rows)
        if self.args.step_reward_weight or self.args.token_reward_weight or self.args.distill_coef:
            rows.added = self._added_advantages(batch)
        return [group.index for group in batch.groups for _ in group.rollouts], rows

    def _added_advantages(self, batch: GroupBatch) -> list[list[float]]:
        finals, snapshots = list[list[float]](), list[list[float]]()
        for group in batch.groups:
            added = iter(
                token_advantages(
                    [one for rollout in group.rollouts for one in rollout.trajectories],
                    step_weight=self.args.step_reward_weight,
                    gamma=self.args.step_reward_gamma,
                    token_weight=self.args.token_reward_weight,
                    distill_coef=self.args.distill_coef,
                    scale=self.scale_rewards != "none",
                )
            )
            for rollout in group.rollouts:
                *earlier, final = [next(added) for _ in rollout.trajectories]
                snapshots += earlier
                finals.append(final)
        return finals + snapshots

    def _check_taught(self, rollouts: Sequence[Rollout], rows: BatchRows) -> None:
        """Counts the rollouts without a teacher's log-probs, whose advantages have nothing of it.

        Raises:
            TrainingError: none of the batch has them.
        """
        done = [one.final for one in rollouts if failure_of(one) is None]
        several = isinstance(self.args.teacher, dict)  # a row may name none
        untaught = [one for one in done if teachers.NAME not in one.streams]
        untaught = [one for one in untaught if not several or teachers.ERROR in one.extra]
        rows.figures["rollstream/untaught"] = len(untaught) / max(1, len(done))
        if done and len(untaught) == len(done):
            cause = next((one.extra[teachers.ERROR] for one in untaught if teachers.ERROR in one.extra), None)
            raise TrainingError(
                f"none of the batch's {len(done)} rollouts has a teacher's log-probs, so nothing would be learnt "
                f"of it: {cause or 'they were made without one'}"
            )
        taught = [one for each in rollouts for one in each.trajectories if teachers.NAME in one.streams]
        sums = [
            figure_sums(one.response_logprobs, one.streams[teachers.NAME], one.response_mask)
            for one in taught
        ]
        apart = means_of(np.sum(sums, axis=0)) if sums else {}
        rows.figures |= {f"rollstream/teacher_{name}": apart[name] for name in ("k1", "k3") if name in apart}

    def _log_groups(self, batch: GroupBatch) -> None:
        """In the main process, when a batch has its rewards: which groups the next steps are made of."""
        totals = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(1)
        unscored = self._rewards.isnan().all(1).tolist()
        rewards = [None if no else total for total, no in zip(totals.tolist(), unscored, strict=True)]
        first = self.state.global_step + 1
        steps = self.args.generate_every // self.args.gradient_accumulation_steps
        self._group_log.write(first, first + steps - 1, group_records(batch, rewards, self._load_row))
        self._scored = self._as_scored(batch, rewards) if len(self.reward_funcs) > 1 else []

    def _as_scored(self, batch: GroupBatch, rewards: Sequence[float | None]) -> list[list[Rollout]]:
        """The finished rollouts of each group with TRL's rewards, and what each function gave in `reward_extra`."""
        left = zip(rewards, self._rewards.tolist(), strict=True)
        scored = list[list[Rollout]]()
        for group in batch.groups:
            scored.append([])
            for rollout, (reward, each) in zip(
                group.rollouts, itertools.islice(left, len(group.rollouts)), strict=True
            ):
                if failure_of(rollout) is None:
                    given = zip(self.reward_func_names, each, strict=True)
                    named = {name: None if math.isnan(one) else one for name, one in given}
                    *earlier, final = rollout.trajectories
                    final = replace(final, reward=reward, reward_extra={**final.reward_extra, **named})
                    scored[-1].append(replace(rollout, trajectories=[*earlier, final]))
        return scored

    def _log_batch(self) -> None:
        """When a batch has been trained: in the main process, what it was, beside TRL's own numbers of it."""
        mismatch = means_of(sum(gather_object([self._mismatch])))
        self._mismatch = np.zeros_like(self._mismatch)
        step = None if self._batches is None else self._batches.under_way
        if step is None or self._rows is None:
            return
        step.unscored = self._unscored  # other functions may have scored what the environment did not
        metrics = {**step.numbers(), **self._rows.figures}
        metrics |= {f"rollstream/kl_{name}": value for name, value in mismatch.items()}
        for staleness in range(self.args.steps_ahead + 1):
            share = step.staleness.count(staleness) / len(step.staleness)
            metrics[f"rollstream/staleness_{staleness}"] = share
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _rollouts_of(self, inputs: list[dict[str, Any]]) -> Fields:
        """Rollouts of the rows of all processes, made once; this process's part, of final trajectories."""
        every = gather_object([read_row(example) for example in inputs])
        # The last batch of several processes is filled up with rows that were evaluated already.
        every, filling = every[: self._to_evaluate], every[self._to_evaluate :]
        self._to_evaluate -= len(every)

        def run() -> Fields:
            groups, batches = self._evaluated_by or (self._groups, self._batches)
            assert groups is not None and batches is not None
            indexed = [replace(row, index=next(self._evaluation_indices)) for row in every]
            rollouts = batches.run(lambda: groups.run_rows(indexed), _EVALUATION_S)
            self._judged.append(samples_of(map(settled, rollouts)))
            rollouts += [
                stand_in(row, make_failure(0, 0, row.prompt_key, 0, "agent", _FILLS)) for row in filling
            ]
            return to_rows(rollouts, end_id=self._tokenizer.eos_token_id).fields

        fields = self._from_main(run)
        failed = float(sum(fields["env_failed"]) - len(filling))
        self._metrics["eval"]["rollstream/failed"].append(failed)
        return self._slice(fields)

    # --- rewards, rows and the loss

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *completions: Any) -> Any:
        """The rewards of all processes, `[rollouts, functions]`; NaN for a failed rollout: it has no part in a mean.

        Raises:
            TrainingError: no rollout of a batch to train on has a reward, because the environment's raised.
        """
        rewards = super()._calculate_rewards(inputs, *completions)
        failed = [int(bool(example.get("env_failed"))) for example in inputs]
        everywhere = self.accelerator.gather(torch.tensor(failed, device=rewards.device)) > 0
        self._rewards = rewards.masked_fill(everywhere[:, None], torch.nan)
        unscored = self._rewards.isnan().all(dim=1) & ~everywhere
        share = float(unscored.float().mean())
        if not self.model.training:
            self._metrics["eval"]["rollstream/unscored"].append(share)
            return self._rewards
        self._unscored = share
        if bool(unscored.any()) and bool((unscored | everywhere).all()):
            errors = gather_object([_reward_error(example) for example in inputs])
            if causes := [error for error in errors if error is not None]:
                raise TrainingError(
                    f"none of the batch's {int(unscored.sum())} rollouts could be scored, so nothing would be "
                    f"learnt: {causes[0]} ({len(causes)} such errors)"
                )
        return self._rewards

    def _with_snapshots(self, output: dict[str, Any], rows: BatchRows) -> dict[str, Any]:
        """The batch with a row for each snapshot, dealt to the processes in turn.

        Each process has as many rows, and a multiple of the batch's micro-steps: empty rows fill up. Losses that
        are means over rows are scaled so that each trajectory has the same weight, and empty rows none.
        """
        snapshots, rank, ranks = rows.snapshots, self._rank, self._ranks
        local, steps = len(output["advantages"]), self.args.steps_per_generation
        total = math.ceil((local + math.ceil(len(snapshots) / ranks)) / steps) * steps
        if rows.trained and total * ranks != rows.trained:
            output["row_scale"] = output["advantages"].new_tensor(total * ranks / rows.trained)
        if total == local:
            return output
        pad_id = self._tokenizer.pad_token_id
        own = [self._as_masked(snapshot.row, pad_id) for snapshot in snapshots]
        mine = own[rank::ranks]
        mine += [empty_row(self._tokenizer.eos_token_id)] * (total - local - len(mine))
        advantages = snapshot_advantages(
            self._rewards,
            snapshots,
            weights=self.reward_weights.to(self._rewards.device),
            group_size=self.num_generations,
            scale=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
        )
        grown = append_rows(output, mine, pad_id=pad_id, multiple=self.pad_to_multiple_of)
        finals, others = advantages.split([local * ranks, len(snapshots)])
        self._logs["advantages"].extend(finals.tolist())  # for log_completions, in the place of TRL's own
        known = torch.cat([finals[rank * local : (rank + 1) * local], others[rank::ranks]])
        grown["advantages"] = output["advantages"].new_zeros(total)
        grown["advantages"][: len(known)] = known
        grown["num_items_in_batch"] = output["num_items_in_batch"] + sum(sum(row.mask) for row in own)
        if "ref_per_token_logps" in output:
            grown["ref_per_token_logps"] = self._reference_logprobs(grown)
        return grown

    def _as_masked(self, row: Row, pad_id: int) -> Row:
        """The row as TRL's `mask_truncated_completions` wants it."""
        ended = row.completion_ids[-1] in (*self.eos_token_ids, pad_id)
        return row if ended or not self.mask_truncated_completions else replace(row, mask=[0] * len(row.mask))

    def _reference_logprobs(self, output: dict[str, Any]) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logprobs_of(self.ref_model, output)
        model = self.accelerator.unwrap_model(self.model)
        with grpo_trainer.use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logprobs_of(self.model, output)

    def _use_sampler_logprobs(self, output: dict[str, Any]) -> dict[str, Any]:
        """Puts the sampler's log-probs to the use that `sampler_correction` says.

        TRL itself uses them with `use_vllm` only. The loss multiplies a token's advantage, so weights of
        tokens go into advantages of tokens.
        """
        args, sampled = self.args, output["sampling_per_token_logps"]
        kind, level = args.sampler_correction, args.sampler_level
        if kind == "ratio":
            output["old_per_token_logps"] = sampled
        elif kind != "none" or self._lasts_several_steps:
            output["old_per_token_logps"] = self._logprobs_of(self.model, output)
        if kind in ("ratio", "none"):
            return output
        old, mask = output["old_per_token_logps"], output["completion_mask"] * output["tool_mask"]
        low, high = args.sampler_ratio_min, args.sampler_ratio_max
        if kind == "truncate":
            weights = truncated_is_weights(old, sampled, mask, cap=high, level=level)
        else:
            weights = masked_is_weights(old, sampled, mask, low=low, high=high, level=level)
        advantages = output["advantages"]  # of tokens, or of rows
        output["advantages"] = (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)) * weights
        mode = "train" if self.model.training else "eval"
        for name, value in is_stats(old, sampled, mask).items():
            if name.startswith("ratio"):  # the others come of the loss, whatever the correction
                self._metrics[mode][f"rollstream/sampler_{name}"].append(value)
        return output

    def _logprobs_of(self, model: Any, output: dict[str, Any]) -> torch.Tensor:
        ids, mask = (
            torch.cat([output[f"prompt_{kind}"], output[f"completion_{kind}"]], dim=1)
            for kind in ("ids", "mask")
        )
        width, size = output["completion_ids"].size(1), self.args.per_device_train_batch_size
        with torch.no_grad():
            logprobs = self._get_per_token_logps_and_entropies(model, ids, mask, width, batch_size=size)[0]
        found: torch.Tensor = logprobs
        return found

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: Any, logits_to_keep: int, **more: Any
    ) -> Any:
        if self._skips_old_policy and model is self.model:
            # What comes after it is a reference: a PEFT model's is the same model without its adapters.
            self._skips_old_policy = False
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        found = self._forward(model, input_ids, attention_mask, logits_to_keep, **more)
        if (inputs := self._compared) is not None:
            mask = inputs["completion_mask"] * inputs["tool_mask"]
            self._mismatch += figure_sums(inputs["sampling_per_token_logps"], found[0], mask)
        return found

    def _forward(self, model: Any, *arguments: Any, **more: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(model, *arguments, **more)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        # Before the batch's first optimizer step: what the trainer learns of a batch is no mismatch.
        first = self._step % self.args.generate_every < self.args.gradient_accumulation_steps
        self._compared = inputs if first and self.model.training else None
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._compared = None
        scale = inputs.get("row_scale") if self.loss_type in _MEANS_OF_ROWS else None
        return loss if scale is None else loss * scale

    # --- weights out

    def _hold_engine(self, *_: Any, **__: Any) -> None:
        if self._shared is not None:
            last = self._step % self.args.generate_every == 0
            self._shared.hold(self._trained_batches + last)

    def _release_engine(self, *_: Any, **__: Any) -> None:
        if self._shared is not None:
            self._shared.release()

    def _step_ended(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """After an optimizer step: when it was a batch's last, the batch is trained and the engine is told.

        A checkpoint in the middle of a batch waits for its end, for what is half trained can neither be
        skipped nor trained again; an evaluation that decides on one waits with it. Those of the last step do
        not wait: a checkpoint owes its batch then.
        """
        in_batch = self._step % self.args.generate_every != 0
        if in_batch and not self._ends(control):
            decides = control.should_evaluate and self.args.save_strategy == SaveStrategy.BEST
            if control.should_save or decides:
                self._saving_waits |= control.should_save
                self._evaluation_waits |= control.should_evaluate
                control.should_save = control.should_evaluate = False
            return
        if self._is_interrupted():
            control.should_save = control.should_training_stop = True
        control.should_save |= self._saving_waits
        control.should_evaluate |= self._evaluation_waits
        self._saving_waits = self._evaluation_waits = False
        if in_batch:
            return
        self._trained_batches += 1
        control.should_training_stop |= self._trained_batches >= self._last_batch
        if self._batches is not None and self._delivered is not None:
            self._batches.trained(self._delivered.step, self._scored)
        if not self._ends(control):
            self._give_weights()
        self._log_batch()

    def _is_interrupted(self) -> bool:
        """Whether the main process has noted a Ctrl-C, in every process."""
        return self.args.save_on_interrupt and bool(self._from_main(lambda: self._interrupt.asked))

    def _ends(self, control: TrainerControl) -> bool:
        return bool(self.state.global_step >= self.state.max_steps or control.should_training_stop)

    def _write_weights(self) -> str:
        """Has the weights as they are now where the engine finds them, as `update_weights` names that."""
        self._engine_step = self.state.global_step
        if self._generating and self.args.rollout_replay is not None:
            return ""  # nobody takes them
        return "" if self._shares_weights else self._folder.write(self.model, self._engine_step)

    def _give_weights(self) -> None:
        """The engine gets the weights as they are now, as those of the batches trained."""
        folder = self._write_weights()

        def push() -> None:
            assert self._batches is not None
            # Perhaps in the middle of the last batch, where the version has to be named.
            self._batches.update_weights(folder, self._batches.step)

        self._from_main(push)
        self._folder.forget_older()

    # --- the generation thread

    def _begin_generation(self) -> None:
        args, resumed = self.args, self._resumed
        self._generating = True
        self._trained_batches = 0 if resumed is None else int(resumed["trained_batches"])
        folder = self._write_weights()

        def begin() -> float:
            self._group_log.begin(self.state.global_step)
            steps_a_batch = args.generate_every // args.gradient_accumulation_steps
            batches = -(-self.state.max_steps // steps_a_batch)
            shuffle = bool(self.shuffle_dataset)
            plan = self._mixture() or make_plan(
                args, len(self.train_dataset), batches=batches, shuffle=shuffle
            )
            self._prompts = sample_prompts(self.train_dataset)
            if args.rollout_replay is not None:
                return self._begin_replay(args.rollout_replay)
            self._groups = self._make_groups()
            self._batches = BatchesAhead(
                plan,
                self._groups,
                groups_per_step=args.groups_per_batch,
                max_staleness=args.steps_ahead,
                ahead=args.batches_ahead,
                order=args.order,
                weights="in_flight" if self._shares_weights else args.weight_sync,
                weight_timeout=args.weight_sync_timeout,
                store=self._store(),
                on_group_failure="drop_and_refill" if self._groups.replaces_failed else "fail",
                max_failures=args.max_failed_groups,
                teachers=self._teachers(),
                **make_policies(args),
            )
            if resumed is not None:
                self._batches.load_state_dict(resumed["batches"], replay=self._replays)
                check_prompts(resumed["prompts"], self._prompts)
            if self._shares_weights:
                self._shared = SharedWeights(self._groups, self._batches, args.weight_sync_timeout)
            self._batches.start(weights=folder)
            return math.inf

        self._last_batch = self._from_main(begin)

    def _mixture(self) -> Plan | None:
        """The plan of a training with `data.sources`."""
        if not (sources := self._environment.sources):
            return None
        names = [self._load_row(row).columns.get(SOURCE) for row in range(len(self.train_dataset))]
        return mixture_of(sources, names, seed=self.args.seed, shuffle=bool(self.shuffle_dataset))

    def _begin_replay(self, store: str) -> int:
        """In the main process: takes the batches of another training's store; returns how many there are."""
        groups, resumed, size = self._make_groups().replay(store), self._resumed, self.args.groups_per_batch
        self._batches = BatchesAhead(
            groups.plan,
            groups,
            groups_per_step=size,
            max_staleness=self.args.steps_ahead,
            ahead=self.args.batches_ahead,
            weights="in_flight",
            teachers=self._teachers(),
        )
        if resumed is not None:  # from a checkpoint of that training, or of a replay
            self._batches.load_state_dict(groups.state_at(self._trained_batches))
            check_prompts(resumed["prompts"], self._prompts)
        self._batches.start()
        return groups.steps

    def _teachers(self) -> Teachers | None:
        args = self.args
        if args.teacher is None:
            return None
        patience = ROLLOUT_SHARE * args.async_generation_timeout
        return Teachers(args.teacher, column=args.teacher_column, patience=patience)

    def _store(self) -> TrainingStore | None:
        args = self.args
        if args.rollout_store is None or args.rollout_replay is not None:
            return None
        folder = Path(args.output_dir) / Path(args.rollout_store).expanduser()
        return TrainingStore(
            folder,
            keep_steps=args.rollout_store_keep_steps,
            max_bytes=args.rollout_store_max_bytes,
            resume=self._continues,
        )

    def _has_store(self) -> bool:
        """Whether rollouts are there of a training that ended before its first checkpoint."""
        store = self._store()
        return store is not None and notes_path(store.root).exists()

    def _make_groups(self) -> EnvironmentGroups:
        lent, tokenizer = None, self.processing_class
        if self._shares_weights:
            autocast = self.accelerator.autocast if self.accelerator.mixed_precision != "no" else None
            lent = lend(self.accelerator.unwrap_model(self.model), autocast)
        return EnvironmentGroups(
            self._environment,
            self.args,
            len(self.train_dataset),
            self._load_row,
            model_path=self.model.config._name_or_path or None,
            tokenizer=getattr(tokenizer, "tokenizer", tokenizer),
            lent_model=lent,
            adapter_rank=self._adapter_rank,
            agent_names=self._agent_names,
            scores=len(self.reward_funcs) == 1,
        )

    def _load_row(self, index: int) -> PromptRow:
        return read_row(self.train_dataset[index], index)

    def _end_generation(self) -> None:
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
        if self._batches is not None and self._generating:
            # Before TRL's files: older checkpoints go when these are written.
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            state = {"trained_batches": self._trained_batches, "prompts": self._prompts}
            checkpoints.write_state(folder, {**state, "batches": self._batches.state_dict()})
        super()._save_checkpoint(model, trial)
        self._saved_step = self.state.global_step

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> Any:
        """Does as `Trainer` does; a training that has made its steps already has no epoch left."""
        begun = super()._init_training_state(*arguments, **keywords)
        done = self.state.global_step >= self.state.max_steps
        return (self.state.num_train_epochs, 0) if done else begun

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._resumed = checkpoints.read_state(checkpoint)
            # Who goes back to an older one wants other rollouts.
            self._replays = checkpoints.is_newest(checkpoint)


class _Callback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Calls these functions at their events."""

    def __init__(self, **events: Any) -> None:
        self.__dict__.update(events)


def _no_rollouts(prompts: Any, trainer: Any) -> Any:
    raise TrainingError("the trainer takes its rollouts from its batches")


def _reward_error(example: dict[str, Any]) -> str | None:
    """Why the environment's reward has none for a rollout, if it failed."""
    extra = example.get("env_reward_extra") or {}
    return str(extra["error"]) if example.get("env_reward") is None and "error" in extra else None
