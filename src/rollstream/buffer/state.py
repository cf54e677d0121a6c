"""What the buffer holds, in memory: groups, leases, uids, counters. No clock, no disk.

The life of a group:

    open --+-- has group_size items (closed) --+
           +-- enough to be judged ------------+--> candidate --> leased --+--> acked: gone
           +-- no item for a while (timed out)-+     ^  |  |               |
                                                     |  |  |  <------------+ returned, expired: first in line
                              changed or timed out --+  |  +--> dropped: gone
                                                     |  |  +--> quarantined --> candidate again, or dropped
                                                     +- kept

It changes only by records of the log: by `add_items` when they are durable, by `add_item` when the log is
read anew, by `move_item` and `apply` in both cases; both ways lead to the same state. What is not in the log
(`keep`, timing out, expiry) starts anew after a restart.

    Cycle (what the trainer had) <- Lines (who is judged next) <- LeaseBook --+
                                                                              +--> BufferState
    RolloutFacts (records and counts of rollouts) ----------------------------+

Payloads are not here: a group knows where its items are in the log, 36 bytes an item.
"""

import bisect
import sys
from collections import deque
from collections.abc import Sequence

from rollstream.buffer.group_state import (
    NO_VERSION,
    RECORD,
    RECORD_SIZE,
    SEGMENT_SHIFT,
    Counters,
    Group,
    NewItem,
    Task,
    Totals,
    segment_of,
)
from rollstream.buffer.lease_book import LeaseBook
from rollstream.buffer.log_records import Dropped, Event, ItemRecord, Start, group_of, hashes
from rollstream.buffer.rollout_facts import RolloutFacts
from rollstream.buffer.uid_memory import UidMemory

LISTED_DROPS = 10_000
"""Dropped groups that are listed; the counts go on."""

_NAN = float("nan")
_pack_record = RECORD.pack


class BufferState(LeaseBook, RolloutFacts):
    """See the module."""

    def __init__(
        self, *, default: Task, timeout: float, remember_uids: int, groups_per_cycle: int | None
    ) -> None:
        """`default`: for task types that are not known; `timeout`: seconds since a group's last item."""
        LeaseBook.__init__(self, default, timeout, groups_per_cycle)
        RolloutFacts.__init__(self)
        self.active: str | None = None
        """The task of items that name none."""
        self.uids = UidMemory(remember_uids)
        self.counters = Counters()
        self.totals: dict[str, Totals] = {}
        self.listed: deque[tuple[int, Dropped]] = deque(maxlen=LISTED_DROPS)
        """Ticket of the record, and what was dropped."""
        self.live_bytes: dict[int, int] = {}
        """Segment -> bytes of its frames that hold live items."""
        self.items = 0
        self.next_ticket = 1
        self.next_group = 1
        self._positions: dict[int, list[int]] = {}
        """While the log is read: which items of a group are known."""
        self._sizes: dict[int, tuple[int, int]] = {}
        """While the log is read: what a record says of a group's size, with the record's ticket."""

    # -- what a record of the log changes

    def add_items(self, items: Sequence[NewItem], *, written_at: float, now: float) -> None:
        """Items that became durable together, in the order of their tickets, all in one segment.

        Args:
            items: no copies, nothing that is known already.
            written_at: Unix time that their frames have, seconds.
            now: monotonic time, seconds.
        """
        groups, uids = self.groups, self.uids
        length = 0
        for new in items:
            key = new.key
            totals = self.totals.get(key[0]) or self.totals.setdefault(key[0], Totals())
            group = groups.get(new.group)
            if group is None:
                key = (sys.intern(key[0]), _interned(key[1]), key[2])
                group = self._begin_group(
                    Group(new.group, key, new.group_size, new.ticket, now, written_at), totals
                )
                self.open[key] = group
                self._watch(group, now)
            else:
                if group.timed_out:
                    group.timed_out = False
                    self.overdue.pop(new.group, None)
                    self._watch(group, now)
                group.touched = now
                group.ticket = new.ticket
                if written_at > group.written_at:
                    group.written_at = written_at
            reward, version = new.item.reward, new.item.policy_version
            if reward is not None:
                totals.reward_sum += reward
                totals.rewards += 1
            group.records += _pack_record(
                new.where,
                new.uid,
                new.length,
                _NAN if reward is None else reward,
                NO_VERSION if version is None else version,
            )
            totals.items += 1
            uids.add(new.uid)
            length += new.length
            if new.finished:
                self._close(group)
                self.set_count(key[1], key[2], new.finished, segment_of(new.where))
            if group.closed or group.waiting or len(group) >= self._enough(group):
                self._offer(group)
        self.next_ticket = items[-1].ticket + 1
        self.counters.items_written += len(items)
        self.items += len(items)
        segment = segment_of(items[-1].where)
        self.live_bytes[segment] = self.live_bytes.get(segment, 0) + length

    def _begin_group(self, group: Group, totals: Totals) -> Group:
        self.groups[group.number] = group
        self.next_group = max(self.next_group, group.number + 1)
        totals.groups += 1
        rollout_id = group.key[1]
        if rollout_id is not None:
            self.groups_of[rollout_id] = self.groups_of.get(rollout_id, 0) + 1
        return group

    def add_item(
        self, record: ItemRecord, *, ticket: int, position: int, where: int, length: int, now: float
    ) -> None:
        """An item of a log that is read anew: it may be a copy of one that is known, or out of order."""
        group = self.groups.get(record.group)
        if group is not None and record.uid in self.uids:
            for known, item in enumerate(group.places()):
                if item.uid == record.uid:
                    self.move_item(group, known, where)
                    return
        task_type = record.task_type
        new = ticket >= self.next_ticket  # or the copy of one whose segment is gone: it was counted
        if new:
            self.next_ticket = ticket + 1
            self.counters.items_written += 1
        totals = self.totals.get(task_type) or self.totals.setdefault(task_type, Totals())
        if group is None:
            key = (sys.intern(task_type), _interned(record.rollout_id), record.instance_id)
            group = self._begin_group(
                Group(record.group, key, record.group_size, ticket, now, record.written_at), totals
            )
            self._meet(group)
        if ticket >= group.ticket:  # not a copy that stands behind newer items
            said_at, said = self._sizes.get(record.group, (0, 0))
            group.size = said if said_at > ticket else record.group_size
        reward = record.reward
        positions = self._positions.setdefault(record.group, [])
        at = bisect.bisect(positions, position)
        positions.insert(at, position)
        at *= RECORD_SIZE
        group.records[at:at] = _pack_record(
            where,
            record.uid,
            length,
            _NAN if reward is None else reward,
            NO_VERSION if record.version is None else record.version,
        )
        group.touched = now
        group.ticket = max(group.ticket, ticket)
        group.written_at = max(group.written_at, record.written_at)
        if record.finished:
            self._close(group)
            if new:
                self.set_count(group.key[1], group.key[2], record.finished, segment_of(where))
        self.uids.add(record.uid)
        self.items += 1
        totals.items += 1
        if reward is not None:
            totals.reward_sum += reward
            totals.rewards += 1
        segment = segment_of(where)
        self.live_bytes[segment] = self.live_bytes.get(segment, 0) + length

    def move_item(self, group: Group, position: int, where: int) -> None:
        """The item's frame was copied to `where`."""
        at = position * RECORD_SIZE
        old, uid, length, reward, version = RECORD.unpack_from(group.records, at)
        RECORD.pack_into(group.records, at, where, uid, length, reward, version)
        self._lose_bytes(segment_of(old), length)
        segment = segment_of(where)
        self.live_bytes[segment] = self.live_bytes.get(segment, 0) + length

    def move_frame(self, body: bytes, hint: int, old: int, new: int) -> None:
        """The frame of an item was copied from one place of the log to another."""
        group = self.groups.get(group_of(body))
        position = None if group is None else group.find(old, hint)
        if group is not None and position is not None:
            self.move_item(group, position, new)

    def is_live(self, body: bytes, hint: int, where: int) -> bool:
        """Whether the item's frame at this place is the one that counts."""
        group = self.groups.get(group_of(body))
        return group is not None and group.find(where, hint) is not None

    def apply(self, event: Event, *, ticket: int, segment: int, now: float, later: bool = False) -> None:
        """An event of the log; `later`: the caller removes and buries what is gone, when this is done."""
        self.next_ticket = max(self.next_ticket, ticket + 1)
        self._apply_lapses(event)
        if event.returned is None:
            self._take_back(self._freed_by(event) if event.freed is None else event.freed)
        else:
            self._take_back_newest(event.returned)
        for lease_id, outcome in event.ends:
            self._end_lease(lease_id, outcome, segment)
        for lease_id, number in event.released:
            self._release(lease_id, number)
        if not later:
            for number in event.gone:
                self.remove(number)
        for fact in event.leases:
            self._lease(fact, segment, now)
        for lease_id, seconds in event.extended:
            self._extend(lease_id, seconds, now)
        for number, cause in event.quarantined:
            self._quarantine(number, cause, segment)
        for number in event.retried:
            self._retry(number)
        if event.left_out is not None and (lease := self.leases.get(event.left_out[0])) is not None:
            # The lease's own record counts on: a cleaning of its segment writes both anew.
            lease.left_out = lease.left_out + event.left_out[1]
        if event.active_rollout is not None and event.active_rollout != self.active_rollout:
            self.active_rollout = event.active_rollout
            self.counts.clear()
            self._count_bytes = 0
        for rollout_id, instance_id, count in event.counts:
            self.set_count(rollout_id, instance_id, count, segment)
        for rollout in event.rollouts:
            self._save_rollout(rollout, segment)
        for rollout_id in event.forgotten:
            self._forget_rollout(rollout_id)
        if event.buried is not None and not later:
            self.uids.bury(event.buried[0], hashes(event.buried[1]))
        for number, size in event.sizes:
            self._set_size(number, size, ticket, segment)
        for task_type, group_size, judge_from in event.tasks:
            self._set_task(task_type, Task(group_size, judge_from))
        for number in event.sealed:
            if number in self.groups:
                self._seal(self.groups[number], segment)
            if number in self.sealed or self._replaying:
                self.sealed[number] = segment
        if event.active is not None:
            self.active = event.active
        for lease_id, outcome in event.ended:
            self._remember_end(lease_id, outcome, segment)
        if event.handed:
            self._hand_out([number for fact in event.leases for number in fact.groups], event.handed)
        if event.cycle:
            self._begin_cycle()
        for drop in event.dropped:
            self._count_drop(ticket, drop)
        self.counters.groups_delivered += event.delivered[0]
        self.counters.items_delivered += event.delivered[1]

    def reading_bytes(self) -> int:
        """About what it takes in the log to read all that is stored, a group at a time, and to clean it.

        Leases, acks and drops, and then the uids of what is gone and other facts written again.
        """
        facts = 9 * self.uids.buried + self._count_bytes + self.rollout_bytes
        return 512 * len(self.groups) + 32 * self.items + facts

    def fact_bytes(self) -> int:
        """About what everything but items would take in the log, written anew."""
        size = (
            9 * self.uids.buried + 10 * len(self.sealed) + 12 * len(self.sized) + 64 * len(self.ended) + 512
        )
        size += self._count_bytes
        for lease in self.leases.values():
            size += 10 * len(lease.groups) + 128 + sum(40 * len(left.uids) for left in lease.left_out)
        size += sum(len(cause) + 64 for cause, _ in self.quarantine.values())
        return size + self.rollout_bytes

    def remove(self, number: int) -> None:
        """A group that left, delivered or not."""
        self.resized.discard(number)
        self._positions.pop(number, None)
        self._sizes.pop(number, None)
        group = self.groups.pop(number, None)
        if group is None:
            self._lose_expected(number)
            self.sealed.pop(number, None)
            self.sized.pop(number, None)
            return
        if self.open.get(group.key) is group:
            del self.open[group.key]
        self._withdraw(group)
        self.quarantine.pop(number, None)
        self.sealed.pop(number, None)
        self.sized.pop(number, None)
        self._take_from_lease(group)
        totals = self.totals[group.key[0]]
        for where, _, length, reward, _ in RECORD.iter_unpack(bytes(group.records)):
            self._lose_bytes(where >> SEGMENT_SHIFT, length)
            if reward == reward:
                totals.reward_sum -= reward
                totals.rewards -= 1
        totals.groups -= 1
        self._forget_group_of(group.key[1])
        totals.items -= len(group)
        self.items -= len(group)
        if not totals.rewards:
            totals.reward_sum = 0.0  # what rounding left
        if not totals.groups:
            del self.totals[group.key[0]]

    def _lose_bytes(self, segment: int, length: int) -> None:
        if segment in self.live_bytes:  # else it was damaged and is set aside
            self.live_bytes[segment] -= length

    def _set_task(self, task_type: str, task: Task) -> None:
        self.tasks[task_type] = task
        for key, group in self.open.items():  # there are none while the log is read
            if key[0] == task_type and self.follows_task(key):
                self._offer(group)

    def _set_size(self, number: int, size: int, ticket: int, segment: int) -> None:
        """What its older items say of its size counts no more. Whether it is in line is for the caller."""
        group = self.groups.get(number)
        if group is not None:
            group.size = size
        self.resized.discard(number)
        if self._replaying:  # items, copied by a cleaning, may come later
            self._sizes[number] = ticket, size
        if group is not None or self._replaying:
            self.sized[number] = segment

    def _count_drop(self, ticket: int, drop: Dropped) -> None:
        groups, items = self.counters.dropped.get(drop.reason, (0, 0))
        self.counters.dropped[drop.reason] = (groups + drop.whole, items + len(drop.uids))
        self.listed.append((ticket, drop))

    # -- reading the log anew

    def start_replay(self) -> None:
        """Before the first record of the log."""
        self._replaying = True

    def begin_segment(self, start: Start, segment: int) -> None:
        """The first record of a segment; the first segment's says what was counted before."""
        self.next_group = max(self.next_group, start.group)
        self.uids.burials = max(self.uids.burials, start.burials)
        if self.next_ticket > 1 and start.ticket <= self.next_ticket:
            return  # it says what was read
        self.next_ticket = start.ticket
        self.counters = Counters(
            start.items_written, start.groups_delivered, start.items_delivered, dict(start.dropped)
        )
        self.active = start.active
        self.active_rollout = start.active_rollout
        for task_type, group_size, judge_from in start.tasks:
            self.tasks[task_type] = Task(group_size, judge_from)
        places = [(number, (task_type, instance_id)) for number, task_type, instance_id in start.places]
        for task_type, instance_id, _ in sorted((*start.recent, *start.earlier), key=lambda known: known[2]):
            places.append((0, (task_type, instance_id)))
        self._set_places(start.handed, start.cycle_began, places)
        self._lapses = start.lapses

    def end_replay(self, now: float) -> None:
        """After the last record: leases get their full time again, groups stand in their order."""
        self._replaying = False
        self._positions.clear()
        self._sizes.clear()
        for number in list(self._expected):  # their items were damaged
            lease_id = self._expected.pop(number)
            if lease_id is None:
                self.quarantine.pop(number, None)
            elif lease_id in self.leases:
                self.leases[lease_id].groups.pop(number, None)
        self.sealed = {number: at for number, at in self.sealed.items() if number in self.groups}
        self.sized = {number: at for number, at in self.sized.items() if number in self.groups}
        for group in sorted(self.groups.values(), key=lambda group: group.ticket):
            group.touched = now
            if group.lease is not None or group.quarantined:
                continue
            if not group.closed:
                size = group.size
                if self.follows_task(group.key):
                    group.size = self.task(group.key[0]).group_size
                group.closed = len(group) >= group.size
                if group.closed and group.size != size:
                    self.resized.add(group.number)
            if not group.closed:
                self.open[group.key] = group
            self._watch(group, now)
            self._offer(group)
        for lease in list(self.leases.values()):
            lease.deadline = now + lease.granted
            self._watch_lease(lease)
            if not lease.groups:
                self._forget_lease(lease, "lost" if lease.lost else "acked", lease.segment)
            elif lease.lost:
                self._expire(lease)

    def start_record(self) -> Start:
        """For the head of a new segment."""
        counters = self.counters
        return Start(
            ticket=self.next_ticket,
            group=self.next_group,
            burials=self.uids.burials,
            items_written=counters.items_written,
            groups_delivered=counters.groups_delivered,
            items_delivered=counters.items_delivered,
            dropped=dict(counters.dropped),
            tasks=[(name, *task) for name, task in self.tasks.items()],
            active=self.active,
            active_rollout=self.active_rollout,
            handed=self.handed,
            cycle_began=self.cycle_began,
            places=[(number, *instance) for number, instance in self._places_in_order()],
        )


def _interned(text: str | None) -> str | None:
    return None if text is None else sys.intern(text)
