"""Settings of the `hf` engine, and what can be checked without importing torch."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollstream.engine.checks import read_engine_kwargs, read_model_limits
from rollstream.errors import ConfigError

ENGINE_KWARGS: dict[str, Any] = {
    "device": "auto",  # cuda where there is one, else cpu
    "dtype": "auto",  # float32 on a CPU, the model's own elsewhere
    "attn_implementation": "",  # transformers' choice: sdpa
    "cache_size": 1.0,  # GB of KV cache and what grows with it; taken at start
    "num_kv_blocks": 0,  # the same in blocks, if not 0
    "block_size": 32,  # tokens in a block
    "max_num_seqs": 32,  # requests in one step; with dense masks more are slower
    "max_num_batched_tokens": 256,  # prompt and response tokens in one step
    "num_threads": 0,  # CPU threads of the model; 0 leaves torch's number alone
    "keep_cache": False,  # what is in flight when the weights change goes on over the old keys and values
}
"""Keys of `engine_kwargs` with their defaults."""

DATA_DECIDING_KWARGS = ("attn_implementation", "device", "dtype")
"""Those that change tokens or log-probs beyond the noise of float32."""

_LEAST: dict[str, float] = {
    "num_kv_blocks": 0,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "num_threads": 0,
}
"""The least value of a key."""

_PACKAGES = ("torch", "transformers", "psutil")
"""Without psutil transformers takes the machine's memory for 0 bytes, and refuses every cache."""


def read_kwargs(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults overlaid with `engine_kwargs`.

    Raises:
        ConfigError: unknown key, or a value of another type or out of range.
    """
    kwargs = read_engine_kwargs("hf", engine_kwargs, ENGINE_KWARGS)
    for key, least in _LEAST.items():
        if not kwargs[key] >= least:
            raise ConfigError(f"engine_kwargs.{key} is {kwargs[key]}, want {least:g} or more")
    if not kwargs["cache_size"] > 0:
        raise ConfigError(f"engine_kwargs.cache_size is {kwargs['cache_size']}, want more than 0 (GB)")
    if kwargs["max_num_seqs"] > kwargs["max_num_batched_tokens"]:
        raise ConfigError(
            f"engine_kwargs.max_num_seqs {kwargs['max_num_seqs']} must not be more than "
            f"max_num_batched_tokens {kwargs['max_num_batched_tokens']}"
        )
    return kwargs


def check_packages() -> None:
    """Raises `ConfigError`, naming the extra, when a package is not installed. Imports none."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"engine 'hf' needs {' and '.join(missing)}, which is not installed: pip install 'rollstream[hf]'"
        )


def check_model_path(path: str) -> str:
    """The folder, absolute, if transformers can load it; a hub name as it is.

    Raises:
        ConfigError: there is no such folder, or it is not a model's.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"actor_rollout_ref.model.path: {folder} has no config.json")
        read_model_limits(folder)
        return str(folder.resolve())
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise ConfigError(f"actor_rollout_ref.model.path: there is no folder {folder}")
    return path
