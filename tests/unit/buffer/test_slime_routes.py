"""slime's routes: exact shapes of both generations, bad input, backpressure, readers that go away."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollstream.buffer.commits import CommitQueue
from rollstream.buffer.delivery import Delivery
from rollstream.buffer.generators import Rollouts
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.ledger import LedgerSettings
from rollstream.buffer.log_records import Event
from rollstream.buffer.reads import Taken, Wanted
from rollstream.errors import StorageError, StorageFullError

from .served import Served, item, served

EMPTY = {"total_samples": 0, "num_groups": 0, "avg_group_size": 0, "avg_reward": 0, "finished_groups": []}


async def test_write_answers_as_slime_does(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        written = item(7, 0.5, "a", round_number=3)
        assert await buffer.post("/buffer/write", written) == (
            200,
            {
                "success": True,
                "message": "Data has been successfully written to buffer",
                "data": {"data": [written], "meta_info": "write to buffer"},
            },
        )


async def test_reading_everything(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        assert await buffer.post("/get_rollout_data", {}) == (
            200,
            {
                "success": False,
                "message": "No data available to read",
                "data": {"data": [], "meta_info": EMPTY},
            },
        )
        await buffer.write_group("p")
        await buffer.write_group("equal", (1, 1, 1, 1))
        await buffer.write_group("open", (1, 0))
        status, answer = await buffer.post("/get_rollout_data", {})
        assert (status, answer["success"], answer["message"]) == (200, True, "Successfully read 4 items")
        assert answer["data"]["meta_info"] == {
            "total_samples": 8,
            "num_groups": 2,
            "avg_group_size": 4,
            "avg_reward": 0.75,
            "finished_groups": ["p", "equal"],
        }
        items = answer["data"]["data"]
        assert [one["raw_reward"] for one in items] == [0, 1, 0, 1]
        assert [one["extra_info"]["raw_reward"] for one in items] == [0, 1, 0, 1]
        assert [one["reward"] for one in items] == pytest.approx([-1, 1, -1, 1])
        assert {"uid", "instance_id", "messages", "reward", "extra_info"} <= items[0].keys()
        assert (await buffer.post("/get_rollout_data", {}))[1]["success"] is False
        _, dropped = await buffer.get("/v1/dropped")
        assert [(one["instance_id"], one["reason"]) for one in dropped["dropped"]] == [("equal", "not_valid")]


async def test_a_batch_is_whole_or_not_given(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for name in "abc":
            await buffer.write_group(name)
        _, answer = await buffer.post("/get_rollout_data", {"batch_size": 16})
        assert answer["success"] is False and answer["data"]["data"] == []
        assert answer["message"] == "Not enough data. Requested 16 items but only 12 available."
        _, answer = await buffer.post("/get_rollout_data", {"batch_size": "8"})
        assert answer["message"] == "Successfully read 8 items"
        assert [one["instance_id"] for one in answer["data"]["data"]] == ["a"] * 4 + ["b"] * 4
        status, answer = await buffer.post("/get_rollout_data", {"batch_size": 2})
        assert status == 400 and "less than a group" in answer["message"]


async def test_the_earlier_generation(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        assert await buffer.get("/") == (200, {"message": "Rollout Buffer Server is running"})
        assert await buffer.post("/buffer/read", {"batch_size": 8, "timeout": 0}) == (
            200,
            {
                "success": False,
                "message": "Timeout waiting, no data available to read",
                "data": {"data": [], "meta_info": EMPTY},
            },
        )
        await buffer.write_group("a")
        assert await buffer.get("/buffer/stats") == (
            200,
            {
                "success": True,
                "message": "Buffer stats retrieved successfully",
                "data": {
                    "data": [
                        {"current_size": 4, "max_size": 1_000_000_000, "total_written": 4, "total_read": 0}
                    ],
                    "meta_info": {},
                },
            },
        )
        status, answer = await buffer.get("/buffer/peek", json={"batch_size": 3})
        assert (status, answer["message"]) == (200, "Successfully previewed 3 items")
        assert len(answer["data"]["data"]) == 3 and answer["data"]["meta_info"] == {}
        _, answer = await buffer.post("/buffer/read", {"batch_size": 8, "timeout": 1})
        assert answer["message"] == "Successfully read 4 items"
        # Counted when the reader has it all: that may be just after it has seen the end.
        async with asyncio.timeout(10):
            while (await buffer.get("/buffer/stats"))[1]["data"]["data"][0]["total_read"] != 4:
                await asyncio.sleep(0.01)
        _, answer = await buffer.post("/buffer/read", {"batch_size": 8, "timeout": 1, "wait": False})
        assert (answer["success"], answer["message"]) == (True, "Successfully read 0 items")


async def test_a_read_waits_and_blocks_nobody(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        reads = [
            asyncio.create_task(buffer.post("/buffer/read", {"batch_size": 4, "timeout": 30}))
            for _ in range(2)
        ]
        while buffer.service.metrics.waiting_reads < 2:
            await asyncio.sleep(0.01)
        await buffer.write_group("a")
        await buffer.write_group("b")
        answers = [await read for read in reads]
        read = sorted(answer["data"]["data"][0]["instance_id"] for _, answer in answers)
        assert read == ["a", "b"]


async def test_no_more_groups_than_the_server_allows(tmp_path: Path) -> None:
    async with served(tmp_path, max_groups_per_read=2) as buffer:
        for name in "abc":
            await buffer.write_group(name)
        counts = [len((await buffer.post("/get_rollout_data", {}))[1]["data"]["data"]) for _ in range(3)]
        assert counts == [8, 4, 0]


async def test_an_empty_answer_tells_of_groups_that_a_cycle_holds_back(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=1), groups_per_cycle=3)
    async with served(tmp_path, settings) as buffer:
        await buffer.post("/buffer/write", item("a", 1, "first"))
        assert (await buffer.post("/get_rollout_data", {}))[1]["success"]
        await buffer.post("/buffer/write", item("a", 1, "again"))
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["message"].startswith(
            "No data available to read (1 groups are ready, but not for this read"
        )


async def test_a_group_that_comes_after_the_look_was_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Delivery.take

    async def too_early(self: Delivery, wanted: Wanted) -> Taken:
        taken = await take(self, wanted)
        await buffer.write_group("late")
        return taken

    async with served(tmp_path) as buffer:
        monkeypatch.setattr(Delivery, "take", too_early)
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["message"] == "No data available to read"
        assert buffer.service.ledger.ready_groups == 1


async def test_whole_reads(tmp_path: Path) -> None:
    async with served(tmp_path, max_groups_per_read=2, whole_reads=True) as buffer:
        counts = []
        for name in "abc":
            await buffer.write_group(name)
            counts.append(len((await buffer.post("/get_rollout_data", {}))[1]["data"]["data"]))
        assert counts == [0, 8, 0]


GOOD = item("x", 1.0, "u")
BAD: list[tuple[str, bytes]] = [
    ("not valid json", b"{"),
    ("not valid json", b""),
    ("an item is an object", b"[]"),
    ("an item is an object", b"7"),
    ("not valid json", b"\xff\xfe"),
    ("instance_id: is missing", json.dumps({k: v for k, v in GOOD.items() if k != "instance_id"}).encode()),
    ("messages: is missing", json.dumps({k: v for k, v in GOOD.items() if k != "messages"}).encode()),
    ("messages: is empty", json.dumps({**GOOD, "messages": []}).encode()),
    ("messages[0].role", json.dumps({**GOOD, "messages": [{"content": "x"}]}).encode()),
    ("not valid json", json.dumps({**GOOD, "reward": float("nan")}).encode()),
    ("not valid json", json.dumps({**GOOD, "reward": float("inf")}).encode()),
    ("reward", json.dumps({**GOOD, "reward": "0.5"}).encode()),
    ("reward", json.dumps({**GOOD, "reward": True}).encode()),
    ("reward: is missing", json.dumps({k: v for k, v in GOOD.items() if k != "reward"}).encode()),
    ("instance_id", json.dumps({**GOOD, "instance_id": 1.5}).encode()),
    ("instance_id", json.dumps({**GOOD, "instance_id": True}).encode()),
    ("instance_id", json.dumps({**GOOD, "instance_id": ""}).encode()),
    ("instance_id", json.dumps({**GOOD, "instance_id": 2**80}).encode()),
    ("uid", json.dumps({**GOOD, "uid": 5}).encode()),
    ("extra_info", json.dumps({**GOOD, "extra_info": []}).encode()),
    ("not valid json", json.dumps({**GOOD, "note": "\ud800"}).encode()),
    ("nested deeper", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    ("nested deeper", b"[" * 100_000),
]


async def test_bad_items_are_refused_and_touch_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.post("/buffer/write", item("kept", 1, "kept"))
        for said, body in BAD:
            for path in ("/buffer/write", "/v1/items"):
                status, answer = await buffer.post(
                    path, data=body, headers={"content-type": "application/json"}
                )
                assert status == 400, (said, body[:80])
                assert said in answer["error"]["message"], (said, answer)
        assert buffer.service.ledger.stats().items == 1


async def test_7_and_text_7_are_two_groups(tmp_path: Path, caplog: Any) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group(7)
        await buffer.write_group("7")
        _, answer = await buffer.post("/get_rollout_data", {})
        assert [one["instance_id"] for one in answer["data"]["data"]] == [7] * 4 + ["7"] * 4
    assert sum("two different instances" in record.message for record in caplog.records) == 1


async def test_a_uid_is_stored_once(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for _ in range(3):
            status, answer = await buffer.post("/buffer/write", item(1, 1, "same"))
            assert (status, answer["success"]) == (200, True)
        assert buffer.service.ledger.stats().items == 1


async def test_bad_requests(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        wrong = [b"[]", b"{", b'{"batch_size": "many"}', b'{"batch_size": 0}', b'{"batch_size": 1.5}']
        cases = [(path, body) for path in ("/get_rollout_data", "/buffer/read") for body in wrong]
        cases += [("/start_rollout", b"[]"), ("/start_rollout", b"{"), ("/buffer/read", b'{"batch_size": 8}')]
        for path, body in cases:
            status, answer = await buffer.post(path, data=body)
            assert status == 400 and answer["success"] is False, (path, body)
            assert answer["message"] == answer["detail"] == answer["error"]["message"]


async def test_errors_of_a_start_are_told_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = asyncio.get_running_loop().time

    async def full(self: Rollouts, payload: Any) -> None:
        raise StorageFullError("the disk is full")

    async def refused(status: int, **asked: Any) -> Any:
        began = now()
        got, answer = await buffer.post("/start_rollout", **asked)
        assert got == status and now() - began > 0.9
        return answer

    chess: dict[str, Any] = {"json": {"task_type": "chess"}}
    async with served(tmp_path, token="secret") as buffer:
        await refused(401, **chess)
        buffer.session.headers["authorization"] = "Bearer secret"
        answer = await refused(404, **chess)
        assert "'chess'" in answer["message"] and answer["error"]["known"] == []
        await refused(400, data=b"{")
        monkeypatch.setattr(Rollouts, "start", full)
        await refused(507, **chess)


async def test_too_large_is_refused_while_it_comes(tmp_path: Path) -> None:
    async with served(tmp_path, max_body=100_000) as buffer:
        huge = json.dumps(item(1, 1, "big", note="x" * 200_000)).encode()

        async def in_parts() -> Any:
            for _ in range(400):
                yield b"y" * 10_000

        for data in (huge, in_parts()):
            status, answer = await buffer.post("/buffer/write", data=data)
            assert (status, answer["error"]["code"]) == (413, "too_large")
        assert (await buffer.post("/buffer/write", item(1, 1, "fine")))[0] == 200


async def test_a_write_without_room_is_held(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=4), max_buffer_size=4)
    async with served(tmp_path, settings) as buffer:
        await buffer.write_group("a")
        held = asyncio.create_task(buffer.post("/buffer/write", item("b", 1, "b0")))
        while not buffer.service.metrics.held_writes:
            await asyncio.sleep(0.01)
        status, answer = await buffer.post("/v1/items", item("b", 1, "b1"))
        assert (status, answer["error"]["code"]) == (429, "buffer_full")
        assert (await buffer.post("/get_rollout_data", {}))[1]["success"] is True
        status, answer = await held
        assert (status, answer["success"]) == (200, True)


async def test_a_reader_that_goes_away_gives_its_groups_back(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for number in range(64):
            items = [item(number, n % 2, f"{number}-{n}", pad="z" * 60_000) for n in range(4)]
            assert (await buffer.post("/v1/items", {"items": items}))[0] == 200
        for path, body in (("/get_rollout_data", b"{}"), ("/v1/read", b"{}")):
            await asyncio.to_thread(_read_a_little, buffer.url, path, body)
            async with asyncio.timeout(20):
                while buffer.service.ledger.stats().groups["ready"] < 64:
                    await asyncio.sleep(0.01)
            assert buffer.service.ledger.stats().items_delivered == 0
        _, answer = await buffer.post("/get_rollout_data", {})
        assert len(answer["data"]["data"]) == 256
        assert len({one["uid"] for one in answer["data"]["data"]}) == 256


def _read_a_little(url: str, path: str, body: bytes) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


async def test_pipelined_and_split_requests(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(buffer.url.rpartition(":")[2]))
        bodies = [json.dumps(item("p", n % 2, f"p{n}")).encode() for n in range(6)]
        bodies[3] = b"{"
        raw = b"".join(
            b"POST /buffer/write HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            for body in bodies
        )
        for at in range(0, len(raw), 97):
            writer.write(raw[at : at + 97])
            await writer.drain()
        statuses = []
        for _ in bodies:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            statuses.append(int(head.split()[1]))
        assert statuses == [200, 200, 200, 400, 200, 200]
        writer.write(raw)
        writer.close()
        await writer.wait_closed()
    assert isinstance(buffer, Served)


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.buffer.server._KEEP_ALIVE_S", 0.3)
    async with served(tmp_path) as buffer:
        port = int(buffer.url.rpartition(":")[2])
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        busy, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"batch_size": 4, "timeout": 1}'
        writer.write(
            b"POST /buffer/read HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert await asyncio.wait_for(silent.read(), 10) == b""
        assert b" 200 " in await asyncio.wait_for(busy.readline(), 10)
        await asyncio.wait_for(busy.read(), 10)


async def test_a_read_in_parts_has_no_instance_twice(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=1))
    async with served(tmp_path, settings) as buffer:
        for epoch in range(2):
            items = [item(number, 1, f"{epoch}-{number}") for number in range(700)]
            assert (await buffer.post("/v1/items", {"items": items}))[0] == 200
        for epoch in range(2):
            _, answer = await buffer.post("/get_rollout_data", {})
            assert answer["message"] == "Successfully read 700 items"
            assert [one["uid"] for one in answer["data"]["data"]] == [f"{epoch}-{n}" for n in range(700)]
            assert answer["data"]["meta_info"]["num_groups"] == 700
        async with asyncio.timeout(10):
            while buffer.service.ledger.stats().items_delivered < 1400:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("fails", [1, 2])
async def test_a_read_in_parts_is_acked_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    async with served(tmp_path, LedgerSettings(groups=GroupSettings(group_size=1))) as buffer:
        await buffer.post("/v1/items", {"items": [item(n, 1.0, f"u{n}") for n in range(600)]})
        control, acks = CommitQueue.control, 0

        def refusing(self: CommitQueue, plan: Any, **kwargs: Any) -> Any:
            def planned() -> Any:
                nonlocal acks
                event = plan()
                if isinstance(event, Event) and any(outcome == "acked" for _, outcome in event.ends):
                    acks += 1
                    if acks == fails:
                        raise StorageError("the disk is gone")
                return event

            return control(self, planned, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(CommitQueue, "control", refusing)
            if fails == 1:
                with pytest.raises(aiohttp.ClientError):
                    await buffer.post("/get_rollout_data", {})
            else:
                status, answer = await buffer.post("/get_rollout_data", {})
                assert status == 200 and len(answer["data"]["data"]) == 600
        stats = buffer.service.ledger.stats()
        assert (stats.groups_delivered, stats.groups["ready"]) == ((0, 600) if fails == 1 else (600, 0))
        assert acks == 1 and stats.leases == 0
