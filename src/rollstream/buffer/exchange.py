"""One HTTP request and its answer, over ASGI (https://asgi.readthedocs.io/en/stable/specs/www.html)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol
from urllib.parse import parse_qs

import orjson

from rollstream.errors import RollstreamError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CONNECTION = "rollstream.connection"
"""Where the scope has the `Connection`, when `server.Server` runs the application."""

JSON = b"application/json"
NDJSON = b"application/x-ndjson"
MSGPACK = b"application/msgpack"

BODY_S = 60.0
"""Without one more byte of a body: the sender is gone or means harm."""

_LINGER_S = 5.0
"""How long a refused body is received and thrown away: a socket closed with bytes unread is reset, and the
sender would see that in place of the reason."""


_LINGER_PAUSE_S = 0.002
"""After each piece (64 KiB and more) of it: to throw away as fast as it comes would be all that is done."""


class Connection(Protocol):
    """What is known of the socket below a request."""

    @property
    def lost(self) -> bool:
        """The other side is gone, or this one closed."""

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not confirmed."""

    def cut_off(self) -> None:
        """Closes this side, whatever is on its way."""

    async def taken(self) -> bool:
        """Waits until the other side's kernel has confirmed every byte; False when it is gone before."""


class RefusalError(RollstreamError):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        code: one word for programs.
        details: further members of the error's object.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = dict(details or {})
        self.headers = dict(headers or {})


def stalled_body() -> RefusalError:
    """For a request whose body does not come."""
    return RefusalError(
        f"nothing came for {BODY_S:g} s, and the body is not complete",
        status=408,
        code="timeout",
        headers={"connection": "close"},
    )


class GoneError(Exception):
    """The client went away; nobody is there to be answered."""


class Exchange:
    """A request that is being answered.

    Attributes:
        method: of HTTP.
        path: decoded.
        params: what the path names, by the route's placeholders.
        status: of the answer, once it has begun.
    """

    __slots__ = (
        "_cut",
        "_given",
        "_receive",
        "_send",
        "body_limit",
        "method",
        "params",
        "path",
        "scope",
        "started",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, body_limit: int) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.body_limit = body_limit
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.params: dict[str, str] = {}
        self.started = False
        self.status = 0
        self._given = 0
        self._cut = False

    # -- the request

    def header(self, name: bytes) -> str | None:
        """The first header of this (lower-case) name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value).decode("latin-1")
        return None

    def query(self) -> dict[str, str]:
        """The query's parameters; of one given twice, the last."""
        try:
            pairs = parse_qs(self.scope["query_string"].decode("ascii"), max_num_fields=100)
        except ValueError as error:
            raise RefusalError(f"the query cannot be read: {error}") from error
        return {name: values[-1] for name, values in pairs.items()}

    def media_type(self) -> str:
        """Of the body, without parameters; empty if not given."""
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower()

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            RefusalError: 413, as soon as it is known to be too large: nothing of it is kept; 408.
            GoneError: the client went away.
        """
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > self.body_limit:
            raise self._too_large()
        message = await self._next()
        first = message.get("body", b"")
        if not message.get("more_body", False):
            if len(first) > self.body_limit:
                raise self._too_large()
            return bytes(first)
        parts, size = [first], len(first)
        while message.get("more_body", False):
            message = await self._next()
            part = message.get("body", b"")
            size += len(part)
            if size > self.body_limit:
                raise self._too_large()
            parts.append(part)
        return b"".join(parts)

    async def _next(self) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout(BODY_S):
                message = await self._receive()
        except TimeoutError:
            raise stalled_body() from None
        if message["type"] == "http.disconnect":
            raise GoneError
        return message

    def _too_large(self) -> RefusalError:
        return RefusalError(
            f"the body is larger than {self.body_limit} bytes: send fewer items at once, or start the server "
            "with a larger --max-body",
            status=413,
            code="too_large",
            headers={"connection": "close"},
        )

    # -- the other side

    @property
    def lost(self) -> bool:
        """The client is gone."""
        connection = self.scope.get(CONNECTION)
        return connection is not None and connection.lost

    def cut_off(self) -> None:
        """Ends the connection, as if the client had gone away."""
        self._cut = True
        connection = self.scope.get(CONNECTION)
        if connection is not None:
            connection.cut_off()

    @property
    def unconfirmed(self) -> int:
        """Bytes that were sent and the client's machine has not taken."""
        connection = self.scope.get(CONNECTION)
        return 0 if connection is None else connection.unsent

    @property
    def confirmed(self) -> int:
        """About how many bytes of the answer the client's machine has: to see whether they grow."""
        connection = self.scope.get(CONNECTION)
        return self._given if connection is None else self._given - connection.unsent

    async def taken(self) -> bool:
        """Waits until the client's machine has all that was sent; False when it is gone before."""
        connection = self.scope.get(CONNECTION)
        # What this side threw away is not seen in what is left to be sent.
        return connection is None or (await connection.taken() and not self._cut)

    # -- the answer

    async def begin(
        self,
        status: int,
        media_type: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        size: int | None = None,
    ) -> None:
        """Sends status and headers. Without `size` the body goes in chunks."""
        self.started = True
        self.status = status
        listed = [(b"content-type", media_type)]
        if size is not None:
            listed.append((b"content-length", b"%d" % size))
        for name, value in (headers or {}).items():
            listed.append((name.lower().encode(), value.encode("latin-1", "replace")))
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def send(self, part: bytes) -> None:
        """One more part of the body; waits while the client does not take it.

        Raises:
            GoneError: the client went away.
        """
        self._given += len(part)
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        if self.lost:
            raise GoneError

    async def end(self, part: bytes = b"") -> None:
        """The last part of the body."""
        await self._send({"type": "http.response.body", "body": part, "more_body": False})

    async def reply(
        self,
        body: bytes,
        status: int = 200,
        *,
        media_type: bytes = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A whole answer."""
        await self.begin(status, media_type, headers, size=len(body))
        await self.end(body)

    async def reply_json(
        self, value: Any, status: int = 200, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole answer in JSON."""
        await self.reply(orjson.dumps(value), status, headers=headers)

    async def refuse(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        """A whole answer in JSON to a request whose body may still be coming.

        When the connection ends with it, what still comes is received for a few seconds and thrown away.
        """
        if headers.get("connection") != "close":
            await self.reply(body, status, headers=headers)
            return
        await self.begin(status, JSON, headers, size=len(body))
        try:
            await self.send(body)
            async with asyncio.timeout(_LINGER_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
                    await asyncio.sleep(_LINGER_PAUSE_S)
        except (TimeoutError, GoneError):
            pass
        await self.end()
