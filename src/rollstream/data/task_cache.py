"""Task rows on disk: built once, written to JSON Lines, found again by what decides them."""

import hashlib
import inspect
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from rollstream.data.sources import load_class
from rollstream.data.tasks import ReasoningGymTask, Task
from rollstream.data.values import BadRow, canonical_json, to_jsonable
from rollstream.errors import ConfigError, DataError

CACHE_VARIABLE = "ROLLSTREAM_CACHE"
"""Environment variable that names the cache folder, which may be deleted at any time."""
_BUILT_IN: dict[str, type[Task]] = {"reasoning_gym": ReasoningGymTask}
_FORMAT = 2
"""Version of how rows are written; part of the cache key."""

ConfigT = TypeVar("ConfigT", dict[str, Any], DictConfig)


def resolve_tasks_into_config(config: ConfigT) -> ConfigT:
    """Builds the tasks of a run's configuration and puts their files into `data.train_files`.

    Files that are named there stay, before the built ones. Doing it again changes nothing.

    Args:
        config: The run's configuration, a nested dict or `DictConfig` with `train_tasks` and `data`; changed
            in place.

    Returns:
        `config`.

    Raises:
        ConfigError: `train_tasks` is wrong, or needs a package that is not installed.
        DataError: A task cannot be loaded, or an example cannot be used.
    """
    tasks = _plain(config.get("train_tasks"))
    if not tasks:
        return config
    if not isinstance(tasks, list):
        raise ConfigError("train_tasks: want a list of tasks")
    built = get_dataset_paths(tasks)
    given = _plain((config.get("data") or {}).get("train_files"))
    files = [] if given is None else [given] if isinstance(given, str) else list(given)
    files = [file for file in files if file not in built] + built
    if isinstance(config, DictConfig):
        with open_dict(config):
            OmegaConf.update(config, "data.train_files", files)
    else:
        config["data"] = {**(config.get("data") or {}), "train_files": files}
    return config


def get_dataset_paths(
    task_configs: Sequence[Mapping[str, Any] | DictConfig] | ListConfig,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Gives the JSON Lines file of each task, building those that are not cached.

    A file is known by the source of the task's class and by its configuration. Processes that build the same
    task at once do not disturb each other: the first one to finish counts.

    Args:
        task_configs: Entries of `train_tasks`.
        cache_dir: Folder of the files; None takes `$ROLLSTREAM_CACHE/tasks`, else
            `$XDG_CACHE_HOME/rollstream/tasks`, else `~/.cache/rollstream/tasks`.

    Returns:
        One absolute path a task, in order.

    Raises:
        ConfigError: An entry is wrong, or needs a package that is not installed.
        DataError: A task cannot be loaded, an example cannot be used, or the folder cannot be written.
    """
    folder = (_cache_folder() if cache_dir is None else Path(cache_dir)).expanduser().absolute()
    tasks = [make_task(entry) for entry in task_configs]  # all are checked before the first is built
    return [str(_cached(task, folder)) for task in tasks]


def make_task(entry: Any) -> Task:
    """Makes the task of an entry of `train_tasks`.

    Raises:
        ConfigError: The entry is wrong, or its class cannot be loaded.
    """
    entry = _plain(entry)
    if not isinstance(entry, dict):
        raise ConfigError(f"train_tasks: an entry is {entry!r}, want a mapping with a name")
    entry = {str(key): value for key, value in entry.items()}
    custom = entry.get("custom_cls")
    if not isinstance(custom, dict) or not any(custom.values()):
        return _BUILT_IN.get(str(entry.get("name")), Task).from_config(entry)
    setting = f"train_tasks ({entry.get('name', 'no name')}): custom_cls"
    if unknown := sorted(custom.keys() - {"path", "name"}):
        raise ConfigError(f"{setting}: unknown key {unknown[0]!r}; there are path and name")
    cls = load_class(custom.get("path"), custom.get("name"), setting)
    if not issubclass(cls, Task):
        raise ConfigError(f"{setting}: {cls.__name__} is no subclass of rollstream.data.tasks.Task")
    return cls.from_config(entry)


def cache_key(task: Task) -> str:
    """What names a task's file: a hash of its class's source and one of its configuration.

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


def _cache_folder() -> Path:
    if root := os.environ.get(CACHE_VARIABLE):
        return Path(root) / "tasks"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rollstream" / "tasks"


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that is at `path` whole or not at all. Of processes that write it at once the first counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return  # someone may read that one already
        except OSError:  # a file system without hard links
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _cached(task: Task, folder: Path) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(task.config.name)).lstrip(".") or "task"
    path = folder / f"{name}-{cache_key(task)}.jsonl"
    if path.exists():
        return path
    try:
        with written_whole(path) as file:
            rows = 0
            for row in task.rows():
                file.write(orjson.dumps(row) + b"\n")
                rows += 1
            if not rows:
                raise DataError(f"{task.label}: has no rows")
    except OSError as error:
        raise DataError(
            f"{task.label}: cannot be written to the cache folder {folder} ({error}); "
            f"{CACHE_VARIABLE} names another"
        ) from error
    return path
