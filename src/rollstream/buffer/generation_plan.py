"""What a generator has to generate: every repeat of every instance, epoch by epoch, each with its uid.

Uids are a pure function of rollout, instance, epoch and repeat. So a generator that is started again asks the
buffer which of them it has, and nothing is generated twice.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from rollstream.buffer.items import InstanceId
from rollstream.errors import DataError

_ID_CHARS = 200
"""Of an instance id in a uid; a longer one stands there by its digest, as uids have a limit."""


@dataclass(frozen=True, slots=True)
class Work:
    """One rollout that is to be generated."""

    row: int
    """Position in the input file."""
    instance_id: InstanceId
    epoch: int
    repeat: int
    """Within its group, from 0."""
    uid: str
    rollout_id: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it."""

    rollout_id: str
    instance_ids: Sequence[InstanceId]
    """By row; each id once."""
    repeats: int
    epochs: int
    skips: Counter[InstanceId]
    """How many epochs of an instance were done before."""
    finished: Counter[InstanceId] = field(default_factory=Counter)
    """How many groups of an instance are complete since, where the buffer may have forgotten their uids."""

    def work(self) -> Iterator[Work]:
        """In order: by epoch, then by row, the repeats of a group together."""
        for epoch in range(self.epochs):
            for row, instance_id in enumerate(self.instance_ids):
                if epoch < self.skips[instance_id]:
                    continue
                for repeat in range(self.repeats):
                    uid = make_uid(self.rollout_id, instance_id, epoch, repeat)
                    yield Work(row, instance_id, epoch, repeat, uid, self.rollout_id)

    def missing(self, asked: Sequence[Work], known: Sequence[bool]) -> list[Work]:
        """What is to be generated of some whole groups.

        A group of which the buffer knows no uid, although as many are complete, is one that it has forgotten.

        Args:
            asked: work in the order of `work`.
            known: by work, whether the buffer knows its uid.
        """
        there = {(work.row, work.epoch) for work, one in zip(asked, known, strict=True) if one}
        return [
            work
            for work, one in zip(asked, known, strict=True)
            if not one
            and (
                (work.row, work.epoch) in there
                or work.epoch >= self.skips[work.instance_id] + self.finished[work.instance_id]
            )
        ]

    def __len__(self) -> int:
        skipped = sum(min(self.skips[one], self.epochs) for one in self.instance_ids)
        return (len(self.instance_ids) * self.epochs - skipped) * self.repeats


def make_uid(rollout_id: str, instance_id: InstanceId, epoch: int, repeat: int) -> str:
    """The uid of an item. Instances 7 and "7" have different ones."""
    name = orjson.dumps(instance_id)
    text = name.decode() if len(name) <= _ID_CHARS else hashlib.blake2b(name, digest_size=16).hexdigest()
    return f"{rollout_id}:{text}:{epoch}:{repeat}"


def check_distinct(instance_ids: Sequence[InstanceId]) -> None:
    """Refuses an input file in which two rows are one instance: their groups would be mixed.

    Raises:
        DataError: names the first two such rows.
    """
    first: dict[InstanceId, int] = {}
    for row, instance_id in enumerate(instance_ids):
        if (other := first.setdefault(instance_id, row)) != row:
            raise DataError(
                f"instance_id {instance_id!r} is that of rows {other} and {row} of the input file: give each "
                "row its own, or use num_epoch for several groups of one prompt"
            )


class EpochOrder:
    """Lets an instance's next epoch begin when all of the one before is written.

    The buffer makes groups of items in the order of their arrival, so repeats of two epochs would be mixed.
    Work is entered in the plan's order: who waits, waits for work that is on its way.
    """

    def __init__(self) -> None:
        self._open: dict[int, _OpenEpoch] = {}

    async def enter(self, work: Work) -> None:
        """Returns when this may be generated."""
        while (held := self._open.get(work.row)) is not None and held.epoch != work.epoch:
            await held.done.wait()
        if held is None:
            held = self._open[work.row] = _OpenEpoch(work.epoch, 0, asyncio.Event())
        held.in_flight += 1

    def leave(self, work: Work) -> None:
        """Told that it is written, or given up."""
        held = self._open[work.row]
        held.in_flight -= 1
        if held.in_flight == 0:
            del self._open[work.row]
            held.done.set()


@dataclass(slots=True)
class _OpenEpoch:
    epoch: int
    in_flight: int
    done: asyncio.Event
