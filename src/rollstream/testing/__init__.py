"""A scripted engine and stub servers, to test agent loops and pools without a model.

`ChatStub`, `Faults`, `Latency`, `ScriptedEngine`, `StubModel`, `StubServer` and `answer_by_text` can be
imported from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.testing.scripted import ScriptedEngine
    from rollstream.testing.stub_chat import ChatStub
    from rollstream.testing.stub_faults import Faults, Latency
    from rollstream.testing.stub_server import StubModel, StubServer
    from rollstream.testing.text_rules import answer_by_text

__all__ = ["ChatStub", "Faults", "Latency", "ScriptedEngine", "StubModel", "StubServer", "answer_by_text"]

_HOMES = {
    "ChatStub": "stub_chat",
    "Faults": "stub_faults",
    "Latency": "stub_faults",
    "ScriptedEngine": "scripted",
    "StubModel": "stub_server",
    "StubServer": "stub_server",
    "answer_by_text": "text_rules",
}


def __getattr__(name: str) -> Any:
    # On demand: `python -m rollstream.testing.stub_server` imports this package first.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
