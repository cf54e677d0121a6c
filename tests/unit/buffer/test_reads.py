"""Readers that wait, hooks of real generator files, groups that are handed out as they are, settings of jobs."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.buffer import Served, generator, group, item, served, served_job
from tests.support.postgres import PostgresServer, postgres

__all__ = ["postgres"]


async def waiting(buffer: Served, count: int, **asked: Any) -> list[asyncio.Task[dict[str, Any]]]:
    before = buffer.service.reads.waiting
    tasks = [asyncio.create_task(buffer.read(**{"timeout": 200, **asked})) for _ in range(count)]
    await buffer.until(lambda: buffer.service.reads.waiting == before + count)
    return tasks


async def test_a_group_wakes_the_reader_that_can_use_it(tmp_path: Path) -> None:
    """It stands behind many who ask for the same that they cannot have, and for other tasks."""
    async with served(tmp_path) as buffer:
        many = await waiting(buffer, 20, batch_size=400)
        more = await waiting(buffer, 5, policy_version=9, max_staleness=0)
        other = await waiting(buffer, 5, task_type="other")
        (fit,) = await waiting(buffer, 1, max_groups=1)
        await buffer.write(*group("a", policy_version=1))
        assert (await fit)["groups"][0]["instance_id"] == "a"
        assert not any(task.done() for task in (*many, *more, *other))
        for task in (*many, *more, *other):
            task.cancel()
        await buffer.until(lambda: buffer.service.reads.waiting == 0)


async def test_what_a_reader_leaves_goes_to_the_next(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        first, second = await waiting(buffer, 2, max_groups=1)
        await buffer.write(*group("a"))
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        lease = done.pop().result()["head"]["lease"]
        assert (await buffer.post(f"/v1/leases/{lease}/nack"))[0] == 200
        answers = await asyncio.gather(first, second)
        assert [one["groups"][0]["instance_id"] for one in answers] == ["a", "a"]


async def test_a_waiting_reader_that_goes_away_takes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        (gone,) = await waiting(buffer, 1)
        gone.cancel()
        await buffer.until(lambda: buffer.service.reads.waiting == 0)
        await buffer.write(*group("a"))
        assert await buffer.counted(ready=1, leased=0)


async def test_readers_are_answered_when_the_server_stops(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        readers = await waiting(buffer, 3)
        buffer.service.end_waits()
        assert [one["groups"] for one in await asyncio.gather(*readers)] == [[]] * 3
        assert (await buffer.get("/ready"))[0] == 503


async def test_readers_of_several_servers_are_woken_and_told_of_a_lost_database(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    postgres: PostgresServer = request.getfixturevalue("postgres")
    async with (
        served(tmp_path / "one", store=postgres.url) as one,
        served(tmp_path / "two", store=postgres.url) as two,
    ):
        readers = [*await waiting(one, 2, max_groups=1), *await waiting(two, 2, max_groups=1)]
        for n in range(4):
            await (one if n % 2 else two).write(*group(n))
        answers = await asyncio.gather(*readers)
        assert sorted(answer["groups"][0]["instance_id"] for answer in answers) == list(range(4))
        postgres.kill()
        assert (await one.post("/v1/read", {"timeout": 200}))[0] == 503  # at once, not at the end
        postgres.start()


HOOKS = """
calls = []

def is_valid_group(group, min_valid_group_size, task_type):
    instance_id, items = group
    finished = len(items) >= min_valid_group_size
    return finished and instance_id != "bad", finished

def filter_item(item, task_type):
    return item["reward"] < 5

def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
    instance_id, items = group
    return instance_id, [{**item, "reward": item["reward"] * 10, "seen": True} for item in items]

def pad_group_data(group, group_size):
    instance_id, items = group
    return instance_id, (items * group_size)[:group_size]

def get_group_data_meta_info(groups):
    return {"mine": {str(name): [item["uid"] for item in items] for name, items in groups.items()}}
"""


async def test_own_hooks_are_called_in_slimes_order(tmp_path: Path) -> None:
    async with served_job(tmp_path, HOOKS, repeats=4) as buffer:
        await buffer.write(*group("bad"), *group("good", (1, 2, 3, 9)), *group("open", (1,)))
        await buffer.until(lambda: buffer.counted(ready=1, judging=0))
        _, answer = await buffer.post("/get_rollout_data", {})
        items = answer["data"]["data"]
        assert [one["reward"] for one in items] == [10, 20, 30, 10]
        assert [one["raw_reward"] for one in items] == [1, 2, 3, 1]
        assert all(one["seen"] for one in items)
        meta = answer["data"]["meta_info"]
        assert meta["finished_groups"] == ["good", "bad"] and meta["dropped_groups"] == {"not_valid": 1}
        assert {name: len(uids) for name, uids in meta["mine"].items()} == {"good": 4, "bad": 4}
        stats = await buffer.stats()
        assert stats["items_delivered"] == 4 and stats["items_dropped"] == {"not_valid": 4}
        await buffer.write(*group("next"))
        await buffer.until(lambda: buffer.counted(ready=1))
        meta = (await buffer.post("/get_rollout_data", {}))[1]["data"]["meta_info"]
        assert list(meta["mine"]) == ["next"], "each group once"


async def test_a_read_that_gets_nothing_says_where_the_groups_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as buffer:

        async def notices(**asked: Any) -> list[str]:
            return list((await buffer.read(**asked))["head"]["notices"])

        assert await notices() == []
        await buffer.write(*group("short")[:3], *group("other", task_type="other")[:2])
        (notice,) = await notices(task_type="other")
        assert notice.startswith("2 groups are open") and "--group-size" in notice
        assert notice in (await buffer.post("/get_rollout_data", {}))[1]["message"]
        await buffer.write(group("short")[3])
        notice, *_ = await notices(batch_size=8)
        assert notice == "1 groups are ready, 1 of them fit this read"
        with caplog.at_level("INFO", "rollstream"):
            assert (await buffer.read())["head"]["lease"]
            await buffer.read(consumer="me")
        assert "read: 1 groups" in caplog.text and "None" not in caplog.text
        assert any("1 groups are leased: " in one for one in await notices())


async def test_a_read_that_gets_nothing_says_how_far_the_job_is(tmp_path: Path) -> None:
    async with served_job(tmp_path) as buffer:
        job = (await buffer.get("/v1/stats"))[1]["job"]["id"]
        message = (await buffer.post("/get_rollout_data", {}))[1]["message"]
        assert f"job {job} of task 'math' has run for" in message and "written 0 items; log: " in message
        await buffer.write(*group("a", (0, 1)))
        assert (await buffer.post(f"/v1/jobs/{job}/stop"))[0] == 200
        *_, said = (await buffer.read(batch_size=8))["head"]["notices"]
        assert "is stopped" in said and "max_groups" in said
        assert await buffer.read_ids(max_groups=8) == ["a"]


async def test_groups_that_a_hook_fails_on_do_not_stop_those_behind_them(tmp_path: Path) -> None:
    """slime's stock generator writes `content: null` while its engine stumbles, and its hook fails on that."""
    hooks = """
def is_valid_group(group, min_valid_group_size, task_type="math"):
    return all(item["messages"][-1]["content"].strip() for item in group[1])
"""
    async with served_job(tmp_path, hooks) as buffer:
        buffer.service.reads.pause_s = 0.1
        null = [{"role": "assistant", "content": None}]
        await buffer.write(*[one for n in range(20) for one in group(n, (0, 1), messages=null)])
        await buffer.write(*[one for n in range(20, 25) for one in group(n, (0, 1))])
        await buffer.until(lambda: buffer.counted(quarantined=20, ready=5))
        assert await buffer.read_ids() == list(range(20, 25))


async def test_a_group_that_a_hook_fails_on_stays_together_while_it_grows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = """
def is_valid_group(group, min_valid_group_size, task_type="math"):
    return all(item["messages"][-1]["content"].strip() for item in group[1])
"""
    async with served_job(tmp_path, hooks, repeats=4) as buffer:
        null = [{"role": "assistant", "content": None}]
        for n in range(4):
            await buffer.write(item("a", 1, f"a{n}", messages=null))

            async def judged(times: int = n + 1) -> bool:
                whole = int(times == 4)
                told = caplog.text.count("is_valid_group raised") == times
                return told and await buffer.counted(open=1 - whole, quarantined=whole, judging=0)

            await buffer.until(judged)
        (aside,) = (await buffer.get("/v1/groups?state=quarantined"))[1]["groups"]
        assert (len(aside["rewards"]), aside["reason"]) == (4, "is_valid_group")


async def test_a_hook_that_judges_well_does_not_hide_one_that_always_fails(tmp_path: Path) -> None:
    hooks = "\ndef is_valid_group(group):\n    return True\n\n\ndef filter_item(item):\n    return 1 / 0\n"
    async with served_job(tmp_path, hooks) as buffer:
        buffer.service.reads.pause_s = 600
        for n in range(12):
            await buffer.write(*group(n, (0, 1)))
            if not buffer.service.reads.paused:
                await buffer.until(lambda: buffer.counted(judging=0))
            await buffer.post("/v1/read", {})
        assert await buffer.counted(quarantined=8, ready=0, judging=4)
        assert "pause" in (await buffer.read())["head"]["failures"][0]["message"]


@pytest.mark.parametrize("path", ["/v1/read", "/get_rollout_data"])
async def test_what_is_left_when_hooks_pause_goes_back_to_its_place(tmp_path: Path, path: str) -> None:
    hooks = "\ndef filter_item(item, task_type):\n    return 1 / (item['instance_id'] < 300)\n"
    async with served_job(tmp_path, hooks) as buffer:
        buffer.service.reads.pause_s = 600
        await buffer.write(*[one for n in range(400) for one in group(n, (0, 1))])
        status, answer = await buffer.post(path, {})
        assert status == 200
        if path == "/v1/read":
            assert [one["instance_id"] for one in answer["groups"]] == [*range(300)]
            lease = answer["head"]["lease"]
            assert (await buffer.post(f"/v1/leases/{lease}/ack"))[1]["groups"] == 300
        else:
            assert len(answer["data"]["data"]) == 600
        assert await buffer.counted(ready=92, quarantined=8, leased=0)
        answer = await buffer.read(timeout=30)  # does not wait for what cannot come
        assert "pause" in answer["head"]["failures"][0]["message"]
        await buffer.write(*group("free", task_type="other"))
        assert await buffer.read_ids() == ["free"]


async def test_a_group_that_its_hook_took_too_small_is_dropped_for_its_size(tmp_path: Path) -> None:
    hooks = "\ndef is_valid_group(group, min_valid_group_size, task_type):\n    return True, False\n"
    async with served_job(tmp_path, hooks, repeats=4) as buffer:
        await buffer.write(*group("half", (0, 1)))
        await buffer.until(lambda: buffer.counted(ready=1))
        assert await buffer.read_ids() == []
        assert (await buffer.stats())["items_dropped"] == {"too_few_items": 2}


@pytest.mark.parametrize("where", ["server", "job"])
async def test_raw_groups_are_handed_out_as_they_are(tmp_path: Path, where: str) -> None:
    files = generator(tmp_path / "files", hooks=HOOKS)
    options: dict[str, Any] = {"raw": True} if where == "server" else {}
    async with served(tmp_path / "buffer", generators=(files,), **options) as buffer:
        await buffer.start(num_repeat_per_sample=2, **({"raw": True} if where == "job" else {}))
        items = group("bad", (-3, None))
        await buffer.write(*items)
        await buffer.until(lambda: buffer.counted(ready=1))
        assert (await buffer.read())["groups"][0]["items"] == items


async def test_each_job_has_its_own_settings(tmp_path: Path) -> None:
    async with served(tmp_path / "buffer", generators=(generator(tmp_path / "files"),)) as buffer:
        first = await buffer.start(num_repeat_per_sample=2)
        await buffer.write(*group("two", (0, 1)))
        second = await buffer.start(group_size=3, min_valid_item_size_ratio=0.3)
        await buffer.write(
            *group("three", (0, 1, 7)), *[item("late", n, f"l{n}", job=first["id"]) for n in (0, 1)]
        )
        by_job = {
            job: [(one["instance_id"], len(one["items"])) for one in (await buffer.read(job=job))["groups"]]
            for job in (first["id"], second["id"])
        }
        assert by_job == {first["id"]: [("two", 2), ("late", 2)], second["id"]: [("three", 3)]}


async def test_a_lost_body_is_told_and_only_that_group(tmp_path: Path) -> None:
    async with served(tmp_path / "buffer") as buffer:
        await buffer.write(*group("a"), *group("b"))
    with sqlite3.connect(tmp_path / "buffer" / "buffer.sqlite") as database:
        database.execute("UPDATE bodies SET body = CAST(replace(body, '2+2', '2+3') AS BLOB) WHERE seq = 2")
    async with served(tmp_path / "buffer") as buffer:
        assert await buffer.read_ids() == ["b"]
        (aside,) = (await buffer.get("/v1/groups?state=quarantined"))[1]["groups"]
        assert aside["reason"] == "damaged" and "its checksum is wrong" in aside["traceback"]
        assert "checksum" in (await buffer.get("/v1/groups/1"))[1]["problem"]
