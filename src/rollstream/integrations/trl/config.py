"""The settings of `GRPOEnvTrainer`: TRL's, and how batches are generated ahead."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from rollstream.errors import ConfigError


def _setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


_CHOICES = {
    "sampler_correction": ("ratio", "truncate", "mask", "none"),
    "sampler_level": ("token", "sequence", "geometric"),
    "weight_sync": ("drain", "in_flight", "pinned"),
    "weight_transfer": ("folder", "gloo", "nccl", "deltas"),
    "order": ("plan", "first"),
}
_OPTIONAL_COUNTS = (
    *("async_max_queue_size", "batch_tokens", "batch_groups_max"),
    *("rollout_store_keep_steps", "rollout_store_max_bytes"),
)
_SECONDS = ("async_generation_timeout", "weight_sync_timeout")


@dataclass
class GRPOEnvConfig(GRPOConfig):  # type: ignore[misc]  # TRL is not followed by the type checker
    """`GRPOConfig`, and what rollstream adds.

    Raises:
        ConfigError: values that are out of range or do not go together.
    """

    num_steps_async: int = _setting(
        1,
        "Batches by which one may be older than the weights that it trains, and that are generated ahead. 0: "
        "nothing is generated while the trainer trains.",
    )
    async_generation_timeout: float = _setting(
        300.0,
        "Seconds to wait for a batch before the training fails. A rollout of it has failed after 0.8 of them, "
        "unless the environment sets generation.attempt_timeout.",
    )
    async_max_queue_size: int | None = _setting(
        None,
        "Batches that are there or on their way beyond the one being trained, at most. None: "
        "2 * num_steps_async. More than num_steps_async changes nothing: staleness bounds it already.",
    )
    use_async_generation: bool = _setting(True, "False is num_steps_async=0, whatever that says.")
    sampler_correction: str = _setting(
        "ratio",
        "What the sampler's log-probs are for. ratio: they are the old policy's in the loss's clipped ratio. "
        "truncate, mask: the old policy's are computed by the trainer, and each token's loss is weighted by the "
        "truncated (TIS) or masked (MIS) ratio between the two. none: not used, as in TRL.",
    )
    sampler_level: str = _setting(
        "token", "Of what truncate and mask take the ratio: token, sequence or geometric."
    )
    sampler_ratio_max: float = _setting(2.0, "truncate: the ratio's cap; mask: beyond it the weight is 0.")
    sampler_ratio_min: float = _setting(0.5, "mask: below it the weight is 0.")
    step_reward_weight: float = _setting(
        0.0,
        "Of a turn's advantage, beside that of its rollout: the reward's `steps`, summed up from the turn on, "
        "compared with the same turn of the group's other rollouts.",
    )
    step_reward_gamma: float = _setting(1.0, "step_reward_weight: discounts the steps of later turns.")
    token_reward_weight: float = _setting(
        0.0, "Of the reward's `tokens`, which are added to the advantages of tokens as they are."
    )
    weight_sync: str = _setting(
        "drain",
        "drain: a weight update waits until nothing is being generated; in_flight: it comes between tokens; "
        "pinned (PEFT models): a rollout ends under the adapter that it began with, and nothing waits. hf shares the "
        "trainer's weights and is always updated in flight; with pinned weights it has a copy of the model.",
    )
    weight_sync_timeout: float = _setting(
        300.0, "Seconds for a weight update, the wait for an idle engine included."
    )
    weights_dir: str | None = _setting(
        None,
        "Where weights are written for the engine to read: a folder that its servers see, best in memory. None: "
        "a temporary folder of this machine.",
    )
    weight_transfer: str = _setting(
        "folder",
        "folder: weights are written for the engine to read; gloo (TCP), nccl (between CUDA devices): servers of "
        "vLLM or SGLang are sent them; deltas: what changed is written into weights_dir, for `rollstream weights` "
        "beside them.",
    )
    order: str = _setting(
        "plan",
        "plan: batches hold the sampler's prompts in its order; first: what is finished first, as far as "
        "num_steps_async allows.",
    )
    curriculum: str | None = _setting(
        None,
        "Draws prompts by how often they succeeded: medium_first, easy_to_hard, or package.module.name "
        "(path.py:name) of a function that weighs rows. None: the prompts of TRL's own sampler.",
    )
    group_filter: str | None = _setting(
        None,
        "Groups that are thrown away and replaced: no_signal (all rewards are the same), or "
        "package.module.name (path.py:name) of a class like rollstream.training.NoSignal.",
    )
    group_priority: str | None = _setting(
        None,
        "With order='first', which finished groups are trained first: spread (of the rewards, the greater the "
        "sooner), or package.module.name (path.py:name) of a function of a rollstream.training.Group.",
    )
    batch_tokens: int | None = _setting(
        None,
        "Batches of a dynamic size: beyond the prompts that TRL's settings ask for, more are taken until the "
        "next one would bring the batch over so many tokens (of prompts and responses).",
    )
    batch_groups_max: int | None = _setting(
        None, "batch_tokens: prompts of a batch at most. None: four times TRL's."
    )
    save_on_interrupt: bool = _setting(
        False,
        "The first Ctrl-C lets the batch under way be trained, saves a checkpoint and ends; a second one ends "
        "at once. False: Ctrl-C ends at once.",
    )
    rollout_store: str | None = _setting(
        "rollouts",
        "Where each finished rollout is kept, so that a crash costs only what was in flight: a folder, within "
        "output_dir unless it is absolute. `rollstream view`, `eval`, `export` read it. None: nothing is kept.",
    )
    rollout_store_keep_steps: int | None = _setting(
        None,
        "Batches that were trained more than so many batches before the last checkpoint but one are deleted. None: "
        "none are.",
    )
    rollout_store_max_bytes: int | None = _setting(
        None,
        "Beyond so many bytes what was set aside and the oldest batches are deleted, but none that the last two "
        "checkpoints may need. None: nothing is.",
    )
    rollout_replay: str | None = _setting(
        None,
        "The store of another training (its rollout_store), whose batches are trained on again, in their order: "
        "without an engine, without a store of its own, and as long as there are any.",
    )
    teacher: dict[str, str] | str | None = _setting(  # noqa: RUF009  # a field, as all of them
        None,
        "A model that is asked for the log-probs of each finished rollout's tokens, for distill_coef: a folder or hub "
        "name of one that is loaded here, or URLs of its servers. Several by name (a mapping, or JSON text): each "
        "row's teacher_column names its own. None: nobody.",
    )
    teacher_column: str = _setting("teacher", "Of several teachers: the column that names a row's.")
    distill_coef: float = _setting(
        0.0,
        "On-policy distillation: so many times the teacher's log-prob minus the sampler's is added to the advantage of "
        "each token. For that alone set reward_weights to 0.",
    )
    max_failed_groups: int = _setting(
        8,
        "Groups in a row of which every rollout may fail for good; one more ends the training. A failed rollout "
        "is not trained on, and has no part in its group's mean.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.teacher, str) and self.teacher.startswith("{"):
            self.teacher = json.loads(self.teacher)
        counts = [name for name in _OPTIONAL_COUNTS if getattr(self, name) is not None]
        for name in ("num_steps_async", "max_failed_groups", *counts):
            if type(value := getattr(self, name)) is not int or value < 0:
                raise ConfigError(f"{name}={value!r}: a whole number, 0 or more")
        for name in _SECONDS:
            if not isinstance(value := getattr(self, name), int | float) or not value > 0:
                raise ConfigError(f"{name}={value!r}: a number, more than 0 seconds")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}: one of {', '.join(choices)}")
        # Log-probs of a truncated distribution are of another policy than the one that is trained.
        bent = self.top_p != 1.0 or self.top_k or self.min_p or self.repetition_penalty != 1.0
        for wrong, message in (
            (
                not 0 <= self.sampler_ratio_min < self.sampler_ratio_max,
                f"sampler_ratio_min={self.sampler_ratio_min}: at least 0, and below "
                f"sampler_ratio_max={self.sampler_ratio_max}",
            ),
            (
                self.weights_dir is not None and not Path(self.weights_dir).is_dir(),
                f"weights_dir={self.weights_dir}: there is no such folder",
            ),
            (
                self.weights_dir is None and self.weight_transfer == "deltas",
                "weight_transfer='deltas' writes into weights_dir: set it",
            ),
            (
                self.use_vllm or self.use_transformers_continuous_batching or self.generation_kwargs,
                "use_vllm, use_transformers_continuous_batching and generation_kwargs are for TRL's own ways to "
                "generate: the environment's engine generates here, by actor_rollout_ref.rollout.*",
            ),
            (
                self.generate_every % self.gradient_accumulation_steps,
                f"steps_per_generation * num_iterations = {self.generate_every} must be a multiple of "
                f"gradient_accumulation_steps = {self.gradient_accumulation_steps}: batches end with a step",
            ),
            (
                self.rollout_replay is not None and self.eval_strategy != "no",
                "rollout_replay has no engine, which eval_strategy needs: evaluate when it has ended",
            ),
            (
                self.distill_coef and self.teacher is None and self.rollout_replay is None,
                f"distill_coef={self.distill_coef} needs a teacher",
            ),
            (
                self.group_priority is not None and self.order != "first",
                f"group_priority={self.group_priority} needs order='first'",
            ),
            (
                self.batch_groups_max is not None and self.batch_tokens is None,
                "batch_groups_max is for batch_tokens",
            ),
            (
                self.batch_tokens is not None and not self.steps_ahead,
                "batch_tokens needs num_steps_async=1 or more",
            ),
            (
                not self.temperature > 0,
                f"temperature={self.temperature}: all rollouts of a group would be one",
            ),
            (
                bent,
                "top_p, top_k, min_p and repetition_penalty change the sampled distribution, and the loss "
                "knows the model's own: leave them off",
            ),
        ):
            if wrong:
                raise ConfigError(message)

    @property
    def steps_ahead(self) -> int:
        """Batches by which one may be stale; 0 without asynchronous generation."""
        return self.num_steps_async if self.use_async_generation else 0

    @property
    def batches_ahead(self) -> int:
        """Batches that may exist beyond the one being trained."""
        queue = 2 * self.num_steps_async if self.async_max_queue_size is None else self.async_max_queue_size
        return min(self.steps_ahead, queue)

    @property
    def generate_every(self) -> int:
        """Micro-steps for which one generated batch is used."""
        return int(self.steps_per_generation * self.num_iterations)

    @property
    def groups_per_batch(self) -> int:
        """Prompts of one generated batch, over all processes."""
        return int(self.generation_batch_size // self.num_generations)
