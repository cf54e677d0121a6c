"""A buffer's folder, read without its server, or beside it."""

import time
from pathlib import Path
from typing import Any, Self

import msgspec
import orjson

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.reads import TaskPolicy
from rollstream.buffer.store.base import described, listed
from rollstream.buffer.store.sql import SqlStore
from rollstream.buffer.store.sqlite import FILE, SqliteDatabase
from rollstream.errors import NotFoundError, RunDirectoryError


class BufferFolder:
    """Answers the calls of `AsyncBufferClient` that inspect a buffer. Nothing is changed.

    Raises:
        RunDirectoryError: It is not a buffer's folder.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / FILE).is_file():
            raise RunDirectoryError(
                f"{folder} is not the folder of a buffer: it has no {FILE}. Of one with --store give the server's URL"
            )
        self._folder = folder
        self._database = SqliteDatabase(folder, read_only=True)
        self._store = SqlStore(self._database, TaskPolicy(GroupSettings(), None))

    async def stats(self) -> dict[str, Any]:
        jobs = await self._store.jobs()
        found = {"store": await self._store.stats(), "job": listed(jobs[-1]) if jobs else None}
        return msgspec.to_builtins(found)  # type: ignore[no-any-return]

    async def groups(
        self, *, task_type: str | None = None, job: str | None = None, **which: Any
    ) -> list[dict[str, Any]]:
        jobs = None if job is None else (job,)
        return [described(one) for one in await self._store.groups(task=task_type, jobs=jobs, **which)]

    async def group(self, number: int) -> dict[str, Any]:
        found = await self._store.group_with_items(number)
        if found is None:
            raise NotFoundError(f"there is no group {number}")
        return found

    async def __aenter__(self) -> Self:
        self._database.set_clock(self._database.read(_clock))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._store.close()


def _clock(tx: Any) -> float:
    """The store's clock, had it gone on since the last change."""
    totals, now = orjson.loads(tx.rows("SELECT json FROM totals")[0][0]), time.time()
    return float(totals.get("clock", 0.0) + max(0.0, now - totals.get("changed", now)))
