"""Tasks: what `train_tasks` lists, turned into verl-style rows.

`Task` loads a dataset by `datasets.load_dataset` and makes a prompt of each of its rows. A subclass in a file
of yours, named by `custom_cls`, changes any of the steps. `task_cache` writes the rows to a file, once.
"""

import dataclasses
import hashlib
import importlib.metadata
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import orjson
from msgspec import Meta

from rollstream.data.sources import MISSING_EXTRA
from rollstream.data.values import BadRow, Row, described, to_jsonable
from rollstream.errors import ConfigError, DataError, unknown_name
from rollstream.trajectory import Message


class PromptTemplate(string.Formatter):
    r"""Text with `{column}` where a column's value goes, as in `str.format`.

    `{column[key]}` reaches into a mapping or list, `{column:.2f}` formats. Literal braces are doubled:
    `\boxed{{}}`. Braces in the data are just text.

    Raises:
        ConfigError: Braces that are no field; named by `setting`.
    """

    def __init__(self, text: str, setting: str) -> None:
        self._text = text
        try:
            names = [name for _, name, _, _ in self.parse(text) if name is not None]
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}; write literal braces twice: {{{{ and }}}}") from error
        for name in names:
            if not name or name.isdigit():
                raise ConfigError(f"{setting}: {{{name}}} names no column; write literal braces twice")

    def render(self, columns: Mapping[str, Any]) -> str:
        """Fills the template in. Raises `BadRow`: a column is missing or null, or cannot be formatted so."""
        try:
            return self.vformat(self._text, (), columns)
        except (LookupError, TypeError, ValueError) as error:
            raise BadRow(
                f"the template cannot be filled in ({error}); columns: {', '.join(columns)}"
            ) from error

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """The value of a field; no attributes are looked up, which `str.format` would do."""
        root, _, rest = (field_name, "", "") if field_name in kwargs else field_name.partition("[")
        value = kwargs[root]
        for key in rest.rstrip("]").split("][") if rest else ():
            value = value[int(key) if isinstance(value, list | tuple) else key]
        if value is None:
            raise ValueError(f"{field_name} is null")
        return value, root


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """One entry of `train_tasks`. A `Task` subclass with keys of its own derives from this class."""

    name: Annotated[str, Meta(min_length=1)]
    """`reasoning_gym` is the built-in task."""
    loading_params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `datasets.load_dataset`: path, name, split (default: train), revision, data_files, ..."""
    prompt_format: Literal["template", "chat_messages"] = "template"
    """`template`: the prompt is `prompt_template`, filled in. `chat_messages`: a column has the messages."""
    prompt_template: str | None = None
    """Text with `{column}`, `{column[key]}`, `{column:.2f}`; literal braces are doubled."""
    system_prompt: str | None = None
    """Put before the prompt as a system message; replaces one that is there."""
    chat_messages_field: str = "messages"
    """The column with the messages. Assistant messages at their end are left out: the model speaks there."""
    ground_truth_field: str | None = None
    """The column with what the reward compares with."""
    data_source: str | None = None
    """Chooses the reward; None takes `name`."""
    extra_fields: list[str] = field(default_factory=list)
    """Columns that go into `extra_info`."""
    custom_cls: dict[str, Any] | None = None
    """`path` and `name` of a `Task` subclass."""
    max_samples: Annotated[int, Meta(ge=1)] | None = None
    """Rows at most, the first ones; None takes all."""


class Task:
    """Makes rows for one entry of `train_tasks`.

    A subclass overrides what it wants to change; each step calls the next:

    - `load()`: where examples come from;
    - `make_row(example, position)`: one row, or None to leave the example out;
    - `make_prompt(example)`, `make_ground_truth(example)`, `make_extra_info(example)`: its parts;
    - `dependencies()`: what else decides the rows, for the cache;
    - `config_type`: a dataclass derived from `TaskConfig`, for keys of its own.

    Errors that a subclass raises in these are reported with the task and the example. The rows must depend
    on the configuration, the class and `dependencies()` alone: they are built once and then cached.

    Args:
        config: The entry, of type `config_type`.

    Raises:
        ConfigError: The entry is wrong.
    """

    config_type: ClassVar[type[TaskConfig]] = TaskConfig

    def __init__(self, config: TaskConfig) -> None:
        self.config: Any = config
        self._template: PromptTemplate | None = None
        if config.prompt_template is not None:
            if config.prompt_format != "template":
                raise ConfigError(f"{self.label}: prompt_template needs prompt_format: template")
            self._template = PromptTemplate(config.prompt_template, f"{self.label}: prompt_template")

    @classmethod
    def config_keys(cls) -> list[str]:
        """The keys an entry of this task may have."""
        return [item.name for item in dataclasses.fields(cls.config_type)]

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> "Task":
        """Makes the task of an entry of `train_tasks`.

        Raises:
            ConfigError: An unknown key, a missing one, or a wrong value.
        """
        label = f"train_tasks ({given.get('name', 'no name')})"
        for key in given:
            if key not in cls.config_keys():
                raise ConfigError(f"{label}: {unknown_name('key', key, cls.config_keys())}")
        try:
            return cls(msgspec.convert(dict(given), cls.config_type))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{label}: {error}") from error

    @property
    def label(self) -> str:
        """The task's name in messages."""
        return f"train_tasks ({self.config.name})"

    @property
    def data_source(self) -> str:
        """The rows' `data_source`."""
        return self.config.data_source or self.config.name  # type: ignore[no-any-return]

    def dependencies(self) -> dict[str, Any]:
        """What else decides the rows: they are built anew when it changes.

        By default the content of local files that `loading_params` names. A dataset on the Hub is not looked
        at: pin it by `revision`.
        """
        return {"files": _local_files(self.config.loading_params)}

    def load(self) -> Iterable[Mapping[str, Any]]:
        """Loads the examples.

        Raises:
            ConfigError: No `loading_params`, or `datasets` is not installed.
            DataError: They cannot be loaded, or a split must be chosen.
        """
        params = self.config.loading_params
        if not params:
            raise ConfigError(f"{self.label}: needs loading_params, the arguments of datasets.load_dataset")
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(f"{self.label}: needs the package datasets: {MISSING_EXTRA}") from error
        try:
            loaded: Any = datasets.load_dataset(**params)
        except Exception as error:
            raise DataError(f"{self.label}: datasets.load_dataset(**{params}) failed: {error}") from error
        if isinstance(loaded, dict):
            if "train" not in loaded:
                raise DataError(f"{self.label}: loading_params.split must be one of {', '.join(loaded)}")
            loaded = loaded["train"]
        examples: Iterable[Mapping[str, Any]] = loaded
        return examples

    def make_row(self, example: Mapping[str, Any], position: int) -> Row | None:
        """Makes a verl-style row of the example at a position, from 0, or None to leave it out."""
        return {
            "data_source": self.data_source,
            "prompt": self.make_prompt(example),
            "reward_model": {"style": "rule", "ground_truth": self.make_ground_truth(example)},
            "extra_info": {"index": position, **self.make_extra_info(example)},
        }

    def make_prompt(self, example: Mapping[str, Any]) -> list[Message]:
        """Makes the messages of the prompt, by `prompt_format`."""
        if self.config.prompt_format == "chat_messages":
            messages = self._chat_messages(example)
        elif self._template is None:
            raise ConfigError(f"{self.label}: needs a prompt_template, text with {{column}} fields")
        else:
            messages = [{"role": "user", "content": self._template.render(example)}]
        if self.config.system_prompt is None:
            return messages
        rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
        return [{"role": "system", "content": self.config.system_prompt}, *rest]

    def make_ground_truth(self, example: Mapping[str, Any]) -> Any:
        """Gives what the reward compares with: `ground_truth_field`."""
        name = self.config.ground_truth_field
        return None if name is None else _column(example, name, "ground_truth_field")

    def make_extra_info(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """Gives what else the reward may want: `extra_fields`."""
        return {name: _column(example, name, "extra_fields") for name in self.config.extra_fields}

    def rows(self) -> Iterator[Row]:
        """Makes the rows, one after the other.

        Raises:
            DataError: An example cannot be used; names the task and the example.
        """
        where = "loading failed"
        made = 0
        try:
            for position, example in enumerate(self.load()):
                where = f"example {position}"
                if (row := self.make_row(example, position)) is not None:
                    yield to_jsonable(row)
                    made += 1
                if made == self.config.max_samples:
                    return
        except (ConfigError, DataError):
            raise
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, BadRow) else f"{type(error).__name__}: "
            raise DataError(f"{self.label}, {where}: {kind}{error}") from error

    def _chat_messages(self, example: Mapping[str, Any]) -> list[Message]:
        name = self.config.chat_messages_field
        messages = _column(example, name, "chat_messages_field")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRow(f"column {name!r} is {described(messages)}, want a list of messages")
        end = len(messages)
        while end and messages[end - 1].get("role") == "assistant":
            end -= 1
        if not end:
            raise BadRow(f"column {name!r} has no message that is not the assistant's")
        return [
            {key: item for key, item in message.items() if item is not None} for message in messages[:end]
        ]


def _column(example: Mapping[str, Any], name: str, setting: str) -> Any:
    if name not in example:
        raise BadRow(f"{setting}: {unknown_name('column', name, example)}")
    return example[name]


def _local_files(value: Any) -> dict[str, str]:
    """Digests of the local files and folders that a value names, at any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return {name: digest for item in value for name, digest in _local_files(item).items()}
    if not isinstance(value, str) or not value:
        return {}
    path = Path(value).expanduser()
    digest = hashlib.blake2b(digest_size=16)
    try:
        if path.is_file():
            with path.open("rb") as opened:
                return {value: hashlib.file_digest(opened, lambda: digest).hexdigest()}
        for file in sorted(path.rglob("*")) if path.is_dir() else ():
            digest.update(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    except (OSError, ValueError):  # not a name of a file, or not to be read: load_dataset will say
        return {}
    return {value: digest.hexdigest()} if path.is_dir() else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymConfig(TaskConfig):
    """An entry `{name: reasoning_gym, dataset: chain_sum, size: 500, seed: 1, config: {...}}`."""

    dataset: str
    """Name of the reasoning-gym dataset: chain_sum, countdown, ..."""
    size: Annotated[int, Meta(ge=1)] = 500
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    """The dataset's own settings: `{min_terms: 2, max_terms: 2}`."""
    prompt_template: str | None = "{question}"


class ReasoningGymTask(Task):
    """Rows with all that reasoning-gym's `score_answer` needs.

    `data_source` is `reasoning_gym/<dataset>`; `extra_info` has `entry` (question, answer and metadata, as
    JSON text) and `config` (the dataset's settings, as JSON text); the ground truth is the entry's answer.
    """

    config_type: ClassVar[type[TaskConfig]] = ReasoningGymConfig

    @classmethod
    def config_keys(cls) -> list[str]:
        return [
            "name", "dataset", "size", "seed", "config", "system_prompt", "prompt_template", "max_samples",
            "custom_cls",
        ]  # fmt: skip

    @property
    def data_source(self) -> str:
        return f"reasoning_gym/{self.config.dataset}"

    def dependencies(self) -> dict[str, Any]:
        try:
            return {"reasoning-gym": importlib.metadata.version("reasoning-gym")}
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"{self.label}: needs the package reasoning-gym: {MISSING_EXTRA}") from error

    def load(self) -> Iterable[Mapping[str, Any]]:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(f"{self.label}: needs the package reasoning-gym: {MISSING_EXTRA}") from error
        config = self.config
        if config.dataset not in DATASETS:
            raise ConfigError(f"{self.label}: {unknown_name('dataset', config.dataset, DATASETS)}")
        try:
            problems: Any = reasoning_gym.create_dataset(
                config.dataset, size=config.size, seed=config.seed, **config.config
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"{self.label}: {config.dataset} refuses its config: {error}") from error
        first = problems[0]
        stored = orjson.loads(_json_text(first))  # keys became text, tuples lists
        if isinstance(answer := first.get("answer"), str):
            score, stored_score = problems.score_answer(answer, first), problems.score_answer(answer, stored)
            if score != stored_score:
                raise DataError(
                    f"{self.label}: its problems cannot be stored: the first one's answer scores {score}, "
                    f"but {stored_score} after the problem went through JSON"
                )
        return (problems[i] for i in range(config.size))

    def make_ground_truth(self, example: Mapping[str, Any]) -> Any:
        return example["answer"]

    def make_extra_info(self, example: Mapping[str, Any]) -> dict[str, Any]:
        return {"entry": _json_text(dict(example)), "config": _json_text(self.config.config)}


def _json_text(value: dict[str, Any]) -> str:
    return orjson.dumps(to_jsonable(value)).decode()
