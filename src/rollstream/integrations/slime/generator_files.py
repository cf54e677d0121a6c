"""The generator files of some folders, by the task that each is for, and the calls of their hooks."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollstream.buffer.groups import HookError
from rollstream.errors import ConfigError
from rollstream.integrations.slime.hook_process import GeneratorFile, HookProcess

PATTERN: Final = "*_generator.py"


class GeneratorFiles:
    """Finds generator files, and calls their hooks, each file's in a process of its own.

    A folder `builtin` is that of the generators that come with the package. Calls raise `HookError`, and
    `KeyError` if the task type never had a file.
    """

    def __init__(self, folders: Sequence[str | Path], seconds: float = 60.0) -> None:
        self.files: Mapping[str, GeneratorFile] = {}
        """The files that can be used now, by task type."""
        self.problems: tuple[str, ...] = ()
        """Which files cannot be used, and why."""
        self._folders = [_folder_of(folder) for folder in folders]
        self._seconds = seconds
        self._looked: dict[Path, GeneratorFile] = {}
        self._last_usable: dict[str, GeneratorFile] = {}
        self._processes: dict[Path, HookProcess] = {}
        self._refreshing = asyncio.Lock()

    def overridden(self, task_type: str) -> frozenset[str]:
        """Names of a task type's own hooks: those of its file when it could last be used."""
        return self._last_usable[task_type].overridden if task_type in self._last_usable else frozenset()

    async def refresh(self, again: bool = False) -> None:
        """Looks at the folders again, and runs files that are new or changed.

        Args:
            again: Also those that could not be used, for what they import may have changed.

        Raises:
            ConfigError: A folder is gone, or has no generator file.
        """
        async with self._refreshing:
            paths = dict.fromkeys(path for folder in self._folders for path in _files_in(folder))
            looked = await asyncio.gather(*(self._look(path, again) for path in paths))
            self._looked = dict(zip(paths, looked, strict=True))
            problems = [file.problem for file in looked if file.problem]
            usable = {file.task_type: file for file in looked if not file.problem}
            for task_type in [*usable]:
                same = [file for file in looked if file.task_type == task_type]
                if len(same) > 1:
                    del usable[task_type]
                    names = " and ".join(str(file.path) for file in same)
                    fault = f"have the same TASK_TYPE {task_type!r}; rename all but one"
                    problems.append(f"generators: {names} {fault}")
            self.files, self.problems = usable, tuple(problems)
            self._last_usable |= usable

    async def call(self, call: str, task_type: str, *values: Any) -> Any:
        """See `rollstream.buffer.groups.Hooks`, and `HookProcess.call`."""
        file = self._last_usable[task_type]
        return await self._processes[file.path].call(call, file, *values)

    async def close(self) -> None:
        """Ends the processes at once, whatever they do. Calls that wait raise `RollstreamError`."""
        await asyncio.gather(*(process.close() for process in self._processes.values()))

    async def _look(self, path: Path, again: bool) -> GeneratorFile:
        file = self._looked.get(path)
        try:
            source = path.read_bytes()
            # A file that cannot be used is not run again for nothing: one that hangs takes its whole time limit.
            if file is not None and file.source == source and not (file.problem and again):
                return file
            file = GeneratorFile(path, source)
            process = self._processes.setdefault(path, HookProcess(self._seconds))
            task_type, hooks = await process.call("look", file)
        except (HookError, OSError) as error:
            return GeneratorFile(path, b"" if file is None else file.source, problem=str(error))
        return GeneratorFile(path, source, task_type, frozenset(hooks))


def _folder_of(folder: str | Path) -> Path:
    if str(folder) == "builtin":
        return Path(__file__).parent / "builtin"
    return Path(folder).expanduser().absolute()


def _files_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"generators: no such folder: {folder}")
    if paths := sorted(path for path in folder.glob(PATTERN) if path.is_file()):
        return paths
    raise ConfigError(f"generators: no generator file ({PATTERN}) in {folder}")
