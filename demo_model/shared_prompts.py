"""The demo's trainer: each prompt is computed once, whatever the number of its completions.

GRPO's batches hold every prompt n times. A decoder's keys and values of a prompt do not depend on what comes
after it, so they are computed once, and the completions of the prompt attend to them: the gradient flows
through them to the weights as it does through n copies, summed. Rows are grouped by length, so that a short
prompt is not padded to a long one. Rows whose advantage is 0 have no gradient: they are computed for the logs
alone, without a backward.

For decoders whose cache holds keys and values only, in one process, without gradient checkpointing, without a
KL term and without an entropy bonus: what the demo trains.
"""

from typing import Any

import torch

from rollstream.integrations.trl import GRPOEnvTrainer

_SPREAD = 1.5
"""Prompts of a bucket differ in length by at most this factor: padding then costs less than another pass."""


class SharedPromptsTrainer(GRPOEnvTrainer):
    """`GRPOEnvTrainer` with a forward pass of its own."""

    _silent: torch.Tensor | None = None
    """Of the micro-batch whose loss is being computed, `[B]`: rows from which no gradient comes."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._silent = (inputs["advantages"].reshape(len(inputs["completion_ids"]), -1) == 0).all(dim=1)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._silent = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: Any, logits_to_keep: int, **more: Any
    ) -> Any:
        if self._skips_old_policy:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **more
            )
        logps, entropies = completion_logprobs(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            temperature=self.temperature,
            silent=self._silent,
        )
        return logps, entropies, None


def completion_logprobs(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    temperature: float,
    silent: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the completions' tokens.

    Args:
        model: a causal decoder whose forward takes and returns a cache of keys and values, with TRL's fused head
            (`trl.trainer.utils.add_fused_lm_head`, outputs `log_probs` and `entropy`) of this temperature.
        input_ids: `[B, P + C]` int64: prompts padded on the left, completions on the right.
        attention_mask: of the same shape, 1 where there is a token.
        logits_to_keep: C.
        temperature: by which logits are divided.
        silent: `[B]` bool: rows from which no gradient comes, whatever the loss; None: there are none.

    Returns:
        Both `[B, C]`, 0 where there is no token; the log-probs with a graph (silent rows: without), the
        entropies without.
    """
    if silent is None or not torch.is_grad_enabled() or not bool(silent.any()):
        return _of_rows(model, input_ids, attention_mask, logits_to_keep, temperature)
    if bool(silent.all()):
        silent = silent.clone()
        silent[0] = False  # a loss without a graph has no backward
    logps = input_ids.new_zeros(len(input_ids), logits_to_keep, dtype=torch.float32)
    entropies = torch.zeros_like(logps)
    for rows, learns in ((~silent, True), (silent, False)):
        with torch.set_grad_enabled(learns):
            part, entropy = _of_rows(
                model, input_ids[rows], attention_mask[rows], logits_to_keep, temperature
            )
        logps = logps.index_put((rows,), part)
        entropies[rows] = entropy
    return logps, entropies


def _of_rows(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, of rows that all have a graph or none."""
    width = input_ids.shape[1] - logits_to_keep
    prompts, prompt_mask = input_ids[:, :width], attention_mask[:, :width]
    completions, completion_mask = input_ids[:, width:], attention_mask[:, width:]
    # A prompt is its tokens and how many there are: padding may equal a token.
    keyed = torch.cat([prompt_mask.sum(1, keepdim=True), prompts * prompt_mask], dim=1)
    unique, which = torch.unique(keyed, dim=0, return_inverse=True)
    lengths = unique[:, 0].tolist()
    logps = completions.new_zeros(completions.shape, dtype=torch.float32)
    entropies = torch.zeros_like(logps)
    pieces: list[tuple[Any, Any]] = []
    for chosen in buckets(lengths):
        wanted = torch.tensor(chosen, device=which.device)
        rows = torch.isin(which, wanted).nonzero()[:, 0]
        place = torch.full((len(lengths),), -1, device=which.device)
        place[wanted] = torch.arange(len(chosen), device=which.device)
        long = max(lengths[i] for i in chosen)
        most = max(1, int(completion_mask[rows].sum(1).max()))
        of_prompts = unique[wanted, 1:][:, width - long :]
        mask = torch.arange(long, device=which.device) >= long - unique[wanted, :1]
        part, entropy = _bucket(
            model,
            of_prompts,
            mask.long(),
            place[which[rows]],
            completions[rows, :most],
            completion_mask[rows, :most],
            temperature,
        )
        pieces.append((rows, part))
        entropies[rows, :most] = entropy
    for rows, part in pieces:
        padded = torch.nn.functional.pad(part, (0, logits_to_keep - part.shape[1]))
        logps = logps.index_add(0, rows, padded)
    return logps, entropies


def buckets(lengths: list[int]) -> list[list[int]]:
    """Groups indices so that within a group the longest is at most `_SPREAD` times the shortest."""
    groups: list[list[int]] = []
    least = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not groups or lengths[i] > _SPREAD * max(1, least):
            groups.append([])
            least = lengths[i]
        groups[-1].append(i)
    return groups


def _bucket(
    model: Any,
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    which: torch.Tensor,
    completions: torch.Tensor,
    completion_mask: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for `prompts [U, P]` and the completions `[R, C]` of prompt `which [R]`."""
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
    whole = bool(prompt_mask.all())
    asked = model(
        input_ids=prompts,
        attention_mask=None if whole else prompt_mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
    )
    cache = asked.past_key_values
    first = (asked.logits[:, -1].float() / temperature).log_softmax(-1)
    counted = completion_mask.float()
    logps = first[which, completions[:, 0]][:, None]
    with torch.no_grad():
        entropies = -(first.exp() * first).sum(-1).index_select(0, which)[:, None]
    if completions.shape[1] > 1:
        cache.batch_select_indices(which)
        begin = prompt_mask.sum(1).index_select(0, which)[:, None]
        steps = torch.arange(completions.shape[1] - 1, device=prompts.device)
        # What is padded on the right comes after all that counts, and attention is causal.
        mask = None
        if not whole:
            mask = torch.cat(
                [prompt_mask.index_select(0, which), torch.ones_like(completions[:, :-1])], dim=1
            )
        labels = completions[:, 1:].masked_fill(completion_mask[:, 1:] == 0, -100)
        answered = model(
            input_ids=completions[:, :-1],
            attention_mask=mask,
            position_ids=begin + steps,
            past_key_values=cache,
            shift_labels=labels,
            fused_lm_head=True,
        )
        logps = torch.cat([logps, answered.log_probs.float()], dim=1)
        entropies = torch.cat([entropies, answered.entropy.detach().float()], dim=1)
    return logps * counted, entropies * counted
