"""Client of SGLang servers: native `/generate`, ids in, ids and log-probs out.

Wire format: https://docs.sglang.io/basic_usage/native_api.html and sampling_params.html.
"""

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
from yarl import URL

from rollstream.engine.base import Capabilities
from rollstream.engine.checks import check_request, ids_fit, read_engine_kwargs, read_model_limits
from rollstream.engine.servers import LeastInFlight
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, FinishReason, SamplingParams

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

_CONNECTION_ERRORS = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    ConnectionError,
    TimeoutError,
)
"""The server went away, before or in the middle of its reply."""


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, id, text or null]`. Hundreds per reply: without gc, and without the text."""

    logprob: float
    token_id: int


class _MetaInfo(msgspec.Struct):
    id: str | None = None
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[_TokenLogprob] | None = None
    cached_tokens: int = 0
    weight_version: Any = None


class _Reply(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


_REPLY = msgspec.json.Decoder(_Reply)
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangEngine:
    """Drives one or several SGLang servers of the same model.

    A request goes to the server with the fewest in flight; when the connection fails it moves on to the
    next, and `EngineUnavailableError` is raised only when none answers. There is no limit on time or on
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
        self._servers = LeastInFlight([_base_url(url) for url in server_urls])
        self._generate_urls = {url: URL(url + "/generate") for url in self._servers.urls}
        self._model_path = model_path
        self._max_model_len = max_model_len
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
        self._in_flight: dict[str, tuple[str, str]] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    async def start(self) -> None:
        """Asks every server what it is; at least one has to answer.

        Raises:
            EngineUnavailableError: no server answers.
            EngineError: a server refuses to say (e.g. 401).
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
        rid = f"{request_id}.{self._nonce}{next(self._counter)}"
        body = _request_body(prompt_ids, sampling, rid)
        tried: dict[str, str] = {}
        dropped: set[str] = set()
        while (server := self._servers.pick(tried)) is not None:
            self._in_flight[request_id] = (rid, server)
            failed = False
            try:
                async with self._open_session().post(self._generate_urls[server], data=body) as response:
                    status, payload = response.status, await response.read()
            except _CONNECTION_ERRORS as error:
                failed = True
                if isinstance(error, aiohttp.ServerDisconnectedError) and server not in dropped:
                    # It may have been an idle connection that the server was just closing: once more.
                    dropped.add(server)
                else:
                    tried[server] = f"{type(error).__name__}: {error}"
                continue
            except asyncio.CancelledError:
                self._abort_soon(server, rid)
                raise
            finally:
                self._servers.release(server, failed=failed)
                self._in_flight.pop(request_id, None)
            if status != 200:
                raise _http_error(server, status, payload)
            return self._read_reply(server, payload, sampling, rid)
        causes = "; ".join(f"{url}: {cause}" for url, cause in tried.items())
        raise EngineUnavailableError(f"no SGLang server answers ({causes})")

    async def abort(self, request_id: str) -> None:
        if request_id in self._in_flight:
            rid, server = self._in_flight[request_id]
            await self._abort(server, rid)

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
        await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineUnavailableError("the engine is closed")
        return self._session

    def _read_reply(self, server: str, payload: bytes, sampling: SamplingParams, rid: str) -> Completion:
        """Checks the reply and makes a completion of it; raises `TransientEngineError` if it is broken."""
        try:
            reply = _REPLY.decode(payload)
        except msgspec.DecodeError as error:
            raise _broken(server, f"it cannot be read: {error} ({len(payload)} bytes)") from error
        meta = reply.meta_info
        if meta.id is not None and meta.id != rid:
            raise _broken(server, f"it answers request {meta.id!r} instead of {rid!r}")
        if meta.finish_reason is None or meta.finish_reason.type not in _FINISH_REASONS:
            raise _broken(server, f"its finish reason is {meta.finish_reason!r}")
        if meta.finish_reason.status_code is not None:
            raise _status_error(server, meta.finish_reason.status_code, str(meta.finish_reason.message))

        logprobs: list[float] | None = None
        if sampling.logprobs:
            if meta.output_token_logprobs is None:
                raise _broken(server, "it has no log-probs, which were asked for")
            ids = [entry.token_id for entry in meta.output_token_logprobs]
            logprobs = [entry.logprob for entry in meta.output_token_logprobs]
            if reply.output_ids is not None and reply.output_ids != ids:
                raise _broken(server, f"{len(reply.output_ids)} ids do not match {len(ids)} log-probs")
        elif reply.output_ids is not None:
            ids = reply.output_ids
        else:
            raise _broken(server, "it has no output_ids; this SGLang gives ids only with log-probs")
        vocab_size = self.capabilities.vocab_size
        if not ids_fit(ids, vocab_size):
            raise _broken(server, f"it has ids outside the vocabulary of {vocab_size} ids")
        if len(ids) > sampling.max_tokens:
            raise _broken(server, f"it has {len(ids)} tokens, more than max_tokens {sampling.max_tokens}")
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=_FINISH_REASONS[meta.finish_reason.type],
            policy_versions=[(0, _parse_version(meta.weight_version))],
            cached_prompt_tokens=meta.cached_tokens,
        )

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
        try:
            return (await self._get(server, "/health", self._health_timeout))[0] == 200
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
            raise _http_error(server, status, payload)
        try:
            value = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{server}{path} does not answer with JSON: is it an SGLang server?") from error
        return value if isinstance(value, dict) else {}

    async def _ask_servers(self) -> None:
        answers = await asyncio.gather(*map(self._describe, self._servers.urls), return_exceptions=True)
        found: list[_ServerInfo] = []
        silent: list[str] = []
        for url, answer in zip(self._servers.urls, answers, strict=True):
            if isinstance(answer, _ServerInfo):
                found.append(answer)
            elif isinstance(answer, _CONNECTION_ERRORS):
                silent.append(f"{url}: {type(answer).__name__}: {answer}")
            else:
                raise answer
        if not found:
            raise EngineUnavailableError(f"no SGLang server answers ({'; '.join(silent)})")
        for cause in silent:
            _LOG.warning("SGLang server does not answer, going on without it: %s", cause)
        limits = read_model_limits(Path(self._model_path)) if self._model_path else None
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
            images=False,
            update_weights=False,
            max_model_len=min(known, default=None),
            vocab_size=min(vocab_sizes, default=None),
            # SGLang looks at stop_token_ids only where it looks at the end token.
            stop_token_ids_with_ignore_eos=False,
        )

    async def _describe(self, server: str) -> "_ServerInfo":
        model = await self._get_info(server, "/get_model_info")
        info = await self._get_info(server, "/get_server_info")
        max_model_len = info.get("context_length")
        if max_model_len is None:
            models = (await self._get_info(server, "/v1/models")).get("data") or [{}]
            max_model_len = models[0].get("max_model_len")
        served = model.get("model_path") or info.get("model_path")
        if self._model_path and served and Path(served).name != Path(self._model_path).name:
            _LOG.warning("%s serves %r, but model.path is %r", server, served, self._model_path)
        return _ServerInfo(
            max_model_len=max_model_len,
            vocab_size=model.get("vocab_size") or info.get("vocab_size"),
            deterministic=bool(info.get("enable_deterministic_inference")),
            skips_tokenizer=bool(info.get("skip_tokenizer_init")),
        )


class _ServerInfo(msgspec.Struct):
    max_model_len: int | None
    vocab_size: int | None
    deterministic: bool
    """Seeds work only with --enable-deterministic-inference; without it they are silently ignored."""
    skips_tokenizer: bool
    """Without its tokenizer a server cannot match stop strings."""


def _base_url(url: str) -> str:
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"server URL {url!r} must look like http://host:port")
    return url.rstrip("/")


def _request_body(prompt_ids: list[int], sampling: SamplingParams, rid: str) -> bytes:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.stop:
        params["stop"] = sampling.stop
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    return orjson.dumps(
        {
            "rid": rid,
            "input_ids": prompt_ids,
            "sampling_params": params,
            "return_logprob": sampling.logprobs,
            "stream": False,
        }
    )


def _parse_version(weight_version: object) -> int:
    """SGLang's weight version is free text, "default" until the first update: that is version 0."""
    try:
        return int(str(weight_version))
    except ValueError:
        return 0


def _broken(server: str, what: str) -> TransientEngineError:
    return TransientEngineError(f"broken reply from {server}: {what}")


def _http_error(server: str, status: int, payload: bytes) -> EngineError:
    return _status_error(server, status, _error_message(payload))


def _status_error(server: str, status: int, message: str) -> EngineError:
    text = f"{server} answers {status}: {message}"
    if status in (408, 429) or status >= 500:
        return TransientEngineError(text)
    return EngineError(text)


def _error_message(payload: bytes) -> str:
    """The server's own words: `{"error": {"message": ...}}`, `{"message": ...}`, or the text as it is."""
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict):
        inner = value.get("error", value)
        message = inner.get("message") if isinstance(inner, dict) else inner
        if message:
            return str(message)
    return payload[:500].decode(errors="replace") or "(no message)"
