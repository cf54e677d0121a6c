"""A buffer in memory, naive and short enough to be believed: what the real one is compared against.

Time is an argument. Every call first lets happen what time brings (`tick`): a group whose last item is
`group_timeout_seconds` old times out, a lease that is `lease_seconds` old goes back.

    open -> whole | timed out -> leased -> acked
                ^                  |
                +-- nack, expiry --+       judged as not valid at a read -> dropped
"""

from dataclasses import dataclass, field
from typing import Literal

from rollstream.buffer.groups import GroupSettings, judge_rewards

Id = int | str
Answer = Literal["done", "already", "conflict", "unknown"]


@dataclass(eq=False)
class RefGroup:
    number: int  # in order of their first items
    task_type: str
    instance_id: Id
    uids: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    last_item: float = 0.0
    timed_out: bool = False
    lease: int | None = None  # the newest that it was handed out with, over or not
    size: int = 0  # items of a whole one, where groups of several sizes are


@dataclass(eq=False)
class RefLease:
    groups: list[RefGroup]
    consumer: str | None
    deadline: float
    state: Literal["live", "acked", "nacked", "expired"] = "live"


class ReferenceBuffer:
    def __init__(
        self,
        settings: GroupSettings,
        *,
        lease_seconds: float = 600.0,
        groups_per_cycle: int | None = None,
    ) -> None:
        self.settings, self.lease_seconds, self.cycle = settings, lease_seconds, groups_per_cycle
        self.open: dict[tuple[str, type, Id], RefGroup] = {}  # the type: 7 and "7", but also 1 and 1.0
        self.line: list[RefGroup] = []  # candidates, the next one first
        self.leases: dict[int, RefLease] = {}
        self.known: set[str] = set()
        self.acked: list[str] = []  # uids, in order
        self.dropped: list[tuple[str, str]] = []  # (uid, reason)
        self.handed: list[tuple[RefGroup, int]] = []  # every group and the lease it went out with, in order
        self.cycle_began = 0  # so many of them, when the trainer that is there began
        self.groups = 0

    def write(self, uid: str, task_type: str, instance_id: Id, reward: float | None, now: float) -> bool:
        self.tick(now)
        if uid in self.known:
            return False
        self.known.add(uid)
        key = (task_type, type(instance_id), instance_id)
        if key not in self.open:
            self.open[key] = RefGroup(self.groups, task_type, instance_id)
            self.groups += 1
        group = self.open[key]
        group.uids.append(uid)
        group.rewards.append(reward)
        group.last_item = now
        if len(group.uids) >= self.enough(group):
            self.line.append(self.open.pop(key))
        return True

    def read(
        self, now: float, *, max_groups: int | None = None, task_type: str | None = None, consumer: str = ""
    ) -> int | None:
        """A lease's number, or None: nothing to hand out."""
        self.tick(now)
        chosen: list[RefGroup] = []
        for group in list(self.line):
            if len(chosen) == max_groups:
                break
            if task_type not in (None, group.task_type) or self._too_soon(group, chosen):
                continue
            self.line.remove(group)
            if judge_rewards(group.rewards, self.settings, timed_out=group.timed_out).valid:
                chosen.append(group)
            else:
                reason = "timed_out" if group.timed_out else "not_valid"
                self.dropped += [(uid, reason) for uid in group.uids]
        if not chosen:
            return None
        number = len(self.leases)
        self.leases[number] = RefLease(chosen, consumer, now + self.lease_seconds)
        for group in chosen:
            group.lease = number
        self.handed += [(group, number) for group in chosen]
        return number

    def ack(self, number: int, now: float) -> Answer:
        self.tick(now)
        if (lease := self.leases.get(number)) is None:
            return "unknown"
        if lease.state == "acked":
            return "already"
        if lease.state == "nacked" or any(group.lease != number for group in lease.groups):
            return "conflict"
        if lease.state == "expired":  # late, but nobody else has them
            self.line = [group for group in self.line if group not in lease.groups]
        lease.state = "acked"
        self.acked += [uid for group in lease.groups for uid in group.uids]
        return "done"

    def nack(self, number: int, now: float) -> Answer:
        self.tick(now)
        if (lease := self.leases.get(number)) is None:
            return "unknown"
        if lease.state != "live":
            return "conflict" if lease.state == "acked" else "already"
        self._give_back(lease, "nacked")
        return "done"

    def extend(self, number: int, seconds: float, now: float) -> Answer:
        self.tick(now)
        if (lease := self.leases.get(number)) is None:
            return "unknown"
        if lease.state != "live":
            return "conflict"
        lease.deadline = now + seconds
        return "done"

    def release(self, consumer: str, now: float) -> None:
        self.tick(now)
        for lease in reversed(self.leases.values()):
            if lease.consumer == consumer and lease.state == "live":
                self._give_back(lease, "nacked")

    def tick(self, now: float) -> None:
        late = [
            group
            for group in self.open.values()
            if now - group.last_item >= self.settings.group_timeout_seconds
        ]
        for group in sorted(late, key=lambda group: (group.last_item, group.number)):
            group.timed_out = True
            self.line.append(self.open.pop((group.task_type, type(group.instance_id), group.instance_id)))
        for lease in reversed(self.leases.values()):
            if lease.state == "live" and now >= lease.deadline:
                self._give_back(lease, "expired")

    def restart(self, now: float) -> None:
        """Monotonic clocks do not outlive a process: what waits for a time waits in full again."""
        for group in self.open.values():
            group.last_item = now
        for lease in self.leases.values():
            lease.deadline = now + self.lease_seconds

    def enough(self, group: RefGroup) -> int:
        """Items from which on it goes."""
        return self.settings.min_group_size

    def live_uids(self) -> set[str]:
        """Everything that was written and neither acked nor dropped."""
        return self.known - set(self.acked) - {uid for uid, _ in self.dropped}

    def _give_back(self, lease: RefLease, state: Literal["nacked", "expired"]) -> None:
        lease.state = state
        self.line = lease.groups + self.line  # first in line, as they were

    def counted(self, since: int = 0) -> list[RefGroup]:
        """Groups in the hands of a trainer that may keep them, in the order in which it got them."""
        return [
            group
            for group, number in self.handed[since:]
            if self.leases[number].state in ("live", "acked") and group in self.leases[number].groups
        ]

    def left_in_cycle(self) -> int | None:
        if self.cycle in (None, 1):
            return None
        return self.cycle - len(self.counted(self.cycle_began)) % self.cycle

    def same_instance(self, group: RefGroup, other: RefGroup) -> bool:
        return group.task_type == other.task_type and (
            (type(group.instance_id), group.instance_id) == (type(other.instance_id), other.instance_id)
        )

    def newest_place(self, group: RefGroup) -> int:
        """Of its instance among what counts; -1: it has none."""
        counted = self.counted()
        return max((at for at, one in enumerate(counted) if self.same_instance(group, one)), default=-1)

    def is_held(self, group: RefGroup, ahead: int) -> bool:
        """Whether its instance is among the last of a cycle's groups but one, with so many handed out now."""
        place = self.newest_place(group)
        return bool(self.cycle) and place >= 0 and len(self.counted()) - place + ahead < self.cycle

    def _too_soon(self, group: RefGroup, chosen: list[RefGroup]) -> bool:
        return any(self.same_instance(group, one) for one in chosen) or self.is_held(group, len(chosen))
