"""What goes wrong below the ledger: disks that refuse, bits that rot, defects. Nobody waits for ever."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer import cleaning, commits, drop_file, oplog
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.ledger import Ledger, LedgerSettings
from rollstream.buffer.state import BufferState
from rollstream.errors import RollstreamError, StorageError, StorageFullError
from rollstream.store import journal
from rollstream.store.journal import JournalFile
from tests.unit.buffer.ledger_worlds import item, open_ledger
from tests.unit.buffer.test_ledger import reopened, settle, take


async def test_an_item_that_cannot_be_written_fails_its_own_writer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commits.encode_item

    def encode(one: Any, **kwargs: Any) -> bytes:
        if one.uid == "bad":
            raise ValueError("no form for it")
        return real(one, **kwargs)

    monkeypatch.setattr(commits, "encode_item", encode)
    ledger = open_ledger(tmp_path, group_size=3)
    writes = [
        ledger.submit([item("a"), item("b")]),
        ledger.submit([item("c"), item("bad"), item("left")]),
        ledger.submit([item("d")]),
    ]
    a, bad, d = await asyncio.gather(*writes, return_exceptions=True)
    assert (a, d) == ([True, True], [True])
    assert isinstance(bad, RollstreamError) and not isinstance(bad, StorageError)
    assert "'bad'" in str(bad)
    assert ledger.knows(["a", "b", "c", "bad", "left", "d"]) == [True, True, True, False, False, True]
    ledger = await reopened(ledger, tmp_path, group_size=3)
    assert ledger.stats().items == 4
    monkeypatch.setattr(commits, "encode_item", real)
    assert await ledger.write([item("c"), item("bad"), item("left")]) == [False, True, True]
    await ledger.close()


@pytest.mark.parametrize("crash", [True, False])
async def test_nothing_is_written_behind_what_could_not_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    ledger = open_ledger(tmp_path, group_size=2)
    await ledger.write([item("a0", "A")])

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(JournalFile, "sync", broken)
        patch.setattr(JournalFile, "rollback", broken)
        for uid in ("x0", "x1", "x2"):
            with pytest.raises(StorageError, match="Input/output"):
                await ledger.write([item(uid, "X")])
        if crash:
            await ledger.close()
            ledger = open_ledger(tmp_path / "other")
    if crash:  # only what was refused first may be there, and then as a whole
        await ledger.close()
        ledger = open_ledger(tmp_path, group_size=2)
        known = ledger.knows(["a0", "x0", "x1", "x2"])
        assert known in ([True, True, False, False], [True, False, False, False])
    assert await ledger.write([item("y0", "Y", 0.1)]) == [True]
    assert await ledger.write([item("y1", "Y", 0.9), item("a1", "A")]) == [True, True]
    ledger = await reopened(ledger, tmp_path, group_size=2)
    assert not ledger.report.damage
    got = {view.instance_id: view.rewards for view in ledger.candidates()}
    assert got == {"A": (0.5, 0.5), "Y": (0.1, 0.9)}
    await ledger.close()


async def test_a_group_of_a_segment_that_rotted_can_be_dropped(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, segment_bytes=4096)
    for n in range(2):
        await ledger.write([item(f"a{n}", "A", padding=300)])
    path = ledger._log.path(0)
    at = path.read_bytes().find(b"xxxxxxxx")
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"Q", at + 5)
    os.close(fd)
    for n in range(100):
        await ledger.write([item(f"f{n}-{k}", f"F{n}", padding=300) for k in range(2)])
        views = [view for view in ledger.candidates() if view.instance_id != "A"]
        lease = await ledger.decide(lease=views)
        assert lease is not None
        await ledger.ack(lease.lease_id)
    await settle(ledger)
    assert (tmp_path / "damaged" / path.name).exists()
    (view,) = ledger.candidates()
    await asyncio.wait_for(ledger.decide(drop=[(view, "not_valid")]), 20)
    assert await asyncio.wait_for(ledger.write([item("z", "Z")]), 20) == [True]
    assert ledger.stats().items == 1
    await ledger.close()


async def test_a_defect_while_applying_stops_the_buffer_and_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(tmp_path, group_size=1)
    await ledger.write([item("a")])

    def broken(*_: object, **__: object) -> None:
        raise KeyError(0)

    with monkeypatch.context() as patch:
        patch.setattr(BufferState, "apply", broken)
        asked = [
            asyncio.ensure_future(ledger.decide(lease=ledger.candidates())),
            asyncio.ensure_future(ledger.nack("nothing")),
            ledger.submit([item("b")]),
        ]
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        assert all(isinstance(answer, RollstreamError) for answer in answers), answers
    with pytest.raises(RollstreamError, match="has stopped"):
        await asyncio.wait_for(ledger.write([item("c")]), 20)
    with pytest.raises(RollstreamError, match="has stopped"):
        await asyncio.wait_for(ledger.set_task("t", 2), 20)
    await asyncio.wait_for(ledger.close(), 20)
    ledger = open_ledger(tmp_path, group_size=1)
    assert ledger.knows(["a", "c"]) == [True, False]
    await ledger.close()


async def test_drops_that_the_file_lacks_are_listed_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(tmp_path, group_size=1)
    await ledger.write([item(name, name) for name in "ABCD"])

    async def drop(names: str) -> None:
        views = [view for view in ledger.candidates() if str(view.instance_id) in names]
        await ledger.decide(drop=[(view, "not_valid") for view in views])

    await drop("AB")
    await ledger.close()
    path = tmp_path / "dropped.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20])  # two of one decision, the second one torn
    ledger = open_ledger(tmp_path, group_size=1)
    assert [line.instance_id for line in ledger.dropped()] == ["A", "B"]
    with monkeypatch.context() as patch:
        patch.setattr(drop_file.DropFile, "append", lambda *_: None)  # the disk is full for a moment
        await drop("C")
    await drop("D")
    listed = ledger.dropped()
    for _ in range(2):
        ledger = await reopened(ledger, tmp_path, group_size=1)
        assert ledger.dropped() == listed
    assert [line.instance_id for line in listed] == ["A", "B", "C", "D"]
    await ledger.close()


async def test_rotated_drops_are_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_file, "_ROTATE_BYTES", 1000)
    ledger = open_ledger(tmp_path, group_size=1)
    for at in range(30):
        await ledger.write([item(f"u{at}", at)])
        await ledger.decide(drop=[(view, "no") for view in ledger.candidates()])
    ledger = await reopened(ledger, tmp_path, group_size=1)
    older, newer = tmp_path / "dropped.jsonl.1", tmp_path / "dropped.jsonl"
    lines = older.read_bytes().splitlines() + newer.read_bytes().splitlines()
    assert len(lines) == len(set(lines))
    await ledger.close()


class SmallDisk:
    """A disk of a fixed size, counted at the two places that take room."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.capacity = root, 1 << 60
        self._write = journal.write_all
        patch.setattr(journal, "write_all", self.write_all)
        patch.setattr(os, "posix_fallocate", self.fallocate)

    def room(self) -> int:
        return self.capacity - sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def fill(self) -> None:
        self.capacity -= self.room()

    def write_all(self, fd: int, data: bytes) -> None:
        if self.capacity < 1 << 60 and len(data) > self.room():
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(fd, data)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        if length - os.fstat(fd).st_size > self.room():
            raise OSError(errno.ENOSPC, "No space left on device")
        os.truncate(fd, max(length, os.fstat(fd).st_size))


async def test_all_that_is_stored_can_be_read_one_by_one_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oplog, "_RESERVE_STEP", 1 << 15)  # everything on a small scale: it is quick then
    monkeypatch.setattr(cleaning, "_SMALL", 1 << 13)
    disk = SmallDisk(tmp_path, monkeypatch)
    ledger = Ledger.open(tmp_path / "buffer", LedgerSettings(groups=GroupSettings(group_size=2)))
    groups = 250  # their leases and acks alone are more than the least reserve
    await ledger.write([item(f"{one}-{n}", one, padding=400) for one in range(groups) for n in range(2)])
    await ledger.write([item(f"end{n}", "end") for n in range(2)])
    reserve = (tmp_path / "buffer" / "reserve").stat().st_size
    disk.fill()
    with pytest.raises(StorageFullError):
        await ledger.write([item("late", "late")])
    read = 0
    while views := ledger.candidates(limit=1):
        lease = await ledger.decide(lease=views)
        assert lease is not None
        await ledger.ack(lease.lease_id)
        read += 1
    assert read == groups + 1
    assert reserve > 4 << 15
    await settle(ledger)
    assert await ledger.write([item("late", "late")]) == [True]  # the one segment that there was is gone
    assert not ledger.stats().disk_full
    await ledger.close()


async def test_what_was_full_is_cleaned_without_slack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path, monkeypatch)
    ledger = open_ledger(tmp_path / "buffer", segment_bytes=600_000)
    for at in range(0, 500, 50):
        await ledger.write([item(f"u{one}", one // 2, padding=3000) for one in range(at, at + 50)])
    before = ledger.stats()
    assert before.segments == 3
    disk.fill()
    with pytest.raises(StorageFullError):
        await ledger.write([item("late", "late", padding=3000)])
    lease = await take(ledger, 110)
    await ledger.ack(lease)
    await settle(ledger)
    assert ledger.stats().bytes_on_disk < before.bytes_on_disk - 500_000
    assert await ledger.write([item("late", "late", padding=3000)]) == [True]
    ledger = await reopened(ledger, tmp_path / "buffer", segment_bytes=600_000)
    await ledger.close()
