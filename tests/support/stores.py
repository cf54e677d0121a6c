"""Items, rules and a clock for tests of the buffer's store."""

from collections.abc import Callable, Sequence
from typing import Any

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.items import InstanceId, Item
from rollstream.buffer.store.base import JobRecord
from rollstream.buffer.store.sql import Database, Tx

TASKS = {
    "math": GroupSettings(group_size=3, group_timeout_seconds=30.0),
    "early": GroupSettings(group_size=4, min_valid_group_size_ratio=0.5, min_valid_item_size_ratio=0.5),
    "own": GroupSettings(group_size=2, group_timeout_seconds=20.0),
    "raw": GroupSettings(group_size=2, raw=True),
}


class FixedPolicy:
    """Settings by task, and a job's own; a hook judges `own`."""

    def __init__(self, default: GroupSettings | None = None) -> None:
        self._default = default or GroupSettings(group_size=2)

    def settings(self, task: str, job: JobRecord | None) -> GroupSettings:
        settings = TASKS.get(task, self._default)
        return settings if job is None else settings.for_job(job.payload)

    def has_own_judge(self, task: str) -> bool:
        return task == "own"


class Clock:
    now = 1000.0


class WrappedDatabase:
    """A database whose transactions a test sees, or changes."""

    def __init__(self, database: Database, wrap: Callable[[Tx], Tx]) -> None:
        self._database, self._wrap = database, wrap
        self.open, self.close = database.open, database.close
        self.disk_bytes, self.tidy = database.disk_bytes, database.tidy

    def transaction(self, work: Callable[[Tx], Any], size: int = 0) -> Any:
        return self._database.transaction(lambda tx: work(self._wrap(tx)), size)

    def read(self, work: Callable[[Tx], Any]) -> Any:
        return self._database.read(lambda tx: work(self._wrap(tx)))


class ClockedDatabase(WrappedDatabase):
    """A database whose time is a test's."""

    def __init__(self, database: Database, clock: Clock) -> None:
        def at_the_clock(tx: Tx) -> Tx:
            tx.now = clock.now
            return tx

        super().__init__(database, at_the_clock)


def item(
    uid: str,
    instance_id: InstanceId = 1,
    reward: float | None = 1.0,
    *,
    failed: bool = False,
    version: int | None = None,
    task: str | None = None,
    job: str | None = None,
    body: bytes = b"",
) -> Item:
    """Its body has its uid, so that it can be told from others."""
    return Item(
        uid, instance_id, reward, failed, version, body or f"body of {uid}".encode(), "json", task, job
    )


def pair(name: str, rewards: Sequence[float | None] = (0.0, 1.0), body: bytes = b"") -> list[Item]:
    """A whole group of two."""
    return [item(f"{name}-{n}", name, reward, body=body) for n, reward in enumerate(rewards)]
