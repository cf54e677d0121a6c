"""The demo's trainer: each prompt is computed once, whatever the number of its completions.

GRPO's batches hold every prompt n times, padded to the longest row. Here a prompt and its completions are one
sequence, whose attention mask keeps the completions from seeing each other:

    token      p p p | P a a a | P b | P c c        P: the prompt's last token, once for each completion
    position   0 1 2 | 3 4 5 6 | 3 4 | 3 4 5
    predicts         | a a a a | b b | c c c

Sequences are grouped by length, so that a short one is not padded to a long one. Groups without an advantage
have no gradient: they are computed for the logs alone, without a backward.

For decoders with attention alone and a plain output layer, in one process, without gradient checkpointing,
without a KL term and without an entropy bonus: what the demo trains.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rollstream.integrations.trl import GRPOEnvTrainer

_SPREAD = 1.5
"""Sequences of a bucket differ in length by at most this factor: padding then costs less than another pass."""

_HEAD_ROWS = 4096
"""Tokens whose logits are in memory at once."""


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

    def _forward(self, model: Any, *arguments: Any, **more: Any) -> Any:
        logps, entropies = completion_logprobs(
            model, *arguments, temperature=self.temperature, silent=self._silent
        )
        return logps, entropies, None


@dataclass(slots=True)
class _Group:
    """A prompt and its completions, as one sequence."""

    prompt: list[int]
    rows: list[int] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) - 1 + sum(map(len, self.completions))


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
        model: a causal language model of transformers.
        input_ids: `[B, P + C]` int64: prompts padded on the left, completions on the right.
        attention_mask: of the same shape, 1 where there is a token.
        logits_to_keep: C.
        temperature: by which logits are divided.
        silent: `[B]` bool: rows from which no gradient comes, whatever the loss; None: there are none.

    Returns:
        Both `[B, C]`, 0 where there is no token; the log-probs with a graph (groups of silent rows: without), the
        entropies without.
    """
    groups = _groups(input_ids, attention_mask, input_ids.shape[1] - logits_to_keep)
    quiet = [False] * len(input_ids) if silent is None else silent.tolist()
    learning = [one for one in groups if not all(quiet[row] for row in one.rows)]
    learning = learning or groups[:1]  # a loss without a graph has no backward
    others = [one for one in groups if not any(one is learner for learner in learning)]
    logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
    entropies = torch.zeros_like(logps)
    for some, learns in ((learning, torch.is_grad_enabled()), (others, False)):
        for bucket in buckets([one.length for one in some]):
            with torch.set_grad_enabled(learns):
                places, part, entropy = _bucket(model, [some[i] for i in bucket], temperature)
            logps = logps.index_put(places, part)
            entropies[places] = entropy
    return logps, entropies


def _groups(input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> list[_Group]:
    """The rows by their prompts; a row without a completion is in none."""
    groups: dict[tuple[int, ...], _Group] = {}
    prompts, completions = (
        attention_mask[:, :width].sum(1).tolist(),
        attention_mask[:, width:].sum(1).tolist(),
    )
    for row, (ids, asked, answered) in enumerate(zip(input_ids.tolist(), prompts, completions, strict=True)):
        prompt = ids[width - asked : width]
        if answered:
            group = groups.setdefault(tuple(prompt), _Group(prompt))
            group.rows.append(row)
            group.completions.append(ids[width : width + answered])
    return list(groups.values())


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
    model: Any, groups: list[_Group], temperature: float
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """For all tokens of the completions: which row and column they are, their log-probs and entropies."""
    long = max(one.length for one in groups)
    ids, positions, parts = ([[0] * long for _ in groups] for _ in range(3))
    asked_at: list[tuple[int, int, int]] = []  # sequence, place in it, the token that comes next
    told: list[tuple[int, int]] = []
    for number, group in enumerate(groups):
        shared = len(group.prompt) - 1
        tokens, places, part_of = list(group.prompt[:-1]), list(range(shared)), [1] * shared
        for part, (row, completion) in enumerate(zip(group.rows, group.completions, strict=True), start=2):
            begin, count = len(tokens), len(completion)
            tokens += [group.prompt[-1], *completion[:-1]]
            places += range(shared, shared + count)
            part_of += [part] * count
            asked_at += [(number, begin + i, token) for i, token in enumerate(completion)]
            told += [(row, i) for i in range(count)]
        ids[number][: len(tokens)] = tokens
        positions[number][: len(tokens)] = places
        parts[number][: len(tokens)] = part_of
    device = model.device
    whose = torch.tensor(parts, device=device)
    seen = (whose[:, :, None] == whose[:, None, :]) | (whose == 1)[:, None, :]
    hidden = model.base_model(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=_additive(seen.tril(), model.dtype)[:, None],
        position_ids=torch.tensor(positions, device=device),
        use_cache=False,
    ).last_hidden_state
    number, place, token = torch.tensor(asked_at, device=device).unbind(1)
    states, head = hidden[number, place], model.get_output_embeddings()
    scored = [
        checkpoint(_score, head, one, wanted, temperature, use_reentrant=False)
        for one, wanted in zip(states.split(_HEAD_ROWS), token.split(_HEAD_ROWS), strict=True)
    ]
    logps, entropies = map(torch.cat, zip(*scored, strict=True))
    row, column = torch.tensor(told, device=device).unbind(1)
    return (row, column), logps, entropies


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _score(
    head: Any, states: torch.Tensor, wanted: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = (head(states).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, wanted[:, None])[:, 0], entropy
