"""Makes `actor_rollout_ref.rollout.name=rollstream` known to verl.

verl imports it in every process that has `VERL_USE_EXTERNAL_MODULES=rollstream.integrations.verl.plugin` in
its environment. Nothing of rollstream's or Ray's is loaded before a configuration names it.
"""

import importlib
import os

from rollstream.integrations.verl.compose import NAME

_REPLICA = "rollstream.integrations.verl.replica"


def register() -> None:
    """Adds the backend to verl's registries. May be called twice."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, lambda: importlib.import_module(_REPLICA).RollstreamReplica)
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{_REPLICA}.RollstreamRollout"


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    register()
