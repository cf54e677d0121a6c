"""How large the `hf` engine's KV cache is, in blocks."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rollstream.engine.hf_model import attention_kinds
from rollstream.errors import EngineError

_MASKED = ("eager", "sdpa")
"""Attention for which the manager keeps a dense mask of step tokens x cache tokens."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The manager's KV cache: blocks of tokens, taken by each group of layers for itself."""

    blocks: int
    block_size: int
    """Tokens in a block."""
    groups: int = 1
    """Groups of layers: one, but for models that mix full and sliding attention."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence may take: the manager takes one more than it needs when the last is full."""
        return (tokens // self.block_size + 1) * self.groups

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits."""
        return self.blocks // self.groups * self.block_size - 1


def cache_size(
    module: Any,
    *,
    bytes_at_most: float,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    longest: int | None,
    num_blocks: int = 0,
) -> CacheSize:
    """The cache that fits into so much memory, with the masks and indices that grow with it.

    Args:
        module: the model.
        bytes_at_most: of memory; less is taken where less is enough.
        block_size: tokens in a block.
        max_num_batched_tokens: tokens in one step.
        max_num_seqs: sequences in one step.
        longest: tokens in a sequence; None when only the cache limits them.
        num_blocks: the size, if not 0; then `bytes_at_most` does not matter.

    Raises:
        EngineError: the memory does not hold a block for each group of layers.
    """
    config = module.config
    kinds = Counter(attention_kinds(config))
    # The manager makes groups of one kind each and all of one size, and keeps tensors for one group.
    layers = math.gcd(*kinds.values())
    groups = kinds.total() // layers
    if num_blocks:
        return CacheSize(num_blocks, block_size, groups)
    item = module.dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    masks = len(kinds) if config._attn_implementation.removeprefix("paged|") in _MASKED else 0
    # Of one token in one group: keys and values, its column in the masks, and its place in the int64 indices.
    token_bytes = (2 * layers * heads * head + masks * max_num_batched_tokens) * item + 8 * groups
    cache = CacheSize(int(bytes_at_most / (token_bytes * block_size)), block_size, groups)
    if cache.longest < 1:
        raise EngineError(
            f"engine_kwargs.cache_size of {bytes_at_most / 1e9:g} GB does not hold one block of {block_size} "
            f"tokens, of {token_bytes} bytes each, for each of {groups} groups of layers"
        )
    if longest is not None and cache.blocks > max_num_seqs * cache.blocks_for(longest):
        return CacheSize(max_num_seqs * cache.blocks_for(longest), block_size, groups)
    return cache
