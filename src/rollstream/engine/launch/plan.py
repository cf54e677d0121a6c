"""Plans how many servers are launched, each with which devices and by which command. Starts nothing.

Sources of the commands: https://docs.sglang.io/advanced_features/server_arguments.html,
https://docs.vllm.ai/en/latest/cli/serve.html, `rollstream serve --help`.
"""

import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from rollstream.childproc import path_to_rollstream
from rollstream.engine.launch.devices import Devices, machine_devices
from rollstream.errors import ConfigError
from rollstream.redaction import names_secret

_ROLLOUT = "actor_rollout_ref.rollout"

LOOPBACK = "127.0.0.1"
"""Launched servers that only this machine has to reach listen here."""

ServerKind = Literal["sglang", "vllm", "rollstream"]

_MODULES: dict[ServerKind, tuple[str, ...]] = {
    "sglang": ("sglang.launch_server",),
    # `vllm serve` looks for a distribution of that name, which the CPU build is not.
    "vllm": ("vllm.entrypoints.openai.api_server",),
    "rollstream": ("rollstream.cli", "serve"),
}
_SPOKEN = {"sglang": ("sglang", "rollstream"), "vllm": ("vllm",)}
"""Servers that speak an engine's language."""

NODE_PYTHON, NODE_ADDRESS, NODE_LOGS = "<python>", "<address>", "<logs>"
"""Words of a command that only the node knows on which it is run: the interpreter of its environment, the
address by which other nodes reach it, and its folder for logs."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables that choose a process's devices. Empty ones hide all: a server must not help itself."""

_DEVICES = ("GPU", "NPU")
"""Ray's resources that are devices of a server: NVIDIA's and AMD's; Ascend's."""

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""

OWN_KEYS = (*_SIZES, "gpu_memory_utilization", "dtype", "load_format")
"""Keys of `actor_rollout_ref.rollout` that servers have arguments for. Those are set by these keys alone:
devices are counted by them, or they are part of the identity."""

_ARGUMENTS: dict[str, tuple[str | None, str | None, str | None]] = {
    "model_path": ("model-path", "model", "model"),
    "tokenizer_path": ("tokenizer-path", "tokenizer", None),
    "host": ("host", "host", "host"),
    "tensor_model_parallel_size": ("tp-size", "tensor-parallel-size", None),
    "pipeline_model_parallel_size": ("pp-size", "pipeline-parallel-size", None),
    "data_parallel_size": ("dp-size", "data-parallel-size", None),
    "gpu_memory_utilization": ("mem-fraction-static", "gpu-memory-utilization", None),
    "dtype": ("dtype", "dtype", None),
    "load_format": ("load-format", "load-format", None),
    "logprobs_mode": (None, "logprobs-mode", None),
    "max_model_len": ("context-length", "max-model-len", "max-model-len"),
    "trust_remote_code": ("trust-remote-code", "trust-remote-code", None),
    # Without it SGLang ignores seeds silently. It is slower, so only where seeds are wanted.
    "seeds": ("enable-deterministic-inference", None, None),
    "log_dir": (None, None, "log-dir"),
}
"""The names that sglang, vllm and `rollstream serve` have for an argument; None: it has no such argument."""

_RESERVED = frozenset(("model", "model-path", "host", "port", "log-dir", "exit-with-parent", "json"))
"""Arguments that rollstream gives itself."""
_ELSEWHERE = {name: key for key in (*OWN_KEYS, "max_model_len") for name in _ARGUMENTS[key] if name} | {
    "tp": "tensor_model_parallel_size",
    "dp": "data_parallel_size",
}
"""Arguments that have keys of their own."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Says what to launch, and when to start it again. Times in seconds."""

    server: Literal["auto", "sglang", "vllm", "rollstream"] = "auto"
    """`auto`: the engine's own."""
    where: Literal["local", "ray"] = "local"
    """On this machine, or on nodes of the Ray cluster that this process has joined."""
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    """A replica's claims on Ray besides its devices, see `replica_resources`."""
    nodes: int = 1
    devices_per_node: int | None = None
    """None: all that are found, or for the server `rollstream` none."""
    replicas: int | None = None
    """None: as many as the devices allow, or one where there are none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values of what rollstream has keys for, see `_ARGUMENTS`; None, False, "auto" and a size of 1 are not told."""
    python: str | None = None
    """The interpreter that has the server; None: this one."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the server."""
    env: Mapping[str, str] = field(default_factory=dict)
    startup_timeout: float = 600.0
    unhealthy_timeout: float = 120.0
    """After so long without a healthy answer a replica that runs is restarted."""
    max_restarts: int = 5
    """Starts in a row that may fail before a replica is given up."""
    restart_delay: float = 0.5
    restart_delay_max: float = 30.0

    @property
    def devices_each(self) -> int:
        """Devices of a replica, if it has any."""
        return math.prod(self.arguments.get(name) or 1 for name in _SIZES)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica to be launched."""

    index: int
    devices: tuple[str, ...]
    env: Mapping[str, str]
    """On top of this process's environment."""
    words: tuple[str, ...]
    """The command, but for the port."""

    def command(self, port: int | str, node: Mapping[str, str] | None = None) -> list[str]:
        """The command for a port; `node` says what stands for `NODE_PYTHON` and its like."""
        return [*((node or {}).get(word, word) for word in self.words), "--port", str(port)]


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of replicas on a cluster."""

    count: int
    bundle: Mapping[str, float]
    """Ray's resources for one replica, all of one node: a placement group's only bundle."""
    devices: bool
    """Whether they are on devices."""


def choose_server(engine: str, server: str) -> ServerKind:
    """The server that is launched for an engine. Raises `ConfigError` where it speaks another language."""
    chosen = engine if server == "auto" else server
    if chosen not in _SPOKEN[engine]:
        raise ConfigError(
            f"{_ROLLOUT}.launch.server={server}: engine {engine!r} speaks to {' and '.join(_SPOKEN[engine])}"
        )
    return chosen  # type: ignore[return-value]


def launch_plan(
    engine: str, *, model_path: str, max_model_len: int | None, request: LaunchRequest, log_dir: Path
) -> list[ReplicaPlan]:
    """The replicas that would be launched for an engine; on Ray one that stands for all, see `claim`.

    Raises:
        ConfigError: no such model folder, interpreter or package; more devices or replicas than there are;
            sizes that do not divide; arguments that are not the user's to give.
    """
    server = choose_server(engine, request.server)
    path = str(Path(model_path).expanduser()) if model_path.startswith("~") else model_path
    if server == "rollstream" or path.startswith(("/", ".")):
        if not Path(path).is_dir():
            raise ConfigError(f"actor_rollout_ref.model.path: there is no folder {path}")
        path = str(Path(path).resolve())
    python = request.python
    if python is not None and os.sep in python:
        # Not resolved: an interpreter's link is what makes it its environment's.
        python = str(Path(python).expanduser().absolute())
    arguments = {**request.arguments, "model_path": path, "max_model_len": max_model_len}
    request = replace(request, arguments=arguments)
    if server == "vllm" and arguments.get("lora_rank"):
        request = replace(request, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", **request.env})
    if server == "vllm" and arguments.get("sends_weights"):
        request = replace(request, env={"VLLM_SERVER_DEV_MODE": "1", **request.env})

    if request.where == "ray":
        replica_resources(request.actor_options)  # refused here, before a cluster is joined
        words = server_words(
            server, request, python=python or NODE_PYTHON, host=NODE_ADDRESS, log_dir=NODE_LOGS
        )
        return [ReplicaPlan(0, (), request.env, tuple(words))]

    if request.nodes != 1:
        raise ConfigError(
            f"trainer.nnodes={request.nodes}: replicas are launched on this machine only; several machines "
            f"are a Ray cluster ({_ROLLOUT}.launch.where=ray), or servers that run ({_ROLLOUT}.server_urls)"
        )
    devices = Devices()
    if server != "rollstream":
        devices = Devices((), VISIBLE) if request.devices_per_node == 0 else machine_devices()
    count, each = count_replicas(server, request, [len(devices.ids)])
    inherited = path_to_rollstream() if server == "rollstream" and python is None else {}
    plans = []
    for index in range(count):
        chosen = devices.ids[index * each : (index + 1) * each]
        env = {**inherited, **dict.fromkeys(devices.variables, ",".join(chosen)), **request.env}
        logs = str(log_dir.absolute() / f"replica-{index}")
        words = server_words(server, request, python=python or sys.executable, log_dir=logs)
        plans.append(ReplicaPlan(index, chosen, env, tuple(words)))
    if python is None and importlib.util.find_spec(server) is None:
        raise ConfigError(
            f"this environment has no {server!r} to launch: name another one's interpreter "
            f"({_ROLLOUT}.launch.python) or servers that run ({_ROLLOUT}.server_urls), or launch rollstream's "
            f"own, which need no GPU ({_ROLLOUT}.launch.server=rollstream)"
        )
    if shutil.which(python or sys.executable) is None:
        raise ConfigError(f"{_ROLLOUT}.launch.python: {request.python} is no program that can be run")
    return plans


def count_replicas(server: ServerKind, request: LaunchRequest, found: Sequence[int]) -> tuple[int, int]:
    """The number of replicas, and of devices of each. All devices are used where no number is asked for.

    `found` are the devices of each node that this process may use.

    Raises:
        ConfigError: more than there is, sizes that do not divide, a replica that no node can hold.
    """
    each, nodes, per_node = request.devices_each, request.nodes, request.devices_per_node
    has = f"there are {' + '.join(map(str, found))} devices"
    sizes = f"a replica takes {each} devices ({' x '.join(_SIZES)})"
    if server == "rollstream":
        if per_node:
            raise ConfigError(f"trainer.n_gpus_per_node={per_node}: `rollstream serve` runs on the CPU")
        per_node = 0
    if per_node == 0 or (per_node is None and not any(found)):
        if each > 1:
            raise ConfigError(f"{sizes}, and these run on CPUs: {has}, or none are to be used")
        if nodes > 1:
            raise ConfigError(
                f"trainer.nnodes={nodes} counts nodes with devices, and these replicas take none: set "
                f"{_ROLLOUT}.launch.replicas"
            )
        return request.replicas or 1, 0
    if per_node is None:
        if nodes > 1:
            raise ConfigError(f"trainer.nnodes={nodes} needs trainer.n_gpus_per_node")
        used = list(found)
    else:
        used = [per_node] * nodes
        if sum(count >= per_node for count in found) < nodes:
            raise ConfigError(
                f"trainer.n_gpus_per_node is {per_node} and trainer.nnodes is {nodes}, but {has}: to launch "
                f"on fewer set these, to ask servers elsewhere {_ROLLOUT}.server_urls, for the CPU "
                f"{_ROLLOUT}.name=openvino or hf"
            )
    if each > max(found):
        raise ConfigError(f"{sizes} of one node, but {has}")
    if (per_node is not None or len(found) == 1) and used[0] % each:
        raise ConfigError(f"{used[0]} devices (trainer.n_gpus_per_node) do not divide: {sizes}")
    most = sum(count // each for count in used)
    if request.replicas is not None and request.replicas > most:
        raise ConfigError(f"{_ROLLOUT}.launch.replicas is {request.replicas}, but {has}, enough for {most}")
    return request.replicas or most, each


def claim(server: ServerKind, request: LaunchRequest, nodes: Sequence[Mapping[str, float]]) -> Claims:
    """The claims of a request's replicas on a cluster, by Ray's resources of each node that lives.

    Raises:
        ConfigError: see `count_replicas`; more than the nodes can hold.
    """
    kind = next((name for name in _DEVICES if any(node.get(name, 0) >= 1 for node in nodes)), "")
    found = [int(node.get(kind, 0)) for node in nodes]
    count, each = count_replicas(server, request, found)
    bundle = {**({kind: float(each)} if each else {}), **replica_resources(request.actor_options)}
    room = sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in bundle.items()) for node in nodes
    )
    if room < count:
        raise ConfigError(
            f"{count} replicas of {bundle} each are more than the cluster's nodes can hold ({room}): see "
            f"{_ROLLOUT}.launch.replicas and ray_kwargs.replica"
        )
    return Claims(count, bundle, bool(each))


def replica_resources(options: Mapping[str, Any]) -> dict[str, float]:
    """The claims by `ray_kwargs.replica` besides devices, by Ray's names; never empty.

    Raises `ConfigError` for what is not the user's to set, or no number.
    """
    known = ("num_cpus", "memory", "resources", "runtime_env")
    if unknown := sorted(str(name) for name in options if name not in known):
        raise ConfigError(f"ray_kwargs.replica.{unknown[0]} is not yours to set: it takes {', '.join(known)}")
    wanted: dict[str, Any] = {"CPU": options.get("num_cpus", 1), **(options.get("resources") or {})}
    if options.get("memory") is not None:
        wanted["memory"] = options["memory"]
    for name, amount in wanted.items():
        if name in _DEVICES or isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise ConfigError(f"ray_kwargs.replica: a replica cannot claim {name}={amount!r}")
    return {str(name): float(amount) for name, amount in wanted.items() if amount} or {"CPU": 0.001}


def server_words(
    server: ServerKind, request: LaunchRequest, *, python: str, host: str = LOOPBACK, log_dir: str = ""
) -> list[str]:
    """A server's command, but for its port.

    The user's further arguments (`request.args`) are named with `_` or `-`. True gives the name alone; false or
    null leaves out an argument that rollstream would give; a list gives several words; a mapping gives `k=v`
    words to `rollstream serve`, and JSON to the others.

    Raises:
        ConfigError: an argument that is not the user's to give here, or an option that the server lacks.
    """
    further = {str(name).replace("_", "-"): value for name, value in request.args.items()}
    for name in further:
        if name in _RESERVED:
            raise ConfigError(f"{_ROLLOUT}.launch.args.{name} is not yours to set: rollstream does")
        if name in _ELSEWHERE:
            raise ConfigError(f"{_ROLLOUT}.launch.args.{name} has a key: {_ROLLOUT}.{_ELSEWHERE[name]}")
    values = {**request.arguments, "host": host, "log_dir": log_dir}
    own: dict[str, Any] = {}
    for key, names in _ARGUMENTS.items():
        value = values.get(key)
        if value in (None, False, "auto") or (key in _SIZES and value == 1):
            continue
        if (own_name := names[list(_MODULES).index(server)]) is not None:
            own[own_name] = value
        elif key in OWN_KEYS:
            raise ConfigError(
                f"{_ROLLOUT}.{key}={value}: `rollstream serve` has no such option (its engine may, by "
                f"{_ROLLOUT}.launch.args.engine_kwargs)"
            )
    own |= _lora_arguments(server, request.arguments.get("lora_rank") or 0)
    if request.arguments.get("sends_weights"):
        if server == "rollstream":
            raise ConfigError(f"{_ROLLOUT}.weight_transfer: `rollstream serve` reads weights from a folder")
        if server == "vllm":
            own["weight-transfer-config"] = {"backend": "rollstream"}
    if server == "vllm":
        own["enable-scale-out"] = True  # the route that takes and gives token ids, and aborts
    elif server == "rollstream":
        # On a cluster other nodes have to reach it, as any other server; a key is the user's to set.
        own |= {"insecure": host != LOOPBACK, "exit-with-parent": True}
    words = [python, "-m", *_MODULES[server]]
    for name, value in (own | further).items():
        words += _words(name, value, json=server != "rollstream")
    return words


def _lora_arguments(server: ServerKind, rank: int) -> dict[str, Any]:
    """A server's arguments for adapters of a rank. Two at once: of the newest weights, and of those before."""
    if not rank or server == "rollstream":  # configurations of verl's have a rank where nobody gives adapters
        return {}
    if server == "sglang":
        return {"enable-lora": True, "max-lora-rank": rank, "lora-target-modules": "all"}
    if not (fits := [most for most in _LORA_RANKS if most >= rank]):
        raise ConfigError(f"actor_rollout_ref.model.lora_rank={rank}: vLLM takes up to {_LORA_RANKS[-1]}")
    return {"enable-lora": True, "max-lora-rank": fits[0], "max-loras": 2}


def _words(name: str, value: Any, *, json: bool) -> Iterator[str]:
    if value is None or value is False:
        return
    yield f"--{name}"
    if isinstance(value, Mapping):
        if json:
            yield orjson.dumps(dict(value)).decode()
        else:
            yield from (f"{key}={_word(item)}" for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from map(_word, value)
    elif value is not True:
        yield _word(value)


def _word(value: Any) -> str:
    return orjson.dumps(value).decode() if value is None or isinstance(value, bool) else str(value)


def refuse_secrets(args: Mapping[str, Any], env: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for keys and passwords among the user's arguments and variables.

    All users of a machine can read command lines, logs hold them, and the configuration is written to the run
    directory.
    """
    # A switch is none, as in vLLM's `--hf-token`, which takes the token that is stored.
    values = {f"args.{name}": value for name, value in args.items() if not isinstance(value, bool)}
    values |= {f"env.{name}": value or None for name, value in env.items()}
    for name, value in values.items():
        if value is not None and names_secret(name.partition(".")[2]):
            raise ConfigError(
                f"{_ROLLOUT}.launch.{name} looks like a secret, and would be written to the run directory and to "
                "logs: set it in the environment that rollstream is started in, which the servers inherit"
            )
