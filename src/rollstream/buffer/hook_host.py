"""The child process that runs users' generator files and calls their hooks, and its client in the server.

A message on the child's stdin and stdout is 4 bytes with its length, and msgpack. A request is followed by a
second message, the source of the file that it needs, so a new child can go on where another one ended.

The time limit is faulthandler's, which also works while a hook holds the GIL: it writes where every thread is
and ends the process. That text, or the one of a fatal signal, comes where a length is expected. Read as a
length it is more than `_MAX_BYTES`, which no message has.
"""

import asyncio
import contextlib
import faulthandler
import hashlib
import inspect
import linecache
import os
import queue
import re
import signal
import sys
import threading
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

import msgspec
import orjson

from rollstream.buffer.groups import Finished, GroupSettings, ItemDict, Verdict
from rollstream.buffer.hooks import FINISHING, HookError, Hooks
from rollstream.buffer.items import (
    MAX_TEXT,
    Encoding,
    InstanceId,
    Item,
    ItemError,
    dump_item,
    load_item,
    parse_item,
    with_uid,
)
from rollstream.errors import ConfigError, RollstreamError

PATTERN: Final = "*_generator.py"

_MAX_BYTES: Final = 1 << 30

_TIMEOUT: Final = "Timeout"
"""How faulthandler's text begins after the time limit."""

_SLACK_S: Final = 30.0
"""For the start of a child and for large messages, beside the limit of a call. Then the child is stuck."""

_PART: Final = 1 << 20
"""Bytes that are written at once: asyncio copies what a pipe does not take."""

_CALLED: Final[Mapping[str, frozenset[str]]] = {
    "judge": frozenset({"is_valid_group"}),
    "finish": FINISHING,
    "meta_info": frozenset({"get_group_data_meta_info"}),
}
"""The hooks that a call may run."""

Stored = Sequence[tuple[Encoding, bytes]]
"""The items of a group."""


class GeneratorFile(msgspec.Struct, frozen=True):
    """A generator file that can be used."""

    path: Path
    task_type: str
    overridden: frozenset[str]
    """Names of its hooks."""
    source: bytes = b""


class _Request(msgspec.Struct):
    call: str
    path: str
    settings: GroupSettings = GroupSettings()
    groups: Sequence[tuple[InstanceId, Stored]] = ()
    timed_out: bool = False
    encoding: Encoding = "json"


class _Reply(msgspec.Struct):
    result: Any = None
    error: tuple[str, str, str] | None = None
    """The parts of a HookError."""
    item_error: tuple[str, str] | None = None


class HookHost:
    """Looks at the generator files of some folders and calls their hooks, in a child process, one at a time.

    `builtin` is the folder of the generators that come with the package. A call raises `HookError` if a hook
    fails, takes longer than `seconds` or ends the process, and `KeyError` if the task type never had a file.
    The child is started when it is needed, and again when it has ended.
    """

    def __init__(self, folders: Sequence[str | Path], seconds: float = 60.0) -> None:
        self.files: Mapping[str, GeneratorFile] = {}
        """By task type, those that can be used now."""
        self.problems: tuple[str, ...] = ()
        """One for each file that cannot be used: where and why."""
        self._folders = [_folder_of(folder) for folder in folders]
        self._seconds = seconds
        self._looked: dict[Path, GeneratorFile] = {}
        self._failed: dict[Path, tuple[bytes, str]] = {}
        """Source and problem of files that could not be used."""
        self._last_usable: dict[str, GeneratorFile] = {}
        self._refreshing = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[Any] | None = None
        self._process: Process | None = None
        self._closed = False

    @property
    def task_types(self) -> list[str]:
        """Those whose file could be used, now or earlier."""
        return list(self._last_usable)

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
            looked: dict[Path, GeneratorFile] = {}
            usable: dict[str, GeneratorFile] = {}
            problems: list[str] = []
            failed: dict[Path, tuple[bytes, str]] = {}
            for path in dict.fromkeys(path for folder in self._folders for path in _files_in(folder)):
                try:
                    source = path.read_bytes()
                    known, problem = self._failed.get(path, (None, ""))
                    if known == source and not again:  # one that hangs would take its whole time limit
                        failed[path] = source, problem
                        problems.append(problem)
                        continue
                    file = self._looked.get(path)
                    if file is None or file.source != source:
                        file = GeneratorFile(path, "", frozenset(), source)
                        task_type, hooks = await self._call("look", file)
                        file = GeneratorFile(path, task_type, frozenset(hooks), source)
                    looked[path] = file
                except HookError as error:
                    failed[path] = source, str(error)
                    problems.append(str(error))
                except OSError as error:
                    problems.append(str(error))
            for task_type in dict.fromkeys(file.task_type for file in looked.values()):
                files = [file for file in looked.values() if file.task_type == task_type]
                if len(files) == 1:
                    usable[task_type] = files[0]
                else:
                    names = " and ".join(str(file.path) for file in files)
                    fault = f"have the same TASK_TYPE {task_type!r}; rename all but one"
                    problems.append(f"generators: {names} {fault}")
            self.files, self.problems, self._looked = usable, tuple(problems), looked
            self._failed = failed
            self._last_usable |= usable

    async def judge(
        self, task_type: str, instance_id: InstanceId, items: Stored, settings: GroupSettings, timed_out: bool
    ) -> Verdict:
        """`Hooks.judge` of a group."""
        file = self._last_usable[task_type]
        return Verdict(*await self._call("judge", file, settings, [(instance_id, items)], timed_out))

    async def finish(
        self,
        task_type: str,
        instance_id: InstanceId,
        items: Stored,
        settings: GroupSettings,
        timed_out: bool,
        encoding: Encoding,
    ) -> Finished:
        """`Hooks.finish` of a group. No items: too few passed the filter."""
        values = settings, [(instance_id, items)], timed_out, encoding
        return Finished(*await self._call("finish", self._last_usable[task_type], *values))

    async def meta_info(
        self, task_type: str, groups: Sequence[tuple[InstanceId, Stored]], settings: GroupSettings
    ) -> dict[str, Any]:
        """`Hooks.meta_info` of the groups of a read. Its keys are text."""
        meta: bytes = await self._call("meta_info", self._last_usable[task_type], settings, groups)
        return dict(orjson.loads(meta))

    async def parse(self, body: bytes, encoding: Encoding) -> Item:
        """`parse_item` for a large body, which would hold the server's GIL for long. Raises `ItemError`."""
        file = GeneratorFile(Path("items"), "", frozenset(), body)
        found, has_uid = await self._call("parse", file, GroupSettings(), (), False, encoding)
        item = msgspec.convert(found, Item)
        body = body if has_uid else with_uid(body, item.uid, encoding)
        return msgspec.structs.replace(item, body=body)

    async def close(self) -> None:
        """Ends the child at once, whatever it does. Calls that wait raise `RollstreamError`."""
        self._closed = True
        await self._end()

    async def _call(self, call: str, file: GeneratorFile, *values: Any) -> Any:
        await self._turn.acquire()
        # An exchange goes to its end even if the caller is cancelled, so that the wire stays in order.
        self._task = asyncio.create_task(
            self._exchange(
                _Request(call, str(file.path), *values),
                file,
                file.overridden & _CALLED.get(call, frozenset()),
            )
        )
        self._task.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(self._task)

    async def _exchange(self, request: _Request, file: GeneratorFile, hooks: frozenset[str]) -> Any:
        message = msgspec.msgpack.encode(request)
        if len(message) > _MAX_BYTES:
            raise HookError(f"{file.path}: a group of {len(message)} bytes is too large for hooks")
        fresh = False
        while not self._closed:
            if self._process is None:
                self._process, fresh = await _start(self._seconds), True
                continue  # closed meanwhile?
            reply = await _ask(self._process, message, file.source, self._seconds + _SLACK_S)
            if isinstance(reply, _Reply):
                if reply.error is not None:
                    raise HookError(*reply.error)
                if reply.item_error is not None:
                    raise ItemError(*reply.item_error)
                return reply.result
            how = await self._end()
            if self._closed or not (fresh or reply.startswith(_TIMEOUT)):
                continue  # an older child may have ended before this call: it is made again in a new one
            # faulthandler lists the innermost function first.
            found = [name for name in re.findall(r" in (\w+)$", reply, re.MULTILINE) if name in hooks]
            hook = found[0] if found else ", ".join(sorted(hooks))
            where = f"{file.path}: {hook}" if hook else f"generators: {file.path}"
            if reply.startswith(_TIMEOUT):
                raise HookError(f"{where} did not return within {self._seconds:g} s", hook, reply)
            raise HookError(f"{where}: the process of the hooks ended ({how})", hook, reply)
        await self._end()
        raise RollstreamError("no hooks are called any more: the server is ending")

    async def _end(self) -> str:
        """Kills the child and what it started; says how it ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # something that left its group may hold its pipes open
            await asyncio.wait_for(process.wait(), 0.5)
        code = process.returncode
        if code is None or code >= 0:
            return f"exit status {code}"
        return f"killed by {next((one.name for one in signal.Signals if one == -code), -code)}"


def _folder_of(folder: str | Path) -> Path:
    return (
        Path(__file__).parent / "builtin"
        if str(folder) == "builtin"
        else Path(folder).expanduser().absolute()
    )


def _files_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"generators: no such folder: {folder}")
    if paths := sorted(path for path in folder.glob(PATTERN) if path.is_file()):
        return paths
    raise ConfigError(f"generators: no generator file ({PATTERN}) in {folder}")


async def _start(seconds: float) -> Process:
    env = {name: value for name, value in os.environ.items() if name != "ROLLSTREAM_BUFFER_TOKEN"}
    words = (sys.executable, "-u", "-m", __name__, str(seconds))
    return await asyncio.create_subprocess_exec(
        *words, stdin=PIPE, stdout=PIPE, env=env, start_new_session=True, limit=1 << 20
    )


async def _ask(process: Process, message: bytes, source: bytes, seconds: float) -> _Reply | str:
    """The reply, or what faulthandler wrote instead; "" if the child ended without a word."""
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            for one in (message, source):
                process.stdin.write(len(one).to_bytes(4))
                for start in range(0, len(one), _PART):
                    process.stdin.write(memoryview(one)[start : start + _PART])
                    await process.stdin.drain()
            head = await process.stdout.readexactly(4)
            if (size := int.from_bytes(head)) > _MAX_BYTES:
                return (head + await process.stdout.read()).decode(errors="replace")
            return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=_Reply)
    except TimeoutError:
        return _TIMEOUT
    except (ConnectionError, asyncio.IncompleteReadError, msgspec.DecodeError):
        return ""


# -- in the child


def main() -> None:
    """Serves the calls of a HookHost, on stdin and stdout."""
    requests_in, replies_out = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # users' code reads nothing,
    os.dup2(2, 1)  # and what it prints goes to the server's stderr
    faulthandler.enable(replies_out)
    waiting: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(requests_in, "rb"), waiting), daemon=True).start()
    loaded: dict[tuple[str, bytes], tuple[str, Hooks]] = {}
    with os.fdopen(replies_out, "wb") as wire:
        while True:
            message, source = waiting.get()
            request = msgspec.msgpack.decode(message, type=_Request)
            faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True, file=replies_out)
            reply = _reply(request, source, loaded)
            del message, source, request  # they may be large
            faulthandler.cancel_dump_traceback_later()
            wire.write(len(reply).to_bytes(4))
            wire.write(reply)
            wire.flush()


def _receive(wire: IO[bytes], waiting: "queue.SimpleQueue[tuple[bytes, bytes]]") -> None:
    """Ends the process when the server is gone, also while a hook runs."""
    try:
        while True:
            waiting.put((_read(wire), _read(wire)))
    finally:
        os._exit(0)


def _read(wire: IO[bytes]) -> bytes:
    head = wire.read(4)
    message = wire.read(size := int.from_bytes(head))
    if len(head) < 4 or len(message) < size:
        raise EOFError
    return message


def _reply(request: _Request, source: bytes, loaded: dict[tuple[str, bytes], tuple[str, Hooks]]) -> bytes:
    try:
        if request.call == "parse":
            item = parse_item(source, request.encoding)
            result: Any = msgspec.structs.replace(item, body=b""), item.body is source
        else:
            if (key := (request.path, source)) not in loaded:
                loaded[key] = _load(Path(request.path), source)
            result = _result(request, *loaded[key])
        reply = msgspec.msgpack.encode(_Reply(result))
        if len(reply) > _MAX_BYTES:
            raise HookError(f"{request.path}: the answer has {len(reply)} bytes, which is too much")
    except ItemError as error:
        return msgspec.msgpack.encode(_Reply(item_error=(error.message, error.where)))
    except HookError as error:
        return msgspec.msgpack.encode(_Reply(error=(str(error), error.hook, error.traceback)))
    except BaseException as error:
        where = "" if isinstance(error, ConfigError) else f"{request.path}: {type(error).__name__}: "
        trace = "".join(traceback.format_exception(error))
        return msgspec.msgpack.encode(_Reply(error=(f"{where}{error}", "", trace)))
    return reply


def _result(request: _Request, task_type: str, hooks: Hooks) -> Any:
    if request.call == "look":
        return task_type, sorted(hooks.overridden)
    groups: dict[InstanceId, list[ItemDict]] = {}
    for instance_id, items in request.groups:
        groups.setdefault(instance_id, []).extend(load_item(body, encoding) for encoding, body in items)
    if request.call == "meta_info":
        meta = hooks.meta_info(groups, request.settings)
        return orjson.dumps(meta, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    ((instance_id, given),) = groups.items()
    if request.call == "judge":
        return hooks.judge((instance_id, given), request.settings, timed_out=request.timed_out)
    uids = [item["uid"] for item in given]  # before the hooks, which may change the items
    finished = hooks.finish((instance_id, given), request.settings, timed_out=request.timed_out)
    kept = {item["uid"] for item in finished}
    try:
        bodies = [dump_item(item, request.encoding) for item in finished]
    except ItemError as error:
        names = ", ".join(sorted(hooks.overridden & FINISHING))
        raise HookError(f"{request.path}: {names} gave back an item that {error}", names) from error
    return bodies, [uid for uid in uids if uid not in kept]


def _load(path: Path, source: bytes) -> tuple[str, Hooks]:
    module = _run(path, source)
    task_type: Any = getattr(module, "TASK_TYPE", None)
    run_rollout: Any = getattr(module, "run_rollout", None)
    if task_type is None:
        raise ConfigError(f'generators: {path} defines no TASK_TYPE; add TASK_TYPE = "…"')
    if not isinstance(task_type, str) or not 0 < len(task_type) <= MAX_TEXT:
        raise ConfigError(f"generators: {path}: TASK_TYPE must be a text, not empty, is {task_type!r:.100}")
    if run_rollout is None:
        raise ConfigError(f"generators: {path} defines no run_rollout; add def run_rollout(data: dict)")
    try:
        inspect.signature(run_rollout).bind({})
    except (TypeError, ValueError) as error:  # ValueError: it is one of Python's own, which has no signature
        raise ConfigError(f"generators: {path}: run_rollout must be a function of (data): {error}") from None
    return task_type, Hooks.of_module(module, task_type, str(path))


def _run(path: Path, source: bytes) -> ModuleType:
    """Runs a file's source: that of the last look, which the file may not have any more."""
    digest = hashlib.blake2b(f"{path}\0".encode() + source, digest_size=6).hexdigest()
    module = ModuleType(f"rollstream_user_{path.stem}_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[str(path)] = (len(source), None, lines, str(path))  # for tracebacks
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # sys.exit(), too
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == str(path)]
        line = f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
        raise ConfigError(f"generators: {path} raised {type(error).__name__}: {error}{line}") from error
    return module


if __name__ == "__main__":
    main()
