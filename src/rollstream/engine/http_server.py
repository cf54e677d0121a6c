"""Talking HTTP to one inference server: what its answers and silences mean.

no connection, connection lost, no HTTP            -> away
502, 503, 504 and its health says no               -> away
502, 503, 504 and it is healthy, other 5xx, 429    -> transient
other 4xx, a redirect, which is never followed     -> this request is bad
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import orjson
from yarl import URL

from rollstream.engine.replica import ReplicaUnavailableError
from rollstream.errors import ConfigError, EngineError, EngineOverloadedError, TransientEngineError

CONNECTION_KWARGS: dict[str, Any] = {
    "connect_timeout": 10.0,  # seconds for one connect
    "health_timeout": 20.0,  # seconds for a health check: SGLang answers it only after a generated token
    "info_timeout": 10.0,  # seconds for each question at start
    "api_key_env": "",  # name of the environment variable with the API key
}
"""Keys of `engine_kwargs` for engines that are servers, with their defaults."""

AWAY_STATUSES = frozenset((502, 503, 504))
"""What a router answers for a server that is gone, and a server while it starts; also one that is only busy.
Which of them it is, its health says."""

_KEY_HINT = (
    "actor_rollout_ref.rollout.engine_kwargs.api_key_env names the environment variable that holds the key"
)

_KEEP_ALIVE_S = 4.0
"""Below uvicorn's 5 s, so that an idle connection is closed by us and never under a request."""

CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""The server went away, before or in the middle of its reply, or what it sends is not HTTP."""


class HttpServer:
    """One server. Connections are opened on demand and kept.

    Args:
        url: base URL, `http://host:port`.
        kwargs: see `CONNECTION_KWARGS`.

    Raises:
        ConfigError: no such URL, or the environment has no API key.
    """

    def __init__(self, url: str, kwargs: dict[str, Any]) -> None:
        self.url = base_url(url)
        self.health_timeout: float = kwargs["health_timeout"]
        self._connect_timeout: float = kwargs["connect_timeout"]
        self._info_timeout: float = kwargs["info_timeout"]
        self._headers = {"Content-Type": "application/json"}
        self._api_key = read_api_key(kwargs)
        if self._api_key:
            self._headers["Authorization"] = f"Bearer {self._api_key}"
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def post(
        self, path: str, body: bytes, *, is_healthy: Callable[[], Awaitable[bool]], wanted: Callable[[], bool]
    ) -> bytes:
        """Sends a request and returns the body of the 200 that answers it. There is no limit on time.

        Args:
            path: begins with a slash.
            body: JSON.
            is_healthy: tells a busy server from one that is gone.
            wanted: asked before the request is sent a second time.

        Raises:
            ReplicaUnavailableError, TransientEngineError, EngineError: see the top of this file.
        """
        sent_twice = False
        while True:
            try:
                async with self._send("POST", path, body) as response:
                    status, payload = response.status, await response.read()
                break
            except CONNECTION_ERRORS as error:
                if isinstance(error, aiohttp.ServerDisconnectedError) and not sent_twice and wanted():
                    # It may have been an idle connection that the server was just closing: once more.
                    sent_twice = True
                    continue
                raise self._away(error) from error
        if status == 200:
            return payload
        refusal = self.refusal(status, payload)
        if status not in AWAY_STATUSES or await is_healthy():
            raise refusal
        raise ReplicaUnavailableError(f"{refusal}, and it is not healthy")

    async def tell(self, path: str, body: object, *, timeout_s: float) -> bytes:
        """Posts something that is answered soon; returns the body of its 200.

        Raises:
            ReplicaUnavailableError: the server does not answer.
            EngineError: another status.
        """
        status, payload = await self._request("POST", path, orjson.dumps(body), timeout_s)
        if status != 200:
            raise self.refusal(status, payload)
        return payload

    def refusal(self, status: int, payload: bytes) -> EngineError:
        """The error for a status other than 200, in the server's own words, but without the API key."""
        return status_error(self.url, status, _error_message(payload, self.without_key))

    def without_key(self, text: str) -> str:
        """A text of the server's as it may be shown: servers repeat the API key in what they refuse."""
        return text.replace(self._api_key, "***") if self._api_key else text

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises `ReplicaUnavailableError`."""
        return await self._request("GET", path, None, timeout_s)

    async def ask(self, path: str, *, kind: str) -> dict[str, Any]:
        """A server's answer to a question; empty where it does not know the route.

        Args:
            path: begins with a slash.
            kind: what kind of server this should be, for the message.

        Raises:
            ReplicaUnavailableError: it does not answer, or answers as one that starts or is gone.
            EngineError: it refuses, or its answer is no JSON.
        """
        status, payload = await self.get(path, timeout_s=self._info_timeout)
        if status in (404, 405):
            return {}
        if status != 200:
            error = self.refusal(status, payload)
            raise ReplicaUnavailableError(str(error)) if status in AWAY_STATUSES else error
        try:
            value = orjson.loads(payload)
        except orjson.JSONDecodeError as cause:
            raise EngineError(f"{self.url}{path} does not answer with JSON: is it {kind} server?") from cause
        return value if isinstance(value, dict) else {}

    async def close(self) -> None:
        """Ends all connections; requests on them end with `ReplicaUnavailableError`."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._send(method, path, body, timeout=timeout) as response:
                return response.status, await response.read()
        except CONNECTION_ERRORS as error:
            raise self._away(error) from error

    def _send(
        self, method: str, path: str, body: bytes | None, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        # A job of a buffer may name its engine, but only where the operator allows it.
        return self._open_session().request(
            method, self._url(path), data=body, allow_redirects=False, **options
        )

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ReplicaUnavailableError("the engine is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                # Replies are read in one piece; the default high-water mark pauses the socket several times.
                read_bufsize=2**20,
            )
        return self._session

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.url + path)
        return url

    def _away(self, error: BaseException) -> ReplicaUnavailableError:
        hint = ""
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            hint = (
                ": its certificate is not one that this machine trusts. Name a file with it, or with its "
                "authority's, in the environment variable SSL_CERT_FILE"
            )
        elif isinstance(error, aiohttp.ClientSSLError):
            hint = ": it does not speak TLS as a server at https:// does. Is its URL http://?"
        return ReplicaUnavailableError(f"{self.url}: {type(error).__name__}: {error}{hint}")


async def is_answered(request: Awaitable[tuple[int, bytes]]) -> int | None:
    """The status that a request is answered with; None when nobody answers."""
    try:
        return (await request)[0]
    except (TimeoutError, ReplicaUnavailableError):
        return None


def read_api_key(kwargs: dict[str, Any]) -> str:
    """The key in the variable that `api_key_env` names, "" for none; raises `ConfigError` if that is not set."""
    if not (name := kwargs["api_key_env"]):
        return ""
    if key := os.environ.get(name, "").strip():  # a file's last line break is no part of it
        return key
    raise ConfigError(f"engine_kwargs.api_key_env: no {name!r} in the environment, or it is empty")


def base_url(url: str) -> str:
    """A server's URL without its last slash; raises `ConfigError` if it is none."""
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"server URL {url!r} must look like http://host:port")
    return url.rstrip("/")


def status_error(server: str, status: int, message: str) -> EngineError:
    """The error for a status: one that may pass is `TransientEngineError`."""
    text = f"{server} answers {status}: {message}"
    if status in (401, 403):
        text += f" ({_KEY_HINT})"
    if status in (429, 503):
        return EngineOverloadedError(text)
    if status in (408, 429) or status >= 500:
        return TransientEngineError(text)
    return EngineError(text)


def _error_message(payload: bytes, shown: Callable[[str], str]) -> str:
    """The server's own words, as `shown`: `{"error": {"message": ...}}`, `{"message": ...}`, or the text."""
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict):
        inner = value.get("error", value)
        message = inner.get("message") if isinstance(inner, dict) else inner
        if message:
            return shown(str(message))
    # Cut at last: half a key would not be found.
    return shown(payload.decode(errors="replace"))[:500] or "(no message)"
