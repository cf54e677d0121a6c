"""What a reader asks for, and what it got."""

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from rollstream.buffer.items import InstanceId
from rollstream.buffer.ledger import GroupView, Lease
from rollstream.buffer.unread_drops import Drop


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader asks for."""

    consumer: str | None = None
    """Whose lease it is."""
    read_id: str | None = None
    """Of the reader's; the lease's id begins with it. See `Ledger.return_read`."""
    lease_seconds: float = 600.0
    max_groups: int | None = None
    """At most; None: all there are."""
    all_or_nothing: bool = False
    """`max_groups` groups, or none."""
    group_size: int | None = None
    """Groups of so many items only: they add up to a number that the reader has named."""
    task_type: str | None = None
    """Of one task only."""
    rollouts: Collection[str | None] | None = None
    """Of these rollouts only; None among them: what was written outside of one."""
    policy_version: int | None = None
    """The reader's."""
    without: AbstractSet[InstanceId] = frozenset()
    """Instances that the reader has from an earlier part of the same read."""
    max_staleness: int | None = None
    """How far behind `policy_version` an item may be; a group with an older one is dropped."""


@dataclass(slots=True)
class Taken:
    """What a read got."""

    lease: Lease | None = None
    groups: list[GroupView] = field(default_factory=list)
    """Leased, to be finished; those that come to nothing are taken out."""
    dropped: list[Drop] = field(default_factory=list)
    available: int = 0
    """Valid groups there were, as far as was looked."""
    passed_over: int = 0
    """Groups that were in line when it began and were not looked at: also those that came after enough."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some groups, ready to be sent."""

    body: bytes
    groups: int
    items: int
