"""Makes engines that launch their replicas: what is launched, by which interpreter, here or on Ray."""

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import rollstream
from rollstream.engine.checks import read_engine_kwargs, read_model_limits
from rollstream.engine.devices import Devices, DeviceToolError, find_devices
from rollstream.engine.launch_commands import MODULES, ServerKind
from rollstream.engine.launch_plan import (
    NODE_PYTHON,
    LaunchRequest,
    ReplicaPlan,
    choose_server,
    plan_for_nodes,
    plan_replicas,
)
from rollstream.engine.launch_process import Launcher, LocalLauncher
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.pool import PoolEngine
from rollstream.engine.ray_launch import RayLauncher
from rollstream.engine.ray_plan import read_options
from rollstream.engine.replica import Replica
from rollstream.engine.sglang import ENGINE_KWARGS as SGLANG_KWARGS
from rollstream.engine.sglang import SGLangEngine, SGLangReplica
from rollstream.engine.vllm import ENGINE_KWARGS as VLLM_KWARGS
from rollstream.engine.vllm import VLLMEngine, VLLMReplica
from rollstream.errors import ConfigError

_LOG = logging.getLogger(__name__)

_PYTHON_TIMEOUT_S = 60.0
"""For an interpreter to say whether it has a package, from a slow disk."""


def launched_engine(
    name: str,
    *,
    model_path: str,
    max_model_len: int | None,
    engine_kwargs: Mapping[str, Any] | None,
    request: LaunchRequest,
    log_dir: Path,
) -> LaunchedEngine:
    """Makes an engine that launches its replicas; `start` it before use. On Ray, join the cluster first.

    Raises:
        ConfigError: what `launch_plan` raises, or an unknown key of engine_kwargs.
    """
    plans = launch_plan(
        name, model_path=model_path, max_model_len=max_model_len, request=request, log_dir=log_dir
    )
    path = _expanded(model_path)
    launcher: Launcher
    if request.where == "ray":
        launcher = RayLauncher(choose_server(name, request.server), request, log_dir)
    else:
        launcher = LocalLauncher(log_dir)

    def make_pool(urls: Sequence[str]) -> PoolEngine:
        engine = SGLangEngine if name == "sglang" else VLLMEngine
        return engine(urls, model_path=path, max_model_len=max_model_len, engine_kwargs=engine_kwargs)

    return LaunchedEngine(
        plans,
        launcher,
        make_pool=make_pool,
        make_replica=replica_maker(name, model_path=model_path, engine_kwargs=engine_kwargs),
        request=request,
        kwargs=_connection_kwargs(name, engine_kwargs),
    )


def replica_maker(
    name: str, *, model_path: str, engine_kwargs: Mapping[str, Any] | None
) -> Callable[[str], Replica]:
    """What makes a replica of a launched engine from its URL. Raises `ConfigError` as `launched_engine`."""
    path = _expanded(model_path)
    limits = read_model_limits(Path(path))
    kwargs = _connection_kwargs(name, engine_kwargs)
    kind = SGLangReplica if name == "sglang" else VLLMReplica
    return lambda url: kind(url, model_path=path, limits=limits, kwargs=kwargs)


def _connection_kwargs(name: str, engine_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return read_engine_kwargs(name, engine_kwargs or {}, SGLANG_KWARGS if name == "sglang" else VLLM_KWARGS)


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
    if server == "rollstream" and request.python is None:
        _check_embedded(path, request.args)
    return plans


def _plan_on_ray(
    server: ServerKind, request: LaunchRequest, path: str, max_model_len: int | None
) -> ReplicaPlan:
    """Refuses what shows without the cluster; what the nodes' environments have, their servers say."""
    read_options(request.actor_options)
    if server == "rollstream" and request.python is None:
        _check_embedded(path, request.args)
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


def _check_embedded(path: str, args: Mapping[str, Any]) -> None:
    """Refuses what `rollstream serve` would refuse, as far as its engine shows without a start."""
    from rollstream.engine.registry import check_engine_config

    given = {str(name).replace("_", "-"): value for name, value in args.items()}
    check_engine_config(
        str(given.get("engine", "openvino")), model_path=path, engine_kwargs=given.get("engine-kwargs")
    )


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
