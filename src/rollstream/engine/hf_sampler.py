"""Draws the next tokens of a batch, each request with its own temperature, top-k, top-p and seed.

transformers' own per-request processors know neither seeds nor greedy, sort the whole vocabulary twice for
every token of a prompt, and exist only where the base configuration has unusual values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.engine.hf_request import Request
from rollstream.trajectory import SamplingParams

GREEDY_BELOW = 1e-6
"""Temperatures that are greedy, besides 0: dividing float32 logits by less may overflow."""

DRAW_BITS = 32
"""Of a draw in [0, 1): the product of a draw and a float64 sum of probabilities then stays below that sum."""


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

    It makes the logit of the drawn token infinite, so that the manager, which is greedy, takes it; its
    log-prob is left in the request.
    """

    do_processing = True
    tensors_required = 0

    def __init__(self, running: Mapping[str, Request]) -> None:
        self._running = running
        self._rows: list[int] = []
        self._requests: list[Request] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Of a new request: there are none, each request's sampling is in `running`."""

    def fill_defaults(self, storage: Any) -> None:
        """Of the processors' tensors: there are none."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Any) -> Any:
        """Notes who is in the batch, and the row of the logits after each one's last token."""
        self._rows.clear()
        self._requests.clear()
        end = 0
        for part in requests_in_batch:
            end += part.query_length
            # A part of a prompt has no next token; a request that was ended is no longer among the running.
            if part.has_new_token and (request := self._running.get(part.state.request_id)) is not None:
                self._rows.append(end - 1)
                self._requests.append(request)
        return arg_storage

    def __call__(self, input_ids: Any, scores: Any, args: Any) -> Any:
        """Draws. `scores`: float32, tokens x vocabulary; changed in place."""
        if self._rows:
            draws = [request.random.getrandbits(DRAW_BITS) / 2**DRAW_BITS for request in self._requests]
            how = [request.sampling for request in self._requests]
            ids, logprobs = draw_tokens(scores[self._rows], how, draws)
            scores[self._rows, ids] = float("inf")
            for request, logprob in zip(self._requests, logprobs, strict=True):
                request.drawn_logprob = logprob
        return scores
