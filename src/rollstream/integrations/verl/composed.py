"""verl's configuration for a run: verl's defaults, what rollstream's keys say, and the user's further words.

Most keys have the same name on both sides. A key that rollstream has is rollstream's to set, so that one
place says what a run does and the run's identity knows it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollstream.config.settings import Settings
from rollstream.errors import ConfigError

NAME = "rollstream"
"""`rollout.name` of the replica that asks rollstream's engines."""

OWN_SERVERS = ("vllm", "sglang", "trtllm")
"""`rollout.name`s of servers that verl starts itself."""

_KEY = "generation.verl_overrides"
_ROLLOUT = "actor_rollout_ref.rollout"

_OF_SERVERS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 1,
    "gpu_memory_utilization": None,
    "dtype": "auto",
    "load_format": "auto",
}
"""Keys of `rollout` for whoever starts servers, and rollstream's defaults. verl's are another (two devices,
bfloat16, random weights); None leaves it to verl."""

_PROXIES_MAX = 4
"""Proxies before rollstream's servers at most: each moves what some thousand requests in flight answer."""


def compose_verl(settings: Settings, *, urls: Sequence[str] = ()) -> DictConfig:
    """The whole configuration of verl, as its trainers have it.

    Args:
        settings: the run's.
        urls: of the servers of rollstream's engine.

    Raises:
        ConfigError: an override that cannot be read, that verl does not know, that has a key of its own in
            rollstream's configuration, or that makes no sense: `load_format=dummy` would generate with
            random weights.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    overrides = settings.generation.verl_overrides
    touched = _touched(overrides)
    mapped = _mapped(settings)
    for key, word in touched.items():
        near = [own for own in mapped if own == key or own.startswith(f"{key}.") or key.startswith(f"{own}.")]
        if near:
            raise ConfigError(
                f"{_KEY}: {word!r}: {_WHERE.get(near[0], near[0])} is a key of rollstream's: set it there"
            )
    try:
        with initialize_config_module("verl.trainer.config", version_base="1.3", job_name="rollstream"):
            config = compose("ppo_trainer", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{_KEY}: verl does not take {list(overrides)}: {_last_line(error)}") from error
    OmegaConf.set_struct(config, False)
    for key, value in mapped.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    rollout: Any = config.actor_rollout_ref.rollout
    _set_servers(rollout, settings, touched)
    if rollout.load_format == "dummy":
        raise ConfigError(
            f"{_KEY}: {_ROLLOUT}.load_format=dummy starts servers with random weights, which only a trainer "
            "replaces: leave it out, or set it to auto"
        )
    if f"{_ROLLOUT}.name" not in touched:
        proxies = max(1, min(len(urls), _PROXIES_MAX))
        rollout.name, rollout.nnodes, rollout.n_gpus_per_node = NAME, 1, proxies
        for size in ("tensor_model", "pipeline_model", "data"):
            rollout[f"{size}_parallel_size"] = 1  # of a proxy: the servers have their own
        ours = settings.actor_rollout_ref.rollout
        custom = {"urls": list(urls), "engine": ours.name, "engine_kwargs": ours.engine_kwargs}
        rollout.custom = {**(rollout.get("custom") or {}), **custom}
    elif rollout.name not in OWN_SERVERS:
        raise ConfigError(
            f"{_KEY}: {_ROLLOUT}.name is {rollout.name!r}: leave it out for rollstream's engine, or name "
            f"servers that verl starts: {', '.join(OWN_SERVERS)}"
        )
    if not rollout.nnodes > 0:
        raise ConfigError(
            f"{_KEY}: {_ROLLOUT}.nnodes is {rollout.nnodes}: without a trainer verl's servers need nodes of "
            "their own, 1 or more"
        )
    composed: DictConfig = config
    return composed


def _set_servers(rollout: Any, settings: Settings, touched: Mapping[str, str]) -> None:
    """Gives servers that verl starts what rollstream's keys of that name say, unless an override says it.

    Raises:
        ConfigError: both say it, and not the same; servers that verl does not start, which an override would
            not reach.
    """
    owned = f"{_ROLLOUT}.name" in touched
    for name, default in _OF_SERVERS.items():
        key, value = f"{_ROLLOUT}.{name}", getattr(settings.actor_rollout_ref.rollout, name)
        if key not in touched:
            if value is not None:
                rollout[name] = value
        elif not owned and rollout.get(name) != "dummy":  # which is refused for what it is
            raise ConfigError(f"{_KEY}: {touched[key]!r}: {key} is a key of rollstream's: set it there")
        elif value not in (default, rollout.get(name)):
            raise ConfigError(
                f"{_KEY}: {touched[key]!r}, but {key} is {value!r} in rollstream's configuration: set it once"
            )


def own_servers(settings: Settings) -> bool:
    """Whether verl starts the servers itself, by an override of `rollout.name`."""
    return f"{_ROLLOUT}.name" in _touched(settings.generation.verl_overrides)


_NUMBERS = {"dtype": "bfloat16", "load_format": "auto"}
"""Keys that decide the numbers of verl's own servers, and what they are where an identity has none of it."""


def servers_identity(settings: Settings) -> dict[str, Any]:
    """What rollstream's keys say of the numbers of verl's own servers; overrides speak for themselves."""
    touched = _touched(settings.generation.verl_overrides)
    if f"{_ROLLOUT}.name" not in touched:
        return {}
    rollout = settings.actor_rollout_ref.rollout
    values = {name: getattr(rollout, name) for name in _NUMBERS if f"{_ROLLOUT}.{name}" not in touched}
    return {f"verl.{name}": value for name, value in values.items() if value != _NUMBERS[name]}


_WHERE = {
    "data.max_response_length": f"{_ROLLOUT}.response_length",
    "actor_rollout_ref.model.custom_chat_template": "actor_rollout_ref.model.custom_chat_template (a file)",
}
"""Keys of verl's that have another name, or another meaning, in rollstream's configuration."""


def _mapped(settings: Settings) -> dict[str, Any]:
    """What rollstream's keys say to verl, by verl's names."""
    model, rollout = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout
    data, turns = settings.data, rollout.multi_turn
    path = None if model.path is None else str(Path(model.path).expanduser())
    values: dict[str, Any] = {
        "actor_rollout_ref.model.path": path,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
        "actor_rollout_ref.model.trust_remote_code": model.trust_remote_code,
        "actor_rollout_ref.model.custom_chat_template": _read(model.custom_chat_template),
        f"{_ROLLOUT}.n": rollout.n,
        f"{_ROLLOUT}.temperature": rollout.temperature,
        f"{_ROLLOUT}.top_p": rollout.top_p,
        f"{_ROLLOUT}.top_k": rollout.top_k,
        f"{_ROLLOUT}.ignore_eos": rollout.ignore_eos,
        f"{_ROLLOUT}.calculate_log_probs": rollout.calculate_log_probs,
        f"{_ROLLOUT}.prompt_length": rollout.prompt_length,
        f"{_ROLLOUT}.response_length": rollout.response_length,
        f"{_ROLLOUT}.max_model_len": rollout.max_model_len,
        f"{_ROLLOUT}.agent.num_workers": rollout.agent.num_workers or 1,
        f"{_ROLLOUT}.agent.default_agent_loop": rollout.agent.default_agent_loop,
        f"{_ROLLOUT}.agent.agent_loop_config_path": _absolute(rollout.agent.agent_loop_config_path),
        f"{_ROLLOUT}.multi_turn.max_assistant_turns": turns.max_assistant_turns,
        f"{_ROLLOUT}.multi_turn.max_user_turns": turns.max_user_turns,
        f"{_ROLLOUT}.multi_turn.tool_config_path": _absolute(turns.tool_config_path),
        f"{_ROLLOUT}.multi_turn.function_tool_path": _absolute(turns.function_tool_path),
        f"{_ROLLOUT}.multi_turn.format": turns.format,
        f"{_ROLLOUT}.multi_turn.max_parallel_calls": turns.max_parallel_calls,
        f"{_ROLLOUT}.multi_turn.max_tool_response_length": turns.max_tool_response_length,
        f"{_ROLLOUT}.multi_turn.tool_response_truncate_side": turns.tool_response_truncate_side,
        "data.train_files": [str(Path(file).expanduser().absolute()) for file in data.files],
        "data.prompt_key": data.prompt_key,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": rollout.response_length,
        "data.truncation": data.truncation,
        "data.filter_overlong_prompts": data.filter_overlong_prompts,
        "data.train_max_samples": data.train_max_samples,
        "data.shuffle": data.shuffle,
        "data.seed": data.seed,
        "data.apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        "data.custom_cls.path": _absolute(data.custom_cls.path),
        "data.custom_cls.name": data.custom_cls.name,
    }
    if data.tool_config_path is not None:
        values["data.tool_config_path"] = _absolute(data.tool_config_path)
    return values


def _touched(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides by the keys that they set."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    touched = {}
    for word in overrides:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigError(f"{_KEY}: cannot read {word!r} as key=value: {_last_line(error)}") from error
        if override.is_sweep_override():
            raise ConfigError(f"{_KEY}: {word!r} is a sweep; one run takes one value per key")
        touched[override.key_or_group] = word
    return touched


def _absolute(path: str | None) -> str | None:
    """A path from the root: verl looks for others in folders of its own, and workers run elsewhere."""
    return None if path is None else str(Path(path).expanduser().absolute())


def _read(template: str | None) -> str | None:
    """A template's text, which verl takes where rollstream takes its file."""
    if template is None:
        return None
    try:
        return Path(template).expanduser().read_text()
    except OSError as error:
        raise ConfigError(f"actor_rollout_ref.model.custom_chat_template: {error}") from error


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
