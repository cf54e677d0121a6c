"""Task rows on disk: built once, written to JSON Lines, found again by what decides them."""

import hashlib
import inspect
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import orjson
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from rollstream.data.sources import load_class
from rollstream.data.tasks import ReasoningGymTask, Task
from rollstream.data.values import BadRow, canonical_json, to_jsonable
from rollstream.errors import ConfigError, DataError

CACHE_VARIABLE = "ROLLSTREAM_CACHE"
"""Environment variable that names the cache folder, which may be deleted at any time."""
_FORMAT = 2
"""Version of how rows are written; part of the cache key."""

ConfigT = TypeVar("ConfigT", dict[str, Any], DictConfig)


def resolve_tasks_into_config(config: ConfigT) -> ConfigT:
    """Builds the tasks of a run's configuration and puts their files into `data.train_files`.

    Files that are named there stay, before the built ones. Doing it again changes nothing.

    Args:
        config: The run's configuration, a nested dict or `DictConfig` with `train_tasks` and `data`; changed
            in place, and returned.

    Raises:
        ConfigError: `train_tasks` is wrong, or needs a package that is not installed.
        DataError: A task cannot be loaded, or an example cannot be used.
    """
    _build_source_tasks(config)
    tasks = _plain(config.get("train_tasks"))
    if not tasks:
        return config
    if not isinstance(tasks, list):
        raise ConfigError("train_tasks: want a list of tasks")
    built = get_dataset_paths(tasks)
    named = _plain((config.get("data") or {}).get("train_files")) or []
    files = [file for file in ([named] if isinstance(named, str) else named) if file not in built] + built
    if isinstance(config, DictConfig):
        with open_dict(config):
            OmegaConf.update(config, "data.train_files", files)
    else:
        config["data"] = {**(config.get("data") or {}), "train_files": files}
    return config


def _build_source_tasks(config: dict[str, Any] | DictConfig) -> None:
    """Has the tasks of `data.sources` built, and their files in their place."""
    sources = _plain((config.get("data") or {}).get("sources"))
    for at, source in enumerate(sources if isinstance(sources, list) else ()):
        if isinstance(source, dict) and source.get("task") is not None and not source.get("train_files"):
            sources[at] = {**source, "task": None, "train_files": get_dataset_paths([source["task"]])}
            config["data"]["sources"] = sources


def get_dataset_paths(
    task_configs: Sequence[Mapping[str, Any] | DictConfig] | ListConfig,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Gives the JSON Lines file of each task, an absolute path, building those that are not cached.

    A file is known by the source of the task's class and by its configuration. Processes that build the same
    task at once do not disturb each other: the first one to finish counts.

    Args:
        task_configs: Entries of `train_tasks`.
        cache_dir: Folder of the files; None takes `$ROLLSTREAM_CACHE/tasks`, else
            `$XDG_CACHE_HOME/rollstream/tasks`, else `~/.cache/rollstream/tasks`.

    Raises:
        ConfigError: An entry is wrong, or needs a package that is not installed.
        DataError: A task cannot be loaded, an example cannot be used, or the folder cannot be written.
    """
    if cache_dir is None and (root := os.environ.get(CACHE_VARIABLE)):
        cache_dir = Path(root) / "tasks"
    folder = Path(cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rollstream" / "tasks")
    tasks = [make_task(entry) for entry in task_configs]  # all are checked before the first is built
    return [str(_cached(task, folder.expanduser().absolute())) for task in tasks]


def make_task(entry: Any) -> Task:
    """Makes the task of an entry of `train_tasks`.

    Raises:
        ConfigError: The entry is wrong, or its class cannot be loaded.
    """
    entry = _plain(entry)
    if not isinstance(entry, dict):
        raise ConfigError(f"train_tasks: an entry is {entry!r}, want a mapping with a name")
    custom = entry.get("custom_cls")
    if not isinstance(custom, dict) or not any(custom.values()):
        return (ReasoningGymTask if entry.get("name") == "reasoning_gym" else Task).from_config(entry)
    setting = f"train_tasks ({entry.get('name', 'no name')}): custom_cls"
    if unknown := sorted(custom.keys() - {"path", "name"}):
        raise ConfigError(f"{setting}: unknown key {unknown[0]!r}; there are path and name")
    cls = load_class(custom.get("path"), custom.get("name"), setting)
    if not issubclass(cls, Task):
        raise ConfigError(f"{setting}: {cls.__name__} is no subclass of rollstream.data.tasks.Task")
    return cls.from_config(entry)


def cache_key(task: Task) -> str:
    """The name of a task's file: a hash of its class's source and one of its configuration.

    The source is that of the files its class and the classes it derives from are in. The configuration counts
    without the path of `custom_cls`, and with the task's `dependencies()`.

    Raises:
        ConfigError: The configuration holds what JSON cannot.
    """
    source = hashlib.blake2b(b"%d" % _FORMAT, digest_size=8)
    for file in dict.fromkeys(inspect.getfile(cls) for cls in type(task).__mro__[:-1]):
        source.update(Path(file).read_bytes())
    settings = {key: getattr(task.config, key) for key in task.config_keys()}
    settings["custom_cls"] = type(task).__name__
    try:
        canonical = canonical_json(to_jsonable([settings, task.dependencies()]))
    except BadRow as error:
        raise ConfigError(f"{task.label}: {error}") from error
    return f"{source.hexdigest()}-{hashlib.blake2b(canonical, digest_size=8).hexdigest()}"


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _cached(task: Task, folder: Path) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(task.config.name)).lstrip(".") or "task"
    path = folder / f"{name}-{cache_key(task)}.jsonl"
    if path.exists():
        return path
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in task.rows())
            if not file.tell():
                raise DataError(f"{task.label}: has no rows")
            file.flush()
            os.fsync(file.fileno())
        try:
            with suppress(FileExistsError):  # someone may read that file already
                path.hardlink_to(temporary)
        except OSError:  # a file system without hard links
            temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{task.label}: cannot be written to the cache folder {folder} ({error}); {CACHE_VARIABLE} names another"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path
