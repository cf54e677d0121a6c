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
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollstream.childproc import path_to_rollstream
from rollstream.engine import reaper
from rollstream.engine.launch.local import LocalProcess, log_stamp
from rollstream.engine.launch.plan import (
    NODE_ADDRESS,
    NODE_LOGS,
    NODE_PYTHON,
    VISIBLE,
    Claims,
    LaunchRequest,
    ReplicaPlan,
    ServerKind,
    claim,
)
from rollstream.engine.ray_package import cause_of, import_ray, is_death, one_line
from rollstream.errors import ConfigError, EngineError

_LOG = logging.getLogger(__name__)

_ASKED_S = 20.0
"""For an actor to answer what it can say at once: longer, and it hangs, or its node is about to be lost."""

_ROOM_SAID_S = 30.0
"""After which a replica that has no place yet is worth a line: others may use the cluster, too."""

_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Environment of the actor's process."""


class RayLauncher:
    """Starts replicas on the cluster that this process has joined; its methods are those of `LocalLauncher`.

    Their logs are in `log_dir` on the nodes that have this folder, else in one of the node's own.
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
        """As many as the cluster is asked for, all like the one that was made. Raises `ConfigError`."""
        ray = import_ray()
        if not ray.is_initialized():
            raise ConfigError("actor_rollout_ref.rollout.launch.where=ray: no Ray cluster was joined")
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._claims = claims = claim(self._server, self._request, nodes)
        _LOG.info("%d replicas on Ray, each claims %s of one node", claims.count, dict(claims.bundle))
        (plan,) = plans
        return [replace(plan, index=index) for index in range(claims.count)]

    async def start(self, plan: ReplicaPlan) -> "RayProcess":
        claims, index = self._claims, plan.index
        assert claims is not None, "place() first"
        actor = self._actor(index, claims)
        waiting = asyncio.get_running_loop().call_later(
            _ROOM_SAID_S,
            _LOG.warning,
            "replica %d has no place yet: it claims %s",
            index,
            dict(claims.bundle),
        )
        try:
            async with asyncio.timeout(self._request.startup_timeout):
                url, what = await actor.start.remote(
                    plan,
                    has_devices=claims.devices,
                    log_dir=self._log_dir,
                    log_name=f"replica-{index}-{self._stamp}",
                    mark=f"{self._mark}-{index}",
                )
        except TimeoutError:
            _end(actor)
            ray = import_ray()
            raise EngineError(
                f"replica {index} found no place on the Ray cluster within {self._request.startup_timeout:g} s "
                f"(launch.startup_timeout): it claims {dict(claims.bundle)} of one node; the cluster has "
                f"{ray.cluster_resources()}, and free are {ray.available_resources()}"
            ) from None
        except Exception as error:
            _end(actor)
            cause = cause_of(error)
            if isinstance(cause, EngineError) or not is_death(error):
                raise cause from None
            raise EngineError(f"replica {index} could not be started on Ray: {one_line(error)}") from None
        except BaseException:
            _end(actor)
            raise
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

        amounts = dict(claims.bundle)
        if index not in self._groups:
            name = f"rollstream-replica-{index}-{self._stamp}"
            self._groups[index] = placement_group([{**amounts}], strategy="STRICT_PACK", name=name)
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


class RayProcess:
    """A replica below an actor on some node; its methods are those of `LocalProcess`."""

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
            return str(await self._actor.of_process.remote("wait"))
        except Exception as error:
            return f"was lost with its actor or node ({one_line(error)})"

    async def _ask(self, method: str, seconds: float) -> object:
        """The actor's answer; None when it is dead, or does not."""
        try:
            async with asyncio.timeout(seconds):
                answer: object = await self._actor.of_process.remote(method)
        except Exception as error:
            _LOG.debug("the actor of %s does not say %s: %s", self.what, method, one_line(error))
            return None
        return answer


class ReplicaHost:
    """The actor: starts one replica on its node, once, and tells how it fares."""

    _process: LocalProcess

    async def start(
        self, plan: ReplicaPlan, *, has_devices: bool, log_dir: str, log_name: str, mark: str
    ) -> tuple[str, str]:
        """Starts the replica on this node; returns its URL, and its process for messages. Raises `EngineError`.

        `mark` is that of all its starts, see `reaper.MARK`: what an actor that was lost has left on this node is
        killed first, for it holds the devices.
        """
        await asyncio.to_thread(reaper.kill_left, mark)
        address = str(import_ray().util.get_node_ip_address())
        logs = Path(log_dir)
        if not logs.is_dir():
            logs = Path(tempfile.mkdtemp(prefix="rollstream-replica-"))
        # Ray has set the variables of this process for the devices that it has assigned.
        env = {} if has_devices else dict.fromkeys(VISIBLE, "")
        if plan.words[0] == NODE_PYTHON:
            # This interpreter's environment, but what the actor itself found by another way is not on its path.
            env |= path_to_rollstream()
        self._process = process = await LocalProcess.start(
            replace(plan, env={**env, **plan.env}),
            logs / f"{log_name}.log",
            host=address,
            mark=mark,
            node={NODE_PYTHON: sys.executable, NODE_ADDRESS: address, NODE_LOGS: str(logs / log_name)},
        )
        return process.url, f"{process.what} on node {address}"

    async def of_process(self, method: str) -> Any:
        """What a method of the replica's `LocalProcess` gives."""
        return await getattr(self._process, method)()


def _end(actor: Any) -> None:
    """Ends an actor that has nothing to tidy up, or will not."""
    with suppress(Exception):  # Ray may be gone
        import_ray().kill(actor)
