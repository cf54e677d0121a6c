"""From files and `key=value` words to validated settings.

The defaults are `generation.yaml`; configuration files lie over it in their order, and overrides in Hydra's
grammar (`a.b=1`, `+a.b=1`, `~a.b`, lists, dicts, quotes) over those. A file that has `defaults:` or `hydra:`
is composed by Hydra first. The `config.yaml` of a run directory means that folder. A key that
`generation.yaml` does not have is an error with the nearest known name, except below the free-form keys,
for keys that come with a config group, and for keys of other systems that change no data (entry points of
`rollstream.keys`: verl). Null means "not set" where a setting cannot be null. All problems are said at once.

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
from typing import Any, Protocol, get_args, get_type_hints

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollstream import plugins
from rollstream.config.settings import ArtifactName, Settings, WorkerOptions
from rollstream.demo import named_model
from rollstream.errors import ConfigError, unknown_name
from rollstream.redaction import find_secret
from rollstream.sampling import check_extra

logger = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"

_MAY_HOLD_SECRETS = (
    f"{_ROLLOUT}.engine_kwargs",
    f"{_ROLLOUT}.extra_sampling",
    "data.apply_chat_template_kwargs",
    "custom_reward_function.reward_kwargs",
    "gateway.env",
    "ray_kwargs.ray_init",
    "ray_kwargs.replica",
    "ray_kwargs.worker",
)

_FREE_FORM = (
    *_MAY_HOLD_SECRETS,
    f"{_ROLLOUT}.launch.args",
    f"{_ROLLOUT}.launch.env",
    "train_tasks",
    "data.sources",
)
"""Keys whose content `generation.yaml` does not list. A launch's is searched for secrets where it is planned."""

_RENDERING = frozenset(
    ("conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict")
)
"""Arguments of transformers' `apply_chat_template` that say how a template is used, and are no variables of it."""

_LAUNCHED = ("sglang", "vllm")
"""Engines whose servers rollstream launches where no `server_urls` are given."""

_NAMED_IN_A_NOTE = 16


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
            values: the layer by dotted key; changed in place.
            written: keys that the layer's author wrote; the others come from config groups.
            problems: gets what is wrong, or would change the data and cannot be done.
            notes: gets the keys that can be left out, by the reason why.
        """


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
    for layer in [*layers, *overrides]:
        try:
            if isinstance(layer, Path):
                tree, own = _read_file(layer)
            else:
                plain: Any = dict([_read_override(layer)]) if isinstance(layer, str) else layer
                plain = OmegaConf.to_container(plain) if OmegaConf.is_config(plain) else plain
                tree = own = plain
            wrong: list[str] = []
            for key, value in _known_part(tree, own, wrong, notes).items():
                OmegaConf.update(config, key, value, merge=not isinstance(layer, str), force_add=True)
            problems += [f"{layer}: {problem}" if isinstance(layer, Path) else problem for problem in wrong]
        except ConfigError as error:
            problems.append(str(error))
        except OmegaConfBaseException as error:
            where = f"{layer}: " if isinstance(layer, Path | str) else ""
            problems.append(f"{where}{_first_line(error)}")
    _log_left_out(notes)
    settings, wrong = _checked(config)
    if problems:
        raise _as_one([*problems, *wrong])
    if settings is None:
        return config  # `to_settings` says what is wrong
    rollout, model = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.model.path
    if model is not None and rollout.name != "openai" and named_model(model) != model:
        model = named_model(model)
        OmegaConf.update(config, "actor_rollout_ref.model.path", model)
        settings = to_settings(config)
    if rollout.name == "auto":
        engine = "openvino" if rollout.server_urls else choose_engine(model)
        OmegaConf.update(config, f"{_ROLLOUT}.name", engine)
        settings = to_settings(config)
    if unused := _unused(settings):
        logger.warning("no effect with this engine and generation.executor: %s", ", ".join(unused))
    return config


def choose_engine(model: str | None) -> str:
    """The engine for `rollout.name=auto`: one that can load the model, by what is installed here.

    It is openvino for a folder that was exported for it, and where nothing is known of the model. Otherwise it
    is a server, where one is installed and there is the tool of a GPU's vendor; else hf, where torch and
    transformers are installed; else openvino.
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
    if settings is None:
        raise _as_one(problems)
    return settings


def _checked(config: DictConfig | Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
    """The settings, or what is wrong with them."""
    tree: Any = deepcopy(config)
    if isinstance(config, DictConfig):
        try:
            tree = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            return None, [f"configuration cannot be resolved: {_first_line(error)}"]
    problems = [_unknown(key) for key in _flat(tree) if not _is_known(key)]
    trainer, worker = tree.get("trainer"), _at(tree, "ray_kwargs.worker")
    if isinstance(trainer, dict) and isinstance(names := trainer.get("logger"), str | None):
        trainer["logger"] = [] if names is None else [names]  # as verl takes it
    if isinstance(worker, dict) and (unknown := worker.keys() - WorkerOptions.__annotations__.keys()):
        problems += [f"unknown key 'ray_kwargs.worker.{name}'" for name in sorted(unknown)]
    settings = read_value(Settings, tree, "", problems)
    if not problems:
        problems += _conflicts(settings)
    return (None if problems else settings), problems


def read_value(kind: Any, tree: Any, path: str, problems: list[str]) -> Any:
    """A part of the configuration as its type. Null is the default where the type does not take it.

    Args:
        kind: `Settings`, or the class of a part.
        tree: The part as plain values. It is changed.
        path: The part's key, empty for the whole.
        problems: Gets what does not fit; the result is then of no use.
    """
    above = f"{path}." if path else ""
    for key in _MAY_HOLD_SECRETS:
        part = _at(tree, key.removeprefix(above)) if key.startswith(above) else None
        if (secret := find_secret(part, key)) is not None:
            problems.append(
                f"{secret} looks like a secret, and what is configured is written to the run directory: set it "
                "in the environment that rollstream is started in (on other machines, that of `ray start`)"
            )
            return None  # another message could show it
    while True:
        try:
            return msgspec.convert(tree, kind)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `")
            place = place.rpartition("$.")[2].rstrip("`")  # also of "- at `key` in `$.gateway.env`"
            key = place.partition("[")[0]
            if not key:
                problems.append(f"{path or 'the configuration'}: {message}")
                return None
            value = _at(tree, key)
            if value is not None or above + key not in _known_keys():
                index = re.search(r"\[(\d+)\]$", place)
                value = value[int(index[1])] if index is not None and isinstance(value, list) else value
                problems.append(f"{above}{place} {_expected(above + key, message)} (it is {value!r})")
            while above + key not in _known_keys():  # an option within a free-form key
                key = key.rpartition(".")[0]
            parent, _, name = key.rpartition(".")
            _at(tree, parent)[name] = _at(_resolved_defaults(), above + key)


def _expected(key: str, message: str) -> str:
    """The message of msgspec's for a value of a wrong type, with the values that a literal may have."""
    if message.startswith("Invalid enum value"):
        return f"must be one of {', '.join(_choices(_setting_type(key)))}"
    wanted = message.replace("`", "").replace("Expected ", "", 1).partition(", got ")[0]
    return "must be " + re.sub(r"\bobject\b", "a mapping", re.sub(r"\barray\b", "a list", wanted))


def _choices(kind: Any) -> list[str]:
    """The texts of a literal, alone or within a union."""
    return [each for arg in get_args(kind) for each in (_choices(arg) or [arg]) if isinstance(each, str)]


def _at(tree: Any, key: str) -> Any:
    """The value at a dotted key of plain values; None where there is none. The empty key is the tree's own."""
    for part in key.split(".") if key else ():
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def to_yaml(config: DictConfig) -> str:
    """The resolved configuration, usable as a configuration file again."""
    return OmegaConf.to_yaml(config, resolve=True)


def to_stored_yaml(config: DictConfig) -> str:
    """The resolved configuration as a run keeps it: files and folders that are there have absolute paths."""
    stored = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert isinstance(stored, DictConfig)
    keys = [key for key, is_branch in _known_keys().items() if not is_branch and _is_path(_setting_type(key))]
    for i, _ in enumerate(stored.get("train_tasks") or ()):
        keys += [f"train_tasks[{i}].custom_cls.path", f"train_tasks[{i}].loading_params.data_files"]
    for i, source in enumerate(stored.data.get("sources") or ()):
        of_reward = ".path" if OmegaConf.is_dict(source.get("reward")) else ""
        keys += [f"data.sources[{i}].train_files", f"data.sources[{i}].reward{of_reward}"]
    for key in keys:
        value, always = OmegaConf.select(stored, key), key == "trainer.default_local_dir"
        if OmegaConf.is_list(value):
            OmegaConf.update(stored, key, [_absolute(path) for path in value], merge=False)
        elif isinstance(value, str):
            OmegaConf.update(
                stored, key, str(Path(value).expanduser().absolute()) if always else _absolute(value)
            )
    return OmegaConf.to_yaml(stored)


def _is_path(kind: Any) -> bool:
    marked = any((meta.extra or {}).get("path") for meta in getattr(kind, "__metadata__", ()))
    return marked or any(map(_is_path, get_args(kind)))


def _absolute(path: Any) -> Any:
    if not isinstance(path, str):
        return path
    full = Path(path).expanduser()
    there = full.exists() or any(glob.iglob(str(full), recursive=True))  # noqa: PTH207  may be absolute
    return str(full.absolute()) if there else path


def is_set(
    config: DictConfig,
    overrides: Sequence[str],
    layers: Sequence[Mapping[str, Any] | Path],
    key: str,
    other: Any,
) -> bool:
    """Whether a key of `generation` was given a value, be it the default.

    It was, if composing with another default changes nothing.
    """
    changed = compose(overrides, layers=[{"generation": {key: other}}, *layers])
    return bool(config.generation[key] == changed.generation[key])


def refuse_keys(config: DictConfig, keys: Iterable[str], why: str) -> None:
    """Raises `ConfigError` with `why` for keys that have another value than their default."""
    defaults = compose()
    if found := [key for key in keys if OmegaConf.select(config, key) != OmegaConf.select(defaults, key)]:
        raise ConfigError(f"{', '.join(found)}: {why}")


def check_artifact_name(name: str, key: str) -> None:
    """Raises `ConfigError` for a name that W&B does not take; `key`: what was set to it."""
    try:
        msgspec.convert(name, ArtifactName)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key}: {error} (it is {name!r})") from error


def _as_one(problems: Sequence[str]) -> ConfigError:
    lines = list(dict.fromkeys(problems))
    many = f"the configuration has {len(lines)} problems:\n  "
    return ConfigError(lines[0] if len(lines) == 1 else many + "\n  ".join(lines))


def _first_line(error: BaseException) -> str:
    """An error without the lines that OmegaConf and Hydra add for those who know their insides."""
    return str(error).strip().partition("\n")[0]


@cache
def _defaults() -> DictConfig:
    loaded = OmegaConf.load(Path(__file__).with_name("generation.yaml"))
    assert isinstance(loaded, DictConfig)
    return loaded


@cache
def _resolved_defaults() -> Any:
    return OmegaConf.to_container(_defaults(), resolve=True)


@cache
def _known_keys() -> Mapping[str, bool]:
    """Dotted paths of all keys, and whether it is a branch."""
    leaves = list(_flat(_resolved_defaults()))
    branches = {key[: dot.start()] for key in leaves for dot in re.finditer(r"\.", key)}
    return dict.fromkeys(sorted(branches), True) | dict.fromkeys(leaves, False)


@cache
def _setting_type(key: str) -> Any:
    """The type of a setting; None for an unknown key."""
    kind: Any = Settings
    for part in key.split("."):
        kind = get_type_hints(kind, include_extras=True).get(part) if is_dataclass(kind) else None
    return kind


@cache
def _foreign_keys() -> list[ForeignKeys]:
    return list(plugins.load_all("rollstream.keys").values())


def _is_known(key: str) -> bool:
    """Whether a key is one of `generation.yaml`, or within a free-form one."""
    return key in _known_keys() or any(key.startswith(f"{free}.") for free in _FREE_FORM)


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """A layer's values by dotted key; a mapping is a value where it is empty or a free-form key's."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and _our_name(path) not in _FREE_FORM:
            values |= _flat(value, f"{path}.")
        else:
            values[path] = value
    return values


def _read_file(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The content of a configuration file, composed by Hydra where it wants that, and by itself."""
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
    composed = _compose_by_hydra(path, content) if content.keys() & {"defaults", "hydra"} else content
    return composed, content


def _compose_by_hydra(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    hydra: Any = content.get("hydra")
    hydra = dict(hydra) if isinstance(hydra, Mapping) else {}
    searched = [*(hydra.pop("searchpath", None) or ()), "pkg://rollstream.config"]
    folder = str(path.absolute().parent)
    try:
        with _COMPOSING, warnings.catch_warnings(), initialize_config_dir(folder, version_base="1.3"):
            # A search path that is not there matters where a group is not found, and is named then.
            warnings.filterwarnings("ignore", message=".*searchpath.*is not available", category=UserWarning)
            words = [f"hydra.searchpath={OmegaConf.create(searched)}"]
            composed: Any = OmegaConf.to_container(hydra_compose(path.stem, words))
    except (HydraException, OmegaConfBaseException) as error:
        what = _first_line(error) or _first_line(error.__cause__ or error)
        raise ConfigError(
            f"configuration file {path} cannot be composed: {what} (looked in {', '.join([folder, *searched])}; "
            "hydra.searchpath in the file adds to them, for verl's groups [pkg://verl.trainer.config])"
        ) from error
    return ({"hydra": hydra} if hydra else {}) | dict(composed)


def _known_part(
    tree: Mapping[Any, Any], own: Mapping[Any, Any], problems: list[str], notes: dict[str, list[str]]
) -> dict[str, Any]:
    """The values of a layer that rollstream has keys for, by dotted key.

    Args:
        tree: The layer; `values` is the same by dotted key.
        own: The part that its author wrote, `written` its keys. The rest comes from config groups: there unknown
            keys are only noted, and null means "not set".
        problems: Gets what is wrong, or would change the data and cannot be done.
        notes: Gets the keys that can be left out, by the reason why.
    """
    values, written = _flat(tree), set(_flat(own))
    for keys in _foreign_keys():
        keys.take(values, written, problems, notes)
    known = {}
    for path, value in values.items():
        is_own, is_branch = path in written, _known_keys().get(path)
        if not _is_known(path):
            if is_own:
                problems.append(_unknown(path))
            else:
                notes.setdefault("nothing here depends on them", []).append(path)
        elif is_branch and not (isinstance(value, str) and value.startswith("${")):
            if value != {}:
                problems.append(f"{path} must hold keys (it is {value!r})")
        elif value != "???" and (is_own or value not in (None, {})):
            known[path] = value
    return known


def _log_left_out(notes: Mapping[str, Iterable[str]]) -> None:
    lines = []
    for why, keys in sorted(notes.items()):
        named = [key for key in dict.fromkeys(keys) if not key.endswith("_target_")]
        more = f" and {len(named) - _NAMED_IN_A_NOTE} more" if len(named) > _NAMED_IN_A_NOTE else ""
        lines.append(f"{', '.join(named[:_NAMED_IN_A_NOTE])}{more} ({why})")
    if lines:
        logger.warning("left out: %s", "; ".join(lines))


def _unknown(path: str) -> str:
    known = _known_keys()
    parts = path.split(".")
    path = next(key for i in range(len(parts)) if (key := ".".join(parts[: i + 1])) not in known)
    near = [key for key in known if key.rpartition(".")[2] == parts[-1]]
    if len(near) != 1:
        near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown key {path!r}{hint} All keys: `rollstream generate --help-config`."


def _read_override(text: str) -> tuple[str, Any]:
    """Key and value of one `key=value` word; the value of `~key` is None. Raises `ConfigError`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    simple = re.fullmatch(r"(?:\+\+?)?([A-Za-z_][\w.]*)=(.*)", text, re.DOTALL)
    key, word = (_our_name(simple[1]), simple[2].strip()) if simple is not None else ("", "")

    def fits(value: Any) -> bool:
        try:
            msgspec.convert(value, _setting_type(key))
        except msgspec.ValidationError:
            return False
        return True

    try:
        override = OverridesParser.create().parse_override(text)
        value = None if override.is_delete() else override.value()
    except HydraException as error:
        if key and not _is_known(key):
            raise ConfigError(_unknown(key)) from error
        if key and not word.startswith(("[", "{", "'", '"')) and fits(word):
            return key, word
        raise ConfigError(
            f"cannot read {text!r} as key=value: {_first_line(error)}; texts with other characters than letters and "
            "digits need quotes, and several prompt files --prompts before each"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} is a sweep; one run takes one value per key, with a comma in quotes")
    if "/" in override.key_or_group or override.package is not None:
        raise ConfigError(
            f"{text!r}: a config group is chosen in the `defaults:` of a file that --config names"
        )
    if isinstance(value, bool | int | float) and key in _known_keys() and not fits(value) and fits(word):
        value = word
    return _our_name(override.key_or_group), value


def _our_name(key: str) -> str:
    for keys in _foreign_keys():
        key = keys.renamed(key)
    return key


def _conflicts(settings: Settings) -> Iterator[str]:
    """What is wrong between settings that are fine each by itself, or has no effect beside the others."""
    rollout, data, generation = settings.actor_rollout_ref.rollout, settings.data, settings.generation
    for key, chosen, group, own in (
        ("trainer.logger", settings.trainer.logger, "rollstream.trackers", ["console"]),
        ("generation.export", generation.export, "rollstream.exports", []),
        ("gateway.sandbox", [settings.gateway.sandbox], "rollstream.sandboxes", []),
        ("generation.executor", [generation.executor], "rollstream.executors", ["local", "ray"]),
    ):
        known = {*own, *plugins.names(group)}
        yield from (f"{key}: {unknown_name('name', name, known)}" for name in chosen if name not in known)
    if rollout.top_k == 0:
        yield f"{_ROLLOUT}.top_k must be -1 (off) or at least 1 (it is 0)"
    if (wrong := check_extra(rollout.extra_sampling)) is not None:
        yield f"{_ROLLOUT}.extra_sampling.{wrong}"
    if fixed := _RENDERING.intersection(data.apply_chat_template_kwargs):
        yield f"data.apply_chat_template_kwargs: {', '.join(sorted(fixed))}: rollstream sets them itself"
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            f"prompt_length {rollout.prompt_length} + response_length {rollout.response_length} = {longest} tokens "
            f"are more than {_ROLLOUT}.max_model_len = {rollout.max_model_len}"
        )
    if generation.shard is not None:
        shard = re.fullmatch(r"(\d{1,9})/(\d{1,9})", generation.shard)
        if shard is None or int(shard[1]) >= int(shard[2]):
            yield f"generation.shard must be i/k with 0 <= i < k, as in 0/4 (it is {generation.shard!r})"
    if "parquet" in generation.export:
        yield "generation.export: parquet is the artifact itself, which generation.final_merge writes"
    elif generation.export and not generation.final_merge:
        exports = ",".join(generation.export)
        yield f"generation.export=[{exports}] needs the artifact, which generation.final_merge=false leaves out"


def _unused(settings: Settings) -> list[str]:
    """Keys that are set and have no effect. They are no errors because verl's configurations have them always."""
    rollout, trainer, ray = settings.actor_rollout_ref.rollout, settings.trainer, settings.ray_kwargs
    is_local, is_verl = (settings.generation.executor == name for name in ("local", "verl"))
    launches = is_verl or (rollout.name in _LAUNCHED and not rollout.server_urls)
    joins = not is_local or rollout.launch.where == "ray"
    unused = {
        "generation.verl_overrides": settings.generation.verl_overrides and not is_verl,
        f"{_ROLLOUT}.agent.num_workers": rollout.agent.num_workers is not None and is_local,
        "ray_kwargs.timeline_json_file": ray.timeline_json_file is not None and is_local,
        "ray_kwargs.worker": ray.worker and is_local,
        "ray_kwargs.ray_init": any(value is not None for value in ray.ray_init.values()) and not joins,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node is not None and not launches,
        "trainer.nnodes": trainer.nnodes > 1 and not launches,
    }
    return [key for key, is_unused in unused.items() if is_unused]
