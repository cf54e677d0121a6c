"""What a ledger keeps of rollouts and their tasks."""

import asyncio
from collections.abc import Sequence

from rollstream.buffer.group_state import DEFAULT_TASK, Task
from rollstream.buffer.groups import MAX_GROUP_SIZE, GroupSettings
from rollstream.buffer.items import InstanceId
from rollstream.buffer.ledger_core import SLICE, LedgerCore, finished
from rollstream.buffer.log_records import Event, decode_item
from rollstream.buffer.rollout_record import RolloutRecord
from rollstream.errors import ConfigError, DamageError, NotFoundError


class LedgerRollouts(LedgerCore):
    """A ledger's calls about tasks and rollouts."""

    async def set_task(self, task_type: str, group_size: int, judge_from: int | None = None) -> None:
        """From here on, items that name no task are of this one. Its open groups get the group size.

        Args:
            task_type: name.
            group_size: items of a whole group.
            judge_from: items from which on an open group is a candidate; None: as the settings say.
        """
        self._check_open()
        if not 1 <= group_size <= MAX_GROUP_SIZE:
            raise ConfigError(
                f"group_size of task {task_type!r} must be from 1 to {MAX_GROUP_SIZE}, is {group_size}"
            )
        if judge_from is None:
            judge_from = GroupSettings(
                group_size=group_size,
                min_valid_group_size_ratio=self.settings.groups.min_valid_group_size_ratio,
            ).min_group_size
        task = (task_type, group_size, max(1, judge_from))
        state = self._state

        def plan() -> Event | None:
            following = [
                group
                for key, group in state.open.items()
                if key[0] == task_type and state.follows_task(key) and group.size != group_size
            ]
            same = state.active == task_type and state.tasks.get(task_type) == Task(*task[1:])
            if same and not following:
                return None
            whole = [group for group in following if len(group) >= group_size]
            return Event(
                tasks=[task],
                active=task_type,
                sealed=[group.number for group in whole],
                sizes=[(group.number, group_size) for group in following],
                counts=finished(state, whole),
            )

        await self._commits.control(plan)

    @property
    def task_type(self) -> str:
        """The task of items that name none."""
        return self._state.active or DEFAULT_TASK

    def group_size(self, task_type: str) -> int:
        """Items of a whole group of this task."""
        return self._state.task(task_type).group_size

    async def save_rollout(self, record: RolloutRecord) -> list[str]:
        """Stores a rollout's record; the newest of an id counts.

        One that runs becomes the active rollout: items that name none belong to it, and its finished groups
        are counted. Returns the ids of rollouts that were forgotten for it, the oldest ones that ended.
        """
        self._check_open()
        forgotten: list[str] = []

        def plan() -> Event | None:
            forgotten[:] = self._state.rollouts_to_forget(record.rollout_id)
            return Event(
                forgotten=list(forgotten),
                rollouts=[record.to_dict()],
                active_rollout=record.rollout_id if record.state == "running" else None,
            )

        await self._commits.control(plan)
        return forgotten

    def rollouts(self) -> list[RolloutRecord]:
        """All that are remembered: those that run, and the last that ended."""
        return [RolloutRecord.from_dict(record) for record, _ in self._state.rollouts.values()]

    @property
    def active_rollout(self) -> str | None:
        """Id of the rollout that was made running last, as the log has it; it may have ended since."""
        return self._state.active_rollout

    def has_groups(self, rollout_id: str) -> bool:
        """Whether anything of it is stored, in whichever state."""
        return rollout_id in self._state.groups_of

    async def drop_rollout(self, rollout_id: str, reason: str = "replaced") -> int:
        """Drops what is stored of a rollout, but for groups that are leased, quarantined or being decided on.

        In slices: when it raises `StorageError`, some are gone and some are not. Returns how many went.
        """
        self._check_open()
        dropped = 0
        for _ in range(3):  # a group that got an item meanwhile is looked at again
            numbers = [group.number for group in self._state.groups.values() if group.key[1] == rollout_id]
            went = 0
            for at in range(0, len(numbers), SLICE):
                went += await self._drop_idle(numbers[at : at + SLICE], reason)
            dropped += went
            if not went:
                break
        return dropped

    async def _drop_idle(self, numbers: Sequence[int], reason: str) -> int:
        state = self._state
        groups = [group for number in numbers if (group := state.groups.get(number)) is not None]
        groups = [group for group in groups if state.is_idle(group) and not group.claimed]
        if not groups:
            return 0
        views = {group.number: state.view(group) for group in groups}
        gone: list[int] = []

        def plan() -> Event | None:
            left = [drop for drop in drops if state.is_idle_as(views[drop.group])]
            gone[:] = [drop.group for drop in left]
            counts = finished(state, [state.groups[number] for number in gone if number in short])
            return Event(gone=list(gone), dropped=left, buried=self._burial(gone), counts=counts)

        short = {group.number for group in groups if not group.closed}
        for group in groups:
            group.claimed = True
        try:
            drops = await asyncio.to_thread(self._describe_drops, [(view, reason) for view in views.values()])
            await self._commits.control(plan)
        finally:
            self._unclaim(views)
        return len(gone)

    def finished_counts(self, rollout_id: str) -> dict[InstanceId, int]:
        """By instance: groups that were closed, or handed out or dropped short, since the rollout began.

        None of a rollout that another one has followed.
        """
        counts = self._state.counts.get(rollout_id, {})
        return {instance_id: packed >> 32 for instance_id, packed in counts.items()}

    async def open_uids(self, rollout_id: str) -> list[str]:
        """Uids of a rollout's items in groups that are not whole yet. Reads them from disk."""
        views = [self._state.view(group) for group in self._state.open.values()]

        def read() -> list[str]:
            uids = []
            for view in views:
                try:
                    bodies = self._read(view.number, view.size)
                except (NotFoundError, DamageError):
                    continue
                records = [decode_item(body) for body in bodies]
                uids += [record.uid_text for record in records if record.rollout_id == rollout_id]
            return uids

        return await asyncio.to_thread(read)
