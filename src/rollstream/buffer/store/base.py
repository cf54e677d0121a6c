"""The store's groups, leases and jobs, and the types that its calls take and return.

The life of a group:

    open --+-- has enough items, or timed out --> judged by the default rule --+--> ready
           |                                                                   +--> dropped
           +-- its task has a hook that judges --> judging --> judged by the hook, likewise

    ready <--> leased --> delivered          quarantined: a hook could not judge or finish it
      nack, expiry          ack
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.items import InstanceId

JobState = Literal["running", "finished", "stopped", "failed"]

GroupState = Literal["open", "judging", "ready", "leased", "quarantined", "delivered", "dropped"]


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"task": "task_type"}):
    """One start of a generator, over all restarts of its process."""

    id: str
    number: int = 0
    """The store counts jobs: later ones have larger numbers, whatever the clock says."""
    task: str
    payload: dict[str, Any]
    """The result of `PayloadRules.check`. A job that another one replaced keeps its short values."""
    state: JobState
    started: float
    """Unix time."""
    crashes: int = 0
    error: str = ""
    """The cause of the last crash, in one line."""
    traceback: str = ""
    expected: int | None = None
    """Items that it will write, if its generator says so."""


def listed(record: JobRecord) -> dict[str, Any]:
    """A job for lists: without its payload, which may be large."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    del fields["payload"]
    return fields


class Group(
    msgspec.Struct, gc=False, rename={"task": "task_type", "version": "policy_version", "cause": "traceback"}
):
    """A group without its items. `described` gives it as clients see it."""

    id: int
    task: str
    job: str
    """"": it belongs to no job."""
    instance_id: InstanceId
    size: int
    """Items of a whole group: its `group_size`."""
    n: int
    """Items it has."""
    bytes: int
    """The size of its items' bodies; 0: they are not kept any more."""
    rewards: list[float | None]
    """In the order of its items; None: not scored, or failed."""
    failed: int
    """Items whose rollout failed."""
    version: int | None
    """The oldest policy version of its items."""
    state: GroupState
    timed_out: bool
    position: int
    """In the queue of readers: the number of its last item."""
    updated: float
    """When its last item came, on the store's clock."""
    reason: str | None
    """Why it was dropped, or which hook quarantined it."""
    cause: str | None
    """The traceback of a quarantine."""
    left: int | None
    """Items that had left the store when it had; None: it has not left."""


def described(group: Group) -> dict[str, Any]:
    """A group for clients, who know "no job" as null."""
    return {**msgspec.to_builtins(group), "job": group.job or None}


class StoredLease(msgspec.Struct, frozen=True, kw_only=True, rename={"seconds": "lease_seconds"}):
    """Groups that a reader has until it acks, nacks, or its time is over."""

    id: str
    consumer: str | None
    seconds: float
    left_s: float
    """Until it expires."""
    groups: list[int]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a read asks for. None: any."""

    groups: int
    exact: bool = False
    """That many groups, or none."""
    task: str | None = None
    jobs: tuple[str, ...] | None = None
    size: int | None = None
    distinct: bool = False
    """No instance twice, and none of `without`."""
    without: frozenset[InstanceId] = frozenset()
    skip_tasks: tuple[str, ...] = ()
    min_version: int | None = None
    """Groups with an older item are passed over, or dropped as stale with `drop_stale`."""
    drop_stale: bool = False
    consumer: str | None = None
    read_id: str | None = None
    seconds: float = 600.0


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a read got."""

    lease: str | None = None
    groups: list[Group] = []
    available: int = 0
    """Groups that there were for an exact read that got none."""
    stale: int = 0
    """Groups that were too old for a read, which got nothing; without those that it dropped."""


class Removal(NamedTuple):
    """A leased or judged group that is not handed out."""

    group: int
    reason: str
    """Why it is dropped; or the hook that quarantines it."""
    cause: str | None = None
    """The traceback: the group goes to quarantine. None: it is dropped."""


class Judged(NamedTuple):
    """A hook's verdict on a group."""

    group: int
    n: int
    """Items it had then: a group that has grown since, or timed out, is judged again."""
    valid: bool
    finished: bool
    timed_out: bool = False
    """Whether it had timed out then."""


class Acked(NamedTuple):
    groups: int
    items: int
    repeated: bool
    """It was acked before: nothing has changed."""


class Change(NamedTuple):
    """News from the store, for those who wait."""

    ready: bool = False
    """Groups became ready, here or at another server of the same database."""
    unjudged: bool = False
    """There are groups for a hook to judge."""
    room: bool = False
    """Something has left."""
    dropped: Mapping[str, int] = {}
    """Groups by reason."""


class StoreRules(Protocol):
    """Tells a store about tasks."""

    def settings(self, task: str, job: JobRecord | None) -> GroupSettings: ...

    def has_own_judge(self, task: str) -> bool:
        """Whether a hook judges the task's groups, in place of the default rule."""
        ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a store keeps."""

    items: Annotated[int, Meta(ge=1)] = 1_000_000_000
    """Items that have not left; beyond it writes raise `BufferFullError`."""
    archive_bytes: Annotated[int, Meta(ge=0)] = 2**30
    """Items that have left and can still be looked at."""
    remembered_uids: int = 1_000_000
    """Items that left last. Those of the last job are all remembered, as are those in the archive."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts. Dicts are by reason, or by state; what has left is in none of the states."""

    items: int
    """That have not left."""
    items_ready: int
    items_of_job: int
    """Written by the job that was started last."""
    items_written: int
    items_delivered: int
    items_dropped: dict[str, int]
    groups: dict[str, int]
    groups_delivered: int
    groups_dropped: dict[str, int]
    scored_written: int
    """Written items with a reward."""
    reward_written: float
    """The sum of their rewards."""
    scored_delivered: int
    """Items with a reward, of groups that were delivered, also those that a filter left out."""
    reward_delivered: float
    """The sum of their rewards, as they were written."""
    leases: int
    oldest_ready_s: float
    """Since the last item of the group that is first in the queue; 0: there is none."""
    archive_bytes: int
    disk_bytes: int
    disk_full: bool
    """Items are refused, so that reads and acks have room."""
