"""Making things durable: what is to be written gathers while the last sync runs, and goes out together.

    write(), control() --> queues --+                       +--> state changes, callers are answered
                                    |                       |
             event loop: plan: frames, places --> writer thread: append, fdatasync
                                    ^                       |
                                    +--- one batch at a time

Planning looks at the state, which holds what is durable and nothing else; since one batch is on its way at a
time, all that a plan must see besides is its own batch: the items before it. At most one control (a lease, an
ack, a copy for the cleaning…) is in a batch, before its items, so that controls need no such thing.

When a batch fails, its writers are told and the state is as if it had never been. A control is tried once
more by itself: it may use the room that is reserved for it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rollstream.buffer.drop_file import encode_drops
from rollstream.buffer.flight import Control, Flight, OpenGroup, Plan, Write
from rollstream.buffer.group_state import DEFAULT_TASK, Key, NewItem, place
from rollstream.buffer.items import InstanceId, Item
from rollstream.buffer.log_records import (
    EVENT,
    START,
    Event,
    encode_item,
    encode_record,
    hashes,
    seal_frame,
)
from rollstream.buffer.oplog import Batch, Oplog
from rollstream.buffer.state import BufferState
from rollstream.buffer.uid_memory import hash_uid
from rollstream.errors import RollstreamError, StorageError, StorageFullError
from rollstream.store.journal import FILE_HEADER_SIZE

logger = logging.getLogger(__name__)

_BATCH_ITEMS = 256
"""Planned and applied in one go: some milliseconds, the longest that others wait for the event loop."""

_BURIED_AT_ONCE = 4096
"""Uids of groups that are gone: about a millisecond."""

_BATCH_BYTES = 4 << 20
"""Of items in a batch, as far as they come in several; bounds a sync."""

_SEEN_IDS = 10_000
"""Instance ids among which a number and a text that look the same are found."""

_NOTHING = Event()


class CommitQueue:
    """See the module. Belongs to one event loop."""

    def __init__(
        self,
        state: BufferState,
        log: Oplog,
        *,
        segment_bytes: int,
        clock: Callable[[], float],
        changed: Callable[[bool], None],
    ) -> None:
        """`changed` is called after every batch that was applied: whether something but items was written."""
        self._state = state
        self._log = log
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._changed = changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writes: deque[Write] = deque()
        self._controls: deque[Control] = deque()
        self._flight: Flight | None = None
        self._scheduled = False
        self._idle: asyncio.Event | None = None
        self._warned = False
        self._ids: dict[tuple[str, str], type] = {}
        """Task type and instance id as a text -> what the id was: a number or a text."""
        self.waiting_items = 0
        """Items of writes that are not answered yet."""
        self.full = False
        """The disk was full, and nothing that needs room was written since."""
        self.broken_by: BaseException | None = None

    # -- asking

    def write(self, items: Sequence[Item]) -> "asyncio.Future[list[bool]]":
        """Resolved when all are durable; by item, whether it was stored now (False: its uid was known)."""
        loop = self._loop or self._running_loop()
        future: asyncio.Future[list[bool]] = loop.create_future()
        if self.broken_by is not None:
            future.set_exception(self._broken())
        elif items:
            self._writes.append(Write(items, future))
            self.waiting_items += len(items)
            self._schedule()
        else:
            future.set_result([])
        return future

    def control(self, plan: Plan, *, needs_room: bool = False) -> "asyncio.Future[None]":
        """Resolved when what `plan` says is durable and applied; raises what it raises.

        Args:
            plan: called once, or twice when the disk is full.
            needs_room: it must not use the reserve.
        """
        future: asyncio.Future[None] = self._running_loop().create_future()
        if self.broken_by is not None:
            future.set_exception(self._broken())
            return future
        self._controls.append(Control(plan, future, needs_room))
        self._schedule()
        return future

    async def drain(self) -> None:
        """Returns when all that was asked for is answered."""
        while self._flight is not None or self._writes or self._controls:
            self._idle = self._idle or asyncio.Event()
            self._idle.clear()
            await self._idle.wait()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _schedule(self) -> None:
        if not self._scheduled and self._flight is None:
            self._scheduled = True
            self._running_loop().call_soon(self._begin)

    # -- planning

    def _begin(self) -> None:
        self._scheduled = False
        if self._flight is not None:
            return
        log = self._log
        new = log.head < 0 or log.begin_anew or log.sizes[log.head] >= self._segment_bytes
        flight = Flight(log.head + 1 if new else log.head)
        offset = FILE_HEADER_SIZE if new else log.sizes[log.head]
        if offset == FILE_HEADER_SIZE:
            flight.frames.append(
                seal_frame(self._state.next_ticket, START, 0, encode_record(self._state.start_record()))
            )
            flight.size = len(flight.frames[0])
        ahead = len(flight.frames)
        try:
            self._plan_control(flight, offset)
            if flight.control is None or not flight.control.retried:
                self._plan_items(flight, offset)
        except Exception as error:  # a defect: its callers must not wait for ever
            logger.exception("a batch could not be planned")
            self._refuse(flight, RollstreamError(f"a batch could not be planned: {error!r}"))
            self._after()
            return
        if len(flight.frames) == ahead:
            self._answer(flight)
            self._after()
            return
        self._flight = flight
        notes = encode_drops(flight.event_ticket, flight.event.dropped) if flight.event is not None else b""
        needs_room = bool(flight.items) or (flight.control is not None and flight.control.needs_room)
        reserve = self._state.reading_bytes()
        self._log.append(Batch(flight.frames, new, needs_room, reserve, notes), self._written)

    def _plan_control(self, flight: Flight, offset: int) -> None:
        while self._controls and flight.control is None:
            control = self._controls.popleft()
            if control.future.cancelled():
                continue
            try:
                planned = control.plan()
            except Exception as error:
                control.future.set_exception(error)
                continue
            flight.control = control
            if isinstance(planned, Event):
                self._state.complete(planned)
                flight.event = planned
                flight.event_ticket = self._state.next_ticket
                self._add(flight, seal_frame(flight.event_ticket, EVENT, 0, encode_record(planned)))
            elif planned is not None:
                for frame, raw in planned.frames:
                    flight.copies.append((frame, place(flight.segment, offset + flight.size)))
                    self._add(flight, raw)

    @staticmethod
    def _add(flight: Flight, frame: bytes) -> None:
        flight.frames.append(frame)
        flight.size += len(frame)

    def _plan_items(self, flight: Flight, offset: int) -> None:
        state = self._state
        ticket = max(state.next_ticket, flight.event_ticket + 1)
        next_group = state.next_group
        event = flight.event or _NOTHING
        opened = self._opened_by(event)
        sizes = {task_type: size for task_type, size, _ in event.tasks}
        counts: dict[tuple[str | None, InstanceId], int] = {
            (rollout, instance): count for rollout, instance, count in event.counts
        }
        counted = event.active_rollout or state.active_rollout
        active = state.rollout_and_task(event)
        known, uids = state.uids, set[int]()
        planned, frames = flight.items, flight.frames
        begin, size, most = place(flight.segment, offset), flight.size, flight.size + _BATCH_BYTES
        written_at = flight.written_at = time.time()
        default = event.active or state.active or DEFAULT_TASK
        while self._writes:
            write = self._writes[0]
            if not flight.writes or flight.writes[-1] is not write:
                flight.writes.append(write)
            items = write.items
            while write.planned < len(items):
                if len(planned) >= _BATCH_ITEMS or size >= most:
                    flight.size = size
                    return
                item = items[write.planned]
                write.planned += 1
                uid = hash_uid(item.uid)
                if uid in known or uid in uids:
                    write.results.append(False)
                    continue
                task_type = item.task_type or default
                rollout_id = item.rollout_id
                if rollout_id is None and task_type == active[1]:
                    rollout_id = active[0]
                key = (task_type, rollout_id, item.instance_id)
                group = opened.get(key)
                if group is None:
                    stored = None if key in opened else state.open.get(key)
                    if stored is None:
                        group_size = sizes.get(task_type) or state.task(task_type).group_size
                        group = OpenGroup(next_group, 0, group_size)
                        next_group += 1
                        self._warn_of_twins(key)
                    else:
                        group = OpenGroup(stored.number, len(stored), stored.size)
                    opened[key] = group
                finished = 0
                if group.count + 1 >= group.size:
                    finished = 1
                    if rollout_id is not None and rollout_id == counted:
                        finished += counts.get(key[1:]) or state.count(key)
                try:
                    frame = encode_item(
                        item,
                        ticket=ticket,
                        group=group.number,
                        position=group.count,
                        uid=uid,
                        group_size=group.size,
                        finished=finished,
                        task_type=task_type,
                        rollout_id=rollout_id,
                        written_at=written_at,
                    )
                except Exception as error:  # a defect: it must not be the other writers'
                    logger.exception("item %r can't be written", item.uid)
                    write.error = RollstreamError(f"item {item.uid!r:.100} can't be written: {error!r}")
                    write.planned = len(items)
                    break
                uids.add(uid)
                group.count += 1
                if finished:
                    counts[key[1:]] = finished
                    opened[key] = None
                length = len(frame)
                planned.append(
                    NewItem(item, uid, group.number, key, group.size, finished, ticket, begin + size, length)
                )
                frames.append(frame)
                size += length
                write.results.append(True)
                ticket += 1
            self._writes.popleft()
        flight.size = size

    def _opened_by(self, event: Event) -> dict[Key, OpenGroup | None]:
        """Instances whose next item opens a group because of what the event, in the same batch, closes."""
        state = self._state
        closed = [number for fact in event.leases for number in fact.groups]
        closed += event.gone
        closed += [number for number, _ in event.quarantined]
        groups = [group for number in closed if (group := state.groups.get(number)) is not None]
        opened: dict[Key, OpenGroup | None] = {
            group.key: None for group in groups if state.open.get(group.key) is group
        }
        for task_type, size, _ in event.tasks:
            for key, group in state.open.items():
                if key[0] == task_type and group.size != size and state.follows_task(key):
                    opened[key] = None if len(group) >= size else OpenGroup(group.number, len(group), size)
        return opened

    def _warn_of_twins(self, key: Key) -> None:
        if self._warned:
            return
        task_type, _, instance_id = key
        text = (task_type, str(instance_id))
        kind = type(instance_id)
        if self._ids.setdefault(text, kind) is not kind:
            self._warned = True
            self._ids.clear()
            logger.warning(
                "task %r has the instances %r and %r: a number and a text are two different instances, with "
                "a group each. Said once.",
                task_type,
                instance_id,
                str(instance_id) if kind is int else int(instance_id),
            )
        elif len(self._ids) > _SEEN_IDS:
            del self._ids[next(iter(self._ids))]

    # -- the writer thread's answer

    def _written(self, error: StorageError | None) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._landed, error)
        except RuntimeError:
            logger.debug("the event loop is closed; nobody waits for this batch any more")

    def _landed(self, error: StorageError | None) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        if error is None:
            if flight.items or (flight.control is not None and flight.control.needs_room):
                self.full = False  # else it may have been written on the reserve
            self._flight = flight
            self._take_over(flight, lambda: self._apply(flight))
            return
        full = isinstance(error, StorageFullError)
        self.full = self.full or full
        control = flight.control
        if full and control is not None and not control.retried and not control.needs_room:
            control.retried = True
            flight.control = None
            self._controls.appendleft(control)
        self._refuse(flight, error)
        self._after()

    def _take_over(self, flight: Flight, step: Callable[[], object]) -> None:
        """Applies a part of what is durable. Until all is, no batch is planned and nobody is answered."""
        assert self._loop is not None
        try:
            step()
            more = next(flight.rest, None)
        except Exception as defect:
            self._flight = None
            self._break(flight, defect)
            return
        if more is not None:
            self._loop.call_soon(self._take_over, flight, more)
        else:
            self._flight = None
            self._finish(flight)

    def _in_parts(self, event: Event) -> Iterator[Callable[[], None]]:
        for at in range(0, len(event.gone), _BATCH_ITEMS):
            yield partial(self._remove, event.gone[at : at + _BATCH_ITEMS])
        if event.buried is not None:
            first, packed = event.buried
            uids = hashes(packed)
            for at in range(0, len(uids), _BURIED_AT_ONCE):
                yield partial(self._state.uids.bury, first + at, uids[at : at + _BURIED_AT_ONCE])

    def _remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._state.remove(number)

    def _finish(self, flight: Flight) -> None:
        self._answer(flight)
        self._changed(flight.event is not None or bool(flight.copies))
        self._after()

    def _break(self, flight: Flight, defect: BaseException) -> None:
        """What is durable could not be taken over: memory is wrong until the log is read anew."""
        logger.critical("the buffer stops: what it wrote could not be applied", exc_info=defect)
        self.broken_by = defect
        self._refuse(flight, self._broken())
        while self._writes or self._controls:
            rest = Flight(flight.segment)
            rest.control = self._controls.popleft() if self._controls else None
            rest.writes = list(self._writes)
            self._refuse(rest, self._broken())
            self._writes.clear()
        self._after()

    def _broken(self) -> RollstreamError:
        return RollstreamError(
            f"the buffer has stopped, its state is not what its log says: {self.broken_by!r}. What was "
            "acknowledged is safe: start it again."
        )

    def _apply(self, flight: Flight) -> None:
        state, now = self._state, self._clock()
        if flight.event is not None:
            later = len(flight.event.gone) > _BATCH_ITEMS
            if later:
                flight.rest = self._in_parts(flight.event)
            state.apply(
                flight.event, ticket=flight.event_ticket, segment=flight.segment, now=now, later=later
            )
        for frame, where in flight.copies:
            state.move_frame(frame.body, frame.rows, frame.where, where)
        if flight.items:
            state.add_items(flight.items, written_at=flight.written_at, now=now)

    def _answer(self, flight: Flight) -> None:
        if flight.control is not None and not flight.control.future.done():
            flight.control.future.set_result(None)
        for write in flight.writes:
            if write.planned == len(write.items):
                self.waiting_items -= len(write.items)
                if write.future.done():
                    continue
                if write.error is None:
                    write.future.set_result(write.results)
                else:
                    write.future.set_exception(write.error)

    def _refuse(self, flight: Flight, error: RollstreamError) -> None:
        if flight.control is not None and not flight.control.future.done():
            flight.control.future.set_exception(error)
        for write in flight.writes:
            if self._writes and self._writes[0] is write:
                self._writes.popleft()
            self.waiting_items -= len(write.items)
            if not write.future.done():
                write.future.set_exception(error)

    def _after(self) -> None:
        if self._writes or self._controls:
            self._schedule()
        elif self._idle is not None:
            self._idle.set()
