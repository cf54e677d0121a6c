"""The command lines of the servers that can be launched.

Sources: https://docs.sglang.io/advanced_features/server_arguments.html,
https://docs.vllm.ai/en/latest/cli/serve.html, `rollstream serve --help`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from rollstream.engine.ports import LOOPBACK
from rollstream.errors import ConfigError

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
    where = "actor_rollout_ref.rollout"
    for name in given:
        if name in _RESERVED:
            raise ConfigError(f"{where}.launch.args.{name} is not yours to set: rollstream does")
        if name in _ELSEWHERE:
            raise ConfigError(f"{where}.launch.args.{name} has a key of its own: {where}.{_ELSEWHERE[name]}")
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
