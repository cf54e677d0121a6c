"""A program for tests that kill it: writes, reads and acks for ever, and tells what it is about to do and has done.

Its arguments: `sqlite FOLDER` or `postgres URL SCHEMA`, then a name that is in its uids.
"""

import asyncio
import sys
from pathlib import Path

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.store.base import Removal, Wanted
from rollstream.buffer.store.sql import Database, SqlStore
from rollstream.buffer.store.sqlite import SqliteDatabase
from rollstream.errors import NotFoundError, StorageError
from tests.support.stores import FixedPolicy, item

GROUP = 4
BATCH = 2
WRITERS = 6


def open_driver(kind: str, *where: str) -> Database:
    if kind == "sqlite":
        return SqliteDatabase(Path(where[0]))
    from rollstream.buffer.store.postgres import PostgresDatabase

    return PostgresDatabase(*where)


def new_store(driver: Database) -> SqlStore:
    return SqlStore(driver, FixedPolicy(GroupSettings(group_size=GROUP, raw=True)))


def say(*words: str) -> None:
    """One line in one piece: it is there in full, or not."""
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def body_of(uid: str) -> bytes:
    """One of twenty is large."""
    return f"body of {uid}".encode() * (6000 if uid.endswith("7-0") else 1)


async def write(store: SqlStore, name: str) -> None:
    at = 0
    while True:
        uids = [f"{name}-{at}-{n}" for n in range(BATCH)]
        batch = [item(uid, f"{name}-{at * BATCH // GROUP}", body=body_of(uid)) for uid in uids]
        say("writes", *(one.uid for one in batch))
        while True:
            try:
                await store.write(batch)
                break
            except StorageError:  # whether it was stored is not known: the same uids once more
                await asyncio.sleep(0.01)
        say("wrote", *(one.uid for one in batch))
        at += 1


async def read(store: SqlStore, name: str) -> None:
    count = 0
    while True:
        count += 1
        try:
            await read_once(store, name, count)
        except StorageError:
            await asyncio.sleep(0.01)


async def read_once(store: SqlStore, name: str, count: int) -> None:
    taken = await store.take(Wanted(groups=3, consumer=name))
    if taken.lease is None:
        await asyncio.sleep(0.001)
        return
    lease, groups = taken.lease, [group.id for group in taken.groups]
    loaded = await store.load(groups)
    if count % 7 == 0 and len(groups) > 1:
        await store.finish(lease, [Removal(groups.pop(), "filtered")])
    if count % 5 == 0:
        await store.nack(lease)
        return
    uids = [one.uid for group in groups for one in loaded[group] if not isinstance(one, str)]
    say("acks", lease, *uids)
    while True:
        try:
            await store.ack([lease])
            break
        except StorageError:
            await asyncio.sleep(0.01)
        except NotFoundError:
            say("lost", lease)
            raise
    say("acked", lease)


async def main(name: str, driver: Database) -> None:
    store = new_store(driver)
    await store.open()
    for lease in await store.leases():
        if (lease.consumer or "").split(".")[0] == name.split(".")[0]:  # of this program's last life
            await store.nack(lease.id)
    async with asyncio.TaskGroup() as tasks:
        for n in range(WRITERS):
            tasks.create_task(write(store, f"{name}.{n}"))
        for _ in range(2):
            tasks.create_task(read(store, name))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1], open_driver(*sys.argv[1:-1])))
