"""verl: its agent loops under rollstream's executor, and rollstream's engines in its trainers.

Classes that derive from verl's are imported when they are asked for: verl takes seconds, and torch and Ray
with it. See docs/verl.md.
"""

import importlib
from typing import Any

_WHERE = {
    "StreamingAgentLoopWorkerMixin": "worker",
    "StreamingAgentLoopWorker": "stream",
    "StreamingLLMServerClient": "client",
    "StreamingLLMServerManager": "client",
    "GenerationLoopManager": "stream",
    "SequenceGenerator": "generate",
    "RollstreamLoop": "loop",
    "RollstreamReplica": "replica",
    "RollstreamRollout": "replica",
    "register": "plugin",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = list(_WHERE)
