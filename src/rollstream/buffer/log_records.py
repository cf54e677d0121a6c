"""What stands in the frames of the buffer's log.

A frame (see `rollstream.store.journal`) has an index, a repeat, `rows` and a body. Here they are

- index: the *ticket*, which grows by one with every record; the copy of an item keeps the ticket of the
  original, so that a ticket below what a segment starts with marks a copy;
- repeat: the kind: ITEM, EVENT or START;
- rows: the position of an item within its group, else 0.

An ITEM says everything about itself: it needs no other frame. An EVENT is a set of facts that become true
together. A START is the first frame of every segment: all that is counted, as it stood there.
"""

import struct
import zlib
from array import array
from typing import NamedTuple

import msgspec

from rollstream.buffer.items import Encoding, InstanceId, Item

ITEM, EVENT, START = 1, 2, 3

# Layout of `rollstream.store.journal`: frame header, key, body. Built in one go here: the body of an item is
# not copied more often than needed.
_FRAME_MAGIC = b"\xd7RSF"
_FRAME_START = struct.Struct("<4sI")
_CHECKS = struct.Struct("<II")
_KEY = struct.Struct("<qii")
FRAME_HEADER = 16
KEY_SIZE = _KEY.size

_ITEM = struct.Struct("<QQIIdqdBI")
"""Group number, hash of the uid, group size, finished, reward, policy version, Unix time, encoding, length of
the meta part."""

_KEYED_ITEM = struct.Struct(_KEY.format + _ITEM.format.removeprefix("<"))
"""Both in one go."""

_ITEM_END = struct.Struct("<BI")
"""Its last two."""

_GROUP_OF_ITEM = struct.Struct("<Q")
_NO_VERSION = -(1 << 63)
_NAN = float("nan")
_ENCODINGS: tuple[Encoding, Encoding] = ("json", "msgpack")

_encode_meta = msgspec.msgpack.Encoder().encode


class _Meta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    task_type: str
    instance_id: InstanceId
    uid: str
    rollout_id: str | None = None


_decode_meta = msgspec.msgpack.Decoder(_Meta).decode


class ItemRecord(NamedTuple):
    """An item as its frame has it, without its payload."""

    group: int
    uid: int
    """Hash."""
    group_size: int
    finished: int
    """0, or: this item closes its group, which is the so-manieth finished one of its instance."""
    reward: float | None
    version: int | None
    written_at: float
    encoding: Encoding
    task_type: str
    instance_id: InstanceId
    uid_text: str
    rollout_id: str | None
    payload_at: int
    """Of the payload in the body."""


def seal_frame(ticket: int, kind: int, rows: int, body: bytes) -> bytes:
    """A frame; the same bytes as `rollstream.store.journal.encode_frame`."""
    return _sealed(_KEY.pack(ticket, kind, rows), body)


def _sealed(key: bytes, body: bytes) -> bytes:
    start = _FRAME_START.pack(_FRAME_MAGIC, len(key) + len(body))
    checks = _CHECKS.pack(zlib.crc32(start), zlib.crc32(body, zlib.crc32(key)))
    return b"".join((start, checks, key, body))


def encode_item(
    item: Item,
    *,
    ticket: int,
    group: int,
    position: int,
    uid: int,
    group_size: int,
    finished: int,
    task_type: str,
    rollout_id: str | None,
    written_at: float,
) -> bytes:
    """The frame of an item; see `ItemRecord` for the arguments."""
    meta = _encode_meta((task_type, item.instance_id, item.uid, rollout_id))
    header = _KEYED_ITEM.pack(
        ticket,
        ITEM,
        position,
        group,
        uid,
        group_size,
        finished,
        _NAN if item.reward is None else item.reward,
        _NO_VERSION if item.policy_version is None else item.policy_version,
        written_at,
        item.encoding == "msgpack",
        len(meta),
    )
    return _sealed(header + meta, item.payload)


def decode_item(body: bytes | memoryview) -> ItemRecord:
    """Reads the body of an ITEM. Raises `ValueError` (msgspec's errors are such), `struct.error`."""
    group, uid, group_size, finished, reward, version, written_at, encoding, length = _ITEM.unpack_from(body)
    payload_at = _ITEM.size + length
    meta = _decode_meta(body[_ITEM.size : payload_at])
    return ItemRecord(
        group,
        uid,
        group_size,
        finished,
        None if reward != reward else reward,
        None if version == _NO_VERSION else version,
        written_at,
        _ENCODINGS[encoding],
        meta.task_type,
        meta.instance_id,
        meta.uid,
        meta.rollout_id,
        payload_at,
    )


def group_of(body: bytes | memoryview) -> int:
    """The group number of an ITEM's body."""
    number: int = _GROUP_OF_ITEM.unpack_from(body)[0]
    return number


def split_item(body: bytes | memoryview) -> tuple[bytes, Encoding]:
    """The payload of an ITEM's body, and what it is written in."""
    encoding, length = _ITEM_END.unpack_from(body, _ITEM.size - _ITEM_END.size)
    return bytes(body[_ITEM.size + length :]), _ENCODINGS[encoding]


class LeaseFact(msgspec.Struct, array_like=True):
    """A lease holds these groups, and no others."""

    id: str
    consumer: str | None
    seconds: float
    groups: list[int]
    lost: bool = False
    """Some of its groups went elsewhere after it had expired: it can't be acked any more."""
    left_out: list["LeftOut"] = []
    granted: float | None = None
    """Seconds it was given last; None: its own."""
    counted: bool = True
    """Its groups have places in the trainer's cycle: there are cycles, and it is not lost."""


class LeftOut(msgspec.Struct, array_like=True):
    """Items of a leased group that its reader did not get."""

    group: int
    reason: str
    uids: list[str]


class Dropped(msgspec.Struct, frozen=True):
    """Items that left without being delivered: what is counted and listed."""

    group: int
    """Number of the group."""
    task_type: str
    instance_id: InstanceId
    reason: str
    uids: list[str]
    rewards: list[float | None]
    at: float
    """Unix time, seconds."""
    whole: bool = True
    """False: items that were left out of a group that was delivered."""


class Lapse(msgspec.Struct, array_like=True, frozen=True):
    """A lease expired, or came to life again. In logs of an earlier version."""

    number: int
    """In the order in which that happened."""
    lease: str
    counted: bool
    """Its groups count in the trainer's cycle from here on, or no more."""
    instances: list[tuple[str, InstanceId]]
    """Of its groups."""


class Event(msgspec.Struct, omit_defaults=True):
    """Facts that become true together, applied in the order of the fields."""

    lapses: list[Lapse] = []
    """What happened to leases since the last record. In logs of an earlier version."""
    ends: list[tuple[str, str]] = []
    """Lease ids, and what became of them: "acked" or "returned"."""
    released: list[tuple[str, int]] = []
    """Lease ids and groups that the lease's reader gave away."""
    returned: list[tuple[str, InstanceId]] | None = None
    """Instances that do not count in the trainer's cycle any more, by the two above. In logs of an earlier
    version."""
    freed: list[int] | None = None
    """Groups that give up their places in the trainer's cycle by this record. None, in logs of earlier
    versions: those of leases that end, or are lost, by it."""
    gone: list[int] = []
    """Groups that leave, delivered or not."""
    leases: list[LeaseFact] = []
    extended: list[tuple[str, float]] = []
    """Lease ids, and the seconds that they have from here on."""
    quarantined: list[tuple[int, str]] = []
    """Groups, and the traceback of what went wrong."""
    retried: list[int] = []
    """Groups that leave quarantine."""
    left_out: tuple[str, list[LeftOut]] | None = None
    """Of a lease."""
    counts: list[tuple[str, InstanceId, int]] = []
    """Rollout, instance, how many of its groups are finished."""
    rollouts: list[dict[str, object]] = []
    forgotten: list[str] = []
    """Rollouts whose records go."""
    buried: tuple[int, bytes] | None = None
    """Number of the first burial, and 64-bit hashes of uids."""
    tasks: list[tuple[str, int, int]] = []
    """Task type, group size, items from which on a group is judged."""
    sealed: list[int] = []
    """Groups that take no more items though they are not whole."""
    sizes: list[tuple[int, int]] = []
    """Groups, and how many items make each whole, where its items may say another number."""
    active: str | None = None
    """The task of items that name none."""
    active_rollout: str | None = None
    """The rollout of items that name none, if they are of its task. The counts of another one end."""
    ended: list[tuple[str, str]] = []
    """As `ends`, of leases that ended before."""
    handed: list[tuple[str, InstanceId]] = []
    """Counted: instances handed out, in order."""
    cycle: bool = False
    """A trainer's cycle begins after what was handed out up to here."""
    dropped: list[Dropped] = []
    """Counted and listed."""
    delivered: tuple[int, int] = (0, 0)
    """Counted: groups and items that were acked."""


class Start(msgspec.Struct):
    """What is counted, as it stood when a segment began."""

    ticket: int
    """That of the next record."""
    group: int
    """Number of the next group."""
    burials: int
    items_written: int
    groups_delivered: int
    items_delivered: int
    dropped: dict[str, tuple[int, int]]
    """By reason: groups (whole ones) and items."""
    tasks: list[tuple[str, int, int]]
    active: str | None
    active_rollout: str | None
    handed: int
    """Groups that were handed out and did not come back."""
    cycle_began: int = 0
    """Those of them that were handed out before the first cycle of the trainer that is there."""
    places: list[tuple[int, str, InstanceId]] = []
    """The last of them in order: number of the group, task type and instance."""
    recent: list[tuple[str, InstanceId, int]] = []
    """In logs of earlier versions: instances that were handed out last, each with its number in order."""
    earlier: list[tuple[str, InstanceId, int]] = []
    """In logs of an earlier version: when some of `recent` were handed out before that."""
    lapses: int = 0
    """In logs of an earlier version: number of the next one; earlier ones are in these counts."""


encode_record = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode
decode_start = msgspec.msgpack.Decoder(Start).decode


def hashes(packed: bytes) -> "array[int]":
    """The uids of a burial."""
    uids = array("Q")
    uids.frombytes(packed)
    return uids
