"""Answers without a model: a pure function of prompt ids and seed, at next to no cost.

An answer is a sequence of ready-made blocks of tokens, chosen by a hash of the prompt and the seed. The
blocks are also kept as JSON, so that a server can send an answer without touching single tokens. The same
in every process and on every machine.
"""

import hashlib
import random
from array import array
from collections.abc import Sequence

import orjson

BLOCK_TOKENS = 8
"""Small enough that 16-token answers to different prompts differ (2 blocks: 65,536 of them)."""

_BLOCKS = 256
"""One byte of the hash chooses a block."""


class AnswerBook:
    """Answers for a vocabulary.

    Example:
        >>> book = AnswerBook(vocab_size=512)
        >>> book.answer([1, 2, 3], seed=7, length=20) == book.answer([1, 2, 3], seed=7, length=20)
        True

    Args:
        vocab_size: ids are below this.
        seed: another seed is another book.
    """

    def __init__(self, vocab_size: int = 512, *, seed: int = 0) -> None:
        rng = random.Random(seed)
        self._ids: list[list[int]] = []
        self._logprobs: list[list[float]] = []
        self._ids_json: list[bytes] = []
        self._entries_json: list[bytes] = []
        for _ in range(_BLOCKS):
            ids = [rng.randrange(vocab_size) for _ in range(BLOCK_TOKENS)]
            # As float32, like a real model's; they are stored as such.
            logprobs = list(array("f", [-rng.expovariate(1.0) for _ in range(BLOCK_TOKENS)]))
            self._ids.append(ids)
            self._logprobs.append(logprobs)
            self._ids_json.append(orjson.dumps(ids)[1:-1])
            self._entries_json.append(_entries_json(ids, logprobs))

    @staticmethod
    def digest(prompt_ids: Sequence[int], seed: int | None) -> bytes:
        """64 bytes that stand for a prompt and a seed."""
        data = array("q", prompt_ids).tobytes()
        return hashlib.blake2b(data, digest_size=64, salt=_salt(seed)).digest()

    def answer(
        self, prompt_ids: Sequence[int], seed: int | None, length: int
    ) -> tuple[list[int], list[float]]:
        """`length` ids and their log-probs; a longer answer begins with the shorter one."""
        choice = _extend(self.digest(prompt_ids, seed), length)
        ids: list[int] = []
        logprobs: list[float] = []
        for block in choice:
            ids += self._ids[block]
            logprobs += self._logprobs[block]
        return ids[:length], logprobs[:length]

    def answer_json(self, digest: bytes, length: int, *, start: int = 0) -> tuple[bytes, bytes]:
        """`length` tokens of the same answer as JSON arrays: `[id, ...]` and `[[logprob, id, null], ...]`.

        `start`: tokens at its beginning that are left out.
        """
        choice = _extend(digest, start + length)
        if start:
            ids = [token for block in choice for token in self._ids[block]][start : start + length]
            logprobs = [logprob for block in choice for logprob in self._logprobs[block]]
            entries = _entries_json(ids, logprobs[start : start + length])
            return orjson.dumps(ids), b"[%b]" % entries
        whole, rest = divmod(length, BLOCK_TOKENS)
        id_parts = [self._ids_json[block] for block in choice[:whole]]
        entry_parts = [self._entries_json[block] for block in choice[:whole]]
        if rest:
            ids = self._ids[choice[whole]][:rest]
            id_parts.append(orjson.dumps(ids)[1:-1])
            entry_parts.append(_entries_json(ids, self._logprobs[choice[whole]][:rest]))
        return b"[%b]" % b",".join(id_parts), b"[%b]" % b",".join(entry_parts)


def _entries_json(ids: list[int], logprobs: list[float]) -> bytes:
    return orjson.dumps([[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)])[1:-1]


def _salt(seed: int | None) -> bytes:
    return b"none" if seed is None else (seed + 1).to_bytes(8, "little")


def _extend(digest: bytes, length: int) -> bytes:
    """As many block numbers as `length` tokens need."""
    blocks = -(-length // BLOCK_TOKENS)
    choice = digest
    while len(choice) < blocks:
        digest = hashlib.blake2b(digest, digest_size=64).digest()
        choice += digest
    return choice[:blocks]
