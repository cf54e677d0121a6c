"""SQLite, the embedded default: one file in the buffer's folder, one writer thread, some reader threads."""

import asyncio
import contextlib
import functools
import json
import queue
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from rollstream.errors import DamageError, DataError, RunDirectoryError, StorageError, StorageFullError

T = TypeVar("T")

FILE: Final = "buffer.sqlite"

_READERS: Final = 2

_ROWS: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Of one INSERT: few different statements, so that they stay prepared."""

_PIECE: Final = 2**20
"""Bytes of a larger body that are written at a time: SQLite copies what it is given, twice."""

_IDLE_PAGES: Final = 1024
"""Free pages that are given back to the disk at a time, when nothing else is to be done."""

_SETTINGS: Final = (
    # Items of 2 KB fit three to a page; uids fall anywhere in their index, so larger pages cost more. This and the
    # next come before the first table.
    "PRAGMA page_size = 8192",
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA secure_delete = OFF",  # on in Debian's build: what is deleted would be written once more, as zeros
    "PRAGMA temp_store = MEMORY",
    "PRAGMA busy_timeout = 10000",
    "PRAGMA wal_autocheckpoint = 2048",  # pages, 16 MiB
    "PRAGMA cache_size = -65536",  # KiB: holds the index of a million uids
)


class SqliteDriver:
    """A database file in a folder. The caller sees to it that no other server uses the folder.

    With `read_only` it need not be opened, and may be another server's.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._read_only = read_only
        self._path = folder / FILE
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="buffer-writer")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="buffer-reader")
        self._connection: sqlite3.Connection | None = None
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        self._clock = 0.0
        """What the store's clock showed when it was opened: that of the last change. It stands still while no
        server runs."""
        self._opened = time.monotonic()

    async def open(self, schema: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._open, schema)

    def _open(self, schema: str) -> None:
        with _errors(self._path):
            self._connection = _connect(self._path)
            for setting in _SETTINGS:
                self._connection.execute(setting)
            self._connection.executescript(
                schema.format(key="INTEGER PRIMARY KEY", blob="BLOB", clustered="WITHOUT ROWID")
            )
            self._clock = self._connection.execute(
                "SELECT coalesce(json_extract(json, '$.clock'), 0) FROM totals"
            ).fetchone()[0]
            self._opened = time.monotonic()

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

    async def transaction(self, work: Callable[[Any], Awaitable[T]]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._transact, work)

    def _transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        connection = self._connection
        assert connection is not None
        with _errors(self._path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = _run(work(_Tx(connection, self._now())))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

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
                    return _run(work(_Tx(connection, self._now())))
                finally:
                    connection.execute("ROLLBACK")
            finally:
                self._idle.put(connection)

    async def disk_bytes(self) -> int:
        """Of the database and its write-ahead log."""
        files = (self._path, self._path.with_name(f"{FILE}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def tidy(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._tidy)

    def _tidy(self) -> None:
        assert self._connection is not None
        with _errors(self._path):
            if self._connection.execute("PRAGMA freelist_count").fetchone()[0] > _IDLE_PAGES:
                self._connection.execute(f"PRAGMA incremental_vacuum({_IDLE_PAGES})").fetchall()


class _Tx:
    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection = connection
        self.now = now

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
        await self.many(
            "INSERT INTO bodies (seq, body) VALUES ($1, $2)", [row for row in rows if len(row[1]) <= _PIECE]
        )
        for seq, body in rows:
            if len(body) <= _PIECE:
                continue
            self._connection.execute(
                "INSERT INTO bodies (seq, body) VALUES (?, zeroblob(?))", (seq, len(body))
            )
            with self._connection.blobopen("bodies", "body", seq) as blob:
                for at in range(0, len(body), _PIECE):
                    blob.write(body[at : at + _PIECE])


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
    """SQLite's errors in our words."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        # A quota or a limit of a file's size shows as a write error (EDQUOT, EFBIG).
        if name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"):
            raise StorageFullError(f"{path}: no room on the disk; nothing of this was stored") from error
        if name.startswith(("SQLITE_CONSTRAINT", "SQLITE_TOOBIG")):
            raise DataError(f"{path} cannot store this: {error}") from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise DamageError(f"{path} is damaged: {error}") from error
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
            raise RunDirectoryError(f"{path} cannot be opened for writing: {error}") from error
        raise StorageError(f"{path}: {error} ({name})") from error
