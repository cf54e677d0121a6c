"""verl's configuration for a run, and the other way round; and the part of verl in a run's identity.

Most keys have the same name on both sides. A key that rollstream has is rollstream's to set, so that one
place says what a run does and the run's identity knows it.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson
import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings
from rollstream.config.settings import Settings
from rollstream.data.sources import expand_paths
from rollstream.errors import ConfigError

NAME = "rollstream"
"""`rollout.name` of the replica that asks rollstream's engines."""

OWN_SERVERS = ("vllm", "sglang", "trtllm")
"""`rollout.name`s of servers that verl starts itself."""

NO_ROUTER = (
    "actor_rollout_ref.rollout.router_config_path: each worker's client chooses its server itself, the one that "
    "has a conversation in its cache, else the least busy one: leave it out"
)
"""verl's balancer, and a router in its place, is an actor that runs once, and without it no server is asked."""

_KEY = "generation.verl_overrides"
_MODEL, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def _keys(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names.split())


_TURNS = (
    "max_assistant_turns",
    "max_user_turns",
    "format",
    "max_parallel_calls",
    "max_tool_response_length",
    "tool_response_truncate_side",
)

_LOOPS = (
    *_keys(_MODEL, "tokenizer_path trust_remote_code"),
    *_keys(_ROLLOUT, "temperature top_p top_k ignore_eos calculate_log_probs"),
    *_keys(_ROLLOUT, "prompt_length response_length max_model_len"),
    *_keys(f"{_ROLLOUT}.multi_turn", " ".join(_TURNS)),
    *_keys("data", "max_prompt_length apply_chat_template_kwargs"),
)
"""Keys that mean the same on both sides, also where verl's configuration comes first."""

_TOOLS = _keys(f"{_ROLLOUT}.multi_turn", "tool_config_path function_tool_path")

_RUN = (
    *_keys(_ROLLOUT, "tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size"),
    *_keys(_ROLLOUT, "n dtype load_format agent.default_agent_loop"),
    *_keys("data", "prompt_key truncation filter_overlong_prompts train_max_samples"),
    *_keys("data", "shuffle seed custom_cls.name"),
)
"""The same, of a run."""

_FILES = (*_TOOLS, f"{_ROLLOUT}.agent.agent_loop_config_path", "data.custom_cls.path")
"""The same: verl looks for relative ones in folders of its own, and workers run elsewhere."""

_LAYOUT = frozenset(
    _keys(
        _ROLLOUT,
        "nnodes n_gpus_per_node gpu_memory_utilization max_num_seqs max_num_batched_tokens disable_log_stats",
    )
)
"""Overrides that may change on resume: on which devices, how much at once, and what is said of it."""


def compose_verl(settings: Settings) -> DictConfig:
    """The whole configuration of verl for a run, as its trainers have it.

    Raises:
        ConfigError: an override that cannot be read, that verl does not know, that has a key of its own in
            rollstream's configuration, or that makes no sense.
    """
    from hydra import compose as compose_by_hydra
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    overrides = settings.generation.verl_overrides
    mapped = _mapped(settings)
    for key, word in _touched(overrides).items():
        for own in mapped:
            if f"{own}.".startswith(f"{key}.") or f"{key}.".startswith(f"{own}."):
                own = f"{_ROLLOUT}.response_length" if own == "data.max_response_length" else own
                raise ConfigError(f"{_KEY}: {word!r}: {own} is a key of rollstream's: set it there")
    try:
        with initialize_config_module("verl.trainer.config", version_base="1.3", job_name="rollstream"):
            config = compose_by_hydra("ppo_trainer", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{_KEY}: verl does not take {list(overrides)}: {_first_line(error)}") from error
    OmegaConf.set_struct(config, False)
    for key, value in mapped.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    rollout: Any = config.actor_rollout_ref.rollout
    if not own_servers(settings):
        rollout.name = NAME
    elif rollout.name not in OWN_SERVERS:
        raise ConfigError(
            f"{_KEY}: {_ROLLOUT}.name is {rollout.name!r}: leave it out for rollstream's engine, or name "
            f"servers that verl starts: {', '.join(OWN_SERVERS)}"
        )
    elif not rollout.nnodes > 0:
        raise ConfigError(f"{_KEY}: {_ROLLOUT}.nnodes is {rollout.nnodes}: verl's servers need 1 or more")
    if rollout.get("router_config_path"):
        raise ConfigError(NO_ROUTER)
    composed: DictConfig = config
    return composed


def own_servers(settings: Settings) -> bool:
    """Whether verl starts the servers itself, by an override of `rollout.name`."""
    return f"{_ROLLOUT}.name" in _touched(settings.generation.verl_overrides)


def to_rollstream(config: DictConfig, overrides: Sequence[str] = ()) -> Settings:
    """A run's settings as a configuration of verl's has them; the engine behind them is verl's client.

    Args:
        config: of verl.
        overrides: `key=value` words of rollstream's, laid over it.

    Raises:
        ConfigError: they cannot work.
    """
    layer = OmegaConf.create()
    values = {key: OmegaConf.select(config, key) for key in (*_LOOPS, *_TOOLS)}
    values |= {
        f"{_MODEL}.path": str(Path(config.actor_rollout_ref.model.path).expanduser()),
        f"{_ROLLOUT}.name": "sglang",
        f"{_ROLLOUT}.server_urls": ["http://verl.invalid"],
        "data.max_prompt_length": config.actor_rollout_ref.rollout.prompt_length,
    }
    for key, value in values.items():
        if value is not None:
            OmegaConf.update(layer, key, value, force_add=True)
    return to_settings(compose(list(overrides), layers=[layer]))


def _mapped(settings: Settings) -> dict[str, Any]:
    """The values of rollstream's keys, by verl's names."""
    model, rollout, data = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout, settings.data
    if data.sources:
        raise ConfigError("data.sources: verl reads data.train_files itself")
    values = {key: attrgetter(key)(settings) for key in (*_LOOPS, *_RUN)}
    values |= {key: _absolute(attrgetter(key)(settings)) for key in _FILES}
    values |= {
        f"{_MODEL}.path": None if model.path is None else str(Path(model.path).expanduser()),
        f"{_MODEL}.custom_chat_template": None,
        f"{_ROLLOUT}.agent.num_workers": rollout.agent.num_workers or 1,
        "data.train_files": [_absolute(str(path)) for path in expand_paths(data.files)],
        "data.max_response_length": rollout.response_length,
    }
    if model.custom_chat_template is not None:  # verl takes its text
        template = _read_file(model.custom_chat_template, f"{_MODEL}.custom_chat_template")
        values[f"{_MODEL}.custom_chat_template"] = template.decode()
    optional = {
        "data.tool_config_path": _absolute(data.tool_config_path),
        f"{_ROLLOUT}.gpu_memory_utilization": rollout.gpu_memory_utilization,
        f"{_ROLLOUT}.logprobs_mode": rollout.logprobs_mode,
    }
    return values | {key: value for key, value in optional.items() if value is not None}


def _touched(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides by the keys that they set."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    touched = {}
    for word in overrides:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigError(f"{_KEY}: cannot read {word!r} as key=value: {_first_line(error)}") from error
        if override.is_sweep_override():
            raise ConfigError(f"{_KEY}: {word!r} is a sweep; one run takes one value per key")
        touched[override.key_or_group] = word
    return touched


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _read_file(path: str, key: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def verl_identity(settings: Settings, config: DictConfig) -> dict[str, Any]:
    """The part of verl in a run's identity: its version, the user's words, and the files of loops and tools.

    Args:
        settings: of the run.
        config: verl's, which says what the overrides came to.

    Raises:
        ConfigError: a file cannot be read.
    """
    rollout, turns = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.rollout.multi_turn
    identity: dict[str, Any] = {
        "verl.version": importlib.metadata.version("verl"),
        "verl.custom_cls": _digest(settings.data.custom_cls.path),
        "verl.agent_loops": _digest(rollout.agent.agent_loop_config_path),
        "verl.tool_config_path": _digest(turns.tool_config_path),
        "verl.function_tool_path": _digest(turns.function_tool_path),
    }
    identity |= {f"multi_turn.{name}": getattr(turns, name) for name in _TURNS}
    if own_servers(settings):  # they decide what the numbers are
        identity |= {"verl.dtype": rollout.dtype, "verl.load_format": rollout.load_format}
    for key in _touched(settings.generation.verl_overrides).keys() - _LAYOUT:
        if not key.startswith(f"{_ROLLOUT}.trace."):
            value = OmegaConf.select(config, key)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            identity[f"verl.overrides.{key}"] = (
                value if isinstance(value, str) else orjson.dumps(value).decode()
            )
    return identity


def loop_names(path: str | None) -> list[str]:
    """Names in a YAML of loops; what verl would not read is left to verl to refuse.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return []
    key = f"{_ROLLOUT}.agent.agent_loop_config_path"
    try:
        entries = yaml.safe_load(_read_file(path, key))
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {path}: {error}") from error
    entries = entries if isinstance(entries, list) else []
    return [str(entry.get("name")) for entry in entries if isinstance(entry, Mapping)]


_CLASSES = re.compile(rb"""(?:_target_|class_name)["']?\s*:\s*["']?([\w.]+)\.\w""")
"""Modules of the classes that a YAML of loops or tools names."""


def _digest(path: str | None) -> str | None:
    """Of a file, and, if it is a YAML, of the sources of its classes, as far as they are found without importing."""
    if path is None or path.startswith("pkg://"):
        return path
    content = _read_file(path, "generation.executor=verl")
    digest = hashlib.blake2b(content, digest_size=16)
    for module in [] if path.endswith(".py") else _CLASSES.findall(content):
        # A package's own code runs when a module in it is looked for: whatever that raises is verl's to say.
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec(module.decode())
            if spec is not None and spec.origin:
                digest.update(hashlib.blake2b(Path(spec.origin).read_bytes()).digest())
    return digest.hexdigest()
