"""Task rows on disk: built once, written to Parquet, found again by what decides them."""

import contextlib
import hashlib
import inspect
import itertools
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from rollstream.data.reasoning_gym_task import ReasoningGymTask
from rollstream.data.spool import spool_for
from rollstream.data.tasks import Task
from rollstream.data.user_class import load_class
from rollstream.data.values import BadRow, Row, canonical_json, pruned, to_jsonable
from rollstream.errors import ConfigError, DataError

CACHE_VARIABLE = "ROLLSTREAM_CACHE"
"""Environment variable that names rollstream's cache folder; tasks are in `tasks` in it."""

_BUILT_IN: dict[str, type[Task]] = {"reasoning_gym": ReasoningGymTask}
_FORMAT = 1
"""Version of how rows are written; part of the cache key."""
_CHUNK_ROWS = 1024
"""Rows in memory at once, and in a row group: large enough to compress, small even with long prompts."""

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
    """Gives the Parquet file of each task, building those that are not cached.

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
    folder = (Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()).absolute()
    tasks = [make_task(entry) for entry in task_configs]  # all are checked before the first is built
    return [str(_cached(task, folder)) for task in tasks]


def default_cache_dir() -> Path:
    """The folder of built tasks when none is given."""
    if root := os.environ.get(CACHE_VARIABLE):
        return Path(root).expanduser() / "tasks"
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "rollstream" / "tasks"


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
    if isinstance(custom, dict) and any(custom.values()):
        setting = f"train_tasks ({entry.get('name', 'no name')}): custom_cls"
        if unknown := sorted(custom.keys() - {"path", "name"}):
            raise ConfigError(f"{setting}: unknown key {unknown[0]!r}; there are path and name")
        cls = load_class(custom.get("path"), custom.get("name"), setting)
        if not issubclass(cls, Task):
            raise ConfigError(f"{setting}: {cls.__name__} is no subclass of rollstream.data.tasks.Task")
    else:
        cls = _BUILT_IN.get(str(entry.get("name")), Task)
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


def _plain(value: Any) -> Any:
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _cached(task: Task, folder: Path) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(task.config.name)).lstrip(".") or "task"
    path = folder / f"{name}-{cache_key(task)}.parquet"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build(task, path)
        except OSError as error:
            raise DataError(
                f"{task.label}: cannot be written to the cache folder {folder} ({error}); "
                f"{CACHE_VARIABLE} names another"
            ) from error
    return path


def _build(task: Task, path: Path) -> None:
    """Writes a task's rows to `path`, which is there whole or not at all.

    Rows go through a spool file first: only when all are known is the type of each column known.
    """
    with contextlib.ExitStack() as stack:
        with spool_for(task.label, None) as spool:
            kind = None
            for rows in _chunks(task.rows()):
                kind = _unified(kind, rows, task.label)
                spool.writelines(orjson.dumps(row) + b"\n" for row in rows)
        stack.callback(spool.close)
        if kind is None:
            raise DataError(f"{task.label}: has no rows")
        spool.seek(0)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        stack.callback(temporary.unlink, missing_ok=True)
        with temporary.open("xb") as file:
            try:
                _write_parquet(file, kind, map(orjson.loads, spool))
            except pa.ArrowInvalid as error:  # an integer that a float cannot hold, say
                raise _no_table(task.label, error) from error
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)


def _write_parquet(file: Any, kind: pa.StructType, rows: Iterable[Row]) -> None:
    stored_kind = _without_empty_structs(kind)
    assert isinstance(stored_kind, pa.StructType)
    with pq.ParquetWriter(file, pa.schema(list(stored_kind)), compression="zstd") as writer:
        for chunk in _chunks(rows):
            # Parquet has no empty struct: where a key never holds more than {}, the key is left out.
            storable = chunk if stored_kind == kind else [pruned(row) for row in chunk]
            writer.write_batch(pa.RecordBatch.from_struct_array(pa.array(storable, type=stored_kind)))


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:  # another process was first; its file counts, and someone may read it already
        return
    except OSError:  # a file system without hard links
        temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        yield chunk


def _unified(kind: pa.StructType | None, rows: list[Row], label: str) -> pa.StructType:
    """The struct type that holds these rows and those before."""
    try:
        mine = pa.array(rows).type  # infer_type would not notice text among numbers
        schemas = [pa.schema(list(each)) for each in (kind, mine) if each is not None]
        return pa.struct(list(pa.unify_schemas(schemas, promote_options="permissive")))
    except (pa.ArrowException, OverflowError) as error:
        raise _no_table(label, error) from error


def _no_table(label: str, error: Exception) -> DataError:
    return DataError(
        f"{label}: its rows do not fit one table, where a field has one type in all rows ({error}); "
        "make such a field text (make_row of a Task subclass can)"
    )


def _without_empty_structs(kind: pa.DataType) -> pa.DataType | None:
    """The type without fields whose type is a struct without fields; None if nothing is left."""
    if isinstance(kind, pa.StructType):
        kept = [
            (item.name, inner) for item in kind if (inner := _without_empty_structs(item.type)) is not None
        ]
        return pa.struct(kept) if kept else None
    if isinstance(kind, pa.ListType):
        item_kind = _without_empty_structs(kind.value_type)
        return pa.list_(item_kind) if item_kind is not None else pa.list_(pa.null())
    return kind
