"""slime's routes: exact shapes of both generations, bad input, backpressure, readers that go away."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.integrations.slime import routes
from tests.support.buffer import SPOILS_2, Served, generator, group, item, large_item, served, served_job

NOTHING: dict[str, Any] = {"data": [], "meta_info": {}}


async def read(buffer: Served, **asked: Any) -> dict[str, Any]:
    status, answer = await buffer.post("/get_rollout_data", asked)
    assert status == 200 and set(answer) == {"success", "message", "data"}, answer
    assert set(answer["data"]) == {"data", "meta_info"}
    return answer  # type: ignore[no-any-return]


async def test_write_answers_as_slime_does(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for written in (item(7, 0.5, "a", round_number=3), orjson.loads(large_item(3_000_000))):
            assert await buffer.post("/buffer/write", written) == (
                200,
                {
                    "success": True,
                    "message": "Data has been successfully written to buffer",
                    "data": {"data": [written], "meta_info": "write to buffer"},
                },
            )
            await buffer.post("/buffer/write", written)
        assert (await buffer.stats())["items_written"] == 2, "a uid is stored once"


async def test_a_text_that_was_cut_through_an_emoji_is_taken(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for written in (item("p", 0.5, "a"), orjson.loads(large_item(3_000_000))):
            status, answer = await buffer.post("/buffer/write", {**written, "note": "cut \ud83d"})
            assert (status, answer["data"]["data"]) == (200, [{**written, "note": "cut \ufffd"}])
        async with buffer.session.get(buffer.url + "/metrics") as response:
            assert "rollstream_buffer_replaced_surrogates_total 2.0" in (await response.text()).splitlines()


async def test_reading_everything(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        answer = await read(buffer)
        assert answer == {"success": False, "message": "No data available to read", "data": NOTHING}
        await buffer.write(*group("p"), *group("equal", (1, 1, 1, 1)), *group("open", (1, 0)))
        answer = await read(buffer)
        assert (answer["success"], answer["message"]) == (True, "Successfully read 4 items")
        meta = answer["data"]["meta_info"]
        assert meta["finished_groups"] == ["p", "equal"] and meta["dropped_groups"] == {"equal_rewards": 1}
        assert (meta["total_samples"], meta["num_groups"], meta["avg_reward"]) == (8, 2, 0.75)
        assert (meta["reward_min"], meta["reward_max"], meta["unscored"]) == (0, 1, 0)
        items = answer["data"]["data"]
        assert [one["raw_reward"] for one in items] == [0, 1, 0, 1]
        assert [one["extra_info"]["raw_reward"] for one in items] == [0, 1, 0, 1]
        assert [one["reward"] for one in items] == pytest.approx([-1, 1, -1, 1])
        assert (await read(buffer))["success"] is False
        await buffer.write(*group("next"))
        assert (await read(buffer))["data"]["meta_info"]["finished_groups"] == ["next"], "told once"


async def test_a_batch_is_whole_or_not_given(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write(*group("a"), *group("b"), *group("c"))
        answer = await read(buffer, batch_size=16)
        assert answer["success"] is False and answer["data"] == NOTHING
        assert answer["message"].startswith("Not enough data. Requested 16 items but only 12 available.")
        answer = await read(buffer, batch_size="8")
        assert answer["message"] == "Successfully read 8 items"
        assert [one["instance_id"] for one in answer["data"]["data"]] == ["a"] * 4 + ["b"] * 4


async def test_the_earlier_generation(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        assert await buffer.get("/") == (200, {"message": "Rollout Buffer Server is running"})
        asked = {"batch_size": 8, "timeout": 0}
        assert (await buffer.post("/buffer/read", asked))[1] == {
            "success": False,
            "message": "Timeout waiting, no data available to read",
            "data": NOTHING,
        }
        await buffer.write(*group("a"))
        (counts,) = (await buffer.get("/buffer/stats"))[1]["data"]["data"]
        assert counts == {"current_size": 4, "max_size": 10**9, "total_written": 4, "total_read": 0}
        _, answer = await buffer.get("/buffer/peek?batch_size=3")
        assert answer["message"] == "Successfully previewed 3 items" and len(answer["data"]["data"]) == 3
        _, answer = await buffer.post("/buffer/read", {"batch_size": 8, "timeout": 1})
        assert answer["message"] == "Successfully read 4 items"
        assert (await buffer.get("/buffer/stats"))[1]["data"]["data"][0]["total_read"] == 4
        _, answer = await buffer.post("/buffer/read", {"batch_size": 8, "timeout": 1, "wait": False})
        assert (answer["success"], answer["message"]) == (True, "Successfully read 0 items")


async def test_that_many_groups_or_none_and_no_instance_twice(tmp_path: Path) -> None:
    async with served(tmp_path, max_groups_per_read=2) as buffer:
        counts: list[int] = []
        for name in "aab":
            for n, one in enumerate(group(name)):
                await buffer.write({**one, "uid": f"{len(counts)}-{n}"})
            counts.append(len((await read(buffer))["data"]["data"]))
        assert counts == [0, 0, 8]
        assert (await buffer.stats())["groups"]["ready"] == 1


async def test_a_read_takes_another_group_for_one_that_a_hook_spoils(tmp_path: Path) -> None:
    async with served_job(tmp_path, SPOILS_2, max_groups_per_read=3) as buffer:
        await buffer.write(*group(1, (0, 1)), *group(2, (0, 1)), *group(3, (0, 1)))
        answer = await read(buffer)
        assert answer["success"] is False, "two groups are not three"
        await buffer.until(lambda: buffer.counted(ready=2))
        await buffer.write(*group(4, (0, 1)))
        answer = await read(buffer)
        assert answer["success"] is True
        assert [one["instance_id"] for one in answer["data"]["data"]] == [1, 1, 3, 3, 4, 4]


async def test_bad_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as buffer:
        wrong = (
            b"[]",
            b"{",
            b'{"batch_size": "many"}',
            b'{"batch_size": 1.5}',
            b'{"batch_size": 2}',
            b"null",
        )
        cases = [(path, body) for path in ("/get_rollout_data", "/buffer/read") for body in wrong]
        cases += [("/start_rollout", body) for body in (b"[]", b'{"task_type": "x"}')]
        monkeypatch.setattr(routes, "_START_ERROR_S", 3600.0)
        refused = asyncio.create_task(buffer.post("/start_rollout", {}))
        await buffer.get("/health")
        assert not refused.done(), "its client asks again at once"
        refused.cancel()
        monkeypatch.setattr(routes, "_START_ERROR_S", 0.0)
        for path, body in cases:
            status, answer = await buffer.post(path, data=body)
            assert status == 400 and answer["success"] is False, (path, body)


@pytest.mark.parametrize("path", ["/get_rollout_data", "/v1/read"])
async def test_a_reader_that_goes_away_gives_its_groups_back(tmp_path: Path, path: str) -> None:
    async with served(tmp_path) as buffer:
        for number in range(64):
            await buffer.write(*group(number, pad="z" * 60_000))
        await asyncio.to_thread(read_a_little, buffer.url, path)
        await buffer.until(lambda: buffer.counted(ready=64))
        answer = await read(buffer)
        assert len({one["uid"] for one in answer["data"]["data"]}) == len(answer["data"]["data"]) == 256


def read_a_little(url: str, path: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert connection.recv(1000)


async def test_a_trainer_gets_nothing_of_the_job_before_its_own(tmp_path: Path) -> None:
    async with served(tmp_path / "buffer", generators=(generator(tmp_path / "files"),)) as buffer:
        first = await buffer.start(num_epoch=1)
        await buffer.write(*group("old"), item("open"))
        second = await buffer.start(num_epoch=2, num_repeat_per_sample="2")
        assert any(first["id"] in one for one in second["warnings"])
        await buffer.write(*group("new", (0, 1)))
        assert [one["instance_id"] for one in (await read(buffer, batch_size=2))["data"]["data"]] == [
            "new"
        ] * 2
        answer = await read(buffer)
        assert answer["success"] is False and "1 groups are ready, 0 of them fit" in answer["message"]
        await buffer.write(*group("outside", (0, 1), task_type="other"))
        assert (await read(buffer))["success"] is False
        assert [len(one["items"]) for one in (await buffer.read(job=first["id"]))["groups"]] == [4]


async def test_a_refused_start_is_told_where_a_stock_trainer_prints_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It prints the status line only, and repeats the request for ever."""
    async with served(tmp_path / "buffer", generators=(generator(tmp_path / "files"),)) as buffer:
        payload = {"task_type": "math", "input_file": "/elsewhere/\u00fc\r\nx-header: 1.jsonl"}
        for _ in range(2):
            async with buffer.session.post(buffer.url + "/start_rollout", json=payload) as response:
                assert response.status == 400 and "x-header" not in response.headers
                assert response.reason is not None and response.reason.isascii()
                assert "--inputs" in response.reason and "input_file" in response.reason
        refused = [
            one for one in caplog.records if one.levelname == "WARNING" and "input_file" in one.message
        ]
        assert len(refused) == 1
        async with buffer.session.post(buffer.url + "/start_rollout", json={"task_type": "sums"}) as response:
            assert "'sums'" in (response.reason or "") and "'sums'" in caplog.text
