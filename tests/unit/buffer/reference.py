"""A store in memory, naive and short enough to be believed: what the real one is compared against."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from rollstream.buffer.groups import StoredItem, drop_reason, judge_rewards
from rollstream.buffer.items import InstanceId, Item
from rollstream.buffer.store.base import (
    Acked,
    Group,
    GroupState,
    JobRecord,
    Judged,
    Limits,
    Removal,
    Stats,
    StoredLease,
    StoreRules,
    Wanted,
)
from rollstream.errors import BufferFullError, ConflictError, NotFoundError


@dataclass(eq=False)
class RefGroup:
    id: int
    task: str
    job: str
    instance_id: InstanceId
    size: int
    items: list[Item] = field(default_factory=list)
    state: GroupState = "open"
    timed_out: bool = False
    position: int = 0
    updated: float = 0.0
    deadline: float = 0.0
    judged: int = 0
    lease: str | None = None  # the newest that it was handed out with, over or not
    reason: str | None = None
    cause: str | None = None
    left: int | None = None
    has_bodies: bool = True

    @property
    def rewards(self) -> list[float | None]:
        return [None if one.failed else one.reward for one in self.items]

    @property
    def version(self) -> int | None:
        return min((one.version for one in self.items if one.version is not None), default=None)

    @property
    def bytes(self) -> int:
        return sum(len(one.body) for one in self.items) if self.has_bodies else 0

    def seen(self) -> Group:
        return Group(
            id=self.id, task=self.task, job=self.job, instance_id=self.instance_id, size=self.size,
            n=len(self.items), bytes=self.bytes, rewards=self.rewards,
            failed=sum(one.failed for one in self.items), version=self.version, state=self.state,
            timed_out=self.timed_out, position=self.position, updated=self.updated, reason=self.reason,
            cause=self.cause, left=self.left,
        )  # fmt: skip


@dataclass(eq=False)
class RefLease:
    consumer: str | None
    read_id: str | None
    seconds: float
    deadline: float
    groups: int
    items: int
    state: str = "out"


class ReferenceStore:
    def __init__(self, policy: StoreRules, limits: Limits) -> None:
        self.policy, self.limits, self.now = policy, limits, 0.0
        self.groups: dict[int, RefGroup] = {}
        self.leases: dict[str, RefLease] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.group_count = self.written = self.items_of_job = self.left = self.reported = 0
        self.delivered: list[RefGroup] = []
        self.dropped: list[RefGroup] = []
        self.scored = {"written": 0, "delivered": 0}
        self.reward = {"written": 0.0, "delivered": 0.0}

    @property
    def last(self) -> JobRecord | None:
        return max(self.jobs.values(), key=lambda job: job.number, default=None)

    def in_state(self, *states: GroupState) -> list[RefGroup]:
        """In the queue's order."""
        return sorted((g for g in self.groups.values() if g.state in states), key=lambda g: g.position)

    def known(self, uid: str) -> bool:
        return any(one.uid == uid for group in self.groups.values() for one in group.items)

    def items_here(self) -> int:
        return sum(len(group.items) for group in self.groups.values() if group.left is None)

    # -- writing and judging

    def write(self, items: Sequence[Item]) -> list[bool]:
        first: set[str] = set()
        fresh = []
        for one in items:
            fresh.append(one.uid not in first and not self.known(one.uid))
            first.add(one.uid)
        if any(fresh) and self.items_here() + sum(fresh) > self.limits.items:
            raise BufferFullError
        for one, is_new in zip(items, fresh, strict=True):
            if is_new:
                self.add(one)
        return fresh

    def owner(self, item: Item) -> tuple[str, str]:
        if item.job is not None:
            known = self.jobs.get(item.job)
            return item.task or ("" if known is None else known.task), item.job
        if self.last is not None and item.task in (None, self.last.task):
            return self.last.task, self.last.id
        return item.task or "", ""

    def add(self, item: Item) -> None:
        task, job = self.owner(item)
        settings = self.policy.settings(task, self.jobs.get(job))
        name = (task, job, type(item.instance_id), item.instance_id)
        for group in self.in_state("open"):
            if (group.task, group.job, type(group.instance_id), group.instance_id) == name:
                break
        else:
            self.group_count += 1
            group = RefGroup(self.group_count, task, job, item.instance_id, settings.group_size)
            self.groups[group.id] = group
        self.written += 1
        self.items_of_job += self.last is not None and job == self.last.id
        group.items.append(item)
        self.score("written", group.rewards[-1])
        group.position, group.updated = self.written, self.now
        group.deadline = self.now + settings.group_timeout_seconds
        if not self.policy.has_own_judge(task):
            self.judge_by_default(group)
        elif len(group.items) >= group.size:
            group.state = "judging"

    def score(self, which: str, reward: float | None) -> None:
        if reward is not None:
            self.scored[which] += 1
            self.reward[which] += reward

    def judge_by_default(self, group: RefGroup) -> None:
        settings = self.policy.settings(group.task, self.jobs.get(group.job))
        settings = replace(settings, group_size=group.size)
        group.judged = len(group.items)
        verdict = judge_rewards(group.rewards, settings, timed_out=group.timed_out)
        if verdict.valid:
            group.state = "ready"
        elif verdict.finished:
            failed = sum(one.failed for one in group.items)
            self.drop(group, drop_reason(group.rewards, settings, failed=failed, timed_out=group.timed_out))

    def drop(self, group: RefGroup, reason: str) -> None:
        self.left += len(group.items)
        group.state, group.reason, group.left = "dropped", reason, self.left
        self.dropped.append(group)

    def drop_all(self, groups: Collection[RefGroup], reason: str) -> int:
        for group in sorted(groups, key=lambda g: g.position):
            self.drop(group, reason)
        return len(groups)

    def unjudged(self, tasks: Sequence[str]) -> list[RefGroup]:
        waiting = self.in_state("open", "judging")
        return [g for g in waiting if g.task in tasks and g.judged < len(g.items)]

    def judge(self, judged: Sequence[Judged], removals: Sequence[Removal]) -> None:
        waiting = self.in_state("open", "judging")
        self.remove(waiting, removals)
        for one in judged:
            group = self.groups.get(one.group)
            if group not in waiting or group.state not in ("open", "judging"):
                continue
            if (len(group.items), group.timed_out) != (one.n, one.timed_out):
                continue
            group.judged = one.n
            if one.valid:
                group.state = "ready"
            elif one.finished or group.state == "judging":
                self.drop(group, "timed_out" if group.timed_out else "not_valid")

    def remove(self, among: Collection[RefGroup], removals: Sequence[Removal]) -> list[RefGroup]:
        removed = []
        for one in removals:
            group = self.groups.get(one.group)
            if group is None or group not in among:
                continue
            removed.append(group)
            if one.cause is None:
                self.drop(group, one.reason)
            else:
                group.state, group.reason, group.cause = "quarantined", one.reason, one.cause
        return removed

    def retry(self) -> int:
        back = self.in_state("quarantined")
        for group in back:
            group.reason = group.cause = group.lease = None
            if self.policy.has_own_judge(group.task):
                group.state, group.judged = "judging", 0
            elif group.judged == len(group.items):
                group.state = "ready"
            else:
                group.timed_out = True
                self.judge_by_default(group)
        return len(back)

    def drop_quarantined(self) -> int:
        return self.drop_all(self.in_state("quarantined"), "quarantined")

    def drop_job(self, job: str, reason: str) -> int:
        return self.drop_all([g for g in self.in_state("open", "judging", "ready") if g.job == job], reason)

    # -- reading

    def choose(self, wanted: Wanted) -> tuple[list[RefGroup], list[RefGroup]]:
        chosen: list[RefGroup] = []
        stale: list[RefGroup] = []
        seen = {(type(one), one) for one in wanted.without}
        for group in self.in_state("ready"):
            if len(chosen) == wanted.groups:
                break
            instance = (type(group.instance_id), group.instance_id)
            if (
                wanted.task not in (None, group.task)
                or (wanted.jobs is not None and group.job not in wanted.jobs)
                or wanted.size not in (None, group.size)
                or group.task in wanted.skip_tasks
            ):
                continue
            version = group.version
            if wanted.min_version is not None and version is not None and version < wanted.min_version:
                stale.append(group)
            elif not (wanted.distinct and instance in seen):
                seen.add(instance)
                chosen.append(group)
        return chosen, stale

    def take(self, wanted: Wanted, lease: str | None) -> tuple[list[RefGroup], int, int]:
        """Its groups, how many there were, and how many were too old. `lease`: what the real store named it."""
        chosen, stale = self.choose(wanted)
        if wanted.drop_stale:
            self.drop_all(stale, "stale")
        if not chosen or (wanted.exact and len(chosen) < wanted.groups):
            return [], len(chosen), 0 if wanted.drop_stale else len(stale)
        assert lease is not None
        for group in chosen:
            group.state, group.lease = "leased", lease
        items = sum(len(group.items) for group in chosen)
        self.leases[lease] = RefLease(
            *(wanted.consumer, wanted.read_id, wanted.seconds, self.now + wanted.seconds, len(chosen), items)
        )
        return chosen, len(chosen), 0

    def load(self, group: RefGroup) -> list[StoredItem] | None:
        """None: its bodies are not kept any more."""
        if not group.has_bodies:
            return None
        return [
            StoredItem(one.uid, reward, one.encoding, one.body)
            for one, reward in zip(group.items, group.rewards, strict=True)
        ]

    def finish(self, lease: str, removals: Sequence[Removal], back: Sequence[int]) -> None:
        if self.lease(lease).state != "out":
            raise ConflictError
        leased = [group for group in self.in_state("leased") if group.lease == lease]
        removed = self.remove(leased, removals)
        for group in leased:
            if group.id in back:
                group.state, group.lease = "ready", None
                removed.append(group)
        if removed:
            self.leases[lease].groups -= len(removed)
            self.leases[lease].items -= sum(len(group.items) for group in removed)

    def lease(self, lease: str) -> RefLease:
        if lease not in self.leases:
            raise NotFoundError
        return self.leases[lease]

    def ack(self, leases: Sequence[str], reported_up_to: int | None = None) -> Acked:
        named = {lease: self.lease(lease) for lease in leases}
        live = {key: lease for key, lease in named.items() if lease.state != "acked"}
        theirs = [group for group in self.in_state("ready", "leased") if group.lease in live]
        for key, lease in live.items():
            if sum(group.lease == key for group in theirs) != lease.groups:
                raise ConflictError
        self.reported = max(self.reported, reported_up_to or 0)
        for group in theirs:
            self.left += len(group.items)
            group.state, group.left = "delivered", self.left
            self.delivered.append(group)
            for reward in group.rewards:
                self.score("delivered", reward)
        for lease in live.values():
            lease.state = "acked"
        return Acked(sum(x.groups for x in named.values()), sum(x.items for x in named.values()), not live)

    def nack(self, lease: str) -> None:
        if self.lease(lease).state == "acked":
            raise ConflictError
        self.give_back([lease])

    def extend(self, lease: str, seconds: float) -> None:
        found = self.lease(lease)
        if found.state != "out":
            raise ConflictError
        found.seconds, found.deadline = seconds, self.now + seconds

    def give_back(self, leases: Collection[str]) -> int:
        groups = [g for g in self.in_state("leased") if g.lease in leases]
        for group in groups:
            group.state = "ready"
        for lease in leases:
            if self.leases[lease].state == "out":
                self.leases[lease].state = "back"
        return len(groups)

    def release(self, consumer: str) -> int:
        return self.give_back([key for key, lease in self.leases.items() if lease.consumer == consumer])

    def return_read(self, read_id: str) -> None:
        self.give_back([key for key, lease in self.leases.items() if lease.read_id == read_id])

    # -- time

    def sweep(self) -> None:
        self.give_back(
            [k for k, one in self.leases.items() if one.state == "out" and one.deadline < self.now]
        )
        late = [group for group in self.in_state("open") if group.deadline < self.now]
        for group in sorted(late, key=lambda g: (g.deadline, g.id)):
            group.timed_out = True
            if self.policy.has_own_judge(group.task):
                group.state, group.judged = "judging", 0
            else:
                self.judge_by_default(group)
        gone = sorted((g for g in self.groups.values() if g.left), key=lambda g: g.left or 0)
        for group in gone:
            if sum(one.bytes for one in gone) > self.limits.archive_bytes:
                group.has_bodies = False
        for group in gone:
            forgettable = (group.left or 0) <= self.left - self.limits.remembered_uids
            if forgettable and not group.has_bodies and (self.last is None or group.job != self.last.id):
                del self.groups[group.id]

    # -- jobs and looking

    def save_job(self, job: JobRecord) -> JobRecord:
        number = self.jobs[job.id].number if job.id in self.jobs else len(self.jobs) + 1
        if self.last is None or number > self.last.number:
            self.items_of_job = 0
        self.jobs[job.id] = msgspec.structs.replace(job, number=number)
        return self.jobs[job.id]

    def seen_leases(self) -> list[StoredLease]:
        out = sorted((x.deadline, key) for key, x in self.leases.items() if x.state == "out")
        return [
            StoredLease(
                id=key,
                consumer=self.leases[key].consumer,
                seconds=self.leases[key].seconds,
                left_s=max(0.0, deadline - self.now),
                groups=[group.id for group in self.in_state("leased") if group.lease == key],
            )
            for deadline, key in out
        ]

    def unread_drops(self, task: str | None, jobs: Sequence[str] | None, limit: int) -> tuple[list[int], int]:
        unread = [g for g in self.seen_dropped() if (g.left or 0) > self.reported][:limit]
        up_to = unread[-1].left if len(unread) == limit else self.left
        assert up_to is not None
        return [g.id for g in unread if task in (None, g.task) and (jobs is None or g.job in jobs)], up_to

    def seen_dropped(self) -> list[RefGroup]:
        return [group for group in self.dropped if group.id in self.groups]

    def stats(self) -> Stats:
        ready = self.in_state("ready")
        items = Counter[str]()
        for group in self.dropped:
            items[group.reason or ""] += len(group.items)
        return Stats(
            items=self.items_here(),
            items_ready=sum(len(group.items) for group in ready),
            items_of_job=self.items_of_job,
            items_written=self.written,
            items_delivered=sum(len(group.items) for group in self.delivered),
            items_dropped=dict(items),
            groups={
                state: len(self.in_state(state))
                for state in ("open", "judging", "ready", "leased", "quarantined")
            },
            groups_delivered=len(self.delivered),
            groups_dropped=dict(Counter(group.reason or "" for group in self.dropped)),
            scored_written=self.scored["written"],
            reward_written=self.reward["written"],
            scored_delivered=self.scored["delivered"],
            reward_delivered=self.reward["delivered"],
            leases=sum(lease.state == "out" for lease in self.leases.values()),
            oldest_ready_s=max(0.0, self.now - ready[0].updated) if ready else 0.0,
            archive_bytes=sum(group.bytes for group in self.groups.values() if group.left),
            disk_bytes=0,
            disk_full=False,
        )
