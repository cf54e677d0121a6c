"""What a server says of itself: whether it takes reads and writes."""

import asyncio
import errno
import time
from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer.ledger import GroupView, Ledger
from rollstream.buffer.oplog import Batch, Oplog
from rollstream.buffer.state import BufferState
from rollstream.errors import RollstreamError, StorageFullError

from .served import item, served


async def test_a_full_disk_is_not_ready_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Oplog._write

    def full(self: Oplog, batch: Batch) -> None:
        if batch.needs_room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, batch)

    async with served(tmp_path) as buffer:
        assert await buffer.get("/ready") == (200, {"status": "ready"})
        with monkeypatch.context() as patch:
            patch.setattr(Oplog, "_write", full)
            assert (await buffer.post("/v1/items", item(1)))[0] == 507
            status, answer = await buffer.get("/ready")
            assert (status, answer["error"]["code"]) == (503, "not_ready")
            assert "No space left" in answer["error"]["message"]
            assert (await buffer.get("/health"))[0] == 200
            assert (await buffer.post("/v1/read", {}))[0] == 200
        # Nobody writes to a server that is not ready: it finds out by itself.
        assert (await buffer.get("/ready"))[0] == 200
        assert not buffer.service.ledger.stats().disk_full


async def test_all_who_ask_for_readiness_share_one_look_at_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def full(self: Oplog, batch: Batch) -> None:
        nonlocal tried
        tried += 1
        time.sleep(0.05)
        raise OSError(errno.ENOSPC, "No space left on device")

    async with served(tmp_path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(Oplog, "_write", full)
            assert (await buffer.post("/v1/items", item(1)))[0] == 507
            answers = await asyncio.gather(
                *(buffer.service.ledger.try_writing() for _ in range(200)), return_exceptions=True
            )
            assert {type(answer) for answer in answers} == {StorageFullError}
            assert tried <= 3
        await buffer.service.ledger.try_writing()


async def test_a_server_without_descriptors_blames_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: Ledger, view: GroupView) -> list[tuple[bytes, str]]:
        raise OSError(errno.EMFILE, "Too many open files")

    async with served(tmp_path) as buffer:
        await buffer.write_group("a")
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "load", none_left)
            assert (await buffer.post("/v1/read", {}))[0] == 500
        stats = buffer.service.ledger.stats()
        assert (stats.groups["ready"], stats.groups["quarantined"]) == (1, 0)
        assert (await buffer.post("/v1/read", {}))[1]["groups"]


async def test_a_buffer_that_has_stopped_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError(0)

    async with served(tmp_path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(BufferState, "apply", broken)
            with pytest.raises(RollstreamError):
                await buffer.service.ledger.set_task("t", 2)
        status, answer = await buffer.get("/ready")
        assert status == 503 and "has stopped" in answer["error"]["message"]
