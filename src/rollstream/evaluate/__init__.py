"""Whether a model got better: figures of rollouts with their intervals, and comparisons of runs.

    from rollstream.evaluate import compare_samples, samples_of, summarize

numpy and pyarrow are imported when the first of these names is asked for. See docs/evaluate.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.evaluate.compare import (
        Comparison,
        compare_samples,
        pair_prompts,
        permutation_test,
        sign_test,
    )
    from rollstream.evaluate.metrics import Estimate, Summary, mean_of, pass_at_k, pass_hat_k, summarize
    from rollstream.evaluate.samples import JudgedRun, Samples, joined, read_runs, samples_of

__all__ = [
    "Comparison",
    "Estimate",
    "JudgedRun",
    "Samples",
    "Summary",
    "compare_samples",
    "joined",
    "mean_of",
    "pair_prompts",
    "pass_at_k",
    "pass_hat_k",
    "permutation_test",
    "read_runs",
    "samples_of",
    "sign_test",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in ("samples", "metrics", "compare"):
            if hasattr(home := import_module(f"{__name__}.{module}"), name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
