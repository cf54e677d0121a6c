"""What a server says of itself: whether it takes reads and writes."""

import errno
from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer.oplog import Batch, Oplog
from rollstream.buffer.state import BufferState
from rollstream.errors import RollstreamError

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
