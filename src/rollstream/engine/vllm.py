"""vLLM servers: ids in, ids and log-probs out. See `vllm_wire` for their two routes."""

import asyncio
import logging
import secrets
from typing import Any

import msgspec
import orjson

from rollstream.aio import SharedCheck, finish_despite_cancellation
from rollstream.engine.base import Capabilities, EngineLoad
from rollstream.engine.checks import ModelLimits
from rollstream.engine.http_server import HttpServer, is_answered
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.load import ASK_TIMEOUT_S, VLLM_METRICS, LoadRoutes, read_metrics
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError, WeightsLostError
from rollstream.engine.servers import (
    ABORT_TIMEOUT_S,
    SERVER_KWARGS,
    ServerEngine,
    check_served_model,
    model_limits,
    model_names,
)
from rollstream.engine.vllm_wire import (
    COMPLETIONS,
    GENERATE,
    LogprobKind,
    Route,
    probe_body,
    read_probe,
    read_reply,
    request_body,
    server_request_id,
)
from rollstream.errors import EngineError, RollstreamError, TransientEngineError
from rollstream.sampling import server_sampling
from rollstream.trajectory import Completion

_LOG = logging.getLogger(__name__)

ENGINE_KWARGS: dict[str, Any] = {
    **SERVER_KWARGS,
    # Seconds for the one token that is sampled at start: the first request of a server may compile for half a
    # minute, and one that is busy with another run has a queue.
    "probe_timeout": 120.0,
}
"""Keys of `engine_kwargs` with their defaults."""

_ABORT = "/inference/v1/abort_requests"
"""Comes with the generate route. `/abort_requests`, of development servers, aborts everything when it is
given no request: that one is not asked whether it is there."""

_NO_SUCH_TEXT = "no such text"
"""A stop text for the probe: it asks whether a server takes any."""

_KIND = "a vLLM"


class VLLMReplica:
    """One vLLM server.

    Args:
        url: base URL, `http://host:port`.
        model_path: the model the caller means; a server with another one is refused.
        limits: what the model's folder says and servers don't.
        kwargs: see `ENGINE_KWARGS`.
    """

    def __init__(
        self, url: str, *, model_path: str | None, limits: ModelLimits | None, kwargs: dict[str, Any]
    ) -> None:
        self._server = HttpServer(url, kwargs)
        self._health = SharedCheck(self.health)
        self._model_path = model_path
        self._check_model: bool = kwargs["check_model"]
        self._probe_timeout: float = kwargs["probe_timeout"]
        self._update_timeout: float = kwargs["update_timeout"]
        self._vocab_size = limits.vocab_size if limits else None
        self._route: Route = COMPLETIONS
        self._abort_path: str | None = None
        self._is_dev = False
        self._model = ""
        self._names_requests = True
        self._said: Capabilities | None = None
        """What it said last."""
        self._paused_by_us = False
        """Since an update that failed. Until one goes well nothing can be sampled there."""
        self._in_flight: dict[str, asyncio.Task[bytes]] = {}
        self._loads = LoadRoutes([("/metrics", lambda page: read_metrics(page, VLLM_METRICS))])

    @property
    def name(self) -> str:
        return self._server.url

    async def describe(self) -> Capabilities:
        """See `Replica.describe`; while a pause of our own lasts, what the server said before it."""
        max_model_len, said = await self._choose_model()
        self._is_dev = bool(await self._server.ask("/weight_info", kind=_KIND))
        if not await self._is_paused():
            self._paused_by_us = False  # it was ended by somebody else, or the server was started anew
        elif self._paused_by_us and self._said is not None:
            return self._said
        else:
            raise ReplicaUnavailableError(f"{self.name} is paused (POST /resume ends that)")
        try:
            if await self._has_generate_route():
                self._route, self._abort_path = GENERATE, _ABORT
            else:
                self._route, self._abort_path = COMPLETIONS, "/abort_requests" if self._is_dev else None
            if said is None:
                logprobs, stop_strings = await self._probe()
            else:
                self._names_requests = True
                logprobs, stop_strings = said["logprobs"], said["stop_strings"]
        except TransientEngineError as error:
            raise ReplicaUnavailableError(str(error)) from error
        self._said = Capabilities(
            token_ids=True,
            logprobs=logprobs,
            seeds=said is None or said["seeds"],
            stop_strings=stop_strings,
            stop_token_ids=True,
            images=False,
            # Only the generate route says which weights sampled a token.
            update_weights=self._is_dev and self._route == GENERATE,
            max_model_len=max_model_len,
            vocab_size=self._vocab_size,
            extra_sampling=server_sampling(has_tokenizer=stop_strings) if said is None else (),
        )
        return self._said

    @property
    def resumes_aborted(self) -> bool:
        return self._abort_path is not None

    async def generate(self, request: ReplicaRequest) -> Completion:
        if request.aborted:
            return _aborted(request)
        route = self._route  # the one of now: a server that was restarted may have another
        body = request_body(route, request.prompt_ids, request.sampling, request.rid, self._model)
        task = asyncio.ensure_future(
            self._server.post(
                route,
                orjson.dumps(body),
                is_healthy=self._health.ask,
                wanted=lambda: not request.aborted,
            )
        )
        self._in_flight[request.rid] = task
        try:
            await asyncio.wait((task,))
            if task.cancelled():  # by `abort`, which knows no other way
                return _aborted(request)
            return read_reply(
                self.name,
                route,
                task.result(),
                request.sampling,
                rid=request.rid if self._names_requests else None,
                prompt_tokens=len(request.prompt_ids),
                vocab_size=self._vocab_size,
            )
        except TransientEngineError as error:
            # A server whose engine died answers 500.
            if await self._health.ask():
                raise
            raise ReplicaUnavailableError(f"{error}, and it is not healthy") from error
        finally:
            del self._in_flight[request.rid]
            task.cancel()  # closes the connection, which ends the request in the server
            await asyncio.gather(task, return_exceptions=True)

    async def abort(self, rid: str) -> None:
        """Ends a request in the server. One without an abort route loses what it has sampled of it."""
        if self._abort_path is None:
            if (task := self._in_flight.get(rid)) is not None:
                task.cancel()
            return
        body = {"request_ids": [server_request_id(self._route, rid)]}
        try:
            await self._server.tell(self._abort_path, body, timeout_s=ABORT_TIMEOUT_S)
        except RollstreamError as error:
            # A server that cannot be reached runs nothing that could be aborted.
            _LOG.debug("could not abort %s on %s: %s", rid, self.name, error)

    async def health(self) -> bool:
        if await is_answered(self._server.get("/health", timeout_s=self._server.health_timeout)) != 200:
            return False
        try:
            return not await self._is_paused()
        except EngineError:
            return False

    async def update_weights(self, source: str, version: int) -> None:
        """Loads weights from a folder that the server sees. Requests in flight go on with the new ones.

        The server is paused meanwhile, and stays paused when it fails: without its old weights and without
        the new ones it would die at the next request. Another update may mend it. Cancelling this takes
        effect when the server has loaded, or has not.
        """
        if self._said is None:
            await self.describe()  # weights of ours are nothing for a server of another model
        await finish_despite_cancellation(self._load_weights(source, version))

    async def _load_weights(self, source: str, version: int) -> None:
        reload = {
            "method": "reload_weights",
            "kwargs": {"weights_path": source},
            "timeout": self._update_timeout,
        }
        self._paused_by_us = True  # also when the answer is lost
        await self._tell("/pause?mode=keep")
        try:
            await self._tell("/collective_rpc", reload)
            # What is running is computed anew: its keys and values are those of the old weights.
            dropped = await self._tell("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
            if b'"success":true' not in dropped.replace(b" ", b""):
                raise EngineError(f"{self.name} keeps its prefix cache of the old weights")
            await self._tell("/update_weight_version", {"new_version": str(version)})
            await self._tell("/resume")
            self._paused_by_us = False
        except EngineError as error:
            raise WeightsLostError(f"{error} (it stays paused until an update goes well)") from error

    async def close(self) -> None:
        await self._health.close()
        await self._server.close()

    async def load(self) -> EngineLoad | None:
        """How busy the server is, by its `/metrics`."""
        return await self._loads.ask(lambda path: self._server.get(path, timeout_s=ASK_TIMEOUT_S))

    async def _is_paused(self) -> bool:
        """Whether requests wait for somebody to end a pause. Only development servers have pauses."""
        if not self._is_dev:
            return False
        return bool((await self._server.ask("/is_paused", kind=_KIND)).get("is_paused"))

    async def _choose_model(self) -> tuple[int | None, dict[str, Any] | None]:
        """Chooses which of the server's models is meant.

        Returns:
            its longest sequence, and what a server says that it can do: `rollstream serve` does, a vLLM is
            probed.
        """
        cards = (await self._server.ask("/v1/models", kind=_KIND)).get("data") or []
        if not cards:
            raise EngineError(f"{self.name}/v1/models names no model: is it {_KIND} server?")
        wanted = model_names(self._model_path or "")
        chosen = next((card for card in cards if wanted & _names(card)), cards[0])
        served = (chosen.get("root"), chosen.get("id"))
        check_served_model(self.name, served, self._model_path, strict=self._check_model)
        self._model = str(chosen.get("id"))
        # The card of an adapter has no length: it is its base model's.
        lengths = [card.get("max_model_len") for card in (chosen, *cards)]
        said = chosen.get("capabilities")
        length = next((length for length in lengths if isinstance(length, int)), None)
        return length, said if isinstance(said, dict) else None

    async def _has_generate_route(self) -> bool:
        # An abort of no request does nothing, and its route is there where the generate route is.
        # 403 without --enable-scale-out, 404 in older versions.
        return await self._takes(_ABORT, {"request_ids": []}, timeout_s=ABORT_TIMEOUT_S) is not None

    async def _probe(self) -> tuple[LogprobKind, bool]:
        """What log-probs are of, which no route says, and whether stop texts are taken."""
        rid = f"probe-{secrets.token_hex(4)}"
        payload = None
        # Without a tokenizer, a server refuses stop texts (--tokens-only), or takes them and never sees one
        # (--skip-tokenizer-init).
        detokenize = {"model": self._model, "tokens": [0]}
        if await self._takes("/detokenize", detokenize, timeout_s=self._probe_timeout) is not None:
            body = probe_body(self._route, rid, self._model, stop=[_NO_SUCH_TEXT])
            payload = await self._takes(self._route, body, timeout_s=self._probe_timeout)
        stop_strings = payload is not None
        if payload is None:
            body = probe_body(self._route, rid, self._model, stop=[])
            payload = await self._tell(self._route, body, timeout_s=self._probe_timeout)
        try:
            kind, self._names_requests = read_probe(payload, rid)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}{self._route} answers with something else: {error}") from error
        if kind == "none":
            _LOG.warning(
                "%s gives no log-probs, but something else (--logprobs-mode raw_logits or processed_logits?)",
                self.name,
            )
        return kind, stop_strings

    async def _takes(self, path: str, body: object, *, timeout_s: float) -> bytes | None:
        """The answer to something that a server may not have or may refuse; None if so."""
        try:
            return await self._tell(path, body, timeout_s=timeout_s)
        except (ReplicaUnavailableError, TransientEngineError):
            raise
        except EngineError as error:
            _LOG.info("%s does not take %s: %s", self.name, path, error)
            return None

    async def _tell(self, path: str, body: object = None, *, timeout_s: float | None = None) -> bytes:
        return await self._server.tell(path, body, timeout_s=timeout_s or self._update_timeout)


def _names(card: dict[str, Any]) -> set[str]:
    """What a model of `/v1/models` is called: by its server, and on its disk."""
    return set().union(*(model_names(str(card[key])) for key in ("id", "root") if card.get(key)))


def _aborted(request: ReplicaRequest) -> Completion:
    """Of a request that was aborted before there was anything."""
    return Completion([], [] if request.sampling.logprobs else None, "abort")


def _make_replica(url: str, options: EngineOptions) -> VLLMReplica:
    return VLLMReplica(
        url,
        model_path=options.model_path,
        limits=model_limits(options),
        kwargs=KIND.read_kwargs(options.engine_kwargs),
    )


class VLLMEngine(ServerEngine):
    """A pool of vLLM servers of the same model."""

    title = "vLLM"
    port = 8000


KIND = VLLMEngine.kind = EngineKind(
    "vllm", VLLMEngine.create, ENGINE_KWARGS, launches=("vllm",), make_replica=_make_replica
)
