"""The store's operations, written once for both databases.

SQL is PostgreSQL's, as psycopg takes it: `%s` is an argument, `= ANY(%s)` takes a list.

All changes go through one committer: while a transaction is under way, what is asked for gathers and goes
together into the next (group commit). Only one transaction at a time changes a database, also where several
servers share it: so nothing here has to think of another one. Operations check first and change then: one
that raises leaves nothing behind for the others of its transaction.

Most operations do the same three things: they read rows of groups, change them, and save them. They run in a
thread for changes or in one for looks; their callers, in the event loop, wait for them.
"""

import asyncio
import functools
import hashlib
import sys
import time
import uuid
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

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
    Limits,
    Removal,
    Stats,
    StoredLease,
    StoreRules,
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

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound=Group)

FORMAT: Final = 7
"""The format of the tables. Another one is refused."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS totals (id {key}, json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY, number BIGINT NOT NULL, record TEXT NOT NULL, server TEXT, claimed DOUBLE PRECISION);
CREATE TABLE IF NOT EXISTS groups (
  id {key}, task TEXT NOT NULL, job TEXT NOT NULL, instance_id TEXT NOT NULL, size BIGINT NOT NULL,
  n BIGINT NOT NULL, bytes BIGINT NOT NULL, rewards TEXT NOT NULL, failed BIGINT NOT NULL, version BIGINT,
  state TEXT NOT NULL, timed_out BIGINT NOT NULL, position BIGINT NOT NULL, updated DOUBLE PRECISION NOT NULL,
  reason TEXT, cause TEXT, "left" BIGINT, key TEXT NOT NULL, deadline DOUBLE PRECISION NOT NULL,
  judged BIGINT NOT NULL, lease TEXT);
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
CREATE TABLE IF NOT EXISTS leases (
  id TEXT PRIMARY KEY, consumer TEXT, read_id TEXT, seconds DOUBLE PRECISION NOT NULL,
  deadline DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, groups BIGINT NOT NULL, items BIGINT NOT NULL);
CREATE INDEX IF NOT EXISTS leases_due ON leases (state, deadline);
CREATE INDEX IF NOT EXISTS leases_of_read ON leases (read_id) WHERE state = 'out' AND read_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS bodies (seq {key}, body {blob} NOT NULL, file BIGINT);
CREATE INDEX IF NOT EXISTS bodies_of_file ON bodies (file) WHERE file IS NOT NULL;
INSERT INTO totals (id, json) VALUES (1, '{{"format": 7}}') ON CONFLICT (id) DO NOTHING
"""
"""A lease is out, acked, or back (nacked or expired). `key` of a group stands for its task, job and instance; its
lease is the newest that it was handed out with, over or not, until it leaves. Each write pays for every index."""

_SLICE: Final = 256
"""Groups that a sweep or a drop works off in one transaction: some milliseconds."""

_LOOKS: Final = 64
"""A read that passes over groups (of an instance that it has, too old ones) looks so often for more."""

_CAUSE_CHARS: Final = 8_000
"""The end of a traceback that is kept."""

_COMMIT_BYTES: Final = 3 * 2**20
"""A transaction with so many bytes takes no more items: while it is written, the next are received and checked."""

_TURNS: Final = 4
"""Turns of the event loop before a transaction begins: who was just answered writes again, and is in it. To sync
the disk costs as much as ten small items."""

_GROUP_ROOM: Final = 128
"""Bytes of room that a read and an ack of a group take for their notes."""

_LEASES_KEPT_S: Final = 7 * 86_400.0
"""An ended lease is known so long: a trainer may ack again from an old checkpoint."""

_FULL: Final = "no room on the disk for items: what is left is for reads and acks; nothing of this was stored"

_SHORT_BYTES: Final = 1000
"""Values up to this size stay in the payload of a job that another one replaced."""

_JOBS_KEPT: Final = 100
"""Records of earlier jobs are kept so far back, and as long as groups of theirs are known."""


class Tx(Protocol):
    """A transaction, or a look at the database."""

    now: float
    """The store's clock, in seconds."""

    def rows(self, sql: str, *arguments: Any) -> list[Any]:
        """Runs a statement; returns the rows that it gives."""
        ...

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Runs a statement for each row of arguments."""
        ...

    def put(self, body: bytes) -> tuple[bytes, int | None]:
        """Returns `body` and `file` of the row that keeps a body; one with a file is kept there."""
        ...

    def get(self, body: bytes, file: int | None) -> bytes | None:
        """Returns the body of such a row; None where its file is lost."""
        ...

    def forget(self, files: Iterable[int]) -> None:
        """Takes note of deleted rows by their files."""
        ...

    def room(self) -> int:
        """Bytes of items that the disk has room for, beside a margin; below zero, it is that much too full."""
        ...


class Database(Protocol):
    """A database, which blocks its caller. `read` and `disk_bytes` are called in one thread, all else in another."""

    def open(self, schema: str) -> None: ...
    def close(self) -> None: ...
    def transaction(self, work: Callable[[Tx], T], size: int = 0) -> T:
        """Runs `work`, again where its first try found no room; `size` is that of the items that it may add."""
        ...

    def read(self, work: Callable[[Tx], T]) -> T: ...
    def disk_bytes(self) -> int: ...
    def tidy(self, *, all_of_it: bool = False) -> None:
        """Gives unused space back to the disk: some of it, or all, also where the disk is full."""
        ...


class _GroupRow(Group, gc=False):
    """A row of `groups`, while a transaction changes it."""

    key: str
    deadline: float = 0.0
    judged: int = 0
    """Items that it had when it was judged last."""
    lease: str | None = None


_FIELDS: Final = _GroupRow.__struct_fields__
_GROUP: Final = ", ".join(f'"{name}"' for name in Group.__struct_fields__)
_ROW: Final = ", ".join(f'"{name}"' for name in _FIELDS)
_ID, _REWARDS, _TIMED_OUT = map(_FIELDS.index, ("instance_id", "rewards", "timed_out"))
_SAVE: Final = (
    f"INSERT INTO groups ({_ROW}) VALUES ({', '.join(['%s'] * len(_FIELDS))}) ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f'"{name}" = excluded."{name}"' for name in _FIELDS[_FIELDS.index("n") :])
)
"""The columns before `n` never change."""

_UNJUDGED: Final = "state IN ('open', 'judging') AND judged < n"
_STATES: Final = {
    "open": "state = 'open'",
    "judging": f"{_UNJUDGED} AND state = 'judging'",
    "ready": "state = 'ready'",
    "leased": "lease IS NOT NULL AND state = 'leased'",
    "quarantined": "state = 'quarantined'",
}
"""Conditions for groups that have not left, in the words of the index that finds them: no arguments, which
PostgreSQL does not know when it plans."""


class _TransactionState:
    """The state that the operations of one transaction share."""

    def __init__(self, tx: Tx, jobs: Mapping[str, JobRecord], jobs_version: int) -> None:
        self.tx = tx
        self.totals = _totals(tx)
        self.jobs, self.jobs_version = jobs, jobs_version
        self.refresh_jobs()
        self.in_vain = 0
        """Operations that found nothing to do."""
        self.ready = self.unjudged = self.room = False
        self.dropped: Counter[str] = Counter()

    def refresh_jobs(self) -> None:
        """Reads the jobs again if one has changed, here or at another server."""
        if (version := self.totals["jobs"]) != self.jobs_version:
            self.jobs, self.jobs_version = {job.id: job for job in _jobs(self.tx)}, version

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

    def make_ready(self, row: _GroupRow) -> None:
        row.state, self.ready = "ready", True

    def drop(self, row: _GroupRow, reason: str) -> None:
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

    def save_totals(self) -> None:
        self.count("readied", self.ready)
        self.totals |= {"clock": self.tx.now, "changed": time.time()}
        self.tx.rows("UPDATE totals SET json = %s WHERE id = 1", orjson.dumps(self.totals).decode())


_Op = Callable[[_TransactionState], Any]
_Waiting = tuple[Sequence[Item] | _Op, asyncio.Future[Any]]


def _change(
    method: Callable[Concatenate["SqlStore", _TransactionState, P], T],
) -> Callable[Concatenate["SqlStore", P], Coroutine[Any, Any, T]]:
    """A call of the store that is a part of a transaction."""

    @functools.wraps(method)
    async def call(self: "SqlStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        done: T = await self._commit(lambda session: method(self, session, *args, **kwargs))
        return done

    return call


def _look(
    method: Callable[Concatenate["SqlStore", Tx, P], T],
) -> Callable[Concatenate["SqlStore", P], Coroutine[Any, Any, T]]:
    """A call of the store that changes nothing."""

    @functools.wraps(method)
    async def call(self: "SqlStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._read(lambda tx: method(self, tx, *args, **kwargs))

    return call


class SqlStore:
    """Keeps items, groups, leases and jobs. Lives in one event loop.

    Every call that changes something is one transaction, durable when it returns. All calls may raise
    `StorageError`, or of its kinds `StorageFullError` when there is no room.
    """

    def __init__(self, database: Database, policy: StoreRules, limits: Limits | None = None) -> None:
        self._database, self._policy, self._limits = database, policy, limits or Limits()
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="buffer-changes")
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="buffer-looks")
        self._waiting: deque[_Waiting] = deque()
        self._committing: asyncio.Task[None] | None = None
        self.known_jobs: Mapping[str, JobRecord] = {}
        """By id, oldest first, as of the last transaction."""
        self._jobs_version = self._readied = -1
        self.changed: Callable[[Change], None] = lambda change: None
        self.items_of_job = 0
        """Written by the last job, as of the last transaction."""

    @property
    def last_job(self) -> JobRecord | None:
        """The job that was started last."""
        return _last(self.known_jobs)

    async def open(self) -> None:
        """Raises `StorageError`, `RunDirectoryError`."""
        try:
            await self._in(self._changes, lambda: self._database.open(SCHEMA))
            found = (await self._read(_totals))["format"]
            if found != FORMAT:
                raise RunDirectoryError(
                    f"the buffer's data has format {found}, this version reads {FORMAT}: use the version of "
                    "rollstream that wrote it, or start with an empty folder or database"
                )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Waits for what is under way."""
        while self._committing is not None:
            await asyncio.wait({self._committing})
        await self._in(self._looks, lambda: None)
        await self._in(self._changes, self._database.close)
        self._changes.shutdown()
        self._looks.shutdown()

    # -- committing

    async def _in(self, thread: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, call)

    async def _read(self, work: Callable[[Tx], T]) -> T:
        return await self._in(self._looks, lambda: self._database.read(work))

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
                some: list[_Waiting] = []
                size = 0
                while self._waiting and size < _COMMIT_BYTES:
                    some.append(self._waiting.popleft())
                    size += _size(some[-1][0])
                await self._commit_some(some)
        finally:
            self._committing = None

    async def _commit_some(self, some: Sequence[_Waiting]) -> None:
        results: Sequence[Any]
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
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _transact(self, ops: Sequence[Sequence[Item] | _Op]) -> list[Any]:
        """Does all of them; the result of each, or its error."""

        def work(tx: Tx) -> tuple[_TransactionState, list[Any]]:
            session = _TransactionState(tx, self.known_jobs, self._jobs_version)
            written = iter(self._write(session, [op for op in ops if not callable(op)]))
            results: list[Any] = []
            for op in ops:
                try:
                    results.append(op(session) if callable(op) else next(written))
                except RollstreamError as error:
                    if isinstance(error, StorageError) and not isinstance(error, StorageFullError):
                        raise
                    results.append(error)
            if session.in_vain < len(ops):
                session.save_totals()
            session.refresh_jobs()
            return session, results

        size = sum(map(_size, ops))
        session, results = await self._in(self._changes, lambda: self._database.transaction(work, size))
        self.known_jobs, self._jobs_version = session.jobs, session.jobs_version
        self.items_of_job = session.totals["items_of_job"]
        ready = session.totals["readied"] > self._readied  # also by another server
        self._readied = session.totals["readied"]
        if ready or session.unjudged or session.room:
            self.changed(Change(ready, ready or session.unjudged, session.room, session.dropped))
        return results

    # -- writing

    async def write(self, items: Sequence[Item]) -> list[bool]:
        """Stores all items or none; which of them were new. Raises `BufferFullError`."""
        while True:
            try:
                result: list[bool] = await self._commit(items)
                return result
            except StorageFullError:
                if not await self._make_room(_size(items)):
                    raise
                await self._in(self._changes, lambda: self._database.tidy(all_of_it=True))

    @_change
    def _make_room(self, session: _TransactionState, size: int) -> int:
        """Gives up what of the archive the disk lacks for so many bytes; 0: that would not help."""
        lacking, archive = _lacking(session.tx, session.totals, size), session.totals["archive_bytes"]
        trimmed = self._trim(session, archive - lacking) if 0 < lacking <= archive else 0
        session.in_vain += not trimmed
        return trimmed

    @_look
    def known(self, tx: Tx, uids: Sequence[str]) -> list[bool]:
        found = _known(tx, uids)
        return [uid in found for uid in uids]

    def _write(
        self, session: _TransactionState, writes: Sequence[Sequence[Item]]
    ) -> list[list[bool] | RollstreamError]:
        """A write that does not fit under the limit, or on the disk, gets its error in place of a result."""
        if not writes:
            return []
        known = _known(session.tx, [item.uid for items in writes for item in items])
        here = session.totals["items_written"] - session.totals["items_left"]
        lacking = -session.tx.room() + _notes(session.totals)
        results: list[list[bool] | RollstreamError] = []
        new: list[Item] = []
        for items in writes:
            fresh: dict[str, Item] = {}
            for item in items:
                if item.uid not in known:
                    fresh.setdefault(item.uid, item)
            size = _size(list(fresh.values()))
            if fresh and here + len(fresh) > self._limits.items:
                error = f"the buffer holds {here} items, of at most {self._limits.items}"
                results.append(BufferFullError(error))
            elif fresh and lacking + size > 0:
                results.append(StorageFullError(_FULL))
            else:
                known |= fresh.keys()
                here += len(fresh)
                lacking += size
                new += fresh.values()
                results.append([fresh.pop(item.uid, None) is not None for item in items])
        if new:
            self._add(session, new)
        return results

    def _add(self, session: _TransactionState, new: Sequence[Item]) -> None:
        jobs, last, tx = session.jobs, _last(session.jobs), session.tx
        owners = [_owner(item, jobs, last) for item in new]
        keys = [_group_key(*owner, item.instance_id) for owner, item in zip(owners, new, strict=True)]
        open_rows = {row.key: row for row in _rows(tx, "state = 'open' AND key = ANY(%s)", list(set(keys)))}
        touched: dict[int, _GroupRow] = {}
        items, bodies = [], []
        for item, (task, job), key in zip(new, owners, keys, strict=True):
            settings = self._policy.settings(task, jobs.get(job))
            row = open_rows.get(key)
            if row is None:
                row = open_rows[key] = _GroupRow(
                    session.count("groups"), task, job, item.instance_id, settings.group_size,
                    n=0, bytes=0, rewards=[], failed=0, version=None, state="open", timed_out=False, position=0,
                    updated=0.0, reason=None, cause=None, left=None, key=key,
                )  # fmt: skip
            touched[row.id] = row
            session.count("items_of_job", last is not None and job == last.id)
            seq = session.count("items_written")
            reward = None if item.failed else item.reward
            row.n += 1
            row.bytes += len(item.body)
            row.rewards.append(reward)
            session.score("written", reward)
            row.failed += item.failed
            if item.version is not None:
                row.version = item.version if row.version is None else min(row.version, item.version)
            row.position, row.updated = seq, tx.now
            row.deadline = tx.now + settings.group_timeout_seconds
            items.append((row.id, seq, item.uid, reward, item.encoding, zlib.crc32(item.body)))
            bodies.append((seq, *tx.put(item.body)))
            self._judge(session, row)
            if row.state != "open":
                del open_rows[key]
        tx.many(
            "INSERT INTO items (grp, seq, uid, reward, encoding, crc) VALUES (%s, %s, %s, %s, %s, %s)", items
        )
        tx.many("INSERT INTO bodies (seq, body, file) VALUES (%s, %s, %s)", bodies)
        _save(session, touched.values())

    def _judge(self, session: _TransactionState, row: _GroupRow) -> None:
        """Judges by the default rule, unless the group waits for its task's own hook."""
        if self._policy.has_own_judge(row.task):
            session.unjudged, row.judged = True, 0
            if row.timed_out or row.n >= row.size:
                row.state = "judging"
            return
        settings = self._policy.settings(row.task, session.jobs.get(row.job)).of_size(row.size)
        row.judged = row.n
        verdict = judge_rewards(row.rewards, settings, timed_out=row.timed_out)
        if verdict.valid:
            session.make_ready(row)
        elif verdict.finished:
            reason = drop_reason(row.rewards, settings, failed=row.failed, timed_out=row.timed_out)
            session.drop(row, reason)

    # -- reading

    @_change
    def take(self, session: _TransactionState, wanted: Wanted) -> Taken:
        """Leases groups, first in the queue first."""
        tx = session.tx
        chosen, stale = _choose(tx, wanted)
        if stale and wanted.drop_stale:
            _drop_where(session, "stale", "state = 'ready' AND id = ANY(%s)", stale)
        if not chosen or (wanted.exact and len(chosen) < wanted.groups):
            session.in_vain += not session.dropped
            passed = 0
            if wanted.min_version is not None and not wanted.drop_stale:
                which, values = _matching(wanted, ("version < %s", wanted.min_version))
                ((passed,),) = tx.rows(f"SELECT count(*) FROM groups WHERE {which}", *values)
            return Taken(available=len(chosen), stale=passed)
        lease = uuid.uuid4().hex
        tx.rows(
            "INSERT INTO leases (id, consumer, read_id, seconds, deadline, state, groups, items) "
            "VALUES (%s, %s, %s, %s, %s, 'out', %s, %s)",
            lease, wanted.consumer, wanted.read_id, wanted.seconds, tx.now + wanted.seconds,
            len(chosen), sum(group.n for group in chosen),
        )  # fmt: skip
        ids = [group.id for group in chosen]
        tx.rows("UPDATE groups SET state = 'leased', lease = %s WHERE id = ANY(%s)", lease, ids)
        return Taken(lease=lease, groups=chosen, available=len(chosen))

    @_look
    def peek(self, tx: Tx, wanted: Wanted) -> list[Group]:
        """Returns what `take` would lease."""
        return _choose(tx, wanted)[0]

    async def load(self, groups: Sequence[int]) -> dict[int, list[StoredItem] | str]:
        """Items of groups, in order of arrival; a text says why a group cannot be read (damage)."""
        try:
            return await self._read(lambda tx: _load(tx, groups))
        except DamageError as error:
            if len(groups) == 1:
                return {groups[0]: str(error)}
        loaded: dict[int, list[StoredItem] | str] = {}
        for group in groups:  # one by one, to tell which of them are hit
            loaded |= await self.load([group])
        return loaded

    @_change
    def finish(
        self, session: _TransactionState, lease: str, removals: Sequence[Removal], back: Sequence[int] = ()
    ) -> None:
        """Takes groups out of a lease, `back` to their places. Raises `ConflictError`: it ended meanwhile."""
        tx = session.tx
        if _lease_rows(tx, [lease])[lease][0] != "out":
            raise ConflictError(f"lease {lease} ended before all of its groups were finished")
        ids = [*(removal.group for removal in removals), *back]
        rows = _rows(tx, "state = 'leased' AND lease = %s AND id = ANY(%s)", lease, ids)
        _remove(session, rows, removals)
        for row in rows:
            if row.id in back:
                session.make_ready(row)
                row.lease = None
        _save(session, rows)
        tx.rows(
            "UPDATE leases SET groups = groups - %s, items = items - %s WHERE id = %s",
            len(rows),
            sum(row.n for row in rows),
            lease,
        )

    @_change
    def ack(
        self, session: _TransactionState, leases: Sequence[str], *, reported_up_to: int | None = None
    ) -> Acked:
        """The groups leave: of all leases, or of none. `reported_up_to`: see `unread_drops`.

        Raises:
            NotFoundError: There is no such lease.
            ConflictError: Its groups went back, and some are not there any more.
        """
        tx = session.tx
        known = _lease_rows(tx, leases)
        live = [lease for lease, (state, *_) in known.items() if state != "acked"]
        groups = tx.rows(
            "SELECT id, n, bytes, lease, rewards FROM groups WHERE lease = ANY(%s) "
            "AND state IN ('ready', 'leased') ORDER BY position",
            live,
        )
        here = Counter(row[3] for row in groups)
        for lease in live:
            if missing := known[lease][1] - here[lease]:
                raise ConflictError(
                    f"lease {lease} ended, and {missing} of its groups are not there any more: what was read by "
                    "it must not count"
                )
        session.totals["reported"] = max(reported_up_to or 0, session.totals["reported"])
        gone = []
        for id_, n, size, _, rewards in groups:
            gone.append((session.leave(n, size), id_))
            session.count("groups_delivered")
            session.count("items_delivered", n)
            for reward in orjson.loads(rewards):
                session.score("delivered", reward)
        tx.many("UPDATE groups SET state = 'delivered', lease = NULL, \"left\" = %s WHERE id = %s", gone)
        tx.rows("UPDATE leases SET state = 'acked' WHERE id = ANY(%s)", live)
        _, of_groups, of_items = zip(*known.values(), strict=True)
        return Acked(sum(of_groups), sum(of_items), not live)

    @_change
    def nack(self, session: _TransactionState, lease: str) -> None:
        """The groups go back to their places. Raises `NotFoundError`, `ConflictError`."""
        state, *_ = _lease_rows(session.tx, [lease])[lease]
        if state == "acked":
            raise ConflictError(f"lease {lease} was acked")
        if state == "out":
            _give_back(session, [lease])

    @_change
    def extend(self, session: _TransactionState, lease: str, seconds: float) -> None:
        """The lease ends that much from now. Raises `NotFoundError`, `ConflictError`."""
        if _lease_rows(session.tx, [lease])[lease][0] != "out":
            raise ConflictError(f"lease {lease} has ended")
        deadline = session.tx.now + seconds
        session.tx.rows(
            "UPDATE leases SET deadline = %s, seconds = %s WHERE id = %s", deadline, seconds, lease
        )

    async def release(self, consumer: str) -> int:
        """Gives back all leases of a reader; how many groups that were."""
        return await self._return_leases("consumer = %s", consumer)

    async def return_read(self, read_id: str) -> None:
        """Gives back what an earlier attempt at the same read took."""
        await self._return_leases("read_id = %s", read_id)

    @_change
    def _return_leases(self, session: _TransactionState, which: str, argument: str) -> int:
        rows = session.tx.rows(f"SELECT id FROM leases WHERE state = 'out' AND {which}", argument)
        return _give_back(session, [lease for (lease,) in rows])

    @_look
    def leases(self, tx: Tx) -> list[StoredLease]:
        """The leases that are out."""
        groups = defaultdict(list)
        for group, lease in tx.rows(
            "SELECT id, lease FROM groups WHERE lease IS NOT NULL AND state = 'leased' ORDER BY position"
        ):
            groups[lease].append(group)
        return [
            StoredLease(
                id=id_, consumer=owner, seconds=seconds, left_s=max(0.0, end - tx.now), groups=groups[id_]
            )
            for id_, owner, seconds, end in tx.rows(
                "SELECT id, consumer, seconds, deadline FROM leases WHERE state = 'out' ORDER BY deadline, id"
            )
        ]

    # -- judging and dropping

    @_look
    def unjudged(self, tx: Tx, tasks: Sequence[str], limit: int) -> list[Group]:
        """Groups that wait for the hook of one of these tasks."""
        return _groups(tx, f"{_UNJUDGED} AND task = ANY(%s) ORDER BY position LIMIT %s", list(tasks), limit)

    @_change
    def judge(
        self, session: _TransactionState, judged: Sequence[Judged], removals: Sequence[Removal]
    ) -> None:
        """Takes the verdicts of hooks on groups; `removals` are those that they failed on."""
        ids = [*(verdict.group for verdict in judged), *(removal.group for removal in removals)]
        rows = _rows(session.tx, "state IN ('open', 'judging') AND id = ANY(%s)", ids)
        _remove(session, rows, removals)
        here = {row.id: row for row in rows if row.state in ("open", "judging")}
        for verdict in judged:
            row = here.get(verdict.group)
            if row is None or (row.n, row.timed_out) != (verdict.n, verdict.timed_out):
                continue
            row.judged = row.n
            if verdict.valid:
                session.make_ready(row)
            elif verdict.finished or row.state == "judging":
                session.drop(row, "timed_out" if row.timed_out else "not_valid")
        _save(session, rows)

    @_change
    def drop_quarantined(self, session: _TransactionState) -> int:
        """Drops quarantined groups; how many."""
        return _drop_where(session, "quarantined", "state = 'quarantined'")

    async def drop_job(self, job: str, reason: str) -> int:
        """Drops what nobody has read of a job."""
        which = "job = %s AND \"left\" IS NULL AND state IN ('open', 'judging', 'ready') LIMIT %s"
        dropped = 0
        while count := await self._commit(lambda session: _drop_where(session, reason, which, job, _SLICE)):
            dropped += count
        return dropped

    @_change
    def retry(self, session: _TransactionState) -> int:
        """Quarantined groups are judged or handed out again; how many.

        Those whose task has no hook any more that judges are judged by the default rule, as they are.
        """
        rows = _rows(session.tx, "state = 'quarantined'")
        for row in sorted(rows, key=lambda row: row.position):
            row.lease = row.reason = row.cause = None
            own = self._policy.has_own_judge(row.task)
            if row.judged == row.n and not own:
                session.make_ready(row)
                continue
            row.state, row.timed_out = "judging", row.timed_out or not own
            self._judge(session, row)
        _save(session, rows)
        return len(rows)

    # -- time

    async def sweep(self) -> int:
        """Expires leases, times groups out, trims the archive. How much it did; 0: nothing is due."""
        if not (done := await self._sweep()):
            await self._in(self._changes, self._database.tidy)
        return done

    @_change
    def _sweep(self, session: _TransactionState) -> int:
        tx = session.tx
        due = f"deadline < %s ORDER BY deadline, id LIMIT {_SLICE}"
        expired = tx.rows(f"SELECT id FROM leases WHERE state = 'out' AND {due}", tx.now)
        if expired:
            _give_back(session, [lease for (lease,) in expired])
        tx.rows(
            "DELETE FROM leases WHERE state IN ('acked', 'back') AND deadline < %s", tx.now - _LEASES_KEPT_S
        )
        late = _rows(tx, f"state = 'open' AND {due}", tx.now)
        # Groups that wait for a hook which their generator file had, and has no more.
        tasks = [task for (task,) in tx.rows(f"SELECT DISTINCT task FROM groups WHERE {_UNJUDGED}")]
        without = [task for task in tasks if not self._policy.has_own_judge(task)]
        orphans = _rows(tx, f"{_UNJUDGED} AND task = ANY(%s) LIMIT {_SLICE}", without) if without else []
        rows = {row.id: row for row in [*late, *orphans]}.values()  # one may be both
        for row in rows:
            row.timed_out = row.state == "judging" or row.deadline < tx.now
            self._judge(session, row)
        _save(session, rows)
        trimmed = self._trim(session, self._limits.archive_bytes)
        done = len(expired) + len(rows) + trimmed + self._forget(session)
        session.in_vain += not done
        return done

    def _trim(self, session: _TransactionState, bound: int) -> int:
        """Deletes bodies of what left first, some at a time, until the archive has so many bytes."""
        totals, ids = session.totals, []
        if totals["archive_bytes"] <= bound:
            return 0
        for group, size, left in session.tx.rows(
            'SELECT id, bytes, "left" FROM groups WHERE "left" > %s ORDER BY "left" LIMIT %s',
            totals["trimmed"],
            _SLICE,
        ):
            if totals["archive_bytes"] <= bound:
                break
            session.count("archive_bytes", -size)
            totals["trimmed"] = left
            ids.append(group)
        files = session.tx.rows(
            "DELETE FROM bodies WHERE seq IN (SELECT seq FROM items WHERE grp = ANY(%s)) RETURNING file", ids
        )
        session.tx.forget(file for (file,) in files if file is not None)
        session.tx.rows("UPDATE groups SET bytes = 0 WHERE id = ANY(%s)", ids)
        return len(ids)

    def _forget(self, session: _TransactionState) -> int:
        """Forgets groups that left first, and their uids, but those of the last job."""
        totals, last = session.totals, _last(session.jobs)
        bound = min(totals["trimmed"], totals["items_left"] - self._limits.remembered_uids)
        if bound <= totals["forgotten"]:
            return 0
        rows = session.tx.rows(
            'SELECT id, job, "left" FROM groups WHERE "left" > %s AND "left" <= %s ORDER BY "left" LIMIT %s',
            totals["forgotten"],
            bound,
            _SLICE,
        )
        totals["forgotten"] = rows[-1][2] if len(rows) == _SLICE else bound
        ids = [group for group, job, _ in rows if last is None or job != last.id]
        for table, column in (("items", "grp"), ("groups", "id")):
            session.tx.rows(f"DELETE FROM {table} WHERE {column} = ANY(%s)", ids)
        return max(1, len(rows))

    # -- jobs

    @_change
    def save_job(self, session: _TransactionState, record: JobRecord) -> JobRecord:
        """Stores a job and returns it: a new one gets its `number`, and `expected` stays once it is known."""
        totals, last, known = session.totals, _last(session.jobs), session.jobs.get(record.id)
        if known is None:
            if last is not None:
                _put_job(session, _replaced(last))
            session.tx.rows(
                "DELETE FROM jobs WHERE number <= %s AND NOT EXISTS (SELECT 1 FROM groups WHERE job = jobs.id)",
                totals["last_job"] - _JOBS_KEPT,
            )
            record = msgspec.structs.replace(record, number=session.count("last_job"))
            totals["items_of_job"] = totals["forgotten"] = 0
        else:
            expected = known.expected if record.expected is None else record.expected
            record = record if last is not None and last.id == record.id else _replaced(record)
            record = msgspec.structs.replace(record, number=known.number, expected=expected)
        _put_job(session, record)
        return record

    @_change
    def expect(self, session: _TransactionState, job: str, items: int) -> None:
        """Sets `expected` of a job, and nothing else. Raises `NotFoundError`."""
        if (record := session.jobs.get(job)) is None:
            raise NotFoundError(f"there is no job {job!r:.100}")
        _put_job(session, msgspec.structs.replace(record, expected=items))

    @_look
    def jobs(self, tx: Tx) -> list[JobRecord]:
        """All jobs, oldest first."""
        return _jobs(tx)

    @_change
    def claim_job(self, session: _TransactionState, job: str, server: str, stale_after_s: float) -> bool:
        """Whether a job is this server's: nobody else's, or of one that has not claimed it for so long."""
        now = session.tx.now
        claimed = session.tx.rows(
            "UPDATE jobs SET server = %s, claimed = %s WHERE id = %s "
            "AND (server IS NULL OR server = %s OR claimed < %s) RETURNING id",
            server, now, job, server, now - stale_after_s,
        )  # fmt: skip
        return bool(claimed)

    @_look
    def finished(self, tx: Tx, job: str) -> list[InstanceId]:
        """One entry for each group that is complete, or timed out."""
        rows = tx.rows("SELECT instance_id FROM groups WHERE job = %s AND state <> 'open' ORDER BY id", job)
        return [orjson.loads(text) for (text,) in rows]

    @_look
    def has_groups(self, tx: Tx, job: str) -> bool:
        """Whether any of a job's groups have not left."""
        return bool(tx.rows('SELECT id FROM groups WHERE job = %s AND "left" IS NULL LIMIT 1', job))

    # -- looking

    @_look
    def groups(
        self,
        tx: Tx,
        *,
        state: GroupState | None = None,
        task: str | None = None,
        jobs: Sequence[str] | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[Group]:
        in_state = "true" if state is None else _STATES.get(state, f"state = '{state}'")
        which, values = _where(in_state, ("id > %s", after), ("task = %s", task), ("job = ANY(%s)", jobs))
        return _groups(tx, f"{which} ORDER BY id LIMIT %s", *values, limit)

    async def group_with_items(self, group: int) -> dict[str, Any] | None:
        """`group`, `items` as they were written, and a `problem` where these cannot be read."""
        items = (await self.load([group]))[group]
        # Looked at second: of items that the archive has given up meanwhile it says so, by `bytes`.
        if not (rows := await self._read(lambda tx: _groups(tx, "id = %s", group))):
            return None
        whole: dict[str, Any] = {"group": described(rows[0]), "items": []}
        if isinstance(items, str):
            return whole | {"problem": items}
        return whole | {"items": [plain_item(item.body, item.encoding) for item in items]}

    @_look
    def unread_drops(
        self, tx: Tx, task: str | None, jobs: Sequence[str] | None, limit: int
    ) -> tuple[list[Group], int]:
        """Groups dropped since a trainer on slime's wire got a report, and the `reported_up_to` for `ack`."""
        totals = _totals(tx)
        which = 'state = \'dropped\' AND "left" > %s ORDER BY "left" LIMIT %s'
        groups = _groups(tx, which, totals["reported"], limit)
        up_to = groups[-1].left if len(groups) == limit else totals["items_left"]
        return [g for g in groups if task in (None, g.task) and (jobs is None or g.job in jobs)], up_to or 0

    async def stats(self) -> Stats:
        return await self._stats(await self._in(self._looks, self._database.disk_bytes))

    @_look
    def _stats(self, tx: Tx, disk_bytes: int) -> Stats:
        totals = _totals(tx)
        counts = {state: tx.rows(f"SELECT count(*), sum(n) FROM groups WHERE {which}")[0]
                  for state, which in _STATES.items()}  # fmt: skip
        leases = tx.rows("SELECT count(*) FROM leases WHERE state = 'out'")
        first = tx.rows("SELECT updated FROM groups WHERE state = 'ready' ORDER BY position LIMIT 1")
        known = {
            "items": totals["items_written"] - totals["items_left"],
            "items_ready": int(counts["ready"][1] or 0),
            "items_dropped": _by_reason(totals, "items_dropped:"),
            "groups": {state: row[0] for state, row in counts.items()},
            "groups_dropped": _by_reason(totals, "groups_dropped:"),
            "leases": leases[0][0],
            "oldest_ready_s": max(0.0, tx.now - first[0][0]) if first else 0.0,
            "disk_bytes": disk_bytes,
            "disk_full": _lacking(tx, totals) > totals["archive_bytes"],
        }
        return Stats(
            **{name: known[name] if name in known else totals[name] for name in Stats.__struct_fields__}
        )


def _size(op: Sequence[Item] | _Op) -> int:
    return 0 if callable(op) else sum(len(item.body) for item in op)


def _totals(tx: Tx) -> defaultdict[str, Any]:
    return defaultdict(int, orjson.loads(tx.rows("SELECT json FROM totals WHERE id = 1")[0][0]))


def _lacking(tx: Tx, totals: Mapping[str, int], size: int = 0) -> int:
    """Bytes that have to leave the disk before it takes items of this size: each is written twice."""
    return max(0, 2 * (size + _notes(totals) - tx.room()))


def _notes(totals: Mapping[str, int]) -> int:
    """Bytes that reads and acks of all groups take for their notes."""
    gone = totals["groups_delivered"] + sum(_by_reason(totals, "groups_dropped:").values())
    return (totals["groups"] - gone) * _GROUP_ROOM


def _known(tx: Tx, uids: Sequence[str]) -> set[str]:
    return {uid for (uid,) in tx.rows("SELECT uid FROM items WHERE uid = ANY(%s)", list(uids))}


def _groups(tx: Tx, which: str, *arguments: Any) -> list[Group]:
    return [_decoded(row, Group) for row in tx.rows(f"SELECT {_GROUP} FROM groups WHERE {which}", *arguments)]


def _rows(tx: Tx, which: str, *arguments: Any) -> list[_GroupRow]:
    return [
        _decoded(row, _GroupRow) for row in tx.rows(f"SELECT {_ROW} FROM groups WHERE {which}", *arguments)
    ]


def _decoded(row: Sequence[Any], kind: type[G]) -> G:
    values = list(row)
    values[_ID], values[_REWARDS] = orjson.loads(values[_ID]), orjson.loads(values[_REWARDS])
    values[_TIMED_OUT] = bool(values[_TIMED_OUT])
    return kind(*values)


def _save(session: _TransactionState, rows: Collection[_GroupRow]) -> None:
    saved = []
    for row in sorted(rows, key=lambda row: row.id):  # by age: of one key only one group may be open
        values = list(msgspec.structs.astuple(row))
        values[_ID] = orjson.dumps(row.instance_id).decode()
        values[_REWARDS] = orjson.dumps(row.rewards).decode()
        values[_TIMED_OUT] = int(row.timed_out)
        saved.append(values)
    session.tx.many(_SAVE, saved)


def _choose(tx: Tx, wanted: Wanted) -> tuple[list[Group], list[int]]:
    """Groups for a read, first in the queue first, and those that are to be dropped as too old for it."""
    chosen: list[Group] = []
    stale: list[int] = []
    seen, oldest = set(wanted.without), wanted.min_version
    which, values = _matching(
        wanted, ("(version IS NULL OR version >= %s)", None if wanted.drop_stale else oldest)
    )
    position, limit = 0, min(wanted.groups + 16, 4096)
    for _ in range(_LOOKS):
        found = _groups(tx, f"{which} AND position > %s ORDER BY position LIMIT %s", *values, position, limit)
        for group in found:
            if len(chosen) == wanted.groups:
                break
            position = group.position
            if oldest is not None and group.version is not None and group.version < oldest:
                stale.append(group.id)
            elif not (wanted.distinct and group.instance_id in seen):
                seen.add(group.instance_id)
                chosen.append(group)
        if len(chosen) == wanted.groups or len(found) < limit:
            break
        limit = 1024
    return chosen, stale


def _drop_where(session: _TransactionState, reason: str, which: str, *arguments: Any) -> int:
    rows = _rows(session.tx, which, *arguments)
    for row in sorted(rows, key=lambda row: row.position):
        session.drop(row, reason)
    _save(session, rows)
    return len(rows)


def _remove(session: _TransactionState, rows: Sequence[_GroupRow], removals: Sequence[Removal]) -> None:
    """Drops or quarantines groups among these."""
    by_id = {row.id: row for row in rows}
    for removal in removals:
        if (row := by_id.get(removal.group)) is None:
            continue
        if removal.cause is None:
            session.drop(row, removal.reason)
        else:  # a user's traceback may hold what a database's text cannot
            end = removal.cause[-_CAUSE_CHARS:].replace("\0", "\\0")
            row.state, row.reason = "quarantined", removal.reason
            row.cause = end.encode("utf-8", "backslashreplace").decode()


def _give_back(session: _TransactionState, leases: list[str]) -> int:
    """Groups go back to their places. They still know their lease, so a late ack finds them."""
    tx = session.tx
    rows = tx.rows(
        "UPDATE groups SET state = 'ready' WHERE lease = ANY(%s) AND state = 'leased' RETURNING id", leases
    )
    session.ready = session.ready or bool(rows)
    tx.rows("UPDATE leases SET state = 'back', deadline = %s WHERE id = ANY(%s)", tx.now, leases)
    return len(rows)


def _lease_rows(tx: Tx, leases: Sequence[str]) -> dict[str, tuple[str, int, int]]:
    """State, groups and items of leases. Raises `NotFoundError`."""
    rows = tx.rows("SELECT id, state, groups, items FROM leases WHERE id = ANY(%s)", list(leases))
    known = {id_: (state, groups, items) for id_, state, groups, items in rows}
    for lease in leases:
        if lease not in known:
            raise NotFoundError(f"there is no lease {lease!r:.100}")
    return known


def _load(tx: Tx, groups: Sequence[int]) -> dict[int, list[StoredItem] | str]:
    loaded: dict[int, list[StoredItem] | str] = {group: [] for group in groups}
    rows = tx.rows(
        "SELECT items.grp, items.uid, items.reward, items.encoding, items.crc, bodies.body, bodies.file FROM items "
        "LEFT JOIN bodies ON bodies.seq = items.seq WHERE items.grp = ANY(%s) ORDER BY items.grp, items.seq",
        list(groups),
    )
    for group, uid, reward, encoding, crc, kept, file in rows:
        items = loaded[group]
        if isinstance(items, str):
            continue
        body = kept if kept is None else tx.get(kept, file)
        if body is None:
            loaded[group] = f"item {uid!r} is not kept any more, or was lost"
        elif zlib.crc32(body) != crc:
            loaded[group] = f"item {uid!r} is not what was written: its checksum is wrong"
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


def _matching(wanted: Wanted, *more: tuple[str, Any]) -> tuple[str, list[Any]]:
    """The SQL for what a read asks of groups, and its arguments."""
    return _where(
        "state = 'ready'",
        ("task = %s", wanted.task),
        ("job = ANY(%s)", wanted.jobs),
        ("size = %s", wanted.size),
        ("NOT (task = ANY(%s))", wanted.skip_tasks or None),
        *more,
    )


def _where(which: str, *conditions: tuple[str, Any]) -> tuple[str, list[Any]]:
    """The SQL for all conditions but those whose value is None, and their arguments."""
    kept = [(condition, value) for condition, value in conditions if value is not None]
    values = [value if isinstance(value, str | int) else list(value) for _, value in kept]
    return " AND ".join([which, *(condition for condition, _ in kept)]), values


def _jobs(tx: Tx) -> list[JobRecord]:
    rows = tx.rows("SELECT record FROM jobs ORDER BY number")
    return [msgspec.json.decode(text, type=JobRecord) for (text,) in rows]


def _last(jobs: Mapping[str, JobRecord]) -> JobRecord | None:
    return next(reversed(jobs.values()), None)  # type: ignore[call-overload]


def _put_job(session: _TransactionState, record: JobRecord) -> None:
    session.tx.rows(
        "INSERT INTO jobs (id, number, record) VALUES (%s, %s, %s) "
        "ON CONFLICT (id) DO UPDATE SET record = excluded.record",
        record.id,
        record.number,
        msgspec.json.encode(record).decode(),
    )
    session.count("jobs")
    session.refresh_jobs()


def _replaced(record: JobRecord) -> JobRecord:
    """A job that another one has replaced never goes on: little of its payload is needed."""
    payload = record.payload.items()
    short = {key: value for key, value in payload if len(msgspec.json.encode(value)) <= _SHORT_BYTES}
    return msgspec.structs.replace(record, payload=short)


def _by_reason(totals: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in totals.items() if name.startswith(prefix)}
