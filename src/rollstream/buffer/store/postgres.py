"""PostgreSQL: one database for several servers of a buffer. Its tables are in a schema of their own.

All changes of a schema take turns, over all servers, by a lock that ends with the transaction. The clock is the
database's: servers agree on what has expired.
"""

import contextlib
import functools
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from rollstream.errors import ConfigError, DamageError, DataError, StorageError, StorageFullError

T = TypeVar("T")

_CONNECTIONS: Final = 6
"""One for the changes, the others for looking."""

_CONNECT_S: Final = 5.0
_COMMAND_S: Final = 10.0
"""For a statement: a server that does not answer in this time is taken for lost."""

_MANY_S: Final = 120.0
"""For many rows at once, 64 MiB of items on a slow network."""

_TURN_S: Final = 15.0
"""For the turns of other servers."""

_FROZEN_S: Final = 10.0
"""A server that froze or vanished loses its turn after it."""

_SETTINGS: Final = {
    "application_name": "rollstream",
    "synchronous_commit": "on",
    "client_encoding": "UTF8",
    # All statements are planned once, for an index: statistics of a young table (empty a minute ago) would have it
    # read as a whole, and a plan is kept.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "lock_timeout": f"{_TURN_S:.0f}s",
    "tcp_user_timeout": "10s",
    "tcp_keepalives_idle": "4",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}

_HIDDEN: Final = "the PostgreSQL database"
_AFTER_TABLES: Final = "ALTER TABLE bodies ALTER COLUMN body SET STORAGE EXTERNAL"
"""Bodies are not worth the time that compressing them takes."""


class PostgresDriver:
    """A schema of a PostgreSQL database, made if it is not there.

    A call that loses its connection raises `StorageError`, and whether it was done is not known; later calls
    connect again.
    """

    formats: tuple[int, ...] = (3,)

    def __init__(self, url: str, schema: str = "rollstream", *, frozen_s: float = _FROZEN_S) -> None:
        """Raises `ConfigError`."""
        try:
            import asyncpg
        except ImportError:
            raise ConfigError(
                "a buffer on PostgreSQL needs asyncpg, which is not installed: pip install 'rollstream[postgres]'"
            ) from None
        if not re.fullmatch("[a-z_][a-z0-9_]{0,62}", schema):
            raise ConfigError(f"{schema!r:.100} cannot name a schema: use small letters, digits and _")
        self._asyncpg = asyncpg
        self._url, self._schema, self._database = url, schema, _without_password(url)
        self._settings = {
            **_SETTINGS,
            "search_path": f'"{schema}"',
            "idle_in_transaction_session_timeout": f"{frozen_s * 1000:.0f}ms",
        }
        digest = hashlib.blake2b(f"rollstream:{schema}".encode(), digest_size=8).digest()
        self._lock = int.from_bytes(digest, signed=True)
        self._pool: Any = None

    async def open(self, schema: str) -> None:
        with self._errors():
            try:
                self._pool = await self._asyncpg.create_pool(
                    self._url,
                    min_size=0,  # else a lost database has the pool write warnings
                    max_size=_CONNECTIONS,
                    max_inactive_connection_lifetime=0,
                    timeout=_CONNECT_S,
                    command_timeout=_COMMAND_S,
                    reset=_nothing_to_reset,
                    server_settings=self._settings,
                )
                await self._pool.release(await self._pool.acquire(timeout=_COMMAND_S))
            except ValueError as error:  # among them asyncpg's own, for an option
                detail = "" if self._database == _HIDDEN else f" ({error})"
                raise ConfigError(
                    f"{self._database}: not a URL that can be used{detail}; want postgresql://USER:PASSWORD@HOST:"
                    "PORT/NAME (in a password %40 for @, %2F for /, %3F for ?, %23 for #, %25 for %)"
                ) from None
        try:
            await self.transaction(lambda tx: self._create(tx, schema))
        except BaseException:
            self._pool.terminate()
            raise

    async def _create(self, tx: "_Tx", schema: str) -> None:
        if (encoding := (await tx.rows("SHOW server_encoding"))[0][0]) != "UTF8":
            raise ConfigError(f"{self._database} has the encoding {encoding}: make one with UTF8")
        # Asked first: what exists may be used also by who may not create it.
        if not await tx.rows("SELECT 1 FROM pg_namespace WHERE nspname = $1", self._schema):
            await tx.rows(f'CREATE SCHEMA "{self._schema}"')
        if not await tx.rows("SELECT 1 WHERE to_regclass($1) IS NOT NULL", f'"{self._schema}".bodies'):
            script = schema.format(key="BIGINT PRIMARY KEY", blob="BYTEA", clustered="")
            for statement in (*filter(str.strip, script.split(";")), _AFTER_TABLES):
                await tx.rows(statement)

    async def close(self) -> None:
        """Waits for what is under way."""
        with self._errors():
            await self._pool.close()

    async def transaction(self, work: Callable[[Any], Awaitable[T]], size: int = 0) -> T:
        with self._errors():
            async with self._pool.acquire(timeout=_COMMAND_S) as connection, connection.transaction():
                # A statement of its own: each one sees what was committed when it began.
                now = await connection.fetchval(
                    "SELECT extract(epoch FROM clock_timestamp())::float8 FROM "
                    "(SELECT pg_advisory_xact_lock($1) OFFSET 0) AS turn",
                    self._lock,
                    timeout=_TURN_S + 2,  # the database's own word comes first, if it can speak
                )
                return await work(_Tx(connection, now))

    async def read(self, work: Callable[[Any], Awaitable[T]]) -> T:
        with self._errors():
            async with (
                self._pool.acquire(timeout=_COMMAND_S) as connection,
                connection.transaction(isolation="repeatable_read", readonly=True),
            ):
                now = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
                return await work(_Tx(connection, now))

    async def disk_bytes(self) -> int:
        """Of tables and indexes."""
        with self._errors():
            size: int = await self._pool.fetchval(
                "SELECT coalesce(sum(pg_total_relation_size(pg_class.oid)), 0)::bigint FROM pg_class "
                "JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = $1 AND relkind = 'r'",
                self._schema,
            )
            return size

    async def tidy(self) -> None:
        """The database does it by itself."""

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """The database's errors in our words."""
        try:
            yield
        except ValueError as error:  # asyncpg's, of an argument
            raise DataError(f"{self._database} cannot store this: {error}") from error
        except (OSError, self._asyncpg.InterfaceError, self._asyncpg.InternalClientError) as error:
            raise StorageError(
                f"{self._database} cannot be reached: {error or type(error).__name__}"
            ) from error
        except self._asyncpg.PostgresError as error:
            code = str(error.sqlstate or "")
            if code == "53100":
                raise StorageFullError(
                    f"{self._database}: no room on its disk; nothing of this was stored"
                ) from error
            if code.startswith("XX"):
                raise DamageError(f"{self._database} is damaged: {error}") from error
            if code.startswith(("22", "54")):  # a NUL in a text, a text too long for an index
                raise DataError(f"{self._database} cannot store this: {error}") from error
            if code.startswith(("28", "3D", "3F", "42501")):
                raise ConfigError(f"{self._database} cannot be used: {error}") from error
            raise StorageError(f"{self._database}: {error} ({type(error).__name__})") from error


class _Tx:
    def __init__(self, connection: Any, now: float) -> None:
        self._connection = connection
        self.now = now

    def missing_room(self, size: int) -> tuple[int, int]:
        return 0, 0  # the database minds its disk itself, and refuses any change where it is full

    async def rows(self, sql: str, *arguments: Any) -> list[Any]:
        found: list[Any] = await self._connection.fetch(_translated(sql), *arguments)
        return found

    async def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        await self._connection.executemany(_translated(sql), rows, timeout=_MANY_S)

    async def add_bodies(self, rows: Sequence[tuple[int, bytes]]) -> None:
        await self.many("INSERT INTO bodies (seq, body) VALUES ($1, $2)", rows)

    async def other_bodies(self, rows: Sequence[int]) -> dict[int, bytes]:
        return {}

    async def delete_bodies(self, groups: Sequence[int]) -> None:
        await self.rows(
            "DELETE FROM bodies WHERE seq IN (SELECT seq FROM items WHERE grp IN :ids($1))", list(groups)
        )


async def _nothing_to_reset(connection: Any) -> None:
    """Connections come back as they went: nothing is set within one."""


@functools.lru_cache(512)
def _translated(sql: str) -> str:
    sql = re.sub(r"IN :ids\(\$(\d+)\)", r"= ANY($\1::bigint[])", sql)
    return re.sub(r"IN :texts\(\$(\d+)\)", r"= ANY($\1::text[])", sql)


def _without_password(url: str) -> str:
    """Host and database, where it is certain which part of the URL they are."""
    found = re.fullmatch(r"\w+://(?:[^@/?#]*@)?([\w.,\-]*(?::\d+)?(?:/[\w\-]*)?)(?:\?[^@]*)?", url)
    return f"postgresql://{found[1]}" if found else _HIDDEN
