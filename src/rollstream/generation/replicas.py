"""What a run's configuration says of the replicas to launch, and which of it decides the data."""

from pathlib import Path
from typing import Any

from rollstream.config.settings import Settings
from rollstream.engine.launch_plan import LaunchRequest
from rollstream.engine.registry import data_deciding_kwargs, is_launched
from rollstream.errors import ConfigError

_DATA_DECIDING_ARGS = frozenset(
    (
        "attention-backend",
        "engine",
        "hf-overrides",
        "json-model-override-args",
        "kv-cache-dtype",
        "logprobs-mode",
        "model-impl",
        "quantization",
        "quantization-param-path",
        "revision",
        "rope-scaling",
        "rope-theta",
        "sampling-backend",
        "speculative-algorithm",
        "speculative-config",
        "tokenizer-revision",
        "torchao-config",
    )
)
"""Arguments of servers that change tokens or log-probs; the others are layout and speed, free on resume."""


def launch_request(settings: Settings) -> LaunchRequest | None:
    """What to launch; None when the engine needs no launch. Raises `ConfigError`."""
    rollout, launch = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.rollout.launch
    if not is_launched(rollout.name, rollout.server_urls):
        return None
    for name, value in launch.env.items():
        if isinstance(value, dict | list):
            raise ConfigError(f"actor_rollout_ref.rollout.launch.env.{name} must be a text (it is {value!r})")
    return LaunchRequest(
        server=launch.server,
        nodes=settings.trainer.nnodes,
        devices_per_node=settings.trainer.n_gpus_per_node,
        replicas=launch.replicas,
        tensor_parallel=rollout.tensor_model_parallel_size,
        pipeline_parallel=rollout.pipeline_model_parallel_size,
        data_parallel=rollout.data_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        dtype=rollout.dtype,
        load_format=rollout.load_format,
        trust_remote_code=settings.actor_rollout_ref.model.trust_remote_code,
        tokenizer_path=settings.actor_rollout_ref.model.tokenizer_path,
        seeds=settings.generation.seed is not None,
        python=launch.python,
        args=launch.args,
        env={name: "" if value is None else str(value) for name, value in launch.env.items()},
        startup_timeout=launch.startup_timeout,
        unhealthy_timeout=launch.unhealthy_timeout,
        max_restarts=launch.max_restarts,
        restart_delay=launch.restart_delay,
        restart_delay_max=launch.restart_delay_max,
    )


def launched_commands(settings: Settings, log_dir: Path) -> list[dict[str, Any]]:
    """What would be launched, replica by replica; empty when nothing is. Starts nothing.

    Raises:
        ConfigError: it cannot be.
    """
    request = launch_request(settings)
    if request is None:
        return []
    from rollstream.engine.launch import launch_plan

    rollout, path = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.model.path
    assert path is not None
    plans = launch_plan(
        rollout.name, model_path=path, max_model_len=rollout.max_model_len, request=request, log_dir=log_dir
    )
    return [
        {
            "devices": list(plan.devices),
            "env": {name: value for name, value in plan.env.items() if name != "PYTHONPATH"},
            "command": plan.command("CHOSEN_AT_START"),
        }
        for plan in plans
    ]


def launch_identity(settings: Settings) -> dict[str, Any]:
    """What of the launch decides the data, where it is not the servers' own way.

    So a run whose servers were launched plainly may be resumed with servers by URL, and the other way round.
    """
    rollout, launch = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.rollout.launch
    if not is_launched(rollout.name, rollout.server_urls):
        return {}
    identity: dict[str, Any] = {}
    if launch.server not in ("auto", rollout.name):
        identity["launch.server"] = launch.server
    for name in ("dtype", "load_format"):
        if (value := getattr(rollout, name)) != "auto":
            identity[f"launch.{name}"] = value
    args = {str(name).replace("_", "-"): value for name, value in launch.args.items()}
    identity |= {f"launch.args.{name}": value for name, value in args.items() if name in _DATA_DECIDING_ARGS}
    if launch.server == "rollstream":
        kwargs = data_deciding_kwargs(str(args.get("engine", "openvino")), args.get("engine-kwargs"))
        identity |= {f"launch.engine.{name}": value for name, value in kwargs.items()}
    return identity
