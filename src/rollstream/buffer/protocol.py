"""HTTP/1.1 on one connection: uvicorn's, with a short way for the one request whose cost counts.

A small write goes from the parser to the ledger and back without a task, a scope or the messages of ASGI,
which together cost more than the write. Whatever is unusual about it (a large body, a wrong token, an item
that is refused, a full buffer) goes the long way, through the application, from the start.

    headers --+-- POST, the path, a small body, let in --> body --> begin() --+-- future --> answer
              |                                                               |
              +-- anything else --> application (ASGI) <-------- None --------+
"""

import asyncio
import contextlib
import fcntl
import struct
import sys
import termios
import time
from collections.abc import Sequence
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rollstream.buffer import exchange
from rollstream.buffer.exchange import CONNECTION

_UNSENT_POLL_S = 0.05


class HotRoute(Protocol):
    """A route with a short way."""

    path: bytes
    largest: int
    """Bytes of a body."""

    def lets_in(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether the token is right; False leaves it to the application to say what is wrong."""

    def begin(self, body: bytes) -> "tuple[asyncio.Future[Any], Any] | None":
        """Begins what the request asks for; None leaves it to the application. The second is for `answer`."""

    def answer(self, done: "asyncio.Future[Any]", begun: Any, started: float) -> tuple[bytes, ...]:
        """Head (from the status line on, without the last empty line) and body, in pieces, of the answer."""

    def too_slow(self) -> tuple[bytes, ...]:
        """The same, of a request whose body has stopped coming."""


class _HotCycle:
    """In uvicorn's place for the request that is being answered, while that is a hot one."""

    __slots__ = (
        "body",
        "came_at",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
    )

    def __init__(self, now: float) -> None:
        self.body: list[bytes] = []
        """In the pieces that it came in: mostly one, which need not be copied."""
        self.came_at = now
        """When the last piece did, the loop's time."""
        self.more_body = True
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = True
        self.message_event = self

    def set(self) -> None:
        """Nobody waits for messages here."""


class _Outbox:
    """Answers of writes that became durable together, sent one right after the other.

    A client that waits is woken by the first, which costs a processor more than all else about an answer, and
    is awake for the others. With the work for each answer between them, it would fall asleep after each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[BufferProtocol, bytes]] = []

    def put(self, protocol: "BufferProtocol", answer: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.append((protocol, answer))

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for protocol, answer in waiting:
            protocol.transport.write(answer)
        for protocol, _ in waiting:
            protocol.on_response_complete()


class BufferProtocol(HttpToolsProtocol):
    """Also gives the application the connection: whether it is there, and what the other side has taken."""

    _ended_well: bool | None = None
    _hot_route: HotRoute | None = None
    _began = 0.0
    _idle_since = 0.0
    _shared: list[tuple[bytes, bytes]] | None = None
    _shared_bytes = b""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._hot_route = getattr(config.app, "hot_route", None)
        state = cast(Any, self.server_state)  # all connections of a server share it
        if not hasattr(state, "outbox"):
            state.outbox = _Outbox(self.loop)
        self._outbox = state.outbox

    # -- the short way

    def on_message_begin(self) -> None:
        # What the long way needs besides is made when it is taken.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        route = self._hot_route
        if route is not None and self.url == route.path and self._is_hot(route):
            self.cycle = cast(RequestResponseCycle, _HotCycle(self.loop.time()))
            self._began = time.perf_counter()
        else:
            self._go_the_long_way()

    def _is_hot(self, route: HotRoute) -> bool:
        cycle, parser = self.cycle, self.parser
        if (
            (cycle is not None and not cycle.response_complete)
            or parser.get_method() != b"POST"
            or self.expect_100_continue
            or parser.should_upgrade()
            or not parser.should_keep_alive()
            or parser.get_http_version() != "1.1"
        ):
            return False
        for name, value in self.headers:
            if name == b"content-length":
                return len(value) < 8 and int(value) <= route.largest and route.lets_in(self.headers)
        return False

    def on_body(self, body: bytes) -> None:
        cycle: object = self.cycle
        if isinstance(cycle, _HotCycle):
            cycle.body.append(body)
            cycle.came_at = self.loop.time()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        cycle: object = self.cycle
        if not isinstance(cycle, _HotCycle):
            super().on_message_complete()
            return
        assert self._hot_route is not None
        cycle.more_body = False
        body = b"".join(cycle.body)
        begun = self._hot_route.begin(body)
        if begun is None:
            cycle.response_complete = True
            self._go_the_long_way()
            self.cycle.body += body
            super().on_message_complete()
            return
        future, work = begun
        started = self._began
        future.add_done_callback(lambda done: self._answer(cycle, done, work, started))

    def _answer(self, cycle: _HotCycle, done: "asyncio.Future[Any]", work: Any, started: float) -> None:
        assert self._hot_route is not None
        self._send_answer(cycle, *self._hot_route.answer(done, work, started))

    def _send_answer(self, cycle: _HotCycle, head: bytes, *body: bytes) -> None:
        cycle.response_complete = True
        if self._ended_well is not None or self.transport.is_closing():
            return
        shared = self.server_state.default_headers  # a new list each second, with the date
        if shared is not self._shared:
            self._shared, self._shared_bytes = shared, b"".join([b"%b: %b\r\n" % one for one in shared])
        close = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        answer = b"".join((head, self._shared_bytes, close, *body))
        if cycle.keep_alive:
            self._outbox.put(self, answer)
        else:
            self.transport.write(answer)
            self.transport.close()
            self.on_response_complete()

    def _go_the_long_way(self) -> None:
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expect
        scope = cast(dict[str, Any], self.scope)
        scope["headers"] = headers
        scope[CONNECTION] = self
        super().on_headers_complete()

    # -- idle connections, stalled bodies: one timer for a connection, not one for every request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._watch_idleness(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        """Called with every piece of data; the timer looks for itself when it is due."""

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._idle_since = self.loop.time()
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)

    def _watch_idleness(self, seconds: float) -> None:
        self._idle_since = self._idle_since or self.loop.time()
        # No later than a body that stalls from now on would be due.
        self.timeout_keep_alive_task = self.loop.call_later(
            min(seconds, exchange.BODY_S), self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        cycle: Any = self.cycle
        busy = cycle is not None and not cycle.response_complete
        if busy and isinstance(cycle, _HotCycle) and cycle.more_body:
            wait = exchange.BODY_S - (self.loop.time() - cycle.came_at)
            if wait > 0:
                self._watch_idleness(wait)
            elif self._hot_route is not None:
                cycle.keep_alive = False
                self._send_answer(cycle, *self._hot_route.too_slow())
            return
        left = self.timeout_keep_alive - (self.loop.time() - self._idle_since)
        if busy or left > 0:
            self._watch_idleness(self.timeout_keep_alive if busy else left)
        elif not self.transport.is_closing():
            self.transport.close()

    # -- the connection, for the application

    def connection_lost(self, exc: Exception | None) -> None:
        # Asked before the transport closes the socket, which it does next.
        self._ended_well = exc is None and self.unsent == 0
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)

    @property
    def lost(self) -> bool:
        """See `exchange.Connection`."""
        return self._ended_well is not None or self.transport.is_closing()

    def cut_off(self) -> None:
        """See `exchange.Connection`."""
        self.transport.abort()

    async def taken(self) -> bool:
        """See `exchange.Connection`."""
        pause = 0.001
        while self._ended_well is None:
            if self.unsent == 0:
                return True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _UNSENT_POLL_S)
        return self._ended_well

    @property
    def unsent(self) -> int:
        """See `exchange.Connection`: in this process, and in the kernel."""
        waiting: int = self.transport.get_write_buffer_size()
        if sys.platform == "linux":
            with contextlib.suppress(OSError, ValueError):
                descriptor = self.transport.get_extra_info("socket").fileno()
                packed = fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0\0\0\0")
                waiting += struct.unpack("i", packed)[0]
        return waiting
