"""What of verl decides the data of a run: its version, the user's words, and the files of loops and tools."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rollstream.config.settings import Settings
from rollstream.errors import ConfigError
from rollstream.generation.identity import launch_identity
from rollstream.integrations.verl.composed import servers_identity


def verl_identity(settings: Settings, serving: Settings | None = None) -> dict[str, Any]:
    """Entries of a run's identity.

    Args:
        settings: of the run.
        serving: of the servers behind the loops: those of an embedded engine get what is said of a launch.

    Raises:
        ConfigError: a file cannot be read.
    """
    rollout = settings.actor_rollout_ref.rollout
    identity: dict[str, Any] = {
        "verl.version": importlib.metadata.version("verl"),
        **({} if serving is None else launch_identity(serving)),
        **servers_identity(settings),
        **_overrides(settings.generation.verl_overrides),
        "verl.custom_cls": _file_digest(settings.data.custom_cls.path),
        "verl.agent_loops": _loops_digest(rollout.agent.agent_loop_config_path),
    }
    turns = rollout.multi_turn
    identity["verl.tool_config_path"] = _tools_digest(turns.tool_config_path)
    identity["verl.function_tool_path"] = _file_digest(turns.function_tool_path)
    for name in (
        "max_assistant_turns",
        "max_user_turns",
        "format",
        "max_parallel_calls",
        "max_tool_response_length",
        "tool_response_truncate_side",
    ):
        identity[f"multi_turn.{name}"] = getattr(turns, name)
    return identity


_FREE_OVERRIDES = frozenset(
    f"actor_rollout_ref.rollout.{name}"
    for name in (
        # Which devices, and how a model is spread over them.
        *("nnodes", "n_gpus_per_node", "gpu_memory_utilization"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"),
        # How much at once, and what is said of it.
        *("max_num_seqs", "max_num_batched_tokens", "disable_log_stats"),
    )
)
"""Overrides that may change on resume, as the arguments of launched servers that are of layout and speed."""


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """The overrides by their keys, so that their order is of no account; where it is, that is an entry, too.

    `a=1`, `+a=1` and `++a=1` differ in whether verl may have the key already, not in what it is then.
    """
    values: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        key = key.strip().lstrip("+")
        if key not in _FREE_OVERRIDES:
            values[key] = value.strip()
    names = {key.lstrip("~") for key in values}
    if len(names) < len(values) or any(other.startswith(f"{key}.") for key in names for other in names):
        values["in this order"] = " ".join(words)  # `a={b: 1}` and `a.b=2`: the later one holds
    return {f"verl.overrides.{key}": value for key, value in values.items()}


def _file_digest(path: str | None) -> str | None:
    if path is None or path.startswith("pkg://"):
        return path
    try:
        return hashlib.blake2b(Path(path).expanduser().read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def loop_entries(path: str | None) -> list[Mapping[str, Any]]:
    """The entries of a YAML of loops; what verl would not read is left to verl to refuse."""
    return _mappings(_yaml("agent.agent_loop_config_path", path))


def _yaml(key: str, path: str | None) -> Any:
    if path is None:
        return None
    try:
        return yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"actor_rollout_ref.rollout.{key}: {path}: {error}") from error


def _mappings(entries: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def _loops_digest(path: str | None) -> str | None:
    return _digest(path, (entry.get("_target_") for entry in loop_entries(path)))


def _tools_digest(path: str | None) -> str | None:
    content = _yaml("multi_turn.tool_config_path", path)
    tools = content.get("tools") if isinstance(content, Mapping) else None
    return _digest(path, (entry.get("class_name") for entry in _mappings(tools)))


def _digest(path: str | None, classes: Iterable[object]) -> str | None:
    """Of a YAML and of the files that its classes are in, as far as they are found without importing them."""
    if path is None:
        return None
    digest = hashlib.blake2b((_file_digest(path) or "").encode(), digest_size=16)
    for name in classes:
        # A package's own code runs when a module in it is looked for: whatever that raises is verl's to say.
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec(str(name or "").rpartition(".")[0])
            if spec is not None and spec.origin and Path(spec.origin).is_file():
                digest.update((_file_digest(spec.origin) or "").encode())
    return digest.hexdigest()
