"""Importance weights between the policy that sampled and the policy that is trained.

A token that was sampled with log-prob q by the engine (older weights, other kernels) and has log-prob p under
the trainer's weights counts p/q times in the trainer's loss. The ratio is taken per token, or per sequence:
of the whole answer's probability (`sequence`) or of its geometric mean per token (`geometric`). Unbounded
ratios have unbounded variance, so they are truncated (TIS) or, outside of a range, masked (MIS).

Arrays are NumPy's or torch's, `[..., tokens]`; the answer is of the same kind, detached from any graph.
Sources: truncated importance sampling, https://fengyao.notion.site/off-policy-rl; ratios of sequences, GSPO
(arXiv 2507.18071).
"""

from types import ModuleType
from typing import Any, Literal

import numpy as np

from rollstream.errors import ConfigError
from rollstream.mismatch import FIGURES, figure_sums, means_of

Level = Literal["token", "sequence", "geometric"]

_LOG_RATIO_MAX = 20.0
"""exp(20) = 5e8: what is beyond it is truncated or masked by any sane limit, and float32 stays finite."""


def importance_ratios(trainer: Any, sampler: Any, mask: Any, *, level: Level = "token") -> Any:
    """p/q of each token, or of its sequence at each of its tokens; 0 where the mask is.

    Args:
        trainer: log-probs under the trained weights, `[..., tokens]`.
        sampler: log-probs as sampled, of the same shape and the same distribution (temperature!).
        mask: 1 where a token was sampled, 0 elsewhere; log-probs there do not count, even if not finite.
        level: of what the ratio is.

    Raises:
        ConfigError: no such level, or the shapes differ.
    """
    lib, log_ratio, mask = _log_ratio(trainer, sampler, mask)
    if level in ("sequence", "geometric"):
        total = log_ratio.sum(-1)
        if level == "geometric":
            total = total / lib.clip(mask.sum(-1), 1, None)
        log_ratio = total[..., None]
    elif level != "token":
        raise ConfigError(f"level={level!r}: 'token', 'sequence' or 'geometric'")
    return lib.exp(lib.clip(log_ratio, -_LOG_RATIO_MAX, _LOG_RATIO_MAX)) * mask


def truncated_is_weights(
    trainer: Any, sampler: Any, mask: Any, *, cap: float = 2.0, level: Level = "token"
) -> Any:
    """TIS: `min(ratio, cap)`; arguments as `importance_ratios`. Multiply the per-token loss by it."""
    if cap <= 0:
        raise ConfigError(f"cap={cap}: more than 0")
    return importance_ratios(trainer, sampler, mask, level=level).clip(0.0, cap)


def masked_is_weights(
    trainer: Any, sampler: Any, mask: Any, *, low: float = 0.5, high: float = 2.0, level: Level = "token"
) -> Any:
    """MIS: the ratio where `low <= ratio <= high`, else 0; arguments as `importance_ratios`."""
    if not 0 <= low < high:
        raise ConfigError(f"low={low}, high={high}: 0 <= low < high")
    ratios = importance_ratios(trainer, sampler, mask, level=level)
    return ratios * ((ratios >= low) & (ratios <= high))


def is_stats(trainer: Any, sampler: Any, mask: Any) -> dict[str, float]:
    """How far the two policies are apart, over all sampled tokens.

    Returns:
        `ratio_mean`, `ratio_min`, `ratio_max` of tokens, and the figures of `rollstream audit`: `kl_k1`, `kl_k3`
        (estimates of KL(sampler || trainer) per token), `kl_mean_difference`, `kl_beyond_bound`, `kl_ratio_beyond`.
        All 0 without sampled tokens.
    """
    lib, log_ratio, flags = _log_ratio(trainer, sampler, mask)
    ratio = lib.exp(lib.clip(log_ratio[flags > 0], -_LOG_RATIO_MAX, _LOG_RATIO_MAX))
    if not len(ratio):
        names = *("ratio_mean", "ratio_min", "ratio_max"), *(f"kl_{name}" for name in FIGURES)
        return dict.fromkeys(names, 0.0)
    ratios = {f"ratio_{name}": float(getattr(ratio, name)()) for name in ("mean", "min", "max")}
    figures = means_of(figure_sums(sampler, trainer, mask))
    return ratios | {f"kl_{name}": value for name, value in figures.items()}


def _log_ratio(trainer: Any, sampler: Any, mask: Any) -> tuple[ModuleType, Any, Any]:
    """The library of the arrays; log p - log q, 0 where the mask is; the mask as numbers."""
    lib: ModuleType = np
    if hasattr(trainer, "detach"):
        import torch

        lib = torch
        trainer, sampler = trainer.detach(), sampler.detach()
        trainer = trainer.float() if trainer.dtype.itemsize < 4 else trainer  # bfloat16 ratios are coarse
        sampler, mask = sampler.to(trainer.dtype), mask.to(trainer.dtype)
    else:
        trainer = np.asarray(trainer)
        trainer = trainer.astype(np.result_type(trainer, np.float32))
        sampler, mask = np.asarray(sampler, trainer.dtype), np.asarray(mask, trainer.dtype)
    if not trainer.shape == sampler.shape == mask.shape:
        raise ConfigError(
            f"log-probs and mask must have one shape, not {tuple(trainer.shape)}, {tuple(sampler.shape)} and "
            f"{tuple(mask.shape)}"
        )
    with np.errstate(invalid="ignore"):
        return lib, lib.where(mask > 0, trainer - sampler, lib.zeros_like(trainer)), mask
