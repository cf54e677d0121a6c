"""From files and `key=value` words to validated settings.

Composition is Hydra's, in this order: `generation.yaml`, then a configuration file if there is one, then
the overrides in Hydra's grammar (`a.b=1`, `+a.b=1`, `~a.b`, lists, dicts, quotes). A key that
`generation.yaml` does not have is an error with the nearest known name, except below the free-form keys.

For a setting that is a text (a path, a name) the text behind `=` is taken as it is where Hydra's grammar
cannot read it (`~/x.jsonl`, letters beyond ASCII, brackets) or reads a number or a truth value in it.
"""

import difflib
import re
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollstream.config.ray_options import check_ray
from rollstream.config.settings import Settings
from rollstream.errors import ConfigError
from rollstream.sampling import check_extra

FREE_FORM = frozenset(
    {
        "actor_rollout_ref.rollout.engine_kwargs",
        "actor_rollout_ref.rollout.extra_sampling",
        "actor_rollout_ref.rollout.launch.args",
        "actor_rollout_ref.rollout.launch.env",
        "data.apply_chat_template_kwargs",
        "custom_reward_function.reward_kwargs",
        "ray_kwargs.ray_init",
        "ray_kwargs.replica",
        "ray_kwargs.worker",
        "train_tasks",
    }
)
"""Keys whose content is not ours to know."""

_OF_EVERY_RENDERING = frozenset(
    {"conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
)
"""Arguments of transformers' `apply_chat_template` that are not the template's, but say how it is used."""

_COMPOSING = threading.Lock()
"""Hydra's state is the process's, and threads of several runs may begin at once."""

_SIMPLE_WORD = re.compile(r"(?:\+\+?)?([A-Za-z_][\w.]*)=(.*)", re.DOTALL)

_ARTIFACT_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_.-]{1,128}")
"""What W&B takes (source: `wandb.sdk.artifacts._validators`), but for bare numbers: they are slips."""

_NEAR = 0.6
"""How alike (difflib's ratio) two last words must be for "did you mean"."""

_LARGEST = 1e9
"""No setting is meaningful beyond it (as seconds: thirty years), and waits overflow not far above."""


_PORT_LAST = 65535


def compose(overrides: Sequence[str] = (), *, layers: Iterable[Mapping[str, Any] | Path] = ()) -> DictConfig:
    """The configuration tree: defaults, then `layers` (mappings or YAML files), then `overrides`.

    Raises:
        ConfigError: unknown key, unreadable file, override that cannot be parsed.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with _COMPOSING, initialize_config_module("rollstream.config", version_base="1.3", job_name="rollstream"):
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
        settings = msgspec.convert(_with_lists(tree), Settings)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        where = path.rstrip("`") or "configuration"
        described = _wrong_choice(where, message) or f"{message}{_found(tree, where)}"
        raise ConfigError(f"{where}: {described}") from error
    _check_values(settings)
    return settings


def _with_lists(tree: Any) -> Any:
    """`trainer.logger` may be one name, as verl takes it, or null for none."""
    trainer = tree.get("trainer") if isinstance(tree, Mapping) else None
    if not isinstance(trainer, Mapping) or "logger" not in trainer:
        return tree
    logger = trainer["logger"]
    if logger is not None and not isinstance(logger, str):
        return tree
    return {**tree, "trainer": {**trainer, "logger": [] if logger is None else [logger]}}


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
    near = _nearest(path, known)
    hint = f"; did you mean {near!r}?" if near else "."
    raise ConfigError(f"{where}unknown key {path!r}{hint} All keys: `rollstream generate --help-config`.")


def _nearest(path: str, known: set[str]) -> str | None:
    """The known key most like `path`: first by its last word, which must be alike, then as a whole."""

    def likeness(key: str) -> tuple[float, float]:
        last, asked = key.rpartition(".")[2], path.rpartition(".")[2]
        by_word = difflib.SequenceMatcher(None, asked, last).ratio()
        return by_word, difflib.SequenceMatcher(None, path, key).ratio()

    best = max(sorted(known), key=likeness)
    return best if likeness(best)[0] >= _NEAR else None


@cache
def setting_types() -> dict[str, Any]:
    """The type of every setting, by dotted key."""

    def walk(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, kind in get_type_hints(cls).items():
            if isinstance(kind, type) and is_dataclass(kind):
                yield from walk(kind, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", kind

    return dict(walk(Settings, ""))


def _takes_text(key: str) -> bool:
    kind = setting_types().get(key)
    return kind is str or (get_origin(kind) is not list and str in get_args(kind))


def _wrong_choice(where: str, message: str) -> str | None:
    """A better message for a value that is none of a setting's choices; None for other errors."""
    found = re.fullmatch(r"Invalid enum value '(.*)'", message, re.DOTALL)
    kind = setting_types().get(where.partition("[")[0])
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    if found is None or get_origin(kind) is not Literal:
        return None
    choices = [str(choice) for choice in get_args(kind)]
    near = difflib.get_close_matches(found[1], choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"must be one of {', '.join(choices)} (it is {found[1]!r}){hint}"


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
    from hydra.errors import HydraException

    for text in overrides:
        key, value = _read_override(text, known)
        try:
            if value is _DELETE:
                OmegaConf.update(config, key, None)
            else:
                OmegaConf.update(config, key, value, merge=False, force_add=True)
        except (OmegaConfBaseException, HydraException) as error:
            raise ConfigError(f"{text!r}: {error}") from error


_DELETE = object()


def _read_override(text: str, known: set[str]) -> tuple[str, Any]:
    """Key and value of one `key=value` word; the value of `~key` is `_DELETE`. Raises `ConfigError`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    simple = _SIMPLE_WORD.fullmatch(text)
    takes_text = simple is not None and _takes_text(simple[1])
    try:
        override = OverridesParser.create().parse_override(text)
        value = _DELETE if override.is_delete() else override.value()
    except HydraException as error:
        if simple is None:
            detail = str(error).splitlines()[0]
            raise ConfigError(f"cannot read {text!r} as key=value: {detail}") from error
        check_known(simple[1], known)
        if takes_text and simple[2][:1] not in tuple("[{'\""):  # those begin something that goes wrong later
            return simple[1], simple[2]
        example = _quoted(simple) if simple[2][:1] not in tuple("[{'\"") else f'\'{simple[1]}=["a b", "c"]\''
        raise ConfigError(
            f"cannot read the value of {text!r}; put texts in quotes, for a shell like this: {example}"
        ) from error
    key = override.key_or_group
    check_known(key, known)
    if override.is_sweep_override():
        hint = "" if simple is None else f"; if the comma is part of it: {_quoted(simple)}"
        raise ConfigError(f"{text!r} is a sweep; one run takes one value per key{hint}")
    is_switch = (
        isinstance(value, bool) and simple is not None and bool in get_args(setting_types().get(simple[1]))
    )
    if simple is not None and takes_text and isinstance(value, bool | int | float) and not is_switch:
        value = simple[2].strip()
    return key, value


def _quoted(word: re.Match[str]) -> str:
    """A `key=value` word with its value in quotes, as it is typed in a shell."""
    escaped = word[2].replace('"', '\\"')
    return shlex.quote(f'{word[1]}="{escaped}"')


def _found(tree: Any, path: str) -> str:
    """` (it is VALUE)` for the value at a path, where it can be reached."""
    for part in path.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return ""
        tree = tree[part]
    return f" (it is {tree!r})"


def _check_values(settings: Settings) -> None:
    _check_texts_and_numbers(settings)
    check_ray(settings.ray_kwargs)
    rollout, data, generation = settings.actor_rollout_ref.rollout, settings.data, settings.generation
    reward, turns = settings.custom_reward_function, rollout.multi_turn
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    launch, launching = "actor_rollout_ref.rollout.launch", rollout.launch
    at_least: list[tuple[str, float, float]] = [
        ("actor_rollout_ref.rollout.n", rollout.n, 1),
        ("actor_rollout_ref.rollout.response_length", rollout.response_length, 1),
        ("actor_rollout_ref.rollout.prompt_length", rollout.prompt_length, 1),
        ("actor_rollout_ref.rollout.temperature", rollout.temperature, 0),
        ("data.max_prompt_length", data.max_prompt_length, 1),
        ("data.train_max_samples", data.train_max_samples, -1),
        ("generation.max_in_flight", generation.max_in_flight, 1),
        ("generation.processes", generation.processes, 1),
        ("generation.max_attempts", generation.max_attempts, 1),
        ("generation.save_batch_size", generation.save_batch_size, 1),
        ("generation.retry_delay", generation.retry_delay, 0),
        ("generation.retry_delay_max", generation.retry_delay_max, 0),
        ("generation.grace_period", generation.grace_period, 0),
        ("generation.max_failed_share", generation.max_failed_share, 0),
        ("custom_reward_function.max_concurrency", reward.max_concurrency, 1),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size, 1),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", rollout.pipeline_model_parallel_size, 1),
        ("actor_rollout_ref.rollout.data_parallel_size", rollout.data_parallel_size, 1),
        ("trainer.nnodes", settings.trainer.nnodes, 1),
        (f"{launch}.max_restarts", launching.max_restarts, 0),
        (f"{launch}.restart_delay", launching.restart_delay, 0),
        (f"{launch}.restart_delay_max", launching.restart_delay_max, 0),
        (f"{multi_turn}.max_parallel_calls", turns.max_parallel_calls, 1),
        (f"{multi_turn}.max_tool_response_length", turns.max_tool_response_length, 1),
    ]
    if (workers := rollout.agent.num_workers) is not None:
        at_least.append(("actor_rollout_ref.rollout.agent.num_workers", workers, 1))
    for name in ("max_assistant_turns", "max_user_turns"):
        if (limit := getattr(turns, name)) is not None:
            at_least.append((f"{multi_turn}.{name}", limit, 1))
    if launching.replicas is not None:
        at_least.append((f"{launch}.replicas", launching.replicas, 1))
    if generation.metrics_port is not None:
        at_least.append(("generation.metrics_port", generation.metrics_port, 0))
        if generation.metrics_port > _PORT_LAST:
            raise ConfigError(
                f"generation.metrics_port must be at most {_PORT_LAST} (it is {generation.metrics_port})"
            )
    if settings.trainer.n_gpus_per_node is not None:
        at_least.append(("trainer.n_gpus_per_node", settings.trainer.n_gpus_per_node, 0))
    for key, value, least in at_least:
        if not value >= least:
            raise ConfigError(f"{key} must be at least {least:g} (it is {value})")
    above_zero: list[tuple[str, float]] = [
        ("actor_rollout_ref.rollout.top_p", rollout.top_p),
        ("generation.attempt_timeout", generation.attempt_timeout),
        ("generation.engine_timeout", generation.engine_timeout),
        ("generation.pull_timeout", generation.pull_timeout),
        ("custom_reward_function.timeout", reward.timeout),
        (f"{launch}.startup_timeout", launching.startup_timeout),
        (f"{launch}.unhealthy_timeout", launching.unhealthy_timeout),
        (f"{multi_turn}.tool_timeout", turns.tool_timeout),
        (f"{multi_turn}.interaction_timeout", turns.interaction_timeout),
    ]
    for key, value in above_zero:
        if not value > 0:
            raise ConfigError(f"{key} must be above 0 (it is {value})")
    if (wrong := check_extra(rollout.extra_sampling)) is not None:
        raise ConfigError(f"actor_rollout_ref.rollout.extra_sampling.{wrong}")
    if rollout.top_p > 1:
        raise ConfigError(f"actor_rollout_ref.rollout.top_p must be at most 1 (it is {rollout.top_p})")
    share = rollout.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization must be above 0 and at most 1 (it is {share})"
        )
    if rollout.top_k < -1 or rollout.top_k == 0:
        raise ConfigError(
            f"actor_rollout_ref.rollout.top_k must be -1 (off) or at least 1 (it is {rollout.top_k})"
        )
    if own := _OF_EVERY_RENDERING.intersection(data.apply_chat_template_kwargs):
        raise ConfigError(
            f"data.apply_chat_template_kwargs: {', '.join(sorted(own))} is set by rollstream at every "
            "rendering: only what the template itself asks for can be given"
        )
    if generation.verl_overrides and generation.executor != "verl":
        raise ConfigError(
            f"generation.verl_overrides is for generation.executor=verl (it is {generation.executor})"
        )
    if generation.export and not generation.final_merge:
        raise ConfigError(
            f"generation.export=[{','.join(generation.export)}] is made of the merged artifact, which "
            "generation.final_merge=false leaves out: set one of them otherwise"
        )
    if generation.max_failed_share > 1:
        raise ConfigError(
            f"generation.max_failed_share must be at most 1 (it is {generation.max_failed_share})"
        )
    if generation.seed is not None and not 0 <= generation.seed < 2**63:
        raise ConfigError(f"generation.seed must be from 0 to 2**63 - 1 (it is {generation.seed})")
    try:
        _ = generation.shard_of
    except ValueError as error:
        raise ConfigError(
            f"generation.shard must be i/k with 0 <= i < k, as 0/4 (it is {generation.shard!r})"
        ) from error
    if isinstance(generation.upload_artifact, str):
        check_artifact_name(generation.upload_artifact, "generation.upload_artifact")
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


def check_artifact_name(name: str, key: str) -> None:
    """Raises `ConfigError` for a name that W&B does not take; `key`: what was set to it."""
    if not _ARTIFACT_NAME.fullmatch(name):
        raise ConfigError(
            f"{key}: an artifact's name is made of letters, digits, -, _ and ., at most 128, with a letter "
            f"among them (it is {name!r})"
        )


def _check_texts_and_numbers(settings: Settings) -> None:
    """What holds for every setting of a type: no empty text, no infinite number."""
    for key, kind in setting_types().items():
        value: Any = settings
        for part in key.split("."):
            value = getattr(value, part)
        if kind is float and not abs(value) <= _LARGEST:
            raise ConfigError(f"{key} must be a number of at most {_LARGEST:g} (it is {value})")
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and not text for text in texts):
            where = "holds an empty text" if isinstance(value, list) else "must not be empty"
            hint = " (null is 'not set')" if type(None) in get_args(kind) else ""
            raise ConfigError(f"{key} {where}{hint}")
