"""slime's wire, both of its generations, answered as slime's own server answers.

Source: slime_plugins/rollout_buffer of THUDM/slime: `buffer.py` and its client `rollout_buffer_example.py` of
today, and their earlier form, which had `/buffer/read`, `/buffer/peek`, `/buffer/stats` and `batch_size`.

Differences are on purpose: a write is answered when it is durable; a read's groups go back when its client
goes away before it has them all; bad input is a 4xx.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from rollstream.buffer.bodies import read_object
from rollstream.buffer.delivery import Delivery
from rollstream.buffer.exchange import JSON, Exchange, GoneError, RefusalError
from rollstream.buffer.generators import Rollouts
from rollstream.buffer.items import InstanceId, dump_item, parse_item
from rollstream.buffer.lease_renewal import renewed
from rollstream.buffer.ledger import GroupView, Ledger
from rollstream.buffer.metrics import RequestMetrics
from rollstream.buffer.read_forms import Rows
from rollstream.buffer.reader_notices import notices, reasons, start_warnings
from rollstream.buffer.reads import Taken, Wanted
from rollstream.buffer.routing import Router
from rollstream.buffer.waiting_reads import WaitingReads, closing_refusal
from rollstream.errors import BufferFullError

WRITTEN = (
    b'{"success":true,"message":"Data has been successfully written to buffer","data":{"data":[',
    b'],"meta_info":"write to buffer"}}',
)

_HOLD_S = 1.0
"""A write without room looks this often whether its client is still there."""

_MAX_WAIT_S = 3600.0
"""A reader may ask to wait this long; the earlier server's reads waited 10 minutes."""

_WHOLE = re.compile(r"-?[0-9]+")

_PEEK = 64
"""Groups of a peek: each of them is loaded."""

_PART_GROUPS = 256
"""A read of more takes a lease for each of so many: what is decided in one go holds up writes."""

CONSUMER = "slime"
"""Whose leases these reads are, while they are being answered."""


class SlimeRoutes:
    """The routes.

    Args:
        ledger: what is kept.
        delivery: its reads.
        rollouts: its generators.
        metrics: counted here.
        waiting: readers that wait.
        max_groups_per_read: of a read that does not say how much it wants; None: all there are.
        whole_reads: such a read gives that many groups or none.
        lease_seconds: how long an answer may take to be sent.
        closing: whether the server ends; who waits is sent away.
    """

    def __init__(
        self,
        ledger: Ledger,
        delivery: Delivery,
        rollouts: Rollouts,
        metrics: RequestMetrics,
        waiting: WaitingReads,
        *,
        max_groups_per_read: int | None,
        whole_reads: bool,
        lease_seconds: float,
        max_buffer_size: int,
        closing: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._delivery = delivery
        self._rollouts = rollouts
        self._metrics = metrics
        self._max_groups = max_groups_per_read
        self._whole = whole_reads
        self._lease_seconds = lease_seconds
        self._max_size = max_buffer_size
        self._closing = closing
        self._waiting = waiting

    def add_to(self, router: Router) -> None:
        """Adds the routes; `write` is also given to the application as its hot path."""
        router.add("POST", "/buffer/write", self.write)
        router.add("POST", "/start_rollout", self.start_rollout)
        router.add("POST", "/get_rollout_data", self.get_rollout_data)
        router.add("POST", "/buffer/read", self.read)
        router.add("GET", "/buffer/peek", self.peek)
        router.add("GET", "/buffer/stats", self.stats)
        router.add("GET", "/", self.root)

    async def write(self, exchange: Exchange) -> None:
        """One item; answered when it is durable."""
        started = time.perf_counter()
        body = await exchange.body()
        item = parse_item(body)
        try:
            stored = await self._ledger.write((item,))
        except BufferFullError:
            stored = await self._write_when_there_is_room(exchange, item)
        self._metrics.known.count((item,), stored, self._ledger.active_rollout)
        before, after = WRITTEN
        await exchange.reply(before + item.payload + after)
        self._metrics.bytes_in += len(body)
        self._metrics.writes.add(time.perf_counter() - started)

    async def _write_when_there_is_room(self, exchange: Exchange, item: Any) -> list[bool]:
        # A stock generator loses an item that it is told to bring again later. It is held: a slow 200.
        self._metrics.held_writes += 1
        try:
            while True:
                if exchange.lost:
                    raise GoneError
                if self._closing():
                    raise closing_refusal()
                await self._ledger.wait_for_room(_HOLD_S)
                try:
                    return await self._ledger.write((item,))
                except BufferFullError:
                    continue
        finally:
            self._metrics.held_writes -= 1

    async def start_rollout(self, exchange: Exchange) -> None:
        """Starts a rollout, or finds it running."""
        payload = await read_object(exchange)
        record = await self._rollouts.start(payload)
        await self._ledger.begin_cycle()
        # The words are slime's, also where nothing had to be started: `state` says so.
        answer: dict[str, Any] = {
            "message": "Rollout started",
            "rollout_id": record.rollout_id,
            "state": record.state,
        }
        if warnings := start_warnings(record, payload):
            answer["warnings"] = warnings
        await exchange.reply_json(answer)

    async def get_rollout_data(self, exchange: Exchange) -> None:
        """All groups there are, or exactly as many as asked for; does not wait."""
        given = await read_object(exchange)
        batch_size = _batch_size(given, default=-1)
        wanted = self._wanted(batch_size)
        most = self._most(wanted)
        if not wanted.all_or_nothing:
            wanted = replace(wanted, max_groups=max(1, min(most, _PART_GROUPS)))
        taken = await self._delivery.take(wanted)
        if batch_size > 0 and not taken.groups:
            have = taken.available * self._group_size()
            text = f"Not enough data. Requested {batch_size} items but only {have} available."
            await self._reply_nothing(exchange, taken, text)
        elif not taken.groups:
            await self._reply_nothing(exchange, taken, "No data available to read")
        else:
            await self._reply_groups(exchange, taken, wanted, most)

    async def read(self, exchange: Exchange) -> None:
        """As much as asked for, or less; waits for the first group at most."""
        given = await read_object(exchange)
        batch_size = _batch_size(given, default=None)
        wait = given.get("wait", True)
        if type(wait) is not bool:
            raise RefusalError(f"wait: want true or false, not {wait!r:.100}")
        timeout = _seconds(given, "timeout") if wait else 0.0
        first = self._wanted(batch_size, exact=False)
        most = self._most(first)

        def wanted_now() -> Wanted:
            scope = self._wanted(batch_size, exact=False)  # another rollout may have begun
            groups = max(1, min(most, _PART_GROUPS))
            return replace(first, max_groups=groups, task_type=scope.task_type, rollouts=scope.rollouts)

        taken, wanted = await self._waiting.take(exchange, wanted_now, timeout)
        if taken.groups:
            await self._reply_groups(exchange, taken, wanted, most)
        elif wait:
            await self._reply_nothing(exchange, taken, "Timeout waiting, no data available to read")
        else:
            await self._reply_nothing(exchange, taken, "Successfully read 0 items", success=True)

    async def peek(self, exchange: Exchange) -> None:
        """Items of groups that are ready, as they were written; nothing is taken."""
        given = await read_object(exchange)
        if not given:
            given = dict(exchange.query())
        batch_size = _batch_size(given, default=1)
        wanted = max(1, batch_size)
        views: list[GroupView] = []
        task_type, rollouts = self._scope()
        for view in self._ledger.candidates(task_type=task_type, rollouts=rollouts, limit=_PEEK):
            if sum(one.size for one in views) >= wanted:
                break
            views.append(view)
        groups = await asyncio.to_thread(self._delivery.load, views)
        items = [item for group in groups.values() for item in group][:wanted]
        body = b",".join(dump_item(item, "json") for item in items)
        message = orjson.dumps(f"Successfully previewed {len(items)} items")
        await exchange.reply(
            b'{"success":true,"message":' + message + b',"data":{"data":[' + body + b'],"meta_info":{}}}'
        )

    async def stats(self, exchange: Exchange) -> None:
        """Counts."""
        stats = self._ledger.stats()
        await exchange.reply_json(
            {
                "success": True,
                "message": "Buffer stats retrieved successfully",
                "data": {
                    "data": [
                        {
                            "current_size": stats.items,
                            "max_size": self._max_size,
                            "total_written": stats.items_written,
                            "total_read": stats.items_delivered,
                        }
                    ],
                    "meta_info": {},
                },
            }
        )

    async def root(self, exchange: Exchange) -> None:
        """Says that the server is there."""
        await exchange.reply_json({"message": "Rollout Buffer Server is running"})

    def _group_size(self) -> int:
        return self._delivery.settings(self._ledger.task_type).group_size

    def _scope(self) -> tuple[str | None, tuple[str | None, ...] | None]:
        """Task and rollouts whose groups a trainer may get; None: any.

        slime's wire has no name for a rollout. So a trainer gets what the one that it started made, or what
        came in for its task from outside: never what is left of another one, with other prompts, or groups of
        another size.
        """
        active = self._ledger.active_rollout
        return (None, None) if active is None else (self._ledger.task_type, (active, None))

    def _most(self, wanted: Wanted) -> int:
        return wanted.max_groups or self._ledger.ready_groups

    def _wanted(self, batch_size: int, *, exact: bool = True) -> Wanted:
        # A stock trainer takes all that a read gives into its cycle, even what is too much for it.
        groups = min((most for most in (self._max_groups, self._ledger.left_in_cycle) if most), default=None)
        if batch_size > 0:
            size = self._group_size()
            groups = batch_size // size
            if groups == 0:
                raise RefusalError(f"batch_size: {batch_size} is less than a group, which has {size} items")
        task_type, rollouts = self._scope()
        return Wanted(
            consumer=CONSUMER,
            lease_seconds=self._lease_seconds,
            max_groups=groups,
            task_type=task_type,
            rollouts=rollouts,
            all_or_nothing=exact and (batch_size > 0 or self._whole),
        )

    async def _reply_nothing(
        self, exchange: Exchange, taken: Taken, message: str, *, success: bool = False
    ) -> None:
        task_type, rollouts = self._scope()
        causes = [str(one["message"]) for one in reasons(self._ledger, self._rollouts, task_type, rollouts)]
        causes += notices(self._ledger, self._rollouts, taken, task_type, rollouts)
        if causes:
            message = f"{message} ({'; '.join(causes)})"
        self._metrics.empty_reads += 1
        # What was dropped is told by the next read that gives something: clients look at no other.
        meta = await self._delivery.meta_info(Taken())
        await exchange.reply_json(
            {"success": success, "message": message, "data": {"data": [], "meta_info": meta}}
        )

    async def _reply_groups(self, exchange: Exchange, taken: Taken, wanted: Wanted, most: int) -> None:
        """Sends the groups. They are gone when the client's machine has them all; else they go back.

        Args:
            exchange: to be answered.
            taken: the first part of them, not empty.
            wanted: how it was taken; further parts are taken the same way.
            most: groups in all. For one that its hooks spoil, another is taken.
        """
        started = time.perf_counter()
        leases: list[str] = []
        held: list[str] = []
        total = Taken()
        try:
            async with renewed(self._ledger, leases, self._lease_seconds, exchange):
                success = await self._send_groups(exchange, taken, wanted, most, leases, held, total)
                if not await exchange.taken():
                    raise GoneError
                for lease in held if success else ():
                    # Raises if the reader was so slow that somebody else has them.
                    await self._ledger.extend(lease, self._lease_seconds)
            if success:
                await self._ledger.ack_all(held)  # together: the answer is one, and ends behind them all
                leases.clear()
        except BaseException:
            await asyncio.shield(self._give_back(leases))
            raise
        if success:
            self._delivery.unread.forget(total.dropped)
            self._metrics.reads.add(time.perf_counter() - started)
        else:
            self._metrics.empty_reads += 1
            await self._give_back(leases)
        await exchange.end()  # after the ack: an answer that is whole will not be given again

    async def _send_groups(
        self,
        exchange: Exchange,
        taken: Taken,
        wanted: Wanted,
        most: int,
        leases: list[str],
        held: list[str],
        total: Taken,
    ) -> bool:
        """Sends everything but the end. Returns what the answer says of success.

        Notes all leases in `leases`, those that still have groups in `held`, and the groups in `total`.
        """
        await exchange.begin(200, JSON)
        await exchange.send(b'{"data":{"data":[')
        groups = items = 0
        had: set[InstanceId] = set()
        while taken.lease is not None and taken.groups:
            leases.append(taken.lease.lease_id)
            async for part in self._delivery.stream(taken, Rows(), first=groups == 0):
                await exchange.send(part.body)
                self._metrics.bytes_out += len(part.body)
                groups += part.groups
                items += part.items
            total.groups += taken.groups
            if taken.groups:
                held.append(leases[-1])
            if groups >= most:
                break
            had.update(view.instance_id for view in taken.groups)
            rest = replace(
                wanted, max_groups=min(most - groups, _PART_GROUPS), without=had, all_or_nothing=False
            )
            taken = await self._delivery.take(rest)
        success = items > 0
        said = f"Successfully read {items} items"
        if not items:
            causes = reasons(self._ledger, self._rollouts, wanted.task_type, wanted.rollouts)
            said = "; ".join(["No data available to read", *(str(one["message"]) for one in causes)])
        if wanted.all_or_nothing and groups < most:
            success = False
            said = f"Not enough data. Hooks failed, and {groups} groups of {most} are left: they go back."
        if success:
            total.dropped = self._delivery.unread.of(wanted.task_type, wanted.rollouts)
        meta = await self._delivery.meta_info(total if success else Taken())
        end = {"success": success, "message": said}
        tail = b'],"meta_info":' + orjson.dumps(meta) + b"}," + orjson.dumps(end)[1:]
        await exchange.send(tail)
        return success

    async def _give_back(self, leases: list[str]) -> None:
        for lease in reversed(leases):  # what comes back last is first in line
            if self._ledger.has_lease(lease):
                await self._ledger.nack(lease)


def _batch_size(given: dict[str, Any], *, default: int | None) -> int:
    value = given.get("batch_size", default)
    if value is None and default is not None:
        return default
    if isinstance(value, str) and len(value) < 19 and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if type(value) is not int or (value < 1 and value != -1):
        said = "is missing" if value is None else f"is {value!r:.100}"
        raise RefusalError(f"batch_size {said}, want a whole number from 1 on, or -1 for all there is")
    return value


def _seconds(given: dict[str, Any], name: str) -> float:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_WAIT_S:
        said = "is missing" if value is None else f"is {value!r:.100}"
        raise RefusalError(f"{name} {said}, want seconds from 0 to {_MAX_WAIT_S:g}")
    return float(value)
