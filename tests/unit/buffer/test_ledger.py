"""The ledger: what it says of leases and tasks, its log's size, damage, full disks, two openers."""

import asyncio
import errno
import logging
import os
import random
import shutil
from pathlib import Path

import orjson
import pytest

from rollstream.buffer import oplog
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.rollout_record import RolloutRecord
from rollstream.errors import (
    BufferFullError,
    ConflictError,
    DamageError,
    NotFoundError,
    RunDirectoryError,
    StorageFullError,
)
from rollstream.store import journal
from tests.unit.buffer.ledger_worlds import Clock, durable_state, item, open_ledger, settings


async def take(ledger: Ledger, limit: int | None = None, **kwargs: object) -> str:
    lease = await ledger.decide(lease=ledger.candidates(limit=limit), **kwargs)  # type: ignore[arg-type]
    assert lease is not None
    return lease.lease_id


async def settle(ledger: Ledger) -> None:
    if ledger._cleaner is not None:
        await ledger._cleaner
    await ledger._commits.drain()


async def reopened(ledger: Ledger, root: Path, **kwargs: object) -> Ledger:
    await settle(ledger)
    before = durable_state(ledger)
    await ledger.close()
    ledger = open_ledger(root, **kwargs)  # type: ignore[arg-type]
    assert durable_state(ledger) == before
    return ledger


async def test_two_readers_never_get_the_same_group(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    await ledger.write([item(f"u{at}", at // 2) for at in range(40)])
    views = ledger.candidates()
    leases = await asyncio.gather(*(ledger.decide(lease=views[at:]) for at in range(0, 20, 5)))
    numbers = [view.number for lease in leases if lease for view in lease.groups]
    assert sorted(numbers) == sorted(view.number for view in views)
    await ledger.close()


async def test_group_that_changed_is_left_out_of_a_decision(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=3)
    await ledger.write([item("a"), item("b", 2)])
    clock.now += 301
    ledger.tick()
    views = ledger.candidates()
    assert [view.timed_out for view in views] == [True, True]
    await ledger.write([item("c")])
    lease = await ledger.decide(lease=views)
    assert lease is not None
    assert [view.instance_id for view in lease.groups] == [2]
    assert ledger.candidates() == []
    await ledger.write([item("d", 2)])  # opens another one
    assert ledger.stats().groups["open"] == 2
    ledger = await reopened(ledger, tmp_path, group_size=3)
    assert ledger.stats().groups["open"] == 2
    await ledger.close()


async def test_kept_group_is_offered_again_when_it_changes_or_times_out(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=4)
    await ledger.set_task("own", 4, judge_from=1)
    await ledger.write([item("a")])
    for expected in (1, 2):
        (view,) = ledger.candidates()
        assert view.size == expected
        await ledger.decide(keep=[view])
        assert ledger.candidates() == []
        await ledger.write([item(f"more{expected}")])
    await ledger.decide(keep=ledger.candidates())
    clock.now += 301
    ledger.tick()
    (view,) = ledger.candidates()
    assert view.timed_out
    await ledger.close()


async def test_wait_is_woken_by_a_write_and_by_a_timer(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, settings(group_size=2, timeout=0.05))
    assert not await ledger.wait_for_candidates(0.01)
    waiting = asyncio.create_task(ledger.wait_for_candidates(20))
    await asyncio.sleep(0)
    await ledger.write([item("a"), item("b")])
    assert await waiting
    seen = ledger.version
    await ledger.write([item("c", 2)])
    assert await ledger.wait_for_candidates(20, seen)  # it times out
    assert [view.timed_out for view in ledger.candidates()] == [False, True]
    await ledger.close()


async def test_lease_lost_to_another_reader(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock)
    await ledger.write([item(f"u{at}", at // 2) for at in range(4)])
    first = await take(ledger, consumer="a", lease_seconds=10)
    clock.now += 11
    ledger.tick()
    assert ledger.stats().groups == {"open": 0, "ready": 2, "leased": 0, "quarantined": 0}
    second = await take(ledger, 1, consumer="b")
    with pytest.raises(ConflictError, match=f"lease {first} had expired"):
        await ledger.ack(first)
    ledger = await reopened(ledger, tmp_path)
    with pytest.raises(ConflictError, match=f"lease {first} had expired"):
        await ledger.extend(first)
    assert len(ledger.candidates()) == 1
    assert (await ledger.ack(second)).groups == 1
    assert (await ledger.ack(second)).repeated
    ledger = await reopened(ledger, tmp_path)
    assert (await ledger.ack(second)).repeated
    with pytest.raises(ConflictError, match="acked"):
        await ledger.nack(second)
    await ledger.close()


async def test_a_lease_is_renewed_by_what_it_was_given_last(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=1)
    await ledger.write([item("a", 1)])
    lease = await take(ledger, lease_seconds=10)
    await ledger.extend(lease, 100)
    clock.now += 50
    ledger.renew(lease)
    clock.now += 99
    ledger.tick()
    assert not ledger.candidates()
    clock.now += 2
    ledger.tick()
    assert len(ledger.candidates()) == 1
    await ledger.close()


async def test_expired_lease_can_be_acked_and_extended_while_it_is_whole(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock)
    await ledger.write([item("a"), item("b")])
    lease = await take(ledger, lease_seconds=10)
    clock.now += 11
    ledger.tick()
    assert len(ledger.candidates()) == 1
    await ledger.extend(lease, 5)
    assert ledger.candidates() == []
    clock.now += 6
    ledger.tick()
    assert (await ledger.ack(lease)).items == 2
    assert ledger.stats().items == 0
    await ledger.close()


async def test_leases_are_acked_together_or_not_at_all(tmp_path: Path) -> None:
    clock = Clock()
    ledger = open_ledger(tmp_path, clock, group_size=1)
    await ledger.write([item(f"u{n}", n) for n in range(6)])
    first, second = [await take(ledger, 2, lease_seconds=seconds) for seconds in (20, 10)]
    clock.now += 15
    ledger.tick()
    other = await take(ledger, 1)  # of the second one
    with pytest.raises(ConflictError):
        await ledger.ack_all([first, second])
    with pytest.raises(NotFoundError):
        await ledger.ack_all([first, "nothing"])
    assert ledger.stats().groups_delivered == 0 and ledger.has_lease(first)
    before = ledger._state.next_ticket
    results = await ledger.ack_all([first, other])
    assert [(one.lease_id, one.groups, one.items) for one in results] == [(first, 2, 2), (other, 1, 1)]
    assert ledger._state.next_ticket == before + 1  # one record: a kill leaves all of it or nothing
    (again,) = await ledger.ack_all([first])
    assert again.repeated and await ledger.ack_all([]) == []
    ledger = await reopened(ledger, tmp_path, clock=clock, group_size=1)
    assert (ledger.stats().groups_delivered, ledger.stats().items) == (3, 3)
    await ledger.close()


async def test_left_out_removed_and_quarantined(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    await ledger.write([item(f"u{at}", at // 2) for at in range(8)])
    lease = await ledger.decide(lease=ledger.candidates())
    assert lease is not None
    a, b, c, _ = lease.groups
    await ledger.leave_out(lease.lease_id, [(a, ["u1"], "filtered")])
    await ledger.remove_from_lease(lease.lease_id, b, traceback="Traceback: b")
    await ledger.remove_from_lease(lease.lease_id, c, reason="filtered")
    ledger = await reopened(ledger, tmp_path)
    result = await ledger.ack(lease.lease_id)
    assert (result.groups, result.items) == (2, 4)
    stats = ledger.stats()
    assert (stats.items, stats.items_delivered, stats.dropped) == (2, 3, {"filtered": 3})
    assert stats.dropped_groups == {"filtered": 1}
    assert [drop.uids for drop in ledger.dropped()] == [["u4", "u5"], ["u1"]]
    assert [one.traceback for one in ledger.quarantined()] == ["Traceback: b"]
    assert await ledger.retry_quarantined([b.number]) == 1
    assert [view.number for view in ledger.candidates()] == [b.number]
    ledger = await reopened(ledger, tmp_path)
    lines = (tmp_path / "dropped.jsonl").read_text().splitlines()
    assert len(lines) == 2
    await ledger.close()


async def test_drops_that_the_list_on_disk_lacks_are_added(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    for at in range(3):
        await ledger.write([item(f"u{at}-0"), item(f"u{at}-1")])
        await ledger.decide(drop=[(ledger.candidates()[0], "not_valid")])
    listed = ledger.dropped()
    assert [len(ledger.dropped(after=drop.ticket)) for drop in listed] == [2, 1, 0]
    await ledger.close()
    path = tmp_path / "dropped.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    ledger = open_ledger(tmp_path)
    assert ledger.dropped() == listed
    await ledger.close()
    ledger = open_ledger(tmp_path)
    assert ledger.dropped() == listed
    await ledger.close()


async def test_no_instance_twice_in_a_cycle(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, group_size=1, groups_per_cycle=3)
    await ledger.write([item(f"a{at}", at % 3) for at in range(9)])
    handed = []
    for at in range(9):
        (view, *_) = ledger.candidates()
        handed.append(view.instance_id)
        lease = await take(ledger, 1)
        if at == 4:
            ledger = await reopened(ledger, tmp_path, group_size=1, groups_per_cycle=3)
        await ledger.ack(lease)
    assert all(len(set(handed[at : at + 3])) == 3 for at in range(7))
    await ledger.write([item("again", handed[-1])])
    assert ledger.candidates() == []  # held: it was among the last two
    await ledger.close()


async def test_group_size_of_a_task_changes_what_is_open(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, group_size=4)
    await ledger.set_task("t", 4)
    await ledger.write([item("a"), item("b"), item("c"), item("d", 2)])
    await ledger.set_task("t", 3)
    assert [view.instance_id for view in ledger.candidates()] == [1]
    await ledger.write([item("e", 2), item("f", 2), item("g", 1)])
    assert [view.instance_id for view in ledger.candidates()] == [1, 2]
    ledger = await reopened(ledger, tmp_path, group_size=4)
    assert ledger.task_type == "t"
    assert [view.instance_id for view in ledger.candidates()] == [1, 2]
    await ledger.close()


async def test_finished_counts_begin_anew_with_a_rollout(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, segment_bytes=1024)
    await ledger.set_task("t", 2)
    first = RolloutRecord("r1", "t", {"task_type": "t"}, "running", 1.0)
    await ledger.save_rollout(first)
    for at in range(3):
        await ledger.write([item(f"u{at}-0"), item(f"u{at}-1"), item(f"open{at}", 9 + at)])
        await ledger.ack(await take(ledger))
    assert ledger.finished_counts("r1") == {1: 3}
    assert await ledger.open_uids("r1") == ["open0", "open1", "open2"]
    await ledger.save_rollout(RolloutRecord("r2", "t", {}, "running", 2.0))
    assert ledger.active_rollout == "r2"
    assert ledger.finished_counts("r1") == ledger.finished_counts("r2") == {}
    await ledger.write([item("x0"), item("x1")])
    ledger = await reopened(ledger, tmp_path, segment_bytes=1024)
    assert ledger.finished_counts("r2") == {1: 1}
    assert [record.rollout_id for record in ledger.rollouts()] == ["r1", "r2"]
    assert ledger.rollouts()[0] == first
    await ledger.close()


async def test_room(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, max_buffer_size=4)
    await ledger.write([item(f"u{at}", at // 2) for at in range(4)])
    assert await ledger.write([item("u0"), item("u1")]) == [False, False]  # known: needs no room
    with pytest.raises(BufferFullError, match="4 items of at most 4"):
        await ledger.write([item("new")])
    assert not await ledger.wait_for_room(0.01)
    waiting = asyncio.create_task(ledger.wait_for_room(20))
    await ledger.ack(await take(ledger, 1))
    assert await waiting
    assert await ledger.write([item("new")]) == [True]
    await ledger.close()


# -- the log


async def test_folder_stays_bounded_under_churn(tmp_path: Path) -> None:
    kwargs = {"segment_bytes": 20_000, "remember_uids": 500, "group_size": 4}
    ledger = open_ledger(tmp_path, **kwargs)
    chance = random.Random(1)
    await ledger.write([item(f"stays{at}", f"s{at}", padding=500) for at in range(30)])  # live for ever
    await ledger.decide(quarantine=[(view, "no") for view in ledger.candidates()])
    held: list[str] = []
    most = 0
    for at in range(150):
        await ledger.write([item(f"u{at}-{one}", one // 4, version=at, padding=300) for one in range(16)])
        if views := ledger.candidates():
            drop = [(view, "not_valid") for view in views if chance.random() < 0.2]
            rest = [view for view in views if view not in [one for one, _ in drop]]
            lease = await ledger.decide(lease=rest, drop=drop)
            held += [lease.lease_id] if lease else []
        while len(held) > 5:
            await ledger.ack(held.pop(chance.randrange(len(held))))
        stats = ledger.stats()
        live = stats.bytes_live + ledger._state.fact_bytes()
        # While the oldest segment is emptied, it and its copies are both there; it is done beside the writes.
        async with asyncio.timeout(60):
            while ledger.stats().bytes_on_disk > 2 * live + 6 * 20_000:
                await asyncio.sleep(0.01)
        most = max(most, stats.bytes_on_disk)
        if at % 50 == 49:
            ledger = await reopened(ledger, tmp_path, **kwargs)
    assert ledger.stats().items_written == 150 * 16 + 30
    assert next(iter(ledger._log.sizes)) > 20  # segments were deleted
    assert sum(path.stat().st_size for path in (tmp_path / "segments").iterdir()) <= most
    known = ledger.knows(f"u{at}-0" for at in range(150))
    assert not known[0]
    assert known[-1]
    await ledger.close()


async def test_loads_go_on_while_segments_are_deleted(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, segment_bytes=4000)
    await ledger.write([item(f"keep{at}", f"k{at // 2}", padding=50) for at in range(20)])
    views = ledger.candidates()
    done = asyncio.Event()

    def load_all() -> int:
        rounds = 0
        while not done.is_set() or rounds < 3:
            for view in views:
                at = 2 * int(str(view.instance_id)[1:])
                uids = [orjson.loads(payload)["uid"] for payload, _ in ledger.load(view)]
                assert uids == [f"keep{at}", f"keep{at + 1}"]
            rounds += 1
        return rounds

    loading = asyncio.create_task(asyncio.to_thread(load_all))
    for at in range(60):
        await ledger.write([item(f"u{at}-0", f"x{at}", padding=600), item(f"u{at}-1", f"x{at}", padding=600)])
        lease = await ledger.decide(lease=[view for view in ledger.candidates() if view not in views])
        assert lease is not None
        await ledger.ack(lease.lease_id)
    done.set()
    assert await loading >= 3
    assert next(iter(ledger._log.sizes)) > 3
    await ledger.close()


async def test_damage_costs_what_it_hits_and_is_kept_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "buffer"
    ledger = open_ledger(root, group_size=1)
    await ledger.write([item(f"u{at}", at, padding=100) for at in range(30)])
    places = {
        view.instance_id: next(ledger._state.groups[view.number].places()) for view in ledger.candidates()
    }
    (hurt,) = [view for view in ledger.candidates() if view.instance_id == 7]
    path = root / "segments" / "000000.rsj"
    data = bytearray(path.read_bytes())
    data[(places[7].where & (1 << 40) - 1) + 150] ^= 0x20
    path.write_bytes(data)
    with pytest.raises(DamageError, match=r"000000\.rsj, offset \d+"):
        ledger.load(hurt)
    await ledger.close()
    with caplog.at_level(logging.ERROR):
        ledger = open_ledger(root, group_size=1)
    assert "payload does not match its checksum" in caplog.text
    assert len(list((root / "damaged").iterdir())) == 1
    assert [view.instance_id for view in ledger.candidates()] == [at for at in range(30) if at != 7]
    assert await ledger.write([item("u7", 7), item("u8", 8)]) == [True, False]  # owed again
    await ledger.ack(await take(ledger))
    await ledger.close()
    ledger = open_ledger(root, group_size=1)
    assert ledger.stats().items == 0
    await ledger.close()


def test_any_flipped_byte_is_survived(tmp_path: Path) -> None:
    root = tmp_path / "buffer"

    async def fill() -> None:
        ledger = open_ledger(root, segment_bytes=1500)
        await ledger.write([item(f"u{at}", at // 2) for at in range(10)])
        await ledger.ack(await take(ledger, 2))
        await take(ledger, 1)
        await ledger.decide(quarantine=[(ledger.candidates()[0], "no")])
        await ledger.close()

    asyncio.run(fill())
    paths = sorted((root / "segments").iterdir())
    chance = random.Random(2)
    for turn in range(60):
        copy = shutil.copytree(root, tmp_path / f"copy{turn}")
        path = copy / "segments" / chance.choice(paths).name
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)

        async def use(copy: Path) -> None:
            ledger = open_ledger(copy, segment_bytes=1500)
            assert ledger.report.damage or ledger.report.torn
            for view in ledger.candidates():
                ledger.load(view)
            await ledger.write([item("new0", "new"), item("new1", "new")])
            await take(ledger)
            again = await reopened(ledger, copy, segment_bytes=1500)
            await again.close()

        asyncio.run(use(copy))


async def test_second_opener_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
        open_ledger(tmp_path)
    await ledger.close()
    await open_ledger(tmp_path).close()


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="must be a folder"):
        open_ledger(tmp_path / "file")
    root = tmp_path / "buffer"
    asyncio.run(_fill(root))
    (root / "log.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"no log\.json"):
        open_ledger(root)
    (root / "log.json").write_text('{"format": 99, "id": ""}')
    with pytest.raises(RunDirectoryError, match="format 99"):
        open_ledger(root)


async def _fill(root: Path) -> None:
    ledger = open_ledger(root)
    await ledger.write([item("a")])
    await ledger.close()


async def test_full_disk_refuses_writes_and_lets_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of a fixed size, counted at the one place that writes: what the reserve is for."""
    root = tmp_path / "buffer"
    kwargs = {"segment_bytes": 4000}
    ledger = open_ledger(root, **kwargs)
    capacity = 40_000 + oplog._RESERVE_STEP
    real = journal.write_all

    def used() -> int:
        return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    def write_all(fd: int, data: bytes) -> None:
        room = capacity - used()
        if len(data) > room:
            real(fd, data[: max(0, room)])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data)

    def fallocate(fd: int, offset: int, length: int) -> None:
        if length > capacity - used():
            raise OSError(errno.ENOSPC, "No space left on device")
        os.truncate(fd, length)

    monkeypatch.setattr(journal, "write_all", write_all)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    written = 0
    with pytest.raises(StorageFullError, match="No space left on device"):
        while True:
            await ledger.write([item(f"u{written}", written // 2, padding=400)])
            written += 1
    assert written > 30
    for _ in range(3):  # still full
        with pytest.raises(StorageFullError):
            await ledger.write([item("late", "late", padding=400)])
    assert ledger.stats().disk_full
    assert ledger.stats().items == written
    ledger = await reopened(ledger, root, **kwargs)
    lease = await take(ledger)  # reads go on, durably
    with pytest.raises(StorageFullError):
        await ledger.write([item("late", "late", padding=400)])
    ledger = await reopened(ledger, root, **kwargs)
    assert len(ledger.leases()) == 1
    assert (await ledger.ack(lease)).items == written // 2 * 2
    await settle(ledger)
    for _ in range(20):  # what was acked is cleaned away; then there is room again
        try:
            assert await ledger.write([item("late", "late", padding=400)]) == [True]
            break
        except StorageFullError:
            await settle(ledger)
    else:
        raise AssertionError("no room again")
    ledger = await reopened(ledger, root, **kwargs)
    assert ledger.stats().items == 1 + written % 2
    await ledger.close()


@pytest.mark.parametrize("how", ["leased", "quarantined"])
async def test_the_size_that_closed_a_group_at_a_start_is_its_size_for_good(tmp_path: Path, how: str) -> None:
    ledger = open_ledger(tmp_path, group_size=16)
    await ledger.write([item(f"u{n}") for n in range(12)])
    await ledger.close()
    ledger = open_ledger(tmp_path, group_size=8)
    (view,) = ledger.candidates()
    assert (view.size, view.group_size, view.closed) == (12, 8, True)
    if how == "leased":
        lease = await take(ledger)
    else:
        await ledger.decide(quarantine=[(view, "no")])
    ledger = await reopened(ledger, tmp_path, group_size=8)
    if how == "leased":
        await ledger.nack(lease)
    else:
        await ledger.retry_quarantined()
    (view,) = ledger.candidates()
    assert (view.size, view.group_size, view.closed) == (12, 8, True)
    ledger = await reopened(ledger, tmp_path, group_size=8)
    await ledger.close()
