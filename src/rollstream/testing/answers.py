"""Answers without a model: a pure function of prompt ids and seed, at next to no cost.

An answer is a sequence of ready-made blocks of tokens, chosen by a hash of the prompt and the seed: the same
in every process and on every machine.
"""

import hashlib
import random
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 8
"""Small enough that 16-token answers to different prompts differ (2 blocks: 65,536 of them)."""

_BLOCKS = 256
"""A byte of the hash chooses a block."""


class AnswerBook:
    """Answers for a vocabulary.

    Example:
        >>> book = AnswerBook(vocab_size=512)
        >>> book.answer([1, 2, 3], seed=7, length=20) == book.answer([1, 2, 3], seed=7, length=20)
        True

    Args:
        vocab_size: ids are below this.
    """

    def __init__(self, vocab_size: int = 512) -> None:
        rng = random.Random(0)
        self._ids: list[list[int]] = []
        self._logprobs: list[list[float]] = []
        for _ in range(_BLOCKS):
            self._ids.append([rng.randrange(vocab_size) for _ in range(BLOCK_TOKENS)])
            # As float32, like a real model's; they are stored as such.
            self._logprobs.append(list(array("f", [-rng.expovariate(1.0) for _ in range(BLOCK_TOKENS)])))

    @staticmethod
    def digest(prompt_ids: Sequence[int], seed: int | None, images: Sequence[bytes] = ()) -> bytes:
        """64 bytes that stand for a prompt, its images and a seed."""
        salt = b"none" if seed is None else (seed + 1).to_bytes(8, "little")
        made = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=64, salt=salt)
        for image in images:
            made.update(hashlib.sha256(image).digest())
        return made.digest()

    def answer(
        self, prompt_ids: Sequence[int], seed: int | None, length: int
    ) -> tuple[list[int], list[float]]:
        """`length` ids and their log-probs; a longer answer begins with the shorter one."""
        return self.tokens(self.digest(prompt_ids, seed), length)

    def tokens(self, digest: bytes, length: int) -> tuple[list[int], list[float]]:
        """The same for what a digest stands for."""
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < length:
            for block in digest[: -(-(length - len(ids)) // BLOCK_TOKENS)]:
                ids += self._ids[block]
                logprobs += self._logprobs[block]
            digest = hashlib.blake2b(digest, digest_size=64).digest()
        return ids[:length], logprobs[:length]
