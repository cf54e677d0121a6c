"""The HTTP layer, against a real server on loopback."""

import asyncio
import base64
import contextlib
import gzip
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from yarl import URL

from rollstream.errors import ConfigError
from rollstream.web import (
    Access,
    Handler,
    HTTPError,
    Request,
    Route,
    ServerLimits,
    WebServer,
    json_response,
    openapi,
    render_json_error,
)
from tests.support.until import PATIENCE_S, until

TOKEN = {"Authorization": "Bearer secret"}


class Point(msgspec.Struct, forbid_unknown_fields=True):
    x: int
    tags: list[str] = []


class Page(msgspec.Struct):
    after: int = 0
    limit: int = 10


async def hello(request: Request) -> Any:
    return "hello"


async def length(request: Request) -> Any:
    return len(await request.body())


ROUTES = [
    Route("GET", "/hello", hello),
    Route("GET", "/open", hello, open=True),
    Route("POST", "/length", length),
]


@asynccontextmanager
async def serving(
    routes: list[Route] = ROUTES, *, host: str = "127.0.0.1", grace_s: float = 1.0, **options: Any
) -> AsyncIterator[WebServer]:
    server = WebServer(routes, **options)
    await server.start(host, 0)
    try:
        yield server
    finally:
        await server.stop(grace_s)


@asynccontextmanager
async def asking(routes: list[Route] = ROUTES, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of such a server."""
    async with serving(routes, **options) as server, aiohttp.ClientSession(server.url) as client:
        yield client


def address(server: WebServer) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rpartition(":")[2])


class Connection:
    """A socket of a client that need not behave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, server: WebServer) -> "Connection":
        return cls(*await asyncio.open_connection(*address(server), limit=2**16))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """Of the next answer; 0 when the server has closed."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await self.reader.readline()
        except ConnectionError:
            return 0
        return int(line.split()[1]) if line else 0

    async def body(self) -> Any:
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return json.loads(await self.reader.readexactly(size))

    async def left_bytes(self) -> int:
        """How much the server sends until it closes, in time."""
        count = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while part := await self.reader.read(2**16):
                    count += len(part)
        return count

    async def closed(self) -> bool:
        """Whether the server closes in time; what it sends before is thrown away."""
        try:
            await self.left_bytes()
        except TimeoutError:
            return False
        return True


def head(
    method: str = "GET",
    path: str = "/hello",
    *,
    host: str | None = "localhost",
    version: str = "1.1",
    **more: str,
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}"]
    if host is not None:
        lines.append(f"Host: {host}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def ask(server: WebServer, *parts: bytes) -> int:
    """The status of the answer to these bytes."""
    connection = await Connection.to(server)
    for part in parts:
        await connection.send(part)
    status = await connection.status()
    connection.writer.close()
    return status


# -- routes


async def test_routes_by_path_and_method() -> None:
    async def named(request: Request) -> Any:
        return dict(request.params)

    routes = [
        Route("GET", "/groups", named),
        Route("POST", "/groups", named),
        Route("GET", "/groups/{id}", named),
        Route("POST", "/groups/{id}/drop", named),
        Route("GET", "/models/{name...}", named),
    ]
    async with asking(routes) as client:
        for method, path, status, params in [
            ("GET", "/groups", 200, {}),
            ("GET", "/groups?after=3", 200, {}),
            ("HEAD", "/groups", 200, None),
            ("GET", "/groups/a%2Fb", 200, {"id": "a/b"}),
            ("POST", "/groups/7/drop", 200, {"id": "7"}),
            ("GET", "/models/org/model", 200, {"name": "org/model"}),
            ("GET", "/groups/", 404, None),
            ("GET", "/groups/7/drop/more", 404, None),
            ("GET", "/elsewhere", 404, None),
        ]:
            async with client.request(method, URL(path, encoded=True)) as answer:
                assert answer.status == status, path
                if params is not None:
                    assert await answer.json() == params
        async with client.delete("/groups") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, POST")
            assert (await answer.json())["error"]["code"] == "method_not_allowed"


async def test_bodies_and_queries_are_typed() -> None:
    async def point(request: Request) -> Any:
        return [await request.json(Point), request.arguments(Page)]

    async with asking([Route("POST", "/point", point)]) as client:
        async with client.post("/point?limit=3", json={"x": 1}) as answer:
            assert await answer.json() == [{"x": 1, "tags": []}, {"after": 0, "limit": 3}]
        for path, body, where in [
            ("/point", b'{"x": 1, "tags": ["a", 2]}', "tags[1]"),
            ("/point", b'{"x": 1, "y": 2}', "y"),
            ("/point", b"", "x"),
            ("/point", b'{"x": 1', ""),
            ("/point", b"[" * 100_000, ""),
            ("/point", b'{"x": 1, "tags": ["\xff"]}', ""),
            ("/point?limit=many", b'{"x": 1}', "limit"),
        ]:
            async with client.post(path, data=body) as answer:
                assert answer.status == 400, body
                assert (await answer.json())["error"]["where"] == where, body


async def test_errors_of_handlers(caplog: pytest.LogCaptureFixture) -> None:
    errors = {"known": KeyError("k"), "refused": HTTPError(409, "no", "conflict"), "bug": ValueError("v")}

    async def fail(request: Request) -> web.Response:
        raise errors[request.params["how"]]

    seen: list[tuple[str, int]] = []
    async with asking(
        [Route("GET", "/fail/{how}", fail)],
        translate=lambda error: HTTPError(404, "not there") if isinstance(error, KeyError) else None,
        render_error=lambda request, error: web.json_response([error.code], status=error.status),
        on_answer=lambda route, status, seconds: seen.append((route.path if route else "unknown", status)),
    ) as client:
        wanted = [("known", 404, "bad_request"), ("refused", 409, "conflict"), ("bug", 500, "internal")]
        for how, status, code in wanted:
            async with client.get(f"/fail/{how}") as answer:
                assert (answer.status, await answer.json()) == (status, [code])
        async with client.get("/elsewhere"):
            pass
    assert seen == [("/fail/{how}", 404), ("/fail/{how}", 409), ("/fail/{how}", 500), ("unknown", 404)]
    assert "ValueError: v" in caplog.text


async def test_an_answer_that_fails_midway_breaks_off() -> None:
    async def half(request: Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request.raw)
        await answer.write(b"half")
        raise ValueError

    async with asking([Route("GET", "/half", half)]) as client, client.get("/half") as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


# -- access


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        ("Bearer secret", 200),
        ("bearer  secret", 200),
        ("Basic " + base64.b64encode(b"any:secret").decode(), 200),
        ("Basic " + base64.b64encode(b"secret").decode(), 401),
        ("Basic ===", 401),
        ("Bearer secre\xe9", 401),
        ("secret", 401),
        ("Bearer", 401),
    ],
)
async def test_token(shown: str, status: int) -> None:
    async with serving(access=Access(token="secret")) as server:
        assert await ask(server, head(Authorization=shown)) == status


async def test_open_routes_need_no_token() -> None:
    async with serving(access=Access(token="secret")) as server:
        assert await ask(server, head(path="/open")) == 200
        assert await ask(server, head(path="/hello")) == 401
        assert await ask(server, head(path="/elsewhere")) == 401


async def test_token_is_checked_before_the_body_comes() -> None:
    async with serving(access=Access(token="secret")) as server:
        assert await ask(server, head("POST", "/length", Content_Length="1000000")) == 401


async def test_limited_tokens() -> None:
    async def who(request: Request) -> Any:
        return [request.token_of, request.shown_token]

    routes = [Route("POST", "/write", who, limited=True), Route("POST", "/read", who)]
    async with asking(routes, access=Access(token="secret", whose={"job": "7"}.get)) as client:
        for path, token, status, answered in (
            ("/write", "job", 200, ["7", False]),
            ("/read", "job", 403, None),
            ("/read", "secret", 200, [None, True]),
        ):
            async with client.post(path, headers={"Authorization": f"Bearer {token}"}) as answer:
                assert answer.status == status
                assert answered is None or await answer.json() == answered


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("127.0.0.1:1", 200),
        ("127.9.9.9", 200),
        ("[::1]:80", 200),
        ("lab.example", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.7", 403),
        ("", 403),
        ("[", 403),
        (None, 400),
    ],
)
async def test_foreign_host_is_refused(host: str | None, status: int) -> None:
    async with serving(access=Access(allowed_hosts=frozenset({"Lab.example"}))) as server:
        assert await ask(server, head(host=host)) == status
        assert await ask(server, head(host=host)) == status


async def test_host_beyond_loopback() -> None:
    async with serving(host="0.0.0.0", access=Access(token="secret")) as server:
        assert await ask(server, head(path="/open", host="10.0.0.7:80")) == 200
        assert await ask(server, head(path="/open", host="evil.example")) == 403
        assert await ask(server, head(path="/open", host="node.example", **TOKEN)) == 200
        assert await ask(server, head(path="/open", host="node.example")) == 403


async def test_no_host_in_http_1_0() -> None:
    async with serving() as server:
        assert await ask(server, head(host=None, version="1.0")) == 200
        assert await ask(server, head(host=None, version="1.0", Origin="http://localhost")) == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://localhost:7"}, 200),
        ({"Origin": "https://localhost:7"}, 200),
        ({"Origin": "http://localhost:7", "Sec_Fetch_Site": "same-origin"}, 200),
        ({"Sec_Fetch_Site": "none"}, 200),
        ({"Origin": "http://localhost:8"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
    ],
)
async def test_foreign_origin_is_refused(headers: dict[str, str], status: int) -> None:
    async with serving(access=Access(token="secret")) as server:
        assert await ask(server, head(host="localhost:7", **TOKEN, **headers)) == status


@pytest.mark.parametrize(
    ("path", "to", "status"), [("/open", "document", 200), ("/open", "iframe", 403), ("/", "document", 403)]
)
async def test_a_link_of_another_site_leads_to_open_pages(path: str, to: str, status: int) -> None:
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": to}
    async with serving(access=Access(token="secret")) as server:
        assert await ask(server, head(path=path, host="localhost:7", **TOKEN, **link)) == status


async def test_addresses_that_cannot_be_used() -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match="cannot listen"):
            await WebServer([]).start(*address(server))
    for host, port in [("127.0.0.1", 65536), ("nowhere.invalid", 0), ("a..b", 0)]:
        with pytest.raises(ConfigError, match="cannot listen"):
            await WebServer([]).start(host, port)


async def test_no_token_beyond_loopback_is_refused() -> None:
    with pytest.raises(ConfigError, match="set a token"):
        await WebServer([]).start("0.0.0.0", 0)
    async with serving(host="0.0.0.0", access=Access(insecure=True)) as server:
        assert await ask(server, head()) == 200


# -- limits


@pytest.mark.parametrize(
    "request_head",
    [
        head(X_Long="x" * 5000),
        head(path="/" + "x" * 5000),
        head(**{f"X-{n}": "x" for n in range(70)}),
    ],
)
async def test_too_large_heads_are_refused(request_head: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(limits=ServerLimits(max_head_field=4096)) as server:
        connection = await Connection.to(server)
        await connection.send(request_head)
        assert await connection.status() == 400
        assert (await connection.body())["error"]["code"] == "bad_request"
        assert await connection.closed()
    assert "Traceback" not in caplog.text


async def test_half_a_head_does_not_stay() -> None:
    async with serving(limits=ServerLimits(keep_alive_seconds=0.1)) as server:
        for sent in (b"", b"GET /hel", head() + b"GET /hel"):
            connection = await Connection.to(server)
            await connection.send(sent)
            assert await connection.closed()


async def test_too_large_bodies_are_refused() -> None:
    async with serving(limits=ServerLimits(max_body=1000)) as server:
        assert await ask(server, head("POST", "/length", Content_Length="1001")) == 413
        assert await ask(server, head("POST", "/length", Content_Length="1001") + b"x" * 1001) == 413
        chunked = head("POST", "/length", Transfer_Encoding="chunked")
        part = b"1f4\r\n" + b"x" * 500 + b"\r\n"
        assert await ask(server, chunked, part, part, b"0\r\n\r\n") == 200
        assert await ask(server, chunked, part, part, part) == 413
        assert server.bodies.bytes == 0


async def test_compressed_bodies_are_refused_unread() -> None:
    async with serving(access=Access(token="secret")) as server:
        zeros = gzip.compress(bytes(10**8))
        for encoding, shown, status in (
            ("gzip", TOKEN, 415),
            ("Deflate", TOKEN, 415),
            ("gzip", {}, 401),
            ("Identity", TOKEN, 200),
        ):
            more = {"Content_Length": str(len(zeros)), "Content_Encoding": encoding, **shown}
            connection = await Connection.to(server)
            await connection.send(head("POST", "/length", **more))
            if status == 200:
                await connection.send(zeros)
            assert await connection.status() == status
            if status == 200:
                assert await connection.body() == len(zeros)
            else:
                await connection.send(zeros)
                assert await connection.closed()
        assert server.bodies.bytes == 0


async def test_what_comes_after_a_broken_head_is_dropped() -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> web.Response:
        began.set()
        await go_on.wait()
        return json_response("done")

    async with serving([Route("GET", "/hello", wait)]) as server:
        connection = await Connection.to(server)
        await connection.send(head())
        await began.wait()
        tracemalloc.start()
        for _ in range(100):
            await connection.send(b"x" * 10_000)
            await asyncio.sleep(0.001)
        assert tracemalloc.get_traced_memory()[0] < 300_000
        tracemalloc.stop()
        go_on.set()
        assert await connection.status() == 200
        assert await connection.body() == "done"
        assert await connection.status() == 400


async def test_bodies_share_a_budget() -> None:
    async with serving(
        limits=ServerLimits(bodies_in_flight=1000, client_share=1.0, small=0, still_seconds=60)
    ) as server:
        first = await Connection.to(server)
        await first.send(head("POST", "/length", Content_Length="900") + b"x" * 800)
        await until(lambda: server.bodies.bytes == 800)
        refused = await Connection.to(server)
        await refused.send(head("POST", "/length", Content_Length="300") + b"x" * 300)
        assert await refused.status() == 503
        assert b"retry-after" in (await refused.reader.readuntil(b"\r\n\r\n")).lower()
        await first.send(b"x" * 100)
        assert await first.status() == 200
        assert await ask(server, head("POST", "/length", Content_Length="300") + b"x" * 300) == 200
        assert server.bodies.bytes == 0


async def test_small_bodies_get_through_always() -> None:
    limits = ServerLimits(bodies_in_flight=1000, client_share=1.0, small=400, still_seconds=60)
    async with serving(limits=limits) as server:
        full = [await Connection.to(server) for _ in range(2)]
        for connection in full:
            await connection.send(head("POST", "/length", Content_Length="2000") + b"x" * 900)
        await until(lambda: server.bodies.bytes == 1000)
        for size, status in (400, 200), (1500, 503), (400, 200):
            whole = head("POST", "/length", Content_Length=str(size)) + b"x" * size
            assert await ask(server, whole) == status


async def test_unfinished_bodies_give_way() -> None:
    """Two of them, of which a byte came now and then, kept everybody out for ever."""
    limits = ServerLimits(bodies_in_flight=1000, client_share=1.0, small=0, still_seconds=0.1)
    async with serving(limits=limits) as server:
        slow = [await Connection.to(server) for _ in range(2)]
        for connection in slow:
            await connection.send(head("POST", "/length", Content_Length="900") + b"x" * 499)
        await until(lambda: server.bodies.bytes == 998)
        async with asyncio.timeout(PATIENCE_S):
            while await ask(server, head("POST", "/length", Content_Length="300") + b"x" * 300) != 200:
                for connection in slow:
                    await connection.send(b"x")
        assert await slow[0].status() == 503  # the other one need not go, and may still do
        assert server.bodies.bytes < 600


async def test_a_client_has_a_share() -> None:
    async def of_session(request: Request) -> Any:
        request.client = request.params["session"]
        return len(await request.body())

    routes = [Route("POST", "/{session}", of_session)]
    limits = ServerLimits(bodies_in_flight=1000, client_share=0.5, small=0, still_seconds=60)
    async with serving(routes, limits=limits) as server:
        first = await Connection.to(server)
        await first.send(head("POST", "/a", Content_Length="500") + b"x" * 400)
        await until(lambda: server.bodies.bytes == 400)
        for session, status in ("a", 503), ("b", 200), ("c", 200):
            whole = head("POST", f"/{session}", Content_Length="300") + b"x" * 300
            assert await ask(server, whole) == status


async def test_long_bodies_are_read_one_at_a_time_for_each_client() -> None:
    """In threads: who asks for something else is answered meanwhile."""
    reading: Counter[str] = Counter()
    most: Counter[str] = Counter()
    go_on = threading.Event()

    async def read(request: Request) -> Any:
        request.client = request.params["session"]
        await request.body()

        def work() -> int:
            reading[request.client] += 1
            most[request.client] = max(most[request.client], reading[request.client])
            go_on.wait(PATIENCE_S)
            reading[request.client] -= 1
            return threading.get_ident()

        return await request.in_thread(work)

    async with serving([*ROUTES, Route("POST", "/{session}", read)]) as server:
        long = b"x" * 2**19
        whole = {name: head("POST", f"/{name}", Content_Length=str(len(long))) + long for name in "ab"}
        asked = [asyncio.create_task(ask(server, whole[name])) for name in "aaab"]
        await until(lambda: reading == {"a": 1, "b": 1})
        assert await ask(server, head()) == 200
        go_on.set()
        assert await asyncio.gather(*asked) == [200] * 4
        assert most == {"a": 1, "b": 1}
        short = await Connection.to(server)
        await short.send(head("POST", "/a", Content_Length="1") + b"x")
        assert await short.status() == 200
        assert await short.body() == threading.get_ident()


async def test_a_body_that_stops_coming() -> None:
    async with serving(limits=ServerLimits(body_idle_seconds=0.1)) as server:
        assert await ask(server, head("POST", "/length", Content_Length="10") + b"x") == 408
        assert server.bodies.bytes == 0


async def test_a_client_that_goes_away_with_half_a_body(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(limits=ServerLimits(small=0)) as server:
        connection = await Connection.to(server)
        await connection.send(head("POST", "/length", Content_Length="10") + b"x")
        await until(lambda: server.bodies.bytes == 1)
        connection.writer.transport.abort()
        await until(lambda: server.bodies.bytes == 0)
    assert not caplog.records


async def test_expect_continue() -> None:
    async with serving(limits=ServerLimits(max_body=100)) as server:
        connection = await Connection.to(server)
        await connection.send(head("POST", "/length", Content_Length="3", Expect="100-continue"))
        assert await connection.status() == 100
        await connection.reader.readline()
        await connection.send(b"abc")
        assert await connection.status() == 200
        assert await ask(server, head("POST", "/length", Content_Length="101", Expect="100-continue")) == 413


async def test_bodies_that_are_no_http() -> None:
    async with serving() as server:
        chunked = head("POST", "/length", Transfer_Encoding="chunked")
        assert await ask(server, chunked, b"zz\r\n") == 400


async def test_connections_are_capped() -> None:
    """Those that ask for nothing make room: they kept everybody out before a token was asked for."""
    go_on = asyncio.Event()

    async def wait(request: Request) -> str:
        await go_on.wait()
        return "done"

    routes = [*ROUTES, Route("GET", "/wait", wait)]
    async with serving(routes, limits=ServerLimits(max_connections=2)) as server:
        idle = [await Connection.to(server) for _ in range(5)]
        await idle[-1].send(b"GET /hel")
        assert await ask(server, head()) == 200
        for connection in idle[:4]:
            assert await connection.closed()
        busy = [await Connection.to(server) for _ in range(2)]
        for connection in busy:
            await connection.send(head(path="/wait"))
        third = await Connection.to(server)
        assert await third.closed()
        go_on.set()
        assert [await connection.status() for connection in busy] == [200, 200]
        await eventually_answered(server)


async def eventually_answered(server: WebServer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await ask(server, head()) != 200:
            await asyncio.sleep(0.005)


async def test_answers_that_nobody_reads_are_cut_off() -> None:
    async def endless(request: Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request.raw)
        while True:
            await answer.write(b"x" * 2**16)

    async def large(request: Request) -> web.Response:
        return web.Response(body=b"x" * 2**25)

    routes = [*ROUTES, Route("GET", "/endless", endless), Route("GET", "/large", large)]
    async with serving(routes, limits=ServerLimits(answer_idle_seconds=0.2, max_connections=1)) as server:
        for request in (head(path="/endless"), head(path="/large"), head(path="/large", Connection="close")):
            while True:
                unread = await Connection.to(server)
                await unread.send(request)
                if await unread.status() == 200:
                    break
            await eventually_answered(server)  # there is room for one connection
            assert await unread.left_bytes() < 2**25
            unread.writer.close()


@pytest.mark.parametrize("gives_way", [False, True])
async def test_answers_that_nobody_reads_share_a_budget(gives_way: bool) -> None:
    """Sixty connections that asked for 30 MB each and read nothing took gigabytes."""

    async def large(request: Request) -> web.Response:
        return web.Response(body=bytes(2**23))

    limits = ServerLimits(
        answers_in_flight=3 * 2**23, client_share=1.0, still_seconds=0.0 if gives_way else 60.0
    )
    async with serving([*ROUTES, Route("GET", "/large", large)], limits=limits) as server:
        unread = [await Connection.to(server) for _ in range(6)]
        for connection in unread:
            await connection.send(head(path="/large"))
        statuses = sorted([await connection.status() for connection in unread])
        assert statuses == [200] * 6 if gives_way else [200] * 3 + [503] * 3
        assert server.answers.bytes == 3 * 2**23
        assert await ask(server, head()) == 200
        assert await ask(server, head("HEAD", "/large")) == 200
        for connection in unread:
            connection.writer.transport.abort()
        await until(lambda: server.answers.bytes == 0)


async def test_slow_readers_get_their_answer() -> None:
    """All of it takes longer than a reader may stand still; each part comes well within that."""

    async def large(request: Request) -> web.Response:
        return web.Response(body=b"x" * 2**25)

    async with serving(
        [Route("GET", "/large", large)], limits=ServerLimits(answer_idle_seconds=3.0)
    ) as server:
        connection = await Connection.to(server)
        await connection.send(head(path="/large"))
        for _ in range(16):
            await asyncio.sleep(0.2)
            await connection.reader.readexactly(2**21)


# -- the end


async def stop_while(handler: Handler, *, grace_s: float, started: asyncio.Event) -> int:
    """Status of a request in flight when its server stops."""
    server = WebServer([Route("GET", "/hello", handler)])
    await server.start()
    idle, busy = await Connection.to(server), await Connection.to(server)
    await busy.send(head())
    await started.wait()
    async with asyncio.timeout(PATIENCE_S):
        await server.stop(grace_s)
    assert await idle.closed()
    with pytest.raises(OSError):
        await Connection.to(server)
    return await busy.status()


async def test_stop_lets_requests_finish() -> None:
    started = asyncio.Event()

    async def short(request: Request) -> Any:
        started.set()
        await asyncio.sleep(0.1)

    assert await stop_while(short, grace_s=10, started=started) == 200


@pytest.mark.parametrize("stubborn", [False, True])
async def test_stop_cancels_what_hangs_and_returns_whatever_it_does(
    stubborn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    started, cancelled, free = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hang(request: Request) -> Any:
        started.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                cancelled.set()
                if not stubborn:
                    raise

    assert await stop_while(hang, grace_s=0.1, started=started) == 0
    assert cancelled.is_set() and ("do not end" in caplog.text) == stubborn
    free.set()


async def test_stop_with_an_answer_that_nobody_reads() -> None:
    async def large(request: Request) -> web.Response:
        return web.Response(body=b"x" * 2**25)

    server = WebServer([Route("GET", "/large", large)])
    await server.start()
    connection = await Connection.to(server)
    await connection.send(head(path="/large"))
    assert await connection.status() == 200
    async with asyncio.timeout(PATIENCE_S):
        await server.stop(0.1)
        await server.stop(0.1)


@pytest.mark.parametrize("cancel_when_gone", [True, False])
async def test_a_client_that_goes_away_cancels_its_handler_where_asked_for(cancel_when_gone: bool) -> None:
    started, ends = asyncio.Event(), []

    async def wait(request: Request) -> web.Response:
        started.set()
        try:
            await (asyncio.Event().wait() if cancel_when_gone else until(lambda: request.gone))
            ends.append("gone")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return json_response("done")

    route = Route("GET", "/hello", wait, cancel_when_gone=cancel_when_gone)
    async with serving([route]) as server:
        connection = await Connection.to(server)
        await connection.send(head())
        await started.wait()
        connection.writer.close()
        await until(lambda: ends)
    assert ends == ["cancelled" if cancel_when_gone else "gone"]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as server:
        connection = await Connection.to(server)
        await connection.send(
            b"".join(head("POST", "/length", Content_Length=str(n)) + b"x" * n for n in range(50))
        )
        for n in range(50):
            assert await connection.status() == 200
            assert await connection.body() == n


# -- OpenAPI


def test_openapi() -> None:
    document = openapi(
        [
            Route("POST", "/points/{id}", hello, body=Point, answer=Page, summary="Adds a point."),
            Route("GET", "/points/{rest...}", hello, query=Page, open=True),
        ],
        "points",
        "1.0",
    )
    json.dumps(document)
    added = document["paths"]["/points/{id}"]["post"]
    assert added["summary"] == "Adds a point."
    assert [parameter["name"] for parameter in added["parameters"]] == ["id"]
    assert added["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Point"
    }
    assert added["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Page"
    }
    listed = document["paths"]["/points/{rest}"]["get"]
    assert [(p["name"], p["in"], p["required"]) for p in listed["parameters"]] == [
        ("rest", "path", True),
        ("after", "query", False),
        ("limit", "query", False),
    ]
    assert listed["security"] == []
    schemas = document["components"]["schemas"]
    assert schemas["Point"]["required"] == ["x"]
    assert {"Point", "Page", "ErrorBody"} <= set(schemas)


def test_rendered_errors_are_as_documented() -> None:
    answer = render_json_error(None, HTTPError(400, "no", where="x"))  # type: ignore[arg-type]
    assert json.loads(answer.body) == {"error": {"message": "no", "code": "bad_request", "where": "x"}}  # type: ignore[arg-type]
