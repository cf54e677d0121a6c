"""The clients, against a server in a thread that speaks the buffer's wire, and against the buffer itself."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
from rollstream.buffer.items import Encoding, ItemError, dump_item, dump_list, parse_items
from tests.support.buffer import item, served

IMPATIENT_S = 0.05
MSGPACK = {"content-type": "application/msgpack"}
GIVEN_UP = "; gave up after "


class Server:
    """Stores items by uid, and gives `frames` to every read; `handler` may be replaced."""

    def __init__(self, *frames: bytes) -> None:
        self.body = b"".join(frames)
        self.handler = self.answer
        self.calls: list[tuple[str, str, Any]] = []
        """Method, path with its query, and what was sent."""
        self.headers: Any = None
        self.uids: set[str] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/read":
            return web.Response(body=self.body, headers=MSGPACK)
        if request.path != "/v1/items":
            return web.json_response({"items": 1})
        try:
            uids = [one.uid for one in parse_items(self.calls[-1][2], "msgpack")]
        except ItemError as error:
            return refused(400, "invalid_item", str(error), error.where)
        results = ["known" if uid in self.uids else "stored" for uid in uids]
        self.uids.update(uids)
        return web.json_response({"results": results})

    @contextlib.contextmanager
    def run(self) -> Iterator[str]:
        """Its URL."""
        started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.content.read()  # of any size
            plain = not body or request.content_type == "application/msgpack"
            self.calls.append((request.method, request.path_qs, body if plain else json.loads(body)))
            self.headers = request.headers
            return await self.handler(request)

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
            yield f"http://127.0.0.1:{port}"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()


def frame(**record: Any) -> bytes:
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(4, "big") + body


def head(lease: str | None, **more: Any) -> bytes:
    return frame(head={"lease": lease, "groups": 0, "failures": [], "notices": [], **more})


def group(number: int, encoding: Encoding = "msgpack", **more: Any) -> bytes:
    items = dump_list([dump_item(item(uid="u", **more), encoding)], encoding)
    facts = {"task_type": "math", "job": "j", "instance_id": 7, "timed_out": False, "policy_version": 3}
    return frame(group={"group": number, **facts, "encoding": encoding, "items": items})


END = frame(end={"items": 1, "groups": 1, "meta_info": {"finished_groups": [7]}})


def refused(status: int, code: str, message: str, where: str = "") -> web.Response:
    error = {"message": message, "code": code, "where": where}
    return web.json_response({"error": error}, status=status)


async def cut_off(request: web.Request, body: bytes = b"") -> web.StreamResponse:
    response = web.StreamResponse(headers={**MSGPACK, "content-length": "100000"})
    if body:
        await response.prepare(request)
        await response.write(body)
    assert request.transport is not None
    request.transport.close()
    return response


# -- writes


@pytest.mark.parametrize("given", [item(), [item() | {"uid": None}]])
def test_a_retried_write_is_stored_once(given: Any) -> None:
    server, statuses = Server(), iter([503, 429, 507])

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = await server.answer(request)  # stored, whatever is answered
        status = next(statuses, None)
        return answer if status is None else refused(status, "full", "no room")

    server.handler = handler
    with server.run() as url, BufferClient(url) as client:
        assert client.write(given) == (0, 1, [False])
        assert client.write([]) == (0, 0, [])
    assert len(server.uids) == 1 and len(server.calls) == 4
    assert all(call == server.calls[0] for call in server.calls)


@pytest.mark.parametrize("kind", [list, lambda numbers: array("i", numbers), numpy.array])
def test_tokens_are_sent_as_binary(kind: Any) -> None:
    server = Server()
    with server.run() as url, BufferClient(url) as client:
        tokens = {"prompt_ids": kind([1, 2]), "response_ids": kind([3]), "response_mask": kind([1])}
        assert client.write([item(**tokens, response_logprobs=[-0.5])]).stored == 1
    (sent,) = msgspec.msgpack.decode(server.calls[0][2])["items"]
    assert sent["prompt_ids"] == b"\1\0\0\0\2\0\0\0" and sent["response_mask"] == b"\1"
    assert len(sent["response_logprobs"]) == 4


def test_a_large_write_is_several_requests() -> None:
    server = Server()
    with server.run() as url, BufferClient(url) as client:
        assert client.write([item(uid=f"u{n}") for n in range(2500)]).stored == 2500
        assert client.write([item(uid=f"u{n}", text="x" * 2**22) for n in range(5)]).known == 5
        with pytest.raises(BufferClientError, match=r"^items\[1005\].reward: ") as error:
            client.write([item() for _ in range(1005)] + [item(reward="much")])
    assert len(server.calls) == 3 + 2 + 2
    assert (error.value.status, error.value.code) == (400, "invalid_item")
    assert error.value.where == "items[1005].reward"


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


# -- reads


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_a_lease(encoding: Encoding) -> None:
    tokens = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 0], "response_logprobs": None}
    server = Server(head("L/1"), group(1, encoding, **tokens), group(2), END)
    asked = {"max_groups": 2, "timeout": 5, "consumer": "me", "drop_stale": False}
    with server.run() as url:
        async with AsyncBufferClient(url) as client, await client.read(**asked) as lease:
            first, second = lease.groups
            assert lease.meta_info == {"finished_groups": [7]}
            await lease.ack()
    assert (first.id, first.task_type, first.job, first.instance_id) == (1, "math", "j", 7)
    assert (first.timed_out, first.policy_version, second.id) == (False, 3, 2)
    (read,) = first.items
    assert read["prompt_ids"] == array("i", [1]) and read["response_mask"] == array("b", [1, 0])
    assert read["response_logprobs"] is None and read["uid"] == "u"
    (_, path, sent), acked = server.calls
    assert re.fullmatch("[0-9a-f]{32}", sent.pop("read_id")) and sent == asked and path == "/v1/read"
    assert acked == ("POST", "/v1/leases/L%2F1/ack", {})


def test_a_read_that_finds_nothing() -> None:
    server = Server(head(None, failures=[{"error": "no GPU"}], notices=["all was read"]), END)
    with server.run() as url, BufferClient(url) as client, client.read() as lease:
        assert lease.id is None and lease.meta_info and lease.groups == []
        assert (lease.failures, lease.notices) == ([{"error": "no GPU"}], ["all was read"])
        lease.ack()
        with pytest.raises(ValueError, match="nothing to ack"):
            client.ack(lease.id)
    assert len(server.calls) == 1


@pytest.mark.parametrize("nack", ["taken", "refused", "lost"])
def test_a_lease_left_by_an_exception_goes_back(nack: str) -> None:
    server = Server(head("L"), group(1), END)

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("nack") and nack == "lost":
            return await cut_off(request)
        if request.path.endswith("nack") and nack == "refused":
            return refused(409, "conflict", "the lease ended")
        return await server.answer(request)

    server.handler = handler
    with server.run() as url, BufferClient(url, give_up_after=IMPATIENT_S) as client:
        with pytest.raises(ZeroDivisionError), client.read():
            raise ZeroDivisionError
        assert server.calls[-1] == ("POST", "/v1/leases/L/nack", {})
        with client.read():
            pass  # without an ack it stays for client.ack
        assert server.calls[-1][1] == "/v1/read"


@pytest.mark.parametrize("cut", [0, 2, 30, 120, None])
def test_a_read_whose_answer_is_lost_or_breaks_is_sent_again(cut: int | None) -> None:
    server = Server(head("L"), group(1), END)

    async def handler(request: web.Request) -> web.StreamResponse:
        if len(server.calls) > 1:
            return await server.answer(request)
        if cut is None:  # ends in order, but without its last frame
            return web.Response(body=head("L") + group(1), headers=MSGPACK)
        return await cut_off(request, server.body[:cut])

    server.handler = handler
    with server.run() as url, BufferClient(url) as client, client.read() as lease:
        assert lease.id == "L" and [one.id for one in lease.groups] == [1]
    assert len(server.calls) == 2 and server.calls[0] == server.calls[1]  # with one read_id


# -- refusals, patience, tokens, routes


def test_a_refusal_is_not_tried_again() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/jobs":
            return refused(404, "unknown_task_type", "no task 'x'")
        if request.path == "/v1/leases":
            raise web.HTTPFound("/login")
        return web.Response(text="<html>welcome</html>", content_type="text/html")

    server = Server()
    server.handler = handler
    with server.run() as url, BufferClient(url) as client:
        with pytest.raises(BufferClientError, match="no task 'x'") as error:
            client.start_job({"task_type": "x"})
        assert (error.value.status, error.value.code, error.value.where) == (404, "unknown_task_type", "")
        for call in (client.stats, client.read, client.leases):
            with pytest.raises(BufferClientError, match="not as a buffer answers"):
                call()
    assert len(server.calls) == 4


def test_a_client_gives_up_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    async def full(request: web.Request) -> web.StreamResponse:
        return refused(429, "buffer_full", "no room")

    server = Server()
    server.handler = full
    with server.run() as url, BufferClient(url, give_up_after=IMPATIENT_S) as client:
        with pytest.raises(BufferUnavailableError, match=rf"/v1/items: .*no room{GIVEN_UP}") as error:
            client.write(item())
        assert isinstance(error.value.__cause__, BufferClientError)
    caplog.clear()
    with BufferClient(url.replace("//", "//user:secret@"), give_up_after=IMPATIENT_S) as client:
        for _ in range(2):  # nobody listens there any more
            with pytest.raises(BufferUnavailableError, match=GIVEN_UP):
                client.stats()
    (record,) = caplog.records
    assert re.search(r"GET http://127.*/v1/stats: .*; trying again for 0.05 s", record.getMessage())
    assert record.name.startswith("rollstream") and "secret" not in record.getMessage()


def test_tokens_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    def sent(url: str, token: str | None = None) -> Any:
        with BufferClient(url, token=token) as client:
            client.stats()
        return server.headers.get("authorization")

    monkeypatch.delenv("ROLLSTREAM_BUFFER_TOKEN", raising=False)
    with server.run() as url:
        assert sent(url) is None
        monkeypatch.setenv("ROLLSTREAM_BUFFER_TOKEN", "from-environment")
        assert sent(url.removeprefix("http://")) == "Bearer from-environment"
        below = url.replace("//", "//any:a%2Fb@") + "/below/"
        assert sent(below) == "Bearer a/b" and sent(below, "given") == "Bearer given"
    assert [path for _, path, _ in server.calls] == ["/v1/stats"] * 2 + ["/below/v1/stats"] * 2
    for wrong in ("ftp://u:secret@h", "http://"):
        with pytest.raises(ValueError, match=r"no buffer's address((?!secret).)*$"):
            BufferClient(wrong)


CALLS: list[tuple[str, tuple[Any, ...], str, Any, Any]] = [
    ("known", (["a", "b"],), "/v1/uids/known", {"uids": ["a", "b"]}, {"known": [True, False]}),
    ("ack", ("L",), "/v1/leases/L/ack", {}, {"repeated": False}),
    ("nack", ("L",), "/v1/leases/L/nack", {}, {"returned": True}),
    ("extend", ("L", 5), "/v1/leases/L/extend", {"seconds": 5}, {"lease_seconds": 5}),
    ("leases", ("a b",), "/v1/leases?consumer=a+b", None, {"leases": [{"lease": "L"}]}),
    ("release", ("a/b",), "/v1/consumers/a%2Fb/release", {}, {"consumer": "a/b", "groups": 2}),
    ("start_job", ({"n": 1},), "/v1/jobs", {"n": 1}, {"id": "j"}),
    ("stop_job", ("j",), "/v1/jobs/j/stop", {}, {"id": "j"}),
    ("drop_job", ("j",), "/v1/jobs/j/drop", {}, {"job": "j", "groups": 2}),
    ("jobs", (), "/v1/jobs", None, {"jobs": [{"id": "j"}]}),
    ("dropped", (5, 7), "/v1/dropped?limit=5&after=7", None, {"dropped": [{"id": 8}]}),
    ("groups", (), "/v1/groups?limit=1000&after=0", None, {"groups": [{"id": 8}]}),
    ("group", (3,), "/v1/groups/3", None, {"group": {}, "items": [{"prompt_ids": ["of", "a", "hook"]}]}),
    ("quarantine", (), "/v1/quarantine?limit=1000&after=0", None, {"quarantined": [{"id": 8}]}),
    ("retry_quarantined", (), "/v1/quarantine/retry", {"groups": None}, {"groups": 1, "unknown": []}),
    ("drop_quarantined", ([4],), "/v1/quarantine/drop", {"groups": [4]}, {"groups": 1, "unknown": []}),
    ("stats", (), "/v1/stats", None, {"items": 1}),
]


def test_every_call_is_on_its_route() -> None:
    answers = iter([*(call[-1] for call in CALLS), {"known": [True]}, {"known": [False]}])

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(next(answers))

    server = Server()
    server.handler = handler
    with server.run() as url, BufferClient(url) as client:
        for name, given, path, body, answer in CALLS:
            result = getattr(client, name)(*given)
            assert server.calls[-1] == (
                "GET" if body is None else "POST",
                path,
                b"" if body is None else body,
            )
            assert result in (answer, *answer.values())  # a list or a number comes alone
        assert client.known(["u"] * 10_001) == [True, False]  # in two requests
    assert [len(body["uids"]) for _, _, body in server.calls[-2:]] == [10_000, 1]


async def test_against_the_buffer(tmp_path: Path) -> None:
    tokens = {"prompt_ids": [1], "response_ids": [2], "response_mask": [1], "response_logprobs": [-0.5]}
    items = [item(uid=f"u{n}", reward=n % 2, **tokens) for n in range(4)]
    consumer = "a/b é"
    async with (
        served(tmp_path / "b", token="t/k") as buffer,
        AsyncBufferClient(buffer.url, token="t/k", give_up_after=IMPATIENT_S) as client,
    ):
        assert (await client.write(items[:2])).stored == 2
        assert (await client.write(items)).results == [False, False, True, True]
        with pytest.raises(ZeroDivisionError):
            async with await client.read(consumer=consumer):
                raise ZeroDivisionError
        assert await client.leases() == []
        async with await client.read(consumer=consumer, timeout=5) as lease:
            (read,) = lease.groups
            assert read.instance_id == 7 and lease.meta_info["finished_groups"] == [7]
            assert {type(one["prompt_ids"]) for one in read.items} == {array}
            await client.extend(lease.id, 50)
            assert [one["id"] for one in await client.leases(consumer)] == [lease.id]
            await lease.ack()
        assert await client.known(["u0", "new"]) == [True, False]
        assert (await client.read()).id is None and await client.release(consumer) == 0
        assert [one["state"] for one in await client.groups(limit=5, task_type=None)] == ["delivered"]
        assert await client.jobs() == await client.dropped() == await client.quarantine() == []
        assert (await client.retry_quarantined())["groups"] == 0
        assert (await client.drop_quarantined([1]))["groups"] == 0
        for missing in (client.stop_job("r/1"), client.drop_job("r/1"), client.ack("x"), client.group(9)):
            with pytest.raises(BufferClientError) as error:
                await missing
            assert error.value.status == 404


# -- the sync client's thread


async def test_a_sync_client_works_inside_a_running_loop_and_in_many_threads() -> None:
    with Server().run() as url, BufferClient(url) as client, BufferClient(url) as other:
        assert client.write(item(uid="here")).stored == 1
        writes = [asyncio.to_thread(client.write, item(uid=f"u{n}")) for n in range(20)]
        assert sum(done.stored for done in await asyncio.gather(*writes)) == 20
        assert other.write(item(uid="here")).known == 1


@contextlib.contextmanager
def silent_reads() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A server whose reads wait; one event says that a read has come, the other one that it went away."""
    come, gone, server = threading.Event(), threading.Event(), Server()

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/read":
            come.set()
            try:
                await asyncio.Event().wait()
            finally:
                gone.set()
        return await server.answer(request)

    server.handler = handler
    with server.run() as url:
        yield url, come, gone


def test_ctrl_c_ends_a_waiting_read_and_leaves_the_client_usable() -> None:
    with silent_reads() as (url, come, gone), BufferClient(url) as client:

        def interrupt() -> None:
            assert come.wait(60)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
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


EXITS = """
import os, sys, threading
from rollstream.buffer.client import BufferClient
client = BufferClient(sys.argv[1].replace("127.0.0.1", "localhost"))
print(client.stats())
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
else:
    try:
        client.stats()
    except RuntimeError as error:
        print(error)
    with BufferClient(sys.argv[1]) as new:
        print(new.stats())
    os._exit(0)
threading.Thread(target=lambda: client.read(timeout=600), daemon=True).start()
sys.stdin.readline()
print(client.stats())
"""


def test_a_fork_and_an_exit_with_a_client_that_is_open_and_waits() -> None:
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with silent_reads() as (url, come, _):
        process = subprocess.Popen([sys.executable, "-u", "-c", EXITS, url], text=True, **pipes)
        assert come.wait(60)
        out, err = process.communicate("go\n", timeout=60)
    assert (process.returncode, err) == (0, "")
    first, forked, *others = out.splitlines()
    assert forked == "this client was closed, or made before a fork: make a new one"
    assert [first, *others] == ["{'items': 1}"] * 3
