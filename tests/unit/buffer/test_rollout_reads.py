"""Whose groups a read gives, what a trainer is told of those that it does not get, slow readers."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer.async_client import AsyncBufferClient
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.ledger import Lease, Ledger, LedgerSettings

from .served import Served, item, served

WAITING = """
import time

TASK_TYPE = "{task}"


def run_rollout(data):
    time.sleep(600)
"""


def generator(folder: Path, task: str = "math", hooks: str = "") -> str:
    folder.mkdir(exist_ok=True)
    (folder / f"{task}_generator.py").write_text(WAITING.format(task=task) + hooks)
    return str(folder)


async def write(buffer: Served, name: str, rewards: list[float], instance_id: int = 5, **more: Any) -> None:
    items = [item(instance_id, reward, f"{name}{n}", **more) for n, reward in enumerate(rewards)]
    status, answer = await buffer.post("/v1/items", {"items": items})
    assert (status, answer["stored"]) == (200, len(items))


async def start(buffer: Served, **payload: Any) -> str:
    status, answer = await buffer.post("/start_rollout", {"task_type": "math", **payload})
    assert status == 200, answer
    return str(answer["rollout_id"])


def uids(answer: dict[str, Any]) -> list[str]:
    return [one["uid"] for one in answer["data"]["data"]]


async def test_a_trainer_gets_nothing_of_the_rollout_before_its_own(tmp_path: Path) -> None:
    async with served(tmp_path / "buffer", generators=generator(tmp_path / "files")) as buffer:
        first = await start(buffer, input_file="old", num_repeat_per_sample=4)
        await write(buffer, "whole", [0, 1, 0, 1])
        await write(buffer, "open", [0, 1, 0])
        second = await start(buffer, input_file="new", num_repeat_per_sample="2")
        await write(buffer, "new", [0, 1])
        _, answer = await buffer.post("/get_rollout_data", {"batch_size": 2})
        assert uids(answer) == ["new0", "new1"]
        status, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is False and "of another rollout" in answer["message"]
        await write(buffer, "outside", [0, 1], rollout_id=None, task_type="other")
        assert (await buffer.post("/get_rollout_data", {}))[1]["success"] is False
        # They are there for who asks for them, with the size that they were made for.
        _, answer = await buffer.post("/v1/read", {"rollout_id": first})
        assert [len(group["items"]) for group in answer["groups"]] == [4]
        assert (await buffer.post(f"/v1/leases/{answer['head']['lease']}/nack"))[0] == 200
        assert (await buffer.post(f"/v1/rollouts/{second}/drop"))[0] == 409
        assert (await buffer.post("/v1/rollouts/nobody/drop"))[0] == 404
        status, answer = await buffer.post(f"/v1/rollouts/{first}/drop")
        assert (status, answer) == (200, {"rollout_id": first, "groups": 2})
        assert (await buffer.get("/v1/stats"))[1]["dropped"] == {"replaced": 7}


async def test_what_was_dropped_is_told_by_the_next_read_that_succeeds(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group("equal", (1, 1, 1, 1))
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is False and answer["data"]["meta_info"]["finished_groups"] == []
        assert (await buffer.get("/v1/stats"))[1]["dropped"] == {"not_valid": 4}
        await buffer.write_group("good")
        _, answer = await buffer.post("/get_rollout_data", {})
        meta = answer["data"]["meta_info"]
        assert meta["finished_groups"] == ["good", "equal"]
        assert (meta["total_samples"], meta["num_groups"], meta["avg_reward"]) == (8, 2, 0.75)
        await buffer.write_group("next")
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["data"]["meta_info"]["finished_groups"] == ["next"]


async def test_a_hook_for_meta_info_sees_what_was_dropped(tmp_path: Path) -> None:
    hooks = """
def get_group_data_meta_info(groups):
    return {"mine": {name: [item["uid"] for item in items] for name, items in groups.items()}}
"""
    async with served(tmp_path / "buffer", generators=generator(tmp_path / "files", hooks=hooks)) as buffer:
        await start(buffer, num_repeat_per_sample=2)
        await write(buffer, "equal", [1, 1], 1)
        assert (await buffer.post("/get_rollout_data", {}))[1]["success"] is False
        await write(buffer, "good", [0, 1], 2)
        await write(buffer, "bad", [0, 0], 3)
        meta = (await buffer.post("/get_rollout_data", {}))[1]["data"]["meta_info"]
        assert meta["mine"] == {"1": ["equal0", "equal1"], "2": ["good0", "good1"], "3": ["bad0", "bad1"]}
        assert meta["finished_groups"] == [2, 1, 3]


RAISING = """
def filter_item(item, task_type):
    if item["instance_id"] == 2:
        raise ValueError("no 2")
    return True
"""


async def test_a_whole_read_takes_another_group_for_one_that_a_hook_spoils(tmp_path: Path) -> None:
    files = generator(tmp_path / "files", hooks=RAISING)
    options: dict[str, Any] = {"generators": files, "max_groups_per_read": 3, "whole_reads": True}
    async with served(tmp_path / "buffer", **options) as buffer:
        await start(buffer, num_repeat_per_sample=2)
        for instance_id in (1, 2, 3):
            await write(buffer, f"{instance_id}-", [0, 1], instance_id)
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is False and "Not enough data" in answer["message"]
        await write(buffer, "4-", [0, 1], 4)
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is True
        assert {one["instance_id"] for one in answer["data"]["data"]} == {1, 3, 4}
        assert len(answer["data"]["data"]) == 6


async def test_a_whole_read_goes_on_past_a_spoiled_group(tmp_path: Path) -> None:
    files = generator(tmp_path / "files", hooks=RAISING)
    options: dict[str, Any] = {"generators": files, "max_groups_per_read": 3, "whole_reads": True}
    async with served(tmp_path / "buffer", **options) as buffer:
        await start(buffer, num_repeat_per_sample=2)
        for instance_id in (1, 2, 3, 4):
            await write(buffer, f"{instance_id}-", [0, 1], instance_id)
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is True
        assert [one["instance_id"] for one in answer["data"]["data"]] == [1, 1, 3, 3, 4, 4]


async def test_readers_are_told_that_hooks_fail(tmp_path: Path) -> None:
    files = generator(tmp_path / "files", hooks=RAISING)
    async with served(tmp_path / "buffer", generators=files) as buffer:
        await start(buffer, num_repeat_per_sample=2)
        await write(buffer, "2-", [0, 1], 2)
        _, answer = await buffer.post("/v1/read", {})
        assert answer["head"]["groups"] == 0 and answer["head"]["lease"] is None and answer["groups"] == []
        (failure,) = answer["head"]["failures"]
        assert failure["task_type"] == "math" and "filter_item" in failure["traceback"]
        assert failure["error"] == "1 groups are quarantined: ValueError: no 2 (see GET /v1/quarantine)"
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is False and "ValueError: no 2" in answer["message"]
        _, stats = await buffer.get("/v1/stats")
        assert [one["error"] for one in stats["failures"]] == [failure["error"]]
        (aside,) = (await buffer.get("/v1/quarantine"))[1]["quarantined"]
        number = aside["group"]["group"]
        _, answer = await buffer.post("/v1/quarantine/drop", {"groups": [number, 77]})
        assert answer == {"groups": 1, "unknown": [77]}
        assert (await buffer.get("/v1/stats"))[1]["dropped"] == {"quarantined": 2}


async def test_a_native_read_tells_of_groups_that_it_passed_over(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=1))
    async with served(tmp_path, settings, max_groups_per_read=4) as buffer:
        await buffer.post("/v1/items", {"items": [item(n % 3, 1, f"u{n}") for n in range(9)]})
        _, answer = await buffer.post("/v1/read", {})
        assert answer["head"]["groups"] == 3 and answer["head"]["notices"] == []
        await buffer.post(f"/v1/leases/{answer['head']['lease']}/ack")
        _, answer = await buffer.post("/v1/read", {})
        (notice,) = answer["head"]["notices"]
        assert notice.startswith("6 groups are ready, but not for") and "--groups-per-cycle" in notice
        assert answer["head"]["groups"] == 0 and answer["head"]["failures"] == []


async def test_a_batch_size_is_exact_beside_groups_of_another_size(tmp_path: Path) -> None:
    async with served(tmp_path / "buffer", generators=generator(tmp_path / "files")) as buffer:
        first = await start(buffer, num_repeat_per_sample=8)
        await write(buffer, "old", [0, 1] * 4, 1)
        await start(buffer, num_repeat_per_sample=2)
        await write(buffer, "a", [0, 1], 2)
        _, answer = await buffer.post("/v1/read", {"batch_size": 4})
        assert answer["head"]["groups"] == 0 and "of another size" in answer["head"]["notices"][0]
        await write(buffer, "b", [0, 1], 3)
        _, answer = await buffer.post("/v1/read", {"batch_size": 4})
        assert [len(group["items"]) for group in answer["groups"]] == [2, 2]
        _, answer = await buffer.post("/v1/read", {"batch_size": 8, "rollout_id": first})
        assert [len(group["items"]) for group in answer["groups"]] == [8]


ENDING = """
TASK_TYPE = "math"


def run_rollout(data):
    pass
"""


async def test_readers_are_told_that_a_rollout_has_ended(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "math_generator.py").write_text(ENDING)
    async with served(tmp_path / "buffer", generators=str(tmp_path / "files")) as buffer:
        rollout = await start(buffer, num_repeat_per_sample=2)
        async with asyncio.timeout(60):
            while (await buffer.get(f"/v1/rollouts/{rollout}"))[1]["state"] == "running":
                await asyncio.sleep(0.05)
        ended = f"rollout {rollout} of task 'math' is finished"
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is False and ended in answer["message"]
        _, answer = await buffer.post("/v1/read", {})
        assert answer["head"]["notices"][0].startswith(ended)
        assert (await buffer.post("/v1/read", {"task_type": "tool"}))[1]["head"]["notices"] == []
        # What is left over is not silently what another run gets for its own.
        await write(buffer, "left", [0, 1])
        payload = {"task_type": "math", "num_repeat_per_sample": 2}
        for path in ("/start_rollout", "/v1/rollouts"):
            _, answer = await buffer.post(path, payload)
            assert (answer["rollout_id"], answer["state"]) == (rollout, "finished")
            assert "nothing was started" in answer["warnings"][0]
        _, answer = await buffer.post("/get_rollout_data", {})
        assert uids(answer) == ["left0", "left1"]
        async with asyncio.timeout(60):
            while buffer.service.ledger.has_groups(rollout):
                await asyncio.sleep(0.01)
        _, answer = await buffer.post("/start_rollout", payload)
        assert answer["state"] == "running" and answer["rollout_id"] != rollout


FAILING = """
from rollstream.errors import ConfigError

TASK_TYPE = "math"


def run_rollout(data):
    raise ConfigError("no such model")
"""


async def test_a_rollout_that_has_failed_lets_others_wait(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "math_generator.py").write_text(FAILING)
    files = str(tmp_path / "files")
    tool = {"task_type": "tool", "timeout": 30}

    async def waits(path: str, asked: dict[str, Any]) -> asyncio.Task[tuple[int, Any]]:
        """A read that is sent and not answered at once."""
        before = buffer.service.metrics.empty_reads
        read = asyncio.create_task(buffer.post(path, asked))
        async with asyncio.timeout(20):
            while not buffer.service.metrics.waiting_reads:
                assert not read.done(), read.result()
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert buffer.service.metrics.empty_reads == before and not read.done()
        return read

    async with served(tmp_path / "buffer", generators=files) as buffer:
        waiting = [asyncio.create_task(buffer.post("/v1/read", {"timeout": 600})) for _ in range(2)]
        await start(buffer, num_repeat_per_sample=2)
        for _, answer in await asyncio.wait_for(asyncio.gather(*waiting), 60):
            assert [one["error"] for one in answer["head"]["failures"]] == ["ConfigError: no such model"]
    async with served(tmp_path / "buffer", generators=files) as buffer:  # a restart does not hide it
        for path, asked in (
            ("/v1/read", {"task_type": "math", "timeout": 600}),
            ("/buffer/read", {"batch_size": 2, "timeout": 600}),
        ):
            _, answer = await asyncio.wait_for(buffer.post(path, asked), 60)
            assert "no such model" in str(answer)
            read = await waits(path, {**asked, "timeout": 30})  # it was told
            await write(buffer, f"own{path}", [0, 1], task_type="math")
            assert "own" in str((await read)[1])
            if path == "/v1/read":
                await buffer.post(f"/v1/leases/{(await read)[1]['head']['lease']}/ack")
        read = await waits("/v1/read", tool)  # of another task: never told of it
        await write(buffer, "tool", [0, 1, 0, 1], task_type="tool")
        assert (await read)[1]["groups"]
        _, answer = await buffer.post("/v1/read", {"task_type": "tool"})
        assert answer["head"]["groups"] == 0 and answer["head"]["failures"] == []
        _, answer = await buffer.post("/v1/read", {"rollout_id": "other"})
        assert answer["head"]["failures"] == []


async def test_a_reader_that_waits_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.buffer.waiting_reads._TOLD_AGAIN_S", 0.3)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "math_generator.py").write_text(FAILING)
    async with served(tmp_path / "buffer", generators=str(tmp_path / "files")) as buffer:
        await start(buffer)
        for _ in range(3):
            _, answer = await asyncio.wait_for(buffer.post("/v1/read", {"timeout": 600}), 60)
            assert answer["head"]["failures"]


async def test_no_read_goes_beyond_its_cycle(tmp_path: Path) -> None:
    """A trainer takes into its cycle whatever a read gives, also what the next epoch made meanwhile."""
    async with served(tmp_path / "buffer", max_groups_per_read=3) as buffer:
        await write(buffer, "a", [0, 1, 0, 1], 1)
        await write(buffer, "b", [0, 1, 0, 1], 2)
        assert len(uids((await buffer.post("/get_rollout_data", {}))[1])) == 8
        for name, epoch in (("c3", 3), ("d", 1), ("e", 2), ("f", 3)):
            await write(buffer, name, [0, 1, 0, 1], epoch)
    async with served(tmp_path / "buffer", max_groups_per_read=3) as buffer:  # a restart ends no cycle
        assert {uid[0] for uid in uids((await buffer.post("/get_rollout_data", {}))[1])} == {"c"}
        assert {uid[0] for uid in uids((await buffer.post("/get_rollout_data", {}))[1])} == {"d", "e", "f"}


async def test_a_trainer_that_starts_anew_begins_a_cycle(tmp_path: Path) -> None:
    files = generator(tmp_path / "files")
    async with served(tmp_path / "buffer", max_groups_per_read=3, generators=files) as buffer:
        await start(buffer, num_repeat_per_sample=2)
        await write(buffer, "a", [0, 1], 1)
        assert len(uids((await buffer.post("/get_rollout_data", {}))[1])) == 2
        await start(buffer, num_repeat_per_sample=2)
        for name, number in (("b", 2), ("c", 3), ("d", 4), ("e", 5)):
            await write(buffer, name, [0, 1], number)
        assert {uid[0] for uid in uids((await buffer.post("/get_rollout_data", {}))[1])} == {"b", "c", "d"}


async def test_no_instance_comes_twice_in_one_cycle_of_several_reads(tmp_path: Path) -> None:
    async with served(tmp_path, max_groups_per_read=2) as buffer:
        for epoch in range(2):
            await write(buffer, f"{epoch}-", [0, 1, 0, 1], 1)
        assert len(uids((await buffer.post("/get_rollout_data", {}))[1])) == 4
        _, answer = await buffer.post("/get_rollout_data", {})
        assert answer["success"] is False and "--groups-per-cycle" in answer["message"]
        await write(buffer, "other", [0, 1, 0, 1], 2)
        assert len(uids((await buffer.post("/get_rollout_data", {}))[1])) >= 4  # the cycle's second
        seen: list[str] = []
        async with asyncio.timeout(10):
            while not seen:
                seen = uids((await buffer.post("/get_rollout_data", {}))[1])
                seen = seen or (["1-0"] if buffer.service.ledger.stats().items == 0 else [])
        assert seen[0] == "1-0"


async def test_the_group_size_of_the_server_is_that_of_a_rollout_that_names_none(tmp_path: Path) -> None:
    files = generator(tmp_path / "files")
    async with served(tmp_path / "buffer", generators=files) as buffer:
        status, answer = await buffer.post(
            "/start_rollout", {"task_type": "math", "num_repeat_per_sampel": 8}
        )
        assert status == 200 and "num_repeat_per_sample" in answer["warnings"][0]
        assert buffer.service.ledger.group_size("math") == 4
        _, answer = await buffer.post("/v1/rollouts", {"task_type": "math", "num_repeat_per_sampel": 8})
        assert len(answer["warnings"]) == 1
        await buffer.post(f"/v1/rollouts/{answer['rollout_id']}/stop")
    other = LedgerSettings(groups=GroupSettings(group_size=3))
    async with served(tmp_path / "buffer", other, generators=files) as buffer:
        assert buffer.service.ledger.group_size("math") == 3


async def test_sizes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        for bad in ("--5", "-", "5-", "１"):
            for path in ("/get_rollout_data", "/buffer/read"):
                status, answer = await buffer.post(path, {"batch_size": bad, "timeout": 0})
                assert status == 400 and "batch_size" in answer["message"], (path, bad)
            assert (await buffer.get("/buffer/peek", params={"batch_size": bad}))[0] == 400


async def test_the_body_of_a_form_is_read_as_json(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        headers = {"content-type": "application/x-www-form-urlencoded"}  # curl -d
        data = b'{"instance_id": 1, "messages": [{"role": "user"}], "reward": 1}'
        assert (await buffer.post("/v1/items", data=data, headers=headers))[1]["stored"] == 1


async def test_a_batch_that_never_fits_is_refused_for_good(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=4), max_buffer_size=4)
    async with served(tmp_path, settings) as buffer:
        items = [item(1, 1, f"u{n}") for n in range(5)]
        status, answer = await buffer.post("/v1/items", {"items": items})
        assert status == 413 and "--max-buffer-size" in answer["error"]["message"]


async def test_reads_and_writes_are_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group("a")
        await buffer.post("/get_rollout_data", {})
        for path in ("/get_rollout_data", "/v1/read"):
            await buffer.post(path, {})
        async with asyncio.timeout(10):
            while buffer.service.ledger.stats().groups_delivered < 1:
                await asyncio.sleep(0.01)
        async with buffer.session.get(buffer.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        for line in (
            'reads_total{result="empty"} 2',
            'reads_total{result="groups"} 1',
            "writes_total 4",
            "groups_delivered_total 1",
        ):
            assert f"rollstream_buffer_{line}" in lines


async def test_one_lease_has_a_thousand_groups_at_most(tmp_path: Path) -> None:
    async with served(tmp_path, LedgerSettings(groups=GroupSettings(group_size=1))) as buffer:
        items = [item(number, 1, f"{number}") for number in range(1100)]
        assert (await buffer.post("/v1/items", {"items": items}))[0] == 200
        for asked, got in (({}, 1024), ({"max_groups": 5000}, 76)):
            _, answer = await buffer.post("/v1/read", asked)
            assert answer["head"]["groups"] == len(answer["groups"]) == got


async def test_a_failed_group_is_dropped_as_failed(tmp_path: Path) -> None:
    async with served(tmp_path) as buffer:
        await buffer.write_group("failed", (-1, -1, -1, -1))
        await buffer.write_group("zero", (0, 0, 0, 0))
        await buffer.post("/get_rollout_data", {})
        assert (await buffer.get("/v1/stats"))[1]["dropped"] == {"failed": 4, "not_valid": 4}


# -- readers and writers that are slow


def _ask(url: str, path: str, body: bytes, window: int) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    asking.connect((host, int(port)))
    asking.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return asking


def _rest(asking: socket.socket, pause: float = 0.0) -> bytes:
    got = b""
    asking.settimeout(20)
    while not got.endswith(b"0\r\n\r\n"):
        try:
            part = asking.recv(100_000)
        except ConnectionError:
            break
        if not part:
            break
        got += part
        time.sleep(pause)
    return got


@pytest.mark.parametrize("stalls", [True, False])
async def test_a_slow_reader_and_another_never_get_the_same(tmp_path: Path, stalls: bool) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=2), lease_seconds=1.0)
    async with served(tmp_path, settings) as buffer:
        for number in range(2):
            big = item(1, number, f"u{number}", pad="x" * 4_000_000)
            assert (await buffer.post("/v1/items", {"items": [big]}))[0] == 200
        asking = _ask(buffer.url, "/get_rollout_data", b"{}", 4096 if stalls else 32768)
        async with asyncio.timeout(10):
            while buffer.service.ledger.stats().groups["ready"]:
                await asyncio.sleep(0.01)
        if stalls:  # its time goes by: somebody else gets the group, and the first answer is cut off
            second: dict[str, Any] = {"success": False}
            async with asyncio.timeout(10):
                while not second["success"]:
                    _, second = await buffer.post("/buffer/read", {"batch_size": 2, "timeout": 5})
            got = await asyncio.to_thread(_rest, asking)
            assert len(uids(second)) == 2 and not got.endswith(b"0\r\n\r\n")
        else:  # it takes far longer than the lease, a piece at a time
            reading = asyncio.create_task(asyncio.to_thread(_rest, asking, 0.01))
            while not reading.done():
                _, second = await buffer.post("/get_rollout_data", {})
                assert second["success"] is False
                await asyncio.sleep(0.1)
            assert (await reading).endswith(b"0\r\n\r\n")
        async with asyncio.timeout(10):
            while buffer.service.ledger.stats().items_delivered < 2:
                await asyncio.sleep(0.01)
        assert buffer.service.ledger.stats().items_delivered == 2
        asking.close()


@pytest.mark.parametrize("path", ["/get_rollout_data", "/v1/read"])
async def test_a_reader_that_takes_no_more_is_cut_off(tmp_path: Path, path: str) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=1), lease_seconds=0.6)
    async with served(tmp_path, settings) as buffer:
        for number in range(8):
            big = item(number, 1, f"u{number}", pad="x" * 2_000_000)
            assert (await buffer.post("/v1/items", {"items": [big]}))[0] == 200
        asking = _ask(buffer.url, path, b"{}", 4096)
        async with asyncio.timeout(60):
            while not buffer.service.ledger.stats().groups["leased"]:
                await asyncio.sleep(0.01)
            # Nobody reads from it, nobody asks for its groups: they come back, and it is over.
            while not any(route == path for route, _ in buffer.service.metrics.answered):
                await asyncio.sleep(0.01)
        assert buffer.service.ledger.stats().groups["ready"] == 8
        assert not buffer.service.ledger.leases()
        assert not (await asyncio.to_thread(_rest, asking)).endswith(b"0\r\n\r\n")
        asking.close()


async def test_a_reader_that_was_given_more_time_is_not_cut_off_before(tmp_path: Path) -> None:
    settings = LedgerSettings(groups=GroupSettings(group_size=1), lease_seconds=0.6)
    async with served(tmp_path, settings) as buffer:
        for number in range(16):
            big = item(number, 1, f"u{number}", pad="x" * 2_000_000)
            assert (await buffer.post("/v1/items", {"items": [big]}))[0] == 200
        async with AsyncBufferClient(buffer.url) as client, await client.read() as lease:
            groups = 0
            async for _ in lease:
                if groups == 0:
                    await lease.extend(600)
                    await asyncio.sleep(2.5)  # trains, and reads nothing meanwhile
                groups += 1
            assert groups == 16
            await lease.ack()
        assert buffer.service.ledger.stats().items_delivered == 16


async def test_a_reader_that_waits_for_a_slow_hook_keeps_its_groups(tmp_path: Path) -> None:
    slow = "def filter_item(item):\n    time.sleep(0.5)\n    return True\n"
    settings = LedgerSettings(groups=GroupSettings(group_size=2), lease_seconds=1.0)
    files = generator(tmp_path / "files", hooks=slow)
    async with served(tmp_path / "buffer", settings, generators=files) as buffer:
        for number in range(4):
            await write(buffer, f"{number}-", [0, 1], number, task_type="math")
        first = asyncio.create_task(buffer.post("/get_rollout_data", {}))
        while buffer.service.ledger.stats().groups["ready"]:
            await asyncio.sleep(0.01)
        while not first.done():  # longer than the lease: nobody else gets them
            _, second = await buffer.post("/get_rollout_data", {})
            assert second["success"] is False
            await asyncio.sleep(0.1)
        assert len(uids((await first)[1])) == 8


async def test_a_body_that_stops_coming_ends_with_408(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.buffer.exchange.BODY_S", 0.3)
    monkeypatch.setattr("rollstream.buffer.exchange._LINGER_S", 0.1)
    async with served(tmp_path) as buffer:
        port = int(buffer.url.rpartition(":")[2])
        for path in ("/buffer/write", "/v1/items"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n".encode() + b'{"uid":'
            )
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 408 "), (path, answer)
            assert b"the body is not complete" in answer
            writer.close()


async def test_a_batch_size_is_exact_where_a_cycle_holds_groups_back(tmp_path: Path) -> None:
    """What is passed over, or dropped, is not handed out: it frees no instance that is held."""
    settings = LedgerSettings(groups=GroupSettings(group_size=1), groups_per_cycle=3)
    async with served(tmp_path, settings) as buffer:
        await buffer.post("/buffer/write", item("x", 1.0, "x0"))
        _, answer = await buffer.post("/v1/read", {"max_groups": 1})
        await buffer.post(f"/v1/leases/{answer['head']['lease']}/ack")
        await buffer.post("/buffer/write", item("z", 1.0, "z0"))
        await buffer.service.ledger.set_task("default", 2)
        for n in range(2):
            await buffer.post("/buffer/write", item("y", float(n), f"y{n}"))
        await buffer.service.ledger.set_task("default", 1)
        await buffer.post("/buffer/write", item("x", 1.0, "x1"))
        _, answer = await buffer.post("/v1/read", {"batch_size": 2})
        assert (answer["head"]["groups"], answer["end"]["items"]) == (0, 0)
        assert buffer.service.ledger.stats().groups["leased"] == 0
        await buffer.post("/buffer/write", item("w", 1.0, "w0"))
        _, answer = await buffer.post("/v1/read", {"batch_size": 3})
        assert [group["instance_id"] for group in answer["groups"]] == ["z", "w", "x"]
        assert answer["end"]["items"] == 3


async def test_a_batch_size_is_exact_where_a_group_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = GroupSettings(group_size=2, min_valid_group_size_ratio=0.5)
    async with served(tmp_path, LedgerSettings(groups=groups)) as buffer:
        ledger = buffer.service.ledger
        await buffer.post("/buffer/write", item("a", 1.0, "a0"))
        for n in range(2):
            await buffer.post("/buffer/write", item("b", float(n), f"b{n}"))
        decide, late = Ledger.decide, [item("a", 0.0, "a1")]

        async def too_late(self: Ledger, **decisions: Any) -> Lease | None:
            while late:
                await buffer.post("/buffer/write", late.pop())
            return await decide(self, **decisions)

        monkeypatch.setattr(Ledger, "decide", too_late)
        _, answer = await buffer.post("/v1/read", {"batch_size": 4})
        assert answer["head"]["groups"] == 0 and answer["head"]["lease"] is None
        assert ledger.stats().groups["leased"] == 0
        _, answer = await buffer.post("/v1/read", {"batch_size": 4})
        assert (answer["head"]["groups"], answer["end"]["items"]) == (2, 4)
