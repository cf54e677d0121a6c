"""Makes `actor_rollout_ref.rollout.name=rollstream` known to verl.

verl imports it in every process that has `VERL_USE_EXTERNAL_MODULES=rollstream.integrations.verl.plugin` in
its environment. Nothing of rollstream's or Ray's is loaded before a configuration names it.
"""

from typing import Any

from rollstream.integrations.verl.compose import NAME

_ROLLOUT_CLASS = "rollstream.integrations.verl.replica.RollstreamRollout"


def register() -> None:
    """Adds the backend to verl's registries. May be called twice."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, _load)
    base._ROLLOUT_REGISTRY[NAME, "async"] = _ROLLOUT_CLASS


def _load() -> Any:
    from rollstream.integrations.verl.replica import RollstreamReplica

    return RollstreamReplica


def _register_when_imported_by_verl() -> None:
    import os

    if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        register()


_register_when_imported_by_verl()
