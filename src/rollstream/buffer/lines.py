"""Groups in line to be judged, and those that may come to stand there: open ones, by their task and time."""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator

from rollstream.buffer.cycle import Cycle
from rollstream.buffer.group_state import (
    NO_VERSION,
    RECORD,
    Group,
    GroupView,
    Instance,
    Key,
    Line,
    Task,
)

_SPARE_TIMERS = 4096
"""Timers of groups that are gone, beyond as many as there are groups, before they are looked through."""


class Lines(Cycle):
    """Who stands in line, in which order; a line for each task and rollout."""

    def __init__(self, default: Task, timeout: float, groups_per_cycle: int | None) -> None:
        """`default`: for task types that are not known; `timeout`: seconds since a group's last item."""
        super().__init__(groups_per_cycle)
        self._default = default
        self._timeout = timeout
        self.groups: dict[int, Group] = {}
        self.open: dict[Key, Group] = {}
        self.sealed: dict[int, int] = {}
        """Groups that were closed before they were whole -> segment of the newest record."""
        self.sized: dict[int, int] = {}
        """Groups whose size a record says, not their items -> segment of the newest such record."""
        self.resized: set[int] = set()
        """Groups that another size than their items say closed at the start: no record has said so yet."""
        self.tasks: dict[str, Task] = {}
        self.version = 0
        """Grows whenever there may be another candidate than before."""
        # An OrderedDict finds its first entry at once; a dict passes by all that were deleted before it.
        self._ready: dict[Line, OrderedDict[int, None]] = {}
        self._returned: dict[Line, OrderedDict[int, None]] = {}
        self._timers: list[tuple[float, int]] = []
        self.overdue: dict[int, None] = {}
        """Groups in line that timed out before they were whole."""

    def task(self, task_type: str) -> Task:
        """How its groups are made."""
        return self.tasks.get(task_type, self._default)

    def candidates(
        self,
        task_type: str | None = None,
        rollouts: Collection[str | None] | None = None,
        *,
        lasting: bool = False,
    ) -> Iterator[Group]:
        """Groups to be judged, those that came back first, then in order of completion; no instance twice.

        Each is a candidate provided that all before it are handed out: an instance that is held at first may
        come once enough others have. `lasting`: what there is may change while it is walked along.
        """
        seen: set[Instance] = set()
        held: list[tuple[int, int, Group]] = []
        ahead = 0
        for queues in (self._returned, self._ready):
            lines: list[Collection[int]] = [
                list(line) if lasting else line
                for (name, rollout_id), line in queues.items()
                if task_type in (None, name) and (rollouts is None or rollout_id in rollouts)
            ]
            numbers: Iterable[int] = lines[0] if len(lines) == 1 else heapq.merge(*lines, key=self._ticket)
            for number in numbers:
                group = self.groups.get(number)
                if group is None or group.claimed or group.instance in seen:
                    continue
                if lasting and not group.waiting:
                    continue
                seen.add(group.instance)
                if self.is_held(group.instance, ahead):
                    heapq.heappush(held, (self._newest_place(group.instance), number, group))
                    continue
                yield group
                ahead += 1
                while held and not self.is_held(held[0][2].instance, ahead):
                    group = heapq.heappop(held)[2]
                    if lasting and not self.is_candidate(group):
                        continue
                    yield group
                    ahead += 1

    def take_overdue(
        self, task_type: str | None, rollouts: Collection[str | None] | None, limit: int
    ) -> list[Group]:
        """Groups that timed out, the longest overdue first; each once, until it times out or comes back."""
        found: list[Group] = []
        for number in self.overdue:
            group = self.groups[number]
            if len(found) >= limit:
                break
            if group.claimed or task_type not in (None, group.key[0]):
                continue
            if rollouts is None or group.key[1] in rollouts:
                found.append(group)
        for group in found:
            del self.overdue[group.number]
        return found

    def put_overdue(self, numbers: Iterable[int]) -> None:
        """What could not be done about them then has to be done later."""
        for number in numbers:
            group = self.groups.get(number)
            if group is not None and group.timed_out and group.waiting:
                self.overdue[number] = None

    def is_candidate(self, group: Group) -> bool:
        """Whether it is in line, and no decision on it is on its way."""
        return group.waiting and not group.claimed

    def view(self, group: Group) -> GroupView:
        """The group as it is now."""
        rewards: list[float | None] = []
        oldest: int | None = None
        for item in RECORD.iter_unpack(bytes(group.records)):
            rewards.append(None if item[3] != item[3] else item[3])
            if item[4] != NO_VERSION and (oldest is None or item[4] < oldest):
                oldest = item[4]
        return GroupView(
            number=group.number,
            task_type=group.key[0],
            rollout_id=group.key[1],
            instance_id=group.key[2],
            size=len(rewards),
            group_size=group.size,
            rewards=tuple(rewards),
            policy_version=oldest,
            timed_out=group.timed_out or (group.closed and len(rewards) < self._enough(group)),
            closed=group.closed,
            written_at=group.written_at,
        )

    def keep(self, group: Group, now: float) -> None:
        """It was looked at and is left alone until it changes, or has timed out (again)."""
        self._withdraw(group)
        group.kept = len(group)
        self._watch(group, now)

    def waiting_groups(self) -> int:
        """Groups in line."""
        return sum(map(len, self._ready.values())) + sum(map(len, self._returned.values()))

    def _offer(self, group: Group) -> None:
        """Puts it in line if it is to be judged, and takes it out if it is not."""
        enough = len(group) >= self._enough(group)
        if (group.closed or group.timed_out or enough) and group.kept != len(group):
            if not group.waiting:
                group.waiting = True
                self._ready.setdefault(group.line, OrderedDict())[group.number] = None
            if group.timed_out:
                self.overdue[group.number] = None
            self.version += 1
        else:
            self._withdraw(group)

    def _enough(self, group: Group) -> int:
        """Items from which on it is judged: all, if its task's groups have another size by now."""
        task = self.task(group.key[0])
        if group.size != task.group_size and task.judge_from > 1:
            return group.size
        return min(task.judge_from, group.size)

    def _withdraw(self, group: Group) -> None:
        if not group.waiting:
            return
        group.waiting = False
        self.overdue.pop(group.number, None)
        for queues in (self._ready, self._returned):
            line = queues.get(group.line)
            if line is not None:
                line.pop(group.number, None)
                if not line:
                    del queues[group.line]

    def _close(self, group: Group) -> None:
        group.closed = True
        self.sealed.pop(group.number, None)
        if self.open.get(group.key) is group:
            del self.open[group.key]

    def _seal(self, group: Group, segment: int) -> None:
        """It takes no more items."""
        if not group.closed:
            group.closed = True
            self.sealed[group.number] = segment
        if self.open.get(group.key) is group:
            del self.open[group.key]

    def _watch(self, group: Group, since: float) -> None:
        """It times out when nothing comes for long enough; a timer that is pending is earlier: it will do."""
        if group.watched:
            return
        group.watched = True
        if len(self._timers) > 2 * len(self.groups) + _SPARE_TIMERS:  # of groups that are gone
            waiting = [timer for timer in self._timers if timer[1] in self.groups]
            heapq.heapify(waiting)
            self._timers = waiting
        heapq.heappush(self._timers, (since + self._timeout, group.number))

    def _ticket(self, number: int) -> int:
        group = self.groups.get(number)
        return 0 if group is None else group.ticket
