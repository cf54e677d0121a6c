"""The clients, against a buffer that is served: writes, leases, streams, retries."""

import asyncio
import logging
import random
import selectors
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.buffer.async_client import AsyncBufferClient
from rollstream.buffer.client import BufferClient
from rollstream.buffer.client_wire import (
    Address,
    Backoff,
    BufferClientError,
    BufferUnavailableError,
    Encoding,
    LeaseUseError,
    RecordReader,
    RetryNotice,
    Tries,
    batches,
)
from rollstream.buffer.items import parse_items

from .served import Served, item, served

ENCODINGS: list[Encoding] = ["json", "msgpack"]


def tokens(number: int) -> dict[str, Any]:
    return {
        "prompt_ids": [1, 2, number],
        "response_ids": [5],
        "response_mask": [1],
        "response_logprobs": [-0.5],
        "policy_version": number,
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_the_sync_client(tmp_path: Path, encoding: Encoding) -> None:
    async with served(tmp_path) as buffer:
        await asyncio.to_thread(use_sync_client, buffer, encoding)


def use_sync_client(buffer: Served, encoding: Encoding) -> None:
    with BufferClient(buffer.url, encoding=encoding) as client:
        items = [item("a", n % 2, f"a{n}", **tokens(n)) for n in range(4)]
        assert client.write(items).results == [True] * 4
        assert client.write(items).known == 4
        assert client.known(["a0", "zz"]) == [True, False]
        with pytest.raises(BufferClientError) as refused:
            client.write([item("a", 1.0, "fine"), item("a", "much", "b")])
        assert (refused.value.status, refused.value.where) == (400, "items[1].reward")
        with pytest.raises(RuntimeError), client.read(consumer="me") as lease:
            raise RuntimeError("the trainer fails")
        assert client.leases("me") == []
        with client.read(consumer="me", max_groups=3) as lease:
            (group,) = list(lease)
            assert (group.instance_id, group.policy_version, lease.groups_promised) == ("a", 0, 1)
            assert [list(one["prompt_ids"]) for one in group.items] == [[1, 2, n] for n in range(4)]
            assert isinstance(group.items[0]["prompt_ids"], array if encoding == "msgpack" else list)
            assert lease.meta_info["finished_groups"] == ["a"]
            lease.extend(50)
            lease.ack()
            lease.ack()
        assert client.release("me") == 0
        with client.read() as lease:
            assert lease.id is None and list(lease) == [] and lease.failures == []
        with pytest.raises(BufferClientError) as refused:
            client.start_rollout({"task_type": "none"})
        assert (refused.value.status, refused.value.code) == (404, "unknown_task_type")
        assert client.stats()["items_delivered"] == 4


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_the_async_client(tmp_path: Path, encoding: Encoding) -> None:
    async with served(tmp_path) as buffer, AsyncBufferClient(buffer.url, encoding=encoding) as client:
        writes = [client.write([item("a", n % 2, f"a{n}", **tokens(n))]) for n in range(4)]
        assert sum(done.stored for done in await asyncio.gather(*writes)) == 4
        async with await client.read(consumer="me") as lease:
            groups = [group async for group in lease]
            assert [one["response_ids"][0] for one in groups[0].items] == [5] * 4
            assert [one["lease_id"] for one in await client.leases("me")] == [lease.id]
            await lease.ack()
        with pytest.raises(BufferClientError) as refused:
            assert lease.id is not None
            await client.nack(lease.id)
        assert refused.value.status == 409
        assert (await client.read()).id is None


async def test_writes_are_tried_again_until_there_is_room() -> None:
    statuses = iter([503, 429, 507, 500, 200])
    bodies: list[bytes] = []

    async def write(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        status = next(statuses)
        answer = {"stored": 1, "known": 0, "results": ["stored"]} if status == 200 else {"error": {}}
        return web.json_response(answer, status=status)

    async with _fake(write) as url, AsyncBufferClient(url, backoff=Backoff(0.001, 0.01)) as client:
        assert (await client.write([{**item("a"), "uid": None}])).stored == 1
    # The uid is made once: whatever became of a try, the item is stored once.
    assert len(bodies) == 5 and len(set(bodies)) == 1


@pytest.mark.parametrize("cut", ["before its head", "before its first record", "within its first record"])
async def test_groups_of_an_answer_that_was_lost_come_at_once(tmp_path: Path, cut: str) -> None:
    answers = 0
    ndjson = {"accept": "application/x-ndjson", "content-type": "application/json"}

    async def relay(request: web.Request) -> web.StreamResponse:
        nonlocal answers
        body = await request.read()
        async with buffer.session.post(buffer.url + request.path, data=body, headers=ndjson) as answer:
            got = await answer.read()  # as of a server that is killed now: the lease stays
            lost = "read" in request.path and answers == 0
            answers += lost
            response = web.StreamResponse(headers={"content-length": str(len(got))})
            if not lost or cut != "before its head":
                await response.prepare(request)
                await response.write(b"" if lost and cut == "before its first record" else got[:20])
            if not lost:
                await response.write(got[20:])
            elif request.transport is not None:
                request.transport.close()
            return response

    backoff = Backoff(0.001, 0.01)

    def read_plainly() -> None:
        with BufferClient(url, encoding="json", backoff=backoff) as client, client.read() as lease:
            assert [group.instance_id for group in lease] == ["a"]
            lease.nack()

    async with served(tmp_path) as buffer, _fake(relay) as url:
        await buffer.write_group("a")
        async with (
            AsyncBufferClient(url, encoding="json", backoff=backoff) as client,
            await client.read() as lease,
        ):
            assert [group.instance_id async for group in lease] == ["a"]
            await lease.nack()
        assert answers == 1
        answers = 0
        await asyncio.to_thread(read_plainly)
        assert answers == 1


@pytest.mark.parametrize("told", [True, False])
async def test_connections_that_ended_while_they_were_idle_cost_no_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    """`told`: the client's machine has heard of it when they are used again; else it hears by using one."""
    monkeypatch.setattr("rollstream.buffer.server._KEEP_ALIVE_S", 1)
    if not told:
        monkeypatch.setattr("rollstream.buffer.client_http._is_over", lambda connection: False)
    count = 8

    def ask_together(client: BufferClient) -> None:
        together = threading.Barrier(count)

        def ask() -> None:
            together.wait(60)
            client.read(timeout=0.5)

        threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def is_closed(connection: Any) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.sock, selectors.EVENT_READ)
            return bool(selector.select(0))

    def ask_after_a_pause(client: BufferClient) -> None:
        idle = client._connections._idle
        assert idle
        deadline = time.monotonic() + 60
        while not all(is_closed(one) for one in idle) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.stats()["items"] == 0
        assert len(client._connections._idle) <= 1

    async with served(tmp_path) as buffer:
        with BufferClient(buffer.url, backoff=Backoff(0.001, give_up_after=0)) as client:
            await asyncio.to_thread(ask_together, client)
            await asyncio.to_thread(ask_after_a_pause, client)
    assert not [record for record in caplog.records if "trying again" in record.getMessage()]


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_what_is_no_buffer_is_not_asked_again(encoding: Encoding) -> None:
    asked = 0

    async def page(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text="<html>\nwelcome\n</html>\n", content_type="text/html")

    def read_plainly() -> None:
        with BufferClient(url, encoding=encoding) as client:
            client.read()

    async with _fake(page) as url, AsyncBufferClient(url, encoding=encoding) as client:
        with pytest.raises(BufferClientError, match="not what a buffer sends"):
            await client.read()
        with pytest.raises(BufferClientError, match="not what a buffer sends"):
            await asyncio.to_thread(read_plainly)
    assert asked == 2


def test_patience_begins_with_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read may wait for an hour before its connection breaks; one patience is for all that fails."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backoff = Backoff(give_up_after=300.0)
    tries = Tries("POST http://h/v1/read", backoff, RetryNotice(backoff), random.Random(0))
    now += 3600.0
    for step in (0.0, 200.0, 99.0):
        now += step
        assert tries.failed("it broke") > 0
    now += 1.0
    with pytest.raises(BufferUnavailableError, match="POST http://h/v1/read: it broke") as gave_up:
        tries.failed("it broke", ValueError("cause"))
    assert isinstance(gave_up.value.__cause__, ValueError)
    assert len(caplog.records) == 1


async def test_a_client_gives_up_when_it_was_told_to() -> None:
    async def full(request: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=429, headers={"retry-after": "1"})

    quick = Backoff(0.001, 0.01, give_up_after=0.05)
    async with _fake(full) as url, AsyncBufferClient(url, backoff=quick) as client:
        with pytest.raises(BufferUnavailableError, match="HTTP 429"):
            await client.write([item("a", 1, "a")])

        def write() -> None:
            with BufferClient(url, backoff=quick) as other:
                other.write([item("a", 1, "a")])

        with pytest.raises(BufferUnavailableError, match="HTTP 429"):
            await asyncio.to_thread(write)
    with pytest.raises(BufferUnavailableError):
        await AsyncBufferClient("http://127.0.0.1:9", backoff=quick).stats()


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_an_ack_does_not_take_groups_that_were_never_read(tmp_path: Path, encoding: Encoding) -> None:
    async with served(tmp_path) as buffer:
        for name in "abcd":
            await buffer.write_group(name)
        await asyncio.to_thread(use_leases, buffer, encoding)


def use_leases(buffer: Served, encoding: Encoding) -> None:
    with BufferClient(buffer.url, encoding=encoding) as client:
        with pytest.raises(LeaseUseError, match="unread=True"), client.read() as lease:
            lease.ack()
        with pytest.raises(LeaseUseError, match="not read"), client.read() as lease:
            for _ in lease:
                break
            lease.ack()
        assert client.leases() == [] and client.stats()["items_delivered"] == 0  # all of it went back
        with client.read(max_groups=1) as lease:
            assert next(iter(lease)).instance_id == "a"
            lease.ack()  # there is no other group, though the end was not asked for
        with client.read(max_groups=2) as lease:
            seen = [group.instance_id for group in lease]
            with pytest.raises(LeaseUseError, match="once"):
                list(lease)
            lease.ack()
        assert seen == ["b", "c"]
        with client.read() as lease:
            groups = iter(lease)
            with pytest.raises(LeaseUseError):
                lease.ack()
            assert [group.instance_id for group in groups] == ["d"]  # a refused ack takes nothing away
            assert lease.meta_info["finished_groups"] == ["d"]
            lease.ack()
        client.write([item("e", n % 2, f"e{n}") for n in range(4)])
        with client.read() as lease:
            lease.ack(unread=True)
        assert client.stats()["items_delivered"] == 20


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_an_async_ack_does_not_either(tmp_path: Path, encoding: Encoding) -> None:
    async with served(tmp_path) as buffer, AsyncBufferClient(buffer.url, encoding=encoding) as client:
        await buffer.write_group("a")
        await buffer.write_group("b")
        with pytest.raises(LeaseUseError, match="unread=True"):
            async with await client.read() as lease:
                async for _ in lease:
                    break
                await lease.ack()
        async with await client.read(max_groups=1) as lease:
            assert [group.instance_id async for group in lease] == ["a"]
            with pytest.raises(LeaseUseError, match="once"):
                [group async for group in lease]
            await lease.ack()
        async with await client.read() as lease:
            await lease.ack(unread=True)
        assert (await client.stats())["items_delivered"] == 8


async def test_one_item_is_written_as_a_list_of_one(tmp_path: Path) -> None:
    def write() -> None:
        with BufferClient(buffer.url) as client:
            assert client.write(item("a", 1, "a1")).stored == 1
            assert client.write(
                b'{"uid": "a2", "instance_id": "a", "messages": [{"role": "u"}], "reward": 0}'
            )
            assert client.known(["a1", "a2"]) == [True, True]
            with pytest.raises(TypeError, match=r"items\[1\]: .* got str"):
                client.write([item("a"), "item"])  # type: ignore[list-item]
            with pytest.raises(TypeError, match="got int"):
                client.write(7)  # type: ignore[arg-type]

    async with served(tmp_path) as buffer, AsyncBufferClient(buffer.url) as client:
        await asyncio.to_thread(write)
        assert (await client.write(item("a", 1, "a3"))).stored == 1


async def test_what_was_dropped_and_quarantined_is_listed(tmp_path: Path) -> None:
    def look() -> None:
        with BufferClient(buffer.url) as client:
            assert client.read().id is None
            (drop,) = client.dropped()
            assert (drop["instance_id"], drop["reason"]) == ("same", "not_valid")
            assert client.dropped(limit=5, after=drop["ticket"]) == []
            assert client.quarantine() == [] and client.retry_quarantined()["groups"] == 0
            assert client.drop_quarantined([])["groups"] == 0
            with pytest.raises(BufferClientError) as refused:
                client.drop_rollout("r/1")
            assert refused.value.status == 404
            assert client.read(rollout_id="r/1").id is None

    async with served(tmp_path) as buffer, AsyncBufferClient(buffer.url) as client:
        await buffer.write_group("same", (1, 1, 1, 1))
        await asyncio.to_thread(look)
        assert len(await client.dropped(limit=1)) == 1
        assert await client.quarantine() == []
        assert (await client.retry_quarantined([]))["groups"] == 0
        assert (await client.drop_quarantined())["groups"] == 0
        with pytest.raises(BufferClientError, match="r/1"):
            await client.drop_rollout("r/1")
        assert (await client.read(rollout_id="r/1")).id is None


async def test_the_first_failure_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    quick = Backoff(0.001, 0.01, give_up_after=0.1)

    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return lines

    def ask() -> None:
        with BufferClient("http://u:secret@127.0.0.1:9", backoff=quick) as client:
            client.stats()

    with pytest.raises(BufferUnavailableError):
        await asyncio.to_thread(ask)
    (line,) = told()
    assert "GET http://127.0.0.1:9/v1/stats: " in line and "refused" in line
    assert "trying again until " in line and "secret" not in line
    async with AsyncBufferClient("http://127.0.0.1:9", backoff=quick) as other:
        for _ in range(2):
            with pytest.raises(BufferUnavailableError):
                await other.stats()
    (line,) = told()
    assert "trying again until " in line
    RetryNotice(Backoff(give_up_after=None)).tell("GET x", "refused", failures=1, waited=0.0)
    assert told() == ["GET x: refused; trying again until it works"]


def _fake(handler: Any) -> Any:
    import contextlib

    @contextlib.asynccontextmanager
    async def serve() -> Any:
        app = web.Application()
        app.router.add_post("/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    return serve()


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=20), st.lists(st.integers(1, 60)), st.booleans())
def test_a_stream_is_cut_the_same_however_it_arrives(
    texts: list[bytes], sizes: list[int], packed: bool
) -> None:
    import msgspec
    import orjson

    documents = [{"end": text.hex()} for text in texts]
    if packed:
        encoded = [msgspec.msgpack.encode(one) for one in documents]
        raw = b"".join(b"\xc6" + len(one).to_bytes(4, "big") + one for one in encoded)
    else:
        raw = b"".join(orjson.dumps(one) + b"\n" for one in documents)
    reader = RecordReader("msgpack" if packed else "json")
    records, at = [], 0
    for size in [*sizes, len(raw)]:
        records += reader.feed(raw[at : at + size])
        at += size
    assert records == documents


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 2500), st.sampled_from(ENCODINGS))
def test_batches_hold_all_items_in_order(count: int, encoding: Encoding) -> None:
    items = [
        {"uid": str(n), "instance_id": n, "messages": [{"role": "user"}], "reward": 0} for n in range(count)
    ]
    parsed = [parse_items(body, encoding) for _, body in batches(items, encoding)]
    assert [one.uid for batch in parsed for one in batch] == [str(n) for n in range(count)]
    assert all(len(batch) <= 1000 for batch in parsed)


@given(st.integers(1, 50), st.floats(0, 1000), st.none() | st.floats(0, 100), st.integers())
def test_pauses(failures: int, waited: float, asked: float | None, seed: int) -> None:
    backoff = Backoff(first=0.1, longest=5.0, give_up_after=300.0)
    pause = backoff.pause(failures, waited, asked, random.Random(seed))
    if waited >= 300:
        assert pause is None
    else:
        assert pause is not None and 0.05 <= pause <= 5.0
        assert pause >= min(asked or 0.0, 5.0)


def test_addresses() -> None:
    assert Address.parse("http://rollstream:a%2Fb@h:99/x/", None).url == "http://h:99/x"
    assert Address.parse("http://rollstream:a%2Fb@h:99", None).headers == Address.parse("h:99", "a/b").headers
    assert Address.parse("https://h", None).port == 443
    for wrong in ("ftp://h", "http://"):
        with pytest.raises(ValueError, match="no address of a buffer"):
            Address.parse(wrong, None)
