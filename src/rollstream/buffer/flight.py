"""What is on its way to the log: what callers asked for, and the batch that it goes out in."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec

from rollstream.buffer.group_state import NewItem
from rollstream.buffer.items import Item
from rollstream.buffer.log_records import Event
from rollstream.buffer.oplog import LogFrame
from rollstream.errors import RollstreamError


class Copies(msgspec.Struct):
    """Item frames to be written again at the head of the log."""

    frames: list[tuple[LogFrame, bytes]]
    """Each as it was read, and its bytes."""


Plan = Callable[[], Event | Copies | None]
"""Says what is to be written, from the state as it is; None: nothing. What it raises is for its caller."""


class Write:
    """Items that one caller wrote."""

    __slots__ = ("error", "future", "items", "planned", "results")

    def __init__(self, items: Sequence[Item], future: "asyncio.Future[list[bool]]") -> None:
        self.items = items
        self.future = future
        self.planned = 0
        self.results: list[bool] = []
        self.error: RollstreamError | None = None
        """One of its items can't be written; those before it can, those behind it are left."""


class Control:
    """Something but items that one caller wants to be written."""

    __slots__ = ("future", "needs_room", "plan", "retried")

    def __init__(self, plan: Plan, future: "asyncio.Future[None]", needs_room: bool) -> None:
        self.plan = plan
        self.future = future
        self.needs_room = needs_room
        self.retried = False
        """The disk was full when it went out with items: it goes once more, by itself."""


class OpenGroup:
    """The group that takes the items of an instance, as a batch sees it."""

    __slots__ = ("count", "number", "size")

    def __init__(self, number: int, count: int, size: int) -> None:
        self.number = number
        self.count = count
        self.size = size


class Flight:
    """A batch on its way to the disk."""

    __slots__ = (
        "control",
        "copies",
        "event",
        "event_ticket",
        "frames",
        "items",
        "rest",
        "segment",
        "size",
        "writes",
        "written_at",
    )

    def __init__(self, segment: int) -> None:
        self.rest: Iterator[Callable[[], None]] = iter(())
        """What of a large event is still to be applied, some milliseconds each."""
        self.segment = segment
        self.frames: list[bytes] = []
        self.size = 0
        self.control: Control | None = None
        self.event: Event | None = None
        self.event_ticket = 0
        self.copies: list[tuple[LogFrame, int]] = []
        self.items: list[NewItem] = []
        self.written_at = 0.0
        """Unix time of the items, seconds."""
        self.writes: list[Write] = []
