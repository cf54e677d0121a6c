"""A completion in pieces: a request that was interrupted goes on from the tokens it has.

The ids are the state: prompt ids and what was sampled so far are the prompt of the next piece, on any replica
and under any weights. So nothing that was paid for is thrown away, and every token keeps the log-prob and the
policy version it was sampled with.
"""

import hashlib
from dataclasses import replace

from rollstream.trajectory import Completion, FinishReason, SamplingParams


class PartialCompletion:
    """What a request has so far, and what is still to be asked for.

    Args:
        prompt_ids: of the request; not changed.
        sampling: of the request.
    """

    def __init__(self, prompt_ids: list[int], sampling: SamplingParams) -> None:
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._ids: list[int] = []
        self._logprobs: list[float] | None = [] if sampling.logprobs else None
        self._versions: list[tuple[int, int]] = []
        self._cached: int | None = None

    def __len__(self) -> int:
        """Sampled tokens so far."""
        return len(self._ids)

    @property
    def can_go_on(self) -> bool:
        """Whether another piece can follow what there is.

        Not with stop strings: one that begins in a piece and ends in the next would be seen by no engine.
        Not with penalties: what is in the prompt of a piece is not counted.
        """
        return not self._ids or self._sampling.can_be_continued

    @property
    def is_full(self) -> bool:
        """Whether it has all the tokens that were asked for."""
        return len(self._ids) >= self._sampling.max_tokens

    @property
    def prompt_ids(self) -> list[int]:
        """Prompt of the next piece. The request's own list before the first token."""
        return self._prompt_ids + self._ids if self._ids else self._prompt_ids

    @property
    def sampling(self) -> SamplingParams:
        """How to sample the next piece: what is left of `max_tokens`, and a seed of its own.

        A piece with the seed of the one before it would draw the same random numbers once more.
        """
        if not self._ids:
            return self._sampling
        seed = self._sampling.seed
        if seed is not None:
            digest = hashlib.blake2b(f"{seed}:piece:{len(self._ids)}".encode(), digest_size=4).digest()
            seed = int.from_bytes(digest, "little") >> 1
        return replace(self._sampling, max_tokens=self._sampling.max_tokens - len(self._ids), seed=seed)

    def add(self, piece: Completion) -> None:
        """Appends what an engine sampled.

        Raises:
            ValueError: log-probs were asked for, and there is not one for each id.
        """
        start, count = len(self._ids), len(piece.token_ids)
        if self._logprobs is not None:
            given = piece.logprobs or []
            if len(given) != count:
                raise ValueError(f"{count} sampled ids came with {len(given)} log-probs")
            self._logprobs += given
        self._ids += piece.token_ids
        if count:
            for offset, version in piece.policy_versions:
                # A run without tokens, at the end, says nothing: the next piece begins there.
                if offset < count and (not self._versions or self._versions[-1][1] != version):
                    self._versions.append((start + offset, version))
        if self._cached is None:
            self._cached = piece.cached_prompt_tokens

    def clear(self) -> None:
        """Forgets what there is: the request begins anew."""
        self._ids, self._versions, self._cached = [], [], None
        self._logprobs = [] if self._sampling.logprobs else None

    def finish(self, piece: Completion) -> Completion:
        """The whole, ended by `piece` and for its reason; `piece` itself when it is the only one."""
        if not self._ids:
            return piece
        self.add(piece)
        return self.result(piece.finish_reason)

    def result(self, finish_reason: FinishReason) -> Completion:
        """What there is, as a completion."""
        return Completion(
            token_ids=list(self._ids),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=finish_reason,
            policy_versions=list(self._versions) or [(0, 0)],
            cached_prompt_tokens=self._cached or 0,
        )
