"""The native routes: writes, reads on leases in both forms, lists, quarantine, tokens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollstream.buffer.store.base import Limits
from tests.support.buffer import SPOILS_2, generator, group, item, served, served_job

MSGPACK = "application/msgpack"
TOKENS: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "response_ids": [3],
    "response_mask": [1],
    "response_logprobs": [-0.5],
}


def frames(body: bytes) -> list[dict[str, Any]]:
    found = []
    while body:
        size = int.from_bytes(body[:4])
        found.append(msgspec.msgpack.decode(body[4 : 4 + size]))
        body = body[4 + size :]
    return found


async def test_a_batch_in_json_and_in_msgpack(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        items = group("a")
        answer = await buffer.post("/v1/items", {"items": items[:3]})
        assert answer == (200, {"stored": 3, "known": 0, "results": ["stored"] * 3})
        packed = msgspec.msgpack.encode({"items": items[2:]})
        _, answer = await buffer.post("/v1/items", data=packed, headers={"content-type": MSGPACK})
        assert (answer["stored"], answer["known"], len(answer["results"])) == (1, 1, 2)
        known = await buffer.post("/v1/uids/known", {"uids": [*(one["uid"] for one in items), "?"]})
        assert known == (200, {"known": [True] * 4 + [False]})
        (given,) = (await buffer.read())["groups"]
        assert [one["raw_reward"] for one in given["items"]] == [0, 1, 0, 1], "of both encodings"


async def test_bad_items_are_named_and_nothing_of_the_batch_is_stored(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        status, answer = await buffer.post("/v1/items", {"items": [*group("a"), item(reward="high")]})
        assert (status, answer["error"]["code"]) == (400, "bad_item")
        assert answer["error"]["where"] == "items[4].reward"
        assert (await buffer.stats())["items_written"] == 0
        many = {"items": [item()] * 10_001}
        assert (await buffer.post("/v1/items", many))[1]["error"]["where"] == "items"


@pytest.mark.parametrize("stored", ["json", "msgpack"])
async def test_a_read_in_both_forms(tmp_path: Path, stored: str) -> None:
    async with served(tmp_path, raw=True) as buffer:
        items = group(7, (0, 1, 0, 1), policy_version=3, **TOKENS)
        if stored == "json":
            await buffer.write(*items)
        else:
            packed = msgspec.msgpack.encode({"items": items})
            await buffer.post("/v1/items", data=packed, headers={"content-type": MSGPACK})
        answer = await buffer.read(consumer="me")
        (given,) = answer["groups"]
        assert given.pop("items") == items
        facts = {"task_type": "", "job": None, "instance_id": 7, "timed_out": False, "policy_version": 3}
        assert given == {"id": 1, **facts}
        assert (answer["end"]["groups"], answer["end"]["items"]) == (1, 4)
        (lease,) = (await buffer.get("/v1/leases"))[1]["leases"]
        assert (lease["id"], lease["consumer"]) == (answer["head"]["lease"], "me")
        assert lease["lease_seconds"] == answer["head"]["lease_seconds"] == 600
        assert await buffer.post("/v1/consumers/me/release") == (200, {"consumer": "me", "groups": 1})
        async with buffer.session.post(
            buffer.url + "/v1/read", json={}, headers={"accept": MSGPACK}
        ) as response:
            _, one, end = frames(await response.read())
        assert one["group"]["encoding"] == stored
        assert stored == "msgpack" or msgspec.json.decode(one["group"]["items"]) == items
        assert end["end"]["items"] == 4
        whole = (await buffer.get("/v1/groups/1"))[1]
        assert whole["items"] == items and whole["group"]["state"] == "leased"


async def test_the_life_of_a_lease(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write(*group("a"), *group("b"))

        async def lease(verb: str, id: str, body: Any = None) -> tuple[int, Any]:
            return await buffer.post(f"/v1/leases/{id}/{verb}", body if body is not None else {})

        async def taken(**asked: Any) -> str:
            return str((await buffer.read(max_groups=1, **asked))["head"]["lease"])

        first = await taken()
        assert (await lease("extend", first, {"seconds": 5}))[1] == {"lease": first, "lease_seconds": 5}
        assert (await lease("nack", first))[0] == 200
        assert (await lease("extend", first, {"seconds": 5}))[0] == 409
        second = await taken()
        assert (await lease("ack", first))[0] == 409  # its group is another lease's now
        acked = {"lease": second, "groups": 1, "items": 4, "repeated": False}
        assert (await lease("ack", second))[1] == acked
        assert (await lease("ack", second))[1] == {**acked, "repeated": True}
        assert (await lease("nack", second))[0] == 409
        for verb in ("ack", "nack"):
            assert (await lease(verb, "nobody"))[0] == 404
        for bad in ({"seconds": 0}, {"seconds": "x"}, {"second": 1}, {}):
            assert (await lease("extend", second, bad))[0] == 400
        await taken(lease_seconds=0.2)
        await buffer.until(lambda: buffer.counted(ready=1))  # it has expired


async def test_a_read_that_is_sent_again_takes_the_same_groups(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write(*group("a"), *group("b"))
        first = await buffer.read(max_groups=1, read_id="once-and-again")
        second = await buffer.read(max_groups=1, read_id="once-and-again")
        assert first["groups"] == second["groups"] and first["head"]["lease"] != second["head"]["lease"]
        assert (await buffer.stats())["leases"] == 1


async def test_staleness(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write(*group("old", policy_version=1), *group("new", policy_version=5), *group("any"))
        stale: dict[str, Any] = {"policy_version": 6, "max_staleness": 2}
        assert await buffer.read_ids(**stale) == ["new", "any"]
        told = (await buffer.read(**stale))["head"]["notices"]
        assert told[0] == "1 groups are ready, 0 of them fit this read"
        assert told[1] == "1 groups are older than max_staleness allows"
        told = (await buffer.read(**stale, drop_stale=True))["head"]["notices"]
        assert "1 stale" in told[0] and not any("older than max_staleness" in one for one in told[1:])
        assert (await buffer.stats())["groups_dropped"] == {"stale": 1}


BAD_READS: list[Any] = [
    *({"max_groups": 0}, {"max_groups": "3"}, {"batch_size": 3}, {"batch_size": 4, "max_groups": 1}),
    *(
        {"timeout": -1},
        {"timeout": 1e9},
        {"policy_version": 3},
        {"max_staleness": 3},
        {"read_id": "short"},
        {"read_id": "long-enough\n"},
    ),
    *({"policy_version": 2**63, "max_staleness": 0}, {"policy_version": 0, "max_staleness": 2**63}),
    *({"lease_seconds": 0}, {"group": 1}, {"consumer": "x" * 2000}, [], None),
]


async def test_bad_reads(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write(*group("a"))
        for asked in BAD_READS:
            status, answer = await buffer.post("/v1/read", data=json.dumps(asked))
            assert status == 400 and answer["error"]["message"], (asked, answer)
        largest = 2**63 - 1
        for version, staleness in ((0, largest), (largest, 0)):
            await buffer.read(policy_version=version, max_staleness=staleness, job="none")
        assert await buffer.counted(ready=1)


async def test_lists_go_on_behind_a_number(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for n in range(3):
            await buffer.write(*group(f"good{n}"), *group(f"bad{n}", (1, 1, 1, 1)))

        async def ids(path: str, name: str) -> list[Any]:
            status, answer = await buffer.get(path)
            assert status == 200, answer
            return [one["instance_id"] for one in answer[name]]

        assert await ids("/v1/groups?limit=2", "groups") == ["good0", "bad0"]
        assert await ids("/v1/groups?limit=2&after=2", "groups") == ["good1", "bad1"]
        assert await ids("/v1/groups?state=ready", "groups") == ["good0", "good1", "good2"]
        assert await ids("/v1/groups?task_type=x", "groups") == await ids("/v1/groups?job=x", "groups") == []
        _, answer = await buffer.get("/v1/groups?state=dropped&limit=2")
        assert [one["reason"] for one in answer["groups"]] == ["equal_rewards"] * 2
        after = answer["groups"][-1]["id"]
        assert await ids(f"/v1/groups?state=dropped&after={after}", "groups") == ["bad2"]
        for bad in ("limit=0", "limit=x", "after=-1", "limit=99999999", "nothing=1", f"after={2**70}"):
            assert (await buffer.get(f"/v1/groups?{bad}"))[0] == 400, bad
        assert (await buffer.get("/v1/groups?state=redy"))[0] == 400
        for number in ("0", "99", "x", "-1", "1" * 30, "%00"):
            assert (await buffer.get(f"/v1/groups/{number}"))[0] == 404


async def test_quarantine(tmp_path: Path) -> None:
    async with served_job(tmp_path, SPOILS_2) as buffer:
        await buffer.write(*group(1, (0, 1)), *group(2, (0, 1)), *group(3, (0, 1)))
        answer = await buffer.read()
        assert [one["instance_id"] for one in answer["groups"]] == [1, 3]
        assert answer["end"]["groups"] == 2
        answer = await buffer.read()
        (failure,) = answer["head"]["failures"]
        assert "1 groups are quarantined, the last one by filter_item: ValueError: no 2" in failure["message"]
        (aside,) = (await buffer.get("/v1/groups?state=quarantined"))[1]["groups"]
        assert aside["instance_id"] == 2 and "ValueError: no 2" in aside["traceback"]
        generator(tmp_path / "files", hooks=SPOILS_2.replace("== 2", "== 9"))
        assert (await buffer.post("/v1/quarantine/retry", {}))[1] == {"groups": 1}
        assert await buffer.read_ids() == [2]


async def test_jobs_over_http(tmp_path: Path) -> None:
    async with served(tmp_path / "buffer", generators=(generator(tmp_path / "files"),)) as buffer:
        status, answer = await buffer.post("/v1/jobs", {"task_type": "chess"})
        assert (status, answer["error"]["where"]) == (400, "task_type")
        assert "Known: math" in answer["error"]["message"]
        for key, wrong in (("min_valid_item_size_ratio", 1.4), ("group_size", 0), ("raw", "yes")):
            _, answer = await buffer.post("/v1/jobs", {"task_type": "math", key: wrong})
            assert answer["error"]["where"] == key
        job = await buffer.start(num_repeat_per_sample=2)
        assert job["state"] == "running" and job["warnings"] == []
        path = f"/v1/jobs/{job['id']}"
        await buffer.write(*group("a", (0, 1)), item("open"))
        assert (await buffer.post(f"{path}/drop"))[0] == 409
        assert (await buffer.post(f"{path}/expected", {"items": 50}))[0] == 200
        assert (await buffer.get("/v1/stats"))[1]["job"]["expected"] == 50
        assert (await buffer.post(f"{path}/stop"))[1]["state"] == "stopped"
        assert (await buffer.get(path))[1]["state"] == "stopped"
        assert (await buffer.post(f"{path}/drop"))[1] == {"job": job["id"], "groups": 2}
        assert (await buffer.stats())["groups_dropped"] == {"replaced": 2}
        for verb, body in (("stop", {}), ("drop", {}), ("expected", {"items": 1})):
            assert (await buffer.post(f"/v1/jobs/nobody/{verb}", body))[0] == 404


async def test_a_full_buffer_says_so_until_something_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, limits=Limits(items=4)) as buffer:
        await buffer.write(*group("a"))
        async with buffer.session.post(buffer.url + "/v1/items", json=item()) as response:
            assert response.status == 429 and response.headers["retry-after"] == "1"
            assert (await response.json())["error"]["code"] == "full"
        (failure,) = (await buffer.read(batch_size=8))["head"]["failures"]
        assert "of at most 4" in failure["message"] and "of at most 4" in caplog.text
        held = asyncio.create_task(buffer.post("/buffer/write", item("b", 1, "b0")))
        await buffer.until(lambda: buffer.service.held_writes)
        answer = await buffer.read()
        await buffer.post(f"/v1/leases/{answer['head']['lease']}/ack")
        assert (await held)[0] == 200
        assert (await buffer.read())["head"]["failures"] == []


async def test_the_token(tmp_path: Path) -> None:
    async with served(tmp_path, token="secret") as buffer:
        await buffer.write(*group("a"))
        for path in ("/v1/stats", "/metrics", "/openapi.json", "/", "/nowhere"):
            none = {"authorization": ""}
            assert (await buffer.get(path, headers=none))[0] == 401
            assert (await buffer.get(path, headers={"authorization": "Bearer secre"}))[0] == 401
        for path in ("/health", "/ready"):
            assert (await buffer.get(path, headers={"authorization": ""}))[0] == 200


async def test_metrics_and_openapi(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write(*group("a"), *group("b", (1, 1, 1, 1)))
        async with buffer.session.get(buffer.url + "/metrics") as response:
            text = await response.text()
        for line in (
            "rollstream_buffer_items_written_total 8.0",
            'rollstream_buffer_groups{state="ready"} 1.0',
            'rollstream_buffer_items_dropped_total{reason="equal_rewards"} 4.0',
            'rollstream_buffer_http_requests_total{route="/v1/items",status="200"} 1.0',
            'rollstream_buffer_reward_count{items="written"} 8.0',
            'rollstream_buffer_reward_sum{items="written"} 6.0',
            'rollstream_buffer_reward_sum{items="delivered"} 0.0',
        ):
            assert line in text.splitlines(), text
        await buffer.write(*group("c", (1e308, 1e308, 1e308, None)))
        assert (await buffer.stats())["reward_written"] > 1e308, "of numbers that JSON has"
        await buffer.write(item("d"))
        paths = (await buffer.get("/openapi.json"))[1]["paths"]
        assert {"/v1/items", "/v1/read", "/v1/leases/{lease}/ack", "/buffer/write", "/health"} <= paths.keys()
