"""The buffer's own API: batches, exact tokens as binary, reads with a lease, policy versions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec

from rollstream.buffer.bodies import MSGPACK_TYPES, read_object, read_typed
from rollstream.buffer.delivery import Delivery
from rollstream.buffer.exchange import Exchange, GoneError, RefusalError
from rollstream.buffer.generators import Rollouts
from rollstream.buffer.items import MAX_TEXT_ID, Encoding, parse_items
from rollstream.buffer.lease_renewal import renewed
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.metrics import RequestMetrics
from rollstream.buffer.read_forms import Form, form_for
from rollstream.buffer.reader_notices import notices, reasons, start_warnings
from rollstream.buffer.reads import Part, Taken, Wanted
from rollstream.buffer.rollout_record import RolloutRecord
from rollstream.buffer.routing import Router
from rollstream.buffer.waiting_reads import WaitingReads
from rollstream.errors import ConflictError

MAX_WAIT_S = 3600.0
"""A reader waits this long at most, then asks again."""

MAX_LEASE_S = 30 * 86400.0
"""The longest lease: a trainer that acks with its checkpoints makes them at least once a month."""

MAX_KNOWN = 10_000
"""uids asked for at once."""

_PARSED_AT_ONCE = 2**20
"""Bytes of a body; some milliseconds, for which everybody else waits."""

MOST_GROUPS = 1024
"""On one lease, unless a reader wants exactly so many: a nack of it holds others up for some milliseconds."""

READ_ID = "^[A-Za-z0-9_-]{8,64}$"
"""What a reader may call a read: as JSON Schema has it."""

_JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""The last is what `curl -d` says of whatever it sends."""

TextId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT_ID)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
ReadId = Annotated[str, msgspec.Meta(pattern=READ_ID.replace("$", r"\Z"))]
LeaseSeconds = Annotated[float, msgspec.Meta(ge=0.1, le=MAX_LEASE_S)]


class ReadBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of `POST /v1/read`."""

    max_groups: Count | None = None
    batch_size: Count | None = None
    timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0
    task_type: TextId | None = None
    rollout_id: TextId | None = None
    consumer: Name | None = None
    read_id: ReadId | None = None
    lease_seconds: LeaseSeconds | None = None
    policy_version: Version | None = None
    max_staleness: Version | None = None


class ExtendBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of `POST /v1/leases/{lease}/extend`."""

    seconds: LeaseSeconds


class KnownBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of `POST /v1/uids/known`."""

    uids: Annotated[list[str], msgspec.Meta(max_length=MAX_KNOWN)]


class QuarantineBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of `POST /v1/quarantine/retry` and `/drop`; without `groups`, all of them."""

    groups: Annotated[list[Version], msgspec.Meta(max_length=MAX_KNOWN)] | None = None


class NativeRoutes:
    """The routes below `/v1`.

    Args:
        ledger: what is kept.
        delivery: its reads.
        rollouts: its generators.
        metrics: counted here.
        waiting: readers that wait.
        max_groups_per_read: of a read that does not say how much it wants; None: all there are.
        lease_seconds: of a lease, if the reader does not say.
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
        lease_seconds: float,
    ) -> None:
        self._ledger = ledger
        self._delivery = delivery
        self._rollouts = rollouts
        self._metrics = metrics
        self._max_groups = max_groups_per_read
        self._lease_seconds = lease_seconds
        self._waiting = waiting
        self._parsing = asyncio.Lock()
        self._attempts: dict[str, tuple[Exchange, asyncio.Event]] = {}
        """Reads that are being handled, by their names; set when one is over."""

    def add_to(self, router: Router) -> None:
        """Adds the routes."""
        router.add("POST", "/v1/items", self.write)
        router.add("POST", "/v1/uids/known", self.known)
        router.add("POST", "/v1/read", self.read)
        router.add("GET", "/v1/leases", self.leases)
        router.add("POST", "/v1/leases/{lease}/ack", self.ack)
        router.add("POST", "/v1/leases/{lease}/nack", self.nack)
        router.add("POST", "/v1/leases/{lease}/extend", self.extend)
        router.add("POST", "/v1/consumers/{consumer}/release", self.release)
        router.add("POST", "/v1/rollouts", self.start_rollout)
        router.add("GET", "/v1/rollouts", self.list_rollouts)
        router.add("GET", "/v1/rollouts/{rollout}", self.one_rollout)
        router.add("POST", "/v1/rollouts/{rollout}/stop", self.stop_rollout)
        router.add("POST", "/v1/rollouts/{rollout}/drop", self.drop_rollout)
        router.add("GET", "/v1/dropped", self.dropped)
        router.add("GET", "/v1/quarantine", self.quarantine)
        router.add("POST", "/v1/quarantine/retry", self.retry)
        router.add("POST", "/v1/quarantine/drop", self.drop_quarantined)
        router.add("GET", "/v1/stats", self.stats)

    # -- writing

    async def write(self, exchange: Exchange) -> None:
        """One item or a batch; all or nothing, durable when answered."""
        started = time.perf_counter()
        kind = exchange.media_type()
        if kind not in (*_JSON_TYPES, *MSGPACK_TYPES):
            raise RefusalError(
                f"content-type {kind} is not understood: application/json or application/msgpack",
                status=415,
                code="unsupported_media_type",
            )
        body = await exchange.body()
        encoding: Encoding = "msgpack" if kind in MSGPACK_TYPES else "json"
        if len(body) <= _PARSED_AT_ONCE:
            items = parse_items(body, encoding)
        else:
            # In a thread, for others to have a turn; one at a time: parsed, a body is many times as large.
            async with self._parsing:
                items = await asyncio.to_thread(parse_items, body, encoding)
        most = self._ledger.settings.max_buffer_size
        if len(items) > most:
            raise RefusalError(
                f"{len(items)} items at once never fit: the buffer holds {most} (--max-buffer-size)",
                status=413,
                code="too_large",
            )
        stored = await self._ledger.write(items)
        self._metrics.known.count(items, stored, self._ledger.active_rollout)
        count = sum(stored)
        await exchange.reply_json(
            {
                "stored": count,
                "known": len(stored) - count,
                "results": ["stored" if one else "known" for one in stored],
            }
        )
        self._metrics.bytes_in += len(body)
        self._metrics.writes.add(time.perf_counter() - started)

    async def known(self, exchange: Exchange) -> None:
        """Which uids the buffer remembers."""
        given = await read_typed(exchange, KnownBody)
        await exchange.reply_json({"known": list(self._ledger.knows(given.uids))})

    # -- reading

    async def read(self, exchange: Exchange) -> None:
        """Groups on a lease; waits for them as long as the reader says."""
        started = time.perf_counter()
        given = await read_typed(exchange, ReadBody)
        form = form_for(exchange)
        wanted = self._wanted(given)
        async with self._only_attempt(given.read_id, exchange):
            await self._read(exchange, given, form, wanted, started)

    @contextlib.asynccontextmanager
    async def _only_attempt(self, read_id: str | None, exchange: Exchange) -> AsyncIterator[None]:
        """Ends an earlier attempt at this read, whose answer was lost, and gives back what it took."""
        if read_id is None:
            yield
            return
        earlier, ended = self._attempts.get(read_id), asyncio.Event()
        self._attempts[read_id] = exchange, ended
        try:
            if earlier is not None:
                earlier[0].cut_off()
                await earlier[1].wait()
            await self._ledger.return_read(read_id)
            yield
        finally:
            if self._attempts[read_id][1] is ended:
                del self._attempts[read_id]
            ended.set()

    async def _read(
        self, exchange: Exchange, given: ReadBody, form: Form, wanted: Wanted, started: float
    ) -> None:
        taken, _ = await self._waiting.take(exchange, lambda: wanted, given.timeout)
        leases = [taken.lease.lease_id] if taken.lease is not None and taken.groups else []
        try:
            async with (
                renewed(self._ledger, leases, wanted.lease_seconds, exchange),
                aclosing(self._delivery.stream(taken, form)) as stream,
            ):
                # Some are finished before the head is written: it says whether there are any.
                first = await anext(stream, None)
                scope = wanted.task_type, wanted.rollouts
                head: dict[str, Any] = {
                    "lease": leases[0] if first else None,
                    "lease_seconds": wanted.lease_seconds,
                    "groups": len(taken.groups),
                    "failures": [] if first else reasons(self._ledger, self._rollouts, *scope),
                    "notices": [] if first else notices(self._ledger, self._rollouts, taken, *scope),
                }
                await self._reply(exchange, form, head, taken, first, stream)
        except BaseException:
            if leases and self._ledger.has_lease(leases[0]):
                await asyncio.shield(self._ledger.nack(leases[0]))
            raise
        if first:
            self._metrics.reads.add(time.perf_counter() - started)
        else:
            self._metrics.empty_reads += 1

    def _wanted(self, given: ReadBody) -> Wanted:
        if given.max_groups is not None and given.batch_size is not None:
            raise RefusalError("max_groups and batch_size say the same: give one of them")
        if (given.max_staleness is None) != (given.policy_version is None):
            raise RefusalError("policy_version and max_staleness belong together: give both, or none")
        groups = min(given.max_groups or self._max_groups or MOST_GROUPS, MOST_GROUPS)
        size = None
        if given.batch_size is not None:
            size = self._group_size(given)
            groups = given.batch_size // size
            if groups == 0:
                raise RefusalError(
                    f"batch_size: {given.batch_size} is less than a group, which has {size} items"
                )
        return Wanted(
            consumer=given.consumer,
            read_id=given.read_id,
            lease_seconds=given.lease_seconds or self._lease_seconds,
            max_groups=groups,
            all_or_nothing=given.batch_size is not None,
            group_size=size,
            task_type=given.task_type,
            rollouts=None if given.rollout_id is None else (given.rollout_id,),
            policy_version=given.policy_version,
            max_staleness=given.max_staleness,
        )

    def _group_size(self, given: ReadBody) -> int:
        """Of the rollout that was asked for, or else of the task now."""
        size = self._delivery.settings(given.task_type or self._ledger.task_type).group_size
        for record in self._rollouts.records():
            if record.rollout_id == given.rollout_id:
                return record.group_size(size)
        return size

    async def _reply(
        self,
        exchange: Exchange,
        form: Form,
        head: dict[str, Any],
        taken: Taken,
        first: Part | None,
        rest: AsyncIterator[Part],
    ) -> None:
        headers = {} if head["lease"] is None else {"rollstream-lease": head["lease"]}
        await exchange.begin(200, form.media_type, headers)
        await exchange.send(form.head(head))
        items = groups = 0
        part = first
        while part is not None:
            await exchange.send(part.body)
            self._metrics.bytes_out += len(part.body)
            groups += part.groups
            items += part.items
            part = await anext(rest, None)
        end = {
            "end": True,
            "groups": groups,
            "items": items,
            "meta_info": await self._delivery.meta_info(taken),
        }
        await exchange.send(form.end(end))
        if head["lease"] is not None and not await exchange.taken():
            raise GoneError
        await exchange.end()

    # -- leases

    async def leases(self, exchange: Exchange) -> None:
        """What is handed out and not acked."""
        consumer = exchange.query().get("consumer")
        out = self._ledger.leases(consumer)
        await exchange.reply_json({"leases": [_named(_plain(lease)) for lease in out]})

    async def ack(self, exchange: Exchange) -> None:
        """The groups are the reader's; they leave the buffer."""
        result = await self._ledger.ack(exchange.params["lease"])
        await exchange.reply_json({"lease": exchange.params["lease"], **_plain(result)})

    async def nack(self, exchange: Exchange) -> None:
        """The groups go back, first in line."""
        await self._ledger.nack(exchange.params["lease"])
        await exchange.reply_json({"lease": exchange.params["lease"], "returned": True})

    async def extend(self, exchange: Exchange) -> None:
        """The lease ends this much from now."""
        given = await read_typed(exchange, ExtendBody)
        await self._ledger.extend(exchange.params["lease"], given.seconds)
        await exchange.reply_json({"lease": exchange.params["lease"], "lease_seconds": given.seconds})

    async def release(self, exchange: Exchange) -> None:
        """All leases of a consumer are given back: what a trainer does after its own crash."""
        returned = await self._ledger.release(exchange.params["consumer"])
        await exchange.reply_json({"consumer": exchange.params["consumer"], "groups": returned})

    # -- rollouts

    async def start_rollout(self, exchange: Exchange) -> None:
        """Starts a rollout, or finds it running."""
        payload = await read_object(exchange)
        record = await self._rollouts.start(payload)
        await exchange.reply_json({**record.to_dict(), "warnings": start_warnings(record, payload)})

    async def list_rollouts(self, exchange: Exchange) -> None:
        """All rollouts, oldest first."""
        await exchange.reply_json({"rollouts": [one.to_dict() for one in self._rollouts.records()]})

    async def one_rollout(self, exchange: Exchange) -> None:
        """One rollout."""
        await exchange.reply_json(self._rollout(exchange).to_dict())

    async def stop_rollout(self, exchange: Exchange) -> None:
        """Ends a rollout's generator; what it wrote stays."""
        self._rollout(exchange)
        record = await self._rollouts.stop(exchange.params["rollout"])
        await exchange.reply_json(record.to_dict())

    async def drop_rollout(self, exchange: Exchange) -> None:
        """Drops what a rollout wrote and nobody has read: of one that another has replaced, say."""
        rollout_id = exchange.params["rollout"]
        running = self._rollouts.running
        if running is not None and running.rollout_id == rollout_id and running.state == "running":
            raise ConflictError(f"rollout {rollout_id} runs: POST /v1/rollouts/{rollout_id}/stop first")
        if not self._ledger.has_groups(rollout_id):  # also one that was never started here
            self._rollout(exchange)
        groups = await self._ledger.drop_rollout(rollout_id, "replaced")
        await exchange.reply_json({"rollout_id": rollout_id, "groups": groups})

    def _rollout(self, exchange: Exchange) -> RolloutRecord:
        wanted = exchange.params["rollout"]
        for record in self._rollouts.records():
            if record.rollout_id == wanted:
                return record
        raise RefusalError(f"there is no rollout {wanted!r}", status=404, code="not_found")

    # -- what became of items

    async def dropped(self, exchange: Exchange) -> None:
        """Items that left undelivered, newest last."""
        query = exchange.query()
        limit, after = _number(query, "limit", 1000, least=1, most=10_000), _number(query, "after", 0)
        await exchange.reply_json({"dropped": [_plain(one) for one in self._ledger.dropped(limit, after)]})

    async def quarantine(self, exchange: Exchange) -> None:
        """Groups that a hook could not finish, with its traceback."""
        aside = self._ledger.quarantined()
        await exchange.reply_json({"quarantined": [_named(_plain(one)) for one in aside]})

    async def retry(self, exchange: Exchange) -> None:
        """Quarantined groups are ready to be read again, by the hooks as their files are now."""
        given = await read_typed(exchange, QuarantineBody)
        await self._rollouts.refresh_files()
        unknown = self._unknown(given)
        groups = await self._ledger.retry_quarantined(given.groups)
        await exchange.reply_json({"groups": groups, "unknown": unknown})

    async def drop_quarantined(self, exchange: Exchange) -> None:
        """Quarantined groups are dropped."""
        given = await read_typed(exchange, QuarantineBody)
        unknown = self._unknown(given)
        groups = await self._ledger.drop_quarantined(given.groups)
        await exchange.reply_json({"groups": groups, "unknown": unknown})

    def _unknown(self, given: QuarantineBody) -> list[int]:
        """Numbers that are not in quarantine."""
        known = {one.group.number for one in self._ledger.quarantined()} if given.groups else set()
        return [number for number in given.groups or () if number not in known]

    async def stats(self, exchange: Exchange) -> None:
        """Counts, and what keeps generators from going on."""
        running = self._rollouts.running
        await exchange.reply_json(
            {
                **_plain(self._ledger.stats()),
                "items_known": self._metrics.known.items,
                "task_type": self._ledger.task_type,
                "rollout": None if running is None else running.to_dict(),
                "failures": reasons(self._ledger, self._rollouts, None, None),
                "held_writes": self._metrics.held_writes,
                "waiting_reads": self._metrics.waiting_reads,
            }
        )


def _plain(value: Any) -> dict[str, Any]:
    """A record of the ledger as JSON has it."""
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def _named(value: Any) -> Any:
    """With the names that reads and requests have for a lease and a group's number, too."""
    if isinstance(value, list):
        return [_named(one) for one in value]
    if not isinstance(value, dict):
        return value
    named = {key: _named(one) for key, one in value.items()}
    for name, other in (("lease", "lease_id"), ("group", "number")):
        if other in named:
            named.setdefault(name, named[other])
    return named


def _number(query: dict[str, str], name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and least <= int(text) <= most):
        raise RefusalError(f"{name}: {text!r:.100}, want a whole number from {least} to {most}")
    return int(text)
