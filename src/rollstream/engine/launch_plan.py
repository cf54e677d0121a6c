"""How many replicas are launched, each with which devices and by which command. Starts nothing.

Sources of the commands: https://docs.sglang.io/advanced_features/server_arguments.html,
https://docs.vllm.ai/en/latest/cli/serve.html, `rollstream serve --help`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from rollstream.engine.devices import Devices
from rollstream.errors import ConfigError
from rollstream.redaction import names_secret

_ROLLOUT = "actor_rollout_ref.rollout"

LOOPBACK = "127.0.0.1"
"""Where launched servers listen that only this machine has to reach."""

ServerKind = Literal["sglang", "vllm", "rollstream"]

_ENTRY_POINTS: dict[ServerKind, tuple[str, ...]] = {
    "sglang": ("sglang.launch_server",),
    # `vllm serve` looks for a distribution of that name, which the CPU build is not.
    "vllm": ("vllm.entrypoints.openai.api_server",),
    "rollstream": ("rollstream.cli", "serve"),
}

NODE_PYTHON, NODE_ADDRESS, NODE_LOGS = "<python>", "<address>", "<logs>"
"""Words of a command that only the node knows on which it is run: the interpreter of its environment, the
address by which other nodes reach it, and its folder for logs."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What the user asks for. Times in seconds."""

    server: Literal["auto", "sglang", "vllm", "rollstream"] = "auto"
    """`auto`: the engine's own."""
    where: Literal["local", "ray"] = "local"
    """On this machine, or on nodes of the Ray cluster that this process has joined."""
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    """On Ray: what a replica claims besides its devices, see `ray_launch.ACTOR_OPTIONS`."""
    nodes: int = 1
    devices_per_node: int | None = None
    """None: all that are found, or for the server `rollstream` none."""
    replicas: int | None = None
    """None: as many as the devices allow, or one where there are none."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    gpu_memory_utilization: float | None = None
    """None: the server's own default."""
    dtype: str = "auto"
    load_format: str = "auto"
    logprobs_mode: str | None = None
    trust_remote_code: bool = False
    tokenizer_path: str | None = None
    seeds: bool = False
    """Whether the same seed has to give the same tokens."""
    python: str | None = None
    """The interpreter that has the server; None: this one."""
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    startup_timeout: float = 600.0
    unhealthy_timeout: float = 120.0
    """After so long without a healthy answer a replica that runs is restarted."""
    max_restarts: int = 5
    """Starts in a row that may fail before a replica is given up."""
    restart_delay: float = 0.5
    restart_delay_max: float = 30.0


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


def choose_server(engine: str, asked: str) -> ServerKind:
    """Which server is launched for an engine. Raises `ConfigError` where it speaks another language."""
    chosen = engine if asked == "auto" else asked
    speaks = {"sglang": ("sglang", "rollstream"), "vllm": ("vllm",)}
    if chosen not in speaks[engine]:
        raise ConfigError(
            f"{_ROLLOUT}.launch.server={asked}: engine {engine!r} speaks to {' and '.join(speaks[engine])}"
        )
    return chosen  # type: ignore[return-value]


def plan_replicas(
    server: ServerKind,
    request: LaunchRequest,
    devices: Devices | None,
    *,
    model_path: str,
    max_model_len: int | None,
    python: str,
    log_dir: Path,
) -> list[ReplicaPlan]:
    """One plan for each replica; on Ray one for all, whose number and devices are the cluster's to say.

    Args:
        server: what is launched.
        request: see there.
        devices: of this machine.
        model_path: folder or hub name.
        max_model_len: prompt plus response tokens at most; None: the server's own limit.
        python: the interpreter that has the server.
        log_dir: for logs that a server writes itself.

    Raises:
        ConfigError: more devices or replicas than there are, sizes that do not divide, arguments that are not
            the user's to give, a secret.
    """
    refuse_secrets(request.args, request.env)

    def plan(
        index: int, env: Mapping[str, str], chosen: tuple[str, ...], host: str, logs: str
    ) -> ReplicaPlan:
        words = server_words(
            server,
            request,
            python=python,
            model_path=model_path,
            max_model_len=max_model_len,
            host=host,
            log_dir=logs,
        )
        return ReplicaPlan(index, chosen, {**env, **request.env}, tuple(words))

    if request.where == "ray":
        return [plan(0, {}, (), NODE_ADDRESS, NODE_LOGS)]
    ids = devices.ids if devices is not None and server != "rollstream" else ()
    variables = devices.variables if devices is not None and server != "rollstream" else ()
    count, each = count_local(server, request, len(ids))
    plans = []
    for index in range(count):
        chosen = ids[index * each : (index + 1) * each]
        # Without any, the variables are there and empty: the server must not help itself.
        env = dict.fromkeys(variables, ",".join(chosen))
        plans.append(plan(index, env, chosen, LOOPBACK, str(log_dir / f"replica-{index}")))
    return plans


def count_local(server: ServerKind, request: LaunchRequest, found: int) -> tuple[int, int]:
    """How many replicas this machine with so many devices gets, and devices of each. Raises `ConfigError`."""
    if request.nodes != 1:
        raise ConfigError(
            f"trainer.nnodes={request.nodes}: replicas are launched on this machine only. For "
            f"several machines join a Ray cluster ({_ROLLOUT}.launch.where=ray), or start the servers there "
            f"and name them in {_ROLLOUT}.server_urls"
        )
    has = f"{found} devices are found on this machine (by nvidia-smi, rocm-smi or npu-smi, and what the "
    return count_replicas(server, request, [found], f"{has}visible-devices variables leave)")


def count_replicas(
    server: ServerKind, request: LaunchRequest, found: Sequence[int], has: str
) -> tuple[int, int]:
    """How many replicas there are, and devices of each.

    Args:
        server: what is launched.
        request: see there. All devices are used where no number is asked for.
        found: devices of each node.
        has: says so, for messages.

    Raises:
        ConfigError: more than there is, sizes that do not divide, a replica that no node can hold.
    """
    each = request.tensor_parallel * request.pipeline_parallel * request.data_parallel
    sizes = (
        f"tensor_model_parallel_size {request.tensor_parallel} x pipeline_model_parallel_size "
        f"{request.pipeline_parallel} x data_parallel_size {request.data_parallel} = {each} devices a replica"
    )
    nodes, per_node = request.nodes, request.devices_per_node
    if server == "rollstream":
        if per_node:
            raise ConfigError(
                f"trainer.n_gpus_per_node={per_node}: {_ROLLOUT}.launch.server=rollstream runs on the CPU; set "
                "it to 0, or launch another server"
            )
        per_node = 0
    if per_node == 0 or (per_node is None and not any(found)):
        if each > 1:
            raise ConfigError(f"{sizes}, but these replicas run on CPUs: {has}, or none are to be used")
        if nodes > 1:
            raise ConfigError(
                f"trainer.nnodes={nodes} counts nodes of n_gpus_per_node devices, and these replicas take none: "
                f"set {_ROLLOUT}.launch.replicas"
            )
        return request.replicas or 1, 0
    if per_node is None:
        if nodes > 1:
            raise ConfigError(
                f"trainer.nnodes={nodes} needs trainer.n_gpus_per_node; without both, all devices are used"
            )
        used = list(found)
    else:
        used = [per_node] * nodes
        if sum(count >= per_node for count in found) < nodes:
            on = f" on trainer.nnodes={nodes} nodes" if nodes > 1 else ""
            raise ConfigError(f"trainer.n_gpus_per_node is {per_node}{on}, but {has}")
    if each > max(found):
        raise ConfigError(
            f"{sizes}, but {has}: a replica is launched on one node. For one that takes several nodes, start "
            f"the servers yourself and name them in {_ROLLOUT}.server_urls"
        )
    if (per_node is not None or len(found) == 1) and used[0] % each:
        raise ConfigError(f"{used[0]} devices (trainer.n_gpus_per_node) do not divide into replicas: {sizes}")
    most = sum(count // each for count in used)
    if request.replicas is not None and request.replicas > most:
        raise ConfigError(
            f"{_ROLLOUT}.launch.replicas is {request.replicas}, but {has}, enough for {most}: {sizes}"
        )
    return request.replicas or most, each


class _Argument(NamedTuple):
    """What each server calls something that it is told; None where it has no such argument."""

    value: str
    """A field of `LaunchRequest`, or of what `server_words` is given."""
    key: str | None
    """The configuration's, by which alone it is set: devices are counted by it, or it is in the identity."""
    sglang: str | None
    vllm: str | None
    rollstream: str | None


_ARGUMENTS = (
    _Argument("model_path", None, "model-path", "model", "model"),
    _Argument("tokenizer_path", None, "tokenizer-path", "tokenizer", None),
    _Argument("host", None, "host", "host", "host"),
    _Argument("tensor_parallel", "tensor_model_parallel_size", "tp-size", "tensor-parallel-size", None),
    _Argument("pipeline_parallel", "pipeline_model_parallel_size", "pp-size", "pipeline-parallel-size", None),
    _Argument("data_parallel", "data_parallel_size", "dp-size", "data-parallel-size", None),
    _Argument(
        "gpu_memory_utilization",
        "gpu_memory_utilization",
        "mem-fraction-static",
        "gpu-memory-utilization",
        None,
    ),
    _Argument("dtype", "dtype", "dtype", "dtype", None),
    _Argument("load_format", "load_format", "load-format", "load-format", None),
    _Argument("logprobs_mode", None, None, "logprobs-mode", None),
    _Argument("max_model_len", "max_model_len", "context-length", "max-model-len", "max-model-len"),
    _Argument("trust_remote_code", None, "trust-remote-code", "trust-remote-code", None),
    # Without it SGLang ignores seeds silently. It is slower, so only where seeds are wanted.
    _Argument("seeds", None, "enable-deterministic-inference", None, None),
    _Argument("log_dir", None, None, None, "log-dir"),
)

_DEFAULTS = LaunchRequest()
"""What a server does without being told."""

_RESERVED = frozenset(("model", "model-path", "host", "port", "log-dir", "exit-with-parent", "json"))
"""Arguments that rollstream gives itself."""

_ELSEWHERE = {name: one.key for one in _ARGUMENTS if one.key for name in one[2:] if name} | {
    "tp": "tensor_model_parallel_size",
    "dp": "data_parallel_size",
}
"""Arguments that have keys of their own."""


def server_words(
    server: ServerKind,
    request: LaunchRequest,
    *,
    python: str,
    model_path: str,
    max_model_len: int | None = None,
    host: str = LOOPBACK,
    log_dir: str = "",
) -> list[str]:
    """A server's command, but for its port.

    The user's further arguments (`request.args`) are named with `_` or `-`. True gives the name alone; false or
    null leaves out an argument that rollstream would give; a list gives several words; a mapping gives `k=v`
    words to `rollstream serve`, and JSON to the others.

    Raises:
        ConfigError: an argument that is not the user's to give here, or an option that the server lacks.
    """
    given = {str(name).replace("_", "-"): value for name, value in request.args.items()}
    for name in given:
        if name in _RESERVED:
            raise ConfigError(f"{_ROLLOUT}.launch.args.{name} is not yours to set: rollstream does")
        if name in _ELSEWHERE:
            raise ConfigError(
                f"{_ROLLOUT}.launch.args.{name} has a key of its own: {_ROLLOUT}.{_ELSEWHERE[name]}"
            )
    told = {"model_path": model_path, "max_model_len": max_model_len, "host": host, "log_dir": log_dir}
    own: dict[str, Any] = {}
    for one in _ARGUMENTS:
        is_told = one.value in told
        value = told[one.value] if is_told else getattr(request, one.value)
        if value is None or (not is_told and value == getattr(_DEFAULTS, one.value)):
            continue
        if (name := getattr(one, server)) is not None:
            own[name] = value
        elif one.key is not None:
            raise ConfigError(
                f"{_ROLLOUT}.{one.key}={value}: `rollstream serve` has no such option; say it to its engine, by "
                f"{_ROLLOUT}.launch.args.engine_kwargs"
            )
    if server == "vllm":
        own["enable-scale-out"] = True  # the route that takes and gives token ids, and aborts
    elif server == "rollstream":
        # On a cluster other nodes have to reach it, as any other server; a key is the user's to set.
        own |= {"insecure": host != LOOPBACK, "exit-with-parent": True}
    words = [python, "-m", *_ENTRY_POINTS[server]]
    for name, value in (own | given).items():
        words += _words(name, value, json=server != "rollstream")
    return words


def _words(name: str, value: Any, *, json: bool) -> Iterator[str]:
    if value is None or value is False:
        return
    yield f"--{name}"
    if value is True:
        return
    if isinstance(value, Mapping):
        if json:
            yield orjson.dumps(dict(value)).decode()
        else:
            yield from (f"{key}={_word(one)}" for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from (_word(one) for one in value)
    else:
        yield _word(value)


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def refuse_secrets(args: Mapping[str, Any], env: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for keys and passwords among the user's arguments and variables.

    All users of a machine can read command lines, logs hold them, and the configuration is written to the run
    directory.
    """
    instead = (
        "looks like a secret, and what is configured is written to the run directory, a command to logs. Set "
        "it in the environment that rollstream is started in, which the servers inherit"
    )
    for name, value in args.items():
        # A switch is none, as in vLLM's `--hf-token`, which takes the token that is stored.
        if value is not None and not isinstance(value, bool) and names_secret(str(name)):
            raise ConfigError(
                f"{_ROLLOUT}.launch.args.{name} {instead} (vLLM reads VLLM_API_KEY), or do without: servers "
                "that are launched on this machine listen on 127.0.0.1 only"
            )
    for name, text in env.items():
        if text and names_secret(str(name)):
            raise ConfigError(f"{_ROLLOUT}.launch.env.{name} {instead}")
