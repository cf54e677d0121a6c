"""Leased groups on their way out: finished by their task's hooks in a thread, some at a time.

What the default hooks make of a group is made from its stored bytes, see `raw_groups`. Groups that can't be
finished go to quarantine, those of which nothing is left are dropped; the others go on.
"""

import asyncio
import contextlib
import errno
import logging
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.hooks import HookError, Hooks
from rollstream.buffer.items import Encoding, load_item
from rollstream.buffer.ledger import GroupView, Ledger
from rollstream.buffer.raw_groups import RawGroup, dump_items, finish_raw
from rollstream.buffer.reads import Part, Taken
from rollstream.buffer.unread_drops import Drop

_LOG = logging.getLogger(__name__)

_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}

_AHEAD_BYTES = 2**20
"""Finished in one go of the thread: some hundred items, a few milliseconds."""


class Layout(Protocol):
    """How groups stand in an answer. Called in the thread."""

    encoding: Encoding
    """Of items."""

    def group(self, view: GroupView, items: bytes) -> bytes:
        """One group; `items` is the list of them."""

    def joined(self, groups: list[bytes], *, first: bool) -> bytes:
        """Groups that follow each other; `first`: none was sent before them."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A group that could not be finished, or of which its hooks left nothing."""

    group: GroupView
    traceback: str | None
    """None: nothing was left of it."""


class _Finished(NamedTuple):
    """What the thread did in one go."""

    part: Part
    failed: list[_Failed]
    left_out: list[tuple[GroupView, list[str], str]]
    """Groups, the uids of items that the hooks left out, and why."""


class Finishing:
    """Of the groups of one ledger. Lives in the server's event loop.

    Args:
        ledger: what there is.
        hooks: of a task type.
        settings: of a group.
        thread: runs the hooks, one at a time.
        drop: makes a note of groups that are about to be dropped.
    """

    def __init__(
        self,
        ledger: Ledger,
        hooks: Callable[[str], Hooks],
        settings: Callable[[GroupView], GroupSettings],
        thread: Executor,
        drop: Callable[[Iterable[GroupView]], Awaitable[list[Drop]]],
    ) -> None:
        self._ledger = ledger
        self._hooks = hooks
        self._settings = settings
        self._thread = thread
        self._drop = drop

    async def stream(self, taken: Taken, layout: Layout, *, first: bool) -> AsyncGenerator[Part, None]:
        """See `Delivery.stream`."""
        if taken.lease is None:
            return
        lease_id = taken.lease.lease_id
        waiting = deque(taken.groups)
        left_out: list[tuple[GroupView, list[str], str]] = []
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._thread, self._finish_some, waiting, layout, first)
        try:
            while True:
                done = await job
                first = first and not done.part.groups
                more = bool(waiting)
                if more:
                    job = loop.run_in_executor(self._thread, self._finish_some, waiting, layout, first)
                if done.failed:
                    await self._remove(taken, lease_id, done.failed)
                left_out += done.left_out
                if done.part.groups:
                    yield done.part
                if not more:
                    break
            if left_out:
                await self._ledger.leave_out(lease_id, left_out)
        finally:
            waiting.clear()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({job})

    async def _remove(self, taken: Taken, lease_id: str, failed: list[_Failed]) -> None:
        numbers = {one.group.number for one in failed}
        taken.groups = [view for view in taken.groups if view.number not in numbers]
        for one in failed:
            if one.traceback is None:
                taken.dropped += await self._drop([one.group])
            else:
                _LOG.warning(
                    "group %d (instance %r of task %r) is quarantined: %s",
                    one.group.number,
                    one.group.instance_id,
                    one.group.task_type,
                    one.traceback.strip().rpartition("\n")[2],
                )
            reason = "filtered" if one.traceback is None else None
            await self._ledger.remove_from_lease(lease_id, one.group, traceback=one.traceback, reason=reason)

    # -- in the thread

    def _finish_some(self, waiting: "deque[GroupView]", layout: Layout, first: bool) -> _Finished:
        bodies: list[bytes] = []
        failed: list[_Failed] = []
        left_out: list[tuple[GroupView, list[str], str]] = []
        size = items = 0
        while waiting and size < _AHEAD_BYTES:
            try:
                view = waiting.popleft()
            except IndexError:  # the reader is gone
                break
            try:
                group = self._finish(view, layout.encoding)
                if group is None:
                    failed.append(_Failed(view, None))
                    continue
                bodies.append(layout.group(view, group.body))
            except Exception as error:  # the hook's, damage, or that of looking at what a hook gave back
                if lacks_means(error):
                    raise
                failed.append(_Failed(view, text_of(error)))
                continue
            size += len(bodies[-1])
            items += group.items
            if group.left_out:
                left_out.append((view, group.left_out, "filtered"))
        return _Finished(Part(layout.joined(bodies, first=first), len(bodies), items), failed, left_out)

    def _finish(self, view: GroupView, encoding: Encoding) -> RawGroup | None:
        hooks, settings = self._hooks(view.task_type), self._settings(view)
        stored = self._ledger.load(view)
        if hooks.is_default_finish and all(one == encoding for _, one in stored):
            return finish_raw([payload for payload, _ in stored], encoding, settings)
        given = [load_item(payload, one) for payload, one in stored]
        uids = [item["uid"] for item in given]  # before hooks, which may change what they get
        items = hooks.finish((view.instance_id, given), settings, timed_out=view.timed_out)
        if not items:
            return None
        kept = {item.get("uid") for item in items}
        left_out = [uid for uid in uids if uid not in kept] if len(kept) < len(uids) else []
        return RawGroup(len(items), dump_items(items, encoding), left_out)


def lacks_means(error: Exception) -> bool:
    """Whether the server has no memory or no file descriptor left for now: no group is to blame for that."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _PASSING)


def text_of(error: Exception) -> str:
    """Its traceback; a hook's own, where it is that of a hook."""
    if isinstance(error, HookError):
        return error.traceback
    return "".join(traceback.format_exception(error))
