"""How many replicas a Ray cluster gets, and what each of them claims there. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.engine.launch_plan import LaunchRequest, ServerKind, count_replicas
from rollstream.errors import ConfigError

ACTOR_OPTIONS = ("num_cpus", "memory", "resources", "runtime_env")
"""What the user may say of a replica's actor (`ray_kwargs.replica`). Its devices follow from the sizes, its
place and its restarts are rollstream's."""

_VISIBLE = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Ray's resources that are devices of a server (NVIDIA's and AMD's; Ascend's), and the variables that choose
them for a process; AMD's engines read either of the first kind."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What replicas claim of a cluster."""

    count: int
    bundle: Mapping[str, float]
    """Ray's resources for one replica, all of one node: a placement group's only bundle."""
    kind: str = ""
    """What Ray calls the devices: `GPU`, `NPU`; empty for none."""


def claim(server: ServerKind, request: LaunchRequest, nodes: Sequence[Mapping[str, float]]) -> Claims:
    """What the replicas of a request claim of a cluster.

    Args:
        server: what is launched.
        request: see there. All of the cluster's devices are used where no number is asked for.
        nodes: Ray's resources of each node that lives.

    Raises:
        ConfigError: what `count_replicas` raises; more than the nodes can hold.
    """
    kind = next((name for name in _VISIBLE if any(node.get(name, 0) >= 1 for node in nodes)), "")
    found = [int(node.get(kind, 0)) for node in nodes]
    counts = ", ".join(map(str, found))
    has = f"the cluster's nodes have {counts} devices" if kind else "the cluster has no devices"
    count, each = count_replicas(server, request, found, has)
    bundle = {**({kind: float(each)} if each else {}), **replica_resources(request.actor_options)}
    room = sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in bundle.items()) for node in nodes
    )
    if room < count:
        raise ConfigError(
            f"{count} replicas of {bundle} each are more than the cluster's nodes can hold ({room}): lower "
            "actor_rollout_ref.rollout.launch.replicas, or what each claims (ray_kwargs.replica.num_cpus, …)"
        )
    return Claims(count, bundle, kind if each else "")


def replica_resources(given: Mapping[str, Any]) -> dict[str, float]:
    """What `ray_kwargs.replica` claims besides devices, by Ray's names; never empty.

    Raises `ConfigError` for what is not the user's to set, or no number.
    """
    if unknown := sorted(str(name) for name in given if name not in ACTOR_OPTIONS):
        raise ConfigError(
            f"ray_kwargs.replica.{unknown[0]} is not yours to set: it takes {', '.join(ACTOR_OPTIONS)}; "
            "devices follow from tensor_model_parallel_size and its like"
        )
    wanted: dict[str, Any] = {"CPU": given.get("num_cpus", 1), **(given.get("resources") or {})}
    if given.get("memory") is not None:
        wanted["memory"] = given["memory"]
    for name, amount in wanted.items():
        if name in _VISIBLE or isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise ConfigError(
                f"ray_kwargs.replica: {name}={amount!r} is no amount of a resource that a replica can claim"
            )
    return {str(name): float(amount) for name, amount in wanted.items() if amount} or {"CPU": 0.001}


def device_env(kind: str, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that give a server the devices that Ray has assigned, and no others.

    Args:
        kind: of the devices; empty for none.
        ids: as Ray names them: numbers, or UUIDs.
        environ: of the actor: where Ray has set a variable for these devices, it is that one.
    """
    if not kind:
        return {name: "" for names in _VISIBLE.values() for name in names}
    names = [name for name in _VISIBLE[kind] if name in environ] or _VISIBLE[kind][:1]
    return dict.fromkeys(names, ",".join(ids))
