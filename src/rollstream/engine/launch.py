"""Makes engines that launch their replicas: what is launched, by which interpreter, here or on Ray."""

import importlib.util
import os
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from rollstream.childproc import path_to_rollstream
from rollstream.engine.checks import no_longer_than, read_model_limits
from rollstream.engine.devices import Devices, DeviceToolError, find_devices
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.launch_plan import (
    NODE_PYTHON,
    LaunchRequest,
    ReplicaPlan,
    ServerKind,
    choose_server,
    plan_replicas,
)
from rollstream.engine.launch_process import Launcher, LocalLauncher
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.pool import POOL_KWARGS
from rollstream.engine.ray_launch import RayLauncher, replica_resources
from rollstream.errors import ConfigError


def launched_engine(kind: EngineKind, options: EngineOptions, request: LaunchRequest) -> LaunchedEngine:
    """Makes an engine that launches its replicas; `start` it before use. On Ray, join the cluster first.

    Raises:
        ConfigError: what `launch_plan` raises, or an unknown key of engine_kwargs.
    """
    assert options.model_path is not None and kind.make_replica is not None
    plans = launch_plan(
        kind.name,
        model_path=options.model_path,
        max_model_len=options.max_model_len,
        request=request,
        log_dir=options.log_dir,
    )
    path = _expanded(options.model_path)
    options = replace(options, model_path=path)
    kwargs = kind.read_kwargs(options.engine_kwargs)
    launcher: Launcher = LocalLauncher(options.log_dir)
    if request.where == "ray":
        launcher = RayLauncher(choose_server(kind.name, request.server), request, options.log_dir)
    make = kind.make_replica
    return LaunchedEngine(
        plans,
        launcher,
        make_replica=lambda url: make(url, options),
        request=request,
        own=no_longer_than(options.max_model_len, read_model_limits(Path(path)).max_model_len),
        what=kind.name,
        kwargs={key: kwargs[key] for key in POOL_KWARGS},
    )


def launch_plan(
    name: str, *, model_path: str, max_model_len: int | None, request: LaunchRequest, log_dir: Path
) -> list[ReplicaPlan]:
    """What would be launched for an engine. Starts nothing, but asks the vendors' tools for devices.

    On Ray one plan, for each replica that the cluster turns out to have room for, with `NODE_PYTHON` and its
    like in its command: what the nodes' environments have, their servers say.

    Raises:
        ConfigError: no such model folder, interpreter or package; what `plan_replicas` raises.
    """
    server = choose_server(name, request.server)
    path = _expanded(model_path)
    if server == "rollstream" or path.startswith(("/", ".")):
        if not Path(path).is_dir():
            raise ConfigError(f"actor_rollout_ref.model.path: there is no folder {path}")
        path = str(Path(path).resolve())
    devices = None
    if request.where == "ray":
        replica_resources(request.actor_options)  # refused here, before a cluster is joined
    elif server != "rollstream":
        devices = _devices_for(request)
    elif request.python is None:
        request = replace(request, env={**path_to_rollstream(), **request.env})
    plans = plan_replicas(
        server,
        request,
        devices,
        model_path=path,
        max_model_len=max_model_len,
        python=_interpreter(request),
        log_dir=log_dir.absolute(),
    )
    if request.where == "local":
        _check_interpreter(server, request)
    return plans


def _devices_for(request: LaunchRequest) -> Devices | None:
    try:
        return machine_devices()  # for 0, too: so that they can be hidden from the server
    except DeviceToolError:
        if request.devices_per_node == 0:
            return None
        raise


@cache
def machine_devices() -> Devices | None:
    """Asked for once: they do not change while a process runs, and asking takes up to seconds."""
    return find_devices(os.environ)


def _expanded(model_path: str) -> str:
    return str(Path(model_path).expanduser()) if model_path.startswith("~") else model_path


def _interpreter(request: LaunchRequest) -> str:
    if request.python is None:
        return NODE_PYTHON if request.where == "ray" else sys.executable
    # Not resolved: an interpreter's link is what makes it its environment's.
    return str(Path(request.python).expanduser().absolute()) if os.sep in request.python else request.python


def _check_interpreter(server: ServerKind, request: LaunchRequest) -> None:
    """Refuses what cannot be run at all. What another environment lacks, the server says at its start."""
    rollout = "actor_rollout_ref.rollout"
    if request.python is None and importlib.util.find_spec(server) is None:
        raise ConfigError(
            f"replicas of {server!r} are to be launched, but this environment has no {server!r}. Name "
            f"another environment's interpreter by {rollout}.launch.python, or running servers by "
            f"{rollout}.server_urls; or launch rollstream's own servers, which need no GPU, by "
            f"{rollout}.launch.server=rollstream"
        )
    if shutil.which(_interpreter(request)) is None:
        raise ConfigError(f"{rollout}.launch.python: {request.python} is no program that can be run")
