"""Makes engines that launch their replicas: what is launched, by which interpreter, here or on Ray."""

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import rollstream
from rollstream.engine.checks import no_longer_than, read_model_limits
from rollstream.engine.devices import Devices, DeviceToolError, find_devices
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.launch_plan import (
    MODULES,
    NODE_PYTHON,
    LaunchRequest,
    ReplicaPlan,
    ServerKind,
    choose_server,
    plan_for_nodes,
    plan_replicas,
)
from rollstream.engine.launch_process import Launcher, LocalLauncher
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.pool import POOL_KWARGS
from rollstream.engine.ray_launch import RayLauncher
from rollstream.engine.ray_plan import read_options
from rollstream.errors import ConfigError

_LOG = logging.getLogger(__name__)

_PYTHON_TIMEOUT_S = 60.0
"""For an interpreter to say whether it has a package, from a slow disk."""


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
    options = replace(options, model_path=_expanded(options.model_path))
    kwargs = kind.read_kwargs(options.engine_kwargs)
    limits = read_model_limits(Path(str(options.model_path)))
    launcher: Launcher
    if request.where == "ray":
        launcher = RayLauncher(choose_server(kind.name, request.server), request, options.log_dir)
    else:
        launcher = LocalLauncher(options.log_dir)
    make = kind.make_replica
    return LaunchedEngine(
        plans,
        launcher,
        make_replica=lambda url: make(url, options),
        request=request,
        own=no_longer_than(options.max_model_len, limits.max_model_len),
        what=kind.name,
        kwargs={key: kwargs[key] for key in POOL_KWARGS},
    )


def launch_plan(
    name: str, *, model_path: str, max_model_len: int | None, request: LaunchRequest, log_dir: Path
) -> list[ReplicaPlan]:
    """What would be launched for an engine. Starts nothing, but asks the vendors' tools for devices.

    On Ray one plan, for each replica that the cluster turns out to have room for, with `NODE_PYTHON` and its
    like in its command.

    Raises:
        ConfigError: no such model folder, interpreter or package; what `plan_replicas` raises.
    """
    server = choose_server(name, request.server)
    path = _expanded(model_path)
    if server == "rollstream" or path.startswith(("/", ".")):
        if not Path(path).is_dir():
            raise ConfigError(f"actor_rollout_ref.model.path: there is no folder {path}")
        path = str(Path(path).resolve())
    if request.where == "ray":
        return [_plan_on_ray(server, request, path, max_model_len)]
    if server == "rollstream" and request.python is None:
        request = replace(request, env={**_where_rollstream_is(), **request.env})
    plans = plan_replicas(
        server,
        request,
        _devices_for(server, request),
        model_path=path,
        max_model_len=max_model_len,
        python=_interpreter(request.python),
        log_dir=log_dir.absolute(),
    )
    _check_interpreter(server, request.python)
    return plans


def _plan_on_ray(
    server: ServerKind, request: LaunchRequest, path: str, max_model_len: int | None
) -> ReplicaPlan:
    """Refuses what shows without the cluster; what the nodes' environments have, their servers say."""
    read_options(request.actor_options)
    return plan_for_nodes(
        server,
        request,
        model_path=path,
        max_model_len=max_model_len,
        python=NODE_PYTHON if request.python is None else _interpreter(request.python),
    )


def _devices_for(server: ServerKind, request: LaunchRequest) -> Devices | None:
    if server == "rollstream":
        return None
    try:
        return _machine_devices()  # for 0, too: so that they can be hidden from the server
    except DeviceToolError:
        if request.devices_per_node == 0:
            return None
        raise


@cache
def _machine_devices() -> Devices | None:
    # They do not change while a process runs, and asking takes up to seconds.
    return find_devices(os.environ)


def _expanded(model_path: str) -> str:
    return str(Path(model_path).expanduser()) if model_path.startswith("~") else model_path


def _where_rollstream_is() -> dict[str, str]:
    package_parent = str(Path(rollstream.__file__).parent.parent)
    return {
        "PYTHONPATH": os.pathsep.join([package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    # Not resolved: an interpreter's link is what makes it its environment's.
    return str(Path(python).expanduser().absolute()) if os.sep in python else python


def _check_interpreter(server: ServerKind, python: str | None) -> None:
    """Refuses an interpreter that lacks the server's package."""
    module = MODULES[server]
    rollout = "actor_rollout_ref.rollout"
    if python is None:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"replicas of {server!r} are to be launched, but this environment has no {module!r}. Name "
                f"another environment's interpreter by {rollout}.launch.python, or running servers by "
                f"{rollout}.server_urls; or launch rollstream's own servers, which need no GPU, by "
                f"{rollout}.launch.server=rollstream"
            )
        return
    _LOG.info("looking for %r in the environment of %s", module, python)
    found = _has_module(_interpreter(python), module)
    if found is None:
        raise ConfigError(f"{rollout}.launch.python: {python} cannot be run as a Python interpreter")
    if not found:
        raise ConfigError(f"{rollout}.launch.python: {python} has no {module!r}")


@cache
def _has_module(python: str, module: str) -> bool | None:
    """Whether an interpreter has a package; None when it cannot be run."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [python, "-c", code], capture_output=True, timeout=_PYTHON_TIMEOUT_S, check=False
        )
        if done.returncode in (0, 1):
            return done.returncode == 0
    return None
