"""Keeping the log's folder small: the oldest segment is emptied and deleted when too much of the log is dead.

What is still alive in it is written again at the head: items as they are, everything else (leases, finished
counts, uids of items that are gone…) as facts. Then the segment goes. Always the oldest: a record that ends
something thus never goes before the record of what it ended, and a log read anew tells the same story.

Half of a log that is being cleaned is dead, so that every byte that is written is written about once more.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

from rollstream.buffer.commits import CommitQueue
from rollstream.buffer.flight import Copies, Plan
from rollstream.buffer.items import InstanceId
from rollstream.buffer.log_records import EVENT, ITEM, Event, decode_event, hashes, seal_frame
from rollstream.buffer.oplog import LogFrame, Oplog
from rollstream.buffer.state import BufferState

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

_CHUNK_FRAMES = 256
"""Frames looked at and copied in one go; others wait for the event loop meanwhile."""

_CHUNK_BYTES = 1 << 20
_FACTS = 2000
"""Facts of one record: some milliseconds."""

_SMALL = 512 << 10
"""A live part this small may be copied on the last of the disk: less than the reserve, and it frees more."""


class Cleaning:
    """Decides when, and does it."""

    def __init__(self, state: BufferState, log: Oplog, commits: CommitQueue, *, segment_bytes: int) -> None:
        self._state = state
        self._log = log
        self._commits = commits
        self._segment_bytes = segment_bytes

    def is_due(self) -> bool:
        """Whether the log is more than twice what is alive in it, and two segments.

        On a full disk there is no such slack: whatever frees more than it takes of the reserve is due.
        """
        log = self._log
        if self._commits.full:
            oldest = next(iter(log.sizes), -1)
            if oldest < 0 or (oldest == log.head and log.sizes[oldest] < _SMALL):
                return False
            return self._state.live_bytes.get(oldest, 0) < min(_SMALL, log.sizes[oldest] // 2)
        if len(log.sizes) < 2:
            return False
        live = sum(self._state.live_bytes.values()) + self._state.fact_bytes()
        return log.bytes_on_disk > 2 * live + 2 * self._segment_bytes

    async def run(self) -> None:
        """Empties and deletes oldest segments until none is due. Raises `StorageError`."""
        log = self._log
        head = log.head
        while self.is_due():
            segment = next(iter(log.sizes))
            if segment > head:
                return  # what it wrote itself is all alive, however its size was guessed
            if segment == log.head:  # the disk is full: it ends early, so that it can go
                log.begin_anew = True
                await self._commits.control(Event)
            await self._empty(segment)

    async def _empty(self, segment: int) -> None:
        log, state = self._log, self._state
        small = state.live_bytes.get(segment, 0) < _SMALL
        frames = log.frames_of(segment)
        while chunk := await asyncio.to_thread(_take, frames):
            items = [frame for frame in chunk if frame.kind == ITEM]
            if any(state.is_live(frame.body, frame.rows, frame.where) for frame in items):
                await self._commits.control(partial(self._copy, items), needs_room=not small)
            for frame in chunk:
                if frame.kind == EVENT:
                    await self._keep_buried(decode_event(frame.body))
        for facts in list(self._facts(segment)):
            await self._commits.control(facts)
        if state.live_bytes.get(segment):
            logger.error("%s is damaged; it is kept in damaged/, its items are lost", log.path(segment))
            await asyncio.to_thread(log.set_aside, segment)
        else:
            await asyncio.to_thread(log.delete, segment)
        log.sizes.pop(segment, None)
        state.live_bytes.pop(segment, None)

    def _copy(self, items: Sequence[LogFrame]) -> Copies | None:
        live = [frame for frame in items if self._state.is_live(frame.body, frame.rows, frame.where)]
        if not live:
            return None
        return Copies([(frame, seal_frame(frame.ticket, ITEM, frame.rows, frame.body)) for frame in live])

    async def _keep_buried(self, event: Event) -> None:
        if event.buried is None:
            return
        first, uids = self._state.uids.still_remembered(event.buried[0], hashes(event.buried[1]))
        if uids:
            kept = Event(buried=(first, uids.tobytes()))
            await self._commits.control(lambda: kept)

    def _facts(self, segment: int) -> Iterator[Plan]:
        """What else the segment is the newest record of, each read when its batch is planned."""
        state = self._state
        for lease_ids in _split([lease.id for lease in state.leases.values() if lease.segment == segment], 1):
            yield partial(_lease_facts, state, lease_ids)
        for ended in _split([lease_id for lease_id, (_, at) in state.ended.items() if at == segment]):
            yield partial(_ended_facts, state, ended)
        for numbers in _split([number for number, (_, at) in state.quarantine.items() if at == segment], 100):
            yield partial(_quarantine_facts, state, numbers)
        for numbers in _split([number for number, at in state.sealed.items() if at == segment]):
            yield partial(_sealed_facts, state, numbers)
        for numbers in _split([number for number, at in state.sized.items() if at == segment]):
            yield partial(_size_facts, state, numbers)
        for rollout_id in list(state.counts):
            counts = state.counts.get(rollout_id, {})
            for keys in _split([key for key, packed in counts.items() if packed & 0xFFFFFFFF == segment]):
                yield partial(_count_facts, state, rollout_id, keys)
        for rollout_ids in _split([name for name, (_, at) in state.rollouts.items() if at == segment], 1):
            yield partial(_rollout_facts, state, rollout_ids)


def _lease_facts(state: BufferState, lease_ids: list[str]) -> Event:
    event = _ended_facts(state, lease_ids)  # of those that ended since they were listed
    event.leases = [state.leases[name].fact() for name in lease_ids if name in state.leases]
    return event


def _ended_facts(state: BufferState, lease_ids: list[str]) -> Event:
    return Event(ended=[(name, state.ended[name][0]) for name in lease_ids if name in state.ended])


def _quarantine_facts(state: BufferState, numbers: list[int]) -> Event:
    kept = [number for number in numbers if number in state.quarantine]
    return Event(quarantined=[(number, state.quarantine[number][0]) for number in kept])


def _sealed_facts(state: BufferState, numbers: list[int]) -> Event:
    return Event(sealed=[number for number in numbers if number in state.sealed])


def _size_facts(state: BufferState, numbers: list[int]) -> Event:
    return Event(sizes=[(number, state.groups[number].size) for number in numbers if number in state.sized])


def _count_facts(state: BufferState, rollout_id: str, keys: list[InstanceId]) -> Event:
    counts = state.counts.get(rollout_id, {})
    return Event(counts=[(rollout_id, key, counts[key] >> 32) for key in keys if key in counts])


def _rollout_facts(state: BufferState, rollout_ids: list[str]) -> Event:
    return Event(rollouts=[state.rollouts[name][0] for name in rollout_ids if name in state.rollouts])


def _take(frames: Iterator[LogFrame]) -> list[LogFrame]:
    chunk: list[LogFrame] = []
    size = 0
    for frame in itertools.islice(frames, _CHUNK_FRAMES):
        chunk.append(frame)
        size += frame.length
        if size >= _CHUNK_BYTES:
            break
    return chunk


def _split(facts: list[_T], size: int = _FACTS) -> Iterator[list[_T]]:
    for at in range(0, len(facts), size):
        yield facts[at : at + size]
