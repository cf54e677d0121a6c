"""Reads: groups are leased, loaded, finished by their hooks, and handed out some at a time.

Groups without hooks of their own never leave the server's process: their bodies are taken apart at the
outermost level only. A group that its hooks cannot finish goes to quarantine and the others go on; a hook
that fails on several groups in a row stops the reads of its task, with its cause.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import msgspec

from rollstream.buffer.generator_files import GeneratorFiles
from rollstream.buffer.groups import GroupSettings, StoredItem, finish_group, summarize_rewards
from rollstream.buffer.hooks import FINISHING, HookError
from rollstream.buffer.items import Encoding, dump_list
from rollstream.buffer.store.base import Change, Group, JobRecord, Judged, Removal, Taken, Wanted
from rollstream.buffer.store.sql import SqlStore
from rollstream.errors import RollstreamError

_LOG = logging.getLogger(__name__)

_PART_BYTES: Final = 2**20
"""Groups are loaded and finished so much at a time, one part ahead of the reader."""

_PART_GROUPS: Final = 64

_FAILURES_IN_A_ROW: Final = 8
"""So many groups of a task go to quarantine; then the hook is to blame, not the groups."""

_JUDGED_AT_ONCE: Final = 64

_LOOK_S: Final = 1.0
"""A waiting reader looks this often whether its client is there and the server goes on."""

_META_BYTES: Final = 64 * 2**20
"""Of items that a task's own get_group_data_meta_info is given."""

_DROPS: Final = 10_000


class Ready(NamedTuple):
    """A group as it is handed out."""

    group: Group
    encoding: Encoding
    items: bytes
    """The list of them."""
    n: int


class HookStoppedError(RollstreamError):
    """A hook fails on group after group: reads of its task are stopped."""


@dataclass(slots=True)
class _Waiter:
    asked: Wanted
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    in_vain: frozenset[Wanted] = frozenset()
    """What earlier waiters asked for since groups became ready, and did not get."""

    def wants(self, task: str, job: str) -> bool:
        asked = self.asked
        return asked.task in (None, task) and (asked.jobs is None or job in asked.jobs)

    @property
    def question(self) -> Wanted:
        """The same for all who get the same."""
        return msgspec.structs.replace(self.asked, consumer=None, read_id=None, seconds=0.0)


class TaskPolicy:
    """What the store has to know of tasks: settings of the server and of jobs, and which hooks judge."""

    def __init__(self, defaults: GroupSettings, host: GeneratorFiles) -> None:
        self.defaults = defaults
        self._host = host
        self._of_jobs: dict[str, GroupSettings] = {}

    def settings(self, task: str, job: JobRecord | None) -> GroupSettings:
        if job is None:
            return self.defaults
        found = self._of_jobs.get(job.id)
        if found is None:
            found = self._of_jobs[job.id] = self.defaults.for_job(job.payload)
        return found

    def has_own_judge(self, task: str) -> bool:
        return "is_valid_group" in self._host.overridden(task)


class Reads:
    """The reads of one server.

    Args:
        store: What there is.
        host: Calls hooks.
        policy: Of groups.
        jobs: All records, by id.
    """

    def __init__(
        self,
        store: SqlStore,
        host: GeneratorFiles,
        policy: TaskPolicy,
        jobs: Callable[[], Mapping[str, JobRecord]],
    ) -> None:
        self._store = store
        self._host = host
        self._policy = policy
        self._jobs = jobs
        self._waiters: list[_Waiter] = []
        self._unjudged = asyncio.Event()
        self._failed_in_a_row: dict[str, int] = {}
        self.stopped: dict[str, str] = {}
        """Why reads of a task are stopped."""

    @property
    def waiting(self) -> int:
        """Readers that wait."""
        return len(self._waiters)

    def on_change(self, change: Change) -> None:
        """Wakes readers: as many as there are new groups for them."""
        if change.elsewhere:
            for waiter in self._waiters:
                waiter.woken.set()
        for (task, job), count in change.ready.items():
            for waiter in self._waiters:
                if count > 0 and waiter.wants(task, job) and not waiter.woken.is_set():
                    waiter.in_vain = frozenset()
                    waiter.woken.set()
                    count -= 1
        if change.unjudged:
            self._unjudged.set()

    def try_again(self) -> None:
        """Hooks may have been mended: stopped tasks go on."""
        self.stopped.clear()
        self._failed_in_a_row.clear()
        self._unjudged.set()

    def settings(self, group: Group) -> GroupSettings:
        """Of a group; of a server that was started with another size, it keeps its own."""
        settings = self._policy.settings(group.task, self._jobs().get(group.job))
        return settings if settings.group_size == group.size else replace(settings, group_size=group.size)

    # -- taking

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
        deadline = time.monotonic() + seconds
        waiter = _Waiter(wanted())
        if seconds > 0:
            self._waiters.append(waiter)
        try:
            while True:
                was_woken, in_vain = waiter.woken.is_set(), waiter.in_vain
                waiter.woken.clear()
                waiter.asked = wanted()
                taken = await self._take(waiter.asked)
                if taken.groups:
                    return taken
                if was_woken:
                    self._pass_on(waiter, in_vain | {waiter.question})
                while not waiter.woken.is_set():
                    left = deadline - time.monotonic()
                    if left <= 0 or gone():
                        return taken
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(left, _LOOK_S)):
                            await waiter.woken.wait()
                    if blocked() and not waiter.woken.is_set():
                        return taken
        finally:
            if seconds > 0:
                self._waiters.remove(waiter)
            if waiter.woken.is_set():
                self._pass_on(waiter, waiter.in_vain)

    async def _take(self, wanted: Wanted) -> Taken:
        taking = asyncio.ensure_future(
            self._store.take(msgspec.structs.replace(wanted, skip_tasks=tuple(self.stopped)))
        )
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:  # the reader is gone: what it took goes back
            taken = await taking
            if taken.lease is not None:
                await self._store.nack(taken.lease.id)
            raise

    def _pass_on(self, waiter: _Waiter, in_vain: frozenset[Wanted]) -> None:
        """A group that one reader cannot use may be for one that asks for something else."""
        for other in self._waiters:
            if other is not waiter and not other.woken.is_set() and other.question not in in_vain:
                other.in_vain = in_vain
                other.woken.set()
                return

    # -- finishing

    async def parts(self, taken: Taken, encoding: Encoding | None) -> AsyncGenerator[list[Ready], None]:
        """The groups of a lease, some at a time, in their order, without those that cannot be finished.

        Args:
            taken: By `take`.
            encoding: Of the items; None: as they are stored, where a group's items agree.

        Raises:
            HookStoppedError: The hook fails on everything. The lease is still out.
        """
        parts = _parts_of(taken.groups)
        lease = taken.lease
        if lease is None or not parts:
            return
        following = asyncio.ensure_future(self._finish(lease.id, parts[0], encoding))
        try:
            for number in range(len(parts)):
                ready = await following
                if number + 1 < len(parts):
                    following = asyncio.ensure_future(self._finish(lease.id, parts[number + 1], encoding))
                if ready:
                    yield ready
        finally:
            if not following.done():
                following.cancel()
                await asyncio.wait({following})

    async def _finish(self, lease: str, groups: Sequence[Group], encoding: Encoding | None) -> list[Ready]:
        loaded = await self._store.load([group.id for group in groups])
        ready: list[Ready] = []
        removals: list[Removal] = []
        filtered: dict[int, int] = {}
        stopped = None
        for group in groups:
            items = loaded[group.id]
            if isinstance(items, str):
                _LOG.error("group %d (instance %r): %s", group.id, group.instance_id, items)
                removals.append(Removal(group.id, "damaged", items))
                continue
            try:
                given, uids = await self._finished(group, items, encoding)
            except HookError as error:
                removals.append(Removal(group.id, error.hook or "hooks", error.traceback))
                if stopped := self._note_failure(group.task, error):
                    break
                continue
            if given is None:
                removals.append(Removal(group.id, "filtered"))
                continue
            ready.append(given)
            if uids:
                filtered[group.id] = len(uids)
        if removals or filtered:
            await self._store.finish(lease, removals, filtered)
        if stopped:
            raise HookStoppedError(stopped)
        return ready

    async def _finished(
        self, group: Group, items: list[StoredItem], encoding: Encoding | None
    ) -> tuple[Ready | None, list[str]]:
        settings = self.settings(group)
        wanted = encoding or ("json" if all(one.encoding == "json" for one in items) else "msgpack")
        if settings.raw or not self._host.overridden(group.task) & FINISHING:
            bodies, uids = finish_group(items, settings, wanted)
            return _ready(group, wanted, bodies), uids
        stored = [(one.encoding, one.body) for one in items]
        done = await self._host.finish(
            group.task, group.instance_id, stored, settings, group.timed_out, wanted
        )
        self._failed_in_a_row.pop(group.task, None)
        return _ready(group, wanted, done.items), done.left_out

    def _note_failure(self, task: str, error: HookError) -> str | None:
        """A failure of a task's hook; why the task is stopped, if it is."""
        count = self._failed_in_a_row[task] = self._failed_in_a_row.get(task, 0) + 1
        _LOG.warning("%s", error)
        if count < _FAILURES_IN_A_ROW:
            return None
        self.stopped[task] = (
            f"reads of task {task!r} are stopped: {error.hook} failed on {count} groups in a row, the last "
            f"time with: {error}. Mend the generator file, then POST /v1/quarantine/retry"
        )
        _LOG.error("%s", self.stopped[task])
        return self.stopped[task]

    # -- judging

    async def judge_on(self) -> None:
        """Has groups judged by their task's own hook, for ever."""
        while True:
            self._unjudged.clear()
            try:
                while await self._judge_some():
                    pass
            except RollstreamError as error:
                _LOG.error("groups cannot be judged: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(10 * _LOOK_S):
                    await self._unjudged.wait()

    async def _judge_some(self) -> bool:
        tasks = [
            task for task in self._host.files if self._policy.has_own_judge(task) and task not in self.stopped
        ]
        groups = await self._store.unjudged(tasks, _JUDGED_AT_ONCE) if tasks else []
        judged: list[Judged] = []
        removals: list[Removal] = []
        for part in _parts_of(groups):
            loaded = await self._store.load([group.id for group in part])
            for group in part:
                items = loaded[group.id]
                if isinstance(items, str):
                    removals.append(Removal(group.id, "damaged", items))
                    continue
                stored = [(one.encoding, one.body) for one in items]
                try:
                    verdict = await self._host.judge(
                        group.task, group.instance_id, stored, self.settings(group), group.timed_out
                    )
                except HookError as error:
                    removals.append(Removal(group.id, error.hook or "hooks", error.traceback))
                    if self._note_failure(group.task, error):
                        break
                else:
                    self._failed_in_a_row.pop(group.task, None)
                    judged.append(Judged(group.id, len(items), verdict.valid, verdict.finished))
            if self.stopped:
                break
        if judged or removals:
            await self._store.judge(judged, removals)
        return bool(judged or removals)

    # -- telling

    async def meta_info(
        self, groups: Sequence[Group], scope: tuple[str | None, Sequence[str] | None] | None = None
    ) -> tuple[dict[str, Any], int]:
        """Of a read of slime's wire: about the groups that leave by it, or were dropped since the last one.

        Returns:
            The `meta_info`, and what to give to `ack` as `reported_up_to`.
        """
        drops, told = ([], 0) if scope is None else await self._store.unread_drops(*scope, _DROPS)
        gone = [*groups, *drops]
        meta = None
        if groups and "get_group_data_meta_info" in self._host.overridden(groups[0].task):
            try:
                meta = await self._own_meta_info(gone, groups[0])
            except HookError as error:
                _LOG.warning("the default meta_info is given: %s", error)
        if meta is None:
            raw = bool(groups) and self.settings(groups[0]).raw
            meta = summarize_rewards([group.rewards for group in gone], raw=raw)
        dropped: dict[str, int] = {}
        for group in drops:
            dropped[group.reason or ""] = dropped.get(group.reason or "", 0) + 1
        return {**meta, "dropped_groups": dropped, "finished_groups": [one.instance_id for one in gone]}, told

    async def _own_meta_info(self, gone: Sequence[Group], first: Group) -> dict[str, Any]:
        here = await self._store.groups(state="open", task=first.task, limit=1024)
        given: list[tuple[Any, list[tuple[Encoding, bytes]]]] = []
        room = _META_BYTES
        for part in _parts_of([one for one in (*gone, *here) if one.task == first.task and one.bytes > 0]):
            room -= sum(group.bytes for group in part)
            if room < 0:
                break
            loaded = await self._store.load([group.id for group in part])
            for group in part:
                items = loaded[group.id]
                if not isinstance(items, str):
                    given.append((group.instance_id, [(one.encoding, one.body) for one in items]))
        return await self._host.meta_info(first.task, given, self.settings(first))


def _ready(group: Group, encoding: Encoding, bodies: list[bytes]) -> Ready | None:
    return Ready(group, encoding, dump_list(bodies, encoding), len(bodies)) if bodies else None


def _parts_of(groups: Sequence[Group]) -> list[list[Group]]:
    parts: list[list[Group]] = []
    size: float = math.inf
    for group in groups:
        if size + group.bytes > _PART_BYTES or len(parts[-1]) == _PART_GROUPS:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += group.bytes
    return parts
