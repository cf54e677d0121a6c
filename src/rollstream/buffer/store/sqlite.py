"""SQLite, the embedded default: one file in the buffer's folder, one writer thread, some reader threads."""

import asyncio
import contextlib
import errno
import functools
import json
import os
import queue
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from rollstream.buffer.store.large_bodies import LargeBodies, Place
from rollstream.buffer.store.room import DiskRoom
from rollstream.errors import DamageError, DataError, RunDirectoryError, StorageError, StorageFullError

T = TypeVar("T")

FILE: Final = "buffer.sqlite"

_READERS: Final = 2

_ROWS: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Of one INSERT: few different statements, so that they stay prepared."""

_LARGE: Final = 2**16
"""Bytes from which on a body is written to a file beside the database, once: SQLite writes it to its log, then to
its pages."""

_SCHEMA: Final = """;
CREATE TABLE IF NOT EXISTS large (
  seq INTEGER PRIMARY KEY, file INTEGER NOT NULL, at INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS large_of_file ON large (file)
"""
"""The places of large bodies."""

_PAGE: Final = 8192

_IDLE_PAGES: Final = 1024
"""Free pages that are given back to the disk at a time, when nothing else is to be done."""

_SETTINGS: Final = (
    # Items of 2 KB fit three to a page; uids fall anywhere in their index, so larger pages cost more. This and the
    # next come before the first table.
    f"PRAGMA page_size = {_PAGE}",
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA secure_delete = OFF",  # on in Debian's build: what is deleted would be written once more, as zeros
    "PRAGMA temp_store = MEMORY",
    "PRAGMA busy_timeout = 10000",
    "PRAGMA cache_size = -65536",  # KiB: holds the index of a million uids
)


class SqliteDriver:
    """A database file in a folder. The caller sees to it that no other server uses the folder.

    With `read_only` it need not be opened, and may be another server's.
    """

    formats: tuple[int, ...] = (3, 4)
    """4: large bodies are beside the database."""

    def __init__(self, folder: Path, *, read_only: bool = False, large: int = _LARGE) -> None:
        self._read_only = read_only
        self.large = large
        self.large_bodies = LargeBodies(folder / "bodies")
        self._path = folder / FILE
        self._log = folder / f"{FILE}-wal"
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="buffer-writer")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="buffer-reader")
        self._connection: sqlite3.Connection | None = None
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        self._clock = 0.0
        """What the store's clock showed when it was opened: that of the last change. It stands still while no
        server runs."""
        self._opened = time.monotonic()

    @functools.cached_property
    def _room(self) -> DiskRoom:
        return DiskRoom(self._path.parent)

    @functools.cached_property
    def _log_pages(self) -> int:
        """The log grows to so many (16 MiB): half of the reserve; the other half takes them into the database."""
        return max(16, self._room.reserve // 2 // _PAGE)

    async def open(self, schema: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._open, schema)

    def _open(self, schema: str) -> None:
        with contextlib.suppress(OSError):  # SQLite says it better; its log has the database's mode
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        with _errors(self._path):
            self._connection = connection = _connect(self._path)
            self._with_reserve(lambda: self._set_up(connection, schema))
            self._room.refill(self._log_bytes())
            self.large_bodies.open(file for (file,) in connection.execute("SELECT DISTINCT file FROM large"))
            self._opened = time.monotonic()

    def _set_up(self, connection: sqlite3.Connection, schema: str) -> None:
        """Writes nothing where everything is there: a full disk can be opened."""
        for setting in (*_SETTINGS, f"PRAGMA wal_autocheckpoint = {self._log_pages}"):
            connection.execute(setting)
        schema = schema.format(key="INTEGER PRIMARY KEY", blob="BLOB", clustered="WITHOUT ROWID")
        connection.executescript(schema + _SCHEMA)
        self._clock = connection.execute(
            "SELECT coalesce(json_extract(json, '$.clock'), 0) FROM totals"
        ).fetchone()[0]

    def set_clock(self, seconds: float) -> None:
        """Sets the store's clock, which a store that only looks does not know."""
        self._clock, self._opened = seconds, time.monotonic()

    def _now(self) -> float:
        return self._clock + time.monotonic() - self._opened

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._close)
        self._writer.shutdown()

    def _close(self) -> None:
        # The writer's connection is the last one: it brings the log into the database, and takes it away.
        self._readers.shutdown()
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                break
        if self._connection is not None:
            self._connection.close()

    async def transaction(self, work: Callable[[Any], Awaitable[T]], size: int = 0) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._transact, work, size)

    def _transact(self, work: Callable[[Any], Awaitable[T]], size: int) -> T:
        connection = self._connection
        assert connection is not None
        with _errors(self._path):
            if any(self.missing_room(connection, size)):
                self._empty_log(connection)
                self._room.refill(self._log_bytes())
            if size:
                return self._attempt(connection, work)
            return self._with_reserve(lambda: self._attempt(connection, work))

    def _attempt(self, connection: sqlite3.Connection, work: Callable[[Any], Awaitable[T]]) -> T:
        tx = _Tx(self, connection, self._now())
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = _run(work(tx))
            self.large_bodies.sync()
        except BaseException:
            self.large_bodies.undo()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        try:
            connection.execute("COMMIT")
        except BaseException:
            self.large_bodies.leave()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.large_bodies.keep()
        with contextlib.suppress(sqlite3.Error, OSError):  # what stays is deleted at the next opening
            for file in tx.emptied:
                if not connection.execute("SELECT 1 FROM large WHERE file = ? LIMIT 1", (file,)).fetchall():
                    self.large_bodies.delete(file)
        return result

    def _with_reserve(self, action: Callable[[], T]) -> T:
        """Does what needs room and makes none, as do reads and acks: of the reserve, once the disk is full."""
        while True:
            try:
                return action()
            except (sqlite3.Error, OSError) as error:
                if not _is_full(error) or not self._room.give():
                    raise
            if self._connection is not None:
                self._empty_log(self._connection)

    def _empty_log(self, connection: sqlite3.Connection) -> None:
        """Brings the log into the database and gives its room back, as far as readers and the disk let it."""
        if not self._log_bytes():
            return
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA busy_timeout = 200")  # of a reader that reads long
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute("PRAGMA busy_timeout = 10000")

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except FileNotFoundError:
            return 0

    def missing_room(self, connection: sqlite3.Connection, size: int) -> tuple[int, int]:
        """Bytes that the disk lacks to take items of this size, and those that disk and free pages together lack.

        Each byte is written to the log first, and brought into the database later: there must be room for both,
        also for what is in the log now.
        """
        needed = max(size, self._room.reserve // 4)
        spare = self._room.free() - self._log_bytes()
        if not self._read_only and not self._room.is_whole():  # of a copy, its server makes one at its start
            spare = min(0, spare)
        if spare >= 2 * needed:
            return 0, 0
        pages = connection.execute("PRAGMA freelist_count").fetchone()[0] * _PAGE
        return max(0, needed - spare), max(0, 2 * needed - spare - pages)

    async def read(self, work: Callable[[Any], Awaitable[T]]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def _read(self, work: Callable[[Any], Awaitable[T]]) -> T:
        with _errors(self._path):
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                connection = _connect(self._path, read_only=self._read_only)
                connection.execute("PRAGMA query_only = ON")
                connection.execute("PRAGMA mmap_size = 268435456")
            try:
                connection.execute("BEGIN")
                try:
                    return _run(work(_Tx(self, connection, self._now())))
                finally:
                    connection.execute("ROLLBACK")
            finally:
                self._idle.put(connection)

    async def disk_bytes(self) -> int:
        """Bytes of the database, its log, and large bodies."""
        return self._path.stat().st_size + self._log_bytes() + self.large_bodies.size()

    async def tidy(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._tidy)

    def _tidy(self) -> None:
        connection = self._connection
        assert connection is not None
        with _errors(self._path):
            is_short = any(self.missing_room(connection, 0))
            if connection.execute("PRAGMA freelist_count").fetchone()[0] > (0 if is_short else _IDLE_PAGES):
                vacuum = f"PRAGMA incremental_vacuum({min(_IDLE_PAGES, self._log_pages)})"
                self._with_reserve(lambda: connection.execute(vacuum).fetchall())
            if is_short:
                self._empty_log(connection)
                self._room.refill(0)


class _Tx:
    def __init__(self, driver: SqliteDriver, connection: sqlite3.Connection, now: float) -> None:
        self._driver = driver
        self._connection = connection
        self.now = now
        self.emptied: set[int] = set()
        """Files of large bodies of which some were deleted."""
        self._freed = 0

    def missing_room(self, size: int) -> tuple[int, int]:
        disk, freed = self._driver.missing_room(self._connection, size)
        return disk, max(0, freed - self._freed)

    async def rows(self, sql: str, *arguments: Any) -> list[Any]:
        return self._connection.execute(_translated(sql), _plain(arguments)).fetchall()

    async def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """As few statements as possible: each one gives Python's lock away, and waits to get it back."""
        if "VALUES (" not in sql:
            self._connection.executemany(_translated(sql), rows)
            return
        at = 0
        for count in _ROWS:
            while len(rows) - at >= count:
                values = [value for row in rows[at : at + count] for value in row]
                self._connection.execute(_of_rows(sql, count), values)
                at += count

    async def add_bodies(self, rows: Sequence[tuple[int, bytes]]) -> None:
        large = [row for row in rows if len(row[1]) >= self._driver.large]
        if large:
            places = self._driver.large_bodies.append([body for _, body in large])
            await self.many(
                "INSERT INTO large (seq, file, at, size) VALUES ($1, $2, $3, $4)",
                [(seq, *place) for (seq, _), place in zip(large, places, strict=True)],
            )
            rows = [row for row in rows if len(row[1]) < self._driver.large]
        await self.many("INSERT INTO bodies (seq, body) VALUES ($1, $2)", rows)

    async def other_bodies(self, rows: Sequence[int]) -> dict[int, bytes]:
        if not await self.rows("SELECT 1 FROM sqlite_master WHERE name = 'large'"):
            return {}  # a folder of an earlier version, which is only looked at
        found = await self.rows("SELECT seq, file, at, size FROM large WHERE seq IN :ids($1)", list(rows))
        return self._driver.large_bodies.read({seq: Place(*place) for seq, *place in found})

    async def delete_bodies(self, groups: Sequence[int]) -> None:
        theirs = "WHERE seq IN (SELECT seq FROM items WHERE grp IN :ids($1))"
        await self.rows(f"DELETE FROM bodies {theirs}", list(groups))
        for file, size in await self.rows(f"DELETE FROM large {theirs} RETURNING file, size", list(groups)):
            self.emptied.add(file)
            self._freed += size


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    name = f"{path.absolute().as_uri()}{'?mode=ro' if read_only else ''}"
    return sqlite3.connect(
        name, uri=True, isolation_level=None, check_same_thread=False, cached_statements=256
    )


def _run(coroutine: Awaitable[T]) -> T:
    """Runs a coroutine that never waits: this database's calls return at once."""
    try:
        coroutine.__await__().send(None)
    except StopIteration as done:
        return cast(T, done.value)
    raise RuntimeError("an operation of the store waited for something else than the database")


@functools.lru_cache(512)
def _translated(sql: str) -> str:
    sql = re.sub(r":(?:ids|texts)\(\$(\d+)\)", r"(SELECT value FROM json_each(?\1))", sql)
    return re.sub(r"\$(\d+)", r"?\1", sql)


@functools.lru_cache(64)
def _of_rows(sql: str, count: int) -> str:
    """An INSERT of one row as one of many. Its `$1, $2, …` are in order, and stand in VALUES only."""
    before, row, after = re.split(r"VALUES (\([^)]*\))", sql)
    marks = re.sub(r"\$\d+", "?", row)
    return f"{before}VALUES {', '.join([marks] * count)}{after}"


def _plain(arguments: tuple[Any, ...]) -> list[Any]:
    return [json.dumps(one) if isinstance(one, list) else one for one in arguments]


@contextlib.contextmanager
def _errors(path: Path) -> Any:
    """SQLite's errors, and those of the files beside it, in our words."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if _is_full(error):
            raise StorageFullError(f"{path}: no room on the disk; nothing of this was stored") from error
        if isinstance(error, OSError):
            raise StorageError(f"{path.parent}: {error}") from error
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_CONSTRAINT", "SQLITE_TOOBIG")):
            raise DataError(f"{path} cannot store this: {error}") from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise DamageError(f"{path} is damaged: {error}") from error
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
            raise RunDirectoryError(f"{path} cannot be opened for writing: {error}") from error
        raise StorageError(f"{path}: {error} ({name})") from error


def _is_full(error: sqlite3.Error | OSError) -> bool:
    # A quota or a limit of a file's size shows as a write error of SQLite.
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "sqlite_errorname", "") in (
        "SQLITE_FULL",
        "SQLITE_IOERR_WRITE",
        "SQLITE_IOERR_SHMSIZE",
    )
