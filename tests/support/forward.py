"""What a forward pass of a model says of what an engine answered."""

import asyncio
import random
from functools import cache
from typing import Any

import numpy as np

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Engine
from rollstream.trajectory import Completion, SamplingParams

Asked = list[tuple[list[int], SamplingParams]]
RAW = SamplingParams(1)


def requests(count: int, *, longest: int = 60) -> Asked:
    rng = random.Random(7)
    return [
        (
            [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))],
            SamplingParams(rng.randrange(2, longest), seed=i, ignore_eos=i % 3 == 0),
        )
        for i in range(count)
    ]


async def answer(engine: Engine, asked: Asked) -> list[Completion]:
    return await asyncio.gather(
        *(engine.generate(prompt, how, request_id=str(i)) for i, (prompt, how) in enumerate(asked))
    )


@cache
def demo_module() -> Any:
    """The demo model in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()


def logprobs_under(module: Any, prompt: list[int], response: list[int]) -> np.ndarray[Any, Any]:
    """Of each token of the response, given what stands before it."""
    scores = logits_of(module, prompt, response).log_softmax(-1).numpy()
    found: np.ndarray[Any, Any] = scores[np.arange(len(response)), response]
    return found


def logits_of(module: Any, prompt: list[int], ids: list[int]) -> Any:
    """What a forward pass says before each of `ids`."""
    import torch

    with torch.no_grad():
        return module(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]


def processed(logits: Any, how: SamplingParams) -> Any:
    """Log-probs after transformers' own processors; of greedy, the model's own."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if how.temperature not in (0, 1):
        logits = TemperatureLogitsWarper(how.temperature)(None, logits)
    if how.top_k != -1:
        logits = TopKLogitsWarper(how.top_k)(None, logits)
    if how.top_p != 1:
        logits = TopPLogitsWarper(how.top_p)(None, logits)
    return logits.log_softmax(-1)


def error_of(logits: Any, how: SamplingParams, ids: list[int], logprobs: list[float] | None) -> float:
    import torch

    expected = processed(logits, how).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return float((expected - torch.tensor(logprobs)).abs().max())


def worst_error(module: Any, asked: Asked, answers: list[Completion], *, raw: bool = False) -> float:
    """How far log-probs are off at most; `raw` ones are the model's own."""
    return max(
        error_of(logits_of(module, prompt, c.token_ids), RAW if raw else how, c.token_ids, c.logprobs)
        for (prompt, how), c in zip(asked, answers, strict=True)
    )
