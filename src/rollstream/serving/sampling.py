"""From what a request asks for to sampling parameters that the engine can honour."""

import msgspec

from rollstream.engine.base import Capabilities
from rollstream.engine.checks import ids_fit
from rollstream.serving.refusals import RequestError
from rollstream.trajectory import SamplingParams

_SEEDS = 2**31
"""Engines take seeds below it. A larger or negative one is folded: still one seed, one answer."""

MAX_STOPS = 64
"""Each stop is searched for after each token; OpenAI takes four."""

MAX_TOP = 20
"""Alternatives to a token, as OpenAI bounds them; only for messages, since no engine here gives any."""


class Sampling(msgspec.Struct, kw_only=True):
    """What all routes have, under one name each."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    logprobs: bool = False
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed_name: str = "seed"
    """The parameter's name, for messages."""


def build_sampling(asked: Sampling, capabilities: Capabilities) -> SamplingParams:
    """Checks against what the engine can give; ranges are checked where requests enter the engine.

    Raises:
        RequestError: seeds, stops or log-probs that the engine does not have, ids outside its vocabulary.
    """
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    if not all(stop):
        raise RequestError("a stop string is empty: it would stop everything", param="stop")
    if len(stop) > MAX_STOPS or len(asked.stop_token_ids) > MAX_STOPS:
        raise RequestError(f"more than {MAX_STOPS} stops", param="stop")
    if asked.stop_token_ids and not capabilities.stop_token_ids:
        raise RequestError("this engine cannot stop at token ids", param="stop_token_ids")
    if not ids_fit(asked.stop_token_ids, capabilities.vocab_size):
        raise RequestError(
            f"stop_token_ids hold an id outside the vocabulary of {capabilities.vocab_size} ids",
            param="stop_token_ids",
        )
    if asked.seed is not None and not capabilities.seeds:
        raise RequestError("this engine does not honour seeds", param=asked.seed_name)
    if asked.logprobs and capabilities.logprobs == "none":
        raise RequestError("this engine gives no log-probs", param="logprobs")
    vocab_size = capabilities.vocab_size
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        # Beyond the vocabulary it takes nothing away, and not every engine takes such a number.
        top_k=-1 if vocab_size is not None and asked.top_k >= vocab_size else asked.top_k,
        logprobs=asked.logprobs,
        seed=None if asked.seed is None else asked.seed % _SEEDS,
        stop=stop,
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
    )


def seed_of(seed: int | None, sample: int) -> int | None:
    """The seed of one of several samples of a request: they differ, and the first has the request's own."""
    return None if seed is None else (seed + sample) % _SEEDS
