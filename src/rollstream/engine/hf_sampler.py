"""Draws the next tokens of a batch, each request with its own temperature, top-k, top-p and seed.

transformers' own per-request processors know neither seeds nor greedy, sort the whole vocabulary twice for
every token of a prompt, and exist only where the base configuration has unusual values.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.engine.hf_model import LiveModel
from rollstream.trajectory import Completion, FinishReason, SamplingParams

GREEDY_BELOW = 1e-6
"""Temperatures that are greedy, besides 0: dividing float32 logits by less may overflow."""

DRAW_BITS = 32
"""Of a draw in [0, 1): the product of a draw and a float64 sum of probabilities then stays below that sum."""


@dataclass(slots=True, eq=False)
class Request:
    """What is asked for, and what has been sampled so far."""

    prompt_ids: list[int]
    sampling: SamplingParams
    end_ids: frozenset[int]
    """Ids that end it: the model's own, unless ignored, and the request's stop ids."""
    future: "asyncio.Future[Completion]"
    blocks: int
    """Of the KV cache, at its longest."""
    name: str = ""
    """Its id in the manager; a new one each time it is given to the manager."""
    draws: random.Random = field(default_factory=random.Random)
    """One draw for each sampled token, so that a seed repeats its tokens whatever else is in the batch."""
    sampled: list[tuple[int, float, int]] = field(default_factory=list)
    """Token, log-prob, and version of the weights. The manager's thread appends, the event loop reads."""
    seen: int = 0
    """How many of them the event loop has looked at: those are its answer."""

    @property
    def may_have_ended(self) -> bool:
        """Whether its newest token may be its last one."""
        if not self.sampled:
            return False
        token, logprob, _ = self.sampled[-1]
        is_full = len(self.sampled) >= self.sampling.max_tokens
        return is_full or token in self.end_ids or bool(self.sampling.stop) or logprob != logprob

    def completion(self, reason: FinishReason, version: int) -> Completion:
        """Its answer; `version` stands where nothing was sampled."""
        sampled = self.sampled[: self.seen]
        versions: list[tuple[int, int]] = []
        for at, (_, _, one) in enumerate(sampled):
            if not versions or versions[-1][1] != one:
                versions.append((at, one))
        return Completion(
            token_ids=[token for token, _, _ in sampled],
            logprobs=[logprob for _, logprob, _ in sampled] if self.sampling.logprobs else None,
            finish_reason=reason,
            policy_versions=versions or [(0, version)],
        )


def draw_tokens(
    logits: Any, how: Sequence[SamplingParams], draws: Sequence[float]
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
    import torch

    device, vocab = logits.device, logits.shape[-1]
    greedy = [row.temperature < GREEDY_BELOW for row in how]

    def column(values: list[Any], dtype: Any) -> Any:
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


class Sampler:
    """Takes the place of the manager's logits processors, with the same members (transformers 5.10).

    It makes the logit of the drawn token infinite, so that the manager, which is greedy, takes it.

    Args:
        model: its lock keeps tokens away from requests that are interrupted for new weights.
        running: requests by their names in the manager.
        num_threads: of torch, in the manager's thread; 0 leaves it alone.
        ended: is told, in the manager's thread, which requests may have ended with their new token.
    """

    do_processing = True
    tensors_required = 0

    def __init__(
        self,
        model: LiveModel,
        running: Mapping[str, Request],
        num_threads: int,
        ended: Callable[[list[Request]], None],
    ) -> None:
        self._model = model
        self._running = running
        self._num_threads = num_threads
        self._ended = ended
        self._rows: list[int] = []
        self._requests: list[tuple[str, Request]] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Of a new request: there are none, each request's sampling is in `running`."""

    def fill_defaults(self, storage: Any) -> None:
        """Of the processors' tensors: there are none."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Any) -> Any:
        """Notes who is in the batch, and the row of the logits after each one's last token."""
        if self._num_threads:
            import torch

            torch.set_num_threads(self._num_threads)  # OpenMP keeps it per thread
            self._num_threads = 0
        self._rows.clear()
        self._requests.clear()
        end = 0
        for part in requests_in_batch:
            end += part.query_length
            name = part.state.request_id
            # A part of a prompt has no next token; a request that was ended is no longer among the running.
            if part.has_new_token and (request := self._running.get(name)) is not None:
                self._rows.append(end - 1)
                self._requests.append((name, request))
        return arg_storage

    def __call__(self, input_ids: Any, scores: Any, args: Any) -> Any:
        """Draws. `scores`: float32, tokens x vocabulary; changed in place."""
        if not self._rows:
            return scores
        draws = [request.draws.getrandbits(DRAW_BITS) / 2**DRAW_BITS for _, request in self._requests]
        how = [request.sampling for _, request in self._requests]
        ids, logprobs = draw_tokens(scores[self._rows], how, draws)
        scores[self._rows, ids] = float("inf")
        with self._model.lock:
            version = self._model.computed_version
            for (name, request), token, logprob in zip(self._requests, ids, logprobs, strict=True):
                if self._running.get(name) is request:
                    request.sampled.append((token, logprob, version))
        if ended := [request for _, request in self._requests if request.may_have_ended]:
            self._ended(ended)
        return scores
