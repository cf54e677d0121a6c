"""Our HTTP layer: a table of routes over aiohttp's low-level server, with the checks that every server needs.

    connection ──> one too many? ──> head ──> Host, token, Origin, encoding, route ──> body ──> handler ──> answer
                   idle one closed   bounded  400 403  401    403     415    404 405   413 408 503   503, cut if unread

A request is refused before its body is read wherever that is possible. Bodies share a budget of bytes, and large
answers another one (`_Budget`). One task checks all connections now and then and cuts off those whose client does
not read its answer; aiohttp itself closes connections that are idle or stay in the middle of a head.
"""

import asyncio
import base64
import functools
import hmac
import io
import ipaddress
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec
from aiohttp import hdrs, web
from aiohttp.web_protocol import _ErrInfo
from multidict import CIMultiDictProxy

from rollstream.aio import finish_despite_cancellation
from rollstream.errors import ConfigError, RollstreamError
from rollstream.surrogates import decode_json

_LOG = logging.getLogger(__name__)

_PLACE = re.compile(r"(?:field `(\w+)`)?(?: - at `(?:key in )?\$\.?([^`]*)`)?$")
"""The end of msgspec's messages: the field that is unknown or missing, and the path to its object."""

_LINGER_S = 5.0
"""How long the rest of a refused body is received and thrown away: a socket that is closed with bytes unread
is reset, and the client may see that in place of the answer."""

_READ_BUFFER = 2**16
"""Bytes of a body that aiohttp keeps before anybody reads it, about; a connection may have 32 such bodies."""

_PART = 2**18
"""Bytes of a large answer that are written at once, and of a body or an answer by which it has moved."""

_LONG_BODY = 2**18
"""Bytes of a body from which on Python may take a tenth of a second to read what is in it."""

_READERS = 2
"""Threads that read long bodies: they share Python's lock with the event loop."""

_GONE = 499
"""nginx's status for requests whose client went away."""

_STOP_LOOK_S = 0.01

_CANCEL_S = 0.5
"""For cancelled handlers to end, when the server stops."""

T = TypeVar("T")


class HTTPError(RollstreamError):
    """A request is refused.

    Args:
        status: of HTTP.
        message: what is wrong and what to do.
        code: one word for programs.
        where: the field or parameter that is wrong.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "bad_request",
        where: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.where, self.headers = status, code, where, dict(headers or {})


@dataclass(frozen=True)
class Route:
    """A route and its handler.

    `path` may have segments `{name}`, which take one segment each, and end with `{name...}`, which takes the
    rest, slashes included. HEAD is answered where GET is. `body`, `query` and `answer` are for `openapi`.
    """

    method: str
    path: str
    handler: "Handler"
    body: type | None = None
    query: type | None = None
    answer: type | None = None
    summary: str = ""
    open: bool = False
    """Needs no token."""
    limited: bool = False
    """Limited tokens may use it, too."""
    cancel_when_gone: bool = False
    """Cancels the handler when the client goes away."""


@dataclass(frozen=True)
class Access:
    """Who may send requests."""

    token: str | None = None
    """The bearer token, or password of HTTP Basic; None asks for none."""
    whose: Callable[[str], str | None] | None = None
    """Says whose a limited token is; None: it is none."""
    allowed_hosts: frozenset[str] = frozenset()
    """Further names of this server, as clients write them in a URL, without a port."""
    insecure: bool = False
    """Listens beyond loopback also without a token."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of what clients can make the server hold."""

    max_body: int = 64 * 2**20
    """Bytes of one body."""
    bodies_in_flight: int = 256 * 2**20
    """Bytes of all bodies whose requests are not answered yet."""
    answers_in_flight: int = 256 * 2**20
    """Bytes of all answers that clients have not read yet, but for streams."""
    client_share: float = 0.75
    """The part of either that a client may take."""
    small: int = 2**16
    """Bytes of a body, and of an answer, that are not counted: connections bound them, and they get through always."""
    max_connections: int = 1024
    still_seconds: float = 1.0
    """A body or an answer that has not moved for longer gives way where there is no room."""
    body_idle_seconds: float = 60.0
    """Seconds without one more byte of a body."""
    answer_idle_seconds: float = 60.0
    """Seconds without the client taking one more byte of its answer."""
    keep_alive_seconds: float = 75.0
    """Seconds for an idle connection, and for a head to be complete."""
    max_head_field: int = 8190
    """Bytes of the request line, and of one header."""
    max_headers: int = 64
    backlog: int = 1024
    """Connections that wait to be accepted: rollouts come in waves of hundreds."""


class Request:
    """A request that is being answered.

    Attributes:
        raw: aiohttp's, for a streamed answer.
        client: whose share of the budgets it takes: that of its address, unless a handler knows better.
        params: what the path's `{name}` segments stand for.
        shown_token: the server's token came with it.
        token_of: whose limited token came with it.
        replaced_surrogates: lone surrogates of its body, once `decode` has read it.
    """

    def __init__(self, raw: web.BaseRequest, server: "WebServer") -> None:
        self.raw = raw
        self.headers: CIMultiDictProxy[str] = raw.headers
        self.method = raw.method
        self.path = raw.path
        self.params: Mapping[str, str] = {}
        self.shown_token = False
        self.token_of: str | None = None
        self.replaced_surrogates = 0
        self.client = raw.remote or ""
        self._server = server
        self._held: _Held | None = None
        self._length = 0

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters; the last of one that is given twice."""
        return dict(self.raw.query.items())

    @property
    def media_type(self) -> str:
        """The body's, in lower case and without parameters; empty if not given."""
        return self.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()

    @property
    def gone(self) -> bool:
        """Whether the client went away."""
        transport = self.raw.transport
        return transport is None or transport.is_closing()

    async def body(self, most: int | None = None) -> bytes:
        """The whole body, to be asked for once. Its bytes are in the budget until the request is answered.

        Args:
            most: Bytes that it may have, where that is less than what the server takes.

        Raises:
            HTTPError: 413 it is too large; 408 it stops coming; 503 other bodies take all the room.
        """
        raw, server, limits = self.raw, self._server, self._server.limits
        most = min(most or limits.max_body, limits.max_body)
        if (raw.content_length or 0) > most:
            raise _too_large(most)
        if self.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await raw.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            raw.writer.output_size = 0  # the answer has not begun
        body = io.BytesIO()  # grows in place: joining parts would take the memory twice
        held = self._held = _Held(self.client)
        while not raw.content.at_eof():
            try:
                async with asyncio.timeout(limits.body_idle_seconds) as patience:
                    held.give_way = functools.partial(patience.reschedule, 0.0)
                    part = await raw.content.readany()
            except TimeoutError:
                if held.gave_way:
                    raise _busy() from None
                text = f"no byte came for {limits.body_idle_seconds:g} s, and the body is not complete"
                raise HTTPError(408, text, "timeout") from None
            self._length += len(part)
            if self._length > most:
                raise _too_large(most)
            server.bodies.take(held, min(len(part), self._length - limits.small))
            server.bodies.move(held, len(part))
            body.write(part)
        server.bodies.keep(held)
        return body.getvalue()

    async def in_thread(self, read: Callable[[], T]) -> T:
        """Reads what is in the body; a long one in a thread, one at a time for each client."""
        if self._length < _LONG_BODY:
            return read()
        lock = self._server.reading.setdefault(self.client, asyncio.Lock())
        async with lock:
            reading = asyncio.get_running_loop().run_in_executor(self._server.readers, read)
            return await finish_despite_cancellation(reading)

    async def json(self, kind: type[T], most: int | None = None) -> T:
        """The body as a value of `kind`; an empty body counts as `{}`.

        It is not decoded in a thread: the decoder is quick, and keeps Python's lock meanwhile.

        Raises:
            HTTPError: 400 it cannot be one, with the place; and as `body`.
        """
        body = await self.body(most) or b"{}"
        try:
            return cast(T, self.decode(body, _decoder(cast(Any, kind)).decode))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _unreadable("the body", error) from error

    def decode(self, body: bytes, decoder: Callable[[bytes], T]) -> T:
        """Decodes the body as `surrogates.decode_json` does, and counts what was replaced."""
        value, replaced = decode_json(body, decoder)
        self.count_surrogates(replaced)
        return value

    def count_surrogates(self, number: int) -> None:
        """Counts lone surrogates of the body that became U+FFFD."""
        self.replaced_surrogates += number
        self._server.replaced_surrogates += number

    @property
    def replaced_surrogates_in_all(self) -> int:
        """Lone surrogates replaced in all bodies so far."""
        return self._server.replaced_surrogates

    def arguments(self, kind: type[T]) -> T:
        """The query's parameters as a struct.

        Raises:
            HTTPError: 400 they cannot be one.
        """
        try:
            return msgspec.convert(self.query, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _unreadable("the query", error) from error

    def release(self) -> None:
        """Gives the body's bytes back to the budget; for handlers that go on without it."""
        if self._held is not None:
            self._server.bodies.release(self._held)

    def cut_off(self) -> ConnectionResetError:
        """Ends the connection: its answer has begun and cannot be finished. The error is to be raised."""
        if self.raw.transport is not None:
            self.raw.transport.abort()
        return ConnectionResetError()


Handler = Callable[[Request], Awaitable[Any]]
"""Gives a response, or a value that is sent as JSON."""
Translate = Callable[[Exception], HTTPError | None]
RenderError = Callable[[web.BaseRequest, HTTPError], web.Response]
OnAnswer = Callable[[Route | None, int, float], None]


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A value as JSON."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json"
    )


class ErrorDetail(msgspec.Struct):
    """Says what is wrong, with a word for programs, and the field that is wrong."""

    message: str
    code: str
    where: str


class ErrorBody(msgspec.Struct):
    """The body of a refusal, as `render_json_error` writes it."""

    error: ErrorDetail


def render_json_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
    """The error as an `ErrorBody`."""
    return json_response(
        ErrorBody(ErrorDetail(str(error), error.code, error.where)), error.status, error.headers
    )


@functools.lru_cache(maxsize=256)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _unreadable(what: str, error: Exception) -> HTTPError:
    place = _PLACE.search(str(error))
    assert place is not None
    where = ".".join(part for part in (place[2], place[1]) if part)
    return HTTPError(400, f"{what} cannot be read: {error}", where=where)


def _too_large(most: int) -> HTTPError:
    return HTTPError(413, f"the body is larger than {most} bytes: send less at once", "too_large")


def _busy() -> HTTPError:
    text = "other requests take all the room for bodies and answers: try again"
    return HTTPError(503, text, "busy", headers={"retry-after": "1"})


@dataclass(eq=False, slots=True)
class _Held:
    """Bytes that a request makes the server hold."""

    client: str
    give_way: Callable[[], None] = lambda: None
    """Ends the request."""
    gave_way: bool = False
    bytes: int = 0
    moved: int = 0
    """Bytes since `moved_at`."""
    moved_at: float = field(default_factory=time.monotonic)


class _Budget:
    """Bytes that requests make the server hold: at most `most`, and those of one client at most `share`.

    Where there is no room for more, a request that stands still gives way, the one that has for longest first:
    nobody keeps others out who neither sends his body nor reads his answer. If all move, the new one is refused.
    """

    def __init__(self, most: int, share: int, still_s: float) -> None:
        self.bytes = 0
        self._most, self._share, self._still_s = most, share, still_s
        self._of: Counter[str] = Counter()
        self._moving: dict[_Held, None] = {}
        """Requests that may give way, by when they moved last."""

    def take(self, held: _Held, number: int) -> None:
        """Counts so many bytes more, if they are any. Raises `HTTPError` where there is no room."""
        if held.gave_way:
            raise _busy()
        if number <= 0:
            return
        self._add(held, number)
        self._moving.setdefault(held)
        while short := self._is_short(held):
            others = (one for one in self._moving if short == "all" or one.client == held.client)
            slowest = next(others, held)
            if slowest is held or time.monotonic() - slowest.moved_at < self._still_s:
                raise _busy()
            slowest.gave_way = True
            self.release(slowest)
            slowest.give_way()

    def _is_short(self, held: _Held) -> str:
        """The room that is short: `all`, `client` or none. A body larger than the room for all has it alone."""
        if self.bytes > max(self._most, held.bytes):
            return "all"
        return "client" if self._of[held.client] > max(self._share, held.bytes) else ""

    def move(self, held: _Held, number: int) -> None:
        """Notes that so many bytes were received or sent."""
        held.moved += number
        if held.moved >= _PART:
            held.moved, held.moved_at = 0, time.monotonic()
            if held in self._moving:
                del self._moving[held]
                self._moving[held] = None

    def keep(self, held: _Held) -> None:
        """It has moved, and does not give way any more."""
        self._moving.pop(held, None)

    def release(self, held: _Held) -> None:
        """Gives its bytes back."""
        self.keep(held)
        self._add(held, -held.bytes)

    def _add(self, held: _Held, number: int) -> None:
        if number:
            held.bytes += number
            self.bytes += number
            self._of[held.client] += number
            if not self._of[held.client]:
                del self._of[held.client]


def weights_below(folders: Iterable[Path], named: str) -> Path:
    """The folder that a client names for an engine's weights, with links resolved.

    Raises:
        HTTPError: 403 it is not below one of `folders`; 400 it is not there.
    """
    try:
        path = Path(named).resolve()
        # What comes behind a loop of links is left as it was: `loop/../link` would still be a link.
        allowed = path.resolve() == path and any(path.is_relative_to(one.resolve()) for one in folders)
    except ValueError:  # NUL
        allowed = False
    if not allowed:
        text = "weights are taken from below the folders that the server was started with (--weights DIR)"
        raise HTTPError(403, f"{named}: {text}", "forbidden", "model_path")
    if not path.is_dir():
        raise HTTPError(400, f"there is no folder {path} here", where="model_path")
    return path


class WebServer:
    """Answers requests by a table of routes.

    Args:
        routes: what is answered.
        access: who may send requests.
        limits: what clients can make the server hold.
        translate: errors of handlers as refusals. What it does not know is a 500 and in the log.
        render_error: refusals as answers.
        on_answer: is called with the route (None for an unknown path), the status and the seconds.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        access: Access | None = None,
        limits: ServerLimits | None = None,
        translate: Translate = lambda _: None,
        render_error: RenderError = render_json_error,
        on_answer: OnAnswer = lambda *_: None,
    ) -> None:
        self.limits = limits = limits or ServerLimits()
        self.bodies, self.answers = (
            _Budget(most, int(limits.client_share * most), limits.still_seconds)
            for most in (limits.bodies_in_flight, limits.answers_in_flight)
        )
        self.reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The lock of each client of which a body is read in a thread."""
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="web-read")
        self.replaced_surrogates = 0
        self.url = ""
        """Known once `start` has returned."""
        self._access = access or Access()
        self._table = web.UrlDispatcher()
        self._routes: dict[web.AbstractRoute, Route] = {}
        for route in routes:
            path = route.path.replace("...}", ":.+}")
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                self._routes[self._table.add_route(method, path, cast(Any, route.handler))] = route
        self._translate = translate
        self._render_error = render_error
        self._on_answer = on_answer
        self._servers: list[asyncio.Server] = []
        self._connections: set[_ClientConnection] = set()
        self._idle: dict[_ClientConnection, None] = {}
        """Connections on which no request is answered, the longest idle first."""
        self._handlers: dict[asyncio.Task[Any], web.RequestHandler] = {}
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Begins to listen; returns the URL. Port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be used, or is not loopback and there is no token.
        """
        loop = asyncio.get_running_loop()
        self._manager = web.Server(self._answer)
        try:
            if not 0 <= port <= 65535:
                raise OverflowError("a port is a number from 0 to 65535")
            server = await loop.create_server(
                lambda: _ClientConnection(
                    self, self._manager, loop, self._connections, self.limits.max_connections
                ),
                host or None,
                port,
                backlog=self.limits.backlog,
                start_serving=False,
            )
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        addresses = [bound.getsockname() for bound in server.sockets]
        beyond = [address[0] for address in addresses if not _is_loopback(address[0])]
        if beyond and self._access.token is None and not self._access.insecure:
            server.close()
            raise ConfigError(
                f"other machines reach {host or beyond[0]}: set a token (an API key), listen on 127.0.0.1, "
                "or let everybody in with --insecure"
            )
        self._gate = _Gate(self._access, host, beyond)
        self._servers.append(server)
        self._watch = asyncio.create_task(self._cut_off_unread(), name="web-watch")
        await server.start_serving()
        shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
        self.url = f"http://{shown}:{addresses[0][1]}"
        return self.url

    @asynccontextmanager
    async def listening_at(self, path: Path, *, most: int) -> AsyncIterator[None]:
        """Takes `most` connections at once at a Unix socket, too, from whoever may open it. `start` comes first."""
        loop = asyncio.get_running_loop()
        connection = functools.partial(_ClientConnection, self, self._manager, loop, set(), most)
        server = await loop.create_unix_server(connection, path, backlog=most)
        self._servers.append(server)
        try:
            yield
        finally:
            server.close()
            self._servers.remove(server)

    def stop_listening(self) -> None:
        """Takes no more connections; those that are open go on."""
        for server in self._servers:
            server.close()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stops listening, lets requests in flight finish for `grace_s`, then cancels them and cuts them off.

        Returns at most a second later, also where a handler does not let itself be cancelled. Idempotent.
        """
        if self._watch is None or self._stopping:
            return
        self.stop_listening()
        self._stopping = True
        try:
            await asyncio.sleep(0)  # requests that have come begin
            self._manager.pre_shutdown()  # who is busy ends after this request
            for connection in self._connections.difference(self._handlers.values()):
                connection.force_close()
            async with asyncio.timeout(grace_s):
                while self._connections or self._handlers:  # noqa: ASYNC110  (two sets, changed in two places)
                    await asyncio.sleep(_STOP_LOOK_S)
        except TimeoutError:
            _LOG.warning("%d requests are cut off: the server stops", len(self._handlers))
        finally:
            for handler in list(self._handlers):
                handler.cancel()
            for connection in list(self._connections):
                connection.socket.abort()
            self._watch.cancel()
            self.readers.shutdown(wait=False)
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=_CANCEL_S)
        if self._handlers:
            _LOG.error("%d handlers do not end although they were cancelled", len(self._handlers))

    async def _answer(self, raw: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter()
        response: web.StreamResponse
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        connection = cast(_ClientConnection, raw.protocol)
        self._handlers[task] = connection
        self._idle.pop(connection, None)
        request, route = Request(raw, self), None
        try:
            match = await self._table.resolve(cast(web.Request, raw))
            route, request.params = self._routes.get(match.route), match
            self._gate.check(request, route)
            if route is None:
                raise _unknown(request, match.http_exception)
            if route.cancel_when_gone:
                if request.gone:
                    raise ConnectionResetError
                connection.cancels = task
            answer = await route.handler(request)
            response = answer if isinstance(answer, web.StreamResponse) else json_response(answer)
            if isinstance(response, web.Response) and raw.method != hdrs.METH_HEAD:
                await self._send(request, connection, response)
        except Exception as error:
            response = self._refuse(request, route, error)
        finally:
            connection.cancels = None
            del self._handlers[task]
            if connection in self._connections:
                self._idle[connection] = None
            request.release()
        self._on_answer(route, response.status, time.perf_counter() - began)
        return response

    async def _send(self, request: Request, connection: "_ClientConnection", response: web.Response) -> None:
        """Sends a large answer in parts, so that no second copy of it waits; what is small aiohttp sends."""
        body = response.body
        if not isinstance(body, bytes) or len(body) <= self.limits.small:
            return
        held = _Held(request.client, connection.socket.abort)
        try:
            self.answers.take(held, len(body))
            await response.prepare(request.raw)
            for at in range(0, len(body), _PART):
                await response.write(memoryview(body)[at : at + _PART])
                self.answers.move(held, _PART)
            response.body = None
            await response.write_eof()
        finally:
            self.answers.release(held)

    def _refuse(self, request: Request, route: Route | None, error: Exception) -> web.Response:
        raw = request.raw
        path = request.path if route is None else route.path  # a path may hold a secret
        if isinstance(error, HTTPError):
            refusal: HTTPError | None = error
        elif isinstance(error, ConnectionError) and request.gone:
            return web.Response(status=_GONE)
        elif isinstance(error, web.RequestPayloadError):
            refusal = HTTPError(400, f"the body cannot be read: {error}")
        else:
            refusal = self._translate(error)
        if refusal is None:
            _LOG.error("%s %s failed", request.method, path, exc_info=error)
            text = f"internal error ({type(error).__name__}), see the server's log"
            refusal = HTTPError(500, text, "internal")
        elif refusal.status == 500:
            _LOG.warning("%s %s: %s", request.method, path, refusal, exc_info=refusal.__cause__)
        if raw.writer.output_size:
            request.cut_off()  # its status has been sent: only a broken connection can tell now
        response = self._render_error(raw, refusal)
        if not raw.content.is_eof():
            response.force_close()
        return response

    async def _cut_off_unread(self) -> None:
        limit = self.limits.answer_idle_seconds
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            now = time.monotonic()
            for connection in list(self._connections):
                if connection.unread_seconds(now) > limit:
                    connection.socket.abort()


class _ClientConnection(web.RequestHandler):
    """A connection: counted, watched, and able to cancel the handler of its request."""

    socket: asyncio.Transport

    def __init__(
        self,
        server: WebServer,
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        others: "set[_ClientConnection]",
        most: int,
    ) -> None:
        """`others`: open connections of the same socket, of which there may be `most`; one more is cut off."""
        limits = server.limits
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.keep_alive_seconds,
            max_line_size=limits.max_head_field,
            max_field_size=limits.max_head_field,
            max_headers=limits.max_headers,
            lingering_time=_LINGER_S,
            read_bufsize=_READ_BUFFER,
            auto_decompress=False,  # a few bytes could become any number of them
        )
        self.cancels: asyncio.Task[Any] | None = None
        """Ends with the connection."""
        self._web = server
        self._others, self._most = others, most
        self._unread = 0
        self._unread_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._web
        self.socket = cast(asyncio.Transport, transport)
        if len(server._connections) >= server.limits.max_connections and server._idle:
            longest = next(iter(server._idle))  # whoever asks for nothing keeps nobody out
            longest._leave()
            longest.socket.abort()
        too_many = (
            len(self._others) >= self._most or len(server._connections) >= server.limits.max_connections
        )
        if too_many or server._stopping:
            self.socket.abort()
            return
        self._others.add(self)
        server._connections.add(self)
        server._idle[self] = None
        super().connection_made(transport)

    def _leave(self) -> None:
        self._others.discard(self)
        self._web._connections.discard(self)
        self._web._idle.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Drops what comes after the first fault: aiohttp would keep each part of it, with a traceback."""
        if not (self._messages and isinstance(self._messages[-1][0], _ErrInfo)):
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._leave()
        if self.cancels is not None:
            self.cancels.cancel()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what is not HTTP; aiohttp would log a traceback of it."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        refusal = HTTPError(400, f"this is not a valid request: {message}")
        response = self._web._render_error(request, refusal)
        response.force_close()
        return response

    def unread_seconds(self, now: float) -> float:
        """How long the client has not taken a byte of what waits to be sent; asked now and then."""
        size = self.socket.get_write_buffer_size()
        if not size or size < self._unread or not self._unread:
            self._unread_since = now
        self._unread = size
        return now - self._unread_since


class _Gate:
    """Decides by its head whether a request may go on."""

    def __init__(self, access: Access, host: str, beyond_loopback: Sequence[str]) -> None:
        self._access = access
        self._beyond_loopback = bool(beyond_loopback)
        own = {socket.gethostname().lower()} if beyond_loopback else set()
        self._names = {"localhost", host.lower(), *map(str.lower, access.allowed_hosts), *own} - {""}

    def check(self, request: Request, route: Route | None) -> None:
        """Checks token, Host, Origin and encoding. Raises `HTTPError`."""
        headers, token = request.headers, self._access.token
        if shown := _shown_token(headers.get(hdrs.AUTHORIZATION, "")):
            request.shown_token = token is not None and hmac.compare_digest(_bytes(shown), _bytes(token))
            if not request.shown_token and self._access.whose is not None:
                request.token_of = self._access.whose(shown)
        host = headers.get(hdrs.HOST)
        if host is None and request.raw.version >= (1, 1):
            raise HTTPError(400, "the Host header is missing")
        # A page that got here by a rebound DNS name does not know a token.
        known = request.shown_token or request.token_of is not None
        if host is not None and not known and not self._is_own(host.lower()):
            text = f"{host!r} is not a name of this server: show a token, or start it with this host allowed"
            raise HTTPError(403, text, "forbidden_host")
        origin = headers.get(hdrs.ORIGIN)
        if origin is None:
            # A link to a page that holds nothing may be followed from anywhere.
            linked = route is not None and route.open and headers.get("Sec-Fetch-Dest") == "document"
            foreign = headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and not linked
        else:
            own = (host or "").lower()
            foreign = origin.lower() not in (f"http://{own}", f"https://{own}")
        if foreign:
            text = f"pages of {origin or 'other sites'} may not send requests"
            raise HTTPError(403, text, "forbidden_origin")
        if token is not None and not request.shown_token and not (route is not None and route.open):
            if request.token_of is None:
                text = "the token or API key is missing or wrong: send authorization: Bearer TOKEN, or http://x:TOKEN@host"
                raise HTTPError(401, text, "unauthorized", headers={"www-authenticate": "Bearer"})
            if route is not None and not route.limited:
                raise HTTPError(403, "this token may not do that", "forbidden")
        encoding = headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
        if route is not None and encoding not in ("", "identity"):
            text = f"the body has content-encoding {encoding[:40]!r}: send it as it is"
            raise HTTPError(415, text, "unsupported_encoding", headers={"accept-encoding": "identity"})

    def _is_own(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")
        if name in self._names:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or self._beyond_loopback
        except ValueError:
            return False


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _shown_token(header: str) -> str:
    """The token of an Authorization header; empty if there is none."""
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _unknown(request: Request, error: web.HTTPException | None) -> HTTPError:
    if not isinstance(error, web.HTTPMethodNotAllowed):
        return HTTPError(404, f"there is no {request.path}", "not_found")
    allowed = ", ".join(sorted(error.allowed_methods))
    text = f"{request.path} takes {allowed}, not {request.method}"
    return HTTPError(405, text, "method_not_allowed", headers={"allow": allowed})


def openapi(routes: Iterable[Route], title: str, version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes."""
    routes = list(routes)
    named = {kind for route in routes for kind in (route.body, route.query, route.answer) if kind}
    kinds = [ErrorBody, *sorted(named, key=lambda kind: kind.__name__)]
    refs, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(kinds, refs, strict=True))

    def content(kind: type | None) -> dict[str, Any]:
        return {} if kind is None else {"content": {"application/json": {"schema": ref_of[kind]}}}

    def parameter(name: str, place: str, required: bool, schema: Any) -> dict[str, Any]:
        return {"name": name, "in": place, "required": required, "schema": schema}

    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        query = schemas[route.query.__name__] if route.query is not None else {"properties": {}}
        operation: dict[str, Any] = {
            "summary": route.summary,
            "parameters": [
                *(
                    parameter(name, "path", True, {"type": "string"})
                    for name in re.findall(r"{(\w+)", route.path)
                ),
                *(
                    parameter(name, "query", name in query.get("required", ()), schema)
                    for name, schema in query["properties"].items()
                ),
            ],
            "responses": {
                "200": {"description": "done", **content(route.answer)},
                "default": {"description": "refused", **content(ErrorBody)},
            },
        }
        if route.body is not None:
            operation["requestBody"] = content(route.body)
        if route.open:
            operation["security"] = []
        paths.setdefault(route.path.replace("...}", "}"), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
