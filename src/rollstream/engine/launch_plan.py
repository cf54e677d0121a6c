"""How many replicas are launched, each with which devices and by which command. Starts nothing.

Sources of the commands: https://docs.sglang.io/advanced_features/server_arguments.html,
https://docs.vllm.ai/en/latest/cli/serve.html, `rollstream serve --help`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from rollstream.engine.devices import Devices
from rollstream.errors import ConfigError
from rollstream.redaction import names_secret

_ROLLOUT = "actor_rollout_ref.rollout"

LOOPBACK = "127.0.0.1"
"""Where launched servers listen that only this machine has to reach."""

ServerKind = Literal["sglang", "vllm", "rollstream"]

MODULES: dict[ServerKind, str] = {
    "sglang": "sglang",
    "vllm": "vllm",
    "rollstream": "rollstream",
}
"""The package that the interpreter must have."""

_ENTRY_POINTS: dict[ServerKind, tuple[str, ...]] = {
    "sglang": ("sglang.launch_server",),
    # `vllm serve` looks for a distribution of that name, which the CPU build is not.
    "vllm": ("vllm.entrypoints.openai.api_server",),
    "rollstream": ("rollstream.cli", "serve"),
}

_RESERVED = frozenset(("model", "model-path", "host", "port", "log-dir", "exit-with-parent", "json"))
"""Arguments that rollstream gives itself."""

_ELSEWHERE = {
    "tp": "tensor_model_parallel_size",
    "tp-size": "tensor_model_parallel_size",
    "tensor-parallel-size": "tensor_model_parallel_size",
    "pp-size": "pipeline_model_parallel_size",
    "pipeline-parallel-size": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "dp-size": "data_parallel_size",
    "data-parallel-size": "data_parallel_size",
    "dtype": "dtype",
    "load-format": "load_format",
    "mem-fraction-static": "gpu_memory_utilization",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "context-length": "max_model_len",
    "max-model-len": "max_model_len",
}
"""Arguments that have keys of their own: they count devices with them, or know them from the identity."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What every kind of server is told, in its own words."""

    model_path: str
    tokenizer_path: str | None
    max_model_len: int | None
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    gpu_memory_utilization: float | None
    dtype: str
    load_format: str
    trust_remote_code: bool
    seeds: bool
    log_dir: Path
    host: str = LOOPBACK
    """Address that it listens on."""


def server_words(kind: ServerKind, python: str, options: ServerOptions, args: Mapping[str, Any]) -> list[str]:
    """A server's command, but for its port.

    Args:
        kind: the server.
        python: the interpreter that has it.
        options: see there.
        args: the user's further arguments by name, with `_` or `-`. True gives the name alone; false or null
            leaves out an argument that rollstream would give; a list gives several words; a mapping gives
            `k=v` words to `rollstream serve`, and JSON to the others.

    Raises:
        ConfigError: an argument that is not the user's to give here, or an option that the server lacks.
    """
    given = {str(name).replace("_", "-"): value for name, value in args.items()}
    for name in given:
        if name in _RESERVED:
            raise ConfigError(f"{_ROLLOUT}.launch.args.{name} is not yours to set: rollstream does")
        if name in _ELSEWHERE:
            raise ConfigError(
                f"{_ROLLOUT}.launch.args.{name} has a key of its own: {_ROLLOUT}.{_ELSEWHERE[name]}"
            )
    own = {"sglang": _sglang, "vllm": _vllm, "rollstream": _rollstream}[kind](options)
    words = [python, "-m", *_ENTRY_POINTS[kind]]
    for name, value in (own | given).items():
        words += _words(name, value, json=kind != "rollstream")
    return words


def _sglang(options: ServerOptions) -> dict[str, Any]:
    return {
        "model-path": options.model_path,
        "tokenizer-path": options.tokenizer_path,
        "host": options.host,
        "tp-size": _unless(options.tensor_parallel, 1),
        "pp-size": _unless(options.pipeline_parallel, 1),
        "dp-size": _unless(options.data_parallel, 1),
        "mem-fraction-static": options.gpu_memory_utilization,
        "dtype": _unless(options.dtype, "auto"),
        "load-format": _unless(options.load_format, "auto"),
        "context-length": options.max_model_len,
        "trust-remote-code": options.trust_remote_code,
        # Without it seeds are silently ignored. It is slower, so only where seeds are wanted.
        "enable-deterministic-inference": options.seeds,
    }


def _vllm(options: ServerOptions) -> dict[str, Any]:
    return {
        "model": options.model_path,
        "tokenizer": options.tokenizer_path,
        "host": options.host,
        "tensor-parallel-size": _unless(options.tensor_parallel, 1),
        "pipeline-parallel-size": _unless(options.pipeline_parallel, 1),
        "data-parallel-size": _unless(options.data_parallel, 1),
        "gpu-memory-utilization": options.gpu_memory_utilization,
        "dtype": _unless(options.dtype, "auto"),
        "load-format": _unless(options.load_format, "auto"),
        "max-model-len": options.max_model_len,
        "trust-remote-code": options.trust_remote_code,
        "enable-scale-out": True,  # the route that takes and gives token ids, and aborts
    }


def _rollstream(options: ServerOptions) -> dict[str, Any]:
    for name, value, default in (
        ("dtype", options.dtype, "auto"),
        ("load_format", options.load_format, "auto"),
        ("gpu_memory_utilization", options.gpu_memory_utilization, None),
    ):
        if value != default:
            raise ConfigError(
                f"actor_rollout_ref.rollout.{name}={value}: `rollstream serve` has no such option; "
                "say it to its engine, by actor_rollout_ref.rollout.launch.args.engine_kwargs"
            )
    return {
        "model": options.model_path,
        "host": options.host,
        # On a cluster other nodes have to reach it, as any other server; a key is the user's to set.
        "insecure": options.host != "127.0.0.1",
        "max-model-len": options.max_model_len,
        "log-dir": options.log_dir,
        "exit-with-parent": True,
    }


def _unless(value: Any, default: Any) -> Any:
    return None if value == default else value


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
    """On Ray: what a replica claims besides its devices, see `ray_plan.ACTOR_OPTIONS`."""
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
    """One plan for each replica.

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
    count, each = _count(server, request, len(devices.ids) if devices else 0)
    plans = []
    for index in range(count):
        chosen: tuple[str, ...] = ()
        env: dict[str, str] = {}
        if devices is not None and server != "rollstream":
            # Without any, the variables are there and empty: the server must not help itself.
            chosen = devices.ids[index * each : (index + 1) * each]
            env |= dict.fromkeys(devices.variables, ",".join(chosen))
        options = _options(request, model_path, max_model_len, log_dir / f"replica-{index}")
        words = server_words(server, python, options, request.args)
        plans.append(ReplicaPlan(index, chosen, {**env, **request.env}, tuple(words)))
    return plans


def plan_for_nodes(
    server: ServerKind, request: LaunchRequest, *, model_path: str, max_model_len: int | None, python: str
) -> ReplicaPlan:
    """What each replica on a cluster is, wherever it will be; its devices are the cluster's to assign.

    Args:
        server: as for `plan_replicas`, like the others.
        request: see there.
        model_path: see there.
        max_model_len: see there.
        python: see there; `NODE_PYTHON` for that of the node's own environment.

    Raises:
        ConfigError: arguments that are not the user's to give, a secret.
    """
    refuse_secrets(request.args, request.env)
    options = _options(request, model_path, max_model_len, Path(NODE_LOGS), host=NODE_ADDRESS)
    return ReplicaPlan(0, (), dict(request.env), tuple(server_words(server, python, options, request.args)))


def _options(
    request: LaunchRequest, model_path: str, max_model_len: int | None, log_dir: Path, host: str = LOOPBACK
) -> ServerOptions:
    return ServerOptions(
        model_path=model_path,
        tokenizer_path=request.tokenizer_path,
        max_model_len=max_model_len,
        tensor_parallel=request.tensor_parallel,
        pipeline_parallel=request.pipeline_parallel,
        data_parallel=request.data_parallel,
        gpu_memory_utilization=request.gpu_memory_utilization,
        dtype=request.dtype,
        load_format=request.load_format,
        trust_remote_code=request.trust_remote_code,
        seeds=request.seeds,
        log_dir=log_dir,
        host=host,
    )


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


def devices_each(request: LaunchRequest) -> tuple[int, str]:
    """Devices of one replica, and how they come about, for messages."""
    each = request.tensor_parallel * request.pipeline_parallel * request.data_parallel
    return each, (
        f"tensor_model_parallel_size {request.tensor_parallel} x pipeline_model_parallel_size "
        f"{request.pipeline_parallel} x data_parallel_size {request.data_parallel} = {each} devices a replica"
    )


def _count(server: ServerKind, request: LaunchRequest, found: int) -> tuple[int, int]:
    """How many replicas, and devices of each."""
    if request.nodes != 1:
        raise ConfigError(
            f"trainer.nnodes={request.nodes}: replicas are launched on this machine only. For "
            f"several machines join a Ray cluster ({_ROLLOUT}.launch.where=ray), or start the servers there "
            f"and name them in {_ROLLOUT}.server_urls"
        )
    each, sizes = devices_each(request)
    if server == "rollstream":
        if request.devices_per_node:
            raise ConfigError(
                f"trainer.n_gpus_per_node={request.devices_per_node}: {_ROLLOUT}.launch.server=rollstream "
                "runs on the CPU; set it to 0, or launch another server"
            )
        if each > 1:
            raise ConfigError(f"{sizes}: {_ROLLOUT}.launch.server=rollstream runs a model in one piece")
        return request.replicas or 1, 0
    asked = found if request.devices_per_node is None else request.devices_per_node
    if asked > found:
        raise ConfigError(
            f"trainer.n_gpus_per_node is {asked}, but {found} devices are found on this machine (by "
            "nvidia-smi, rocm-smi or npu-smi, and what the visible-devices variables leave)"
        )
    if asked == 0:
        if each > 1:
            raise ConfigError(f"{sizes}, but {found} devices are found, and 0 are to be used")
        return request.replicas or 1, 0
    if asked % each:
        raise ConfigError(f"{asked} devices (trainer.n_gpus_per_node) do not divide into replicas: {sizes}")
    most = asked // each
    if request.replicas is not None and request.replicas > most:
        raise ConfigError(
            f"{_ROLLOUT}.launch.replicas is {request.replicas}, but {asked} devices are enough for "
            f"{most}: {sizes}"
        )
    return request.replicas or most, each
