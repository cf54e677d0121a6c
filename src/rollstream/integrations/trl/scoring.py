"""What TRL computes of rollouts that are there: rewards, advantages, and log-probs of several policies."""

import logging
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from rollstream.errors import TrainingError
from rollstream.integrations.trl.shared_prompt import PromptsNotShared, completion_logprobs
from rollstream.training.corrections import is_stats, masked_is_weights, truncated_is_weights

logger = logging.getLogger(__name__)


class ScoringTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is not followed by the type checker
    """`GRPOTrainer` that uses the sampler's log-probs, by `GRPOEnvConfig.sampler_correction`.

    It leaves failed rollouts out of the rewards, and computes a prompt once for all its completions.
    """

    _awaits_old_policy = False
    _cannot_share_prompts = False
    _silent: torch.Tensor | None = None
    """Of the micro-batch whose loss is being computed, `[B]`: rows from which no gradient comes."""
    _unscored = 0.0
    """Share of the rollouts of the batch that is being trained, all processes', without any reward."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # TRL computes the old policy first, when a batch lasts for more than one step.
        computes_old = self.args.gradient_accumulation_steps % self.args.generate_every != 0
        self._awaits_old_policy = computes_old and self.args.sampler_correction == "ratio"
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._awaits_old_policy = False
        return self._use_sampler_logprobs(output)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        """Of all processes `[rollouts, functions]`; NaN for a failed rollout: it has no part in a mean."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        failed = [int(bool(example.get("env_failed"))) for example in inputs]
        everywhere = self.accelerator.gather(torch.tensor(failed, device=rewards.device))
        rewards = rewards.masked_fill(everywhere[:, None] > 0, torch.nan)
        self._note_unscored(rewards.isnan().all(dim=1) & (everywhere == 0), everywhere > 0, inputs)
        return rewards

    def _note_unscored(
        self, unscored: torch.Tensor, failed: torch.Tensor, inputs: list[dict[str, Any]]
    ) -> None:
        """Of all processes' rollouts: those that no function gave a reward, and those that failed.

        Raises:
            TrainingError: no rollout of a batch to train on has a reward, because the environment's raised.
        """
        share = float(unscored.float().mean())
        if not self.model.training:
            self._metrics["eval"]["rollstream/unscored"].append(share)
            return
        self._unscored = share
        if not bool(unscored.any()) or bool((~unscored & ~failed).any()):
            return
        causes = [
            error for error in gather_object([_reward_error(one) for one in inputs]) if error is not None
        ]
        if causes:
            raise TrainingError(
                f"none of the batch's {int(unscored.sum())} rollouts could be scored, so nothing would be "
                f"learnt: {causes[0]} ({len(causes)} such errors)"
            )

    def _use_sampler_logprobs(self, output: dict[str, Any]) -> dict[str, Any]:
        """Puts the sampler's log-probs to the use that `sampler_correction` says.

        TRL itself uses them with `use_vllm` only. The loss multiplies a token's advantage, so weights of
        tokens go into advantages of tokens.
        """
        kind, sampled = self.args.sampler_correction, output["sampling_per_token_logps"]
        if kind == "none":
            return output
        if kind == "ratio":
            output["old_per_token_logps"] = sampled
            return output
        mask = output["completion_mask"] * output["tool_mask"]
        old = output.get("old_per_token_logps")
        if old is None:
            old = self._logprobs_now(output)
        level = self.args.sampler_level
        if kind == "truncate":
            weights = truncated_is_weights(old, sampled, mask, cap=self.args.sampler_ratio_max, level=level)
        else:
            low, high = self.args.sampler_ratio_min, self.args.sampler_ratio_max
            weights = masked_is_weights(old, sampled, mask, low=low, high=high, level=level)
        output["old_per_token_logps"] = old
        output["advantages"] = output["advantages"].unsqueeze(1) * weights
        mode = "train" if self.model.training else "eval"
        for name, value in is_stats(old, sampled, mask).items():
            self._metrics[mode][f"rollstream/sampler_{name}"].append(value)
        return output

    def _logprobs_now(self, output: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        now: torch.Tensor = logps
        return now

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        # An advantage of 0 makes a token's loss 0 in all of TRL's losses, but for what else is in them: a KL
        # term. (With an entropy bonus prompts are not shared.)
        if self.beta == 0.0:
            self._silent = (inputs["advantages"].reshape(len(inputs["completion_ids"]), -1) == 0).all(dim=1)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._silent = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Any:
        if self._awaits_old_policy and model is self.model and not torch.is_grad_enabled():
            # For which `_use_sampler_logprobs` puts the sampler's. What comes after it is a reference: a
            # PEFT model's is the same model without its adapters.
            self._awaits_old_policy = False
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        others = compute_aux_loss or any(value is not None for value in images.values())
        if not others and self._shares_prompts():
            try:
                logps, entropies = self._sharing_prompts(
                    model, input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids)
                )
            except PromptsNotShared as reason:
                self._cannot_share_prompts = True
                logger.warning("each prompt is computed for each of its completions: %s", reason)
            else:
                return logps, (entropies if compute_entropy else None), None
        return super()._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **images,
        )

    def _sharing_prompts(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, keep: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, `size` rows at once."""
        parts = []
        silent = self._silent
        for begin in range(0, len(input_ids), size):
            rows = slice(begin, begin + size)
            with self.accelerator.autocast():
                parts.append(
                    completion_logprobs(
                        model,
                        input_ids[rows],
                        attention_mask[rows],
                        keep,
                        temperature=self.temperature,
                        silent=None if silent is None else silent[rows],
                    )
                )
        logps, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        return logps, entropies

    def _shares_prompts(self) -> bool:
        """One process: DDP counts one forward for a backward. Checkpointing: it takes no cache.

        An entropy bonus needs the graph of the entropies.
        """
        args = self.args
        return bool(
            args.share_prompts
            and not self._cannot_share_prompts
            and self.accelerator.num_processes == 1
            and not args.gradient_checkpointing
            and not args.cast_lm_head_to_fp32
            and not self._entropy_bonus_enabled
            and not self._is_vlm
            and not self.is_fsdp_enabled
            and not self.is_deepspeed_enabled
        )


def _reward_error(example: dict[str, Any]) -> str | None:
    """Why the environment's reward has none for a rollout, if it failed."""
    extra = example.get("env_reward_extra") or {}
    return str(extra["error"]) if example.get("env_reward") is None and "error" in extra else None
