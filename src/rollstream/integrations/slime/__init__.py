"""slime's generator side of the buffer: generator files and their hooks, jobs, and the routes of its wire.

from rollstream.integrations.slime import run_generation
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.integrations.slime.generation import run_generation

__all__ = ["run_generation"]


def __getattr__(name: str) -> Any:
    if name != "run_generation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.generation").run_generation
