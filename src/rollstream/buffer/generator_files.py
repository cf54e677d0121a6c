"""Generator files: `*_generator.py` in a folder, one task type each.

A file defines `TASK_TYPE` (a text) and `run_rollout(data: dict)`, and any of the hooks. The server runs it
to look at it and to call its hooks; a rollout runs it again, in the generator's own process.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from rollstream.buffer.hooks import Hooks
from rollstream.buffer.items import MAX_TEXT_ID
from rollstream.errors import ConfigError
from rollstream.user_code import run_file

PATTERN: Final = "*_generator.py"

BUILTIN: Final = "builtin"
"""Stands for the folder of generators that come with the package."""


@dataclass(frozen=True, slots=True)
class GeneratorFile:
    """One generator file that can be used."""

    path: Path
    task_type: str
    hooks: Hooks


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file as it was when it was looked at."""

    content: bytes
    file: GeneratorFile


class GeneratorFiles(Mapping[str, GeneratorFile]):
    """The usable generator files of a folder, by task type.

    Of two files with one task type neither is usable. `refresh` looks again; what a file's hooks were when it
    was last usable stays known to `hooks`, so that a file being edited changes nothing for readers.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """Runs the folder's files; None: there are no generators, only other writers.

        Raises:
            ConfigError: There is no such folder, or no generator file in it. See `check` for the files.
        """
        self.folder = _folder_of(folder)
        self.problems: tuple[str, ...] = ()
        """One for each file that cannot be used: where and why. Empty when all is well."""
        self._seen: dict[Path, _Seen] = {}
        self._files: dict[str, GeneratorFile] = {}
        self._hooks: dict[str, Hooks] = {}
        self.refresh()

    def __getitem__(self, task_type: str) -> GeneratorFile:
        return self._files[task_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def check(self) -> None:
        """Raises where a file cannot be used.

        Raises:
            ConfigError: Names every such file and what is wrong with it.
        """
        if self.problems:
            raise ConfigError("\n".join(self.problems))

    def hooks(self, task_type: str) -> Hooks:
        """A task type's hooks: its file's, as last usable, or the default ones where it never had a file."""
        if (hooks := self._hooks.get(task_type)) is None:
            return Hooks.default(task_type)
        return hooks

    def refresh(self) -> None:
        """Looks at the folder again; files that are new or changed are run, in the caller's thread.

        Raises:
            ConfigError: The folder is gone, or has no generator file.
        """
        if self.folder is None:
            return
        if not self.folder.is_dir():
            raise ConfigError(f"generators: no such folder: {self.folder}")
        paths = sorted(path for path in self.folder.glob(PATTERN) if path.is_file())
        if not paths:
            raise ConfigError(f"generators: no generator file ({PATTERN}) in {self.folder}")
        problems: list[str] = []
        seen: dict[Path, _Seen] = {}
        by_task: dict[str, list[GeneratorFile]] = {}
        for path in paths:
            try:
                seen[path] = self._look_at(path)
            except (ConfigError, OSError) as error:
                problems.append(str(error))
                continue
            by_task.setdefault(seen[path].file.task_type, []).append(seen[path].file)
        for task_type, files in by_task.items():
            if len(files) > 1:
                names = " and ".join(str(file.path) for file in files)
                problems.append(
                    f"generators: {names} have the same TASK_TYPE {task_type!r}; rename all but one"
                )
        files_now = {task_type: files[0] for task_type, files in by_task.items() if len(files) == 1}
        # Replaced, not changed: other threads may be reading.
        self._hooks = self._hooks | {task_type: file.hooks for task_type, file in files_now.items()}
        self._files, self._seen, self.problems = files_now, seen, tuple(problems)

    def _look_at(self, path: Path) -> _Seen:
        content = path.read_bytes()
        if (before := self._seen.get(path)) is not None and before.content == content:
            return before
        return _Seen(content, _checked(run_file(path, key="generators"), path))


def _folder_of(folder: str | Path | None) -> Path | None:
    if folder is None:
        return None
    if folder == BUILTIN:
        return Path(__file__).parent / BUILTIN
    return Path(folder).expanduser().absolute()


def _checked(module: ModuleType, path: Path) -> GeneratorFile:
    task_type: Any = getattr(module, "TASK_TYPE", None)
    if task_type is None:
        raise ConfigError(f'generators: {path} defines no TASK_TYPE; add TASK_TYPE = "…"')
    if not isinstance(task_type, str) or not 0 < len(task_type) <= MAX_TEXT_ID:
        raise ConfigError(f"generators: {path}: TASK_TYPE must be a text, not empty, is {task_type!r:.100}")
    run_rollout: Any = getattr(module, "run_rollout", None)
    if run_rollout is None:
        raise ConfigError(f"generators: {path} defines no run_rollout; add def run_rollout(data: dict)")
    if not callable(run_rollout):
        raise ConfigError(f"generators: {path}: run_rollout must be a function of (data)")
    try:
        inspect.signature(run_rollout).bind({})
    except (TypeError, ValueError) as error:  # ValueError: one of Python's own functions, which does not say
        raise ConfigError(f"generators: {path}: run_rollout must take one argument, data: {error}") from None
    return GeneratorFile(path, task_type, Hooks.of_module(module, task_type=task_type, where=str(path)))
