"""Exact token bookkeeping of one trajectory (R1)."""

from rollstream.trajectory import Completion


class TokenTrack:
    """Grows a trajectory's response, id for id, and keeps mask, log-probs and versions in step.

    What the model sampled comes in by `add_sampled` and is never re-encoded; what was put between
    (tool results, user turns, template tokens) comes in by `add_given`.
    """

    def __init__(self, prompt_ids: list[int], *, logprobs: bool) -> None:
        """`prompt_ids` as sent for the first generation; `logprobs`: whether they are kept."""
        self.prompt_ids = prompt_ids
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] | None = [] if logprobs else None
        self.policy_versions: list[tuple[int, int]] = []
        self._ids = list(prompt_ids)

    @property
    def context(self) -> list[int]:
        """All ids so far: the prompt of the next generation. The list itself; do not change it."""
        return self._ids

    @property
    def response_ids(self) -> list[int]:
        """A copy of the ids after the prompt."""
        return self._ids[len(self.prompt_ids) :]

    def __len__(self) -> int:
        """Response tokens so far."""
        return len(self.response_mask)

    def add_sampled(self, completion: Completion) -> None:
        """Appends what an engine sampled: mask 1, its log-probs, its policy versions."""
        start = len(self)
        count = len(completion.token_ids)
        if self.response_logprobs is not None:
            if completion.logprobs is None or len(completion.logprobs) != count:
                raise ValueError(f"{count} sampled ids came with {len(completion.logprobs or ())} log-probs")
            self.response_logprobs += completion.logprobs
        self._ids += completion.token_ids
        self.response_mask += [1] * count
        for offset, version in completion.policy_versions:
            if not self.policy_versions or self.policy_versions[-1][1] != version:
                self.policy_versions.append((start + offset, version))

    def add_given(self, ids: list[int]) -> None:
        """Appends ids that the model did not sample: mask 0, log-prob 0.0."""
        self._ids += ids
        self.response_mask += [0] * len(ids)
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(ids)
