"""The buffer's own API: batches, leases, staleness, forms, quarantine, tokens; and its document."""

import asyncio
import re
from array import array
from pathlib import Path

import aiohttp
import msgspec
import pytest

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.ledger import LedgerSettings
from rollstream.buffer.openapi import document, page

from .served import item, served

HOOKS = """
TASK_TYPE = "hooked"

def run_rollout(data):
    pass

def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
    if group[0] == "bad":
        raise ZeroDivisionError("on purpose")
    return group

def pad_group_data(group, group_size):
    return (group[0], group[1] * 3) if group[0] == "long" else group
"""


async def test_a_batch_is_stored_as_a_whole_or_not(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        items = [item("a", 1, f"a{n}") for n in range(3)]
        status, answer = await buffer.post("/v1/items", {"items": [*items, items[0]]})
        assert status == 200
        assert answer == {"stored": 3, "known": 1, "results": ["stored"] * 3 + ["known"]}
        status, answer = await buffer.post("/v1/items", {"items": [item("b", 1, "b"), item("b", "x", "c")]})
        assert status == 400 and answer["error"]["where"] == "items[1].reward"
        assert (await buffer.post("/v1/uids/known", {"uids": ["a0", "b", "zz"]}))[1] == {
            "known": [True, False, False]
        }
        status, _ = await buffer.post("/v1/items", data=b"x", headers={"content-type": "text/csv"})
        assert status == 415


async def test_exact_tokens_as_binary(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        tokens = {
            "prompt_ids": array("i", [1, 2, 3]).tobytes(),
            "response_ids": array("i", [4, 5]).tobytes(),
            "response_mask": bytes([1, 0]),
            "response_logprobs": array("f", [-0.5, 0.0]).tobytes(),
        }
        body = msgspec.msgpack.encode(
            {"items": [item("a", n % 2, f"a{n}", policy_version=n, **tokens) for n in range(4)]}
        )
        headers = {"content-type": "application/msgpack"}
        assert (await buffer.post("/v1/items", data=body, headers=headers))[1]["stored"] == 4
        _, answer = await buffer.post("/v1/read", {"max_groups": 1})
        (group,) = answer["groups"]
        assert group["policy_version"] == 0 and group["items"][0]["prompt_ids"] == [1, 2, 3]
        await buffer.post(f"/v1/leases/{answer['head']['lease']}/nack")
        async with buffer.session.post(
            buffer.url + "/v1/read", json={}, headers={"accept": "application/msgpack"}
        ) as response:
            raw = await response.read()
            assert response.headers["rollstream-lease"]
        records = []
        while raw:
            assert raw[0] == 0xC6
            end = 5 + int.from_bytes(raw[1:5], "big")
            records.append(msgspec.msgpack.decode(raw[5:end]))
            raw = raw[end:]
        assert [next(iter(record)) for record in records] == ["head", "group", "end"]
        assert all(records[1]["items"][0][name] == value for name, value in tokens.items())


async def test_leases(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for name in "abc":
            await buffer.write_group(name)
        _, first = await buffer.post("/v1/read", {"max_groups": 2, "consumer": "t"})
        lease = first["head"]["lease"]
        assert [group["instance_id"] for group in first["groups"]] == ["a", "b"]
        assert first["end"]["items"] == 8 and first["end"]["meta_info"]["finished_groups"] == ["a", "b"]
        _, listed = await buffer.get("/v1/leases", params={"consumer": "t"})
        assert [one["lease_id"] for one in listed["leases"]] == [lease]
        assert (await buffer.get("/v1/leases", params={"consumer": "other"}))[1] == {"leases": []}
        assert (await buffer.post(f"/v1/leases/{lease}/extend", {"seconds": 5}))[0] == 200
        assert (await buffer.post("/v1/consumers/t/release"))[1]["groups"] == 2
        status, answer = await buffer.post(f"/v1/leases/{lease}/ack")
        assert (status, answer["error"]["code"]) == (409, "conflict")
        _, again = await buffer.post("/v1/read", {"max_groups": 2})
        assert [group["instance_id"] for group in again["groups"]] == ["a", "b"]
        for repeated in (False, True):
            status, answer = await buffer.post(f"/v1/leases/{again['head']['lease']}/ack")
            assert (status, answer["repeated"]) == (200, repeated)
        assert (await buffer.post("/v1/leases/none/ack"))[0] == 404
        assert buffer.service.ledger.stats().groups_delivered == 2


async def test_a_read_sent_again_gives_back_what_its_lost_answer_took(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for name in "abc":
            await buffer.write_group(name)
        _, other = await buffer.post("/v1/read", {"max_groups": 1, "read_id": "another-read"})
        asked = {"max_groups": 1, "read_id": "one-read"}
        _, lost = await buffer.post("/v1/read", asked)
        _, again = await buffer.post("/v1/read", asked)
        assert [group["instance_id"] for group in lost["groups"] + again["groups"]] == ["b", "b"]
        _, listed = await buffer.get("/v1/leases")
        leases = [answer["head"]["lease"] for answer in (other, again)]
        assert [one["lease"] for one in listed["leases"]] == leases
        assert (await buffer.post(f"/v1/leases/{lost['head']['lease']}/ack"))[0] == 409
        for lease in leases:
            assert (await buffer.post(f"/v1/leases/{lease}/ack"))[1]["groups"] == 1
        # Of what was acked before it was sent again nothing comes back.
        _, third = await buffer.post("/v1/read", asked)
        assert [group["instance_id"] for group in third["groups"]] == ["c"]
        for name in ("", "short", "dots.are.not", "x" * 65, "white space", "a-new-line\n"):
            assert (await buffer.post("/v1/read", {"read_id": name}))[0] == 400


async def test_a_read_sent_again_ends_the_attempt_before_it(tmp_path: Path) -> None:
    """Whose connection looks open still: a proxy holds it."""
    async with served(tmp_path) as buffer:
        asked = {"timeout": 60, "read_id": "one-read"}
        attempts = []
        for number in range(3):
            attempts.append(asyncio.create_task(buffer.post("/v1/read", asked)))
            if number:
                with pytest.raises(aiohttp.ClientError):
                    await attempts[number - 1]
            while (await buffer.get("/v1/stats"))[1]["waiting_reads"] != 1:
                await asyncio.sleep(0.01)
        await buffer.write_group("a")
        _, answer = await attempts[2]
        assert [group["instance_id"] for group in answer["groups"]] == ["a"]
        _, listed = await buffer.get("/v1/leases")
        assert [one["lease"] for one in listed["leases"]] == [answer["head"]["lease"]]


async def test_an_expired_lease_goes_back_and_cannot_be_acked_once_it_is_read_anew(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group("a")
        _, first = await buffer.post("/v1/read", {"lease_seconds": 0.1})
        _, second = await buffer.post("/v1/read", {"timeout": 20})
        assert [group["instance_id"] for group in second["groups"]] == ["a"]
        assert (await buffer.post(f"/v1/leases/{first['head']['lease']}/ack"))[0] == 409
        assert (await buffer.post(f"/v1/leases/{second['head']['lease']}/ack"))[0] == 200


async def test_stale_groups_are_dropped_and_listed(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for name, version in (("old", 3), ("new", 9)):
            items = [item(name, n % 2, f"{name}{n}", policy_version=version) for n in range(4)]
            await buffer.post("/v1/items", {"items": items})
        _, answer = await buffer.post("/v1/read", {"policy_version": 10, "max_staleness": 2})
        assert [group["instance_id"] for group in answer["groups"]] == ["new"]
        _, dropped = await buffer.get("/v1/dropped")
        assert [(one["instance_id"], one["reason"]) for one in dropped["dropped"]] == [("old", "stale")]
        assert (await buffer.get("/v1/dropped", params={"after": dropped["dropped"][0]["ticket"]}))[1] == {
            "dropped": []
        }
        assert (await buffer.post("/v1/read", {"max_staleness": 2}))[0] == 400


async def test_a_batch_size_is_exact(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group("a")
        assert (await buffer.post("/v1/read", {"batch_size": 8}))[1]["groups"] == []
        read = asyncio.create_task(buffer.post("/v1/read", {"batch_size": 8, "timeout": 20}))
        while not buffer.service.metrics.waiting_reads:
            await asyncio.sleep(0.01)
        await buffer.write_group("b")
        assert len((await read)[1]["groups"]) == 2


async def test_a_hook_that_raises_costs_its_group_only(tmp_path: Path) -> None:
    folder = tmp_path / "generators"
    folder.mkdir()
    (folder / "hooked_generator.py").write_text(HOOKS)
    async with served(tmp_path / "buffer", generators=str(folder)) as buffer:
        for name in ("first", "bad", "long", "last"):
            items = [item(name, n % 2, f"{name}{n}", task_type="hooked") for n in range(4)]
            await buffer.post("/v1/items", {"items": items})
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is True and answer["message"] == "Successfully read 8 items"
        assert {one["instance_id"] for one in answer["data"]["data"]} == {"first", "last"}
        _, aside = await buffer.get("/v1/quarantine")
        causes = {one["group"]["instance_id"]: one["traceback"] for one in aside["quarantined"]}
        assert "ZeroDivisionError: on purpose" in causes["bad"] and "12" in causes["long"]
        (folder / "hooked_generator.py").write_text(HOOKS.replace('"bad"', "None").replace('"long"', "None"))
        numbers = [one["group"]["group"] for one in aside["quarantined"]]
        answer = (await buffer.post("/v1/quarantine/retry", {"groups": [*numbers, 99]}))[1]
        assert answer == {"groups": 2, "unknown": [99]}  # by the file as it is now
        _, answer = await buffer.post("/get_rollout_data", {})
        assert {one["instance_id"] for one in answer["data"]["data"]} == {"bad", "long"}


ODD = """
import numpy

TASK_TYPE = "hooked"

def run_rollout(data):
    pass

class Odd:
    @property
    def __class__(self):
        raise RuntimeError("odd")
"""

ODD_HOOKS = {
    "filter_item": """
def filter_item(item):
    return numpy.zeros(2) if item["instance_id"] == "bad" else True
""",
    "popped": """
def filter_item(item):
    if item["instance_id"] == "bad":
        del item["reward"]
    return True
""",
    "compared": """
def normalize_group_data(group):
    if group[0] == "bad":
        for item in group[1]:
            item["raw_reward"] = numpy.zeros(2)
    return group
""",
    "is_valid_group": """
def is_valid_group(group):
    return Odd() if group[0] == "bad" else len(group[1]) == 4
""",
}


@pytest.mark.parametrize("name", ODD_HOOKS)
async def test_whatever_a_hook_gives_back_costs_its_group_only(tmp_path: Path, name: str) -> None:
    """Not the read, and every read after it: the group would be first in line each time."""
    folder = tmp_path / "generators"
    folder.mkdir()
    (folder / "hooked_generator.py").write_text(ODD + ODD_HOOKS[name])
    async with served(tmp_path / "buffer", generators=str(folder)) as buffer:
        for instance in ("bad", "good", "fine"):
            items = [item(instance, n % 2, f"{instance}{n}", task_type="hooked") for n in range(4)]
            await buffer.post("/v1/items", {"items": items})
        status, answer = await buffer.post("/v1/read", {})
        assert status == 200, answer
        assert [group["instance_id"] for group in answer["groups"]] == ["good", "fine"]
        (aside,) = (await buffer.get("/v1/quarantine"))[1]["quarantined"]
        assert aside["group"]["instance_id"] == "bad" and "Error" in aside["traceback"]


async def test_a_meta_info_that_cannot_be_said_is_the_default(tmp_path: Path) -> None:
    folder = tmp_path / "generators"
    folder.mkdir()
    hook = "def get_group_data_meta_info(groups):\n    return Odd()\n"
    (folder / "hooked_generator.py").write_text(ODD + hook)
    async with served(tmp_path / "buffer", generators=str(folder)) as buffer:
        items = [item("a", n % 2, f"{n}", task_type="hooked") for n in range(4)]
        await buffer.post("/v1/items", {"items": items})
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is True and answer["data"]["meta_info"]["total_samples"] == 4


async def test_a_read_of_which_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "generators"
    folder.mkdir()
    (folder / "hooked_generator.py").write_text(HOOKS)
    async with served(tmp_path / "buffer", generators=str(folder)) as buffer:
        for path in ("/get_rollout_data", "/v1/read"):
            items = [item("bad", n % 2, f"{path}{n}", task_type="hooked") for n in range(4)]
            await buffer.post("/v1/items", {"items": items})
            status, answer = await buffer.post(path, {})
            assert status == 200
            if path == "/v1/read":
                assert answer["groups"] == [] and answer["end"]["items"] == 0
                assert (await buffer.post(f"/v1/leases/{answer['head']['lease']}/ack"))[0] in (200, 404)
            else:
                assert answer["success"] is False and answer["data"]["data"] == []
        assert buffer.service.ledger.stats().groups["quarantined"] == 2
        assert (await buffer.post("/v1/read", {}))[1]["groups"] == []


async def test_groups_that_time_out_are_dropped_without_a_read(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=4, group_timeout_seconds=0.2))
    async with served(tmp_path, settings) as buffer:
        await buffer.write_group("few", (1,))
        async with asyncio.timeout(20):
            while not buffer.service.ledger.stats().dropped:
                await asyncio.sleep(0.02)
        assert buffer.service.ledger.stats().dropped == {"timed_out": 1}


async def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group("a")
        await buffer.write_group("b", (1, 0))
        _, read = await buffer.post("/v1/read", {"consumer": "t"})
    async with served(tmp_path) as buffer:
        assert (await buffer.post("/v1/read", {}))[1]["groups"] == []
        assert (await buffer.post(f"/v1/leases/{read['head']['lease']}/ack"))[0] == 200
        for number in (2, 3):
            await buffer.post("/buffer/write", item("b", number % 2, f"'b'-{number}"))
        _, read = await buffer.post("/v1/read", {})
        assert [group["instance_id"] for group in read["groups"]] == ["b"]


async def test_the_token(tmp_path: Path) -> None:
    async with served(tmp_path, token="s3cret") as buffer:
        for path in ("/buffer/write", "/v1/items", "/get_rollout_data"):
            assert (await buffer.post(path, item("a", 1, "a")))[0] == 401
        assert (await buffer.get("/metrics"))[0] == 401
        for path in ("/health", "/ready"):
            assert (await buffer.get(path))[0] == 200
        for shown in ("Bearer wrong", "Basic !!", "s3cret", "Basic c2VjcmV0"):
            headers = {"authorization": shown}
            assert (await buffer.post("/buffer/write", item("a", 1, "a"), headers=headers))[0] == 401
        headers = {"authorization": "Bearer s3cret"}
        assert (await buffer.post("/buffer/write", item("a", 1, "a"), headers=headers))[0] == 200
        with_user = buffer.url.replace("://", "://anybody:s3cret@") + "/buffer/write"
        async with buffer.session.post(with_user, json=item("a", 1, "b")) as response:
            assert response.status == 200


async def test_metrics(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group('quo"te')
        await buffer.write_group("same", (1, 1, 1, 1))
        await buffer.post("/get_rollout_data", {})
        async with buffer.session.get(buffer.url + "/metrics") as response:
            text = await response.text()
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        "rollstream_buffer_items_written_total 8",
        'rollstream_buffer_items_dropped_total{reason="not_valid"} 4',
        'rollstream_buffer_http_requests_total{route="/buffer/write",status="200"} 8',
        "rollstream_buffer_write_seconds_count 8",
        'rollstream_buffer_write_seconds_bucket{le="+Inf"} 8',
    ):
        assert line in text.splitlines(), text
    for line in text.splitlines():
        assert line.startswith("# ") or re.fullmatch(r'[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [-+.e0-9]+', line), (
            line
        )


async def test_the_document_has_every_route_and_no_other(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        status, described = await buffer.get("/openapi.json")
        routes = set(buffer.service.router.routes())
    assert status == 200 and described == document()
    paths = described["paths"].items()
    assert {(method.upper(), path) for path, methods in paths for method in methods} == routes
    assert b"http" not in page()


async def test_a_body_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.buffer.exchange.BODY_S", 0.2)
    async with served(tmp_path) as buffer:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(buffer.url.rpartition(":")[2]))
        writer.write(b"POST /v1/items HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
