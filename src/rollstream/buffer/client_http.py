"""The sync client's connections: requests that are sent until they are answered for good."""

import http.client
import random
import select
import ssl
import threading
import time
from dataclasses import dataclass

from rollstream.buffer.client_wire import (
    Address,
    Backoff,
    RetryNotice,
    Tries,
    refusal,
    retry_after,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose body may still be to be read."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse


class Connections:
    """Connections to one buffer; threads may share them.

    Args:
        address: of the buffer.
        timeout: seconds without a byte from it.
        backoff: when to try again.
    """

    def __init__(self, address: Address, *, timeout: float, backoff: Backoff) -> None:
        self._address = address
        self._timeout = timeout
        self._backoff = backoff
        self._notice = RetryNotice(backoff)
        self._rng = random.Random()
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        *,
        stream_timeout: float | None = None,
        tries: Tries | None = None,
    ) -> tuple[Answer, bytes]:
        """Sends a request until it is answered for good; `tries` are those that it had before.

        Returns:
            The answer, and its body; with `stream_timeout`, the body is still to be read.
        """
        tries = tries or self.tries(method, path)
        fresh = False
        while True:
            cause: Exception | None = None
            asked: float | None = None
            connection = self._take(stream_timeout or self._timeout, fresh=fresh)
            reused, answered = connection.sock is not None, False
            fresh = False
            try:
                connection.request(
                    method, self._address.prefix + path, body, {**self._address.headers, **headers}
                )
                response = connection.getresponse()
                answered = True
                answer = Answer(connection, response)
                if response.status < 400 and stream_timeout is not None:
                    return answer, b""
                text = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if reused and not answered and isinstance(error, ConnectionError):
                    # It was closed while nobody used it, or just now: that says nothing of the buffer. The
                    # others that are idle are as old.
                    self.close()
                    fresh = True
                    continue
                cause, said = error, f"{type(error).__name__}: {error}"
            else:
                self.give_back(answer)
                if response.status < 400:
                    return answer, text
                asked = retry_after(response.getheader("retry-after"))
                refused = refusal(response.status, text)
                if refused is not None:
                    raise refused
                said = f"HTTP {response.status}: {text[:200].decode(errors='replace')}"
            time.sleep(tries.failed(said, cause, asked))

    def tries(self, method: str, path: str) -> Tries:
        """Of one request."""
        return Tries(f"{method} {self._address.url}{path}", self._backoff, self._notice, self._rng)

    def _take(self, timeout: float, *, fresh: bool = False) -> http.client.HTTPConnection:
        """A connection, new if `fresh`; else an idle one, if there is one that the server has not closed."""
        connection = None if fresh else self._idle_one()
        if connection is None:
            address = self._address
            if address.tls:
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(address.host, address.port, context=context)
            else:
                connection = http.client.HTTPConnection(address.host, address.port)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection

    def _idle_one(self) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not _is_over(connection):
                return connection
            connection.close()

    def give_back(self, answer: Answer) -> None:
        """Keeps the connection of an answer that was read to its end."""
        if answer.response.will_close:
            answer.connection.close()
        else:
            with self._lock:
                self._idle.append(answer.connection)

    def close(self) -> None:
        """Closes those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _is_over(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed an idle connection: there is something to read, and nothing was asked."""
    if connection.sock is None:
        return False
    try:
        if hasattr(select, "poll"):  # unlike the others it takes no descriptor, and any number of one
            looks = select.poll()
            looks.register(connection.sock, select.POLLIN)
            return bool(looks.poll(0))
        return bool(select.select([connection.sock], [], [], 0)[0])
    except (OSError, ValueError):
        return True
