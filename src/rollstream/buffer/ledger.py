"""The ledger: what the buffer's server asks for, durable.

State (`state.py`) + log (`oplog.py`), brought together by `commits.py`. Belongs to one event loop; `load` may
be called from any thread.

A reader's way through it:

    candidates() -> judge -> decide(lease=…, drop=…, keep=…, quarantine=…) -> load() each -> ack()
                                                                               nack(), or time passes: again

Its calls stand on `ledger_core.py`: writing and reading here, leases in `ledger_leases.py`, rollouts in
`ledger_rollouts.py`, what was not delivered, and the counts, in `ledger_accounts.py`.

What is durable when a call returns: items written, leases and how much time they were given last, acks,
nacks, drops, quarantines, tasks, rollouts. What is not, and starts anew after a restart: how much of their
time leases and open groups have had, `keep`.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from rollstream.buffer.group_state import Group, GroupView
from rollstream.buffer.items import Item
from rollstream.buffer.ledger_accounts import LedgerAccounts
from rollstream.buffer.ledger_core import SLICE, finished, tail_of
from rollstream.buffer.ledger_leases import LedgerLeases, lease_of_read
from rollstream.buffer.ledger_opening import catch_up_drops, lock_folder, replay, task_of
from rollstream.buffer.ledger_rollouts import LedgerRollouts
from rollstream.buffer.ledger_types import AckResult, BufferStats, Lease, LedgerSettings, QuarantinedGroup
from rollstream.buffer.log_records import Event, LeaseFact
from rollstream.buffer.oplog import Oplog
from rollstream.buffer.state import BufferState
from rollstream.buffer.uid_memory import hash_uid
from rollstream.errors import BufferFullError, RollstreamError, StorageError

logger = logging.getLogger(__name__)


class Ledger(LedgerLeases, LedgerRollouts, LedgerAccounts):
    """See the module."""

    # -- opening and closing

    @classmethod
    def open(
        cls, root: Path, settings: LedgerSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> "Ledger":
        """Opens the folder, or begins one, and reads its log.

        Args:
            root: the buffer's folder.
            settings: see there.
            clock: monotonic seconds.

        Raises:
            RunDirectoryError: another process writes to it (named), or it can't be used.
            StorageError: the disk failed.
        """
        lock = lock_folder(root)
        try:
            state = BufferState(
                default=task_of(settings.groups),
                timeout=settings.groups.group_timeout_seconds,
                remember_uids=settings.remember_uids,
                groups_per_cycle=settings.groups_per_cycle,
            )
            log = Oplog(root)
            replay(log, state, clock)
            catch_up_drops(log, state)
            log.start()
        except OSError as error:
            lock.release()
            raise StorageError(f"cannot open {root}: {error.strerror}") from error
        except BaseException:
            lock.release()
            raise
        for damage in log.report.damage:
            logger.error("%s; kept in %s", damage, root / "damaged")
        return cls(root, settings, state, log, lock, clock)

    async def close(self) -> None:
        """Answers what was asked for, ends the thread, gives the lock back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        if self._cleaner is not None:
            self._cleaner.cancel()
            await asyncio.gather(self._cleaner, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._commits.drain()
        await asyncio.to_thread(self._log.close)
        self._lock.release()

    # -- writing

    async def write(self, items: Sequence[Item]) -> list[bool]:
        """Stores items; durable when it returns.

        Returns:
            By item: whether it was stored now; False: its uid is known, so it was stored before.

        Raises:
            BufferFullError: there is no room for all of them; none was stored. See `wait_for_room`.
            StorageFullError: the disk is full; those that were stored are known when they are written again.
            StorageError: the disk failed.
        """
        return await self.submit(items)

    def submit(self, items: Sequence[Item]) -> "asyncio.Future[list[bool]]":
        """`write` without a task of its own: raises `BufferFullError` at once, the rest by the future."""
        self._check_open()
        if not self.has_room(len(items)):
            fresh = sum(not known for known in self.knows(item.uid for item in items))
            if fresh and not self.has_room(fresh):
                raise BufferFullError(
                    f"the buffer holds {self._state.items} items of at most {self.settings.max_buffer_size}"
                    f" ({self._live_bytes()} bytes); read or drop some, then write again"
                )
        return self._commits.write(items)

    async def try_writing(self) -> None:
        """Finds out whether writes are taken. Costs nothing where the last one was.

        After a full disk it writes an empty record, as writes are written: with room left for reading it all.
        Nobody may be writing by now, because of what this says.

        Raises:
            StorageError: the disk is full still.
            RollstreamError: the buffer has stopped.
        """
        self._check_open()
        if not self._commits.full and self._commits.broken_by is None:
            return
        trying = self._trying
        if trying is None or trying.done():  # one for all who ask: acks wait in the same line
            trying = self._trying = asyncio.ensure_future(self._commits.control(Event, needs_room=True))
            trying.add_done_callback(lambda tried: tried.cancelled() or tried.exception())
        await asyncio.shield(trying)

    def has_room(self, items: int) -> bool:
        """Whether so many more may be written now."""
        stored = self._state.items + self._commits.waiting_items
        if stored + items > self.settings.max_buffer_size:
            return False
        return self.settings.max_bytes is None or self._live_bytes() < self.settings.max_bytes

    def room(self) -> int:
        """Items that still fit, as far as their number goes."""
        return max(0, self.settings.max_buffer_size - self._state.items - self._commits.waiting_items)

    async def wait_for_room(self, timeout: float, items: int = 1) -> bool:
        """Whether there is room for so many more, now or within `timeout` seconds."""
        return await self._wait(lambda: self.has_room(items), timeout)

    def knows(self, uids: Iterable[str]) -> list[bool]:
        """By uid, whether an item with it was stored: it is here, or among the last that left."""
        known = self._state.uids
        return [hash_uid(uid) in known for uid in uids]

    # -- reading

    @property
    def version(self) -> int:
        """Grows whenever there may be another candidate than before."""
        return self._state.version

    def candidates(
        self,
        *,
        task_type: str | None = None,
        rollouts: Collection[str | None] | None = None,
        limit: int | None = None,
        timed_out_only: bool = False,
    ) -> list[GroupView]:
        """Groups to be judged, those that came back first, then in order of completion; no instance twice.

        They are looked at, not taken: see `decide`. Costs some microseconds a group, so give a limit.

        Args:
            task_type: of this task; None: of any.
            rollouts: of these rollouts, where None stands for items outside of one; None: of any.
            limit: so many at most.
            timed_out_only: only those that timed out since they were asked for in this way, the longest
                overdue first, also of instances that `groups_per_cycle` holds back, and maybe several of
                one: to be dropped if need be. About a thousand of them, if there is no other limit.
        """
        state = self._state
        found: Iterable[Group] = state.candidates(task_type, rollouts)
        if timed_out_only:
            limit = 4 * SLICE if limit is None else limit
            found = state.take_overdue(task_type, rollouts, limit)
        return [state.view(group) for group in itertools.islice(found, limit)]

    def walk(
        self, *, task_type: str | None = None, rollouts: Collection[str | None] | None = None
    ) -> Iterator[GroupView]:
        """As `candidates`, all of them and one by one: others may have their turn between two of them.

        What leaves the line meanwhile is passed over; what joins it may not come.
        """
        return map(self._state.view, self._state.candidates(task_type, rollouts, lasting=True))

    def free_ones(self, views: Iterable[GroupView], ahead: Callable[[], int]) -> Iterator[GroupView]:
        """Those of candidates that no cycle holds back, each as soon as `ahead()` others are to be leased.

        A candidate counts on it that all before it are handed out: the reader may pass some of them over.
        """
        held: deque[GroupView] = deque()  # no more than a cycle has groups
        given = 0

        def is_held(view: GroupView) -> bool:
            return self._state.is_held((view.task_type, view.instance_id), ahead())

        for view in views:
            if given > ahead() and is_held(view):
                held.append(view)
            else:
                yield view
                given += 1
            while held and not is_held(held[0]):
                yield held.popleft()
                given += 1

    @property
    def ready_groups(self) -> int:
        """Groups in line to be judged."""
        return self._state.waiting_groups()

    @property
    def left_in_cycle(self) -> int | None:
        """Groups that complete the cycle of a trainer that reads in cycles; None: there are no cycles."""
        return self._state.left_in_cycle

    async def begin_cycle(self) -> None:
        """A trainer begins: what an earlier one had of its last cycle is not counted into its first one."""
        self._check_open()
        if self.settings.groups_per_cycle is not None and self._state.handed != self._state.cycle_began:
            await self._commits.control(lambda: Event(cycle=True))

    async def wait_for_candidates(self, timeout: float, seen: int | None = None) -> bool:
        """Whether `version` is another than `seen` (default: than now), now or within `timeout` seconds."""
        before = self._state.version if seen is None else seen
        return await self._wait(lambda: self._state.version != before, timeout)

    async def decide(
        self,
        *,
        lease: Sequence[GroupView] = (),
        consumer: str | None = None,
        lease_seconds: float | None = None,
        drop: Sequence[tuple[GroupView, str]] = (),
        keep: Sequence[GroupView] = (),
        quarantine: Sequence[tuple[GroupView, str]] = (),
        into: str | None = None,
        read_id: str | None = None,
    ) -> Lease | None:
        """What became of candidates: durable, all of it or nothing.

        Groups are claimed when this is called, before it waits for anything: no two readers get the same. A
        group that is no candidate any more, or has other items than its view, is left out.

        Args:
            lease: handed out, in this order.
            consumer: who gets them.
            lease_seconds: after which they come back; None: as the settings say.
            drop: leave undelivered, each with its reason.
            keep: are no candidates again before they change, or have timed out.
            quarantine: are set aside, each with the traceback of what went wrong.
            into: a lease that grows by what is leased, so that a large one can be made some groups at a time.
            read_id: what a new lease's id begins with, see `return_read`.

        Returns:
            The lease, with the groups that were leased by this call; None: no group could be leased, or the
            one that was to grow is gone or has expired.

        Raises:
            StorageFullError, StorageError: nothing was decided.
        """
        self._check_open()
        state = self._state
        leased: list[GroupView] = []
        for view in lease:
            if not state.is_held((view.task_type, view.instance_id), len(leased)) and self._claim(view):
                leased.append(view)
        dropped = [(view, reason) for view, reason in drop if self._claim(view)]
        quarantined = [(view, cause) for view, cause in quarantine if self._claim(view)]
        claimed = [view.number for view in leased]
        claimed += [view.number for view, _ in dropped]
        claimed += [view.number for view, _ in quarantined]
        for view in keep:
            group = state.groups.get(view.number)
            if group is not None and state.is_candidate(group) and len(group) == view.size:
                state.keep(group, self._clock())
        self._arm()
        if not claimed:
            return None
        lease_id = into or (secrets.token_hex(8) if read_id is None else lease_of_read(read_id))
        seconds = self.settings.lease_seconds if lease_seconds is None else lease_seconds
        granted: list[int] = []

        def plan() -> Event | None:
            granted.clear()
            for view in leased if into is None or state.can_grow(into) else ():
                held = state.is_held((view.task_type, view.instance_id), len(granted))
                if not held and self._is_as_seen(view):
                    granted.append(view.number)
            gone = [drop for drop in drops if self._is_as_seen(views[drop.group])]
            aside = [(view.number, tail_of(cause)) for view, cause in quarantined if self._is_as_seen(view)]
            taken = granted + [drop.group for drop in gone] + [number for number, _ in aside]
            undelivered = {drop.group for drop in gone}
            short = [
                group
                for number in taken
                if not (group := state.groups[number]).closed or number in state.resized
            ]
            event = Event(
                gone=[drop.group for drop in gone],
                quarantined=aside,
                counts=finished(state, short),
                dropped=gone,
                sizes=[(group.number, group.size) for group in short if group.number not in undelivered],
            )
            if granted:
                event.leases = [LeaseFact(lease_id, consumer, seconds, list(granted))]
                event.leases[0].counted = self.settings.groups_per_cycle is not None
                if event.leases[0].counted:
                    event.handed = [state.groups[number].instance for number in granted]
            if gone:
                event.buried = self._burial(event.gone)
            return event if taken else None

        views = {view.number: view for view, _ in dropped}
        try:
            drops = await asyncio.to_thread(self._describe_drops, dropped) if dropped else []
            await self._commits.control(plan)
        except asyncio.CancelledError:
            if granted:
                self._spawn(self._return_quietly(lease_id))
            raise
        except RollstreamError:
            state.put_overdue(view.number for view, _ in dropped)
            raise
        finally:
            self._unclaim(claimed)
        held = state.leases.get(lease_id)
        return None if held is None or not granted else self._view_lease(held, granted)


__all__ = ["AckResult", "BufferStats", "GroupView", "Lease", "Ledger", "LedgerSettings", "QuarantinedGroup"]
