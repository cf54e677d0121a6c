"""How many replicas are launched, each with which devices and by which command. Starts nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollstream.engine.devices import Devices
from rollstream.engine.launch_commands import ServerKind, ServerOptions, server_words
from rollstream.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"

_LAST_WORDS = frozenset(("key", "keys", "apikey", "token", "pat"))
_WORDS = frozenset(("secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials"))
"""Of names of secrets."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What the user asks for. Times in seconds."""

    server: Literal["auto", "sglang", "vllm", "rollstream"] = "auto"
    """`auto`: the engine's own."""
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

    def command(self, port: int | str) -> list[str]:
        """The command for a port."""
        return [*self.words, "--port", str(port)]


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
        options = ServerOptions(
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
            log_dir=log_dir / f"replica-{index}",
        )
        words = server_words(server, python, options, request.args)
        plans.append(ReplicaPlan(index, chosen, {**env, **request.env}, tuple(words)))
    return plans


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
        if value is not None and not isinstance(value, bool) and _names_secret(str(name)):
            raise ConfigError(
                f"{_ROLLOUT}.launch.args.{name} {instead} (vLLM reads VLLM_API_KEY), or do without: launched "
                "servers listen on 127.0.0.1 only"
            )
    for name, text in env.items():
        if text and _names_secret(str(name)):
            raise ConfigError(f"{_ROLLOUT}.launch.env.{name} {instead}")


def _names_secret(name: str) -> bool:
    """Whether an argument or a variable of this name holds a secret.

    `api-key` and `HF_TOKEN` do; `long-prefill-token-threshold` and `TOKENIZERS_PARALLELISM` do not.
    """
    words = name.lower().replace("-", "_").split("_")
    return words[-1] in _LAST_WORDS or not _WORDS.isdisjoint(words)


def _count(server: ServerKind, request: LaunchRequest, found: int) -> tuple[int, int]:
    """How many replicas, and devices of each."""
    if request.nodes != 1:
        raise ConfigError(
            f"trainer.nnodes={request.nodes}: replicas are launched on this machine only. For "
            f"several machines, start the servers there and name them in {_ROLLOUT}.server_urls"
        )
    each = request.tensor_parallel * request.pipeline_parallel * request.data_parallel
    sizes = (
        f"tensor_model_parallel_size {request.tensor_parallel} x pipeline_model_parallel_size "
        f"{request.pipeline_parallel} x data_parallel_size {request.data_parallel} = {each} devices a replica"
    )
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
