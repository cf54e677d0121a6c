"""Whether new weights have arrived: log-probs of the same ids, in the engine and in the trainer.

A server's 200 says that it was asked, not which weights it computes with: vLLM on a CPU kept the output layer of a
model with tied embeddings, and answered 200. A trainer that writes weights into a folder puts the log-probs of its
own model beside them (`write_probe`); whatever loads the folder is compared with those. Without that file it is only
seen whether log-probs changed, and whether replicas agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

PROBE_FILE = "rollstream_probe.json"
"""Beside the weights: `{"logprobs": [...]}` of `PROBE_IDS[1:]`, of the model that the folder's weights are of."""

PROBE_IDS = tuple(1 + 37 * at % 59 for at in range(24))
"""Ids that nearly every tokenizer has, in no order: each of them asks much of the model."""

_AGREE = 0.2
"""Nats, over the mean of the ids: other numbers (bfloat16, another kernel) are off by some 0.02, other weights of a
model that has learnt anything by far more."""

_STEP = 0.02
"""Nats by which a trainer's log-probs must have changed for an engine to show it: less may be lost in bfloat16."""

_NOISE = 3
"""And how often what lay between the two before: a trainer in bfloat16 (TRL's default) gives each step's log-probs an
error of its own, while a float32 engine hardly moves. Two such errors in a row made changes of up to 1.4 times that."""


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """Log-probs of `PROBE_IDS[1:]`."""

    engine: list[float]
    trainer: list[float] | None
    """By the same weights in the trainer; None where it wrote none."""


class _Probe(msgspec.Struct):
    logprobs: list[float | None]


_PROBE = msgspec.json.Decoder(_Probe)


def read_probe(source: str) -> list[float] | None:
    """The trainer's log-probs of the weights in a folder; None where there are none, or the folder is not here."""
    try:
        probe = _PROBE.decode((Path(source).expanduser() / PROBE_FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    values = [math.nan if value is None else value for value in probe.logprobs]
    return values if len(values) == len(PROBE_IDS) - 1 else None


def own_logprobs(model: Any, vocab_size: int) -> list[float]:
    """Log-probs of `PROBE_IDS[1:]` by a torch model. Every process of a sharded model calls it.

    Empty where the vocabulary is too small for the ids.
    """
    if vocab_size <= max(PROBE_IDS):
        return []
    from rollstream.engine.hf_forward import score_ids  # needs torch

    training = model.training
    model.eval()
    try:
        return score_ids(model, list(PROBE_IDS), 1).logprobs
    finally:
        model.train(training)


def write_probe(folder: Path, logprobs: Sequence[float]) -> None:
    """Puts the trainer's log-probs beside its weights, see `own_logprobs`."""
    (folder / PROBE_FILE).write_bytes(msgspec.json.encode(_Probe(list(logprobs))))


def find_problem(now: ProbeScores, before: ProbeScores | None) -> str | None:
    """Says what is wrong with the weights that an engine has loaded; None if nothing is seen."""
    for whose, logprobs in (("its", now.engine), ("the trainer's", now.trainer or ())):
        if not all(map(math.isfinite, logprobs)):
            return f"{whose} log-probs are not numbers: the weights are broken"
    if now.trainer is None:
        return None
    if (off := difference(now.engine, now.trainer)) > _AGREE:
        return f"its log-probs are {off:.2g} nats off the trainer's: it has other weights, or a part of them"
    if before is not None and before.trainer is not None:
        moved, step = difference(now.engine, before.engine), difference(now.trainer, before.trainer)
        noise = difference(before.engine, before.trainer)
        if step > max(_STEP, _NOISE * noise) and moved < step / 10:
            return f"its log-probs did not change, and the trainer's did by {step:.2g} nats: it has older weights"
    return None


def differ(scores: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """Whether an engine's log-probs are those of no more than half of the other engines with the same weights.

    `others` has its own among them.
    """
    return 2 * sum(difference(scores, other) > _AGREE for other in others) > len(others) - 1


def difference(scores: Sequence[float], other: Sequence[float]) -> float:
    """Mean of the absolute differences."""
    return sum(abs(a - b) for a, b in zip(scores, other, strict=True)) / len(scores)
