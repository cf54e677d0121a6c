"""The ledger against the reference in memory: any order of calls, clocks, restarts and kills."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollstream.buffer.groups import GroupSettings, judge_rewards
from rollstream.buffer.ledger import GroupView, Ledger, LedgerSettings
from rollstream.buffer.rollout_record import RolloutRecord
from rollstream.errors import ConflictError, NotFoundError
from rollstream.store.journal import FILE_HEADER_SIZE
from tests.unit.buffer.ledger_worlds import Clock, durable_state, item
from tests.unit.buffer.reference import Answer, Id, ReferenceBuffer, RefGroup, RefLease

T = TypeVar("T")

GROUPS = GroupSettings(group_size=3, group_timeout_seconds=30.0)
LEASE = 50.0
SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a sync costs nothing there
IDS: list[Id] = [1, 2, "1", "two"]


class Reference(ReferenceBuffer):
    """As the ledger has it: what timed out takes items until it is decided on; expiry is not remembered."""

    quarantine: list[RefGroup]
    group_size = GROUPS.group_size
    rollout = "none"  # it has it for the task: a rollout's groups are its own, too; reads are of one

    def write(self, uid: str, task_type: str, instance_id: Id, reward: float | None, now: float) -> bool:
        group = self.open.get((task_type, type(instance_id), instance_id))
        if group is None or not group.timed_out or uid in self.known:
            return super().write(uid, task_type, instance_id, reward, now)
        place = self.line.index(group)
        group.timed_out, group.last_item = False, now
        self.line.remove(group)
        super().write(uid, task_type, instance_id, reward, now)
        if self.line and self.line[-1] is group:  # whole now: it keeps its place
            self.line.insert(place, self.line.pop())
        return True

    def enough(self, group: RefGroup) -> int:
        group.size = group.size or self.group_size
        return group.size

    def resize(self, size: int) -> None:
        """Groups of the rollout that runs, and of none, have another size from now on, the open ones too."""
        self.group_size = size
        for key, group in list(self.open.items()):
            if key[0] in (self.rollout, "none"):
                group.size = size
                if len(group.uids) >= size:
                    del self.open[key]
                    self.line += [] if group.timed_out else [group]

    def is_valid(self, group: RefGroup) -> bool:
        settings = replace(self.settings, group_size=group.size)
        return judge_rewards(group.rewards, settings, timed_out=group.timed_out).valid

    def choose(self, max_groups: int | None) -> tuple[list[RefGroup], list[RefGroup]]:
        """What a read would hand out, and drop."""
        good: list[RefGroup] = []
        bad: list[RefGroup] = []
        for group in self.walk():
            if len(good) == max_groups:
                break
            (good if self.is_valid(group) else bad).append(group)
        return good, bad

    def walk(self) -> list[RefGroup]:
        """The line, where an instance that is held waits until enough others are ahead of it."""
        first: list[RefGroup] = []
        for group in self.line:
            if group.task_type == self.rollout and not any(self.same_instance(group, one) for one in first):
                first.append(group)
        walked: list[RefGroup] = []
        held: list[RefGroup] = []
        for group in first:
            held.append(group)
            if self.is_held(group, len(walked)):
                continue
            held.pop()
            walked.append(group)
            held.sort(key=self.newest_place)
            while held and not self.is_held(held[0], len(walked)):
                walked.append(held.pop(0))
        return walked

    def same_instance(self, group: RefGroup, other: RefGroup) -> bool:
        """Whichever rollouts they are of."""
        return (type(group.instance_id), group.instance_id) == (type(other.instance_id), other.instance_id)

    def groups_in_nobodys_hands(self) -> list[RefGroup]:
        return self.line + [group for group in self.open.values() if group not in self.line]

    def take_out(self, group: RefGroup) -> None:
        self.line.remove(group)
        key = (group.task_type, type(group.instance_id), group.instance_id)
        if self.open.get(key) is group:
            del self.open[key]

    def tick(self, now: float) -> None:
        late = [
            group
            for group in self.open.values()
            if now - group.last_item >= self.settings.group_timeout_seconds and not group.timed_out
        ]
        for group in sorted(late, key=lambda group: (group.last_item, group.number)):
            group.timed_out = True
            self.line.append(group)
        for lease in reversed(self.leases.values()):
            if lease.state == "live" and now >= lease.deadline:
                self._give_back(lease, "expired")

    def nack(self, number: int, now: float) -> Answer:
        answer = super().nack(number, now)
        if answer == "already":
            self.leases[number].state = "nacked"
        return answer

    def extend(self, number: int, seconds: float, now: float) -> Answer:
        lease = self.leases.get(number)
        if lease is not None and lease.state == "expired" and self.is_whole(number):
            lease.state, lease.deadline = "live", now + seconds
            for group in lease.groups:
                self.line.remove(group)
        return super().extend(number, seconds, now)

    def is_whole(self, number: int) -> bool:
        return all(group.lease == number for group in self.leases[number].groups)

    def restart(self, now: float) -> None:
        super().restart(now)
        for group in self.open.values():
            if group.timed_out:
                group.timed_out = False
                self.line.remove(group)
        for group in self.line:
            if len(group.uids) >= group.size:  # closed by a smaller size, after it had timed out
                group.timed_out = False
        for number, lease in self.leases.items():
            if lease.state == "expired" and self.is_whole(number):
                lease.state = "live"
                for group in lease.groups:
                    self.line.remove(group)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-", dir=SHM))
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.model = Reference(GROUPS, lease_seconds=LEASE)
        self.model.quarantine = []
        self.lease_ids: list[str] = []
        self.uids = 0
        self.roots = 0
        self.whole = True

    @initialize(
        segment=st.sampled_from([1024, 2000, 1 << 20]),
        remembered=st.sampled_from([100_000]),
        cycle=st.sampled_from([None, 1, 2, 3, 4]),
    )
    def begin(self, segment: int, remembered: int, cycle: int | None) -> None:
        self.model.cycle = cycle
        self.settings = LedgerSettings(
            groups=GROUPS,
            lease_seconds=LEASE,
            segment_bytes=segment,
            remember_uids=remembered,
            groups_per_cycle=cycle,
        )
        self.root = self.folder / "0"
        self.ledger = Ledger.open(self.root, self.settings, clock=self.clock)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.run(self.ledger.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    # -- what users do

    def new_items(self, ids: list[Id], rewards: list[float | None]) -> list[tuple[str, Id, float | None]]:
        items = []
        for position, instance_id in enumerate(ids):
            self.uids += 1
            items.append((f"u{self.uids}", instance_id, rewards[position % len(rewards)]))
        return items

    @rule(
        ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=7),
        rewards=st.lists(st.sampled_from([0.0, 1.0, 0.5, -1.0, None]), min_size=1, max_size=3),
        again=st.booleans(),
    )
    def write(self, ids: list[Id], rewards: list[float | None], again: bool) -> None:
        items = self.new_items(ids, rewards)
        if again:
            items.append(items[0])
            items.append((f"u{max(1, self.uids - 20)}", 1, 1.0))
        stored = self.run(self.ledger.write([item(uid, one, reward) for uid, one, reward in items]))
        expected = [
            self.model.write(uid, self.model.rollout, one, reward, self.clock.now)
            for uid, one, reward in items
        ]
        assert stored == expected

    @rule(max_groups=st.sampled_from([1, 2, None]), consumer=st.sampled_from(["a", "b"]))
    def read(self, max_groups: int | None, consumer: str) -> None:
        good, bad = self.model.choose(max_groups)
        lease, drop = self.judge(max_groups)
        self.same_groups(lease, good)
        self.same_groups(drop, bad)
        taken = self.run(
            self.ledger.decide(
                lease=lease,
                consumer=consumer,
                lease_seconds=LEASE,
                drop=[(view, "not_valid") for view in drop],
            )
        )
        granted: list[RefGroup] = []
        for group in good:
            if not self.model.is_held(group, len(granted)):  # of those ahead of it some were dropped
                granted.append(group)
        good = granted
        self.same_groups([] if taken is None else list(taken.groups), good)
        for group in [*good, *bad]:
            self.model.take_out(group)
        for group in bad:
            group.lease = None
        self.model.dropped += [(uid, "not_valid") for group in bad for uid in group.uids]
        if taken is not None:
            number = len(self.lease_ids)
            self.lease_ids.append(taken.lease_id)
            self.model.leases[number] = RefLease(good, consumer, self.clock.now + LEASE)
            self.model.handed += [(group, number) for group in good]
            for group in good:
                group.lease = number

    def of_rollout(self) -> tuple[str | None]:
        return (None if self.model.rollout == "none" else self.model.rollout,)

    def judge(self, max_groups: int | None) -> tuple[list[GroupView], list[GroupView]]:
        good: list[GroupView] = []
        bad: list[GroupView] = []
        for view in self.ledger.candidates(rollouts=self.of_rollout()):
            if len(good) == max_groups:
                break
            settings = replace(GROUPS, group_size=view.group_size)
            valid = judge_rewards(view.rewards, settings, timed_out=view.timed_out).valid
            (good if valid else bad).append(view)
        return good, bad

    def same_groups(self, views: list[GroupView], groups: list[RefGroup]) -> None:
        assert [self.uids_of(view) for view in views] == [group.uids for group in groups]
        assert [view.instance_id for view in views] == [group.instance_id for group in groups]
        assert [list(view.rewards) for view in views] == [group.rewards for group in groups]
        assert [view.group_size for view in views] == [group.size for group in groups]

    def uids_of(self, view: GroupView) -> list[str]:
        return [orjson.loads(payload)["uid"] for payload, _ in self.ledger.load(view)]

    @precondition(lambda self: self.lease_ids)
    @rule(data=st.data(), what=st.sampled_from(["ack", "ack", "nack", "extend"]))
    def use_lease(self, data: st.DataObject, what: str) -> None:
        number = data.draw(st.integers(0, len(self.lease_ids) - 1))
        lease_id = self.lease_ids[number]
        if what == "ack":
            expected = self.model.ack(number, self.clock.now)
        elif what == "nack":
            expected = self.model.nack(number, self.clock.now)
        else:
            expected = self.model.extend(number, LEASE, self.clock.now)
        try:
            if what == "ack":
                answer = "already" if self.run(self.ledger.ack(lease_id)).repeated else "done"
            elif what == "nack":
                self.run(self.ledger.nack(lease_id))
                answer = "done" if expected != "already" else "already"
            else:
                self.run(self.ledger.extend(lease_id, LEASE))
                answer = "done"
        except ConflictError:
            answer = "conflict"
        assert answer == expected, (what, number, lease_id)

    @precondition(lambda self: self.lease_ids)
    @rule(data=st.data())
    def quarantine_leased(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.lease_ids) - 1))
        lease = self.model.leases[number]
        held = self.ledger.lease(self.lease_ids[number])
        if held is None or lease.state not in ("live", "expired") or not self.model.is_whole(number):
            return
        group = lease.groups.pop(0)
        work = self.ledger.remove_from_lease(held.lease_id, held.groups[0], traceback="Traceback: no")
        self.run(work)
        if lease.state == "expired":
            self.model.line.remove(group)
        lease.state = lease.state if lease.groups else "acked"
        group.lease = None
        self.model.quarantine.append(group)

    @rule()
    def begin_cycle(self) -> None:
        self.run(self.ledger.begin_cycle())
        self.model.cycle_began = len(self.model.handed)

    @rule(name=st.sampled_from(["r1", "r2", "r3"]), size=st.sampled_from([2, 3, 4]))
    def start_rollout(self, name: str, size: int) -> None:
        self.run(self.ledger.save_rollout(RolloutRecord(name, "default", {}, "running", 0.0)))
        self.model.rollout = name
        self.resize(size)

    @rule(size=st.sampled_from([2, 3, 5]))
    def resize(self, size: int) -> None:
        self.run(self.ledger.set_task("default", size))
        self.model.resize(size)
        self.order_line()

    @rule(name=st.sampled_from(["r1", "r2", "r3"]))
    def drop_rollout(self, name: str) -> None:
        gone = [group for group in self.model.groups_in_nobodys_hands() if group.task_type == name]
        assert self.run(self.ledger.drop_rollout(name)) == len(gone)
        for group in gone:
            if group in self.model.line:
                self.model.line.remove(group)
            self.model.open = {key: one for key, one in self.model.open.items() if one is not group}
            group.lease = None
        self.model.dropped += [(uid, "replaced") for group in gone for uid in group.uids]

    @rule(consumer=st.sampled_from(["a", "b"]))
    def release(self, consumer: str) -> None:
        self.run(self.ledger.release(consumer))
        self.model.release(consumer, self.clock.now)
        for lease in self.model.leases.values():
            if lease.consumer == consumer and lease.state == "expired":
                lease.state = "nacked"

    @rule()
    def quarantine_first(self) -> None:
        views = self.ledger.candidates(limit=1, rollouts=self.of_rollout())
        if views:
            assert self.run(self.ledger.decide(quarantine=[(views[0], "Traceback: no")])) is None
            group = next(one for one in self.model.line if one.task_type == self.model.rollout)
            self.model.take_out(group)
            group.lease = None
            self.model.quarantine.append(group)

    @rule(drop=st.booleans())
    def empty_quarantine(self, drop: bool) -> None:
        if drop:
            count = self.run(self.ledger.drop_quarantined())
            self.model.dropped += [(uid, "q") for group in self.model.quarantine for uid in group.uids]
        else:
            count = self.run(self.ledger.retry_quarantined())
            self.model.line += self.model.quarantine
        assert count == len(self.model.quarantine)
        self.model.quarantine = []

    @rule(seconds=st.sampled_from([1.0, 10.0, 31.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.run(self.tick())
        self.model.tick(self.clock.now)

    async def tick(self) -> None:
        self.ledger.tick()

    # -- what happens to processes

    @rule()
    def restart(self) -> None:
        self.run(self.ledger.close())
        self.reopen(self.root)

    @rule(
        ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=4),
        cut=st.integers(0, 2000),
        zeros=st.sampled_from([0, 0, 40, 5000]),
    )
    def killed_while_writing(self, ids: list[Id], cut: int, zeros: int) -> None:
        """The folder as a kill may leave it while a write that nobody was told of is on its way."""
        self.run(self.settled())
        head, size = self.ledger._log.head, self.ledger._log.sizes.get(self.ledger._log.head, 0)
        oldest = next(iter(self.ledger._log.sizes), None)
        items = self.new_items(ids, [1.0, 0.0])
        self.run(self.ledger.write([item(uid, one, reward) for uid, one, reward in items]))
        self.run(self.settled())
        copy = self.copy()
        path = copy / "segments" / f"{self.ledger._log.head:06d}.rsj"
        least = size if self.ledger._log.head == head else 0
        cleaned = (
            oldest is not None and oldest not in self.ledger._log.sizes
        )  # then its copies are in the head
        if self.ledger._log.head <= head + 1 and path.exists() and not cleaned:
            end = path.stat().st_size
            cut = least + cut % (end - least + 1) if end > least else end
            os.truncate(path, cut)
            if FILE_HEADER_SIZE <= cut < end:
                with path.open("ab") as file:
                    file.write(bytes(zeros))
        self.run(self.ledger.close())
        self.reopen(copy, items, whole=not zeros)

    async def settled(self) -> None:
        if self.ledger._cleaner is not None:
            await asyncio.gather(self.ledger._cleaner)
        await self.ledger._commits.drain()

    def copy(self) -> Path:
        self.roots += 1
        return shutil.copytree(self.root, self.folder / str(self.roots))

    def reopen(
        self, root: Path, perhaps: list[tuple[str, Id, float | None]] | None = None, *, whole: bool = True
    ) -> None:
        before = durable_state(self.ledger)
        self.root = root
        self.ledger = Ledger.open(root, self.settings, clock=self.clock)
        self.whole = self.whole and whole  # zeros behind half a frame header look like damage, also later
        assert not (self.whole and self.ledger.report.damage)
        after = durable_state(self.ledger)
        if perhaps is None:
            differing = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
            assert not differing, differing
        else:
            known = self.ledger.knows(uid for uid, _, _ in perhaps)
            assert known == sorted(known, reverse=True)  # the first ones
            for uid, one, reward in perhaps[: sum(known)]:
                assert self.model.write(uid, self.model.rollout, one, reward, self.clock.now)
        self.model.restart(self.clock.now)
        self.order_line()

    def order_line(self) -> None:
        # In which order they stand after a restart is up to the ledger: by their newest item.
        order = {group.number: None for group in self.waiting()}
        assert len(order) == len(self.model.line)
        by_uids = {tuple(group.uids): group for group in self.model.line}
        self.model.line = [by_uids[tuple(self.uids_of(view))] for view in self.waiting()]

    def waiting(self) -> list[GroupView]:
        state = self.ledger._state
        return [
            state.view(state.groups[number])
            for lines in (state._returned, state._ready)
            for line in lines.values()
            for number in line
        ]

    # -- what always holds

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        if not hasattr(self, "ledger"):
            return
        stats = self.ledger.stats()
        assert stats.items == len(self.model.live_uids())
        assert stats.items_delivered == len(self.model.acked) == len(set(self.model.acked))
        assert sum(stats.dropped.values()) == len(self.model.dropped)
        assert stats.items_written == len(self.model.known)
        assert stats.groups["ready"] == len(self.model.line)
        assert stats.groups["quarantined"] == len(self.model.quarantine)
        assert self.ledger.left_in_cycle == self.model.left_in_cycle()
        state = self.ledger._state
        in_line = {view.number for view in self.waiting()}
        assert in_line == {group.number for group in state.groups.values() if group.waiting}
        assert state.overdue.keys() <= in_line
        assert stats.bytes_live == sum(
            entry.length for group in self.ledger._state.groups.values() for entry in group.places()
        )


LedgerMachine.TestCase.settings = hypothesis_settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestLedger = LedgerMachine.TestCase


def test_unknown_lease(tmp_path: Path) -> None:
    async def ask() -> None:
        ledger = Ledger.open(tmp_path, LedgerSettings())
        for call in (ledger.ack, ledger.nack, ledger.extend):
            try:
                await call("nothing")
            except NotFoundError as error:
                assert "nothing" in str(error)
            else:
                raise AssertionError(call)
        await ledger.close()

    asyncio.run(ask())
