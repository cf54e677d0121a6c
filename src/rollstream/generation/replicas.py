"""Servers that a run launches: their commands, and which of their settings decide the data."""

import os
from pathlib import Path
from typing import Any

from rollstream.config.settings import Settings
from rollstream.engine.registry import data_deciding_kwargs, is_launched
from rollstream.rollout.setup import env_texts, launch_request, launched_where

_FREE_ARGS = frozenset(
    (
        # How much at once.
        *("max-running-requests", "max-queued-requests", "max-total-tokens", "max-prefill-tokens"),
        *("chunked-prefill-size", "prefill-max-requests", "schedule-policy", "schedule-conservativeness"),
        *("max-num-seqs", "max-num-batched-tokens", "max-num-partial-prefills", "max-long-partial-prefills"),
        *("long-prefill-token-threshold", "scheduling-policy", "stream-interval", "max-queue"),
        *("cuda-graph-bs", "cuda-graph-max-bs", "cuda-graph-sizes", "cudagraph-capture-sizes"),
        # Memory and disk.
        *("cpu-offload-gb", "swap-space", "kv-cache-memory-bytes", "num-gpu-blocks-override", "download-dir"),
        *("disable-radix-cache", "enable-prefix-caching", "no-enable-prefix-caching"),
        # Processes, threads, ports and timeouts.
        *("tokenizer-worker-num", "api-server-count", "max-parallel-loading-workers"),
        *("nccl-port", "dist-init-addr", "master-addr", "master-port"),
        *("watchdog-timeout", "soft-watchdog-timeout", "dist-timeout", "skip-server-warmup"),
        # Logs, names, routes.
        *("log-level", "log-level-http", "uvicorn-log-level", "disable-uvicorn-access-log"),
        *("log-requests", "log-requests-level", "enable-log-requests", "disable-log-requests"),
        *("disable-log-stats", "enable-metrics", "show-time-cost", "decode-log-interval"),
        *("served-model-name", "enable-scale-out"),
    )
)
"""Arguments of servers that may change on resume: layout and speed. Any other may decide the data, one that
is not known most of all: servers get new ones with every release."""

_FREE_ENV = frozenset(
    (
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"),
        *("TOKENIZERS_PARALLELISM", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_ORDER"),
        *("VLLM_LOGGING_LEVEL", "VLLM_RPC_TIMEOUT", "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_CACHE_ROOT"),
        *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "VLLM_PORT"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
        *("TMPDIR", "XDG_CACHE_HOME", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    )
)
"""Environment variables of servers that may change on resume, as `_FREE_ARGS`."""


def launches_on_ray(settings: Settings) -> bool:
    """Whether the run has servers to launch, and that on a Ray cluster."""
    rollout = settings.actor_rollout_ref.rollout
    return is_launched(rollout.name, rollout.server_urls) and launched_where(settings, os.environ) == "ray"


def launched_commands(settings: Settings, log_dir: Path) -> list[dict[str, Any]]:
    """What would be launched, replica by replica; empty when nothing is. Starts nothing, joins no cluster.

    On Ray, where the cluster decides how many there are, that is one for all.

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
            "where": request.where,
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
    free = _FREE_ARGS
    if launch.server == "rollstream":
        free |= {"engine-kwargs"}  # its engine says which of them decide the data: below
        kwargs = data_deciding_kwargs(str(args.get("engine", "openvino")), args.get("engine-kwargs"))
        identity |= {f"launch.engine.{name}": value for name, value in kwargs.items()}
    identity |= {f"launch.args.{name}": value for name, value in args.items() if name not in free}
    identity |= {
        f"launch.env.{name}": value for name, value in env_texts(launch.env).items() if name not in _FREE_ENV
    }
    return identity
