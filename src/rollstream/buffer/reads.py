"""Reads: groups are leased, loaded, finished by their hooks, and handed out some at a time.

Readers that wait try again when groups have become ready; their tries share a transaction, in the order in which
they came. Groups without hooks of their own never leave the server's process: their bodies are taken apart at the
outermost level only. A group that its hooks cannot finish goes to quarantine and the others go on; a task whose
hooks fail on several groups in a row pauses for some seconds.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple, TypeVar

import orjson
from aiohttp import web
from msgspec.structs import replace

from rollstream.buffer.groups import (
    FINISHING,
    GroupHooks,
    GroupSettings,
    HookError,
    StoredItem,
    Verdict,
    finish_group,
    summarize_rewards,
)
from rollstream.buffer.items import Encoding, InstanceId, dump_list
from rollstream.buffer.store.base import Change, Group, JobRecord, Judged, Removal, Taken, Wanted
from rollstream.buffer.store.sql import SqlStore
from rollstream.errors import ConflictError, RollstreamError
from rollstream.web import Request

_LOG = logging.getLogger(__name__)

_PART_BYTES: Final = 2**20
"""Groups are loaded and finished so much at a time."""

_PART_GROUPS: Final = 64

_FAILURES_IN_A_ROW: Final = 8
"""So many groups of a task go to quarantine; then it pauses, for the hook may be to blame, not the groups."""

_PAUSE_S: Final = 10.0
"""A pause, after which the next groups are tried: groups that hooks fail on may stand before many good ones."""

_CHECK_S: Final = 1.0
"""A waiting reader checks this often whether its client is there and the server goes on."""

_META_BYTES: Final = 64 * 2**20
"""A task's own get_group_data_meta_info gets items of so many bytes."""

_DROPS: Final = 10_000

T = TypeVar("T")


class Ready(NamedTuple):
    """A group as it is handed out."""

    group: Group
    encoding: Encoding
    items: bytes
    """The list of them."""
    n: int


class Scope(NamedTuple):
    """Whose groups a reader gets. None: of any task, of any job."""

    task: str | None
    jobs: tuple[str, ...] | None

    def has(self, task: str, job: str) -> bool:
        """Whether groups of this task and job are among them."""
        return self.task in (None, task) and (self.jobs is None or job in self.jobs)


class Form(NamedTuple):
    """How a read is answered."""

    media_type: str
    encoding: Encoding | None
    """The encoding of the items; None: as they are stored, where a group's items agree."""
    head: Callable[[dict[str, Any]], bytes]
    group: Callable[[Ready], bytes]
    between: bytes
    """Written between two groups."""
    end: Callable[[dict[str, Any]], bytes]


class TaskPolicy:
    """Tells the store about tasks: settings of the server and of jobs, and which hooks judge."""

    def __init__(self, defaults: GroupSettings, hooks: GroupHooks | None) -> None:
        self._defaults, self._hooks = defaults, hooks
        self._of_jobs: dict[str, GroupSettings] = {}

    def settings(self, task: str, job: JobRecord | None) -> GroupSettings:
        if job is None:
            return self._defaults
        if job.id not in self._of_jobs:
            self._of_jobs[job.id] = self._defaults.for_job(job.payload)
        return self._of_jobs[job.id]

    def has_own_judge(self, task: str) -> bool:
        return self._hooks is not None and "is_valid_group" in self._hooks.overridden(task)


class Reads:
    """The reads of one server. `judge` has to run beside them."""

    def __init__(self, store: SqlStore, hooks: GroupHooks, policy: TaskPolicy) -> None:
        self._store, self._hooks, self._policy = store, hooks, policy
        self.waiting = 0
        """Readers that wait."""
        self._news, self._unjudged = asyncio.Event(), asyncio.Event()
        """Set when groups become ready, for those who wait just now; and when there are some to judge."""
        self._failed_in_a_row: Counter[tuple[str, str]] = Counter()
        """By task and what its hooks were to do: one that judges well says nothing for one that finishes."""
        self._paused: dict[str, tuple[float, str]] = {}
        """The end of each task's pause, and its cause."""
        self.pause_s = _PAUSE_S

    @property
    def paused(self) -> dict[str, str]:
        """Tasks whose hooks failed on group after group and are not called now, and why."""
        now = time.monotonic()
        return {task: why for task, (until, why) in self._paused.items() if until > now}

    def on_change(self, change: Change) -> None:
        """Has readers tried again that may get what has become ready, and groups judged."""
        if change.ready:
            self.wake()
        if change.unjudged:
            self._unjudged.set()

    def try_again(self) -> None:
        """GroupHooks may have been mended: paused tasks go on."""
        self._paused.clear()
        self._failed_in_a_row.clear()
        self.on_change(Change(ready=True, unjudged=True))

    def wake(self) -> None:
        """Has all readers that wait try again, or see that nobody waits any more."""
        self._news.set()
        self._news = asyncio.Event()

    def settings(self, group: Group) -> GroupSettings:
        return self._policy.settings(group.task, self._store.known_jobs.get(group.job)).of_size(group.size)

    # -- taking

    @asynccontextmanager
    async def answering(self, request: Request, form: Form) -> AsyncIterator["ReadAnswer"]:
        """An answer to a read. The leases that are in its list at the end go back."""
        answer = ReadAnswer(self, request, form)
        try:
            yield answer
        finally:
            for lease in answer.leases:
                await self.give_back(lease)

    async def give_back(self, lease: str) -> None:
        """The groups go back to their places."""
        with suppress(ConflictError):
            await self._store.nack(lease)

    async def take(
        self,
        wanted: Callable[[], Wanted],
        seconds: float = 0.0,
        *,
        gone: Callable[[], bool] = lambda: False,
        blocked: Callable[[], bool] = lambda: False,
    ) -> Taken:
        """Leases groups, as soon as there are some.

        Args:
            wanted: What is asked for, as things stand.
            seconds: To wait at most.
            gone: Whether nobody waits any more.
            blocked: Whether something fails that would bring groups. Ends the wait after a second, not at once:
                a reader that asks again and again must not keep the server busy.
        """
        ends = time.monotonic() + seconds
        while True:
            news = self._news
            taken = await self._store.take(replace(wanted(), skip_tasks=tuple(self.paused)))
            if taken.lease is not None:
                return taken
            self.waiting += 1
            try:
                while not news.is_set():
                    if (left := ends - time.monotonic()) <= 0 or gone():
                        return taken
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(left, _CHECK_S)):
                            await news.wait()
                    if gone() or (not news.is_set() and blocked()):
                        return taken
            finally:
                self.waiting -= 1

    # -- finishing

    async def finish(self, lease: str, part: Sequence[Group], encoding: Encoding | None) -> list[Ready]:
        """Some groups of a lease, one of `parts_of`, as they are handed out.

        Those that cannot be finished leave it, and those of a paused task go back to their places.
        """

        async def call(group: Group, items: list[StoredItem]) -> tuple[Encoding, list[bytes]]:
            is_json = all(item.encoding == "json" for item in items)
            wanted: Encoding = encoding or ("json" if is_json else "msgpack")
            settings = self.settings(group)
            if settings.raw or not self._hooks.overridden(group.task) & FINISHING:
                return wanted, finish_group(items, settings, wanted)
            return wanted, await self._hooks.call(
                "finish", group.task, settings, [(group.instance_id, items)], group.timed_out, wanted
            )

        done, removals = await self._each("finish", part, call)
        tried = {removal.group for removal in removals} | {group.id for group, _ in done}
        back = [group.id for group in part if group.id not in tried]
        ready = []
        for group, (form, bodies) in done:
            if bodies:
                ready.append(Ready(group, form, dump_list(bodies, form), len(bodies)))
            else:
                enough = group.n >= self.settings(group).min_valid_items
                removals.append(Removal(group.id, "filtered" if enough else "too_few_items"))
        if removals or back:
            await self._store.finish(lease, removals, back)
        return ready

    async def _each(
        self, what: str, groups: Sequence[Group], call: Callable[[Group, list[StoredItem]], Awaitable[T]]
    ) -> tuple[list[tuple[Group, T]], list[Removal]]:
        """Calls hooks for each group with its items: what came of it, and which groups cannot stay.

        Groups of paused tasks are passed over.
        """
        loaded = await self._store.load([group.id for group in groups if group.task not in self.paused])
        done: list[tuple[Group, T]] = []
        removals: list[Removal] = []
        for group in groups:
            if group.id not in loaded or group.task in self.paused:
                continue
            items = loaded[group.id]
            if isinstance(items, str):
                _LOG.error("group %d (instance %r): %s", group.id, group.instance_id, items)
                removals.append(Removal(group.id, "damaged", items))
                continue
            try:
                done.append((group, await call(group, items)))
                self._failed_in_a_row.pop((group.task, what), None)
            except HookError as error:
                _LOG.warning("%s", error)
                removals.append(Removal(group.id, error.hook or "hooks", error.traceback))
                self._failed_in_a_row[group.task, what] += 1
                if self._failed_in_a_row[group.task, what] >= _FAILURES_IN_A_ROW:
                    self._pause(group.task, error)
                    del self._failed_in_a_row[group.task, what]
        return done, removals

    def _pause(self, task: str, error: HookError) -> None:
        why = (
            f"reads of task {task!r} pause for {self.pause_s:g} s: {error.hook} failed on {_FAILURES_IN_A_ROW} "
            f"groups in a row, the last time with: {error}. Once the generator file is mended, POST "
            "/v1/quarantine/retry"
        )
        _LOG.error("%s", why)
        self._paused[task] = time.monotonic() + self.pause_s, why

    # -- judging

    async def judge(self) -> None:
        """Has groups judged by their task's own hook, for ever."""
        while True:
            self._unjudged.clear()
            try:
                while await self._judge_some():
                    pass
            except RollstreamError as error:
                _LOG.error("groups cannot be judged: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.pause_s):
                    await self._unjudged.wait()

    async def _judge_some(self) -> bool:
        paused = self.paused
        tasks = [
            task for task in self._hooks.files if task not in paused and self._policy.has_own_judge(task)
        ]
        groups = await self._store.unjudged(tasks, _PART_GROUPS) if tasks else []
        if not groups:
            return False

        async def call(group: Group, items: list[StoredItem]) -> tuple[int, Verdict]:
            verdict = await self._hooks.call(
                "judge", group.task, self.settings(group), [(group.instance_id, items)], group.timed_out
            )
            return len(items), Verdict(*verdict)

        part = parts_of(groups)[0]
        done, removals = await self._each("judge", part, call)
        judged = [Judged(group.id, n, *verdict, group.timed_out) for group, (n, verdict) in done]
        # A group that still grows stays, for its other items would open another one that never gets whole.
        growing = {group.id: group.n for group in part if group.state == "open"}
        early = {one.group for one in removals if one.group in growing and one.reason != "damaged"}
        judged += [Judged(id_, growing[id_], False, False) for id_ in early]
        await self._store.judge(judged, [one for one in removals if one.group not in early])
        return True

    # -- reporting

    async def meta_info(
        self, groups: Sequence[Group], scope: Scope | None = None
    ) -> tuple[dict[str, Any], int]:
        """About the groups that leave by a read, and with a `scope` those dropped since the last such read.

        Returns:
            The `meta_info`, and what to give to `ack` as `reported_up_to`.
        """
        drops, reported = ([], 0) if scope is None else await self._store.unread_drops(*scope, _DROPS)
        gone = [*groups, *drops]
        meta = None
        if groups and "get_group_data_meta_info" in self._hooks.overridden(groups[0].task):
            try:
                meta = await self._own_meta_info(gone, groups[0])
            except HookError as error:
                _LOG.warning("the default meta_info is given: %s", error)
        if meta is None:
            raw = bool(groups) and self.settings(groups[0]).raw
            meta = summarize_rewards([group.rewards for group in gone], raw=raw)
        dropped = Counter(group.reason or "" for group in drops)
        finished = [group.instance_id for group in gone]
        return {**meta, "dropped_groups": dropped, "finished_groups": finished}, reported

    async def _own_meta_info(self, gone: Sequence[Group], first: Group) -> dict[str, Any]:
        given: list[tuple[InstanceId, list[StoredItem]]] = []
        room = _META_BYTES
        for part in parts_of([group for group in gone if group.task == first.task and group.bytes > 0]):
            room -= sum(group.bytes for group in part)
            if room < 0:
                break
            loaded = await self._store.load([group.id for group in part])
            for group in part:
                items = loaded[group.id]
                if not isinstance(items, str):
                    given.append((group.instance_id, items))
        meta: dict[str, Any] = orjson.loads(
            await self._hooks.call("meta_info", first.task, self.settings(first), given)
        )
        return meta


class ReadAnswer:
    """The answer to a read, to which groups are written as they are finished."""

    def __init__(self, reads: Reads, request: Request, form: Form) -> None:
        self._reads, self._request, self._form = reads, request, form
        self._response = web.StreamResponse(headers={"content-type": form.media_type})
        self.leases: list[str] = []
        self.groups: list[Group] = []
        """That were written, without those that could not be finished."""
        self.items = 0

    async def begin(self, head: dict[str, Any]) -> None:
        """Sends the head of an answer, with groups or without."""
        await self._response.prepare(self._request.raw)
        await self._response.write(self._form.head(head))

    async def send(self, taken: Taken, head: dict[str, Any]) -> None:
        """Sends the groups of a lease, and the head before the first one.

        Raises:
            ConnectionError: The client is gone.
        """
        assert taken.lease is not None
        self.leases.append(taken.lease)
        form = self._form
        for part in parts_of(taken.groups):
            if self._request.gone:
                raise ConnectionResetError
            ready = await self._reads.finish(taken.lease, part, form.encoding)
            if ready and not self.groups:
                await self.begin(head)
            if ready:
                between = form.between if self.groups else b""
                await self._response.write(between + form.between.join(map(form.group, ready)))
            self.groups += [each.group for each in ready]
            self.items += sum(each.n for each in ready)

    async def end(
        self, end: dict[str, Any], then: Callable[[], Awaitable[None]] | None = None
    ) -> web.StreamResponse:
        """Sends the end, its last byte only after `then`: so a reader that has it all has the groups, too."""
        if self._request.gone:
            raise ConnectionResetError
        data = self._form.end(end)
        await self._response.write(data[:-1])
        if then is not None:
            await then()
        await self._response.write(data[-1:])
        await self._response.write_eof()
        return self._response


def parts_of(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups, in their order, so many at a time that memory stays small."""
    parts: list[list[Group]] = []
    size: float = math.inf
    for group in groups:
        if size + group.bytes > _PART_BYTES or len(parts[-1]) == _PART_GROUPS:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += group.bytes
    return parts
