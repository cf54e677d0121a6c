"""What a ledger is told, and what it tells."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from rollstream.buffer.group_state import GroupView
from rollstream.buffer.groups import GroupSettings
from rollstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """What a ledger is told."""

    groups: GroupSettings = field(default_factory=GroupSettings)
    max_buffer_size: int = 1_000_000_000
    """Items stored at most."""
    max_bytes: int | None = None
    """Bytes of stored items at most."""
    lease_seconds: float = 600.0
    """Of a lease that is not asked for another time."""
    remember_uids: int = 1_000_000
    """Uids of items that are gone which stay known: a write that is tried again is not stored again."""
    groups_per_cycle: int | None = None
    """Groups of one of the trainer's fetches: among so many in a row, no instance comes twice."""
    segment_bytes: int = 64 << 20
    """Of a file of the log; the folder takes two of them more than twice what is alive, at most."""

    def __post_init__(self) -> None:
        for name, least in (("max_buffer_size", 1), ("remember_uids", 0), ("segment_bytes", 1024)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, is {getattr(self, name)}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"max_bytes must be at least 1, is {self.max_bytes}")
        if self.groups_per_cycle is not None and self.groups_per_cycle < 1:
            raise ConfigError(f"groups_per_cycle must be at least 1, is {self.groups_per_cycle}")
        if not 0 < self.lease_seconds < float("inf"):
            raise ConfigError(f"lease_seconds must be above 0, is {self.lease_seconds}")


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups in the hands of a reader, as it was at one moment."""

    lease_id: str
    consumer: str | None
    seconds: float
    """Its time, anew with every `extend`."""
    groups: tuple[GroupView, ...]
    """In the order in which they were asked for."""
    expires_in: float
    """Seconds; 0: it has expired, and can be acked while its groups were not handed out anew."""


@dataclass(frozen=True, slots=True)
class AckResult:
    """What an ack took out of the buffer."""

    lease_id: str
    groups: int
    items: int
    repeated: bool = False
    """It was acked before: nothing happened now."""


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Asking for it costs microseconds."""

    items: int
    """Stored now."""
    groups: Mapping[str, int]
    """By state: `open`, `ready` (in line to be judged; some of them open still), `leased`, `quarantined`."""
    leases: int
    items_written: int
    """Since the buffer began, as are the following four."""
    items_delivered: int
    groups_delivered: int
    dropped: Mapping[str, int]
    """Items that left undelivered, by reason."""
    dropped_groups: Mapping[str, int]
    """Groups that did, by reason."""
    bytes_live: int
    """Of stored items on disk."""
    bytes_on_disk: int
    """Of the log."""
    segments: int
    known_uids: int
    disk_full: bool
    """When something was to be written last."""
    lag: float
    """Seconds since the newest item of the group that is first in line; 0: there is none."""


class QuarantinedGroup(msgspec.Struct, frozen=True):
    """A group that could not be judged or finished."""

    group: GroupView
    traceback: str
    """Its end."""
