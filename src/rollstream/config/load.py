"""From files and `key=value` words to validated settings.

The defaults are `generation.yaml`; configuration files lie over it in their order, and overrides in Hydra's
grammar (`a.b=1`, `+a.b=1`, `~a.b`, lists, dicts, quotes) over those. A file that has `defaults:` or `hydra:`
is composed by Hydra first. The `config.yaml` of a run directory means that folder. A key that
`generation.yaml` does not have is an error with the nearest known name, except below the free-form keys and for
keys of other systems that change no data (entry points of `rollstream.keys`: verl). All problems are said at once.

For a setting that is a text (a path, a name) the text behind `=` is taken as it is where Hydra's grammar
cannot read it (`~/x.jsonl`, letters beyond ASCII, brackets) or reads a number or a truth value in it.
"""

import difflib
import glob
import importlib.util
import logging
import re
import shutil
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollstream import plugins
from rollstream.config.settings import ArtifactName, Settings
from rollstream.errors import ConfigError, unknown_name
from rollstream.redaction import find_secret
from rollstream.sampling import check_extra

logger = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"

_FREE_FORM = frozenset(
    {
        f"{_ROLLOUT}.engine_kwargs",
        f"{_ROLLOUT}.extra_sampling",
        f"{_ROLLOUT}.launch.args",
        f"{_ROLLOUT}.launch.env",
        "data.apply_chat_template_kwargs",
        "custom_reward_function.reward_kwargs",
        "reward.custom_reward_function.reward_kwargs",
        "gateway.env",
        "ray_kwargs.ray_init",
        "ray_kwargs.replica",
        "ray_kwargs.worker",
        "train_tasks",
    }
)
"""Keys whose content `generation.yaml` does not list."""

_MAY_HOLD_SECRETS = _FREE_FORM - {"train_tasks", f"{_ROLLOUT}.launch.args", f"{_ROLLOUT}.launch.env"}
"""Keys whose content is searched for secrets; a launch's is searched where it is planned."""

_OF_EVERY_RENDERING = frozenset(
    {"conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
)
"""Arguments of transformers' `apply_chat_template` that are not the template's, but say how it is used."""

_LAUNCHED = ("sglang", "vllm")
"""Engines whose servers rollstream launches where no `server_urls` are given."""

_GROUPS = "a config group is chosen in the `defaults:` of a file that --config names"

_NOT_OURS = "nothing here depends on them"

_SHOWN = 16
"""Left out keys named in a note."""


class ForeignKeys(Protocol):
    """Keys of another system that a configuration may have: an entry point of `rollstream.keys`."""

    def renamed(self, key: str) -> str:
        """The key of rollstream's that `key` means; `key` itself where it means none."""

    def take(
        self,
        values: MutableMapping[str, Any],
        written: set[str],
        problems: list[str],
        notes: MutableMapping[str, list[str]],
    ) -> None:
        """Takes its keys out of a layer, or puts rollstream's in their place.

        Args:
            values: The layer, by dotted key.
            written: The keys that its author wrote; the others come from config groups.
            problems: Gets what would change the data and cannot be done.
            notes: Gets the keys that are left out, by the reason why.
        """


_SIMPLE_WORD = re.compile(r"(?:\+\+?)?([A-Za-z_][\w.]*)=(.*)", re.DOTALL)

_COMPOSING = threading.Lock()
"""Hydra's state is the process's, and threads of several runs may begin at once."""

if not OmegaConf.has_resolver("now"):
    # Hydra's, which it registers when it composes a file. Cached, so that all places name the same moment.
    OmegaConf.register_new_resolver("now", lambda pattern: time.strftime(pattern), use_cache=True)


def compose(overrides: Sequence[str] = (), *, layers: Iterable[Mapping[str, Any] | Path] = ()) -> DictConfig:
    """The configuration tree: defaults, then `layers` (mappings or YAML files), then `overrides`.

    Raises:
        ConfigError: Unknown keys, unreadable files, overrides that cannot be parsed: all of them, and what
            is wrong with the values of the others.
    """
    config = deepcopy(_defaults())
    problems: list[str] = []
    notes: dict[str, list[str]] = {}
    for layer in layers:
        where = f"{layer}: " if isinstance(layer, Path) else ""
        try:
            plain: Any = OmegaConf.to_container(layer) if isinstance(layer, DictConfig) else layer
            tree, own = _read_file(layer) if isinstance(layer, Path) else (plain, plain)
            OmegaConf.unsafe_merge(config, _known_part(tree, own, where, problems, notes))
        except ConfigError as error:
            problems.append(str(error))
        except OmegaConfBaseException as error:
            problems.append(f"{where}{_first_line(error)}")
    for word in overrides:
        try:
            key, value = _read_override(word)
            if _is_free_form(key):
                OmegaConf.update(config, key, value, merge=False, force_add=True)
            else:
                tree = _nested({key: value})
                OmegaConf.unsafe_merge(config, _known_part(tree, tree, "", problems, notes))
        except ConfigError as error:
            problems.append(str(error))
        except OmegaConfBaseException as error:
            problems.append(f"{word!r}: {_first_line(error)}")
    _say_left_out(notes)
    settings, wrong = _checked(config)
    if problems:
        raise _as_one([*problems, *wrong])
    if settings is not None and settings.actor_rollout_ref.rollout.name == "auto":
        has_servers = bool(settings.actor_rollout_ref.rollout.server_urls)
        engine = "openvino" if has_servers else choose_engine(settings.actor_rollout_ref.model.path)
        OmegaConf.update(config, f"{_ROLLOUT}.name", engine)
        settings = to_settings(config)
    if settings is not None and (unused := _unused(settings)):
        logger.warning("no effect with this engine and generation.executor: %s", ", ".join(unused))
    return config


def choose_engine(model: str | None) -> str:
    """The engine for `rollout.name=auto`: one that can load the model, by what is installed here.

    It is openvino for a folder that was exported for it, and where nothing is known of the model. Otherwise it
    is a server, where one is installed and there is the tool of a GPU's vendor, and else hf.
    """

    def has(*packages: str) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in packages)

    if model is None:
        return "openvino"
    if (Path(model).expanduser() / "openvino_model.xml").is_file() and has("openvino_genai"):
        return "openvino"
    if any(map(shutil.which, ("nvidia-smi", "rocm-smi", "npu-smi"))):
        for server in _LAUNCHED:
            if has(server):
                return server
    return "hf" if has("torch", "transformers") else "openvino"


def to_settings(config: DictConfig | Mapping[str, Any]) -> Settings:
    """Resolves and validates a configuration tree.

    Raises:
        ConfigError: Unknown keys and wrong values, each by its key.
    """
    settings, problems = _checked(config)
    if problems:
        raise _as_one(problems)
    assert settings is not None
    return settings


def _checked(config: DictConfig | Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
    """The settings, or what is wrong with them."""
    tree: Any = config
    if isinstance(config, DictConfig):
        try:
            tree = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            return None, [f"configuration cannot be resolved: {_first_line(error)}"]
    problems: list[str] = []
    settings = read_value(Settings, tree, "", problems)
    if not problems:
        problems = list(_conflicts(settings))
    return (None if problems else settings), problems


def to_yaml(config: DictConfig) -> str:
    """The resolved configuration, usable as a configuration file again."""
    return OmegaConf.to_yaml(config, resolve=True)


def to_stored_yaml(config: DictConfig) -> str:
    """The resolved configuration as a run keeps it: usable from any folder.

    Files and folders that are there are named by absolute paths; comments at the top say what was typed.
    """
    stored = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(stored, DictConfig)
    typed = []
    for key in [*_path_keys(), *_task_path_keys(stored)]:
        value = OmegaConf.select(stored, key)
        given = list(value) if OmegaConf.is_list(value) else [value]
        found = [_absolute(one, always=key == "trainer.default_local_dir") for one in given]
        if found != given:
            OmegaConf.update(stored, key, found if OmegaConf.is_list(value) else found[0], merge=False)
            typed.append(f"# {key}: {', '.join(map(str, given))}\n")
    return "".join(["# As they were typed:\n", *typed] if typed else []) + OmegaConf.to_yaml(stored)


def is_set(
    config: DictConfig,
    overrides: Sequence[str],
    layers: Sequence[Mapping[str, Any] | Path],
    key: str,
    other: Any,
) -> bool:
    """Whether a key of `generation` is set, if to its default: then another default changes nothing."""
    changed = compose(overrides, layers=[{"generation": {key: other}}, *layers])
    return bool(config.generation[key] == changed.generation[key])


def refuse_keys(config: DictConfig, keys: Iterable[str], why: str) -> None:
    """Refuses keys that have another value than their default.

    Raises:
        ConfigError: naming them, and `why`.
    """
    defaults = compose()
    if found := [key for key in keys if OmegaConf.select(config, key) != OmegaConf.select(defaults, key)]:
        raise ConfigError(f"{', '.join(found)}: {why}")


def check_artifact_name(name: str, key: str) -> None:
    """Raises `ConfigError` for a name that W&B does not take; `key`: what was set to it."""
    problems: list[str] = []
    read_value(ArtifactName, name, key, problems)
    if problems:
        raise _as_one(problems)


def _as_one(problems: Sequence[str]) -> ConfigError:
    found = list(dict.fromkeys(problems))
    many = f"the configuration has {len(found)} problems:\n  "
    return ConfigError(found[0] if len(found) == 1 else many + "\n  ".join(found))


def _first_line(error: BaseException) -> str:
    """An error without the lines that OmegaConf and Hydra add for those who know their insides."""
    return str(error).strip().partition("\n")[0]


@cache
def _defaults() -> DictConfig:
    loaded = OmegaConf.load(Path(__file__).with_name("generation.yaml"))
    assert isinstance(loaded, DictConfig)
    return loaded


@cache
def _known_tree() -> Any:
    return OmegaConf.to_container(_defaults())


@cache
def _foreign_keys() -> list[ForeignKeys]:
    return [plugins.load("rollstream.keys", name) for name in plugins.names("rollstream.keys")]


def _is_free_form(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in _FREE_FORM)


def _read_file(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What a configuration file says, composed by Hydra where it wants that, and what it says by itself."""
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {path} does not exist") from error
    except Exception as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"configuration file {path} must hold keys and values")
    if path.name == "config.yaml" and path.with_name("run.json").exists():  # of a run, maybe moved or copied
        trainer = content.get("trainer") or {}  # without a key below it, it is null
        if isinstance(trainer, dict):
            content["trainer"] = {**trainer, "default_local_dir": str(path.absolute().parent)}
    if not content.keys() & {"defaults", "hydra"}:
        return content, content
    return _compose_by_hydra(path, content), content


def _compose_by_hydra(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    if path.suffix != ".yaml":
        raise ConfigError(f"configuration file {path} has defaults: or hydra:, and Hydra reads .yaml files")
    hydra = content.get("hydra")
    own_path = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    searched = [*(own_path if isinstance(own_path, list) else ()), "pkg://rollstream.config"]
    words = [f"hydra.searchpath={OmegaConf.create(searched)}"]
    try:
        with (
            _COMPOSING,
            warnings.catch_warnings(),
            initialize_config_dir(str(path.absolute().parent), version_base="1.3"),
        ):
            # Of a search path that is not there: it matters where something is not found, and is said then.
            warnings.filterwarnings("ignore", message=".*searchpath.*is not available", category=UserWarning)
            composed: Any = OmegaConf.to_container(hydra_compose(path.stem, words))
    except (HydraException, OmegaConfBaseException) as error:
        what = _first_line(error) or _first_line(error.__cause__ or error)
        raise ConfigError(
            f"configuration file {path} cannot be composed: {what} (looked in {path.absolute().parent} and "
            f"{', '.join(map(str, searched))}; hydra.searchpath in the file adds to them, for verl's groups "
            "[pkg://verl.trainer.config], where verl is installed)"
        ) from error
    rest = {key: value for key, value in (hydra or {}).items() if key != "searchpath"}
    return ({"hydra": rest} if rest else {}) | dict(composed)


@cache
def _known_keys() -> Mapping[str, bool]:
    """Dotted paths of all keys, and whether it is a branch."""

    def walk(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, bool]]:
        for key, value in tree.items():
            is_branch = isinstance(value, Mapping) and not _is_free_form(f"{prefix}{key}")
            yield f"{prefix}{key}", is_branch
            if is_branch:
                yield from walk(value, f"{prefix}{key}.")

    return dict(walk(_known_tree(), ""))


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A layer's values by dotted key; a mapping is a value where it is empty or below a free-form key."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not _is_free_form(path):
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        branch = tree
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def _known_part(
    tree: Mapping[Any, Any],
    own: Mapping[Any, Any],
    where: str,
    problems: list[str],
    notes: dict[str, list[str]],
) -> dict[str, Any]:
    """The part of a layer that rollstream has keys for.

    Args:
        tree: The layer.
        own: What its author wrote. The rest comes from config groups: there unknown keys are only noted, and null
            means "not set".
        where: Begins messages.
        problems: Gets what is wrong.
        notes: Gets the other keys, those that can be left out, by the reason why.
    """
    values, written = dict(_flat(tree)), set(dict(_flat(own)))
    found: list[str] = []
    for keys in _foreign_keys():
        keys.take(values, written, found, notes)
    known = _known_keys()
    kept = {}
    for path, value in values.items():
        is_own, is_branch = path in written, known.get(path)
        if is_branch is None:
            parts = path.split(".")
            unknown = next(key for i in range(len(parts)) if (key := ".".join(parts[: i + 1])) not in known)
            if is_own:
                found.append(_unknown(unknown))
            else:
                notes.setdefault(_NOT_OURS, []).append(unknown)
        elif is_branch and value != {} and not (isinstance(value, str) and value.startswith("${")):
            hint = f"; {_GROUPS}" if isinstance(value, str) else ""
            found.append(f"{path} must hold keys (it is {value!r}){hint}")
        elif is_own or not (value is None or (isinstance(value, Mapping) and not any(value.values()))):
            kept[path] = value
    problems += [f"{where}{problem}" for problem in found]
    return _nested(kept)


def _say_left_out(notes: Mapping[str, Iterable[str]]) -> None:
    lines = []
    for why, keys in sorted(notes.items()):
        named = [key for key in dict.fromkeys(keys) if not key.endswith("_target_")]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        lines.append(f"{', '.join(named[:_SHOWN])}{more} ({why})")
    if lines:
        logger.warning("left out: %s", "; ".join(lines))


def _unknown(path: str) -> str:
    known = _known_keys()
    word = path.rpartition(".")[2]
    near = [key for key in known if key.rpartition(".")[2] == word]
    if len(near) != 1:
        near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown key {path!r}{hint} All keys: `rollstream generate --help-config`."


@cache
def _setting_types() -> dict[str, Any]:
    """The type of every setting, by dotted key."""

    def walk(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, kind in get_type_hints(cls, include_extras=True).items():
            if is_dataclass(kind):
                yield from walk(kind, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", kind

    return dict(walk(Settings, ""))


def _alternatives(kind: Any) -> list[Any]:
    """The types of a union without what is annotated; a type that is none stands alone."""
    if hasattr(kind, "__metadata__"):
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType):
        return [kind]
    return [one for each in get_args(kind) for one in _alternatives(each)]


@cache
def _path_keys() -> list[str]:
    def is_path(kind: Any) -> bool:
        marked = any((meta.extra or {}).get("path") for meta in getattr(kind, "__metadata__", ()))
        return marked or any(is_path(each) for each in get_args(kind) if not isinstance(each, str))

    return [key for key, kind in _setting_types().items() if is_path(kind)]


def _task_path_keys(config: DictConfig) -> Iterator[str]:
    for i, _ in enumerate(config.get("train_tasks") or ()):
        yield from (f"train_tasks[{i}].{key}" for key in ("custom_cls.path", "loading_params.data_files"))


def _absolute(path: Any, *, always: bool) -> Any:
    if not isinstance(path, str):
        return path
    found = Path(path).expanduser()
    there = always or found.exists() or any(glob.iglob(str(found), recursive=True))  # noqa: PTH207  may be absolute
    return str(found.absolute()) if there else path


def read_value(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """A value as its type; `problems` gets what does not fit, and then what is returned is of no use.

    Types are what msgspec converts, dataclasses of such, and typed dicts of options.
    """
    if path in _MAY_HOLD_SECRETS and (secret := find_secret(value, path)) is not None:
        # Before any other message, which would show it.
        problems.append(
            f"{secret} looks like a secret, and what is configured is written to the run directory. Set it "
            "in the environment that rollstream is started in, which workers on this machine inherit; on "
            "other machines in that of `ray start`"
        )
        return None
    if path == "trainer.logger" and (value is None or isinstance(value, str)):
        value = [] if value is None else [value]  # as verl takes it
    if value is None and path in _setting_types() and NoneType not in _alternatives(kind):
        value = OmegaConf.select(_defaults(), path)  # null is "not set", as verl's files have it
    if is_dataclass(kind) or is_typeddict(kind):
        if not isinstance(value, Mapping):
            problems.append(f"{path} must hold keys (it is {value!r})")
            return None
        hints = get_type_hints(kind, include_extras=True)
        below = f"{path}." if path else ""
        for key in value.keys() - hints.keys():
            takes = f"unknown key '{below}{key}'; it takes {', '.join(hints)}"
            problems.append(takes if is_typeddict(kind) else _unknown(f"{below}{key}"))
        given = value if is_typeddict(kind) else dict.fromkeys(hints) | dict(value)
        fields = {
            name: read_value(hints[name], given[name], f"{below}{name}", problems)
            for name in hints
            if name in given
        }
        return None if problems else kind(**fields)
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {
            key: read_value(get_args(kind)[1], item, f"{path}.{key}", problems) for key, item in value.items()
        }
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, inner = str(error).partition(" - at `$")
        if (index := re.match(r"\[(\d+)\]", inner)) is not None and isinstance(value, list):
            value = value[int(index[1])]
        problems.append(f"{path}{inner.rstrip('`')} {_described(kind, message, value)}")
        return None


def _described(kind: Any, message: str, value: Any) -> str:
    """A message of msgspec's with what the value may be."""
    if message.startswith("Invalid enum value"):
        options = [
            option for each in get_args(kind) if each is not NoneType for option in get_args(each) or [each]
        ]
        return f"must be one of {', '.join(map(str, options))} (it is {value!r})"
    described = [
        meta.description for one in (kind, *get_args(kind)) for meta in getattr(one, "__metadata__", ())
    ]
    expected = message.replace("`", "").replace("Expected ", "", 1).partition(", got ")[0]
    wanted = " or ".join(text for text in described if text) if "matching" in expected else expected
    return f"must be {wanted} (it is {value!r})"


def _read_override(text: str) -> tuple[str, Any]:
    """Key and value of one `key=value` word; the value of `~key` is None. Raises `ConfigError`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    simple = _SIMPLE_WORD.fullmatch(text)
    key = "" if simple is None else _our_name(simple[1])
    kinds = _alternatives(_setting_types().get(key))
    try:
        override = OverridesParser.create().parse_override(text)
        value = None if override.is_delete() else override.value()
    except HydraException as error:
        if simple is not None and str in kinds and simple[2][:1] not in tuple("[{'\""):
            return key, simple[2]
        if simple is not None and key not in _known_keys() and not _is_free_form(key):
            raise ConfigError(_unknown(key)) from error
        raise ConfigError(
            f"cannot read {text!r} as key=value: {_first_line(error)}; texts with other characters than letters and "
            "digits need quotes, and several prompt files --prompts before each"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} is a sweep; one run takes one value per key, with a comma in quotes")
    if "/" in override.key_or_group or override.package is not None:
        raise ConfigError(f"{text!r}: {_GROUPS}")
    is_switch = isinstance(value, bool) and bool in kinds
    if simple is not None and str in kinds and isinstance(value, bool | int | float) and not is_switch:
        value = simple[2].strip()
    return _our_name(override.key_or_group), value


def _our_name(key: str) -> str:
    for keys in _foreign_keys():
        key = keys.renamed(key)
    return key


def _conflicts(settings: Settings) -> Iterator[str]:
    """What is wrong between settings that are fine each by itself, or has no effect beside the others."""
    rollout, data, generation = settings.actor_rollout_ref.rollout, settings.data, settings.generation
    plugged: tuple[tuple[str, Sequence[str], str, tuple[str, ...]], ...] = (
        ("trainer.logger", settings.trainer.logger, "rollstream.trackers", ("console",)),
        ("generation.export", generation.export, "rollstream.exports", ()),
        ("gateway.sandbox", [settings.gateway.sandbox], "rollstream.sandboxes", ()),
        ("generation.executor", [generation.executor], "rollstream.executors", ("local", "ray")),
    )
    for key, chosen, group, own in plugged:
        known = {*own, *plugins.names(group)}
        yield from (f"{key}: {unknown_name('name', name, known)}" for name in chosen if name not in known)
    if rollout.top_k == 0:
        yield f"{_ROLLOUT}.top_k must be -1 (off) or at least 1 (it is 0)"
    if (wrong := check_extra(rollout.extra_sampling)) is not None:
        yield f"{_ROLLOUT}.extra_sampling.{wrong}"
    if fixed := _OF_EVERY_RENDERING.intersection(data.apply_chat_template_kwargs):
        yield (
            f"data.apply_chat_template_kwargs: {', '.join(sorted(fixed))} is set by rollstream at every "
            "rendering: only what the template itself asks for can be given"
        )
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            f"lengths cannot fit: prompt_length {rollout.prompt_length} + response_length "
            f"{rollout.response_length} = {longest} tokens, but {_ROLLOUT}.max_model_len is "
            f"{rollout.max_model_len}"
        )
    if (shard := generation.shard_of) is not None and shard[0] >= shard[1]:
        yield f"generation.shard must be i/k with 0 <= i < k, as in 0/4 (it is {generation.shard!r})"
    if "parquet" in generation.export:
        yield (
            "generation.export: parquet is the artifact itself, trajectories.parquet, which "
            "generation.final_merge writes"
        )
    elif generation.export and not generation.final_merge:
        yield (
            f"generation.export=[{','.join(generation.export)}] is made of the merged artifact, which "
            "generation.final_merge=false leaves out: set one of them otherwise"
        )


def _unused(settings: Settings) -> list[str]:
    """Keys that are set and that the chosen executor or engine does not look at.

    They are no errors because configurations of verl have them always.
    """
    rollout, executor = settings.actor_rollout_ref.rollout, settings.generation.executor
    unused = []
    if executor != "verl" and settings.generation.verl_overrides:
        unused.append("generation.verl_overrides")
    if executor == "local":
        given = {
            f"{_ROLLOUT}.agent.num_workers": rollout.agent.num_workers is not None,
            "ray_kwargs.timeline_json_file": settings.ray_kwargs.timeline_json_file is not None,
            "ray_kwargs.worker": bool(settings.ray_kwargs.worker),
        }
        unused += [key for key, is_given in given.items() if is_given]
    if executor != "verl" and (rollout.name not in _LAUNCHED or rollout.server_urls):
        if settings.trainer.n_gpus_per_node is not None:
            unused.append("trainer.n_gpus_per_node")
        if settings.trainer.nnodes > 1:
            unused.append("trainer.nnodes")
    is_given = any(value is not None for value in settings.ray_kwargs.ray_init.values())
    if executor == "local" and rollout.launch.where != "ray" and is_given:
        unused.append("ray_kwargs.ray_init")
    return unused
