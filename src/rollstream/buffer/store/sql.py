"""The store's operations, written once for both databases.

What differs between SQLite and PostgreSQL is in their drivers: how a transaction is run, and a few words of
SQL. `$1` is an argument; `IN :ids($1)` and `IN :texts($1)` take a list of whole numbers or texts.

All changes go through one committer: while a transaction is under way, what is asked for gathers and goes
together into the next (group commit). Only one transaction at a time changes a database, also where several
servers share it: so nothing here has to think of another one. Operations check first and change then: one
that raises leaves nothing behind for the others of its transaction.

Most operations do the same three things: they read rows of groups, change them, and save them.
"""

import asyncio
import functools
import hashlib
import logging
import sys
import time
import uuid
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec
import orjson

from rollstream.buffer.groups import StoredItem, drop_reason, judge_rewards
from rollstream.buffer.items import InstanceId, Item, plain_item
from rollstream.buffer.store.base import (
    Acked,
    Change,
    Group,
    GroupState,
    JobRecord,
    Judged,
    Lease,
    Limits,
    Policy,
    Removal,
    Stats,
    Taken,
    Wanted,
    described,
)
from rollstream.errors import (
    BufferFullError,
    ConflictError,
    DamageError,
    NotFoundError,
    RollstreamError,
    RunDirectoryError,
    StorageError,
    StorageFullError,
)
from rollstream.integrations.slime.payload_rules import remainder

_LOG = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound=Group)

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS totals (id {key}, json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY, number BIGINT NOT NULL, record TEXT NOT NULL, server TEXT, claimed DOUBLE PRECISION);
CREATE TABLE IF NOT EXISTS groups (
  id {key}, task TEXT NOT NULL, job TEXT NOT NULL, instance_id TEXT NOT NULL, size BIGINT NOT NULL,
  n BIGINT NOT NULL, bytes BIGINT NOT NULL, rewards TEXT NOT NULL, failed BIGINT NOT NULL, version BIGINT,
  state TEXT NOT NULL, timed_out BIGINT NOT NULL, position BIGINT NOT NULL, updated DOUBLE PRECISION NOT NULL,
  reason TEXT, cause TEXT, "left" BIGINT, key TEXT NOT NULL, deadline DOUBLE PRECISION NOT NULL,
  judged BIGINT NOT NULL, lease TEXT, filtered BIGINT NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS groups_open ON groups (key) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS groups_due ON groups (deadline) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS groups_unjudged ON groups (task) WHERE state IN ('open', 'judging') AND judged < n;
CREATE INDEX IF NOT EXISTS groups_ready ON groups (position, job, task, size, version, n) WHERE state = 'ready';
CREATE INDEX IF NOT EXISTS groups_of_lease ON groups (lease) WHERE lease IS NOT NULL;
CREATE INDEX IF NOT EXISTS groups_quarantined ON groups (id) WHERE state = 'quarantined';
CREATE INDEX IF NOT EXISTS groups_dropped ON groups ("left") WHERE state = 'dropped';
CREATE INDEX IF NOT EXISTS groups_left ON groups ("left") WHERE "left" IS NOT NULL;
CREATE INDEX IF NOT EXISTS groups_of_job ON groups (job, "left");
CREATE TABLE IF NOT EXISTS items (
  grp BIGINT NOT NULL, seq BIGINT NOT NULL, uid TEXT NOT NULL UNIQUE, reward DOUBLE PRECISION,
  encoding TEXT NOT NULL, crc BIGINT NOT NULL, PRIMARY KEY (grp, seq)) {clustered};
CREATE TABLE IF NOT EXISTS bodies (seq {key}, body {blob} NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
  id TEXT PRIMARY KEY, consumer TEXT, read_id TEXT, seconds DOUBLE PRECISION NOT NULL,
  deadline DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, groups BIGINT NOT NULL, items BIGINT NOT NULL);
CREATE INDEX IF NOT EXISTS leases_due ON leases (state, deadline);
CREATE INDEX IF NOT EXISTS leases_of_read ON leases (read_id) WHERE state = 'out' AND read_id IS NOT NULL;
INSERT INTO totals (id, json) VALUES (1, '{{}}') ON CONFLICT (id) DO NOTHING
"""
"""A lease is out, acked, or back (nacked or expired). `key` of a group stands for its task, job and instance; its
lease is the newest that it was handed out with, over or not, until it leaves. Every index is paid for by each write."""

_SLICE: Final = 256
"""Groups that a sweep or a drop works off in one transaction: some milliseconds."""

_LOOKS: Final = 64
"""A read that passes over groups (of an instance that it has, too old ones) looks so often for more."""

_CAUSE_CHARS: Final = 8_000
"""Of a traceback, its end."""

_COMMIT_BYTES: Final = 3 * 2**20
"""A transaction with so many bytes takes no more items: while it is written, the next are received and checked."""

_TURNS: Final = 4
"""Of the event loop, before a transaction begins: who was just answered writes again, and is in it. To sync the
disk costs as much as ten small items."""

_GROUP_ROOM: Final = 128
"""Bytes of room that a read and an ack of a group take for their notes."""

_LEASES_KEPT_S: Final = 7 * 86_400.0
"""An ended lease is known so long: a trainer may ack again from an old checkpoint."""

_FULL: Final = "no room on the disk for items: what is left is for reads and acks; nothing of this was stored"

_JOBS_KEPT: Final = 100
"""Records of earlier jobs are kept so far back, and as long as groups of theirs are known."""


class Tx(Protocol):
    """A transaction, or a look at the database."""

    now: float
    """The store's clock, in seconds."""

    async def rows(self, sql: str, *arguments: Any) -> list[Any]:
        """Runs a statement; the rows that it gives."""
        ...

    async def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Runs a statement for each row of arguments."""
        ...

    async def add_bodies(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Keeps bodies by the numbers of their items: in the table `bodies`, or elsewhere if they are large."""
        ...

    async def other_bodies(self, rows: Sequence[int]) -> dict[int, bytes]:
        """The bodies of these items that are kept elsewhere."""
        ...

    async def delete_bodies(self, groups: Sequence[int]) -> None:
        """Deletes the bodies of all items of these groups."""
        ...

    def missing_room(self, size: int) -> tuple[int, int]:
        """Bytes that the disk lacks to take items of this size, and those that deleting bodies would have to free.

        Both are 0: there is room.
        """
        ...


class Driver(Protocol):
    """A database."""

    formats: tuple[int, ...]
    """The formats of data that it reads; it writes the last."""

    async def open(self, schema: str) -> None: ...
    async def close(self) -> None: ...
    async def transaction(self, work: Callable[[Tx], Awaitable[T]], size: int = 0) -> T:
        """Runs `work`, again where its first try found no room; `size` is that of the items that it may add."""
        ...

    async def read(self, work: Callable[[Tx], Awaitable[T]]) -> T: ...
    async def disk_bytes(self) -> int: ...
    async def tidy(self) -> None:
        """Gives disk space back, when there is nothing else to do."""
        ...


class _Row(Group, gc=False):
    """A row of `groups`, while a transaction changes it."""

    key: str
    deadline: float = 0.0
    judged: int = 0
    """Items that it had when it was judged last."""
    lease: str | None = None
    filtered: int = 0
    """Items that it is handed out without."""


_FIELDS: Final = _Row.__struct_fields__
_GROUP: Final = ", ".join(f'"{name}"' for name in Group.__struct_fields__)
_ROW: Final = ", ".join(f'"{name}"' for name in _FIELDS)
_REWARDS: Final = _FIELDS.index("rewards")
_TIMED_OUT: Final = _FIELDS.index("timed_out")

_CHANGES: Final = ", ".join(f'"{name}" = excluded."{name}"' for name in _FIELDS[_FIELDS.index("n") :])
_SAVE: Final = (
    f"INSERT INTO groups ({_ROW}) VALUES ({', '.join(f'${n + 1}' for n in range(len(_FIELDS)))}) "
    f"ON CONFLICT (id) DO UPDATE SET {_CHANGES}"
)
"""What comes before `n` never changes, nor does `key`."""


class _Jobs(NamedTuple):
    """Replaced as a whole: SQLite's threads read it."""

    version: int
    by_id: Mapping[str, JobRecord]
    last: JobRecord | None


class _Session:
    """What the operations of one transaction share."""

    def __init__(self, tx: Tx, totals: dict[str, Any]) -> None:
        self.tx = tx
        self.totals = defaultdict(int, totals)
        self.ready: Counter[tuple[str, str]] = Counter()
        self.unjudged = False
        self.room = self.trimmed = False
        self.dropped: Counter[str] = Counter()

    def count(self, name: str, by: int = 1) -> int:
        """The total afterwards."""
        total: int = self.totals[name] + by
        self.totals[name] = total
        return total

    def score(self, which: str, reward: float | None) -> None:
        """Adds a reward to the sum of those that were `written`, or `delivered`."""
        if reward is not None:
            self.count(f"scored_{which}")
            total = self.totals[f"reward_{which}"] + reward  # JSON has no infinity
            self.totals[f"reward_{which}"] = max(-sys.float_info.max, min(total, sys.float_info.max))

    def make_ready(self, row: _Row) -> None:
        row.state = "ready"
        self.ready[row.task, row.job] += 1

    def drop(self, row: _Row, reason: str) -> None:
        row.state, row.reason, row.lease = "dropped", reason, None
        row.left = self.leave(row.n, row.bytes)
        self.count(f"items_dropped:{reason}", row.n)
        self.count(f"groups_dropped:{reason}")
        self.dropped[reason] += 1

    def leave(self, items: int, size: int) -> int:
        """Counts a group that leaves; its `left`."""
        self.room = True
        self.count("archive_bytes", size)
        return self.count("items_left", items)


_Op = Callable[[_Session], Awaitable[Any]]


def _change(
    method: Callable[Concatenate["SqlStore", _Session, P], Awaitable[T]],
) -> Callable[Concatenate["SqlStore", P], Coroutine[Any, Any, T]]:
    """A call of the store that is a part of a transaction."""

    @functools.wraps(method)
    async def call(self: "SqlStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        done: T = await self._commit(lambda session: method(self, session, *args, **kwargs))
        return done

    return call


def _look(
    method: Callable[Concatenate["SqlStore", Tx, P], Awaitable[T]],
) -> Callable[Concatenate["SqlStore", P], Coroutine[Any, Any, T]]:
    """A call of the store that changes nothing."""

    @functools.wraps(method)
    async def call(self: "SqlStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._driver.read(lambda tx: method(self, tx, *args, **kwargs))

    return call


class SqlStore:
    """Keeps items, groups, leases and jobs. Lives in one event loop.

    Every call that changes something is one transaction, durable when it returns. All calls may raise
    `StorageError`, of it `StorageFullError` when there is no room.
    """

    def __init__(self, driver: Driver, policy: Policy, limits: Limits | None = None) -> None:
        self._driver = driver
        self._policy = policy
        self._limits = limits or Limits()
        self._waiting: deque[tuple[Sequence[Item] | _Op, asyncio.Future[Any]]] = deque()
        self._committing: asyncio.Task[None] | None = None
        self._jobs = _Jobs(-1, {}, None)
        self._readied = -1
        self._refused: int | None = None
        """Size of the largest write that was refused since there was room."""
        self.changed: Callable[[Change], None] = lambda change: None
        self.items_of_job = 0
        """Written by the last job, as of the last transaction."""

    async def open(self) -> None:
        """Raises `StorageError`, `RunDirectoryError`."""
        await self._driver.open(SCHEMA)
        formats = self._driver.formats
        found = (await self._driver.read(_totals))["format"]
        if found not in (0, *formats):
            await self._driver.close()
            raise RunDirectoryError(
                f"the buffer's data has format {found}, this version reads {formats[-1]}: use the "
                "version of rollstream that wrote it, or start with an empty folder or database"
            )
        if found != formats[-1]:
            await self._set_format(formats[-1])

    @_change
    async def _set_format(self, session: _Session, number: int) -> None:
        session.totals["format"] = number

    async def close(self) -> None:
        """Waits for what is under way."""
        while self._committing is not None:
            await asyncio.wait({self._committing})
        await self._driver.close()

    @_change
    async def check_writable(self, session: _Session) -> None:
        """Raises `StorageError` where no items can be written now."""
        if _is_full(session.tx, session.totals):
            raise StorageFullError(_FULL)

    # -- committing

    async def _commit(self, op: Sequence[Item] | _Op) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((op, future))
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._work_off())
        return await future  # what is begun becomes durable, also when nobody waits for it any more

    async def _work_off(self) -> None:
        try:
            while self._waiting:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                some: list[tuple[Sequence[Item] | _Op, asyncio.Future[Any]]] = []
                size = 0
                while self._waiting and size < _COMMIT_BYTES:
                    some.append(self._waiting.popleft())
                    if not callable(op := some[-1][0]):
                        size += sum(len(item.body) for item in op)
                await self._commit_some(some)
        finally:
            self._committing = None

    async def _commit_some(self, some: Sequence[tuple[Sequence[Item] | _Op, asyncio.Future[Any]]]) -> None:
        try:
            results = await self._transact([op for op, _ in some])
        except Exception as error:
            # With a lost database nobody knows what was done, and trying each takes long.
            lost = isinstance(error, StorageError) and not isinstance(error, StorageFullError)
            if len(some) > 1 and not lost:
                for one in some:  # one of them may be what cannot be stored: the others must not fail with it
                    await self._commit_some([one])
                return
            results = [error] * len(some)
        for (_, future), result in zip(some, results, strict=True):
            if not future.done():
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _transact(self, ops: Sequence[Sequence[Item] | _Op]) -> list[Any]:
        """Does all of them; the result of each, or its error."""

        async def work(tx: Tx) -> tuple[_Session, int, list[Any]]:
            session = _Session(tx, await _totals(tx))
            readied = session.totals["readied"]
            await self._refresh_jobs(tx, session.totals)
            written = iter(await self._write(session, [op for op in ops if not callable(op)]))
            results: list[Any] = []
            for op in ops:
                try:
                    results.append(await op(session) if callable(op) else next(written))
                except RollstreamError as error:
                    if isinstance(error, StorageError):
                        raise
                    results.append(error)
            session.count("readied", bool(session.ready))
            session.totals |= {"clock": tx.now, "changed": time.time()}
            await tx.rows("UPDATE totals SET json = $1 WHERE id = 1", orjson.dumps(session.totals).decode())
            return session, readied, results

        size = sum(len(item.body) for op in ops if not callable(op) for item in op)
        session, readied, results = await self._driver.transaction(work, size)
        elsewhere = readied > self._readied
        self.items_of_job = session.totals["items_of_job"]
        self._readied = session.totals["readied"]
        unjudged = session.unjudged or elsewhere
        if session.ready or unjudged or session.room:
            self.changed(Change(session.ready, elsewhere, unjudged, session.room, session.dropped))
        if session.trimmed:  # which makes room once it is committed
            again = [n for n, result in enumerate(results) if isinstance(result, StorageFullError)]
            for n, result in zip(
                again, await self._transact([ops[n] for n in again]) if again else (), strict=True
            ):
                results[n] = result
        return results

    # -- writing

    async def write(self, items: Sequence[Item]) -> list[bool]:
        """Stores all items or none; which of them were new. Raises `BufferFullError`."""
        result: list[bool] = await self._commit(items)
        return result

    @_look
    async def known(self, tx: Tx, uids: Sequence[str]) -> list[bool]:
        found = await _known(tx, uids)
        return [uid in found for uid in uids]

    async def _write(
        self, session: _Session, writes: Sequence[Sequence[Item]]
    ) -> list[list[bool] | RollstreamError]:
        """A write that does not fit under the limit gets its error in place of a result."""
        if not writes:
            return []
        known = await _known(session.tx, [item.uid for items in writes for item in items])
        here = session.totals["items_written"] - session.totals["items_left"]
        results: list[list[bool] | RollstreamError] = []
        new: list[Item] = []
        size = sum(len(item.body) for items in writes for item in items)
        has_room = not any(session.tx.missing_room(size + _noting_room(session.totals)))
        size = 0
        for items in writes:
            fresh: dict[str, Item] = {}
            for item in items:
                if item.uid not in known:
                    fresh.setdefault(item.uid, item)
            if fresh and here + len(fresh) > self._limits.items:
                error = f"the buffer holds {here} items, of at most {self._limits.items}"
                results.append(BufferFullError(error))
                continue
            if fresh and not has_room:
                size += (of_these := sum(len(item.body) for item in fresh.values()))
                if (no_room := await self._lacking_room(session, size)) is not None:
                    size -= of_these
                    results.append(no_room)
                    continue
            known |= fresh.keys()
            here += len(fresh)
            new += fresh.values()
            results.append([fresh.pop(item.uid, None) is not None for item in items])
        if new:
            await self._add(session, new)
        return results

    async def _lacking_room(self, session: _Session, size: int) -> StorageFullError | None:
        """Why items of this size are refused, also after the archive was trimmed for them."""
        needed = size + _noting_room(session.totals)
        while (lacks := session.tx.missing_room(needed))[1]:
            if not await self._trim(session, session.totals["archive_bytes"] - lacks[1]):
                break
        if not any(lacks):
            return None
        if self._refused is None:
            _LOG.error("%s", _FULL)
        self._refused = max(self._refused or 0, size)
        return StorageFullError(_FULL)

    async def _add(self, session: _Session, new: Sequence[Item]) -> None:
        owners = [_owner(item, self.known_jobs, self.last_job) for item in new]
        keys = [_group_key(*owner, item.instance_id) for owner, item in zip(owners, new, strict=True)]
        rows = await _rows(session.tx, "state = 'open' AND key IN :texts($1)", list(set(keys)))
        open_rows = {row.key: row for row in rows}
        touched: dict[int, _Row] = {}
        items, bodies = [], []
        for item, (task, job), key in zip(new, owners, keys, strict=True):
            settings = self._policy.settings(task, self.known_jobs.get(job))
            row = open_rows.get(key)
            if row is None:
                row = open_rows[key] = _Row(
                    session.count("groups"), task, job, item.instance_id, settings.group_size,
                    n=0, bytes=0, rewards=[], failed=0, version=None, state="open", timed_out=False, position=0,
                    updated=0.0, reason=None, cause=None, left=None, key=key,
                )  # fmt: skip
            touched[row.id] = row
            session.count("items_of_job", self.last_job is not None and job == self.last_job.id)
            seq = session.count("items_written")
            reward = None if item.failed else item.reward
            row.n += 1
            row.bytes += len(item.body)
            row.rewards.append(reward)
            session.score("written", reward)
            row.failed += item.failed
            if item.version is not None:
                row.version = item.version if row.version is None else min(row.version, item.version)
            row.position, row.updated = seq, session.tx.now
            row.deadline = session.tx.now + settings.group_timeout_seconds
            items.append((row.id, seq, item.uid, reward, item.encoding, zlib.crc32(item.body)))
            bodies.append((seq, item.body))
            self._judge(session, row)
            if row.state != "open":
                del open_rows[key]
        await session.tx.many(
            "INSERT INTO items (grp, seq, uid, reward, encoding, crc) VALUES ($1, $2, $3, $4, $5, $6)", items
        )
        await session.tx.add_bodies(bodies)
        await _save(session, touched.values())

    def _judge(self, session: _Session, row: _Row) -> None:
        """By the default rule, unless it waits for its task's own hook."""
        if self._policy.has_own_judge(row.task):
            session.unjudged, row.judged = True, 0
            if row.timed_out or row.n >= row.size:
                row.state = "judging"
            return
        settings = self._policy.settings(row.task, self.known_jobs.get(row.job))
        if settings.group_size != row.size:  # the server was started with another --group-size meanwhile
            settings = replace(settings, group_size=row.size)
        row.judged = row.n
        verdict = judge_rewards(row.rewards, settings, timed_out=row.timed_out)
        if verdict.valid:
            session.make_ready(row)
        elif verdict.finished:
            reason = drop_reason(row.rewards, settings, failed=row.failed, timed_out=row.timed_out)
            session.drop(row, reason)

    # -- reading

    @_change
    async def take(self, session: _Session, wanted: Wanted) -> Taken:
        """Leases groups, first in the queue first."""
        tx = session.tx
        chosen, stale = await self._choose(tx, wanted)
        if stale and wanted.drop_stale:
            await _drop_where(session, "stale", "state = 'ready' AND id IN :ids($1)", stale)
        if not chosen or (wanted.exact and len(chosen) < wanted.groups):
            passed = 0
            if wanted.min_version is not None and not wanted.drop_stale:
                which, values = _matching(wanted, 1)
                found = await tx.rows(
                    f"SELECT count(*) FROM groups WHERE {which} AND version < $1", wanted.min_version, *values
                )
                passed = found[0][0]
            return Taken(lease=None, groups=[], available=len(chosen), stale=passed)
        lease = Lease(
            id=uuid.uuid4().hex,
            consumer=wanted.consumer,
            seconds=wanted.seconds,
            left_s=wanted.seconds,
            groups=[group.id for group in chosen],
        )
        await tx.rows(
            "INSERT INTO leases (id, consumer, read_id, seconds, deadline, state, groups, items) "
            "VALUES ($1, $2, $3, $4, $5, 'out', $6, $7)",
            *(lease.id, wanted.consumer, wanted.read_id, wanted.seconds, tx.now + wanted.seconds),
            *(len(chosen), sum(group.n for group in chosen)),
        )
        await tx.rows(
            "UPDATE groups SET state = 'leased', lease = $1, filtered = 0 WHERE id IN :ids($2)",
            *(lease.id, lease.groups),
        )
        return Taken(lease=lease, groups=chosen, available=len(chosen))

    @_look
    async def peek(self, tx: Tx, wanted: Wanted) -> list[Group]:
        """What `take` would lease."""
        return (await self._choose(tx, wanted))[0]

    async def _choose(self, tx: Tx, wanted: Wanted) -> tuple[list[Group], list[int]]:
        """Groups for a read, first in the queue first, and those that are to be dropped as too old for it."""
        chosen: list[Group] = []
        stale: list[int] = []
        seen = set(wanted.without)
        which, values = _matching(wanted, 2)
        if wanted.min_version is not None and not wanted.drop_stale:
            values.append(wanted.min_version)
            which += f" AND (version IS NULL OR version >= ${len(values) + 2})"
        position, limit = 0, min(wanted.groups + 16, 4096)
        for _ in range(_LOOKS):
            found = await tx.rows(
                f"SELECT {_GROUP} FROM groups WHERE {which} AND position > $1 ORDER BY position LIMIT $2",
                *(position, limit, *values),
            )
            for group in (_decoded(row, Group) for row in found):
                if len(chosen) == wanted.groups:
                    break
                position = group.position
                if (
                    wanted.min_version is not None
                    and group.version is not None
                    and group.version < wanted.min_version
                ):
                    stale.append(group.id)
                elif not (wanted.distinct and group.instance_id in seen):
                    seen.add(group.instance_id)
                    chosen.append(group)
            if len(chosen) == wanted.groups or len(found) < limit:
                break
            limit = 1024
        return chosen, stale

    async def load(self, groups: Sequence[int]) -> dict[int, list[StoredItem] | str]:
        """Items of groups, in order of arrival; a text says why a group cannot be read (damage)."""
        try:
            return await self._driver.read(lambda tx: _load(tx, groups))
        except DamageError as error:
            if len(groups) == 1:
                return {groups[0]: str(error)}
        loaded: dict[int, list[StoredItem] | str] = {}
        for group in groups:  # one by one, to tell which of them are hit
            loaded |= await self.load([group])
        return loaded

    @_change
    async def finish(
        self,
        session: _Session,
        lease: str,
        removals: Sequence[Removal],
        filtered: Mapping[int, int],
        back: Sequence[int] = (),
    ) -> None:
        """Takes groups out of a lease, `back` to their places; notes how many items others are handed out without.

        Raises:
            ConflictError: The lease ended meanwhile.
        """
        tx = session.tx
        if (await _lease_rows(tx, [lease]))[lease].state != "out":
            raise ConflictError(f"lease {lease} ended before all of its groups were finished")
        ids = [*(one.group for one in removals), *filtered, *back]
        rows = await _rows(tx, "state = 'leased' AND lease = $1 AND id IN :ids($2)", lease, ids)
        for row in rows:
            row.filtered = filtered.get(row.id, row.filtered)
        removed = _remove(session, rows, removals)
        for row in rows:
            if row.id in back:
                session.make_ready(row)
                row.lease = None
                removed.append(row)
        await _save(session, rows)
        await tx.rows(
            "UPDATE leases SET groups = groups - $2, items = items - $3 WHERE id = $1",
            *(lease, len(removed), sum(row.n for row in removed)),
        )

    @_change
    async def ack(
        self, session: _Session, leases: Sequence[str], *, reported_up_to: int | None = None
    ) -> Acked:
        """The groups leave: of all leases, or of none. `reported_up_to`: see `unread_drops`.

        Raises:
            NotFoundError: There is no such lease.
            ConflictError: Its groups went back, and some are not there any more.
        """
        tx = session.tx
        known = await _lease_rows(tx, leases)
        live = [lease for lease, row in known.items() if row.state != "acked"]
        groups = await tx.rows(
            "SELECT id, n, bytes, filtered, lease, rewards FROM groups WHERE lease IN :texts($1) "
            "AND state IN ('ready', 'leased') ORDER BY position",
            live,
        )
        here = Counter(row[4] for row in groups)
        for lease in live:
            if missing := known[lease].groups - here[lease]:
                raise ConflictError(
                    f"lease {lease} ended, and {missing} of its groups are not there any more: what was read by "
                    "it must not count"
                )
        session.totals["reported"] = max(reported_up_to or 0, session.totals["reported"])
        gone = []
        for id_, n, size, filtered, _, rewards in groups:
            gone.append((id_, session.leave(n, size)))
            session.count("groups_delivered")
            session.count("items_delivered", n - filtered)
            for reward in orjson.loads(rewards):
                session.score("delivered", reward)
            if filtered:
                session.count("items_dropped:filtered", filtered)
        await tx.many(
            "UPDATE groups SET state = 'delivered', lease = NULL, \"left\" = $2 WHERE id = $1", gone
        )
        await tx.rows("UPDATE leases SET state = 'acked' WHERE id IN :texts($1)", live)
        return Acked(
            sum(row.groups for row in known.values()), sum(row.items for row in known.values()), not live
        )

    @_change
    async def nack(self, session: _Session, lease: str) -> None:
        """The groups go back to their places. Raises `NotFoundError`, `ConflictError`."""
        state = (await _lease_rows(session.tx, [lease]))[lease].state
        if state == "acked":
            raise ConflictError(f"lease {lease} was acked")
        if state == "out":
            await _give_back(session, [lease])

    @_change
    async def extend(self, session: _Session, lease: str, seconds: float) -> None:
        """The lease ends that much from now. Raises `NotFoundError`, `ConflictError`."""
        if (await _lease_rows(session.tx, [lease]))[lease].state != "out":
            raise ConflictError(f"lease {lease} has ended")
        await session.tx.rows(
            "UPDATE leases SET deadline = $2, seconds = $3 WHERE id = $1",
            *(lease, session.tx.now + seconds, seconds),
        )

    async def release(self, consumer: str) -> int:
        """Gives back all leases of a reader; how many groups that were."""
        return await self._return_leases("consumer = $1", consumer)

    async def return_read(self, read_id: str) -> None:
        """Gives back what an earlier attempt at the same read took."""
        await self._return_leases("read_id = $1", read_id)

    @_change
    async def _return_leases(self, session: _Session, which: str, argument: str) -> int:
        rows = await session.tx.rows(f"SELECT id FROM leases WHERE state = 'out' AND {which}", argument)
        return await _give_back(session, [lease for (lease,) in rows])

    @_look
    async def leases(self, tx: Tx, consumer: str | None = None) -> list[Lease]:
        """Those that are out."""
        groups = defaultdict(list)
        for group, lease in await tx.rows(
            "SELECT id, lease FROM groups WHERE lease IS NOT NULL AND state = 'leased' ORDER BY position"
        ):
            groups[lease].append(group)
        return [
            Lease(id=id_, consumer=owner, seconds=seconds, left_s=max(0.0, end - tx.now), groups=groups[id_])
            for id_, owner, seconds, end in await tx.rows(
                "SELECT id, consumer, seconds, deadline FROM leases WHERE state = 'out' ORDER BY deadline, id"
            )
            if consumer in (None, owner)
        ]

    # -- judging and dropping

    async def unjudged(self, tasks: Sequence[str], limit: int) -> list[Group]:
        """Groups that wait for the hook of one of these tasks."""
        return await self._groups(
            f"{_UNJUDGED} AND task IN :texts($1) ORDER BY position LIMIT $2", list(tasks), limit
        )

    @_change
    async def judge(self, session: _Session, judged: Sequence[Judged], removals: Sequence[Removal]) -> None:
        """What hooks said of groups, and which of them they failed on."""
        ids = [*(one.group for one in judged), *(one.group for one in removals)]
        rows = await _rows(session.tx, "state IN ('open', 'judging') AND id IN :ids($1)", ids)
        _remove(session, rows, removals)
        here = {row.id: row for row in rows if row.state in ("open", "judging")}
        for one in judged:
            row = here.get(one.group)
            if row is None or row.n != one.n:
                continue
            row.judged = row.n
            if one.valid:
                session.make_ready(row)
            elif one.finished or row.state == "judging":
                session.drop(row, "timed_out" if row.timed_out else "not_valid")
        await _save(session, rows)

    @_change
    async def drop(self, session: _Session, groups: Sequence[int] | None, reason: str) -> int:
        """Drops quarantined groups (None: all); how many."""
        which = "" if groups is None else " AND id IN :ids($1)"
        values = () if groups is None else (list(groups),)
        return await _drop_where(session, reason, f"state = 'quarantined'{which}", *values)

    async def drop_job(self, job: str, reason: str) -> int:
        """Drops what nobody has read of a job."""

        async def some(session: _Session) -> int:
            which = "job = $1 AND \"left\" IS NULL AND state IN ('open', 'judging', 'ready') LIMIT $2"
            return await _drop_where(session, reason, which, job, _SLICE)

        dropped = 0
        while count := await self._commit(some):
            dropped += count
        return dropped

    @_change
    async def retry(self, session: _Session, groups: Sequence[int] | None) -> list[int]:
        """Quarantined groups (None: all) are judged or handed out again; which ones.

        Those whose task has no hook any more that judges are judged by the default rule. Short ones wait for
        more items, unless another group has been opened for these.
        """
        which = "" if groups is None else " AND id IN :ids($1)"
        values = () if groups is None else (list(groups),)
        rows = await _rows(session.tx, f"state = 'quarantined'{which}", *values)
        others = await session.tx.rows(
            "SELECT key FROM groups WHERE state = 'open' AND key IN :texts($1)", [row.key for row in rows]
        )
        open_keys = {key for (key,) in others}
        for row in sorted(rows, key=lambda row: row.position):
            row.lease = row.reason = row.cause = None
            own = self._policy.has_own_judge(row.task)
            if row.judged == row.n and not own:
                session.make_ready(row)
                continue
            row.state = "judging" if own else "open"
            row.timed_out = row.timed_out or (row.key in open_keys and not own)
            self._judge(session, row)
            if row.state == "open":
                open_keys.add(row.key)
        await _save(session, rows)
        return [row.id for row in rows]

    # -- time

    async def sweep(self) -> int:
        """Expires leases, times groups out, trims the archive. How much it did; 0: nothing is due."""

        async def look(tx: Tx) -> tuple[dict[str, Any], bool, bool]:
            totals = await _totals(tx)
            await self._refresh_jobs(tx, totals)
            due = (
                totals["archive_bytes"] > self._limits.archive_bytes
                or totals["forgotten"] < self._forgettable(totals)
                or await tx.rows(_DUE, tx.now, tx.now - _LEASES_KEPT_S)
                or await self._without_judge(tx)
            )
            return totals, bool(due), _is_full(tx, totals, self._refused or 0)

        totals, due, is_full = await self._driver.read(look)
        if self._refused is not None and not is_full:
            self._refused = None
            _LOG.info("the disk has room for items again")
        if totals["readied"] > self._readied:  # another server wrote
            self._readied = totals["readied"]
            self.changed(Change(elsewhere=True, unjudged=True))
        if not due:
            await self._driver.tidy()
            return 0
        return await self._sweep()

    @_change
    async def _sweep(self, session: _Session) -> int:
        tx = session.tx
        due = f"deadline < $1 ORDER BY deadline, id LIMIT {_SLICE}"
        expired = await tx.rows(f"SELECT id FROM leases WHERE state = 'out' AND {due}", tx.now)
        await _give_back(session, [lease for (lease,) in expired])
        await tx.rows(
            "DELETE FROM leases WHERE state IN ('acked', 'back') AND deadline < $1", tx.now - _LEASES_KEPT_S
        )
        late = await _rows(tx, f"state = 'open' AND {due}", tx.now)
        orphans = await _rows(
            tx, f"{_UNJUDGED} AND task IN :texts($1) LIMIT {_SLICE}", await self._without_judge(tx)
        )
        rows = {row.id: row for row in [*late, *orphans]}.values()  # one may be both
        for row in rows:
            row.timed_out = row.state == "judging" or row.deadline < tx.now
            self._judge(session, row)
        await _save(session, rows)
        done = len(expired) + len(rows)
        return done + await self._trim(session, self._limits.archive_bytes) + await self._forget(session)

    async def _without_judge(self, tx: Tx) -> list[str]:
        """Tasks with groups that wait for a hook which their generator file had, and has no more."""
        rows = await tx.rows(f"SELECT DISTINCT task FROM groups WHERE {_UNJUDGED}")
        return [task for (task,) in rows if not self._policy.has_own_judge(task)]

    async def _trim(self, session: _Session, bound: int) -> int:
        """Deletes bodies of what left first, down to so many bytes."""
        totals, ids = session.totals, []
        for group, size, left in await session.tx.rows(
            'SELECT id, bytes, "left" FROM groups WHERE "left" > $1 ORDER BY "left" LIMIT $2',
            *(totals["trimmed"], _SLICE),
        ):
            if totals["archive_bytes"] <= bound:
                break
            session.count("archive_bytes", -size)
            totals["trimmed"] = left
            ids.append(group)
            session.trimmed = True
        await session.tx.delete_bodies(ids)
        await session.tx.rows("UPDATE groups SET bytes = 0 WHERE id IN :ids($1)", ids)
        return len(ids)

    def _forgettable(self, totals: Mapping[str, int]) -> int:
        """Groups that left up to here may be forgotten, unless they are of the last job."""
        return min(totals["trimmed"], totals["items_left"] - self._limits.remembered_uids)

    async def _forget(self, session: _Session) -> int:
        """Forgets groups that left first, and their uids."""
        totals, last = session.totals, self.last_job
        if (bound := self._forgettable(totals)) <= totals["forgotten"]:
            return 0
        rows = await session.tx.rows(
            'SELECT id, job, "left" FROM groups WHERE "left" > $1 AND "left" <= $2 ORDER BY "left" LIMIT $3',
            *(totals["forgotten"], bound, _SLICE),
        )
        totals["forgotten"] = rows[-1][2] if len(rows) == _SLICE else bound
        ids = [group for group, job, _ in rows if last is None or job != last.id]
        await session.tx.rows("DELETE FROM items WHERE grp IN :ids($1)", ids)
        await session.tx.rows("DELETE FROM groups WHERE id IN :ids($1)", ids)
        return len(rows)

    # -- jobs

    @property
    def known_jobs(self) -> Mapping[str, JobRecord]:
        """By id, oldest first, as of the last transaction."""
        return self._jobs.by_id

    @property
    def last_job(self) -> JobRecord | None:
        """The job that was started last."""
        return self._jobs.last

    async def _refresh_jobs(self, tx: Tx, totals: Mapping[str, int]) -> None:
        if (version := totals["jobs"]) <= self._jobs.version:
            return
        rows = await tx.rows("SELECT record FROM jobs ORDER BY number")
        jobs = [_decode_job(text) for (text,) in rows]
        if version > self._jobs.version:  # a slow look must not bring back what a transaction has replaced
            self._jobs = _Jobs(version, {one.id: one for one in jobs}, jobs[-1] if jobs else None)

    async def save_job(self, record: JobRecord) -> JobRecord:
        """As it is stored: a new job gets its `number`, and `expected` stays once it is known."""
        stored = await self._save_job(record)
        await self.jobs()
        return stored

    @_change
    async def _save_job(self, session: _Session, record: JobRecord) -> JobRecord:
        totals, number, expected = session.totals, session.totals["last_job"], record.expected
        if (known := await _job(session.tx, record.id)) is None:
            for (text,) in await session.tx.rows("SELECT record FROM jobs WHERE number = $1", number):
                await _put_job(session, _replaced(_decode_job(text)))
            await session.tx.rows(
                "DELETE FROM jobs WHERE number <= $1 AND NOT EXISTS (SELECT 1 FROM groups WHERE job = jobs.id)",
                number - _JOBS_KEPT,
            )
            number = session.count("last_job")
            totals["items_of_job"] = totals["forgotten"] = 0
        else:
            record = record if known.number == number else _replaced(record)
            number, expected = known.number, known.expected if expected is None else expected
        stored = msgspec.structs.replace(record, number=number, expected=expected)
        await _put_job(session, stored)
        return stored

    async def expect(self, job: str, items: int) -> None:
        """Sets `expected` of a job, and nothing else. Raises `NotFoundError`."""

        async def op(session: _Session) -> None:
            if (record := await _job(session.tx, job)) is None:
                raise NotFoundError(f"there is no job {job!r:.100}")
            await _put_job(session, msgspec.structs.replace(record, expected=items))

        await self._commit(op)
        await self.jobs()

    @_look
    async def jobs(self, tx: Tx) -> list[JobRecord]:
        """All, oldest first. Records are read only when one has changed."""
        await self._refresh_jobs(tx, await _totals(tx))
        return list(self._jobs.by_id.values())

    async def live_jobs(self) -> list[JobRecord]:
        """The last one, and those that run, oldest first."""
        jobs = await self.jobs()
        return [one for one in jobs if one is jobs[-1] or one.state == "running"]

    @_change
    async def claim_job(self, session: _Session, job: str, server: str, stale_after_s: float) -> bool:
        """Whether a job is this server's: nobody else's, or of one that has not claimed it for so long."""
        now = session.tx.now
        return bool(
            await session.tx.rows(
                "UPDATE jobs SET server = $2, claimed = $3 WHERE id = $1 "
                "AND (server IS NULL OR server = $2 OR claimed < $4) RETURNING id",
                *(job, server, now, now - stale_after_s),
            )
        )

    @_look
    async def finished(self, tx: Tx, job: str) -> list[InstanceId]:
        """One entry for each group that is complete, or timed out."""
        rows = await tx.rows(
            "SELECT instance_id FROM groups WHERE job = $1 AND state <> 'open' ORDER BY id", job
        )
        return [orjson.loads(text) for (text,) in rows]

    @_look
    async def has_groups(self, tx: Tx, job: str) -> bool:
        """Whether any of a job's groups have not left."""
        return bool(await tx.rows('SELECT id FROM groups WHERE job = $1 AND "left" IS NULL LIMIT 1', job))

    # -- looking

    @_look
    async def _groups(self, tx: Tx, which: str, *arguments: Any) -> list[Group]:
        rows = await tx.rows(f"SELECT {_GROUP} FROM groups WHERE {which}", *arguments)
        return [_decoded(row, Group) for row in rows]

    async def groups(
        self,
        *,
        state: GroupState | None = None,
        task: str | None = None,
        jobs: Sequence[str] | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[Group]:
        which, values = _also(2, ("task = {}", task), ("job IN :texts({})", jobs))
        if state is not None:
            which += " AND " + _STATES.get(state, f"state = '{state}'")
        return await self._groups(f"id > $1{which} ORDER BY id LIMIT $2", after, limit, *values)

    async def any_group(
        self, state: GroupState, task: str | None, jobs: Sequence[str] | None
    ) -> Group | None:
        """One that is in this state and has not left. However many have left, it is found at once."""
        which, values = _also(0, ("task = {}", task), ("job IN :texts({})", jobs))
        return next(iter(await self._groups(f"{_STATES[state]}{which} LIMIT 1", *values)), None)

    async def group_with_items(self, group: int) -> dict[str, Any] | None:
        """`group`, `items` as they were written, and a `problem` where these cannot be read."""
        items = (await self.load([group]))[group]
        # Looked at second: of items that the archive has given up meanwhile it says so, by `bytes`.
        if not (found := await self._groups("id = $1", group)):
            return None
        if isinstance(items, str):
            return {"group": described(found[0]), "items": [], "problem": items}
        return {"group": described(found[0]), "items": [plain_item(one.body, one.encoding) for one in items]}

    async def dropped(self, after: int, limit: int) -> list[Group]:
        """Groups that left undelivered, in the order in which they left, after a `left`."""
        return await self._groups(_DROPPED, after, limit)

    @_look
    async def unread_drops(
        self, tx: Tx, task: str | None, jobs: Sequence[str] | None, limit: int
    ) -> tuple[list[Group], int]:
        """What was dropped since a trainer on slime's wire got a report, and what `ack` takes as `reported_up_to`."""
        totals = await _totals(tx)
        rows = await tx.rows(f"SELECT {_GROUP} FROM groups WHERE {_DROPPED}", totals["reported"], limit)
        groups = [_decoded(row, Group) for row in rows]
        up_to = groups[-1].left if len(groups) == limit else totals["items_left"]
        return [g for g in groups if task in (None, g.task) and (jobs is None or g.job in jobs)], up_to or 0

    async def stats(self) -> Stats:
        return await self._stats(await self._driver.disk_bytes())

    @_look
    async def _stats(self, tx: Tx, disk_bytes: int) -> Stats:
        totals = await _totals(tx)
        counts = {state: await tx.rows(f"SELECT count(*), sum(n) FROM groups WHERE {which}")
                  for state, which in _STATES.items()}  # fmt: skip
        leases = await tx.rows("SELECT count(*) FROM leases WHERE state = 'out'")
        first = await tx.rows("SELECT updated FROM groups WHERE state = 'ready' ORDER BY position LIMIT 1")
        return Stats(
            items=totals["items_written"] - totals["items_left"],
            items_ready=int(counts["ready"][0][1] or 0),
            items_of_job=totals["items_of_job"],
            items_written=totals["items_written"],
            items_delivered=totals["items_delivered"],
            items_dropped=_by_reason(totals, "items_dropped:"),
            groups={state: rows[0][0] for state, rows in counts.items()},
            groups_delivered=totals["groups_delivered"],
            groups_dropped=_by_reason(totals, "groups_dropped:"),
            scored_written=totals["scored_written"],
            reward_written=totals["reward_written"],
            scored_delivered=totals["scored_delivered"],
            reward_delivered=totals["reward_delivered"],
            leases=leases[0][0],
            oldest_ready_s=max(0.0, tx.now - first[0][0]) if first else 0.0,
            archive_bytes=totals["archive_bytes"],
            disk_bytes=disk_bytes,
            disk_full=_is_full(tx, totals),
        )


_UNJUDGED: Final = "state IN ('open', 'judging') AND judged < n"
_DROPPED: Final = 'state = \'dropped\' AND "left" > $1 ORDER BY "left" LIMIT $2'
_STATES: Final = {
    "open": "state = 'open'",
    "judging": f"{_UNJUDGED} AND state = 'judging'",
    "ready": "state = 'ready'",
    "leased": "lease IS NOT NULL AND state = 'leased'",
    "quarantined": "state = 'quarantined'",
}
"""What has not left, each in the words of the index that finds it: no arguments, which PostgreSQL does not know
when it plans."""

_DUE: Final = (
    "SELECT 1 FROM leases WHERE state = 'out' AND deadline < $1 "
    "UNION ALL SELECT 1 FROM leases WHERE state IN ('acked', 'back') AND deadline < $2 "
    "UNION ALL SELECT 1 FROM groups WHERE state = 'open' AND deadline < $1 LIMIT 1"
)


async def _totals(tx: Tx) -> defaultdict[str, Any]:
    return defaultdict(int, orjson.loads((await tx.rows("SELECT json FROM totals WHERE id = 1"))[0][0]))


def _is_full(tx: Tx, totals: Mapping[str, int], size: int = 0) -> bool:
    """Whether there is no room for items, also if the archive was trimmed."""
    missing: int = max(tx.missing_room(size + _noting_room(totals)))
    return missing > totals["archive_bytes"]


def _noting_room(totals: Mapping[str, int]) -> int:
    """Bytes that reads and acks of all groups take for their notes."""
    gone = totals["groups_delivered"] + sum(_by_reason(totals, "groups_dropped:").values())
    return (totals["groups"] - gone) * _GROUP_ROOM


async def _known(tx: Tx, uids: Sequence[str]) -> set[str]:
    return {uid for (uid,) in await tx.rows("SELECT uid FROM items WHERE uid IN :texts($1)", list(uids))}


async def _rows(tx: Tx, which: str, *arguments: Any) -> list[_Row]:
    return [
        _decoded(row, _Row) for row in await tx.rows(f"SELECT {_ROW} FROM groups WHERE {which}", *arguments)
    ]


def _decoded(row: Sequence[Any], kind: type[G]) -> G:
    values = list(row)
    values[3] = orjson.loads(values[3])
    values[_REWARDS] = orjson.loads(values[_REWARDS])
    values[_TIMED_OUT] = bool(values[_TIMED_OUT])
    return kind(*values)


async def _save(session: _Session, rows: Collection[_Row]) -> None:
    saved = []
    for row in sorted(rows, key=lambda row: row.id):  # by age: of one key only one group may be open
        values = list(msgspec.structs.astuple(row))
        values[3] = orjson.dumps(row.instance_id).decode()
        values[_REWARDS] = orjson.dumps(row.rewards).decode()
        values[_TIMED_OUT] = int(row.timed_out)
        saved.append(values)
    await session.tx.many(_SAVE, saved)


async def _drop_where(session: _Session, reason: str, which: str, *arguments: Any) -> int:
    rows = await _rows(session.tx, which, *arguments)
    for row in sorted(rows, key=lambda row: row.position):
        session.drop(row, reason)
    await _save(session, rows)
    return len(rows)


def _remove(session: _Session, rows: Sequence[_Row], removals: Sequence[Removal]) -> list[_Row]:
    """Drops or quarantines groups among these; which ones."""
    by_id = {row.id: row for row in rows}
    removed = []
    for one in removals:
        if (row := by_id.get(one.group)) is None:
            continue
        removed.append(row)
        if one.cause is None:
            session.drop(row, one.reason)
        else:  # a user's traceback may hold what a database's text cannot
            cause = (
                one.cause[-_CAUSE_CHARS:].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
            )
            row.state, row.reason, row.cause = "quarantined", one.reason, cause
    return removed


async def _give_back(session: _Session, leases: list[str]) -> int:
    """Groups go back to their places. They still know their lease, so a late ack finds them."""
    tx = session.tx
    rows = await tx.rows(
        "UPDATE groups SET state = 'ready' WHERE lease IN :texts($1) AND state = 'leased' RETURNING task, job",
        leases,
    )
    session.ready.update((task, job) for task, job in rows)
    await tx.rows("UPDATE leases SET state = 'back', deadline = $2 WHERE id IN :texts($1)", leases, tx.now)
    return len(rows)


class _LeaseRow(NamedTuple):
    state: str
    groups: int
    items: int


async def _lease_rows(tx: Tx, leases: Sequence[str]) -> dict[str, _LeaseRow]:
    """Raises `NotFoundError`."""
    rows = await tx.rows("SELECT id, state, groups, items FROM leases WHERE id IN :texts($1)", list(leases))
    found = {id_: _LeaseRow(*row) for id_, *row in rows}
    for lease in leases:
        if lease not in found:
            raise NotFoundError(f"there is no lease {lease!r:.100}")
    return found


async def _load(tx: Tx, groups: Sequence[int]) -> dict[int, list[StoredItem] | str]:
    loaded: dict[int, list[StoredItem] | str] = {group: [] for group in groups}
    rows = await tx.rows(
        "SELECT items.grp, items.seq, items.uid, items.reward, items.encoding, items.crc, bodies.body FROM items "
        "LEFT JOIN bodies ON bodies.seq = items.seq WHERE items.grp IN :ids($1) ORDER BY items.grp, items.seq",
        list(groups),
    )
    elsewhere = [seq for _, seq, *_, body in rows if body is None]
    others = await tx.other_bodies(elsewhere) if elsewhere else {}
    for group, seq, uid, reward, encoding, crc, stored in rows:
        items = loaded[group]
        if isinstance(items, str):
            continue
        body = others.get(seq) if stored is None else stored
        if body is None:
            loaded[group] = f"item {uid!r} is not kept any more, or was lost"
        elif zlib.crc32(body) != crc:
            loaded[group] = (
                f"item {uid!r} is not what was written: its checksum is wrong (damaged on the disk?)"
            )
        else:
            items.append(StoredItem(uid, reward, encoding, body))
    return loaded


def _owner(item: Item, jobs: Mapping[str, JobRecord], last: JobRecord | None) -> tuple[str, str]:
    """Task and job of an item; what it does not say is that of the job that was started last."""
    if item.job is not None:
        known = jobs.get(item.job)
        return item.task or (known.task if known is not None else ""), item.job
    if last is None or item.task not in (None, last.task):
        return item.task or "", ""
    return last.task, last.id


def _group_key(task: str, job: str, instance_id: InstanceId) -> str:
    """Their hash: together they may be too long for an index of PostgreSQL."""
    return hashlib.blake2b(orjson.dumps([task, job, instance_id]), digest_size=16).hexdigest()


def _matching(wanted: Wanted, taken: int) -> tuple[str, list[Any]]:
    """The SQL for what a read asks of groups, and its arguments, which follow so many others."""
    which, values = _also(
        taken,
        ("task = {}", wanted.task),
        ("job IN :texts({})", wanted.jobs),
        ("size = {}", wanted.size),
        ("NOT (task IN :texts({}))", wanted.skip_tasks or None),
    )
    return "state = 'ready'" + which, values


def _also(taken: int, *conditions: tuple[str, Any]) -> tuple[str, list[Any]]:
    """The SQL for further conditions, but for those whose value is None, and their arguments."""
    which, values = "", []
    for condition, value in conditions:
        if value is not None:
            values.append(
                list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            )
            which += " AND " + condition.format(f"${taken + len(values)}")
    return which, values


async def _job(tx: Tx, job: str) -> JobRecord | None:
    rows = await tx.rows("SELECT record FROM jobs WHERE id = $1", job)
    return _decode_job(rows[0][0]) if rows else None


async def _put_job(session: _Session, record: JobRecord) -> None:
    await session.tx.rows(
        "INSERT INTO jobs (id, number, record) VALUES ($1, $2, $3) "
        "ON CONFLICT (id) DO UPDATE SET record = excluded.record",
        *(record.id, record.number, msgspec.json.encode(record).decode()),
    )
    session.count("jobs")


def _replaced(record: JobRecord) -> JobRecord:
    """A job that another one has replaced never goes on: little of its payload is needed."""
    return msgspec.structs.replace(record, payload=remainder(record.payload))


def _decode_job(text: str) -> JobRecord:
    return msgspec.json.decode(text, type=JobRecord)


def _by_reason(totals: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in totals.items() if name.startswith(prefix)}
