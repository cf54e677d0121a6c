"""Door 1: a run that collects trajectories. `from rollstream.generation import run_generation`.

What the door exports is imported when it is asked for: the door itself is light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.generation.result import GenerationResult
    from rollstream.generation.run import generate, run_generation

__all__ = ["GenerationResult", "generate", "run_generation"]

_OF_VERL = ("GenerationRunner", "ResultsQueue", "CollectorAgentLoopWorker")


def __getattr__(name: str) -> Any:
    if name in _OF_VERL:  # no AttributeError: of that `from … import` would not show the words
        raise ImportError(
            f"{__name__} has no {name}: classes over verl's own are in rollstream.integrations.verl"
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("rollstream.generation.run"), name)
