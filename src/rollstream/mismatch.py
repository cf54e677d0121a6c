"""How far two log-probs of the same sampled tokens are apart: for `rollstream audit`, and in a training.

With a the sampler's log-prob of a token, b another's and r = exp(b - a), k1 is the mean of -log r and k3 that of
r - 1 - log r (http://joschu.net/blog/kl-approx.html): both estimate KL(sampler || other), as it drew them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BOUND = 0.1
"""Nats: a token whose log-probs are further apart is counted."""

FIGURES = ("k1", "k3", "mean_difference", "beyond_bound", "ratio_beyond")


def token_figures(sampler: "npt.NDArray[Any]", other: "npt.NDArray[Any]") -> "list[npt.NDArray[Any]]":
    """Of each token what `FIGURES` are the means of."""
    import numpy as np  # the command line names the figures, and is to be quick

    apart = other - sampler
    ratio, far = np.exp(np.minimum(apart, 700.0)), np.abs(apart)
    return [-apart, ratio - 1 - apart, far, far > BOUND, (ratio < 0.5) | (ratio > 2)]


def figure_sums(sampler: Any, other: Any, mask: Any) -> "npt.NDArray[np.float64]":
    """How many tokens there are, and the sum of each figure over them, to be added to others.

    Args:
        sampler: log-probs as sampled, of NumPy or torch.
        other: log-probs of the same shape and the same distribution (temperature!).
        mask: above 0 where a token was sampled; what is not finite on one side does not count either.
    """
    import numpy as np

    values = [
        one.detach().cpu().double() if hasattr(one, "detach") else one for one in (sampler, other, mask)
    ]
    a, b, at = (np.asarray(one, np.float64) for one in values)
    kept = (at > 0) & np.isfinite(a) & np.isfinite(b)
    return np.array([kept.sum(), *(one.sum() for one in token_figures(a[kept], b[kept]))], np.float64)


def means_of(sums: "npt.NDArray[np.float64]") -> dict[str, float]:
    """The figures of such sums; empty without tokens."""
    return {name: float(total / sums[0]) for name, total in zip(FIGURES, sums[1:], strict=True) if sums[0]}
