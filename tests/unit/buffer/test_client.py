"""The clients, against a server in a thread that speaks the buffer's wire, and against the buffer itself."""

import asyncio
import contextlib
import json
import re
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy
import pytest
from aiohttp import web

from rollstream.buffer.client import (
    AsyncBufferClient,
    BufferClient,
    BufferClientError,
    BufferUnavailableError,
)
from rollstream.buffer.items import ItemError
from tests.support.buffer import Served, generator, item, served
from tests.support.interrupts import interrupted

IMPATIENT_S = 0.05
MSGPACK = {"content-type": "application/msgpack"}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sent(NamedTuple):
    path: str
    headers: Mapping[str, str]
    body: bytes


async def steady(request: web.Request) -> web.StreamResponse:
    return web.json_response({"items": 1, "results": ["stored"]})


@contextlib.contextmanager
def running(handler: Handler = steady) -> Iterator[tuple[str, list[Sent]]]:
    """The URL of a server in a thread of its own, and the requests that it got."""
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    requests: list[Sent] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append(Sent(request.path, request.headers, await request.read()))
        return await handler(request)

    async def serve() -> None:
        runner = web.ServerRunner(web.Server(handle, handler_cancellation=True), shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set_result((runner.addresses[0][1], asyncio.get_running_loop(), stop := asyncio.Event()))
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    port, loop, stop = started.result()
    try:
        yield f"http://127.0.0.1:{port}", requests
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": "code"}}, status=status)


async def cut_off(request: web.Request, body: bytes = b"") -> web.StreamResponse:
    response = web.StreamResponse(headers={**MSGPACK, "content-length": "100000"})
    if body:
        await response.prepare(request)
        await response.write(body)
    assert request.transport is not None
    request.transport.close()
    return response


# -- with the buffer


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path / "b", token="t/k", generators=[generator(tmp_path / "files")]) as buffer:
        yield buffer


@pytest.fixture
async def client(buffer: Served) -> AsyncIterator[AsyncBufferClient]:
    async with AsyncBufferClient(buffer.url, token="t/k", give_up_after=IMPATIENT_S) as client:
        yield client


@pytest.mark.parametrize("kind", [list, lambda numbers: array("i", numbers), numpy.array])
async def test_writes_and_reads(buffer: Served, client: AsyncBufferClient, kind: Any) -> None:
    tokens = {"prompt_ids": kind([1, 2]), "response_ids": kind([3]), "response_mask": kind([1])}
    more = {"response_logprobs": [-0.5]}
    items = [item(uid=f"u{n}", reward=n % 2, **tokens, **more) for n in range(4)]
    await buffer.write(item(uid="u3", prompt_ids=[1, 2], response_ids=[3], response_mask=[1], **more))  # JSON
    assert await client.write(items[0]) == (1, 0, [True])
    assert await client.write([]) == (0, 0, [])
    assert (await client.write(items)).results == [False, True, True, False]
    assert await client.known(["u0", "new"] * 10_000) == [True, False] * 10_000
    consumer = "a/b é"
    with pytest.raises(ZeroDivisionError):
        async with await client.read(consumer=consumer):
            raise ZeroDivisionError
    assert await client.leases() == []
    async with await client.read(consumer=consumer, timeout=5, max_groups=1, distinct=True) as lease:
        pass  # it stays
    (read,) = lease.groups
    assert (read.instance_id, read.task_type, read.job, read.timed_out) == (7, "", None, False)
    assert lease.meta_info["finished_groups"] == [7] and lease.failures == lease.notices == []
    assert (await client.group(read.id))["items"][0]["prompt_ids"] == [1, 2]
    for one in read.items:
        assert one["prompt_ids"] == array("i", [1, 2]) and one["response_mask"] == array("b", [1])
        assert one["response_logprobs"] == array("f", [-0.5])
    assert (await client.extend(lease.id, 50))["lease_seconds"] == 50
    assert [one["id"] for one in await client.leases()] == [lease.id]
    assert await client.release(consumer) == 1
    async with await client.read() as lease:
        await lease.ack()
        assert (await client.ack(lease.id))["repeated"]
    async with await client.read() as empty:
        await empty.ack()
        assert empty.id is None and empty.groups == []
        with pytest.raises(ValueError, match="nothing to nack"):
            await client.nack(empty.id)
    assert [one["state"] for one in await client.groups(limit=5, task_type=None)] == ["delivered"]
    assert await client.groups(state="ready") == []
    assert (await client.stats())["store"]["items_written"] == 4


async def test_jobs_and_groups_set_aside(client: AsyncBufferClient) -> None:
    job = (await client.start_job({"task_type": "math"}))["id"]
    await client.expect_items(job, 8)
    assert [one["id"] for one in await client.jobs()] == [job]
    assert (await client.stop_job(job))["state"] in ("stopped", "finished")
    assert await client.drop_job(job) == 0
    assert await client.groups(state="quarantined") == []
    assert await client.retry_quarantined() == await client.drop_quarantined() == 0
    for missing in (client.stop_job("r/1"), client.drop_job("r/1"), client.ack("x"), client.group(9)):
        with pytest.raises(BufferClientError) as error:
            await missing
        assert (error.value.status, error.value.code) == (404, "not_found")


async def test_a_large_write_is_several_requests(client: AsyncBufferClient) -> None:
    assert (await client.write([item(uid=f"u{n}") for n in range(2500)])).stored == 2500
    assert (await client.write([item(uid=f"u{n}", text="x" * 2**22) for n in range(20)])).known == 20
    with pytest.raises(BufferClientError, match=r"^items\[1005\].reward: ") as error:
        await client.write([item() for _ in range(1005)] + [item(reward="much")])
    assert (error.value.status, error.value.where) == (400, "items[1005].reward")


WRONG: list[tuple[Any, type[Exception], str]] = [
    ("item", TypeError, "want items, which are mappings"),
    ([item(), json.dumps(item()).encode()], TypeError, "got bytes"),
    ([item(), item(x=object())], ItemError, r"items\[1\]: cannot be written"),
    ([item(), item(prompt_ids=["x"])], ItemError, r"items\[1\].prompt_ids: "),
]


@pytest.mark.parametrize(("given", "kind", "text"), WRONG)
def test_what_is_no_item_is_not_sent(given: Any, kind: type[Exception], text: str) -> None:
    with BufferClient("http://127.0.0.1:9") as client, pytest.raises(kind, match=text):
        client.write(given)


# -- faults


@pytest.mark.parametrize("given", [item(), [item() | {"uid": None}]])
def test_a_retried_write_is_the_same(given: Any) -> None:
    statuses = iter([503, 429, 507])

    async def handler(request: web.Request) -> web.StreamResponse:
        status = next(statuses, None)
        return await steady(request) if status is None else refused(status, "no room")

    with running(handler) as (url, requests), BufferClient(url) as client:
        assert client.write(given).stored == 1
    assert len(requests) == 4 and len({request.body for request in requests}) == 1


def frame(**record: Any) -> bytes:
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(4, "big") + body


HEAD = frame(head={"lease": "L", "groups": 0, "failures": [{"error": "no GPU"}], "notices": ["slow"]})
END = frame(end={"items": 0, "groups": 0, "meta_info": {"finished_groups": []}})


@pytest.mark.parametrize("cut", [0, 2, 30, len(HEAD) + 10, None])
def test_a_read_whose_answer_is_lost_or_breaks_is_sent_again(cut: int | None) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if len(requests) > 1:
            return web.Response(body=HEAD + END, headers=MSGPACK)
        if cut is None:  # ends in order, but without its last frame
            return web.Response(body=HEAD, headers=MSGPACK)
        return await cut_off(request, (HEAD + END)[:cut])

    with running(handler) as (url, requests), BufferClient(url) as client, client.read(job="j") as lease:
        assert (lease.id, lease.failures, lease.notices) == ("L", [{"error": "no GPU"}], ["slow"])
    first, second = (json.loads(request.body) for request in requests)
    assert first == second and first.keys() == {"job", "timeout", "read_id"}


@pytest.mark.parametrize("nack", [refused(409, "the lease ended"), None])
def test_the_error_in_a_lease_is_seen_though_its_nack_fails(nack: web.Response | None) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/read":
            return web.Response(body=HEAD + END, headers=MSGPACK)
        return nack or await cut_off(request)

    with running(handler) as (url, requests), BufferClient(url, give_up_after=IMPATIENT_S) as client:
        with pytest.raises(ZeroDivisionError), client.read():
            raise ZeroDivisionError
        assert requests[-1].path == "/v1/leases/L/nack"


def test_a_refusal_is_not_tried_again() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/leases":
            raise web.HTTPFound("/login")
        return web.Response(text="<html>welcome</html>", content_type="text/html")

    with running(handler) as (url, requests), BufferClient(url) as client:
        for call in (client.stats, client.read, client.leases):
            with pytest.raises(BufferClientError, match="not as a buffer answers"):
                call()
    assert len(requests) == 3


def test_a_client_gives_up_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    async def full(request: web.Request) -> web.StreamResponse:
        return refused(429, "no room")

    with running(full) as (url, _), BufferClient(url, give_up_after=IMPATIENT_S) as client:
        with pytest.raises(BufferUnavailableError, match=r"/v1/items: .*no room; gave up after") as error:
            client.write(item())
        assert isinstance(error.value.__cause__, BufferClientError)
    caplog.clear()
    with BufferClient(url.replace("//", "//user:secret@"), give_up_after=IMPATIENT_S) as client:
        for _ in range(2):  # nobody listens there any more
            with pytest.raises(BufferUnavailableError):
                client.stats()
    (record,) = caplog.records
    assert re.search(r"GET http://127.*/v1/stats: .*; trying again for 0.05 s", record.getMessage())
    assert record.name.startswith("rollstream") and "secret" not in record.getMessage()


def test_tokens_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLSTREAM_BUFFER_TOKEN", raising=False)
    with running() as (url, requests):

        def sent(url: str, token: str | None = None) -> Any:
            with BufferClient(url, token=token) as client:
                client.stats()
            return requests[-1].headers.get("authorization")

        assert sent(url) is None
        monkeypatch.setenv("ROLLSTREAM_BUFFER_TOKEN", "from-environment")
        assert sent(url.removeprefix("http://")) == "Bearer from-environment"
        below = url.replace("//", "//any:a%2Fb@") + "/below/"
        assert sent(below) == "Bearer a/b" and sent(below, "given") == "Bearer given"
    assert [request.path for request in requests] == ["/v1/stats"] * 2 + ["/below/v1/stats"] * 2
    for wrong in ("ftp://u:secret@h", "http://"):
        with pytest.raises(ValueError, match=r"no buffer's address((?!secret).)*$"):
            BufferClient(wrong)


# -- the sync client's thread


async def test_a_sync_client_works_inside_a_running_loop_and_in_many_threads() -> None:
    with running() as (url, requests), BufferClient(url) as client, BufferClient(url) as other:
        assert client.write(item()).stored == other.write(item()).stored == 1
        await asyncio.gather(*(asyncio.to_thread(client.write, item()) for _ in range(20)))
        assert len(requests) == 22


@contextlib.contextmanager
def silent_reads() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A server whose reads wait; one event says that a read has come, the other one that it went away."""
    come, gone = threading.Event(), threading.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/read":
            come.set()
            try:
                await asyncio.Event().wait()
            finally:
                gone.set()
        return web.json_response({"items": 1})

    with running(handler) as (url, _):
        yield url, come, gone


def test_ctrl_c_ends_a_waiting_read_and_leaves_the_client_usable() -> None:
    with silent_reads() as (url, come, gone), BufferClient(url) as client:
        with interrupted(come), pytest.raises(KeyboardInterrupt):
            client.read(timeout=600)
        assert gone.wait(60)  # the buffer sees that the reader has gone
        assert client.stats() == {"items": 1}


def test_close_ends_what_waits() -> None:
    with silent_reads() as (url, come, _), ThreadPoolExecutor(1) as thread:
        client = BufferClient(url)
        read = thread.submit(client.read, timeout=600)
        assert come.wait(60)
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match="closed during the call"):
            read.result(60)
        with pytest.raises(RuntimeError, match="was closed"):
            client.stats()
