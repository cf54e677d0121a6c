"""Groups that were dropped since a trainer was told last: its client looks at successful reads only."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rollstream.buffer.items import Encoding
from rollstream.buffer.ledger import GroupView

_MOST_GROUPS = 10_000
_MOST_BYTES = 64 * 2**20
"""Of items that are kept for a hook. Beyond either the oldest are forgotten: nobody asks for them."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A group that was dropped."""

    group: GroupView
    payloads: list[tuple[bytes, Encoding]] | None = None
    """Its items, where the task's own `get_group_data_meta_info` will ask for them: they are gone."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(payload) for payload, _ in self.payloads or ())


class UnreadDrops:
    """See the module. In memory only: after a restart of the server, `dropped.jsonl` has them."""

    def __init__(self) -> None:
        self._drops: deque[Drop] = deque()
        self._bytes = 0

    def add(self, drops: Iterable[Drop]) -> None:
        """More of them."""
        for drop in drops:
            self._drops.append(drop)
            self._bytes += drop.size
        while len(self._drops) > _MOST_GROUPS or (self._bytes > _MOST_BYTES and self._drops):
            self._bytes -= self._drops.popleft().size

    def of(self, task_type: str | None, rollouts: Iterable[str | None] | None) -> list[Drop]:
        """Those of a task and of some rollouts; None: of any."""
        wanted = None if rollouts is None else set(rollouts)
        return [
            drop
            for drop in self._drops
            if task_type in (None, drop.group.task_type)
            and (wanted is None or drop.group.rollout_id in wanted)
        ]

    def forget(self, told: Iterable[Drop]) -> None:
        """The trainer knows of these."""
        numbers = {drop.group.number for drop in told}
        self._drops = deque(drop for drop in self._drops if drop.group.number not in numbers)
        self._bytes = sum(drop.size for drop in self._drops)
