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
        "Batches that are generated ahead, and steps by which a batch may be older than the weights that it trains. "
        "0: nothing is generated while the trainer trains.",
    )
    async_generation_timeout: float = _setting(
        300.0,
        "Seconds to wait for a batch before the training fails. A rollout fails after 0.8 of that, all attempts "
        "together, unless the environment sets generation.attempt_timeout.",
    )
    async_max_queue_size: int | None = _setting(
        None,
        "The most batches that are generated or being generated beyond the one being trained. None: "
        "2 * num_steps_async. Values above num_steps_async change nothing, because staleness is the tighter bound.",
    )
    use_async_generation: bool = _setting(True, "False: as num_steps_async=0.")
    sampler_correction: str = _setting(
        "ratio",
        "How the loss uses the sampler's log-probs. ratio: as the old policy's in the clipped ratio. truncate, mask: "
        "the trainer computes the old policy's, and each token's loss is weighted by the truncated (TIS) or masked "
        "(MIS) ratio between the two. none: not at all, as in TRL.",
    )
    sampler_level: str = _setting(
        "token", "The level at which truncate and mask take the ratio: token, sequence or geometric."
    )
    sampler_ratio_max: float = _setting(2.0, "truncate: the ratio's cap; mask: beyond it the weight is 0.")
    sampler_ratio_min: float = _setting(0.5, "mask: below it the weight is 0.")
    step_reward_weight: float = _setting(
        0.0,
        "Weight of a turn's own advantage, which is added to its rollout's: the reward's `steps`, summed up from the "
        "turn on, compared with the same turn of the group's other rollouts.",
    )
    step_reward_gamma: float = _setting(1.0, "step_reward_weight: discounts the steps of later turns.")
    token_reward_weight: float = _setting(
        0.0, "Weight of the reward's `tokens`, which are added to the advantages of tokens as they are."
    )
    weight_sync: str = _setting(
        "drain",
        "drain: a weight update waits until nothing is being generated; in_flight: it comes between tokens; "
        "pinned (PEFT models): a rollout ends under the adapter that it began with, and nothing waits. hf shares the "
        "trainer's weights and is always updated in flight; with pinned weights it has a copy of the model.",
    )
    weight_sync_timeout: float = _setting(
        300.0, "Seconds for a weight update, including the wait for an idle engine."
    )
    weights_dir: str | None = _setting(
        None,
        "The folder in which weights are written for the engine's servers to read, best in memory, with room for two "
        "copies. None: a temporary folder of this machine.",
    )
    weight_transfer: str = _setting(
        "folder",
        "folder: weights are written for the engine to read; gloo (TCP), nccl (between CUDA devices): they are sent to "
        "servers of vLLM or SGLang; deltas: what changed is written into weights_dir, for `rollstream weights` beside "
        "the servers.",
    )
    order: str = _setting(
        "plan",
        "plan: batches hold the sampler's prompts in its order; first: groups that are finished first, as far as "
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
        "With order='first', the finished groups that are trained first: spread (the greater the spread of the "
        "rewards, the sooner), or package.module.name (path.py:name) of a function of a rollstream.training.Group.",
    )
    batch_tokens: int | None = _setting(
        None,
        "Tokens (prompts and responses) of a batch of dynamic size: it takes more prompts than TRL's settings ask for, "
        "until the next one would exceed this.",
    )
    batch_groups_max: int | None = _setting(
        None, "With batch_tokens, the most prompts of a batch. None: four times TRL's."
    )
    save_on_interrupt: bool = _setting(
        False,
        "The first Ctrl-C finishes the batch, saves a checkpoint and ends; a second one ends at once. False: Ctrl-C "
        "ends at once.",
    )
    rollout_store: str | None = _setting(
        "rollouts",
        "The folder in which each finished rollout is kept, so that a crash costs unfinished ones only; within "
        "output_dir unless it is absolute. `rollstream view`, `eval`, `export` read it. None: nothing is kept.",
    )
    rollout_store_keep_steps: int | None = _setting(
        None,
        "Batches that were trained more than this many batches before the last checkpoint but one are deleted. None: "
        "none are.",
    )
    rollout_store_max_bytes: int | None = _setting(
        None,
        "Beyond this many bytes set-aside rollouts and the oldest batches are deleted, but none that the last two "
        "checkpoints may need. None: nothing is.",
    )
    rollout_replay: str | None = _setting(
        None,
        "The store of another training (its rollout_store), whose batches are trained on again in their order, until "
        "there are no more; no engine runs and nothing is stored. resume_from_checkpoint takes that training's, too.",
    )
    teacher: dict[str, str] | str | None = _setting(  # noqa: RUF009  # a field, as all of them
        None,
        "A model that gives its log-probs of each finished rollout's tokens, for distill_coef: a folder or hub name of "
        "one that is loaded here, or URLs of its servers. Several by name (a mapping, or JSON text): each row's "
        "teacher_column names its own. None: no teacher.",
    )
    teacher_column: str = _setting("teacher", "With several teachers, the column that names a row's.")
    distill_coef: float = _setting(
        0.0,
        "On-policy distillation: this times (the teacher's log-prob - the sampler's) is added to the advantage of each "
        "token. For distillation alone set reward_weights to 0.",
    )
    max_failed_groups: int = _setting(
        8,
        "The most groups in a row whose rollouts may all fail; one more ends the training. A failed rollout is not "
        "trained on, and has no part in its group's mean.",
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
