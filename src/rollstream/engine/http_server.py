"""Talking HTTP to one inference server: what its answers and silences mean.

no connection, connection lost, no HTTP            -> away
502, 503, 504 and its health says no               -> away
502, 503, 504 and it is healthy, other 5xx, 429    -> transient
other 4xx, a redirect, which is never followed     -> this request is bad
"""

import os
from collections.abc import Awaitable, Callable
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
"""A router answers them for a server that is gone, and a server while it starts; also one that is only busy.
Which of them it is, its health says."""

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
        status, payload = await self._request("POST", path, body, None, wanted)
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

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises `ReplicaUnavailableError`."""
        return await self._request("GET", path, None, timeout_s)

    async def answers(self, path: str) -> int | None:
        """The status that a health check is answered with; None when nobody answers."""
        try:
            return (await self.get(path, timeout_s=self.health_timeout))[0]
        except ReplicaUnavailableError:
            return None

    async def ask(self, path: str) -> dict[str, Any]:
        """A server's answer to a question; empty where it does not know the route.

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
            raise EngineError(f"{self.url}{path} does not answer with JSON") from cause
        return value if isinstance(value, dict) else {}

    def refusal(self, status: int, payload: bytes) -> EngineError:
        """The error for a status other than 200, in the server's own words, but without the API key.

        Its words are `{"error": {"message": ...}}`, `{"message": ...}`, or the text. Servers repeat the API key in
        what they refuse.
        """
        message: Any = None
        try:
            value = orjson.loads(payload)
            inner = value.get("error", value) if isinstance(value, dict) else None
            message = inner.get("message") if isinstance(inner, dict) else inner
        except orjson.JSONDecodeError:
            pass
        text = str(message) if message else payload.decode(errors="replace")
        if self._api_key:
            text = text.replace(self._api_key, "***")
        # Cut at last: half a key would not be found.
        return status_error(self.url, status, text if message else text[:500])

    async def close(self) -> None:
        """Ends all connections; requests on them end with `ReplicaUnavailableError`."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout)
        sent_twice = False
        while True:
            try:
                # A job of a buffer may name its engine, but only where the operator allows it: no redirects.
                async with self._opened().request(
                    method, self.url + path, data=body, allow_redirects=False, timeout=timeout
                ) as response:
                    return response.status, await response.read()
            except CONNECTION_ERRORS as error:
                if not _was_closing(error) or sent_twice or not wanted():
                    said = f"{type(error).__name__}: {error}"
                    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                        said = f"no answer within {timeout_s:g} s"  # not of a connect, which says so itself
                    raise ReplicaUnavailableError(f"{self.url}: {said}") from error
                sent_twice = True

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ReplicaUnavailableError("the engine is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                # Replies are read in one piece; the default high-water mark pauses the socket several times.
                read_bufsize=2**20,
            )
        return self._session


def _was_closing(error: BaseException) -> bool:
    """Whether it may have been a connection that was kept and that the server was just closing: once more.

    It does so with one that was idle for long, and uvicorn also after a 500.
    """
    kept = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    return kept and not isinstance(error, aiohttp.ClientConnectorError)


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
    text = f"{server} answers {status}: {message or '(no message)'}"
    if status in (401, 403):
        text += " (engine_kwargs.api_key_env names the variable with the key)"
    if status in (429, 503):
        return EngineOverloadedError(text)
    return TransientEngineError(text) if status == 408 or status >= 500 else EngineError(text)
