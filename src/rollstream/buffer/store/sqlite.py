"""SQLite, the embedded default: a file in the buffer's folder, and files with large bodies beside it.

Some room of the disk is kept for reads and acks, whoever fills the rest, as a file that means nothing. Items are
taken only while that file is whole and the disk has room beyond it; everything else takes of it, piece by piece,
once the disk is full. So what was acknowledged can always be read, acked and dropped, and that makes room again.
"""

import contextlib
import errno
import functools
import json
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from rollstream.buffer.store.large_bodies import BodyPlace, LargeBodies
from rollstream.errors import DamageError, DataError, RunDirectoryError, StorageError, StorageFullError

T = TypeVar("T")

FILE: Final = "buffer.sqlite"

_RESERVE: Final = "buffer.reserve"
_RESERVE_BYTES: Final = 32 * 2**20
_RESERVE_SHARE: Final = 8
"""The reserve is at most this part of the disk."""
_RESERVE_PIECES: Final = 32

_ROWS: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Rows of one INSERT: few different statements, so that they stay prepared."""

_LARGE: Final = 2**16
"""Bytes from which on a body is written beside the database, once: SQLite writes it to its log, then to its pages."""

_PLACE: Final = struct.Struct("<QQ")
"""Where a large body lies in its file, and its size."""

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
    """A database file in a folder, with a connection for changes and one for looks.

    The caller sees to it that no other server uses the folder. With `read_only` it need not be opened, and may be
    another server's.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._read_only = read_only
        self._path, self._log = folder / FILE, folder / f"{FILE}-wal"
        self.large_bodies = LargeBodies(folder / "bodies")
        self._changes: sqlite3.Connection | None = None
        self._looks: sqlite3.Connection | None = None
        self._clock = 0.0
        """The store's clock when it was opened, which is that of the last change. It stands still while no
        server runs."""
        self._opened = time.monotonic()

    @functools.cached_property
    def _reserve(self) -> int:
        """Bytes of the reserve, when it is whole."""
        disk = os.statvfs(self._path.parent)
        return min(_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _RESERVE_SHARE)

    @property
    def _log_pages(self) -> int:
        """The log grows to so many (16 MiB): half of the reserve; the other half takes them into the database."""
        return max(16, self._reserve // 2 // _PAGE)

    def open(self, schema: str) -> None:
        with contextlib.suppress(OSError):  # SQLite says it better; its log has the database's mode
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        with _errors(self._path):
            self._changes = connection = _connect(self._path)
            self._with_reserve(lambda: self._set_up(connection, schema))
            self._refill(_size(self._log))
            named = connection.execute(
                "SELECT file, count(*) FROM bodies WHERE file IS NOT NULL GROUP BY file"
            )
            self.large_bodies.open(dict(named.fetchall()), self._reserve // 2)
            self._opened = time.monotonic()

    def _set_up(self, connection: sqlite3.Connection, schema: str) -> None:
        """Writes nothing where everything is there: a full disk can be opened."""
        for setting in (*_SETTINGS, f"PRAGMA wal_autocheckpoint = {self._log_pages}"):
            connection.execute(setting)
        connection.executescript(
            schema.format(key="INTEGER PRIMARY KEY", blob="BLOB", clustered="WITHOUT ROWID")
        )
        ((self._clock,),) = connection.execute(
            "SELECT coalesce(json_extract(json, '$.clock'), 0) FROM totals"
        )

    def set_clock(self, seconds: float) -> None:
        """Sets the store's clock, which a store that only looks does not know."""
        self._clock, self._opened = seconds, time.monotonic()

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
            if self.room() < size:
                self._empty_log(connection)
                self._refill(_size(self._log))
            if size:
                return self._attempt(connection, work)
            return self._with_reserve(lambda: self._attempt(connection, work))

    def _attempt(self, connection: sqlite3.Connection, work: Callable[[Any], T]) -> T:
        connection.execute("BEGIN IMMEDIATE")
        committing = False
        try:
            result = work(self._tx(connection))
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

    def read(self, work: Callable[[Any], T]) -> T:
        with _errors(self._path):
            if (connection := self._looks) is None:
                connection = self._looks = _connect(self._path, read_only=self._read_only)
                connection.execute("PRAGMA query_only = ON")
                connection.execute("PRAGMA mmap_size = 268435456")
            connection.execute("BEGIN")
            try:
                return work(self._tx(connection))
            finally:
                connection.execute("ROLLBACK")

    def _tx(self, connection: sqlite3.Connection) -> "_SqliteTx":
        return _SqliteTx(self, connection, self._clock + time.monotonic() - self._opened)

    def disk_bytes(self) -> int:
        """Bytes of the database, its log, and large bodies."""
        return self._path.stat().st_size + _size(self._log) + self.large_bodies.size()

    # -- room on the disk

    def room(self) -> int:
        """See `Tx`. Each byte is written to the log first, and brought into the database later."""
        spare = self._free() - _size(self._log)
        if (
            not self._read_only and self._kept() < self._reserve
        ):  # of a copy, its server makes one at its start
            spare = min(0, spare)
        return spare // 2 - self._reserve // 4

    def _free(self) -> int:
        """Bytes that can be written beside the reserve; without end where the file system does not say."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else 2**62

    def _kept(self) -> int:
        """Bytes of the reserve as it is."""
        return _size(self._path.with_name(_RESERVE))

    def _refill(self, beside: int = 0) -> None:
        """Makes the reserve whole where that leaves so many bytes free."""
        kept = self._kept()
        if kept >= self._reserve or self._free() - beside < self._reserve - kept:
            return
        with contextlib.suppress(OSError):  # somebody was faster; or a quota
            fd = os.open(self._path.with_name(_RESERVE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, kept, self._reserve - kept)
            finally:
                os.close(fd)

    def _with_reserve(self, action: Callable[[], T]) -> T:
        """Does what needs room and makes none, as do reads and acks: it takes the reserve, once the disk is full."""
        while True:
            try:
                return action()
            except (sqlite3.Error, OSError) as error:
                if not _is_full(error) or not (kept := self._kept()):
                    raise
            piece = self._reserve // _RESERVE_PIECES + 1
            os.truncate(self._path.with_name(_RESERVE), max(0, kept - piece))
            if self._changes is not None:
                self._empty_log(self._changes)

    def _empty_log(self, connection: sqlite3.Connection) -> None:
        """Brings the log into the database and gives its room back, as far as readers and the disk let it."""
        if not _size(self._log):
            return
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA busy_timeout = 200")  # of a reader that reads long
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute("PRAGMA busy_timeout = 10000")

    def tidy(self, *, all_of_it: bool = False) -> None:
        connection = self._changes
        assert connection is not None
        with _errors(self._path):
            self.large_bodies.delete_unnamed()  # not when it is opened: its format may be another one
            vacuum = f"PRAGMA incremental_vacuum({min(_IDLE_PAGES, self._log_pages)})"
            while True:
                is_short = all_of_it or self.room() < 0
                (free,) = connection.execute("PRAGMA freelist_count").fetchone()
                if free > (0 if is_short else _IDLE_PAGES):
                    self._with_reserve(lambda: connection.execute(vacuum).fetchall())
                if is_short:
                    self._empty_log(connection)
                    self._refill()
                if not all_of_it or free <= _IDLE_PAGES:
                    return


class _SqliteTx:
    def __init__(self, database: SqliteDatabase, connection: sqlite3.Connection, now: float) -> None:
        self._large, self._connection, self.now = database.large_bodies, connection, now
        self.room = database.room

    def put(self, body: bytes) -> tuple[bytes, int | None]:
        if len(body) < _LARGE:
            return body, None
        place = self._large.append(body)
        return _PLACE.pack(place.at, place.size), place.file

    def get(self, body: bytes, file: int | None) -> bytes | None:
        return body if file is None else self._large.read(BodyPlace(file, *_PLACE.unpack(body)))

    def forget(self, files: Iterable[int]) -> None:
        for file in files:
            self._large.forget(file)

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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


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
        for prefixes, kind, text in (
            (("SQLITE_CONSTRAINT", "SQLITE_TOOBIG"), DataError, "cannot store this"),
            (("SQLITE_CORRUPT", "SQLITE_NOTADB"), DamageError, "is damaged"),
            (
                ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM"),
                RunDirectoryError,
                "cannot be opened for writing",
            ),
        ):
            if name.startswith(prefixes):
                raise kind(f"{path} {text}: {error}") from error
        raise StorageError(f"{path}: {error} ({name})") from error


def _is_full(error: sqlite3.Error | OSError) -> bool:
    # A quota or a limit of a file's size shows as a write error of SQLite.
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    full = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")
    return getattr(error, "sqlite_errorname", "") in full
