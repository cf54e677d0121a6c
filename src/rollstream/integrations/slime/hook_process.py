"""The child process that runs a user's generator file and calls its hooks, and its client in the server.

Each request has the source of its file, so a new child can go on where another one ended. The child runs below a
reaper (`engine.reaper`): what a hook starts ends with it.
"""

import asyncio
import functools
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from rollstream.buffer.groups import FINISHING, GroupSettings, HookError, ItemDict, StoredItem
from rollstream.buffer.items import (
    MAX_TEXT,
    Encoding,
    InstanceId,
    Item,
    ItemError,
    dump_item,
    load_item,
    parse_items,
    split_batch,
    with_uid,
)
from rollstream.childproc import MAX_BYTES, Child, ChildDiedError, Codec, Parent, how_ended, packed
from rollstream.engine.reaped import ReapedProcess
from rollstream.engine.reaper import Bounds
from rollstream.errors import ConfigError, RollstreamError
from rollstream.integrations.slime.hooks import Hooks
from rollstream.user_code import run_file

_TIMEOUT: Final = "Timeout"
"""How faulthandler's text begins after the time limit."""

_SLACK_S: Final = 30.0
"""A child has so much beside the limit of a call, to start and to read large messages. Then it is stuck."""

_END_S: Final = 2.0
"""The reaper may take so long to kill all; then its process group is killed."""

_CALLED: Final[Mapping[str, frozenset[str]]] = {
    "judge": frozenset({"is_valid_group"}),
    "finish": FINISHING,
    "meta_info": frozenset({"get_group_data_meta_info"}),
}
"""The hooks that a call may run."""


class GeneratorFile(msgspec.Struct, frozen=True):
    """A generator file as it was when somebody looked at it."""

    path: Path
    source: bytes
    task_type: str = ""
    overridden: frozenset[str] = frozenset()
    """Names of its hooks."""
    problem: str = ""
    """Why it cannot be used."""


class _HookCall(msgspec.Struct):
    call: str
    path: str
    source: bytes
    """The file's content, or the body to parse."""
    settings: GroupSettings = GroupSettings()
    groups: Sequence[tuple[InstanceId, Sequence[StoredItem]]] = ()
    timed_out: bool = False
    encoding: Encoding = "json"


class _HookReply(msgspec.Struct):
    result: Any = None
    error: tuple[str, str, str] | None = None
    """The parts of a HookError."""
    item_error: tuple[str, str] | None = None


class HookProcess:
    """Calls the hooks of a file in a child process, one call at a time.

    A call raises `HookError` if a hook fails, takes longer than `seconds` or ends the process. The child is
    started when it is needed, and again when it has ended.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._exchanging: asyncio.Task[Any] | None = None
        self._child: Child | None = None
        self._closed = False

    async def call(self, call: str, file: GeneratorFile, *values: Any) -> Any:
        """Returns the answer of `Hooks` to `judge`, `finish` or `meta_info`; of `look`, the file's task and hooks.

        Args:
            call: Its name.
            file: In the version that is called.
            values: Those of a request, from `settings` on.
        """
        await self._turn.acquire()
        # An exchange goes to its end even if the caller is cancelled, so that the wire stays in order.
        request = _HookCall(call, str(file.path), file.source, *values)
        hooks = file.overridden & _CALLED.get(call, frozenset())
        self._exchanging = asyncio.create_task(self._exchange(request, hooks))
        self._exchanging.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(self._exchanging)

    async def parse(self, body: bytes, encoding: Encoding) -> list[Item]:
        """`parse_items`, which would hold the server's GIL for long. Raises `ItemError`."""
        file = GeneratorFile(Path("items"), body)
        items = []
        for fields, start, end, has_uid in await self.call(
            "parse", file, GroupSettings(), (), False, encoding
        ):
            item, own = msgspec.convert(fields, Item), body[start:end]
            own = own if has_uid else with_uid(own, item.uid, encoding)
            items.append(msgspec.structs.replace(item, body=own))
        return items

    async def close(self) -> None:
        """Ends the child at once, whatever it does. Calls that wait raise `RollstreamError`."""
        self._closed = True
        await self._end()

    async def _exchange(self, request: _HookCall, hooks: frozenset[str]) -> Any:
        fresh = False
        while not self._closed:
            if self._child is None:
                self._child, fresh = await _start(self._seconds), True
                continue  # closed meanwhile?
            try:
                reply: _HookReply = await self._child.ask(request, timeout=self._seconds + _SLACK_S)
            except ValueError as error:
                raise HookError(f"{request.path}: a group is too large for hooks: {error}") from None
            except TimeoutError:
                text = _TIMEOUT
            except ChildDiedError as error:
                text = error.text
            else:
                if reply.error is not None:
                    raise HookError(*reply.error)
                if reply.item_error is not None:
                    raise ItemError(*reply.item_error)
                if request.call == "look" and not reply.result[1]:
                    await self._end()  # nothing is left to call
                return reply.result
            how = await self._end()
            if self._closed or not (fresh or text.startswith(_TIMEOUT)):
                continue  # an older child may have ended before this call: it is made again in a new one
            # faulthandler lists the innermost function first.
            found = [name for name in re.findall(r" in (\w+)$", text, re.MULTILINE) if name in hooks]
            hook = found[0] if found else ", ".join(sorted(hooks))
            where = f"{request.path}: {hook}" if hook else f"generators: {request.path}"
            if text.startswith(_TIMEOUT):
                raise HookError(f"{where} did not return within {self._seconds:g} s", hook, text)
            raise HookError(f"{where}: the process of the hooks {how}", hook, text)
        await self._end()
        raise RollstreamError("no hooks are called any more: the server is ending")

    async def _end(self) -> str:
        """Kills the child and what it started; says how it ended."""
        child, self._child = self._child, None
        if child is None:
            return ""
        child.kill()
        return how_ended(await child.process.end(_END_S))


async def _start(seconds: float) -> Child:
    env = {name: value for name, value in os.environ.items() if name != "ROLLSTREAM_BUFFER_TOKEN"}
    spawn = functools.partial(ReapedProcess.start, bounds=Bounds(grace=0.0))
    return await Child.start(f"{__name__}:main", str(seconds), codec=packed(_HookReply), env=env, spawn=spawn)


# -- in the child


def main(number: int, seconds: str) -> None:
    """Serves the calls of a HookProcess."""
    parent = Parent(number, Codec(bytes, packed(_HookCall).decode))
    loaded: dict[bytes, tuple[str, Hooks]] = {}
    while True:
        for request in parent.receive():
            with parent.at_most(float(seconds)):
                reply = _reply(request, loaded)
            parent.send(reply)


def _reply(request: _HookCall, loaded: dict[bytes, tuple[str, Hooks]]) -> bytes:
    encode = msgspec.msgpack.encode
    try:
        reply = encode(_HookReply(_result(request, loaded)))
        if len(reply) > MAX_BYTES:
            raise HookError(f"{request.path}: the answer has {len(reply)} bytes, which is too much")
    except ItemError as error:
        return encode(_HookReply(item_error=(error.message, error.where)))
    except HookError as error:
        return encode(_HookReply(error=(str(error), error.hook, error.traceback)))
    except BaseException as error:
        where = "" if isinstance(error, ConfigError) else f"{request.path}: {type(error).__name__}: "
        return encode(_HookReply(error=(f"{where}{error}", "", "".join(traceback.format_exception(error)))))
    return reply


def _result(request: _HookCall, loaded: dict[bytes, tuple[str, Hooks]]) -> Any:
    if request.call == "parse":
        return _parsed(request)
    if request.source not in loaded:
        loaded[request.source] = _load(Path(request.path), request.source)
    task_type, hooks = loaded[request.source]
    if request.call == "look":
        return task_type, sorted(hooks.overridden)
    groups: dict[InstanceId, list[ItemDict]] = {}
    for instance_id, items in request.groups:
        groups.setdefault(instance_id, []).extend(load_item(item.body, item.encoding) for item in items)
    if request.call == "meta_info":
        meta = hooks.meta_info(groups, request.settings)
        return orjson.dumps(meta, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    ((instance_id, given),) = groups.items()
    if request.call == "judge":
        return hooks.judge((instance_id, given), request.settings, timed_out=request.timed_out)
    finished = hooks.finish((instance_id, given), request.settings, timed_out=request.timed_out)
    try:
        return [dump_item(item, request.encoding) for item in finished]
    except ItemError as error:
        names = ", ".join(sorted(hooks.overridden & FINISHING))
        raise HookError(f"{request.path}: {names} gave back an item that {error}", names) from error


def _parsed(request: _HookCall) -> list[tuple[Item, int, int, bool]]:
    """Items without their bodies; where these are in what was sent, and whether they have a uid."""
    items = parse_items(request.source, request.encoding)
    bodies = split_batch(request.source, request.encoding) or [request.source]
    parsed, end = [], 0
    for item, body in zip(items, bodies, strict=True):
        start = request.source.index(body, end)
        end = start + len(body)
        parsed.append((msgspec.structs.replace(item, body=b""), start, end, item.body == body))
    return parsed


def _load(path: Path, source: bytes) -> tuple[str, Hooks]:
    module = run_file(path, key="generators", source=source)
    task_type: Any = getattr(module, "TASK_TYPE", None)
    if task_type is None:
        raise ConfigError(f'generators: {path} defines no TASK_TYPE; add TASK_TYPE = "…"')
    if not isinstance(task_type, str) or not 0 < len(task_type) <= MAX_TEXT:
        raise ConfigError(f"generators: {path}: TASK_TYPE must be a text, not empty, is {task_type!r:.100}")
    if not hasattr(module, "run_rollout"):
        raise ConfigError(f"generators: {path} defines no run_rollout; add def run_rollout(data: dict)")
    return task_type, Hooks(module, task_type, str(path))
