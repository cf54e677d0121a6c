"""The store's operations, written once for both databases.

What differs between SQLite and PostgreSQL is in their drivers: how a transaction is run, and a few words of
SQL. `$1` is an argument; `IN :ids($1)` and `IN :texts($1)` take a list of whole numbers or texts.

All changes go through one committer: while a transaction is under way, what is asked for gathers and goes
together into the next (group commit). Only one transaction at a time changes a database, also where several
servers share it: so nothing here has to think of another one. Operations check first and change then: one
that raises leaves nothing behind for the others of its transaction.
"""

import asyncio
import functools
import hashlib
import uuid
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec
import orjson

from rollstream.buffer.groups import StoredItem, drop_reason, judge_rewards
from rollstream.buffer.items import InstanceId, Item, instance_key, plain_item
from rollstream.buffer.store.base import (
    Acked,
    Change,
    Group,
    JobRecord,
    Judged,
    Lease,
    Limits,
    Policy,
    Removal,
    Stats,
    Taken,
    Wanted,
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

P = ParamSpec("P")
T = TypeVar("T")

FORMAT: Final = 1

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, value BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY, number BIGINT NOT NULL, record TEXT NOT NULL, server TEXT, claimed DOUBLE PRECISION);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_number ON jobs (number);
CREATE TABLE IF NOT EXISTS groups (
  id {key}, key TEXT NOT NULL, task TEXT NOT NULL, job TEXT NOT NULL, instance TEXT NOT NULL,
  size BIGINT NOT NULL, n BIGINT NOT NULL, bytes BIGINT NOT NULL, rewards TEXT NOT NULL, failed BIGINT NOT NULL,
  version BIGINT, state TEXT NOT NULL, timed_out BIGINT NOT NULL, line BIGINT NOT NULL,
  updated DOUBLE PRECISION NOT NULL, deadline DOUBLE PRECISION NOT NULL, judged BIGINT NOT NULL,
  lease TEXT, left_out TEXT, reason TEXT, cause TEXT, gone BIGINT);
CREATE UNIQUE INDEX IF NOT EXISTS groups_open ON groups (key) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS groups_due ON groups (deadline) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS groups_unjudged ON groups (task) WHERE state IN ('open', 'full') AND judged < n;
CREATE INDEX IF NOT EXISTS groups_ready ON groups (line, n) WHERE state = 'ready';
CREATE INDEX IF NOT EXISTS groups_ready_of_job ON groups (job, line) WHERE state = 'ready';
CREATE INDEX IF NOT EXISTS groups_ready_of_task ON groups (task, line) WHERE state = 'ready';
CREATE INDEX IF NOT EXISTS groups_of_lease ON groups (lease) WHERE state IN ('ready', 'leased');
CREATE INDEX IF NOT EXISTS groups_quarantined ON groups (id) WHERE state = 'quarantined';
CREATE INDEX IF NOT EXISTS groups_here ON groups (state) WHERE gone IS NULL;
CREATE INDEX IF NOT EXISTS groups_dropped ON groups (gone) WHERE state = 'dropped';
CREATE INDEX IF NOT EXISTS groups_archived ON groups (gone) WHERE gone IS NOT NULL AND bytes > 0;
CREATE INDEX IF NOT EXISTS groups_forgettable ON groups (job, gone) WHERE gone IS NOT NULL AND bytes = 0;
CREATE INDEX IF NOT EXISTS groups_of_job ON groups (job, gone);
CREATE TABLE IF NOT EXISTS items (
  seq {key}, uid TEXT NOT NULL UNIQUE, grp BIGINT NOT NULL, reward DOUBLE PRECISION, encoding TEXT NOT NULL,
  crc BIGINT NOT NULL);
CREATE INDEX IF NOT EXISTS items_of_group ON items (grp);
CREATE TABLE IF NOT EXISTS bodies (seq {key}, body {blob} NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
  id TEXT PRIMARY KEY, consumer TEXT, read_id TEXT, seconds DOUBLE PRECISION NOT NULL,
  deadline DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, groups BIGINT NOT NULL, items BIGINT NOT NULL);
CREATE INDEX IF NOT EXISTS leases_due ON leases (deadline) WHERE state = 'out';
CREATE INDEX IF NOT EXISTS leases_of_read ON leases (read_id) WHERE state = 'out' AND read_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS leases_ended ON leases (deadline) WHERE state <> 'out';
"""
"""A lease is out, acked, or back (nacked or expired). `key` of a group stands for its task, job and instance."""

_GROUP: Final = (
    "id, task, job, instance, size, n, bytes, rewards, failed, version, state, timed_out, line, updated, reason, "
    "cause, gone"
)
_LEASED: Final = "state IN ('ready', 'leased') AND state = 'leased'"
"""The first part is the condition of the index, which SQLite wants to see as it stands there."""

_SLICE: Final = 256
"""Groups that a sweep or a drop works off in one transaction: some milliseconds."""

_LOOKS: Final = 64
"""A read that passes over groups (of an instance that it has, too old ones) looks so often for more."""

_CAUSE_CHARS: Final = 8_000
"""Of a traceback, its end."""

_COMMIT_BYTES: Final = 64 * 2**20
"""Of items in one transaction, unless one request alone has more."""

_LEASES_KEPT_S: Final = 7 * 86_400.0
"""An ended lease is known so long: a trainer may ack again from an old checkpoint."""


class Tx(Protocol):
    """A transaction, or a look at the database."""

    now: float
    """The store's clock, in seconds."""

    async def rows(self, sql: str, *arguments: Any) -> list[Any]: ...
    async def run(self, sql: str, *arguments: Any) -> int:
        """How many rows it changed."""
        ...

    async def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None: ...


class Driver(Protocol):
    """A database."""

    async def open(self, schema: str) -> None: ...
    async def close(self) -> None: ...
    async def transaction(self, work: Callable[[Tx], Awaitable[T]]) -> T: ...
    async def read(self, work: Callable[[Tx], Awaitable[T]]) -> T: ...
    async def disk_bytes(self) -> int: ...
    async def tidy(self) -> None:
        """Gives disk space back, when there is nothing else to do."""
        ...


class _Row(msgspec.Struct, gc=False):
    """A group while a transaction changes it."""

    id: int
    key: str
    task: str
    job: str
    instance: str
    size: int
    n: int
    bytes: int
    rewards: list[float | None]
    failed: int
    version: int | None
    state: str
    timed_out: bool
    line: int
    updated: float
    deadline: float
    judged: int
    reason: str | None = None
    gone: int | None = None


_ROW: Final = (
    "id, key, task, job, instance, size, n, bytes, rewards, failed, version, state, timed_out, line, updated, "
    "deadline, judged, reason, gone"
)


class _Jobs(NamedTuple):
    """Replaced as a whole: SQLite's threads read it."""

    version: int
    by_id: Mapping[str, JobRecord]
    last: JobRecord | None


_SAVE: Final = (
    f"INSERT INTO groups ({_ROW}) VALUES ({', '.join(f'${n + 1}' for n in range(len(_Row.__struct_fields__)))}) "
    "ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(
        f"{column} = excluded.{column}"
        for column in _Row.__struct_fields__[_Row.__struct_fields__.index("n") :]
    )
)
"""What comes before `n` never changes."""


class _Session:
    """What the operations of one transaction share."""

    def __init__(self, tx: Tx, totals: dict[str, int]) -> None:
        self.tx = tx
        self.totals = defaultdict(int, totals)
        self.before = totals
        self.ready: Counter[tuple[str, str]] = Counter()
        self.unjudged = False
        self.room = False
        self.dropped: Counter[str] = Counter()

    def count(self, name: str, by: int = 1) -> int:
        """The total afterwards."""
        self.totals[name] += by
        return self.totals[name]


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
        self.changed: Callable[[Change], None] = lambda change: None
        self.items_written = 0

    async def open(self) -> None:
        """Raises `StorageError`, `RunDirectoryError`."""
        await self._driver.open(SCHEMA)
        await self._commit(_check_format)

    async def close(self) -> None:
        """Waits for what is under way."""
        while self._committing is not None:
            await asyncio.wait({self._committing})
        await self._driver.close()

    @_change
    async def check_writable(self, session: _Session) -> None:
        """Raises `StorageError` where nothing can be written now."""
        session.count("checks")

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
                await self._commit_some()
        finally:
            self._committing = None

    async def _commit_some(self) -> None:
        some, size = [self._waiting.popleft()], 0
        while self._waiting and size < _COMMIT_BYTES:
            op = self._waiting[0][0]
            if not callable(op):
                size += sum(len(item.body) for item in op)
            some.append(self._waiting.popleft())
        try:
            await self._transact(some)
        except Exception as error:
            # With a lost database nobody knows what was done, and trying each takes long.
            lost = isinstance(error, StorageError) and not isinstance(error, StorageFullError)
            if len(some) == 1 or lost:
                for _, future in some:
                    if not future.done():
                        future.set_exception(error)
                return
            for one in some:  # one of them may be what cannot be stored: the others must not fail with it
                try:
                    await self._transact([one])
                except Exception as own:
                    if not one[1].done():
                        one[1].set_exception(own)

    async def _transact(self, some: Sequence[tuple[Sequence[Item] | _Op, asyncio.Future[Any]]]) -> None:
        async def work(tx: Tx) -> tuple[_Session, list[Any]]:
            totals = dict(await tx.rows("SELECT name, value FROM totals"))
            session = _Session(tx, totals)
            await self._refresh_jobs(tx, totals)
            results: list[Any] = [None] * len(some)
            writes = [(at, op) for at, (op, _) in enumerate(some) if not callable(op)]
            if writes:
                for (at, _), result in zip(
                    writes, await self._write(session, [w for _, w in writes]), strict=True
                ):
                    results[at] = result
            for at, (op, _) in enumerate(some):
                if callable(op):
                    try:
                        results[at] = await op(session)
                    except RollstreamError as error:
                        if isinstance(error, StorageError):
                            raise
                        results[at] = error
            if session.ready:
                session.count("readied")
            changed = [(k, v) for k, v in session.totals.items() if session.before.get(k) != v]
            if changed:
                await tx.many(
                    "INSERT INTO totals (name, value) VALUES ($1, $2) "
                    "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    changed,
                )
            return session, results

        session, results = await self._driver.transaction(work)
        elsewhere = session.before.get("readied", 0) > self._readied
        self.items_written = session.totals["items_written"]
        self._readied = session.totals["readied"]
        for (_, future), result in zip(some, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        unjudged = session.unjudged or elsewhere
        if session.ready or unjudged or session.room or session.dropped:
            self.changed(Change(session.ready, elsewhere, unjudged, session.room, session.dropped))

    # -- writing

    async def write(self, items: Sequence[Item]) -> list[bool]:
        """Stores all items or none; which of them were new. Raises `BufferFullError`."""
        result: list[bool] = await self._commit(items)
        return result

    @_look
    async def known(self, tx: Tx, uids: Sequence[str]) -> list[bool]:
        found = {uid for (uid,) in await tx.rows("SELECT uid FROM items WHERE uid IN :texts($1)", list(uids))}
        return [uid in found for uid in uids]

    async def _write(
        self, session: _Session, writes: Sequence[Sequence[Item]]
    ) -> list[list[bool] | RollstreamError]:
        """Stores items; a write that does not fit under the limit gets its error in place of a result."""
        tx, totals = session.tx, session.totals
        uids = [item.uid for items in writes for item in items]
        known = {uid for (uid,) in await tx.rows("SELECT uid FROM items WHERE uid IN :texts($1)", uids)}
        results: list[list[bool] | RollstreamError] = []
        new: list[tuple[str, str, str, Item]] = []
        last = self.last_job
        for items in writes:
            fresh, mine = [], set()
            for item in items:
                fresh.append(item.uid not in known and item.uid not in mine)
                mine.add(item.uid)
            here = totals["items_written"] - totals["items_left"] + len(new)
            if here + sum(fresh) > self._limits.items and any(fresh):
                results.append(
                    BufferFullError(f"the buffer holds {here} items, of at most {self._limits.items}")
                )
                continue
            known |= mine
            results.append(fresh)
            for item, is_new in zip(items, fresh, strict=True):
                if is_new:
                    task, job = _owner(item, self.known_jobs, last)
                    name = orjson.dumps([task, job, item.instance_id])  # too long for an index of PostgreSQL
                    key = hashlib.blake2b(name, digest_size=16).hexdigest()
                    new.append((key, task, job, item))
        if new:
            await self._add(session, new)
        return results

    async def _add(self, session: _Session, new: Sequence[tuple[str, str, str, Item]]) -> None:
        tx = session.tx
        keys = list({key for key, _, _, _ in new})
        found = await tx.rows(f"SELECT {_ROW} FROM groups WHERE state = 'open' AND key IN :texts($1)", keys)
        open_groups = {row.key: row for row in map(_row_of, found)}
        touched: dict[int, _Row] = {}
        last = self.last_job
        items, bodies = [], []
        for key, task, job, item in new:
            settings = self._policy.settings(task, self.known_jobs.get(job))
            own_judge = self._policy.has_own_judge(task)
            row = open_groups.get(key)
            if row is None:
                row = open_groups[key] = _Row(
                    session.count("groups"), key, task, job, instance_key(item.instance_id),
                    settings.group_size, 0, 0, [], 0, None, "open", False, 0, 0.0, 0.0, 0,
                )  # fmt: skip
            touched[row.id] = row
            if last is not None and job == last.id:
                session.count("items_of_job")
            seq = session.count("items_written")
            reward = None if item.failed else item.reward
            row.n += 1
            row.bytes += len(item.body)
            row.rewards.append(reward)
            row.failed += item.failed
            if item.version is not None:
                row.version = item.version if row.version is None else min(row.version, item.version)
            row.line, row.updated, row.deadline = seq, tx.now, tx.now + settings.group_timeout_seconds
            items.append((seq, item.uid, row.id, reward, item.encoding, zlib.crc32(item.body)))
            bodies.append((seq, item.body))
            if own_judge:
                session.unjudged = True
                row.state = "full" if row.n >= row.size else "open"
            else:
                row.judged = row.n
                self._judge_by_default(session, row)
            if row.state != "open":
                del open_groups[key]
        await tx.many(
            "INSERT INTO items (seq, uid, grp, reward, encoding, crc) VALUES ($1, $2, $3, $4, $5, $6)", items
        )
        await tx.many("INSERT INTO bodies (seq, body) VALUES ($1, $2)", bodies)
        await self._save(session, touched.values())

    def _judge_by_default(self, session: _Session, row: _Row) -> None:
        settings = self._policy.settings(row.task, self.known_jobs.get(row.job))
        if settings.group_size != row.size:  # the server was started with another --group-size meanwhile
            settings = replace(settings, group_size=row.size)
        verdict = judge_rewards(row.rewards, settings, timed_out=row.timed_out)
        if verdict.valid:
            row.state = "ready"
            session.ready[row.task, row.job] += 1
        elif verdict.finished:
            reason = drop_reason(row.rewards, settings, failed=row.failed, timed_out=row.timed_out)
            self._leave(session, row, reason)

    def _leave(self, session: _Session, row: _Row, reason: str) -> None:
        row.state, row.reason, row.gone = "dropped", reason, session.count("left")
        session.count("items_left", row.n)
        session.count("archive_bytes", row.bytes)
        session.count(f"items_dropped:{reason}", row.n)
        session.count(f"groups_dropped:{reason}")
        session.dropped[reason] += 1
        session.room = True

    async def _save(self, session: _Session, rows: Collection[_Row]) -> None:
        # In order of their age: of one key only one group may be open.
        await session.tx.many(_SAVE, [_values(row) for row in sorted(rows, key=lambda row: row.id)])

    # -- reading

    @_change
    async def take(self, session: _Session, wanted: Wanted) -> Taken:
        """Leases groups, first in line first."""
        chosen, stale = await self._choose(session.tx, wanted)
        if stale and wanted.drop_stale:
            await self._drop(session, stale, "stale")
        if not chosen or (wanted.exact and len(chosen) < wanted.groups):
            passed = len(stale) if wanted.drop_stale else await self._count_stale(session.tx, wanted)
            return Taken(lease=None, groups=[], available=len(chosen), stale=passed)
        lease = uuid.uuid4().hex
        ids = [group.id for group in chosen]
        await session.tx.run(
            "INSERT INTO leases (id, consumer, read_id, seconds, deadline, state, groups, items) "
            "VALUES ($1, $2, $3, $4, $5, 'out', $6, $7)",
            *(lease, wanted.consumer, wanted.read_id, wanted.seconds, session.tx.now + wanted.seconds),
            *(len(ids), sum(group.n for group in chosen)),
        )
        await session.tx.run(
            "UPDATE groups SET state = 'leased', lease = $1, left_out = NULL WHERE id IN :ids($2)",
            lease,
            ids,
        )
        given = Lease(
            id=lease, consumer=wanted.consumer, seconds=wanted.seconds, left_s=wanted.seconds, groups=ids
        )
        return Taken(lease=given, groups=chosen, available=len(chosen), stale=len(stale))

    async def _choose(self, tx: Tx, wanted: Wanted) -> tuple[list[Group], list[int]]:
        """Groups for a read, first in line first, and those that are to be dropped as too old for it."""
        chosen: list[Group] = []
        stale: list[int] = []
        seen = set(wanted.without)
        places: dict[str | None, int] = dict.fromkeys((None,) if wanted.jobs is None else wanted.jobs, 0)
        which, values = _matching(wanted, 2)
        if wanted.min_version is not None and not wanted.drop_stale:
            values.append(wanted.min_version)
            which += f" AND (version IS NULL OR version >= ${len(values) + 2})"
        limit = min(wanted.groups + 16, 4096)
        for _ in range(_LOOKS):
            found: list[Group] = []
            for job, place in places.items():
                of_job = "" if job is None else f" AND job = ${len(values) + 3}"
                rows = await tx.rows(
                    f"SELECT {_GROUP} FROM groups WHERE state = 'ready' AND line > $1{which}{of_job} "
                    "ORDER BY line LIMIT $2",
                    *(place, limit, *values, *(() if job is None else (job,))),
                )
                found += map(_group_of, rows)
            # A job that has more than this look saw is not looked past: the line's order holds over all jobs.
            ends = [max((g.line for g in found if job in (None, g.job)), default=0) for job in places
                    if sum(job in (None, g.job) for g in found) == limit]  # fmt: skip
            end = min(ends, default=None)
            for group in sorted(found, key=lambda one: one.line):
                if len(chosen) == wanted.groups or (end is not None and group.line > end):
                    break
                if (
                    wanted.min_version is not None
                    and (group.version or 0) < wanted.min_version
                    and (group.version is not None)
                ):
                    stale.append(group.id)
                elif not (wanted.distinct and group.instance_id in seen):
                    seen.add(group.instance_id)
                    chosen.append(group)
            if len(chosen) == wanted.groups or end is None:
                break
            places, limit = dict.fromkeys(places, end), 1024
        return chosen, stale

    async def _count_stale(self, tx: Tx, wanted: Wanted) -> int:
        if wanted.min_version is None:
            return 0
        which, values = _matching(wanted, 1)
        if wanted.jobs is not None:
            values.append(list(wanted.jobs))
            which += f" AND job IN :texts(${len(values) + 1})"
        rows = await tx.rows(
            f"SELECT count(*) FROM groups WHERE state = 'ready' AND version < $1{which}",
            *(wanted.min_version, *values),
        )
        return int(rows[0][0])

    @_look
    async def look(self, tx: Tx, wanted: Wanted) -> list[Group]:
        """What `take` would lease."""
        return (await self._choose(tx, wanted))[0]

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
        left_out: Mapping[int, Sequence[str]],
    ) -> None:
        """Takes groups out of a lease; notes uids of items that others are handed out without.

        Raises:
            ConflictError: The lease ended meanwhile.
        """
        tx = session.tx
        if (await self._lease_rows(tx, [lease]))[lease][0] != "out":
            raise ConflictError(f"lease {lease} ended before all of its groups were finished")
        rows = await tx.rows(
            f"SELECT {_ROW} FROM groups WHERE state = 'leased' AND lease = $1 AND id IN :ids($2)",
            *(lease, [one.group for one in removals]),
        )
        removed = {row.id: row for row in map(_row_of, rows)}
        await self._remove(session, removed, removals)
        if removed:
            await tx.run(
                "UPDATE leases SET groups = groups - $2, items = items - $3 WHERE id = $1",
                *(lease, len(removed), sum(row.n for row in removed.values())),
            )
        if left_out:
            await tx.many(
                "UPDATE groups SET left_out = $3 WHERE id = $1 AND state = 'leased' AND lease = $2",
                [(group, lease, orjson.dumps(list(uids)).decode()) for group, uids in left_out.items()],
            )

    async def _remove(self, session: _Session, rows: Mapping[int, _Row], removals: Sequence[Removal]) -> None:
        causes = []
        for one in removals:
            if (row := rows.get(one.group)) is None:
                continue
            if one.cause is None:
                self._leave(session, row, one.reason)
            else:
                row.state, row.reason = "quarantined", one.reason
                causes.append((row.id, _storable(one.cause[-_CAUSE_CHARS:])))
        await self._save(session, list(rows.values()))
        if causes:
            await session.tx.many("UPDATE groups SET cause = $2 WHERE id = $1", causes)

    @_change
    async def ack(self, session: _Session, leases: Sequence[str], *, told: int | None = None) -> Acked:
        """The groups leave: of all leases, or of none. `told`: see `unread_drops`.

        Raises:
            NotFoundError: There is no such lease.
            ConflictError: Its groups went back, and some are not there any more.
        """
        tx = session.tx
        states = await self._lease_rows(tx, leases)
        left = [lease for lease in leases if states[lease][0] != "acked"]
        rows = await tx.rows(
            "SELECT id, n, bytes, left_out, lease FROM groups WHERE state IN ('ready', 'leased') "
            "AND lease IN :texts($1) ORDER BY line",
            left,
        )
        have = Counter(row[4] for row in rows)
        for lease in left:
            if have[lease] != states[lease][1]:
                raise ConflictError(
                    f"lease {lease} ended, and {states[lease][1] - have[lease]} of its groups are not there "
                    "any more: what was read by it must not count"
                )
        if told is not None:
            session.totals["told"] = max(told, session.totals["told"])
        if rows:
            session.room = True
            await tx.many(
                "UPDATE groups SET state = 'delivered', gone = $2 WHERE id = $1",
                [(row[0], session.count("left")) for row in rows],
            )
        items = sum(row[1] for row in rows)
        out = sum(len(orjson.loads(row[3])) for row in rows if row[3])
        session.count("items_left", items)
        session.count("items_delivered", items - out)
        session.count("groups_delivered", len(rows))
        session.count("archive_bytes", sum(row[2] for row in rows))
        if out:
            session.count("items_dropped:filtered", out)
        await tx.run("UPDATE leases SET state = 'acked' WHERE id IN :texts($1)", left)
        return Acked(
            sum(groups for _, groups, _ in states.values()),
            sum(n for _, _, n in states.values()),
            not left,
        )

    @_change
    async def nack(self, session: _Session, lease: str) -> None:
        """The groups go back to their places. Raises `NotFoundError`, `ConflictError`."""
        (state, _, _) = (await self._lease_rows(session.tx, [lease]))[lease]
        if state == "acked":
            raise ConflictError(f"lease {lease} was acked")
        if state == "out":
            await self._give_back(session, [lease])

    @_change
    async def extend(self, session: _Session, lease: str, seconds: float) -> None:
        """The lease ends that much from now. Raises `NotFoundError`, `ConflictError`."""
        (state, _, _) = (await self._lease_rows(session.tx, [lease]))[lease]
        if state != "out":
            raise ConflictError(f"lease {lease} has ended")
        await session.tx.run(
            "UPDATE leases SET deadline = $2, seconds = $3 WHERE id = $1",
            lease,
            session.tx.now + seconds,
            seconds,
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
        return await self._give_back(session, [lease for (lease,) in rows])

    async def _give_back(self, session: _Session, leases: list[str]) -> int:
        """Groups go back to their places. They still know their lease, so a late ack finds them."""
        rows = await session.tx.rows(
            f"SELECT task, job FROM groups WHERE {_LEASED} AND lease IN :texts($1)", leases
        )
        session.ready.update((task, job) for task, job in rows)
        count = await session.tx.run(
            f"UPDATE groups SET state = 'ready' WHERE {_LEASED} AND lease IN :texts($1)", leases
        )
        await session.tx.run(
            "UPDATE leases SET state = 'back', deadline = $2 WHERE id IN :texts($1)", leases, session.tx.now
        )
        return count

    async def _lease_rows(self, tx: Tx, leases: Sequence[str]) -> dict[str, tuple[str, int, int]]:
        """State, groups and items of each. Raises `NotFoundError`."""
        rows = await tx.rows(
            "SELECT id, state, groups, items FROM leases WHERE id IN :texts($1)", list(leases)
        )
        found = {row[0]: (row[1], row[2], row[3]) for row in rows}
        for lease in leases:
            if lease not in found:
                raise NotFoundError(f"there is no lease {lease!r:.100}")
        return found

    @_look
    async def leases(self, tx: Tx, consumer: str | None = None) -> list[Lease]:
        """Those that are out."""
        rows = await tx.rows(
            "SELECT id, consumer, seconds, deadline FROM leases WHERE state = 'out' ORDER BY deadline, id"
        )
        groups = defaultdict(list)
        for group, lease in await tx.rows(
            f"SELECT id, lease FROM groups WHERE {_LEASED} AND lease IS NOT NULL ORDER BY line"
        ):
            groups[lease].append(group)
        return [
            Lease(id=id_, consumer=owner, seconds=seconds, left_s=max(0.0, end - tx.now), groups=groups[id_])
            for id_, owner, seconds, end in rows
            if consumer in (None, owner)
        ]

    # -- judging and dropping

    async def unjudged(self, tasks: Sequence[str], limit: int) -> list[Group]:
        return await self._groups(
            "state IN ('open', 'full') AND judged < n AND task IN :texts($1) ORDER BY line LIMIT $2",
            list(tasks),
            limit,
        )

    @_change
    async def judge(self, session: _Session, judged: Sequence[Judged], removals: Sequence[Removal]) -> None:
        ids = [*(one.group for one in judged), *(one.group for one in removals)]
        rows = await session.tx.rows(
            f"SELECT {_ROW} FROM groups WHERE state IN ('open', 'full') AND id IN :ids($1)", ids
        )
        groups = {row.id: row for row in map(_row_of, rows)}
        removed = {one.group for one in removals}
        await self._remove(session, {k: row for k, row in groups.items() if k in removed}, removals)
        for one in judged:
            row = groups.get(one.group)
            if row is None or row.n != one.n:
                continue
            row.judged = row.n
            if one.valid:
                row.state = "ready"
                session.ready[row.task, row.job] += 1
            elif one.finished or row.state == "full":
                self._leave(session, row, "timed_out" if row.timed_out else "not_valid")
        await self._save(session, [row for k, row in groups.items() if k not in removed])

    @_change
    async def drop(self, session: _Session, groups: Sequence[int], reason: str) -> int:
        """Only quarantined ones."""
        return await self._drop(session, groups, reason, "quarantined")

    async def _drop(self, session: _Session, groups: Sequence[int], reason: str, state: str = "ready") -> int:
        rows = await session.tx.rows(
            f"SELECT {_ROW} FROM groups WHERE state = '{state}' AND id IN :ids($1)", list(groups)
        )
        for row in (found := sorted(map(_row_of, rows), key=lambda one: one.line)):
            self._leave(session, row, reason)
        await self._save(session, found)
        return len(found)

    async def drop_job(self, job: str, reason: str) -> int:
        async def op(session: _Session) -> int:
            rows = await session.tx.rows(
                f"SELECT {_ROW} FROM groups WHERE job = $1 AND gone IS NULL AND state IN ('open', 'full', 'ready') "
                "LIMIT $2",
                *(job, _SLICE),
            )
            for row in (found := sorted(map(_row_of, rows), key=lambda one: one.line)):
                self._leave(session, row, reason)
            await self._save(session, found)
            return len(found)

        dropped = 0
        while some := await self._commit(op):
            dropped += some
        return dropped

    @_change
    async def retry(self, session: _Session, groups: Sequence[int] | None) -> list[int]:
        """Quarantined groups (None: all) are judged or handed out again; which ones."""
        tx, asked = session.tx, None if groups is None else set(groups)
        own, judged, orphans = [], [], []
        for id_, task, job, is_judged in await tx.rows(
            "SELECT id, task, job, judged = n FROM groups WHERE state = 'quarantined'"
        ):
            if asked is not None and id_ not in asked:
                continue
            if self._policy.has_own_judge(task):
                own.append(id_)
            elif is_judged:
                judged.append(id_)
                session.ready[task, job] += 1
            else:
                orphans.append(id_)
        session.unjudged = session.unjudged or bool(own)
        back = own + judged + orphans
        await tx.run("UPDATE groups SET lease = NULL, reason = NULL, cause = NULL WHERE id IN :ids($1)", back)
        await tx.run("UPDATE groups SET state = 'full', judged = 0 WHERE id IN :ids($1)", own)
        await tx.run("UPDATE groups SET state = 'ready' WHERE id IN :ids($1)", judged)
        await self._judge_orphans(session, orphans)
        return back

    async def _judge_orphans(self, session: _Session, ids: Sequence[int]) -> None:
        """By the default rule, of tasks whose hook failed on them and is gone. Short ones wait for more items."""
        if not ids:
            return
        rows = await session.tx.rows(f"SELECT {_ROW} FROM groups WHERE id IN :ids($1)", ids)
        found = sorted(map(_row_of, rows), key=lambda one: one.line)
        keys = [row.key for row in found]
        open_keys = {
            key
            for (key,) in await session.tx.rows(
                "SELECT key FROM groups WHERE state = 'open' AND key IN :texts($1)", keys
            )
        }
        for row in found:
            row.state, row.judged = "open", row.n
            row.timed_out = row.timed_out or row.key in open_keys  # its items go into the other group
            self._judge_by_default(session, row)
            if row.state == "open":
                open_keys.add(row.key)
        await self._save(session, found)

    # -- time

    async def sweep(self) -> int:
        """Expires leases, times groups out, trims the archive. How much it did; 0: nothing is due."""

        async def look(tx: Tx) -> tuple[dict[str, int], bool]:
            totals = dict(await tx.rows("SELECT name, value FROM totals"))
            await self._refresh_jobs(tx, totals)
            return totals, bool(
                totals.get("archive_bytes", 0) > self._limits.archive_bytes
                or totals.get("items_remembered", 0) > self._limits.remembered_uids
                or await tx.rows(
                    "SELECT id FROM leases WHERE state = 'out' AND deadline < $1 LIMIT 1", tx.now
                )
                or await tx.rows(
                    "SELECT id FROM groups WHERE state = 'open' AND deadline < $1 LIMIT 1", tx.now
                )
                or await tx.rows(
                    "SELECT id FROM leases WHERE state <> 'out' AND deadline < $1 LIMIT 1",
                    tx.now - _LEASES_KEPT_S,
                )
                or await self._without_judge(tx)
            )

        totals, due = await self._driver.read(look)
        self.items_written = max(self.items_written, totals.get("items_written", 0))
        if totals.get("readied", 0) > self._readied:  # another server wrote
            self._readied = totals["readied"]
            self.changed(Change(elsewhere=True, unjudged=True))
        if not due:
            await self._driver.tidy()
            return 0
        return await self._commit(self._sweep)  # type: ignore[no-any-return]

    async def _sweep(self, session: _Session) -> int:
        tx = session.tx
        rows = await tx.rows(
            "SELECT id FROM leases WHERE state = 'out' AND deadline < $1 ORDER BY deadline LIMIT $2",
            *(tx.now, _SLICE),
        )
        done = len(rows)
        if rows:
            await self._give_back(session, [lease for (lease,) in rows])
        rows = await tx.rows(
            f"SELECT {_ROW} FROM groups WHERE state = 'open' AND deadline < $1 ORDER BY deadline LIMIT $2",
            *(tx.now, _SLICE),
        )
        for row in (late := sorted(map(_row_of, rows), key=lambda one: (one.deadline, one.id))):
            row.timed_out = True
            if self._policy.has_own_judge(row.task):
                row.state, row.judged = "full", 0
                session.unjudged = True
            else:
                self._judge_by_default(session, row)
        rows = await tx.rows(
            f"SELECT {_ROW} FROM groups WHERE state IN ('open', 'full') AND judged < n AND task IN :texts($1) "
            "ORDER BY id LIMIT $2",
            *(await self._without_judge(tx), _SLICE),
        )
        known = {row.id for row in late}
        for row in (orphans := [row for row in map(_row_of, rows) if row.id not in known]):
            row.judged = row.n
            row.timed_out = row.timed_out or row.state == "full"  # nothing more comes into it
            self._judge_by_default(session, row)
        late += orphans
        await self._save(session, late)
        await tx.run("DELETE FROM leases WHERE state <> 'out' AND deadline < $1", tx.now - _LEASES_KEPT_S)
        return done + len(late) + await self._trim(session) + await self._forget(session)

    async def _without_judge(self, tx: Tx) -> list[str]:
        """Tasks with groups that wait for a hook which their generator file had, and has no more."""
        rows = await tx.rows(
            "SELECT DISTINCT task FROM groups WHERE state IN ('open', 'full') AND judged < n"
        )
        return [task for (task,) in rows if not self._policy.has_own_judge(task)]

    async def _trim(self, session: _Session) -> int:
        """Deletes bodies of what left first, down to the archive's bound."""
        over = session.totals["archive_bytes"] - self._limits.archive_bytes
        if over <= 0:
            return 0
        last = self.last_job
        ids: list[int] = []
        for group, n, size, job in await session.tx.rows(
            "SELECT id, n, bytes, job FROM groups WHERE gone IS NOT NULL AND bytes > 0 ORDER BY gone LIMIT $1",
            _SLICE,
        ):
            if over <= 0:
                break
            over -= size
            session.count("archive_bytes", -size)
            if last is None or job != last.id:
                session.count("items_remembered", n)
            ids.append(group)
        await session.tx.run(
            "DELETE FROM bodies WHERE seq IN (SELECT seq FROM items WHERE grp IN :ids($1))", ids
        )
        await session.tx.run("UPDATE groups SET bytes = 0 WHERE id IN :ids($1)", ids)
        return len(ids)

    async def _forget(self, session: _Session) -> int:
        """Forgets uids of what left first, beyond their bound: of no job, and of jobs before the last one."""
        over = session.totals["items_remembered"] - self._limits.remembered_uids
        last = self.last_job
        ids: list[int] = []
        for job in await self._forgettable_jobs(session.tx) if over > 0 else ():
            if over <= 0 or len(ids) >= _SLICE:
                break
            if last is not None and job == last.id:
                continue
            for group, n in await session.tx.rows(
                "SELECT id, n FROM groups WHERE gone IS NOT NULL AND bytes = 0 AND job = $1 ORDER BY gone LIMIT $2",
                *(job, _SLICE - len(ids)),
            ):
                if over <= 0:
                    break
                over -= n
                session.count("items_remembered", -n)
                ids.append(group)
        if ids:
            await session.tx.run("DELETE FROM items WHERE grp IN :ids($1)", ids)
            await session.tx.run("DELETE FROM groups WHERE id IN :ids($1)", ids)
        return len(ids)

    async def _forgettable_jobs(self, tx: Tx) -> list[str]:
        """The oldest jobs with groups to forget, enough for a slice; groups may name a job that nobody started."""
        first = "SELECT min(job) FROM groups WHERE gone IS NOT NULL AND bytes = 0"
        rows = await tx.rows(
            f"WITH RECURSIVE names (job) AS ({first} UNION ALL "
            f"SELECT ({first} AND groups.job > names.job) FROM names WHERE names.job IS NOT NULL) "
            "SELECT names.job FROM names LEFT JOIN jobs ON jobs.id = names.job WHERE names.job IS NOT NULL "
            "ORDER BY coalesce(jobs.number, -1), names.job LIMIT $1",
            _SLICE + 1,
        )
        return [job for (job,) in rows]

    # -- jobs

    @property
    def known_jobs(self) -> Mapping[str, JobRecord]:
        """By id, as of the last transaction."""
        return self._jobs.by_id

    @property
    def last_job(self) -> JobRecord | None:
        """The job that was started last."""
        return self._jobs.last

    async def _refresh_jobs(self, tx: Tx, totals: Mapping[str, int] | None = None) -> None:
        if totals is None:
            totals = dict(await tx.rows("SELECT name, value FROM totals WHERE name = 'jobs'"))
        if (version := totals.get("jobs", 0)) <= self._jobs.version:
            return
        rows = await tx.rows("SELECT record FROM jobs ORDER BY number")
        jobs = {one.id: one for one in (_decode_job(text) for (text,) in rows)}
        if version > self._jobs.version:  # a slow look must not bring back what a transaction has replaced
            self._jobs = _Jobs(version, jobs, max(jobs.values(), key=lambda one: one.number, default=None))

    async def save_job(self, record: JobRecord) -> JobRecord:
        """As it is stored: `number` is given to a new record that has 0, and `expected` stays once it is known."""

        async def op(session: _Session) -> JobRecord:
            tx = session.tx
            newest = await tx.rows("SELECT record FROM jobs ORDER BY number DESC LIMIT 1")
            before = _decode_job(newest[0][0]) if newest else None
            known = await self._job(tx, record.id)
            top = before.number if before is not None else 0
            stored = msgspec.structs.replace(
                record,
                number=known.number if known is not None else record.number or top + 1,
                expected=known.expected if known is not None and record.expected is None else record.expected,
            )
            stored = stored if stored.number >= top else _replaced(stored)
            await self._put_job(session, stored)
            if before is None or before.number < stored.number:
                session.totals["items_of_job"] = 0
                if before is not None:
                    await self._put_job(session, _replaced(before))
                    rows = await tx.rows(
                        "SELECT sum(n) FROM groups WHERE gone IS NOT NULL AND bytes = 0 AND job = $1",
                        before.id,
                    )
                    session.count("items_remembered", int(rows[0][0] or 0))
            return stored

        stored: JobRecord = await self._commit(op)
        await self._driver.read(self._refresh_jobs)
        return stored

    async def expect(self, job: str, items: int) -> None:
        """Sets `expected` of a job, and nothing else. Raises `NotFoundError`."""

        async def op(session: _Session) -> None:
            record = await self._job(session.tx, job)
            if record is None:
                raise NotFoundError(f"there is no job {job!r:.100}")
            await self._put_job(session, msgspec.structs.replace(record, expected=items))

        await self._commit(op)
        await self._driver.read(self._refresh_jobs)

    async def _job(self, tx: Tx, job: str) -> JobRecord | None:
        rows = await tx.rows("SELECT record FROM jobs WHERE id = $1", job)
        return _decode_job(rows[0][0]) if rows else None

    async def _put_job(self, session: _Session, record: JobRecord) -> None:
        await session.tx.run(
            "INSERT INTO jobs (id, number, record) VALUES ($1, $2, $3) "
            "ON CONFLICT (id) DO UPDATE SET record = excluded.record",
            *(record.id, record.number, msgspec.json.encode(record).decode()),
        )
        session.count("jobs")

    async def live_jobs(self) -> list[JobRecord]:
        """The last one, and those that run, oldest first. Records are read only when one has changed."""
        await self._driver.read(self._refresh_jobs)
        jobs = self._jobs
        return [one for one in jobs.by_id.values() if one is jobs.last or one.state == "running"]

    @_look
    async def jobs(self, tx: Tx) -> list[JobRecord]:
        return [_decode_job(text) for (text,) in await tx.rows("SELECT record FROM jobs ORDER BY number")]

    @_change
    async def claim_job(self, session: _Session, job: str, server: str, stale_after_s: float) -> bool:
        now = session.tx.now
        return bool(
            await session.tx.run(
                "UPDATE jobs SET server = $2, claimed = $3 WHERE id = $1 "
                "AND (server IS NULL OR server = $2 OR claimed < $4)",
                *(job, server, now, now - stale_after_s),
            )
        )

    @_look
    async def finished(self, tx: Tx, job: str) -> list[InstanceId]:
        """One entry for each group that is complete, or timed out."""
        rows = await tx.rows(
            "SELECT instance FROM groups WHERE job = $1 AND state <> 'open' ORDER BY id", job
        )
        return [orjson.loads(text) for (text,) in rows]

    @_look
    async def has_groups(self, tx: Tx, job: str) -> bool:
        return bool(await tx.rows("SELECT id FROM groups WHERE job = $1 AND gone IS NULL LIMIT 1", job))

    # -- looking

    @_look
    async def _groups(self, tx: Tx, which: str, *arguments: Any) -> list[Group]:
        return list(map(_group_of, await tx.rows(f"SELECT {_GROUP} FROM groups WHERE {which}", *arguments)))

    async def groups(
        self,
        *,
        state: str | None = None,
        task: str | None = None,
        job: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[Group]:
        which, arguments = ["id > $1"], [after]
        for column, value in (("state", state), ("task", task), ("job", job)):
            if value is not None:
                arguments.append(value)  # type: ignore[arg-type]
                which.append(f"{column} = ${len(arguments)}")
        arguments.append(limit)
        return await self._groups(f"{' AND '.join(which)} ORDER BY id LIMIT ${len(arguments)}", *arguments)

    async def group(self, group: int) -> Group | None:
        found = await self._groups("id = $1", group)
        return found[0] if found else None

    async def group_with_items(self, group: int) -> dict[str, Any] | None:
        """`group`, `items` as they were written, and a `problem` where these cannot be read."""
        found = await self.group(group)
        if found is None:
            return None
        items = (await self.load([group]))[group]
        if isinstance(items, str):
            return {"group": found, "items": [], "problem": items}
        return {"group": found, "items": [plain_item(one.body, one.encoding) for one in items]}

    async def dropped(self, after: int, limit: int) -> list[Group]:
        """Groups that left undelivered, in the order in which they left, after a `left`."""
        return await self._groups("state = 'dropped' AND gone > $1 ORDER BY gone LIMIT $2", after, limit)

    @_look
    async def unread_drops(
        self, tx: Tx, task: str | None, jobs: Sequence[str] | None, limit: int
    ) -> tuple[list[Group], int]:
        """What was dropped since a trainer on slime's wire was told last, and what `ack` takes as `told`."""
        totals = dict(await tx.rows("SELECT name, value FROM totals"))
        rows = await tx.rows(
            f"SELECT {_GROUP} FROM groups WHERE state = 'dropped' AND gone > $1 ORDER BY gone LIMIT $2",
            *(totals.get("told", 0), limit),
        )
        groups = list(map(_group_of, rows))
        told = groups[-1].left if len(groups) == limit else totals.get("left", 0)
        assert told is not None
        return [g for g in groups if task in (None, g.task) and (jobs is None or g.job in jobs)], told

    async def stats(self) -> Stats:
        disk_bytes = await self._driver.disk_bytes()

        async def work(tx: Tx) -> Stats:
            totals = defaultdict(int, await tx.rows("SELECT name, value FROM totals"))
            states = await tx.rows("SELECT state, count(*) FROM groups WHERE gone IS NULL GROUP BY state")
            leases = await tx.rows("SELECT count(*) FROM leases WHERE state = 'out'")
            ready = await tx.rows("SELECT sum(n) FROM groups WHERE state = 'ready'")
            first = await tx.rows("SELECT updated FROM groups WHERE state = 'ready' ORDER BY line LIMIT 1")
            return Stats(
                items=totals["items_written"] - totals["items_left"],
                items_ready=int(ready[0][0] or 0),
                items_of_job=totals["items_of_job"],
                items_written=totals["items_written"],
                items_delivered=totals["items_delivered"],
                items_dropped=_by_reason(totals, "items_dropped:"),
                groups={"open": 0, "full": 0, "ready": 0, "leased": 0, "quarantined": 0}
                | dict(map(tuple, states)),
                groups_delivered=totals["groups_delivered"],
                groups_dropped=_by_reason(totals, "groups_dropped:"),
                leases=leases[0][0],
                oldest_ready_s=max(0.0, tx.now - first[0][0]) if first else 0.0,
                archive_bytes=totals["archive_bytes"],
                disk_bytes=disk_bytes,
            )

        return await self._driver.read(work)


async def _check_format(session: _Session) -> None:
    if session.totals.setdefault("format", FORMAT) != FORMAT:
        raise RunDirectoryError(
            f"the buffer's data has format {session.totals['format']}, this version reads {FORMAT}: use the version "
            "of rollstream that wrote it, or start with an empty folder or database"
        )


async def _load(tx: Tx, groups: Sequence[int]) -> dict[int, list[StoredItem] | str]:
    loaded: dict[int, list[StoredItem] | str] = {group: [] for group in groups}
    rows = await tx.rows(
        "SELECT items.grp, items.uid, items.reward, items.encoding, items.crc, bodies.body FROM items "
        "LEFT JOIN bodies ON bodies.seq = items.seq WHERE items.grp IN :ids($1) ORDER BY items.grp, items.seq",
        list(groups),
    )
    for group, uid, reward, encoding, crc, body in rows:
        items = loaded[group]
        if isinstance(items, str):
            continue
        if body is None:
            loaded[group] = f"item {uid!r} is not kept any more, or was lost"
        elif zlib.crc32(body) != crc:
            loaded[group] = (
                f"item {uid!r} is not what was written: its checksum is wrong (damaged on the disk?)"
            )
        else:
            items.append(StoredItem(uid, reward, encoding, body))
    return loaded


def _storable(text: str) -> str:
    """Without what a database's text cannot hold: a user's traceback may have anything."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _owner(item: Item, jobs: Mapping[str, JobRecord], last: JobRecord | None) -> tuple[str, str]:
    """Task and job of an item; what it does not say is that of the job that was started last."""
    if item.job is not None:
        known = jobs.get(item.job)
        return item.task or (known.task if known is not None else ""), item.job
    if last is None:
        return item.task or "", ""
    return (last.task, last.id) if item.task in (None, last.task) else (item.task or "", "")


def _row_of(row: Sequence[Any]) -> _Row:
    values = list(row)
    values[8] = orjson.loads(values[8])
    values[12] = bool(values[12])
    return _Row(*values)


def _values(row: _Row) -> list[Any]:
    values = list(msgspec.structs.astuple(row))
    values[8] = orjson.dumps(row.rewards).decode()
    values[12] = int(row.timed_out)
    return values


def _group_of(row: Sequence[Any]) -> Group:
    values = dict(zip(Group.__struct_fields__, row, strict=True))
    values["instance_id"] = orjson.loads(values["instance_id"])
    values["rewards"] = orjson.loads(values["rewards"])
    values["timed_out"] = bool(values["timed_out"])
    return Group(**values)


def _decode_job(text: str) -> JobRecord:
    return msgspec.json.decode(text, type=JobRecord)


def _replaced(record: JobRecord) -> JobRecord:
    """A job that another one has replaced never goes on: it needs no list of what it skips, which may be long."""
    if not record.payload.get("skip_instance_ids"):
        return record
    return msgspec.structs.replace(record, payload={**record.payload, "skip_instance_ids": []})


def _matching(wanted: Wanted, taken: int) -> tuple[str, list[Any]]:
    """The SQL for what a read asks of groups, and its arguments, which follow so many others."""
    which, values = "", []
    for condition, value in (
        ("task = {}", wanted.task),
        ("size = {}", wanted.size),
        ("NOT (task IN :texts({}))", list(wanted.skip_tasks) or None),
    ):
        if value is not None:
            values.append(value)
            which += " AND " + condition.format(f"${taken + len(values)}")
    return which, values


def _by_reason(totals: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in totals.items() if name.startswith(prefix)}
