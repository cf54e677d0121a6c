"""What all calls of a ledger stand on: its state and log, reading and describing groups, waiting, time."""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path

from rollstream.buffer.cleaning import Cleaning
from rollstream.buffer.commits import CommitQueue
from rollstream.buffer.group_state import Group, GroupView
from rollstream.buffer.items import Encoding, InstanceId
from rollstream.buffer.ledger_types import LedgerSettings
from rollstream.buffer.log_records import Dropped, decode_item, split_item
from rollstream.buffer.oplog import LogReport, Oplog
from rollstream.buffer.state import BufferState
from rollstream.errors import DamageError, NotFoundError, RollstreamError, StorageError
from rollstream.store.lock import RunLock

logger = logging.getLogger(__name__)

_CAUSE_CHARACTERS = 8000
"""Of a traceback that is kept with a quarantined group; its end says most."""

_LONGEST_SLEEP_S = 3600.0

SLICE = 256
"""Groups that are looked at in one go: a few milliseconds, in which others wait for the event loop."""


class LedgerCore:
    """See the module."""

    def __init__(
        self,
        root: Path,
        settings: LedgerSettings,
        state: BufferState,
        log: Oplog,
        lock: RunLock,
        clock: Callable[[], float],
    ) -> None:
        """Use `Ledger.open`."""
        self.root = root
        self.settings = settings
        self._state = state
        self._log = log
        self._lock = lock
        self._clock = clock
        self._trying: asyncio.Future[None] | None = None
        """A look whether a disk that was full still is."""
        self._commits = CommitQueue(
            state, log, segment_bytes=settings.segment_bytes, clock=clock, changed=self._on_change
        )
        self._cleaning = Cleaning(state, log, self._commits, segment_bytes=settings.segment_bytes)
        self._cleaner: asyncio.Task[None] | None = None
        self._cleaned_head = -1
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def report(self) -> LogReport:
        """What was wrong with the log when it was opened."""
        return self._log.report

    def load(self, group: GroupView) -> list[tuple[bytes, Encoding]]:
        """The items of a group in order of arrival, as they were written. From any thread.

        Raises:
            NotFoundError: the group is gone.
            DamageError: an item is not what was written.
        """
        return [split_item(body) for body in self._read(group.number, group.size)]

    # -- time

    def tick(self) -> None:
        """Lets groups time out and leases expire that are due. Called by a timer."""
        before = self._state.version
        self._state.advance(self._clock())
        if self._state.version != before:
            self._wake()
        self._arm()

    def _arm(self) -> None:
        """Sets the timer to the next deadline."""
        deadline = self._state.next_deadline()
        if self._closed or deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        delay = min(max(0.0, deadline - self._clock()), _LONGEST_SLEEP_S)
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()

    # -- inside

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the buffer {self.root} is closed")

    def _live_bytes(self) -> int:
        return sum(self._state.live_bytes.values())

    def _claim(self, view: GroupView) -> bool:
        group = self._state.groups.get(view.number)
        if group is None or len(group) != view.size or not self._state.is_candidate(group):
            return False
        group.claimed = True
        return True

    def _is_as_seen(self, view: GroupView) -> bool:
        group = self._state.groups.get(view.number)
        return group is not None and len(group) == view.size and group.waiting

    def _unclaim(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            group = self._state.groups.get(number)
            if group is not None and group.claimed:
                group.claimed = False
                if group.waiting:
                    self._state.version += 1
                    self._wake()

    def _burial(self, numbers: Iterable[int]) -> tuple[int, bytes]:
        groups = self._state.groups
        uids = array("Q")
        for number in numbers:
            uids.extend(groups[number].uids())
        return self._state.uids.burials, uids.tobytes()

    def _read(self, number: int, size: int) -> list[memoryview]:
        for _ in range(3):  # a cleaning may move the items meanwhile, once; the second time is another one's
            group = self._state.groups.get(number)
            if group is None:
                break
            try:
                return self._log.read(group.frames(size))
            except FileNotFoundError:
                continue
        else:
            raise DamageError(f"group {number}: a part of it is in a segment of {self.root} that is missing")
        raise NotFoundError(f"group {number} is not in the buffer any more")

    def _describe_drops(self, drops: Sequence[tuple[GroupView, str]]) -> list[Dropped]:
        return [self._describe_drop(view, reason) for view, reason in drops]

    def _describe_drop(self, view: GroupView, reason: str) -> Dropped:
        try:
            uids = [decode_item(body).uid_text for body in self._read(view.number, view.size)]
        except RollstreamError as error:
            logger.warning("the uids of a group that is dropped can't be read: %s", error)
            uids = [""] * view.size
        return Dropped(
            view.number, view.task_type, view.instance_id, reason, uids, list(view.rewards), time.time()
        )

    def _on_change(self, control: bool) -> None:
        self._wake()
        self._arm()
        head = self._log.head
        if (control or head != self._cleaned_head) and not self._closed:
            self._cleaned_head = head
            if (self._cleaner is None or self._cleaner.done()) and self._cleaning.is_due():
                self._cleaner = asyncio.get_running_loop().create_task(self._clean())

    async def _clean(self) -> None:
        try:
            await self._cleaning.run()
        except StorageError as error:
            logger.warning("the buffer's log could not be cleaned, it is tried again: %s", error)
        except Exception:
            logger.exception("the buffer's log could not be cleaned")

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, ready: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._arm()
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return False
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, left)
            except TimeoutError:
                pass
            finally:
                self._waiters.discard(waiter)
        return True

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def finished(state: BufferState, groups: Iterable[Group]) -> list[tuple[str, InstanceId, int]]:
    """Counts for those of the active rollout."""
    return [
        (rollout_id, group.key[2], state.count(group.key) + 1)
        for group in groups
        if (rollout_id := group.key[1]) is not None and rollout_id == state.active_rollout
    ]


def tail_of(cause: str) -> str:
    """The part of a traceback that is kept."""
    return cause[-_CAUSE_CHARACTERS:]
