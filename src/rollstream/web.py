"""Our HTTP layer: a table of routes over aiohttp's low-level server, with the checks that every server needs.

    connection ──> one too many? ──> head ──> route, Host, Origin, token ──> body ──> handler ──> answer
                   closed            bounded  404 405 403 401 415            413 408 503    cut off if unread

A request is refused before its body is read wherever that is possible. Bodies share one budget of bytes.
One task looks at all connections now and then and cuts off those whose client does not read its answer;
aiohttp itself closes connections that are idle or stay in the middle of a head.
"""

import asyncio
import base64
import functools
import hmac
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import unquote

import msgspec
from aiohttp import hdrs, web
from aiohttp.web_protocol import _ErrInfo
from multidict import CIMultiDictProxy, istr

from rollstream.errors import ConfigError, RollstreamError

_LOG = logging.getLogger(__name__)

_HTTP_1_1 = (1, 1)

_SEC_FETCH_SITE = istr("Sec-Fetch-Site")

_PLACE = re.compile(r"(?:field `(\w+)`)?(?: - at `(?:key in )?\$\.?([^`]*)`)?$")
"""The end of msgspec's messages: the field that is unknown or missing, and the path to its object."""

_GOOD_HOSTS = 64
"""Host headers that are remembered as good; clients could send any number of different ones."""

_LINGER_S = 5.0
"""How long the rest of a refused body is received and thrown away: a socket that is closed with bytes unread
is reset, and the client may see that in place of the answer."""

_READ_BUFFER = 2**16
"""Bytes of a body that aiohttp keeps before anybody reads it, about; a connection may have 32 such bodies."""

_GONE = 499
"""As nginx counts requests whose client went away."""

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
        cause: the error behind it; logged with its traceback where the status is 500.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "bad_request",
        where: str = "",
        headers: Mapping[str, str] | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.where = where
        self.headers = dict(headers or {})
        self.__cause__ = cause


class Identity(Protocol):
    """Whoever shows a token with limited rights."""

    @property
    def scope(self) -> str:
        """It may use the routes that have this scope."""


@dataclass(frozen=True)
class Route:
    """What is answered by which handler.

    `path` may have segments `{name}`, which take one segment each, and end with `{name...}`, which takes the
    rest, slashes included. HEAD is answered where GET is.
    """

    method: str
    path: str
    handler: "Handler"
    body: type | None = None
    """Of a JSON body, and below of the query and of the answer: for `openapi`."""
    query: type | None = None
    answer: type | None = None
    summary: str = ""
    open: bool = False
    """Needs no token."""
    scopes: frozenset[str] = frozenset()
    """Limited tokens of these scopes may use it."""
    cancel_when_gone: bool = False
    """Cancels the handler when the client goes away."""


@dataclass(frozen=True)
class Access:
    """Who may send requests."""

    token: str | None = None
    """As bearer token or as password of HTTP Basic; None asks for none."""
    accepts: Callable[[str], Identity | None] | None = None
    """Knows further tokens, with limited rights."""
    allowed_hosts: frozenset[str] = frozenset()
    """Further names of this server, as clients write them in a URL, without a port."""
    allowed_origins: frozenset[str] = frozenset()
    """Web pages that may send requests, such as `https://lab.example`."""
    insecure: bool = False
    """Listens beyond loopback also without a token."""


@dataclass(frozen=True)
class Limits:
    """What clients can make the server hold."""

    max_body: int = 64 * 2**20
    """Bytes of one body."""
    bodies_in_flight: int = 256 * 2**20
    """Bytes of all bodies whose requests are not answered yet."""
    max_connections: int = 1024
    body_idle_seconds: float = 60.0
    """Without one more byte of a body."""
    answer_idle_seconds: float = 60.0
    """Without the client taking one more byte of its answer."""
    keep_alive_seconds: float = 75.0
    """For an idle connection, and for a head to be complete."""
    max_head_field: int = 8190
    """Bytes of the request line, and of one header."""
    max_headers: int = 64
    backlog: int = 1024
    """Connections that wait to be accepted: rollouts come in waves of hundreds."""


class Request:
    """A request that is being answered.

    Attributes:
        raw: aiohttp's, for a streamed answer.
        params: what the path's `{name}` segments stand for.
        shown_token: the server's token came with it.
        identity: of the limited token that came with it.
    """

    __slots__ = ("_body", "_held", "_server", "headers", "identity", "params", "raw", "shown_token")

    def __init__(self, raw: web.BaseRequest, server: "WebServer") -> None:
        self.raw = raw
        self.headers: CIMultiDictProxy[str] = raw.headers
        self.params: dict[str, str] = {}
        self.shown_token = False
        self.identity: Identity | None = None
        self._server = server
        self._body: bytes | None = None
        self._held = 0

    @property
    def method(self) -> str:
        return self.raw.method

    @property
    def path(self) -> str:
        """Decoded, without the query."""
        return self.raw.path

    @property
    def query(self) -> dict[str, str]:
        """Of a parameter that is given twice, the last."""
        return dict(self.raw.query.items())

    @property
    def media_type(self) -> str:
        """Of the body, in lower case and without parameters; empty if not given."""
        return self.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()

    @property
    def gone(self) -> bool:
        """Whether the client went away."""
        transport = self.raw.transport
        return transport is None or transport.is_closing()

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            HTTPError: 413 it is too large; 408 it stops coming; 503 other bodies take all the room.
        """
        if self._body is None:
            content = self.raw.content
            if content.is_eof():  # it came together with the head
                body = content.read_nowait()
                self._hold(len(body))
                self._body = body
            else:
                self._body = await self._receive()
        return self._body

    async def json(self, kind: type[T]) -> T:
        """The body as a value of `kind`; an empty body counts as `{}`.

        Raises:
            HTTPError: 400 it cannot be one, with the place; and as `body`.
        """
        return decode_json(await self.body() or b"{}", kind)

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
        """Drops the body and gives its bytes back to the budget; for handlers that go on without it."""
        self._body = None
        self._server.body_bytes -= self._held
        self._held = 0

    async def _receive(self) -> bytes:
        content, limits = self.raw.content, self._server.limits
        declared = self.raw.content_length
        if declared is not None and declared > limits.max_body:
            raise _too_large(limits)
        if self.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await self.raw.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.raw.writer.output_size = 0  # the answer has not begun
        parts = []
        while not content.at_eof():
            try:
                async with asyncio.timeout(limits.body_idle_seconds):
                    part = await content.readany()
            except TimeoutError:
                raise HTTPError(
                    408,
                    f"no byte came for {limits.body_idle_seconds:g} s, and the body is not complete",
                    "timeout",
                ) from None
            self._hold(len(part))
            parts.append(part)
        return b"".join(parts)

    def _hold(self, size: int) -> None:
        server = self._server
        self._held += size
        server.body_bytes += size
        if self._held > server.limits.max_body:
            raise _too_large(server.limits)
        if server.body_bytes > server.limits.bodies_in_flight:
            raise HTTPError(
                503,
                "other requests take all the room for bodies: try again",
                "busy",
                headers={"retry-after": "1"},
            )


Handler = Callable[[Request], Awaitable[web.StreamResponse]]
Translate = Callable[[Exception], HTTPError | None]
RenderError = Callable[[web.BaseRequest, HTTPError], web.Response]
OnAnswer = Callable[[Route | None, int, float], None]


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A value as JSON."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json"
    )


def render_json_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
    """The error as `{"error": {"message", "code", "where"}}`."""
    body = {"error": {"message": str(error), "code": error.code, "where": error.where}}
    return json_response(body, error.status, error.headers)


def decode_json(body: bytes, kind: type[T]) -> T:
    """JSON as a value of `kind`. Not in a thread: the decoder is quick, and keeps Python's lock meanwhile.

    Raises:
        HTTPError: 400 it cannot be one, with the place.
    """
    try:
        return cast(T, _decoder(cast(Any, kind)).decode(body))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable("the body", error) from error


@functools.lru_cache(maxsize=256)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _unreadable(what: str, error: Exception) -> HTTPError:
    place = _PLACE.search(str(error))
    assert place is not None
    where = ".".join(part for part in (place[2], place[1]) if part)
    return HTTPError(400, f"{what} cannot be read: {error}", where=where)


def _check_encoding(request: Request) -> None:
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if encoding not in ("", "identity"):
        raise HTTPError(
            415,
            f"the body has content-encoding {encoding[:40]!r}: send it as it is",
            "unsupported_encoding",
            headers={"accept-encoding": "identity"},
        )


def _too_large(limits: Limits) -> HTTPError:
    return HTTPError(413, f"the body is larger than {limits.max_body} bytes: send less at once", "too_large")


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
        limits: Limits | None = None,
        translate: Translate | None = None,
        render_error: RenderError = render_json_error,
        on_answer: OnAnswer | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.body_bytes = 0
        """Of bodies in flight."""
        self.url = ""
        """Known once `start` has returned."""
        self._access = access or Access()
        self._table = _Table(routes)
        self._translate = translate
        self._render_error = render_error
        self._on_answer = on_answer
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._handlers: dict[asyncio.Task[Any], web.RequestHandler] = {}
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self._quiet = asyncio.Event()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Begins to listen; returns the URL. Port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be used, or is not loopback and there is no token.
        """
        loop = asyncio.get_running_loop()
        self._manager = web.Server(self._answer)
        if not 0 <= port <= 65535:
            raise ConfigError(f"cannot listen on {host}:{port}: a port is a number from 0 to 65535")
        try:
            server = await loop.create_server(
                lambda: _Connection(self, self._manager, loop),
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
        self._gate = _Gate(self._access, host, [address[0] for address in addresses])
        self._server = server
        self._watch = asyncio.create_task(self._cut_off_unread(), name="web-watch")
        await server.start_serving()
        shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
        self.url = f"http://{shown}:{addresses[0][1]}"
        return self.url

    def stop_listening(self) -> None:
        """Takes no more connections; those that are open go on."""
        if self._server is not None:
            self._server.close()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stops listening, lets requests in flight finish for `grace_s`, then cancels them and cuts them off.

        Returns at most a second later, also where a handler does not let itself be cancelled. Idempotent.
        """
        if self._watch is None or self._watch.done():
            return
        self.stop_listening()
        self._stopping = True
        try:
            await asyncio.sleep(0)  # requests that have come begin
            self._manager.pre_shutdown()  # who is busy ends after this request
            for connection in self._connections.difference(self._handlers.values()):
                connection.force_close()
            self._note_quiet()
            await asyncio.wait_for(self._quiet.wait(), grace_s)
        except TimeoutError:
            _LOG.warning("%d requests are cut off: the server stops", len(self._handlers))
        finally:
            for handler in list(self._handlers):
                handler.cancel()
            for connection in list(self._connections):
                connection.socket.abort()
            self._watch.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=_CANCEL_S)
        if self._handlers:
            _LOG.error("%d handlers do not end although they were cancelled", len(self._handlers))

    def _note_quiet(self) -> None:
        if self._stopping and not self._connections and not self._handlers:
            self._quiet.set()

    async def _answer(self, raw: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter()
        task = asyncio.current_task()
        assert task is not None
        self._handlers[task] = raw.protocol
        request = Request(raw, self)
        route = None
        try:
            route, methods = self._table.find(request)
            self._gate.check(request, route)
            if route is None:
                raise _unknown(request, methods)
            _check_encoding(request)
            if route.cancel_when_gone:
                response = await self._answer_while_there(request, route, task)
            else:
                response = await route.handler(request)
        except Exception as error:
            response = self._refuse(request, error)
        finally:
            del self._handlers[task]
            if request._held:
                request.release()
            if self._stopping:
                self._note_quiet()
        if self._on_answer is not None:
            self._on_answer(route, response.status, time.perf_counter() - began)
        return response

    async def _answer_while_there(
        self, request: Request, route: Route, task: asyncio.Task[Any]
    ) -> web.StreamResponse:
        if request.gone:
            raise ConnectionResetError
        connection = cast(_Connection, request.raw.protocol)
        connection.cancels = task
        try:
            return await route.handler(request)
        finally:
            connection.cancels = None

    def _refuse(self, request: Request, error: Exception) -> web.Response:
        raw = request.raw
        if isinstance(error, HTTPError):
            refusal: HTTPError | None = error
        elif isinstance(error, ConnectionError) and request.gone:
            return web.Response(status=_GONE)
        elif isinstance(error, web.RequestPayloadError):
            refusal = HTTPError(400, f"the body cannot be read: {error}")
        else:
            refusal = self._translate(error) if self._translate is not None else None
        if refusal is None:
            _LOG.error("%s %s failed", request.method, request.path, exc_info=error)
            text = f"internal error ({type(error).__name__}), see the server's log"
            refusal = HTTPError(500, text, "internal")
        elif refusal.status == 500:
            _LOG.warning("%s %s: %s", request.method, request.path, refusal, exc_info=refusal.__cause__)
        if raw.writer.output_size and raw.transport is not None:
            raw.transport.abort()  # its status has been sent: only a broken connection can tell now
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


class _Connection(web.RequestHandler):
    """A connection: counted, watched, and able to cancel the handler of its request."""

    socket: asyncio.Transport

    def __init__(self, room: WebServer, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        limits = room.limits
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
        self._room = room
        self._is_broken = False
        self._unread = 0
        self._unread_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        room = self._room
        self.socket = cast(asyncio.Transport, transport)
        if len(room._connections) >= room.limits.max_connections or room._stopping:
            self.socket.abort()
            return
        room._connections.add(self)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Drops what comes after the first fault: aiohttp would keep each part of it, with a traceback."""
        if not self._is_broken:
            super().data_received(data)
            if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
                self._is_broken = True

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._room._connections.discard(self)
        self._room._note_quiet()
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
        response = self._room._render_error(
            request, HTTPError(400, f"this is not a valid request: {message}")
        )
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

    def __init__(self, access: Access, host: str, addresses: Sequence[str]) -> None:
        self._access = access
        self._bearer = None if access.token is None else f"Bearer {access.token}".encode()
        self._names = {"localhost", host.lower(), *(name.lower() for name in access.allowed_hosts)} - {""}
        self._beyond_loopback = not all(map(_is_loopback, addresses))
        if self._beyond_loopback:
            self._names.add(socket.gethostname().lower())
        self._good_hosts: set[str | None] = set()

    def check(self, request: Request, route: Route | None) -> None:
        headers = request.headers
        shown = headers.get(hdrs.AUTHORIZATION)
        if shown is not None:
            self._identify(request, shown)
        host = headers.get(hdrs.HOST)
        if host not in self._good_hosts:
            self._check_host(request, host)
        origin, site = headers.get(hdrs.ORIGIN), headers.get(_SEC_FETCH_SITE)
        if origin is not None or site is not None:
            self._check_origin(origin, site, host)
        if self._bearer is None or request.shown_token or (route is not None and route.open):
            return
        if request.identity is None:
            text = "the token or API key is missing or wrong: send authorization: Bearer TOKEN, or http://x:TOKEN@host"
            raise HTTPError(401, text, "unauthorized", headers={"www-authenticate": "Bearer"})
        if route is not None and request.identity.scope not in route.scopes:
            raise HTTPError(403, "this token may not do that", "forbidden")

    def _identify(self, request: Request, shown: str) -> None:
        if self._bearer is not None and hmac.compare_digest(_bytes(shown), self._bearer):
            request.shown_token = True
            return
        token = _shown_token(shown)
        if self._access.token is not None and hmac.compare_digest(_bytes(token), _bytes(self._access.token)):
            request.shown_token = True
        elif token and self._access.accepts is not None:
            request.identity = self._access.accepts(token)

    def _check_host(self, request: Request, host: str | None) -> None:
        if host is None:
            if request.raw.version >= _HTTP_1_1:
                raise HTTPError(400, "the Host header is missing")
            return
        if self._is_good(host):
            if len(self._good_hosts) < _GOOD_HOSTS:
                self._good_hosts.add(host)
        # A page that got here by a rebound DNS name does not know a token.
        elif not request.shown_token and request.identity is None:
            raise HTTPError(
                403,
                f"{host!r} is not a name of this server: show a token, or start it with this host allowed",
                "forbidden_host",
            )

    def _is_good(self, host: str) -> bool:
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._beyond_loopback

    def _check_origin(self, origin: str | None, site: str | None, host: str | None) -> None:
        if origin is None:
            foreign = site in ("cross-site", "same-site")
        elif origin in self._access.allowed_origins:
            foreign = False
        else:
            own = None if host is None else host.lower()
            foreign = origin.lower() not in (f"http://{own}", f"https://{own}")
        if foreign:
            raise HTTPError(
                403, f"pages of {origin or 'other sites'} may not send requests", "forbidden_origin"
            )


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


class _Table:
    """Routes by path and method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._paths: dict[str, dict[str, Route]] = {}
        self._patterns: dict[str, dict[str, Route]] = {}
        for route in routes:
            table = self._patterns if "{" in route.path else self._paths
            methods = table.setdefault(route.path, {})
            assert route.method not in methods, f"two routes for {route.method} {route.path}"
            methods[route.method] = route

    def find(self, request: Request) -> tuple[Route | None, Iterable[str]]:
        """The route, or None and the methods that the path has; sets the request's `params`."""
        methods = self._paths.get(request.raw.raw_path)
        if methods is None:
            path = request.raw.rel_url.raw_path  # without the query, still percent-encoded
            methods = self._paths.get(path)
            if methods is None:
                methods, request.params = self._match(path.split("/"))
        route = methods.get(request.method)
        if route is None and request.method == "HEAD":
            route = methods.get("GET")
        return route, methods

    def _match(self, segments: list[str]) -> tuple[dict[str, Route], dict[str, str]]:
        for path, methods in self._patterns.items():
            wanted, given = path.split("/"), segments
            if path.endswith("...}") and len(given) >= len(wanted):
                given = [*given[: len(wanted) - 1], "/".join(given[len(wanted) - 1 :])]
            if len(given) != len(wanted):
                continue
            pairs = list(zip(wanted, given, strict=True))
            if all(value if name.startswith("{") else name == value for name, value in pairs):
                return methods, {
                    name.strip("{.}"): unquote(value) for name, value in pairs if name.startswith("{")
                }
        return {}, {}


def _unknown(request: Request, methods: Iterable[str]) -> HTTPError:
    if not methods:
        return HTTPError(404, f"there is no {request.path}", "not_found")
    allowed = ", ".join(sorted(methods))
    return HTTPError(
        405,
        f"{request.path} takes {allowed}, not {request.method}",
        "method_not_allowed",
        headers={"allow": allowed},
    )


class ErrorDetail(msgspec.Struct):
    """What is wrong, a word for programs, and the field that is wrong."""

    message: str
    code: str
    where: str


class ErrorBody(msgspec.Struct):
    """The body of a refusal, as `render_json_error` writes it."""

    error: ErrorDetail


def openapi(routes: Iterable[Route], title: str, version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes."""
    listed = list(routes)
    kinds = [kind for route in listed for kind in (route.body, route.query, route.answer) if kind is not None]
    shown, schemas = msgspec.json.schema_components(
        [*dict.fromkeys(kinds), ErrorBody], ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip([*dict.fromkeys(kinds), ErrorBody], shown, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        names = re.findall(r"{(\w+)", route.path)
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
        if route.query is not None:
            parameters += [
                {
                    "name": name,
                    "in": "query",
                    "required": name in schemas[route.query.__name__].get("required", ()),
                    "schema": schema,
                }
                for name, schema in schemas[route.query.__name__]["properties"].items()
            ]
        operation: dict[str, Any] = {
            "summary": route.summary,
            "parameters": parameters,
            "responses": {
                "200": {"description": "done", **_json_content(route.answer, schema_of)},
                "default": {"description": "refused", **_json_content(ErrorBody, schema_of)},
            },
        }
        if route.body is not None:
            operation["requestBody"] = _json_content(route.body, schema_of)
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


def _json_content(kind: type | None, schema_of: Mapping[type, Any]) -> dict[str, Any]:
    return {} if kind is None else {"content": {"application/json": {"schema": schema_of[kind]}}}
