"""SQLite, the embedded default: a file in the buffer's folder, and files with large bodies beside it.

There is a connection for changes and one for looks.
"""

import contextlib
import errno
import functools
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from rollstream.buffer.store.large_bodies import LargeBodies, Place
from rollstream.buffer.store.room import DiskRoom
from rollstream.errors import DamageError, DataError, RunDirectoryError, StorageError, StorageFullError

T = TypeVar("T")

FILE: Final = "buffer.sqlite"

_ROWS: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Rows of one INSERT: few different statements, so that they stay prepared."""

_LARGE: Final = 2**16
"""Bytes from which on a body is written beside the database, once: SQLite writes it to its log, then to its pages."""

_PLACES: Final = """;
CREATE TABLE IF NOT EXISTS large (
  seq INTEGER PRIMARY KEY, file INTEGER NOT NULL, at INTEGER NOT NULL, size INTEGER NOT NULL)
"""

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


class SqliteDatabase:
    """A database file in a folder. The caller sees to it that no other server uses the folder.

    With `read_only` it need not be opened, and may be another server's.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._read_only = read_only
        self._path = folder / FILE
        self._log = folder / f"{FILE}-wal"
        self.large_bodies = LargeBodies(folder / "bodies")
        self._changes: sqlite3.Connection | None = None
        self._looks: sqlite3.Connection | None = None
        self._clock = 0.0
        """The store's clock when it was opened, which is that of the last change. It stands still while no
        server runs."""
        self._opened = time.monotonic()

    @functools.cached_property
    def _room(self) -> DiskRoom:
        return DiskRoom(self._path.parent)

    @functools.cached_property
    def _log_pages(self) -> int:
        """The log grows to so many (16 MiB): half of the reserve; the other half takes them into the database."""
        return max(16, self._room.reserve // 2 // _PAGE)

    def open(self, schema: str) -> None:
        with contextlib.suppress(OSError):  # SQLite says it better; its log has the database's mode
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        with _errors(self._path):
            self._changes = connection = _connect(self._path)
            self._with_reserve(lambda: self._set_up(connection, schema))
            self._room.refill(self._log_bytes())
            named = connection.execute("SELECT file, count(*) FROM large GROUP BY file")
            self.large_bodies.open(dict(named.fetchall()), self._room.reserve // 2)
            self._opened = time.monotonic()

    def _set_up(self, connection: sqlite3.Connection, schema: str) -> None:
        """Writes nothing where everything is there: a full disk can be opened."""
        for setting in (*_SETTINGS, f"PRAGMA wal_autocheckpoint = {self._log_pages}"):
            connection.execute(setting)
        schema = schema.format(key="INTEGER PRIMARY KEY", blob="BLOB", clustered="WITHOUT ROWID")
        connection.executescript(schema + _PLACES)
        ((self._clock,),) = connection.execute(
            "SELECT coalesce(json_extract(json, '$.clock'), 0) FROM totals"
        )

    def set_clock(self, seconds: float) -> None:
        """Sets the store's clock, which a store that only looks does not know."""
        self._clock, self._opened = seconds, time.monotonic()

    def _now(self) -> float:
        return self._clock + time.monotonic() - self._opened

    def close(self) -> None:
        self.large_bodies.close()
        # The connection for changes is the last one: it brings the log into the database, and takes it away.
        for connection in (self._looks, self._changes):
            if connection is not None:
                connection.close()

    def transaction(self, work: Callable[[Any], T], size: int = 0) -> T:
        connection = self._changes
        assert connection is not None
        with _errors(self._path):
            if any(self.missing_room(connection, size)):
                self._empty_log(connection)
                self._room.refill(self._log_bytes())
            if size:
                return self._attempt(connection, work)
            return self._with_reserve(lambda: self._attempt(connection, work))

    def _attempt(self, connection: sqlite3.Connection, work: Callable[[Any], T]) -> T:
        connection.execute("BEGIN IMMEDIATE")
        committing = False
        try:
            result = work(_Tx(self, connection, self._now()))
            self.large_bodies.sync()
            committing = True
            connection.execute("COMMIT")
        except BaseException:
            self.large_bodies.undo(cut=not committing)
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.large_bodies.keep()
        return result

    def _with_reserve(self, action: Callable[[], T]) -> T:
        """Does what needs room and makes none, as do reads and acks: it takes the reserve, once the disk is full."""
        while True:
            try:
                return action()
            except (sqlite3.Error, OSError) as error:
                if not _is_full(error) or not self._room.give():
                    raise
            if self._changes is not None:
                self._empty_log(self._changes)

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

    def read(self, work: Callable[[Any], T]) -> T:
        with _errors(self._path):
            if (connection := self._looks) is None:
                connection = self._looks = _connect(self._path, read_only=self._read_only)
                connection.execute("PRAGMA query_only = ON")
                connection.execute("PRAGMA mmap_size = 268435456")
            connection.execute("BEGIN")
            try:
                return work(_Tx(self, connection, self._now()))
            finally:
                connection.execute("ROLLBACK")

    def disk_bytes(self) -> int:
        """Bytes of the database, its log, and large bodies."""
        return self._path.stat().st_size + self._log_bytes() + self.large_bodies.size()

    def tidy(self) -> None:
        connection = self._changes
        assert connection is not None
        with _errors(self._path):
            self.large_bodies.delete_unnamed()  # not when it is opened: its format may be another one
            is_short = any(self.missing_room(connection, 0))
            if connection.execute("PRAGMA freelist_count").fetchone()[0] > (0 if is_short else _IDLE_PAGES):
                vacuum = f"PRAGMA incremental_vacuum({min(_IDLE_PAGES, self._log_pages)})"
                self._with_reserve(lambda: connection.execute(vacuum).fetchall())
            if is_short:
                self._empty_log(connection)
                self._room.refill(0)


class _Tx:
    def __init__(self, database: SqliteDatabase, connection: sqlite3.Connection, now: float) -> None:
        self._database, self._connection, self.now = database, connection, now

    def missing_room(self, size: int) -> tuple[int, int]:
        return self._database.missing_room(self._connection, size)

    def put_beside(self, bodies: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
        large = self._database.large_bodies
        places = [(seq, *large.append(body)) for seq, body in bodies if len(body) >= _LARGE]
        self.many("INSERT INTO large (seq, file, at, size) VALUES (%s, %s, %s, %s)", places)
        return [row for row in bodies if len(row[1]) < _LARGE] if places else bodies

    def beside(self, seq: int) -> bytes | None:
        rows = self.rows("SELECT file, at, size FROM large WHERE seq = %s", seq)
        return self._database.large_bodies.read(Place(*rows[0])) if rows else None

    def delete_beside(self, groups: Sequence[int]) -> None:
        for (file,) in self.rows(
            "DELETE FROM large WHERE seq IN (SELECT seq FROM items WHERE grp = ANY(%s)) RETURNING file",
            groups,
        ):
            self._database.large_bodies.forget(file)

    def rows(self, sql: str, *arguments: Any) -> list[Any]:
        plain = [json.dumps(value) if isinstance(value, list) else value for value in arguments]
        return self._connection.execute(_translated(sql), plain).fetchall()

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Runs as few statements as possible: each one gives Python's lock away, and waits to get it back."""
        if "VALUES (" not in sql:
            self._connection.executemany(_translated(sql), rows)
            return
        at = 0
        for count in _ROWS:
            while len(rows) - at >= count:
                values = [value for row in rows[at : at + count] for value in row]
                self._connection.execute(_insert_of(sql, count), values)
                at += count


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    name = f"{path.absolute().as_uri()}{'?mode=ro' if read_only else ''}"
    return sqlite3.connect(
        name, uri=True, isolation_level=None, check_same_thread=False, cached_statements=256
    )


@functools.lru_cache(512)
def _translated(sql: str) -> str:
    return sql.replace("= ANY(%s)", "IN (SELECT value FROM json_each(?))").replace("%s", "?")


@functools.lru_cache(64)
def _insert_of(sql: str, count: int) -> str:
    """An INSERT of one row as one of many."""
    before, _, rest = sql.partition("VALUES (")
    marks, _, after = rest.partition(")")
    return _translated(f"{before}VALUES {', '.join([f'({marks})'] * count)}{after}")


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """SQLite's errors in our words."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if _is_full(error):
            raise StorageFullError(f"{path}: no room on the disk; nothing of this was stored") from error
        name = getattr(error, "sqlite_errorname", "") or type(error).__name__
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
