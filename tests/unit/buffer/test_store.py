"""The store on both databases: what the model test does not reach."""

import asyncio
import contextlib
import errno
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from rollstream.buffer.groups import StoredItem
from rollstream.buffer.items import MAX_TEXT, Item
from rollstream.buffer.store.base import Group, JobRecord, Judged, Limits, Removal, Wanted
from rollstream.buffer.store.large_bodies import LargeBodies
from rollstream.buffer.store.postgres import PostgresDatabase
from rollstream.buffer.store.sql import Database, SqlStore, Tx
from rollstream.buffer.store.sqlite import FILE, SqliteDatabase
from rollstream.errors import (
    ConfigError,
    ConflictError,
    DataError,
    NotFoundError,
    RunDirectoryError,
    StorageError,
    StorageFullError,
)
from tests.support.postgres import PostgresServer, new_schema, postgres
from tests.support.stores import FixedPolicy, WrappedDatabase, item, pair

__all__ = ["postgres"]

OpenStore = Callable[..., AbstractAsyncContextManager[SqlStore]]
"""Opens the test's database: each time the same one."""


@pytest.fixture(params=["sqlite", "postgres"])
def new_driver(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Database]:
    if request.param == "sqlite":
        return lambda: SqliteDatabase(tmp_path)
    server: PostgresServer = request.getfixturevalue("postgres")
    schema = new_schema()
    return lambda: PostgresDatabase(server.url, schema)


@pytest.fixture
def open_store(new_driver: Callable[[], Database]) -> OpenStore:
    return lambda **limits: opened(new_driver(), **limits)


@contextlib.asynccontextmanager
async def opened(driver: Database, **limits: int) -> AsyncIterator[SqlStore]:
    store = SqlStore(driver, FixedPolicy(), Limits(**limits))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def new_job(number: int) -> JobRecord:
    return JobRecord(id=f"j{number}", number=number, task="t", payload={}, state="running", started=0.0)


async def lease_of(store: SqlStore, groups: int = 1) -> str:
    taken = await store.take(Wanted(groups=groups))
    assert taken.lease is not None
    return taken.lease


# -- committing


async def test_a_refused_call_leaves_the_others_of_its_transaction_alone(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.write(pair("a") + pair("b"))
        lost = await lease_of(store)
        await store.nack(lost)
        lease = await lease_of(store, 2)
        answers = await asyncio.gather(
            store.write(pair("c")),
            store.ack([lost]),
            store.nack("nothing"),
            store.ack([lease]),
            store.write(pair("d")),
            return_exceptions=True,
        )
        assert answers[0] == answers[4] == [True, True]
        assert isinstance(answers[1], ConflictError)
        assert isinstance(answers[2], NotFoundError)
        assert answers[3].groups == 2  # type: ignore[union-attr]
        assert (await store.stats()).groups["ready"] == 2


async def test_a_write_that_cannot_be_stored_fails_alone(postgres: PostgresServer) -> None:
    async with opened(PostgresDatabase(postgres.url, new_schema())) as store:
        too_long = item("".join(chr(0x4E00 + n * 7 % 20_000) for n in range(MAX_TEXT)))
        answers = await asyncio.gather(
            store.write(pair("a")),
            store.write([item("nul\0")]),
            store.write([too_long]),
            store.write(pair("b")),
            return_exceptions=True,
        )
        assert [type(one) for one in answers] == [list, DataError, DataError, list]
        assert (await store.stats()).items == 4


async def test_a_cancelled_call_is_still_done_and_close_waits_for_what_is_under_way(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        writes = [asyncio.create_task(store.write(pair(f"g{n}"))) for n in range(20)]
        await asyncio.sleep(0)
        for one in writes[:3]:
            one.cancel()
    answers = await asyncio.gather(*writes, return_exceptions=True)
    assert answers[3:] == [[True, True]] * 17 and [True, True] not in answers[:3]
    async with open_store() as store:
        assert (await store.stats()).items == 40


async def test_a_replaced_job_keeps_little_of_its_payload(open_store: OpenStore) -> None:
    async with open_store() as store, open_store() as other:
        kept = {"group_size": 2, "input_file": "/prompts"}
        more = {"skip_instance_ids": [*range(1000)], "tools": ["x" * 1000]}
        old = msgspec.structs.replace(new_job(1), payload={**kept, **more})
        assert await store.save_job(old) == old
        new = await store.save_job(msgspec.structs.replace(old, id="j2", number=0))
        assert new.payload == old.payload and new.number == 2
        await store.save_job(msgspec.structs.replace(old, state="stopped"))
        assert [one.payload for one in await store.jobs()] == [kept, old.payload]
        assert (await other.jobs())[-1] == new


class LostJudge(FixedPolicy):
    judged = True

    def has_own_judge(self, task: str) -> bool:
        return task == "own" and self.judged


async def test_a_group_whose_judge_failed_and_is_gone_is_judged_by_default(
    new_driver: Callable[[], Database],
) -> None:
    policy = LostJudge()
    store = SqlStore(new_driver(), policy)
    await store.open()
    rewards = {"good": [0.0, 1.0], "equal": [1.0, 1.0], "short": [1.0]}
    await store.write([
        item(f"{name}-{n}", name, reward, task="own")
        for name, some in rewards.items() for n, reward in enumerate(some)
    ])  # fmt: skip
    await store.judge([], [Removal(one.id, "is_valid_group", "No") for one in await store.groups()])
    policy.judged = False
    assert await store.retry() == 3
    states = {one.instance_id: [one.state, one.reason] for one in await store.groups()}
    assert states == {
        "good": ["ready", None],
        "equal": ["dropped", "equal_rewards"],
        "short": ["dropped", "timed_out"],
    }
    await store.close()


async def test_a_limit_of_a_files_size_is_a_full_disk(tmp_path: Path) -> None:
    async with opened(SqliteDatabase(tmp_path)) as store:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, limits[1]))
        try:
            with pytest.raises(StorageFullError):
                await store.write([item("a", body=bytes(2**22))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert await store.write(pair("a")) == [True, True]


async def test_a_server_that_froze_loses_its_turn(postgres: PostgresServer) -> None:
    schema = new_schema()
    async with opened(PostgresDatabase(postgres.url, schema)) as store:
        frozen = PostgresDatabase(postgres.url, schema, frozen_s=1.0)
        frozen.open("")
        begun, thawed = threading.Event(), threading.Event()

        def freeze(tx: Tx) -> None:
            begun.set()
            thawed.wait()
            tx.rows("SELECT 1")

        freezing = asyncio.create_task(asyncio.to_thread(frozen.transaction, freeze))
        await asyncio.to_thread(begun.wait)
        assert await store.write(pair("a")) == [True, True]
        thawed.set()
        with pytest.raises(StorageError):
            await freezing
        frozen.close()


async def test_a_retried_group_belongs_to_no_lease(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.write([each for name in ("a", "b") for each in (*pair(name), *own_pair(name))])
        await store.judge([Judged(group.id, group.n, True, True) for group in await own_groups(store)], [])
        taken = await store.take(Wanted(groups=4))
        assert taken.lease is not None
        removed = [group for group in taken.groups if group.instance_id == "a"]
        why = "a traceback may hold \0 and \ud800"
        await store.finish(taken.lease, [Removal(group.id, "hook", why) for group in removed])
        (aside, _) = await store.groups(state="quarantined")
        assert aside.cause == "a traceback may hold \\0 and \\ud800"
        assert await store.retry() == len(removed)
        await store.judge([Judged(group.id, group.n, True, True) for group in await own_groups(store)], [])
        assert (await store.stats()).groups["ready"] == 2
        assert (await store.ack([taken.lease])).groups == 2
        assert (await store.take(Wanted(groups=4))).available == 2


def own_pair(name: str) -> list[Item]:
    return [item(f"own-{name}-{n}", name, task="own") for n in range(2)]


async def own_groups(store: SqlStore) -> list[Group]:
    return await store.unjudged(["own"], 100)


@pytest.mark.parametrize("groups", [0, 1000])
async def test_no_statement_reads_a_whole_table(new_driver: Callable[[], Database], groups: int) -> None:
    driver, statements = new_driver(), dict[str, Sequence[Any]]()

    def record(tx: Any) -> Tx:
        rows, many = tx.rows, tx.many

        def recorded_rows(sql: str, *arguments: Any) -> list[Any]:
            statements.setdefault(sql, arguments)
            return rows(sql, *arguments)  # type: ignore[no-any-return]

        def recorded_many(sql: str, arguments: Sequence[Sequence[Any]]) -> None:
            if arguments:
                statements.setdefault(sql, arguments[0])
            many(sql, arguments)

        tx.rows, tx.many = recorded_rows, recorded_many
        return tx  # type: ignore[no-any-return]

    async with opened(WrappedDatabase(driver, record), archive_bytes=0, remembered_uids=1) as store:
        await store.save_job(new_job(1))
        await store.write([each for n in range(groups) for each in pair(f"g{n}")])
        statements.clear()
        await store.write([*pair("a"), *pair("b"), *pair("c"), item("late", "x"), *own_pair("a")])
        await store.judge([Judged(one.id, one.n, True, True) for one in await own_groups(store)], [])
        for jobs in (None, ("j1",)):
            taken = await store.take(Wanted(groups=1, jobs=jobs, read_id="r", consumer="c"))
            assert taken.lease is not None
            await store.load([taken.groups[0].id])
            await store.finish(taken.lease, [])
            await store.extend(taken.lease, 5)
            await store.ack([taken.lease])
        for wanted in (
            Wanted(groups=1, task="no", size=3, min_version=1, skip_tasks=("x",)),
            Wanted(groups=1, task="no", jobs=("j1",), min_version=1),
        ):
            assert (await store.take(wanted)).lease is None
        await store.nack(await lease_of(store))
        await store.release("c")
        await store.return_read("r")
        await store.known(["a-0"])
        await store.leases()
        await store.unread_drops(None, None, 10)
        await store.save_job(new_job(2))
        while await store.sweep():
            pass
        assert len(statements) > 30

        def plans(tx: Tx) -> dict[str, str]:
            explain = "EXPLAIN" if isinstance(driver, PostgresDatabase) else "EXPLAIN QUERY PLAN"
            return {
                sql: "\n".join(str(row[-1]) for row in tx.rows(f"{explain} {sql}", *arguments))
                for sql, arguments in statements.items()
            }

        for plan in (await asyncio.to_thread(driver.transaction, plans)).values():
            assert not re.search(r"(SCAN|Seq Scan on) (groups|items|bodies)\b(?! USING)", plan), plan


@contextlib.asynccontextmanager
async def opened_read_only(folder: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqliteDatabase(folder, read_only=True), FixedPolicy())
    try:
        yield store
    finally:
        await store.close()


async def test_another_format_is_refused(tmp_path: Path) -> None:
    async with opened(SqliteDatabase(tmp_path)):
        pass
    (tmp_path / "bodies").mkdir()
    other = tmp_path / "bodies" / f"{1:012d}"
    other.touch()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("UPDATE totals SET json = json_set(json, '$.format', 4)")
        database.commit()
    with pytest.raises(RunDirectoryError):
        async with opened(SqliteDatabase(tmp_path)):
            pass
    assert other.exists()


# -- large bodies

LARGE = os.urandom(100_000)


async def bodies_of(store: SqlStore, group: int) -> list[bytes] | str:
    loaded: list[StoredItem] | str = (await store.load([group]))[group]
    return loaded if isinstance(loaded, str) else [each.body for each in loaded]


async def sweep(store: SqlStore) -> None:
    while await store.sweep():
        pass


async def test_bodies_of_any_size_stay_until_the_archive_gives_them_up(open_store: OpenStore) -> None:
    async with open_store(archive_bytes=250_000) as store:
        for name in "abc":
            await store.write([item(f"{name}-s", name, 0.0, body=b"small"), item(name, name, body=LARGE)])
        await store.ack([await lease_of(store, 3)])
        await sweep(store)
        assert "not kept any more" in await bodies_of(store, 1)
    async with open_store() as store:
        await store.write(pair("d", body=LARGE))
        assert await bodies_of(store, 3) == [b"small", LARGE]
        assert await bodies_of(store, 4) == [LARGE, LARGE]


async def test_large_bodies_are_written_once_to_files_that_leave_with_their_last(tmp_path: Path) -> None:
    folder = tmp_path / "bodies"
    async with opened(SqliteDatabase(tmp_path), archive_bytes=0) as store:
        for name in range(100):
            await store.write(pair(str(name), body=LARGE))
        files = sorted(folder.iterdir())
        assert len(files) == 2 and sum(path.stat().st_size for path in files) == 200 * len(LARGE)
        assert sum(path.stat().st_size for path in tmp_path.glob(f"{FILE}*")) < 100 * len(LARGE)
        assert (await store.stats()).disk_bytes > 200 * len(LARGE)
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        await store.ack([await lease_of(store, 90)])
        await sweep(store)
        assert [path for path in files if not path.exists()]
    async with opened(SqliteDatabase(tmp_path), archive_bytes=0) as store:
        async with opened_read_only(tmp_path) as beside:
            assert await bodies_of(beside, 91) == [LARGE, LARGE]
        await store.write(pair("more", body=LARGE))
        await store.ack([await lease_of(store, 11)])
        await sweep(store)
        assert not list(folder.iterdir())
        await store.write(pair("again", body=LARGE))
        assert await bodies_of(store, 102) == [LARGE, LARGE]


async def test_a_kill_between_a_body_and_its_row_leaves_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, killed = tmp_path / "buffer", tmp_path / "killed"
    folder.mkdir()
    sync = LargeBodies.sync

    def copy(bodies: LargeBodies) -> None:
        sync(bodies)
        shutil.copytree(folder, killed, dirs_exist_ok=True)

    for kept in ([], pair("a", body=LARGE)):
        async with opened(SqliteDatabase(folder)) as store:
            await store.write(kept)
            with monkeypatch.context() as patch:
                patch.setattr(LargeBodies, "sync", copy)
                await store.write(pair(f"b{len(kept)}", body=LARGE))
        before = set((killed / "bodies").iterdir())
        async with opened(SqliteDatabase(killed)) as store:
            assert await store.known([f"b{len(kept)}-0"]) == [False]
            await sweep(store)
            assert bool(kept) == bool(before & set((killed / "bodies").iterdir()))
            assert await store.write(pair("c", body=LARGE)) == [True, True]
            for group in await store.groups():
                assert await bodies_of(store, group.id) == [LARGE, LARGE]
        shutil.rmtree(killed)


async def test_what_cannot_be_synced_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "a bad disk")

    async with opened(SqliteDatabase(tmp_path)) as store:
        await store.write(pair("a", body=LARGE))
        size = LargeBodies(tmp_path / "bodies").size()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(StorageError, match="a bad disk"):
                await store.write(pair("b", body=LARGE))
        assert await store.known(["b-0", "b-1"]) == [False, False]
        assert LargeBodies(tmp_path / "bodies").size() == size
        assert await store.write(pair("b", body=LARGE)) == [True, True]
        for group in (1, 2):
            assert await bodies_of(store, group) == [LARGE, LARGE]


async def test_a_lost_file_hides_only_its_own_bodies(tmp_path: Path) -> None:
    for name in "ab":
        async with opened(SqliteDatabase(tmp_path)) as store:
            await store.write(pair(name, body=LARGE))
    lost, damaged = sorted((tmp_path / "bodies").iterdir())
    lost.unlink()
    async with opened(SqliteDatabase(tmp_path)) as store:
        assert "was lost" in await bodies_of(store, 1)
        assert await bodies_of(store, 2) == [LARGE, LARGE]
        os.truncate(damaged, 150_000)
        assert "checksum" in await bodies_of(store, 2)


# -- damage


async def test_a_damaged_page_hurts_only_what_is_on_it(tmp_path: Path) -> None:
    body = os.urandom(20_000)  # so each is on pages of its own
    async with opened(SqliteDatabase(tmp_path)) as store:
        for name in "abc":
            await store.write(pair(name, body=body + name.encode()))
    content = bytearray((tmp_path / FILE).read_bytes())
    at = content.index(body[9_000:9_500])
    content[at : at + 100] = bytes(100)
    (tmp_path / FILE).write_bytes(content)
    async with opened(SqliteDatabase(tmp_path)) as store:
        taken = await store.take(Wanted(groups=3))
        loaded = await store.load([group.id for group in taken.groups])
        assert sum(isinstance(one, str) for one in loaded.values()) == 1
        assert taken.lease is not None
        bad = [Removal(group, "damaged") for group, one in loaded.items() if isinstance(one, str)]
        await store.finish(taken.lease, bad)
        assert (await store.ack([taken.lease])).groups == 2


# -- full disks and kills


def mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode


@contextlib.contextmanager
def small_disk_at(folder: Path, size: str = "3m") -> Iterator[Path]:
    folder.mkdir()
    if mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)):
        pytest.skip("this machine lets nobody mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def test_a_copy_without_the_reserve_is_not_said_to_be_full(tmp_path: Path) -> None:
    async with opened(SqliteDatabase(tmp_path)):
        pass
    (tmp_path / "buffer.reserve").unlink()
    async with opened_read_only(tmp_path) as store:
        assert not (await store.stats()).disk_full


async def test_a_disk_that_another_program_fills_at_each_restart_is_drained(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "24m") as disk:
        other = (tmp_path / "disk" / "other").open("ab", buffering=0)
        async with opened(SqliteDatabase(disk)) as store:
            for n in range(8):
                await store.write(pair(f"g{n}", body=bytes(100_000)))
        for _ in range(8):
            with contextlib.suppress(OSError):
                while True:
                    other.write(bytes(4096))
            async with opened(SqliteDatabase(disk)) as store:
                await store.ack([await lease_of(store)])
        other.close()


async def test_a_full_disk_of_postgres_refuses_writes_and_takes_acks(postgres: PostgresServer) -> None:
    folder = postgres.folder / new_schema()
    with small_disk_at(folder):
        shutil.chown(folder, "postgres", "postgres")
        spare = folder / "spare"
        database = psycopg.connect(postgres.url, autocommit=True)
        database.execute(f"CREATE TABLESPACE {folder.name} LOCATION '{folder}'")
        try:
            spare.write_bytes(bytes(600_000))
            driver = PostgresDatabase(
                f"{postgres.url}?options=-c%20default_tablespace%3D{folder.name}", folder.name
            )
            async with opened(driver) as store:
                stored = 0
                with pytest.raises(StorageFullError, match="no room on its disk"):
                    while True:
                        await store.write(pair(f"g{stored}", body=os.urandom(20_000)))
                        stored += 1
                assert stored > 5
                spare.unlink()
                assert (await store.ack([await lease_of(store)])).groups == 1
                assert (await store.stats()).items_written == 2 * stored
        finally:
            database.execute(f"DROP SCHEMA IF EXISTS {folder.name} CASCADE")
            database.execute(f"DROP TABLESPACE {folder.name}")
            database.close()


async def test_time_stands_still_while_no_server_runs(tmp_path: Path) -> None:
    async with opened(SqliteDatabase(tmp_path)) as store:
        await store.write(pair("a"))
        await lease_of(store)
    for _ in range(2):
        async with opened(SqliteDatabase(tmp_path)) as store:
            (lease,) = await store.leases()
            assert 590 < lease.left_s <= 600


# -- PostgreSQL


async def test_a_lost_database_is_found_again(postgres: PostgresServer) -> None:
    async with opened(PostgresDatabase(postgres.url, new_schema())) as store:
        await store.write(pair("a"))
        postgres.kill()
        try:
            for call in (store.stats(), store.write(pair("b")), store.take(Wanted(groups=1)), store.stats()):
                with pytest.raises(StorageError, match=r"127\.0\.0\.1"):
                    await call
            many = await asyncio.gather(
                *(store.write(pair(f"g{n}")) for n in range(50)), return_exceptions=True
            )
            assert all(isinstance(one, StorageError) for one in many)
        finally:
            postgres.start()
        assert (await store.stats()).items == 2
        assert await store.write(pair("b")) == [True, True]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@127.0.0.1:{port}/postgres?sslmode=require",
        "postgresql://me:secret@127.0.0.1:{port}/nothing",
        "postgresql://me:secret@127.0.0.1:1/x",
        "postgresql://me:sec/ret@127.0.0.1:{port}/x",
        "postgresql://me:secret@127.0.0.1:{port}/x?sslmode=secret",
        "postgresql://me:s?secret@127.0.0.1:{port}/x",
        "postgresql://me:secret@secret@host:secret/x",
        "mysql://me:secret@host/x",
    ],
)
async def test_a_wrong_url_is_an_error_without_its_password(postgres: PostgresServer, url: str) -> None:
    url = url.format(port=postgres.port)
    with pytest.raises((ConfigError, StorageError)) as raised:
        await SqlStore(PostgresDatabase(url), FixedPolicy()).open()
    assert "sec" not in str(raised.value).replace("sslmode", "")
    with pytest.raises(ConfigError, match="cannot name a schema"):
        PostgresDatabase(url, 'a"; DROP SCHEMA b; --')
