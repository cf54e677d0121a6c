"""PostgreSQL: one database for several servers of a buffer. Its tables are in a schema of their own.

All changes of a schema take turns, over all servers, by a lock that ends with the transaction. The clock is the
database's: servers agree on what has expired.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from rollstream.errors import ConfigError, DamageError, DataError, StorageError, StorageFullError

T = TypeVar("T")

_FROZEN_S: Final = 10.0
"""A server that froze or vanished loses its turn after it."""

_SETTINGS: Final = {
    "synchronous_commit": "on",
    # All statements are planned once, for an index: statistics of a young table (empty a minute ago) would have it
    # read as a whole, and a plan is kept.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "lock_timeout": "15s",  # for the turns of other servers
    "statement_timeout": "120s",  # for 64 MiB of items on a slow network
}

_CONNECTING: Final = {
    "application_name": "rollstream",
    "client_encoding": "UTF8",
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}

_HIDDEN: Final = "the PostgreSQL database"

_NOW: Final = "SELECT extract(epoch FROM clock_timestamp())::float8"


class PostgresDatabase:
    """A schema of a PostgreSQL database, made if it is not there.

    A call that loses its connection raises `StorageError`, and whether it was done is not known; later calls
    connect again.
    """

    def __init__(self, url: str, schema: str = "rollstream", *, frozen_s: float = _FROZEN_S) -> None:
        """Raises `ConfigError`."""
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                "a buffer on PostgreSQL needs psycopg, which is not installed: pip install 'rollstream[postgres]'"
            ) from None
        if not re.fullmatch("[a-z_][a-z0-9_]{0,62}", schema):
            raise ConfigError(f"{schema!r:.100} cannot name a schema: use small letters, digits and _")
        self._psycopg: Any = psycopg
        self._url, self._schema, self._database = url, schema, _without_password(url)
        self._settings = {
            **_SETTINGS,
            "search_path": f'"{schema}"',
            "idle_in_transaction_session_timeout": f"{frozen_s * 1000:.0f}ms",
        }
        digest = hashlib.blake2b(f"rollstream:{schema}".encode(), digest_size=8).digest()
        self._lock = int.from_bytes(digest, signed=True)
        self._connections: dict[str, Any] = {}
        """One for changes, one for looks."""

    def open(self, schema: str) -> None:
        try:
            self._psycopg.conninfo.conninfo_to_dict(self._url)
        except self._psycopg.ProgrammingError:  # whose text has the password
            raise ConfigError(
                f"{self._database}: not a URL that can be used; want postgresql://USER:PASSWORD@HOST:"
                "PORT/NAME (in a password %40 for @, %2F for /, %3F for ?, %23 for #, %25 for %)"
            ) from None
        self.transaction(lambda tx: self._create(tx, schema))

    def _create(self, tx: "_PostgresTx", schema: str) -> None:
        if (encoding := tx.rows("SHOW server_encoding")[0][0]) != "UTF8":
            raise ConfigError(f"{self._database} has the encoding {encoding}: make one with UTF8")
        # Asked first: what exists may be used also by who may not create it.
        if not tx.rows("SELECT 1 FROM pg_namespace WHERE nspname = %s", self._schema):
            tx.rows(f'CREATE SCHEMA "{self._schema}"')
        if not tx.rows("SELECT 1 WHERE to_regclass(%s) IS NOT NULL", f'"{self._schema}".bodies'):
            for statement in schema.format(key="BIGINT PRIMARY KEY", blob="BYTEA", clustered="").split(";"):
                tx.rows(statement)
            # Bodies are not worth the time that compressing them takes.
            tx.rows("ALTER TABLE bodies ALTER COLUMN body SET STORAGE EXTERNAL")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _connected(self, name: str) -> Any:
        connection = self._connections.get(name)
        if connection is None or connection.closed:
            connection = self._psycopg.connect(self._url, autocommit=True, **_CONNECTING)
            self._connections[name] = connection
            connection.prepare_threshold, connection.prepared_max = 0, 500
            integers, texts = self._psycopg.types.numeric.Int8Dumper, self._psycopg.types.string.StrDumper
            connection.adapters.register_dumper(
                int, integers
            )  # else each size of a number is a type of its own
            connection.adapters.register_dumper(str, texts)
            for setting, value in self._settings.items():
                connection.execute("SELECT set_config(%s, %s, false)", (setting, value), prepare=False)
        return connection

    def transaction(self, work: Callable[[Any], T], size: int = 0) -> T:
        with self._errors():
            connection = self._connected("changes")
            with connection.transaction():
                # A statement of its own: each one sees what was committed when it began.
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (self._lock,))
                return work(_PostgresTx(connection))

    def read(self, work: Callable[[Any], T]) -> T:
        with self._errors():
            connection = self._connected("looks")
            with connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                return work(_PostgresTx(connection))

    def disk_bytes(self) -> int:
        """Bytes of tables and indexes."""
        with self._errors():
            row = self._connected("looks").execute(
                "SELECT coalesce(sum(pg_total_relation_size(pg_class.oid)), 0)::bigint FROM pg_class "
                "JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = %s AND relkind = 'r'",
                (self._schema,),
            )
            return int(row.fetchone()[0])

    def tidy(self, *, all_of_it: bool = False) -> None:
        """The database does it by itself."""

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """The database's errors in our words."""
        try:
            yield
        except self._psycopg.Error as error:
            code = str(error.sqlstate or ("22" if isinstance(error, self._psycopg.DataError) else ""))
            for prefixes, kind, text in (
                (("53100",), StorageFullError, "has no room on its disk; nothing of this was stored"),
                (("XX",), DamageError, "is damaged"),
                (
                    ("22", "54"),
                    DataError,
                    "cannot store this",
                ),  # a NUL in a text, a text too long for an index
                (("28", "3D", "3F", "42501"), ConfigError, "cannot be used"),
            ):
                if code.startswith(prefixes):
                    raise kind(f"{self._database} {text}: {error}") from error
            is_safe = self._database != _HIDDEN and (urlsplit(self._url).password or "\0") not in str(error)
            raise StorageError(
                f"{self._database}: {error if is_safe else 'cannot be reached'} ({type(error).__name__})"
            ) from (error if is_safe else None)


class _PostgresTx:
    def __init__(self, connection: Any) -> None:
        self._cursor = connection.cursor(binary=True)
        ((self.now,),) = self.rows(_NOW)

    def room(self) -> int:
        return 2**62  # the database minds its disk itself, and refuses any change where it is full

    def put(self, body: bytes) -> tuple[bytes, int | None]:
        return body, None

    def get(self, body: bytes, file: int | None) -> bytes | None:
        return body

    def forget(self, files: Iterable[int]) -> None: ...

    def rows(self, sql: str, *arguments: Any) -> list[Any]:
        self._cursor.execute(sql, arguments or None)
        return self._cursor.fetchall() if self._cursor.description else []

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self._cursor.executemany(sql, rows)


def _without_password(url: str) -> str:
    """Host and database, where it is certain which part of the URL they are."""
    found = re.fullmatch(r"\w+://(?:[^@/?#]*@)?([\w.,\-]*(?::\d+)?(?:/[\w\-]*)?)(?:\?[^@]*)?", url)
    return f"postgresql://{found[1]}" if found else _HIDDEN
