"""rollstream: prompts in, durable, training-ready LLM trajectories out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.generation.iterate import generate
    from rollstream.generation.result import GenerationResult
    from rollstream.generation.run import run_generation
    from rollstream.trajectory import Rollout, Trajectory

__version__ = "0.2.0"

_EXPORTED = {
    "GenerationResult": "rollstream.generation.result",
    "Rollout": "rollstream.trajectory",
    "Trajectory": "rollstream.trajectory",
    "generate": "rollstream.generation.iterate",
    "run_generation": "rollstream.generation.run",
}
"""Where each name is; imported when it is asked for, so that `import rollstream` is light."""

__all__ = ["GenerationResult", "Rollout", "Trajectory", "generate", "run_generation"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTED[name]), name)
