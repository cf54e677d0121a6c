"""What the log says of rollouts: their records, which one is active, how many groups of it are finished."""

from typing import Any

import msgspec

from rollstream.buffer.group_state import Key
from rollstream.buffer.items import InstanceId
from rollstream.buffer.log_records import Event

KEPT_ROLLOUTS = 100
"""Records of rollouts; the oldest that do not run go first."""


class RolloutFacts:
    """See the module."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[InstanceId, int]] = {}
        """Active rollout -> instance -> finished groups << 32 | segment of the newest record."""
        self._count_bytes = 0
        self.rollouts: dict[str, tuple[dict[str, Any], int]] = {}
        self.rollout_bytes = 0
        self.active_rollout: str | None = None
        """The one that was said to run last."""
        self.groups_of: dict[str, int] = {}
        """Rollout -> its groups that are stored."""

    def rollout_and_task(self, event: Event) -> tuple[str | None, str | None]:
        """The rollout of items that name none, and the task that they have to be of, once `event` is true."""
        active = event.active_rollout or self.active_rollout
        records = [record for record in event.rollouts if record.get("rollout_id") == active]
        if not records and active in self.rollouts:
            records = [self.rollouts[active][0]]
        return (active, str(records[0].get("task_type"))) if records else (None, None)

    def count(self, key: Key) -> int:
        """Finished groups of this instance, if it is of the active rollout."""
        return 0 if key[1] is None else self.counts.get(key[1], {}).get(key[2], 0) >> 32

    def follows_task(self, key: Key) -> bool:
        """Whether a group takes the size that its task has now: one of a replaced rollout keeps its own."""
        return key[1] is None or key[1] == self.active_rollout

    def rollouts_to_forget(self, saved: str) -> list[str]:
        """Which go when this one is saved: the oldest that neither run nor have anything stored."""
        spare = len(self.rollouts) + (saved not in self.rollouts) - KEPT_ROLLOUTS
        ended = [
            (int(record.get("number") or 0), name)
            for name, (record, _) in self.rollouts.items()
            if record.get("state") != "running"
            and name not in (saved, self.active_rollout)
            and name not in self.groups_of
        ]
        return [name for _, name in sorted(ended)[: max(0, spare)]]

    def set_count(self, rollout_id: str | None, instance_id: InstanceId, count: int, segment: int) -> None:
        """The so-manieth group of this instance is finished; counted for the active rollout alone."""
        if rollout_id is None or rollout_id != self.active_rollout:
            return
        counts = self.counts.setdefault(rollout_id, {})
        if instance_id not in counts:
            self._count_bytes += 24 + len(rollout_id)
            self._count_bytes += len(instance_id) if isinstance(instance_id, str) else 8
        counts[instance_id] = count << 32 | segment

    def _save_rollout(self, rollout: dict[str, Any], segment: int) -> None:
        rollout_id = str(rollout["rollout_id"])
        self._forget_rollout(rollout_id)
        self.rollouts[rollout_id] = (rollout, segment)
        self.rollout_bytes += len(msgspec.msgpack.encode(rollout))

    def _forget_rollout(self, rollout_id: str) -> None:
        stored = self.rollouts.pop(rollout_id, None)
        if stored is not None:
            self.rollout_bytes -= len(msgspec.msgpack.encode(stored[0]))

    def _forget_group_of(self, rollout_id: str | None) -> None:
        if rollout_id is not None:
            self.groups_of[rollout_id] -= 1
            if not self.groups_of[rollout_id]:
                del self.groups_of[rollout_id]
