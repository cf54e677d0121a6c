"""Leases: which groups are in whose hands, until when, and how leases ended."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from rollstream.buffer.group_state import Group, GroupView, LeaseState, Task
from rollstream.buffer.lines import Lines
from rollstream.buffer.log_records import Event, LeaseFact

ENDED_LEASES = 10_000
"""Leases whose end is remembered, so that an ack that is tried again succeeds again."""

_SPARE_DEADLINES = 4096
"""Deadlines that no longer hold, beyond as many as there are leases, before they are looked through."""


class LeaseBook(Lines):
    """The lines, and what was taken from them."""

    def __init__(self, default: Task, timeout: float, groups_per_cycle: int | None) -> None:
        """See `Lines`."""
        super().__init__(default, timeout, groups_per_cycle)
        self.leases: dict[str, LeaseState] = {}
        self.ended: dict[str, tuple[str, int]] = {}
        """Lease id -> how it ended, segment of the newest record; the oldest first."""
        self.quarantine: dict[int, tuple[str, int]] = {}
        """Group number -> traceback, segment of the newest record."""
        self._deadlines: list[tuple[float, str]] = []
        """Of leases; one that was extended, or is gone, has entries that no longer hold."""
        self._leased = 0
        self._lapses = 0
        """While a log of an earlier version is read: number of the next one."""
        self._expected: dict[int, str | None] = {}
        """While the log is read: groups a record spoke of whose items (copied by a cleaning) come later ->
        their lease, or None for quarantine."""
        self._replaying = False

    def can_grow(self, lease_id: str) -> bool:
        """Whether groups can be added to a lease."""
        lease = self.leases.get(lease_id)
        return lease is not None and not lease.expired and not lease.lost

    def revive(self, lease: LeaseState, deadline: float) -> None:
        """The lease gets more time; if it had expired, its groups are its own again."""
        watched = deadline == lease.deadline and not lease.expired
        lease.deadline = deadline
        if lease.expired:
            lease.expired = False
            for number in lease.groups:
                self._withdraw(self.groups[number])
            if lease.counted:
                self._resume(lease.groups)
        if not watched:
            self._watch_lease(lease)

    def is_idle(self, group: Group) -> bool:
        """Whether it is open or in line, or was looked at and left alone: in nobody's hands."""
        lease = None if group.lease is None else self.leases.get(group.lease)
        return not group.quarantined and (lease is None or lease.expired)

    def is_idle_as(self, view: GroupView) -> bool:
        """The same, of a group that has as many items as its view."""
        group = self.groups.get(view.number)
        return group is not None and len(group) == view.size and self.is_idle(group)

    def complete(self, event: Event) -> None:
        """Adds what a record has to say of the trainer's cycle: a log that is read anew must not guess it.

        Whose groups a lease holds is not known there while the lease's own record, written again by a
        cleaning, comes later.
        """
        if event.ends or event.released or event.gone or event.leases or event.quarantined:
            event.freed = self._freed_by(event)

    # -- the trainer's cycle

    def _freed_by(self, event: Event) -> list[int]:
        """Groups that give up their places in the trainer's cycle: their readers can't ack them any more."""
        freed: list[int] = []
        ended = {lease_id for lease_id, _ in event.ends}
        for lease_id, outcome in event.ends:
            lease = self.leases.get(lease_id)
            if lease is not None and lease.counted and outcome != "acked":
                freed += lease.groups
        for lease_id, number in event.released:
            lease = self.leases.get(lease_id)
            if lease is not None and lease.counted:
                freed.append(number)
        released = {number for _, number in event.released}
        taken: list[tuple[str | None, int]] = [(None, number) for number in event.gone]
        taken += [(None, number) for number, _ in event.quarantined]
        taken += [(fact.id, number) for fact in event.leases for number in fact.groups]
        for taker, number in taken:
            group = self.groups.get(number)
            holder = self._expected.get(number) if group is None else group.lease
            if holder is None or holder == taker or holder in ended or number in released:
                continue
            lease = self.leases.get(holder)
            if lease is not None and lease.counted:
                ended.add(holder)  # lost as a whole
                freed += lease.groups
        return freed

    def _apply_lapses(self, event: Event) -> None:
        """Of a log of an earlier version, in which expiry was recorded."""
        for lapse in event.lapses:
            lease = self.leases.get(lapse.lease)
            if lease is not None:
                lease.counted = lapse.counted
            if lapse.number < self._lapses:
                continue
            self._lapses = lapse.number + 1
            if lapse.counted:
                self._hand_out([0] * len(lapse.instances), lapse.instances)
            else:
                self._take_back_newest(lapse.instances)

    # -- what a record of the log changes

    def _lease(self, fact: LeaseFact, segment: int, now: float) -> None:
        lease = self.leases.get(fact.id)
        if lease is None:
            self._leased += 1
            lease = LeaseState(
                fact.id,
                fact.consumer,
                fact.seconds,
                now + fact.seconds,
                segment,
                {},
                self._leased,
                fact.granted or fact.seconds,
            )
            self.leases[fact.id] = lease
            self._watch_lease(lease)
        elif not self._replaying:
            if not self._grow(lease, fact.groups, segment):  # a cleaning wrote it again
                lease.segment = segment
            return
        if not lease.groups or not lease.groups.keys().isdisjoint(fact.groups):  # else it grows
            lease.segment = segment
            lease.lost = fact.lost
            lease.left_out = fact.left_out
            lease.granted = fact.granted or fact.seconds
            lease.counted = fact.counted
        for number in fact.groups:
            group = self.groups.get(number)
            if group is None:
                if self._replaying:
                    if self._expected.get(number) != fact.id:
                        self._lose_expected(number)
                    self._expected[number] = fact.id
                    self.sealed[number] = segment
                    lease.groups[number] = None
                continue
            if group.lease != fact.id:
                self._take_from_lease(group)
            self._seal(group, segment)
            self._withdraw(group)
            group.lease = fact.id
            lease.groups[number] = None
        if not lease.groups:
            self._forget_lease(lease, "acked", segment)

    def _grow(self, lease: LeaseState, numbers: Iterable[int], segment: int) -> bool:
        """Adds groups to a lease; whether there were any. Its first record counts on: it has the others."""
        fresh = [number for number in numbers if number not in lease.groups]
        for number in fresh:
            group = self.groups[number]
            self._take_from_lease(group)
            self._seal(group, segment)
            self._withdraw(group)
            group.lease = lease.id
            lease.groups[number] = None
        return bool(fresh)

    def _extend(self, lease_id: str, seconds: float, now: float) -> None:
        lease = self.leases.get(lease_id)
        if lease is not None:  # else, while the log is read, a record that comes later says it
            lease.granted = seconds
            if not self._replaying:
                self.revive(lease, now + seconds)

    def _end_lease(self, lease_id: str, outcome: str, segment: int) -> None:
        lease = self.leases.get(lease_id)
        if lease is not None:
            if outcome != "acked":
                self._give_back(lease)
            elif lease.expired and lease.counted:  # late, but its reader has them
                self._resume(lease.groups)
            for number in lease.groups:
                group = self.groups.get(number)
                if group is not None:
                    group.lease = None
                self._expected.pop(number, None)
            lease.groups = {}
            del self.leases[lease_id]
        self._remember_end(lease_id, outcome, segment)

    def _release(self, lease_id: str, number: int) -> None:
        """The lease's own reader gives the group away."""
        lease = self.leases.get(lease_id)
        group = self.groups.get(number)
        if group is not None:
            group.lease = None
        self._expected.pop(number, None)
        if lease is not None:
            lease.groups.pop(number, None)
            if not lease.groups:
                self._forget_lease(lease, "acked", lease.segment)

    def _forget_lease(self, lease: LeaseState, outcome: str, segment: int) -> None:
        del self.leases[lease.id]
        self._remember_end(lease.id, outcome, segment)

    def _remember_end(self, lease_id: str, outcome: str, segment: int) -> None:
        self.ended.pop(lease_id, None)
        self.ended[lease_id] = (outcome, segment)
        if len(self.ended) > ENDED_LEASES:
            del self.ended[next(iter(self.ended))]

    def _take_from_lease(self, group: Group) -> None:
        """The group goes elsewhere than its lease, which has expired, says."""
        if group.lease is not None:
            self._lose(group.lease, group.number)
        group.lease = None

    def _lose(self, lease_id: str, number: int) -> None:
        lease = self.leases.get(lease_id)
        if lease is not None:
            lease.counted = False
            lease.groups.pop(number, None)
            lease.lost = True
            if not lease.groups:
                self._forget_lease(lease, "lost", lease.segment)

    def _lose_expected(self, number: int) -> None:
        lease_id = self._expected.pop(number, None)
        if lease_id is not None:
            self._lose(lease_id, number)
        self.quarantine.pop(number, None)

    def _quarantine(self, number: int, cause: str, segment: int) -> None:
        group = self.groups.get(number)
        if group is None:
            if self._replaying:
                self._lose_expected(number)
                self._expected[number] = None
                self.sealed[number] = segment
                self.quarantine[number] = (cause, segment)
            return
        self._take_from_lease(group)
        self._seal(group, segment)
        self._withdraw(group)
        group.quarantined = True
        self.quarantine[number] = (cause, segment)

    def _retry(self, number: int) -> None:
        self.quarantine.pop(number, None)
        self._expected.pop(number, None)
        group = self.groups.get(number)
        if group is not None:
            group.quarantined = False
            group.kept = -1
            if not self._replaying:
                self._offer(group)

    def _meet(self, group: Group) -> None:
        """Items of a group that a record spoke of before."""
        group.closed = group.number in self.sealed
        if group.number not in self._expected:
            return
        lease_id = self._expected.pop(group.number)
        group.lease = lease_id
        group.quarantined = lease_id is None

    # -- time

    def next_deadline(self) -> float | None:
        """When `advance` has something to do, monotonic time."""
        deadlines = self._deadlines
        while deadlines and not self._still_holds(*deadlines[0]):
            heapq.heappop(deadlines)
        ahead = [heap[0][0] for heap in (deadlines, self._timers) if heap]
        return min(ahead, default=None)

    def advance(self, now: float) -> None:
        """Lets groups time out and leases expire."""
        while self._timers and self._timers[0][0] <= now:
            deadline, number = heapq.heappop(self._timers)
            group = self.groups.get(number)
            if group is None:
                continue
            group.watched = False
            if group.quarantined or (group.closed and group.kept < 0):
                continue
            lease = None if group.lease is None else self.leases.get(group.lease)
            if lease is not None and not lease.expired:
                continue
            if group.touched + self._timeout > deadline and not group.closed:  # an item came since
                self._watch(group, group.touched)
                continue
            group.timed_out = True
            group.kept = -1
            self._offer(group)
        late: dict[str, LeaseState] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            if self._still_holds(*entry):
                late[entry[1]] = self.leases[entry[1]]
        # The first one's groups are first in line, so they are put there last.
        for other in sorted(late.values(), key=lambda lease: lease.order, reverse=True):
            self._expire(other)

    def _expire(self, lease: LeaseState) -> None:
        """Its groups are candidates again; the lease can still be acked while they are."""
        lease.expired = True
        if lease.counted:
            self._pause(lease.groups)
        self._give_back(lease)

    def _give_back(self, lease: LeaseState) -> None:
        for number in reversed(lease.groups):
            group = self.groups.get(number)
            if group is None:
                continue
            group.kept = -1
            if not self._replaying and not group.waiting:
                group.waiting = True
                if group.timed_out:
                    self.overdue[number] = None
                line = self._returned.setdefault(group.line, OrderedDict())
                line[number] = None
                line.move_to_end(number, last=False)
                self.version += 1

    def _still_holds(self, deadline: float, lease_id: str) -> bool:
        lease = self.leases.get(lease_id)
        return lease is not None and not lease.expired and lease.deadline == deadline

    def _watch_lease(self, lease: LeaseState) -> None:
        if len(self._deadlines) > 2 * len(self.leases) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._still_holds(*entry)]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))
