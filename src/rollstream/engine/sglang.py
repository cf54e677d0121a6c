"""Client of SGLang servers: native `/generate`, ids in, ids and log-probs out.

What a server's failure is, for the rollout that meets it:

    no connection, connection lost, no HTTP            -> away
    502, 503, 504 and its health says no               -> away
    502, 503, 504 and it is healthy, other 5xx, 429    -> transient
    broken reply, an abort that nobody asked for       -> transient
    other 4xx                                          -> this request is bad

A request moves on from a server that is away; when all are, it is `EngineUnavailableError`.
"""

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from yarl import URL

from rollstream.engine.base import Capabilities
from rollstream.engine.checks import check_request, read_engine_kwargs, read_model_limits
from rollstream.engine.servers import LeastInFlight
from rollstream.engine.sglang_wire import (
    AWAY_STATUSES,
    ServerInfo,
    base_url,
    check_images,
    collapse_images,
    http_error,
    read_reply,
    request_body,
)
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

ENGINE_KWARGS: dict[str, Any] = {
    "connect_timeout": 10.0,  # seconds for one TCP (and TLS) connect
    "health_timeout": 20.0,  # seconds for /health; SGLang itself answers only after a generated token
    "info_timeout": 10.0,  # seconds for each question at start
    "api_key_env": "",  # name of the environment variable with the servers' API key
}
"""Keys of `engine_kwargs` with their defaults."""

_KEEP_ALIVE_S = 4.0
"""Below uvicorn's 5 s, so that an idle connection is closed by us and never under a request."""

_ABORT_TIMEOUT_S = 10.0
"""An abort is a courtesy to the server: not worth waiting longer."""

_CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""The server went away, before or in the middle of its reply, or what it sends is not HTTP."""

_WHAT_TO_CHECK = (
    "check that actor_rollout_ref.rollout.server_urls names SGLang servers and that they are running"
)


@dataclass(slots=True)
class _Flight:
    """A request while its `generate` runs."""

    rid: str
    server: str = ""
    """Where it was sent last."""
    aborted: bool = False
    """Whether `abort` was called for it."""


class SGLangEngine:
    """Drives one or several SGLang servers of the same model.

    A request goes to the server with the fewest in flight; when that one is away it moves on to the next,
    and `EngineUnavailableError` is raised only when none is there. There is no limit on time or on
    connections here: the caller bounds both. Log-probs are those of the distribution after the
    temperature and before top-p and top-k (SGLang's default), hence "processed".

    Args:
        server_urls: base URLs, `http://host:port`.
        model_path: the model the caller means; a server with another one is warned about. Where it is a
            folder, it says what the servers don't (vocabulary size, longest sequence).
        max_model_len: prompt plus response tokens at most; None takes the servers' own limit.
        engine_kwargs: see `ENGINE_KWARGS`.
    """

    def __init__(
        self,
        server_urls: Sequence[str],
        *,
        model_path: str | None = None,
        max_model_len: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not server_urls:
            raise ConfigError(
                "engine 'sglang' needs the servers' URLs: "
                "actor_rollout_ref.rollout.server_urls=[http://host:30000]"
            )
        self._servers = LeastInFlight([base_url(url) for url in server_urls])
        self._generate_urls = {url: URL(url + "/generate") for url in self._servers.urls}
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._image_token_id: int | None = None
        kwargs = read_engine_kwargs("sglang", engine_kwargs or {}, ENGINE_KWARGS)
        self._connect_timeout: float = kwargs["connect_timeout"]
        self._health_timeout: float = kwargs["health_timeout"]
        self._info_timeout: float = kwargs["info_timeout"]
        self._headers = {"Content-Type": "application/json"}
        if name := kwargs["api_key_env"]:
            if name not in os.environ:
                raise ConfigError(f"engine_kwargs.api_key_env: no {name!r} in the environment")
            self._headers["Authorization"] = f"Bearer {os.environ[name]}"
        self._session: aiohttp.ClientSession | None = None
        self._capabilities: Capabilities | None = None
        # A rid of our own on the wire: one that was cancelled may still be known to the server when the same
        # request comes again, and two runs may share a server.
        self._nonce = secrets.token_hex(4)
        self._counter = itertools.count()
        self._in_flight: dict[str, _Flight] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._checks: dict[str, asyncio.Task[bool]] = {}

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    async def start(self) -> None:
        """Asks every server what it is; at least one has to answer.

        Raises:
            EngineUnavailableError: no server is there, or none talks HTTP.
            EngineError: a server refuses to say (e.g. 401), or is not SGLang.
        """
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Replies are read in one piece; the default high-water mark pauses the socket several times.
            read_bufsize=2**20,
        )
        try:
            await self._ask_servers()
        except BaseException:
            await self.close()
            raise

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        flight = _Flight(f"{request_id}.{self._nonce}{next(self._counter)}")
        if images:
            sent_ids = collapse_images(prompt_ids, self._image_token_id, len(images))
            body = request_body(sent_ids, sampling, flight.rid, check_images(images))
        else:
            body = request_body(prompt_ids, sampling, flight.rid)
        self._in_flight[request_id] = flight
        try:
            answer = await self._post(flight, body)
        finally:
            self._in_flight.pop(request_id, None)
        if answer is None:
            return Completion([], [] if sampling.logprobs else None, "abort")
        server, payload = answer
        return read_reply(
            server,
            payload,
            sampling,
            rid=flight.rid,
            vocab_size=self.capabilities.vocab_size,
            aborted=flight.aborted,
            image_prompt_tokens=len(prompt_ids) if images else None,
        )

    async def abort(self, request_id: str) -> None:
        if (flight := self._in_flight.get(request_id)) is not None:
            flight.aborted = True
            await self._abort(flight.server, flight.rid)

    async def update_weights(self, source: str, version: int) -> None:
        raise EngineError("engine 'sglang': updating weights is not supported yet")

    async def health(self) -> bool:
        """Whether at least one server says it is healthy."""
        if self._session is None:
            return False
        checks = [asyncio.ensure_future(self._is_healthy(url)) for url in self._servers.urls]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return True
            return False
        finally:
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineUnavailableError("the engine is closed")
        return self._session

    async def _post(self, flight: _Flight, body: bytes) -> tuple[str, bytes] | None:
        """Sends a request to one server after the other until one answers 200.

        Returns:
            that server and its reply; None if the request was aborted and its server is away: it is not
            worth another server.
        """
        tried: dict[str, str] = {}
        dropped: set[str] = set()
        while not flight.aborted and (server := self._servers.pick(tried)) is not None:
            flight.server = server
            failed = False
            try:
                async with self._open_session().post(self._generate_urls[server], data=body) as response:
                    status, payload = response.status, await response.read()
                # Even if it is only busy, others come first for a moment.
                failed = status in AWAY_STATUSES
            except _CONNECTION_ERRORS as error:
                failed = True
                if isinstance(error, aiohttp.ServerDisconnectedError) and server not in dropped:
                    # It may have been an idle connection that the server was just closing: once more.
                    dropped.add(server)
                else:
                    tried[server] = f"{type(error).__name__}: {error}"
                continue
            except asyncio.CancelledError:
                self._abort_soon(server, flight.rid)
                raise
            finally:
                self._servers.release(server, failed=failed)
            if status == 200:
                return server, payload
            refusal = http_error(server, status, payload)
            if status not in AWAY_STATUSES or await self._check(server):
                raise refusal
            tried[server] = f"{refusal}, and it is not healthy"
        if flight.aborted:
            return None
        causes = "; ".join(f"{url}: {cause}" for url, cause in tried.items())
        raise EngineUnavailableError(f"no SGLang server answers ({causes})")

    async def _check(self, server: str) -> bool:
        """Whether a server is healthy. Those who ask while a check is running share its answer: when a server
        goes, all its requests ask at once. The check ends by its own timeout, or with `close`.
        """
        check = self._checks.get(server)
        if check is None:
            check = self._checks[server] = asyncio.ensure_future(self._is_healthy(server))
            check.add_done_callback(lambda _: self._checks.pop(server))
        await asyncio.wait((check,))
        return not check.cancelled() and check.result()

    def _abort_soon(self, server: str, rid: str) -> None:
        # Held by the set until it is done; `close` waits for it. Cancellation itself is not delayed.
        task = asyncio.get_running_loop().create_task(self._abort(server, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, server: str, rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_ABORT_TIMEOUT_S)
        try:
            data = orjson.dumps({"rid": rid})
            async with self._open_session().post(server + "/abort_request", data=data, timeout=timeout):
                pass
        except (*_CONNECTION_ERRORS, EngineUnavailableError) as error:
            # A server that cannot be reached runs nothing that could be aborted.
            _LOG.debug("could not abort %s on %s: %s", rid, server, error)

    async def _is_healthy(self, server: str) -> bool:
        """SGLang's `/health` generates a token. A router's may only say that the router runs; then its
        `/readiness`, which SGLang does not have, says whether there are servers behind it.
        """
        try:
            if (await self._get(server, "/health", self._health_timeout))[0] != 200:
                return False
            return (await self._get(server, "/readiness", self._health_timeout))[0] not in AWAY_STATUSES
        except (*_CONNECTION_ERRORS, EngineUnavailableError):
            return False

    async def _get(self, server: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._open_session().get(server + path, timeout=timeout) as response:
            return response.status, await response.read()

    async def _get_info(self, server: str, path: str) -> dict[str, Any]:
        """A server's answer to a question; empty where it does not know the route."""
        status, payload = await self._get(server, path, self._info_timeout)
        if status in (404, 405):
            return {}
        if status != 200:
            error = http_error(server, status, payload)
            raise EngineUnavailableError(str(error)) if status in AWAY_STATUSES else error
        try:
            value = orjson.loads(payload)
        except orjson.JSONDecodeError as cause:
            raise EngineError(f"{server}{path} does not answer with JSON: is it an SGLang server?") from cause
        return value if isinstance(value, dict) else {}

    async def _ask_servers(self) -> None:
        answers = await asyncio.gather(*map(self._describe, self._servers.urls), return_exceptions=True)
        found: list[ServerInfo] = []
        silent: list[str] = []
        for url, answer in zip(self._servers.urls, answers, strict=True):
            if isinstance(answer, ServerInfo):
                found.append(answer)
            elif isinstance(answer, (*_CONNECTION_ERRORS, EngineUnavailableError)):
                silent.append(f"{url}: {type(answer).__name__}: {answer}")
            else:
                raise answer
        if not found:
            raise EngineUnavailableError(f"no SGLang server answers ({'; '.join(silent)}): {_WHAT_TO_CHECK}")
        for cause in silent:
            _LOG.warning("SGLang server does not answer, going on without it: %s", cause)
        limits = read_model_limits(Path(self._model_path)) if self._model_path else None
        self._image_token_id = limits.image_token_id if limits else None
        lengths = [info.max_model_len for info in found] + [limits.max_model_len if limits else None]
        known = [length for length in (self._max_model_len, *lengths) if length is not None]
        vocab_sizes = [info.vocab_size for info in found if info.vocab_size is not None]
        if limits is not None and limits.vocab_size is not None:
            vocab_sizes.append(limits.vocab_size)
        self._capabilities = Capabilities(
            token_ids=True,
            logprobs="processed",
            seeds=all(info.deterministic for info in found),
            stop_strings=not any(info.skips_tokenizer for info in found),
            stop_token_ids=True,
            images=all(info.sees_images for info in found),
            update_weights=False,
            max_model_len=min(known, default=None),
            vocab_size=min(vocab_sizes, default=None),
            # SGLang looks at stop_token_ids only where it looks at the end token.
            stop_token_ids_with_ignore_eos=False,
        )

    async def _describe(self, server: str) -> ServerInfo:
        model = await self._get_info(server, "/get_model_info")
        info = await self._get_info(server, "/get_server_info")
        max_model_len = info.get("context_length")
        if max_model_len is None:
            models = (await self._get_info(server, "/v1/models")).get("data") or [{}]
            max_model_len = models[0].get("max_model_len")
        served = model.get("model_path") or info.get("model_path")
        if self._model_path and served and Path(served).name != Path(self._model_path).name:
            _LOG.warning("%s serves %r, but model.path is %r", server, served, self._model_path)
        return ServerInfo(
            max_model_len=max_model_len,
            vocab_size=model.get("vocab_size") or info.get("vocab_size"),
            deterministic=bool(info.get("enable_deterministic_inference")),
            skips_tokenizer=bool(info.get("skip_tokenizer_init")),
            sees_images=bool(model.get("has_image_understanding")),
        )
