"""One request inside the `hf` engine."""

import asyncio
import random
from dataclasses import dataclass, field

from rollstream.trajectory import Completion, FinishReason, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """What is asked for, and what has been sampled so far."""

    prompt_ids: list[int]
    sampling: SamplingParams
    end_ids: frozenset[int]
    """Ids that end it: the model's own, unless ignored, and the request's stop ids."""
    future: "asyncio.Future[Completion]"
    """Of the event loop; done exactly once."""
    random: random.Random
    """One draw for each sampled token, so that a seed repeats its tokens whatever else is in the batch."""
    blocks: int = 0
    """Of the KV cache, at its longest."""
    name: str = ""
    """Its id in the manager; a new one each time it is given to the manager."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Run-length encoded `(start, version)` over `token_ids`."""
    drawn_logprob: float = 0.0
    """Of the token that was drawn in the step that is under way."""

    @property
    def length(self) -> int:
        """Tokens at its longest: prompt and response."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def append(self, token: int, version: int) -> None:
        """Takes the token of the step that has ended, with its `drawn_logprob`."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.token_ids), version))
        self.token_ids.append(token)
        self.logprobs.append(self.drawn_logprob)

    def completion(self, reason: FinishReason, version: int) -> Completion:
        """Its answer; `version` stands where nothing was sampled."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs if self.sampling.logprobs else None,
            finish_reason=reason,
            policy_versions=self.versions or [(0, version)],
        )
