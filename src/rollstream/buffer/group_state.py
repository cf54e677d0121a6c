"""What the buffer's state is made of: groups, what is known of their items, leases, counts."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import NamedTuple

import msgspec

from rollstream.buffer.items import InstanceId, Item
from rollstream.buffer.log_records import LeaseFact, LeftOut

Key = tuple[str, str | None, InstanceId]
"""Task type, rollout id (None: written outside a rollout) and instance id: items of one key share a group."""

Line = tuple[str, str | None]
"""Task type and rollout id: what a reader may ask for."""

Instance = tuple[str, InstanceId]
"""Task type and instance id: what a trainer must not get twice in a cycle, whichever rollout it is of."""

DEFAULT_TASK = "default"
"""Task of an item that names none while no task is active."""

RECORD = struct.Struct("<QQIdq")
"""Of an item: where its frame is, hash of its uid, length of its frame, reward, policy version."""

RECORD_SIZE = RECORD.size

NO_VERSION = -(1 << 63)
SEGMENT_SHIFT = 40
_OFFSET_MASK = (1 << SEGMENT_SHIFT) - 1


def place(segment: int, offset: int) -> int:
    """Where a frame is, as one number."""
    return segment << SEGMENT_SHIFT | offset


def segment_of(where: int) -> int:
    """Number of the log's segment."""
    return where >> SEGMENT_SHIFT


def offset_of(where: int) -> int:
    """Bytes into the segment."""
    return where & _OFFSET_MASK


class ItemPlace(NamedTuple):
    """What a group knows of an item."""

    where: int
    uid: int
    """Hash."""
    length: int
    """Of its frame, bytes."""
    reward: float
    """NaN: not scored."""
    version: int


class Group(msgspec.Struct, gc=False):
    """Items of one instance. Not tracked by the garbage collector: there are many, and none is in a cycle."""

    number: int
    key: Key
    size: int
    """Items that close it."""
    ticket: int
    """Of its newest item: the order of completion."""
    touched: float
    """Monotonic time of its newest item, seconds."""
    written_at: float
    """Unix time of its newest item, seconds."""
    closed: bool = False
    timed_out: bool = False
    claimed: bool = False
    """A decision on it is on its way to the disk."""
    kept: int = -1
    """Items it had when it was looked at and left alone; -1: it was not, or it may be looked at again."""
    lease: str | None = None
    """The lease it is in, or was in before that expired."""
    quarantined: bool = False
    watched: bool = False
    """A timer of it is pending; it has one at most."""
    waiting: bool = False
    """It is in line to be judged."""
    records: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def line(self) -> Line:
        """Where it waits."""
        return self.key[:2]

    @property
    def instance(self) -> Instance:
        """What of a cycle it is."""
        return self.key[0], self.key[2]

    def __len__(self) -> int:
        return len(self.records) // RECORD_SIZE

    def places(self) -> Iterator[ItemPlace]:
        """Of its items, in order of arrival."""
        return map(ItemPlace._make, RECORD.iter_unpack(bytes(self.records)))

    def frames(self, size: int) -> list[tuple[int, int]]:
        """Of its first items: where their frames are, and how long."""
        return [(item[0], item[2]) for item in RECORD.iter_unpack(bytes(self.records[: size * RECORD_SIZE]))]

    def uids(self) -> list[int]:
        """Hashes of its items' uids, in order of arrival."""
        return [record[1] for record in RECORD.iter_unpack(bytes(self.records))]

    def find(self, where: int, hint: int) -> int | None:
        """Position of the item whose frame is at `where`; `hint`: where it should be."""
        if hint < len(self) and RECORD.unpack_from(self.records, hint * RECORD_SIZE)[0] == where:
            return hint
        return next((at for at, item in enumerate(self.places()) if item.where == where), None)


class NewItem(msgspec.Struct, gc=False):
    """An item that is about to be stored: what of its frame is kept in memory, and where that is."""

    item: Item
    uid: int
    """Hash."""
    group: int
    """Number of its group."""
    key: Key
    group_size: int
    finished: int
    """See `ItemRecord`."""
    ticket: int
    where: int
    length: int
    """Of its frame, bytes."""


class GroupView(msgspec.Struct, frozen=True, gc=False):
    """A group as it was at one moment."""

    number: int
    """Unique for ever."""
    task_type: str
    rollout_id: str | None
    """None: its items were written outside a rollout."""
    instance_id: InstanceId
    size: int
    """Items."""
    group_size: int
    """Items of a whole group."""
    rewards: tuple[float | None, ...]
    policy_version: int | None
    """The oldest of its items' versions; None: no item has one."""
    timed_out: bool
    closed: bool
    written_at: float
    """Of the newest item; Unix time, seconds."""


class LeaseState(msgspec.Struct):
    """Groups in the hands of a reader."""

    id: str
    consumer: str | None
    seconds: float
    deadline: float
    """Monotonic time."""
    segment: int
    """Of the log, where its newest record is."""
    groups: dict[int, None]
    order: int
    """Of the leases, as they were taken."""
    granted: float
    """Seconds it was given last."""
    expired: bool = False
    counted: bool = True
    """Its groups have places in the trainer's cycle."""
    lost: bool = False
    left_out: list[LeftOut] = []

    def fact(self) -> LeaseFact:
        """For the log."""
        return LeaseFact(
            self.id,
            self.consumer,
            self.seconds,
            list(self.groups),
            self.lost,
            self.left_out,
            self.granted,
            self.counted,
        )


class Task(NamedTuple):
    """How the groups of a task type are made."""

    group_size: int
    judge_from: int
    """Items from which on an open group is a candidate."""


@dataclass(slots=True)
class Counters:
    """What happened since the log began."""

    items_written: int = 0
    groups_delivered: int = 0
    items_delivered: int = 0
    dropped: dict[str, tuple[int, int]] = dataclass_field(default_factory=dict)
    """By reason: groups and items; an item that was left out of a delivered group is in no dropped group."""


@dataclass(slots=True)
class Totals:
    """Of the groups of a task type that are stored."""

    items: int = 0
    groups: int = 0
    reward_sum: float = 0.0
    rewards: int = 0
    """Items with a reward."""
