"""The actor that a replica on a Ray cluster lives below: on the replica's node, and as long as it is wanted.

    driver --(actor calls)--> ReplicaHost --(pipe)--> guard --> server --> its workers …

Whatever ends the actor (the driver, however it ends; the node's raylet; a signal) ends the guard's input, and
the guard ends the server. Ray itself would kill the actor's children, the guard first, and leave the server's
own children to themselves: `KEEP_CHILDREN` keeps it from that.
"""

import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import rollstream
from rollstream.engine.launch_plan import NODE_ADDRESS, NODE_LOGS, NODE_PYTHON, ReplicaPlan
from rollstream.engine.launch_process import LocalProcess, kill_left
from rollstream.engine.ports import ReservedPort
from rollstream.engine.ray_package import import_ray
from rollstream.engine.ray_plan import device_env
from rollstream.errors import EngineError

KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Environment of the actor's process."""


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """One start of a replica, as a node is told of it."""

    plan: ReplicaPlan
    mark: str
    """Of this start, see `launch_guard.MARK`."""
    left_by: str
    """The mark of the start before it: what has it is killed first, it holds the devices. Empty: none."""
    log_dir: str
    """Of the run; a folder of the node's own where the node has no such folder."""
    log_name: str
    kind: str
    """Of the devices, see `ray_plan.Claims`."""
    devices: int


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """What the driver knows of a replica that was started."""

    url: str
    what: str
    """Its process, log and node, for messages."""
    actor_pid: int


class ReplicaHost:
    """Starts one replica, once, and tells how it fares. The methods are those of `ReplicaProcess`."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    async def start(self, start: ReplicaStart) -> ReplicaAddress:
        """Starts the replica on this node. Raises `EngineError` when it cannot."""
        plan, node = start.plan, str(import_ray().util.get_node_ip_address())
        if start.left_by:
            await asyncio.to_thread(kill_left, start.left_by, {}, f"replica {plan.index}")
        try:
            log_dir = _log_dir(start.log_dir)
            port = ReservedPort(host=node)
            words = {
                NODE_PYTHON: sys.executable,
                NODE_ADDRESS: node,
                NODE_LOGS: str(log_dir / start.log_name),
            }
            try:
                self._process = await LocalProcess.start(
                    _with_env(plan, start),
                    port,
                    log_dir / f"{start.log_name}.log",
                    mark=start.mark,
                    node=words,
                )
            except BaseException:
                port.release()
                raise
        except OSError as error:  # no descriptor, process or disk space is left, perhaps for a moment
            raise EngineError(f"replica {plan.index} could not be started on {node}: {error}") from error
        return ReplicaAddress(self._process.url, f"{self._process.what} on node {node}", os.getpid())

    async def wait(self) -> str:
        """See `ReplicaProcess`, like the others."""
        return await self._running.wait()

    async def is_listening(self) -> bool:
        return await self._running.is_listening()

    async def is_port_taken(self) -> bool:
        return await self._running.is_port_taken()

    async def last_words(self) -> str:
        return await self._running.last_words()

    async def stop(self) -> str:
        """Ends the replica; returns its last words."""
        words = await self._running.last_words()
        await self._running.stop()
        return words

    @property
    def _running(self) -> LocalProcess:
        assert self._process is not None, "start() first"
        return self._process


def _with_env(plan: ReplicaPlan, start: ReplicaStart) -> ReplicaPlan:
    """The plan with the devices that Ray has assigned to this actor, and the way to its packages."""
    ids = import_ray().get_runtime_context().get_accelerator_ids().get(start.kind, []) if start.kind else []
    if len(ids) != start.devices:
        raise EngineError(
            f"replica {plan.index} was to have {start.devices} devices, but Ray assigned {ids} to its actor"
        )
    env = device_env(start.kind, ids, os.environ)
    if plan.words[0] == NODE_PYTHON:
        # This interpreter's environment, but what the actor itself found by another way is not on its path.
        here = str(Path(rollstream.__file__).parent.parent)
        env["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return ReplicaPlan(plan.index, tuple(ids), {**env, **plan.env}, plan.words)


def _log_dir(wanted: str) -> Path:
    if Path(wanted).is_dir():
        return Path(wanted)
    return Path(tempfile.mkdtemp(prefix="rollstream-replica-"))
