"""TRL with rollstream's rollouts: a GRPO trainer whose batches are generated ahead of the step.

    from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

TRL, torch and transformers are imported when the first of these names is asked for. See docs/trl.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.integrations.trl.config import GRPOEnvConfig
    from rollstream.integrations.trl.environment import RolloutEnvironment
    from rollstream.integrations.trl.trainer import GRPOEnvTrainer

_HOMES = {
    "GRPOEnvConfig": "config",
    "GRPOEnvTrainer": "trainer",
    "RolloutEnvironment": "environment",
}

__all__ = ["GRPOEnvConfig", "GRPOEnvTrainer", "RolloutEnvironment"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
