"""How many replicas a Ray cluster gets, and what each of them claims there. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.engine.launch_plan import LaunchRequest, ServerKind, devices_each
from rollstream.errors import ConfigError

ACTOR_OPTIONS = ("num_cpus", "memory", "resources", "runtime_env")
"""What the user may say of a replica's actor (`ray_kwargs.replica`). Its devices follow from the sizes, its
place and its restarts are rollstream's."""

_KINDS = ("GPU", "NPU")
"""Ray's resources that are devices of a server: NVIDIA's and AMD's, Ascend's."""

_VISIBLE = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""The variables that choose devices for a process; of the first kind, AMD's engines read either."""

_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Claims:
    """What replicas claim of a cluster."""

    count: int
    bundle: Mapping[str, float]
    """Ray's resources for one replica, all of one node: a placement group's only bundle."""
    kind: str = ""
    """Of the devices: `GPU`, `NPU`; empty for none."""
    devices: int = 0
    """For one replica."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


def claim(server: ServerKind, request: LaunchRequest, nodes: Sequence[Mapping[str, float]]) -> Claims:
    """What the replicas of a request claim of a cluster.

    Args:
        server: what is launched.
        request: see there. All of the cluster's devices are used where no number is asked for.
        nodes: Ray's resources of each node that lives.

    Raises:
        ConfigError: more than there is, sizes that do not divide, a replica that no node can hold.
    """
    options = read_options(request.actor_options)
    kind = next((name for name in _KINDS if any(node.get(name, 0) >= 1 for node in nodes)), "")
    each, sizes = devices_each(request)
    found = [int(node.get(kind, 0)) for node in nodes] if kind else []
    has = f"the cluster's nodes have {_counts(found)}" if any(found) else "the cluster has no devices"
    if not _takes_devices(server, request, bool(kind)):
        if each > 1:
            raise ConfigError(f"{sizes}, but these replicas run on CPUs: {has}, or none are to be used")
        if request.nodes > 1:
            raise ConfigError(
                f"trainer.nnodes={request.nodes} counts nodes of n_gpus_per_node devices, and these replicas "
                "take none: set actor_rollout_ref.rollout.launch.replicas"
            )
        claims = Claims(request.replicas or 1, options.resources, runtime_env=options.runtime_env)
        return _if_it_fits(claims, nodes)
    if not kind:
        raise ConfigError(f"trainer.n_gpus_per_node={request.devices_per_node}, but {has}")
    if each > max(found):
        raise ConfigError(
            f"{sizes}, and {has}: a replica is launched on one node. For one that takes several nodes, start "
            "the servers yourself and name them in actor_rollout_ref.rollout.server_urls"
        )
    bundle = {kind: float(each), **options.resources}
    most = _most_replicas(request, found, each, sizes, has)
    if request.replicas is not None and request.replicas > most:
        raise ConfigError(
            f"actor_rollout_ref.rollout.launch.replicas is {request.replicas}, but {has}, enough for {most}: "
            f"{sizes}"
        )
    claims = Claims(request.replicas or most, bundle, kind, each, options.runtime_env)
    return _if_it_fits(claims, nodes)


@dataclass(frozen=True, slots=True)
class Options:
    """`ray_kwargs.replica`, read."""

    resources: dict[str, float]
    runtime_env: dict[str, Any]


def read_options(given: Mapping[str, Any]) -> Options:
    """Reads `ray_kwargs.replica`. Raises `ConfigError` for what is not the user's to set, or no number."""
    if unknown := sorted(str(name) for name in given if name not in ACTOR_OPTIONS):
        raise ConfigError(
            f"ray_kwargs.replica.{unknown[0]} is not yours to set: it takes {', '.join(ACTOR_OPTIONS)}; "
            "devices follow from tensor_model_parallel_size and its like"
        )
    wanted: dict[str, Any] = {"CPU": given.get("num_cpus", 1), **(given.get("resources") or {})}
    if given.get("memory") is not None:
        wanted["memory"] = given["memory"]
    for name, amount in wanted.items():
        if name in _KINDS or isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise ConfigError(
                f"ray_kwargs.replica: {name}={amount!r} is no amount of a resource that a replica can claim"
            )
    resources = {str(name): float(amount) for name, amount in wanted.items() if amount}
    return Options(
        resources or {"CPU": 0.001}, dict(given.get("runtime_env") or {})
    )  # a bundle is never empty


def device_env(kind: str, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that give a server the devices that Ray has assigned, and no others.

    Args:
        kind: of the devices; empty for none.
        ids: as Ray names them: numbers, or UUIDs.
        environ: of the actor: where Ray has set a variable for these devices, it is that one.
    """
    if not kind:
        return dict.fromkeys(_HIDDEN, "")
    names = [name for name in _VISIBLE[kind] if name in environ] or _VISIBLE[kind][:1]
    return dict.fromkeys(names, ",".join(ids))


def _takes_devices(server: ServerKind, request: LaunchRequest, are_any: bool) -> bool:
    if server == "rollstream":
        if request.devices_per_node:
            raise ConfigError(
                f"trainer.n_gpus_per_node={request.devices_per_node}: "
                "actor_rollout_ref.rollout.launch.server=rollstream runs on the CPU; set it to 0, or launch "
                "another server"
            )
        return False
    return are_any if request.devices_per_node is None else request.devices_per_node > 0


def _most_replicas(request: LaunchRequest, found: Sequence[int], each: int, sizes: str, has: str) -> int:
    per_node = request.devices_per_node
    if per_node is None:
        if request.nodes > 1:
            raise ConfigError(
                f"trainer.nnodes={request.nodes} needs trainer.n_gpus_per_node; without both, all devices of "
                "the cluster are used"
            )
        return sum(count // each for count in found)
    if per_node % each:
        raise ConfigError(
            f"{per_node} devices (trainer.n_gpus_per_node) do not divide into replicas: {sizes}"
        )
    if sum(count >= per_node for count in found) < request.nodes:
        raise ConfigError(
            f"trainer.nnodes={request.nodes} nodes with trainer.n_gpus_per_node={per_node} devices are asked "
            f"for, but {has}"
        )
    return request.nodes * (per_node // each)


def _if_it_fits(claims: Claims, nodes: Sequence[Mapping[str, float]]) -> Claims:
    room = sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in claims.bundle.items())
        for node in nodes
    )
    if room < claims.count:
        raise ConfigError(
            f"{claims.count} replicas of {dict(claims.bundle)} each are more than the cluster's nodes can "
            f"hold ({room}): lower actor_rollout_ref.rollout.launch.replicas, or what each claims "
            "(ray_kwargs.replica.num_cpus, …)"
        )
    return claims


def _counts(found: Sequence[int]) -> str:
    return f"{', '.join(str(count) for count in found)} devices"
