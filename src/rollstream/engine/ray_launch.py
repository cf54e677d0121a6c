"""Replicas on the nodes of a Ray cluster: each in a placement group of its own, below an actor.

    driver --(actor calls)--> ReplicaHost --(pipe)--> reaper --> server --> its workers …

    placement group of a replica: claimed at its first start, kept over restarts, given back at the end
    actor in it:                  one for each start; a node that dies takes it along, the group moves on

Groups and actors are not detached: Ray ends them with the program that made them, however that ends. Whatever
ends the actor (the driver; the node's raylet; a signal) ends the reaper's input, and the reaper ends the
server. Ray itself would kill the actor's children, the reaper first, and leave the server's own children to
themselves: `_KEEP_CHILDREN` keeps it from that.
"""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollstream.childproc import path_to_rollstream
from rollstream.engine import reaper
from rollstream.engine.launch_plan import (
    NODE_ADDRESS,
    NODE_LOGS,
    NODE_PYTHON,
    LaunchRequest,
    ReplicaPlan,
    ServerKind,
    count_replicas,
)
from rollstream.engine.launch_process import LocalProcess, log_stamp
from rollstream.engine.ray_package import cause_of, import_ray, is_death, one_line
from rollstream.errors import ConfigError, EngineError

_LOG = logging.getLogger(__name__)

_ASKED_S = 20.0
"""For an actor to answer what it can say at once: longer, and it hangs, or its node is about to be lost."""

_ROOM_SAID_S = 30.0
"""After which a replica that has no place yet is worth a line: others may use the cluster, too."""

_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Environment of the actor's process."""


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


class RayLauncher:
    """Starts replicas on the cluster that this process has joined.

    Args:
        server: what is launched.
        request: how many, and what each claims.
        log_dir: for their logs, on the nodes that have this folder; else one of the node's own.
    """

    def __init__(self, server: ServerKind, request: LaunchRequest, log_dir: Path) -> None:
        self._server = server
        self._request = request
        self._log_dir = str(log_dir.absolute())
        self._stamp = log_stamp()
        self._mark = uuid4().hex
        self._claims: Claims | None = None
        self._groups: dict[int, Any] = {}

    def place(self, plans: Sequence[ReplicaPlan]) -> Sequence[ReplicaPlan]:
        """As many as the cluster is asked for, all like the one that was made."""
        ray = import_ray()
        if not ray.is_initialized():
            raise ConfigError("actor_rollout_ref.rollout.launch.where=ray: no Ray cluster was joined")
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._claims = claims = claim(self._server, self._request, nodes)
        _LOG.info("%d replicas on Ray, each claims %s of one node", claims.count, dict(claims.bundle))
        (plan,) = plans
        return [replace(plan, index=index) for index in range(claims.count)]

    async def start(self, plan: ReplicaPlan) -> "RayProcess":
        claims = self._claims
        assert claims is not None, "place() first"
        actor = self._actor(plan.index, claims)
        waiting = asyncio.get_running_loop().call_later(
            _ROOM_SAID_S,
            _LOG.warning,
            "replica %d has no place yet: it claims %s of one node, and others may have that",
            *(plan.index, dict(claims.bundle)),
        )
        try:
            async with asyncio.timeout(self._request.startup_timeout):
                url, what = await actor.start.remote(
                    plan,
                    claims.kind,
                    log_dir=self._log_dir,
                    log_name=f"replica-{plan.index}-{self._stamp}",
                    mark=f"{self._mark}-{plan.index}",
                )
        except BaseException as error:
            _end(actor)
            if isinstance(error, TimeoutError):
                raise EngineError(self._no_room(plan.index, claims)) from None
            if not isinstance(error, Exception):
                raise
            cause = cause_of(error)
            if isinstance(cause, EngineError) or not is_death(error):
                raise cause from None
            raise EngineError(
                f"replica {plan.index} could not be started on Ray: {one_line(error)}"
            ) from None
        finally:
            waiting.cancel()
        return RayProcess(actor, url, what)

    async def close(self) -> None:
        groups, self._groups = list(self._groups.values()), {}
        if groups and import_ray().is_initialized():
            from ray.util.placement_group import remove_placement_group

            for group in groups:
                await asyncio.to_thread(remove_placement_group, group)

    def _actor(self, index: int, claims: Claims) -> Any:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if index not in self._groups:
            self._groups[index] = placement_group(
                [dict(claims.bundle)],
                strategy="STRICT_PACK",
                name=f"rollstream-replica-{index}-{self._stamp}",
            )
        amounts = dict(claims.bundle)
        env = dict(self._request.actor_options.get("runtime_env") or {})
        options: dict[str, Any] = {
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "memory": amounts.pop("memory", None),
            "resources": amounts or None,
            "runtime_env": {**env, "env_vars": {**(env.get("env_vars") or {}), **_KEEP_CHILDREN}},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._groups[index], 0),
            "max_restarts": 0,  # the next start is another actor's, with another port
            "max_task_retries": 0,
        }
        return import_ray().remote(ReplicaHost).options(**options).remote()

    def _no_room(self, index: int, claims: Claims) -> str:
        ray = import_ray()
        there, free = (
            {name: found.get(name, 0.0) for name in claims.bundle}
            for found in (ray.cluster_resources(), ray.available_resources())
        )
        return (
            f"replica {index} found no place on the Ray cluster within {self._request.startup_timeout:g} s "
            f"(actor_rollout_ref.rollout.launch.startup_timeout): it claims {dict(claims.bundle)} of one "
            f"node; the cluster has {there}, and free are {free}"
        )


class RayProcess:
    """A replica below an actor on some node; see `ReplicaProcess`."""

    def __init__(self, actor: Any, url: str, what: str) -> None:
        self._actor = actor
        self.url = url
        self.what = what
        self._end = asyncio.ensure_future(self._ended())

    async def wait(self) -> str:
        return await asyncio.shield(self._end)  # asked for again and again, and given up in between

    async def last_words(self) -> str:
        words = await self._ask("last_words", _ASKED_S)
        return words if isinstance(words, str) else "(its log stays on its node, which does not answer)"

    async def stop(self) -> None:
        await self._ask("stop", reaper.STOP_TIMEOUT_S + _ASKED_S)
        self._end.cancel()
        _end(self._actor)

    async def _ended(self) -> str:
        try:
            how: str = await self._actor.wait.remote()
        except Exception as error:
            return f"was lost with its actor or node ({one_line(error)})"
        return how

    async def _ask(self, method: str, seconds: float) -> object:
        """What the actor answers; None when it is dead, or does not."""
        try:
            async with asyncio.timeout(seconds):
                answer: object = await getattr(self._actor, method).remote()
        except Exception as error:
            _LOG.debug("the actor of %s does not say %s: %s", self.what, method, one_line(error))
            return None
        return answer


class ReplicaHost:
    """The actor: starts one replica on its node, once, and tells how it fares."""

    _process: LocalProcess

    async def start(
        self, plan: ReplicaPlan, kind: str, *, log_dir: str, log_name: str, mark: str
    ) -> tuple[str, str]:
        """Starts the replica on this node; returns its URL, and what it is for messages.

        Args:
            plan: what is started.
            kind: of its devices, see `Claims`.
            log_dir: of the run; where the node has no such folder, it is one for temporary files.
            log_name: without an ending.
            mark: of all starts of this replica, see `reaper.MARK`: what an actor that was lost has left on this
                node is killed first, for it holds the devices.

        Raises:
            EngineError: it cannot.
        """
        await asyncio.to_thread(reaper.kill_left, mark)
        ray = import_ray()
        node = str(ray.util.get_node_ip_address())
        logs = Path(log_dir)
        if not logs.is_dir():
            logs = Path(tempfile.mkdtemp(prefix="rollstream-replica-"))
        ids = ray.get_runtime_context().get_accelerator_ids().get(kind, [])
        env = device_env(kind, ids, os.environ)
        if plan.words[0] == NODE_PYTHON:
            # This interpreter's environment, but what the actor itself found by another way is not on its path.
            env |= path_to_rollstream()
        self._process = process = await LocalProcess.start(
            replace(plan, env={**env, **plan.env}),
            logs / f"{log_name}.log",
            host=node,
            mark=mark,
            node={NODE_PYTHON: sys.executable, NODE_ADDRESS: node, NODE_LOGS: str(logs / log_name)},
        )
        return process.url, f"{process.what} on node {node}"

    async def wait(self) -> str:
        """See `ReplicaProcess`, like the others."""
        return await self._process.wait()

    async def last_words(self) -> str:
        return await self._process.last_words()

    async def stop(self) -> None:
        await self._process.stop()


def _end(actor: Any) -> None:
    """Ends an actor that has nothing to tidy up, or will not."""
    with suppress(Exception):  # Ray may be gone
        import_ray().kill(actor)


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
