"""The model's part of a step of the `hf` engine: keys and values of a batch, its next logits, its next tokens.

It calls a transformers model as `generate` does (`past_key_values`, `attention_mask`, `position_ids`), with a
cache of its own. Imported when a model is loaded: it needs torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from rollstream.engine.base import TopScores
from rollstream.engine.hf_model import attention_kinds
from rollstream.errors import EngineError
from rollstream.trajectory import SamplingParams

GREEDY_BELOW = 1e-6
"""Temperatures that are greedy, besides 0: dividing float32 logits by less may overflow."""

DRAW_BITS = 32
"""Of a draw in [0, 1): the product of a draw and a float64 sum of probabilities then stays below that sum."""

_MAX_ERROR = 0.1
"""Of a batch's logits against a plain forward pass, relative to their spread. bfloat16 is off by some 0.01, a
model that does not attend as it should by 0.3 and more."""


class KeyValues(Cache):  # type: ignore[misc]
    """What the tokens of a batch left in each layer: a row for each sequence, a column for each position.

    All rows are equally long, so the longest sequence decides how many there can be. `reshape` divides the
    same memory anew. Rows in use are the first ones: the last row moves into the place of one that goes.

        row 0  k k k k k . . .      lengths 5
        row 1  k k . . . . . .              2      the last column is never attended to: it takes padding

    Memory is zeroed once and later holds finite numbers only, because a masked NaN would still spread.

    Args:
        tokens: rows x columns at most. The memory is taken by the first forward pass.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(layers=[])
        self.tokens = tokens
        self.columns = 0
        self.lengths: list[int] = []
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shaped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: Any = None
        self._at: Any = None
        self._seen = 0

    @property
    def nbytes(self) -> int:
        """The memory that is taken."""
        return sum(part.nbytes for pair in self._memory.values() for part in pair)

    def reshape(self, columns: int) -> None:
        """Gives each row so many columns; rows in use keep what they have."""
        count, longest = len(self.lengths), max(self.lengths, default=0)
        self.columns = columns
        for layer, memory in self._memory.items():
            kept = [part[:count, :, :longest].clone() for part in self._shaped[layer]]
            self._shaped[layer] = (self._shape(memory[0], kept[0]), self._shape(memory[1], kept[1]))

    def place(self, first: int, columns: torch.Tensor, longest: int) -> None:
        """Says where the next forward pass writes: `columns` of the rows from `first`, and how far it looks."""
        self._rows = slice(first, first + len(columns))
        self._at = (torch.arange(first, first + len(columns), device=columns.device)[:, None], columns)
        self._seen = longest

    def remove(self, row: int, *, broken: bool = False) -> None:
        """Frees a row; one that is `broken` has values that are not numbers."""
        last = self.lengths.pop()
        for parts in self._shaped.values():
            for part in parts:
                if broken:
                    part[row] = 0
                if row < len(self.lengths):
                    part[row, :, :last] = part[len(self.lengths), :, :last]
        if row < len(self.lengths):
            self.lengths[row] = last

    def free(self) -> None:
        """Gives the memory back."""
        self._memory.clear()
        self._shaped.clear()

    # What models call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of a layer, and returns all that its rows have."""
        if layer_idx not in self._memory:
            new = (key_states, value_states)
            keys, values = (part.new_zeros(self.tokens * part.shape[1] * part.shape[3]) for part in new)
            self._memory[layer_idx] = (keys, values)
            self._shaped[layer_idx] = (
                self._shape(keys, key_states[:0]),
                self._shape(values, value_states[:0]),
            )
        keys, values = self._shaped[layer_idx]
        rows, columns = self._at
        keys[rows, :, columns] = key_states.transpose(1, 2)
        values[rows, :, columns] = value_states.transpose(1, 2)
        return keys[self._rows, :, : self._seen], values[self._rows, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of the forward pass."""
        return max(self.lengths, default=0)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Columns that are looked at, and the first of them."""
        return self._seen, 0

    def _shape(self, memory: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The memory as rows x heads x columns x head size, with `kept` in its first rows."""
        count, heads, length, size = kept.shape
        rows = self.tokens // self.columns
        shaped = memory[: rows * heads * self.columns * size].view(rows, heads, self.columns, size)
        shaped[:count, :, :length] = kept
        return shaped


def next_logits(
    module: Any, cache: KeyValues, first: int, tokens: Sequence[Sequence[int]], **more: Any
) -> torch.Tensor:
    """Feeds tokens to the rows from `first` on, and returns the float32 logits after each row's last one.

    Shorter parts are padded on the left, so that the last token of each is in the last place. `more` are further
    arguments of the module.
    """
    device = module.device
    width = max(map(len, tokens))
    begins = cache.lengths[first : first + len(tokens)]
    ids = [[0] * (width - len(part)) + list(part) for part in tokens]
    places = [
        [-1] * (width - len(part)) + list(range(begin, begin + len(part)))
        for part, begin in zip(tokens, begins, strict=True)
    ]
    at = torch.tensor(places, device=device)
    longest = max(row[-1] for row in places) + 1
    cache.place(first, at.where(at >= 0, cache.columns - 1), longest)
    seen = at.clamp(min=0)  # padding looks at the first column: looking at nothing would give NaN
    logits = module(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=_masks(module, seen, longest),
        position_ids=seen,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **more,
    ).logits[:, -1]
    for row, part in enumerate(tokens, first):
        cache.lengths[row] += len(part)
    return logits.float()


def _masks(module: Any, at: torch.Tensor, longest: int) -> Any:
    """What each token adds to the scores of columns: nothing, or, where it may not look, all there is.

    Args:
        module: one mask does for its layers, or it takes one for each kind by the kind's name.
        at: the tokens' columns.
        longest: columns.
    """
    config = module.config
    behind = at[:, None, :, None] - torch.arange(longest, device=at.device)

    def mask(kind: str) -> torch.Tensor:
        hidden = behind < 0
        if kind == "sliding_attention":
            hidden = hidden | (behind >= config.sliding_window)
        zeros = torch.zeros(hidden.shape, dtype=module.dtype, device=at.device)
        return zeros.masked_fill_(hidden, torch.finfo(module.dtype).min)

    kinds = set(attention_kinds(config))
    if len(kinds) == 1:
        return mask(kinds.pop())
    return {kind: mask(kind) for kind in kinds}


def check_model(module: Any, cache: KeyValues) -> None:
    """Holds a small batch against plain forward passes; takes the cache's memory, which must be empty.

    Raises:
        EngineError: the model does not attend as this engine makes it (it has a state that is not keys and
            values, say), or there is no room.
    """
    name = type(module).__name__
    if others := set(attention_kinds(module.config)) - {"full_attention", "sliding_attention"}:
        raise EngineError(f"engine 'hf' cannot run {name}: it has layers of {', '.join(sorted(others))}")
    ids = list(range(1, 10))
    cache.reshape(min(cache.tokens // 2, 2 * len(ids)))
    cache.lengths = [0, 0]
    try:
        with torch.inference_mode():
            next_logits(module, cache, 0, [ids[:4], ids[:7]])
            both = next_logits(module, cache, 0, [[ids[4]], [ids[7]]])
            found = torch.cat([both, next_logits(module, cache, 1, [[ids[8]]])])
            whole = module(input_ids=torch.tensor([ids], device=module.device), use_cache=False).logits[0]
    except Exception as error:
        cause = " ".join(str(error).split())
        raise EngineError(f"engine 'hf' cannot run {name}: {type(error).__name__}: {cause}") from error
    finally:
        cache.lengths = []
    expected = whole[[4, 7, 8]].float()
    off = float((found - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
    if off > _MAX_ERROR:
        raise EngineError(
            f"engine 'hf' cannot run {name}: log-probs of a batch would not be those of a forward pass (logits "
            f"are off by {off:.2g} of their spread)"
        )


def score_ids(module: Any, ids: list[int], start: int, top_k: int = 0) -> TopScores:
    """Log-probs of `ids[start:]` in the model's own distribution, each after the ids before it, and the likeliest."""
    with torch.no_grad():
        row = torch.tensor([ids], device=next(module.parameters()).device)
        logits = module(input_ids=row, use_cache=False).logits[0, start - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        chosen, top = logprobs.gather(1, row[0, start:, None]), logprobs.topk(top_k)
    return TopScores(chosen[:, 0].tolist(), top.indices.tolist(), top.values.tolist())


def token_bytes(module: Any) -> int:
    """Keys and values of one token, in all layers. Raises what `check_model` does."""
    cache = KeyValues(32)
    check_model(module, cache)
    return cache.nbytes // cache.tokens


def draw_tokens(
    logits: torch.Tensor, how: Sequence[SamplingParams], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draws one token per row.

    The order is transformers': temperature, then top-k, then top-p of what is left.

    Args:
        logits: float32 tensor, rows x vocabulary.
        how: of each row; only temperature, top_k and top_p are looked at.
        draws: of each row, uniform in [0, 1); they decide the tokens.

    Returns:
        The ids, and their natural log-probs in the distribution that was drawn from. Greedy rows have those
        of the model's own distribution, because those of a certainty would all be 0. A row with NaN has a
        log-prob that is NaN.
    """
    device, vocab = logits.device, logits.shape[-1]
    greedy = [row.temperature < GREEDY_BELOW for row in how]

    def column(values: list[Any], dtype: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    temperatures = [1.0 if certain else row.temperature for row, certain in zip(how, greedy, strict=True)]
    logits = logits / column(temperatures, torch.float32)
    ks = [
        vocab if certain or row.top_k == -1 else min(row.top_k, vocab)
        for row, certain in zip(how, greedy, strict=True)
    ]
    largest = max((k for k in ks if k < vocab), default=0)
    if largest:
        at = column([min(k, largest) - 1 for k in ks], torch.int64)
        least = logits.topk(largest).values.gather(1, at)
        off = column([k == vocab for k in ks], torch.bool)
        logits = logits.masked_fill((logits < least) & ~off, -torch.inf)
    # 2 is off: the sum of all probabilities may round to more than 1.
    ps = [2.0 if certain or row.top_p == 1 else row.top_p for row, certain in zip(how, greedy, strict=True)]
    if min(ps) < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        chances = ordered.softmax(-1)
        dropped = chances.cumsum(-1) - chances >= column(ps, torch.float32)
        dropped[:, 0] = False  # at least one stays, also where top_p is below what float32 resolves
        logits = logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
    logprobs = logits.log_softmax(-1)
    # In float64, and by comparing with the running sum: a token without a chance is never drawn.
    reached = logprobs.double().exp().cumsum(-1)
    wanted = column(list(draws), torch.float64) * reached[:, -1:]
    drawn = torch.searchsorted(reached, wanted, right=True).clamp(max=vocab - 1)
    ids = torch.where(column(greedy, torch.bool), logits.argmax(-1, keepdim=True), drawn)
    return ids[:, 0].tolist(), logprobs.gather(1, ids)[:, 0].tolist()
