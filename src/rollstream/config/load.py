"""From files and `key=value` words to validated settings.

Composition is Hydra's, in this order: `generation.yaml`, then a configuration file if there is one, then
the overrides in Hydra's grammar (`a.b=1`, `+a.b=1`, `~a.b`, lists, dicts, quotes). A key that
`generation.yaml` does not have is an error with the nearest known name, except below the free-form keys.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollstream.config.settings import Settings
from rollstream.errors import ConfigError

FREE_FORM = frozenset(
    {
        "actor_rollout_ref.rollout.engine_kwargs",
        "data.apply_chat_template_kwargs",
        "custom_reward_function.reward_kwargs",
        "train_tasks",
    }
)
"""Keys whose content is not ours to know."""


def compose(overrides: Sequence[str] = (), *, layers: Iterable[Mapping[str, Any] | Path] = ()) -> DictConfig:
    """The configuration tree: defaults, then `layers` (mappings or YAML files), then `overrides`.

    Raises:
        ConfigError: unknown key, unreadable file, override that cannot be parsed.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("rollstream.config", version_base="1.3", job_name="rollstream"):
        config = hydra_compose("generation")
    OmegaConf.set_struct(config, False)
    known = set(_paths(config))
    for layer in layers:
        if isinstance(layer, Path):
            source, content = f"{layer}: ", _read_yaml(layer)
        else:
            source, content = "", OmegaConf.create(dict(layer))
        for path in _paths(content):
            check_known(path, known, where=source)
        try:
            config = OmegaConf.merge(config, content)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source}{error}") from error
    _apply_overrides(config, overrides, known)
    assert isinstance(config, DictConfig)
    return config


def to_settings(config: DictConfig | Mapping[str, Any]) -> Settings:
    """Resolves and validates a configuration tree. Raises `ConfigError` naming the key."""
    try:
        tree = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    except OmegaConfBaseException as error:
        raise ConfigError(f"configuration cannot be resolved: {error}") from error
    try:
        settings = msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        where = path.rstrip("`") or "configuration"
        raise ConfigError(f"{where}: {message}{_found(tree, where)}") from error
    _check_values(settings)
    return settings


def to_yaml(config: DictConfig) -> str:
    """The resolved configuration, usable as a configuration file again."""
    return OmegaConf.to_yaml(config, resolve=True)


def check_known(path: str, known: set[str], *, where: str = "") -> None:
    """Raises `ConfigError` with the nearest known name unless `path` is known or free-form."""
    if path in known or any(path == free or path.startswith(free + ".") for free in FREE_FORM):
        return
    parents = {key.rpartition(".")[0] for key in known}
    if path in parents:
        return
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    if not near:  # right last word, wrong place
        last = path.rpartition(".")[2]
        near = [key for key in sorted(known) if key.rpartition(".")[2] == last][:1]
        near = near or difflib.get_close_matches(last, [key.rpartition(".")[2] for key in known], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{where}unknown key {path!r}{hint} All keys: `rollstream generate --show-config`.")


def _paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys, branches included."""
    if not isinstance(config, DictConfig) or config._is_none() or config._is_missing():
        return
    for key in config:
        path = f"{prefix}{key!s}"
        yield path
        if path not in FREE_FORM and not OmegaConf.is_interpolation(config, str(key)):
            yield from _paths(config._get_node(key), path + ".")


def _read_yaml(path: Path) -> DictConfig:
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {path} does not exist") from error
    except Exception as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"configuration file {path} must hold keys and values")
    return content


def _apply_overrides(config: Any, overrides: Sequence[str], known: set[str]) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            detail = str(error).splitlines()[0]
            raise ConfigError(f"cannot read {text!r} as key=value: {detail}") from error
        if override.is_sweep_override():
            raise ConfigError(f"{text!r} is a sweep; one run takes one value per key")
        key = override.key_or_group
        check_known(key, known)
        try:
            if override.is_delete():
                OmegaConf.update(config, key, None)
            else:
                OmegaConf.update(config, key, override.value(), merge=False, force_add=True)
        except (OmegaConfBaseException, HydraException) as error:
            raise ConfigError(f"{text!r}: {error}") from error


def _found(tree: Any, path: str) -> str:
    """` (it is VALUE)` for the value at a path, where it can be reached."""
    for part in path.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return ""
        tree = tree[part]
    return f" (it is {tree!r})"


def _check_values(settings: Settings) -> None:
    rollout, data, generation = settings.actor_rollout_ref.rollout, settings.data, settings.generation
    reward = settings.custom_reward_function
    at_least: list[tuple[str, float, float]] = [
        ("actor_rollout_ref.rollout.n", rollout.n, 1),
        ("actor_rollout_ref.rollout.response_length", rollout.response_length, 1),
        ("actor_rollout_ref.rollout.prompt_length", rollout.prompt_length, 1),
        ("actor_rollout_ref.rollout.temperature", rollout.temperature, 0),
        ("data.max_prompt_length", data.max_prompt_length, 1),
        ("data.train_max_samples", data.train_max_samples, -1),
        ("generation.max_in_flight", generation.max_in_flight, 1),
        ("generation.max_attempts", generation.max_attempts, 1),
        ("generation.save_batch_size", generation.save_batch_size, 1),
        ("generation.retry_delay", generation.retry_delay, 0),
        ("generation.grace_period", generation.grace_period, 0),
        ("generation.max_failed_share", generation.max_failed_share, 0),
        ("custom_reward_function.max_concurrency", reward.max_concurrency, 1),
    ]
    for key, value, least in at_least:
        if not value >= least:
            raise ConfigError(f"{key} must be at least {least:g} (it is {value})")
    above_zero: list[tuple[str, float]] = [
        ("actor_rollout_ref.rollout.top_p", rollout.top_p),
        ("generation.attempt_timeout", generation.attempt_timeout),
        ("generation.engine_timeout", generation.engine_timeout),
        ("generation.pull_timeout", generation.pull_timeout),
        ("custom_reward_function.timeout", reward.timeout),
    ]
    for key, value in above_zero:
        if not value > 0:
            raise ConfigError(f"{key} must be above 0 (it is {value})")
    if rollout.top_p > 1:
        raise ConfigError(f"actor_rollout_ref.rollout.top_p must be at most 1 (it is {rollout.top_p})")
    if rollout.top_k < -1 or rollout.top_k == 0:
        raise ConfigError(
            f"actor_rollout_ref.rollout.top_k must be -1 (off) or at least 1 (it is {rollout.top_k})"
        )
    if generation.max_failed_share > 1:
        raise ConfigError(
            f"generation.max_failed_share must be at most 1 (it is {generation.max_failed_share})"
        )
    if generation.seed is not None and not 0 <= generation.seed < 2**63:
        raise ConfigError(f"generation.seed must be from 0 to 2**63 - 1 (it is {generation.seed})")
    if rollout.prompt_length != data.max_prompt_length:
        raise ConfigError(
            "actor_rollout_ref.rollout.prompt_length and data.max_prompt_length are one limit by two names: "
            f"set data.max_prompt_length (they are {rollout.prompt_length} and {data.max_prompt_length})"
        )
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        raise ConfigError(
            f"lengths cannot fit: prompt_length {rollout.prompt_length} + response_length "
            f"{rollout.response_length} = {longest} tokens, but actor_rollout_ref.rollout.max_model_len is "
            f"{rollout.max_model_len}"
        )
