"""SGLang servers: native `/generate`, ids in, ids and log-probs out.

Source: https://docs.sglang.io/basic_usage/native_api.html.
"""

import logging
from typing import Any

from rollstream.aio import SharedCheck
from rollstream.engine.base import Capabilities, EngineLoad
from rollstream.engine.checks import ModelLimits
from rollstream.engine.http_server import AWAY_STATUSES, HttpServer, is_answered
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.load import (
    ASK_TIMEOUT_S,
    SGLANG_METRICS,
    LoadRoutes,
    read_metrics,
    read_sglang_loads,
)
from rollstream.engine.replica import ReplicaRequest, WeightsLostError
from rollstream.engine.servers import (
    ABORT_TIMEOUT_S,
    SERVER_KWARGS,
    ServerEngine,
    check_served_model,
    model_limits,
    model_names,
)
from rollstream.engine.sglang_wire import (
    check_images,
    collapse_images,
    parse_version,
    read_reply,
    request_body,
)
from rollstream.errors import EngineError, RollstreamError
from rollstream.sampling import server_sampling
from rollstream.trajectory import Completion

_LOG = logging.getLogger(__name__)

ENGINE_KWARGS = SERVER_KWARGS
"""Keys of `engine_kwargs` with their defaults."""


class SGLangReplica:
    """One SGLang server.

    Log-probs are those of the distribution after the temperature and before top-p and top-k (SGLang's
    default), hence "processed".

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
        self._update_timeout: float = kwargs["update_timeout"]
        self._image_token_id = limits.image_token_id if limits else None
        self._check_model: bool = kwargs["check_model"]
        self._loaded = ""
        """Folder of the weights of the last update: a server calls its model by that from then on."""
        self._model_vocab_size = limits.vocab_size if limits else None
        self._vocab_size = self._model_vocab_size
        self._is_rollstream = False
        self._loads = LoadRoutes(
            [
                ("/metrics", lambda page: read_metrics(page, SGLANG_METRICS)),
                ("/v1/loads", read_sglang_loads),
                ("/get_load", read_sglang_loads),
            ]
        )

    @property
    def name(self) -> str:
        return self._server.url

    async def describe(self) -> Capabilities:
        model = await self._server.ask("/get_model_info", kind="an SGLang")
        info = await self._server.ask("/get_server_info", kind="an SGLang")
        max_model_len = info.get("context_length")
        if max_model_len is None:
            models = (await self._server.ask("/v1/models", kind="an SGLang")).get("data") or [{}]
            max_model_len = models[0].get("max_model_len")
            if not (model or info or models[0]):
                hint = " (leave /v1 out of its URL)" if self.name.endswith("/v1") else ""
                raise EngineError(f"{self.name} has no /get_model_info: is it an SGLang server?{hint}")
        served = model.get("model_path") or info.get("model_path")
        if not self._loaded or not model_names(self._loaded) & model_names(str(served)):
            # A trainer's weights lie in a folder of theirs; the tokenizer stays where it was.
            names = (served, info.get("served_model_name"), model.get("tokenizer_path"))
            check_served_model(self.name, names, self._model_path, strict=self._check_model)
        sizes = [model.get("vocab_size") or info.get("vocab_size"), self._model_vocab_size]
        self._vocab_size = min((size for size in sizes if size is not None), default=None)
        said = info.get("capabilities")  # of `rollstream serve`, whose engines differ
        self._is_rollstream = isinstance(said, dict)
        kind = said.get("logprobs") if isinstance(said, dict) else None
        has_tokenizer = not info.get("skip_tokenizer_init")
        return Capabilities(
            token_ids=True,
            logprobs=kind if kind in ("raw", "processed", "none") else "processed",
            # Without --enable-deterministic-inference seeds are silently ignored.
            seeds=bool(info.get("enable_deterministic_inference")),
            # Without its tokenizer a server cannot match stop strings.
            stop_strings=has_tokenizer,
            stop_token_ids=True,
            # A server of a text model takes images without a word and ignores them.
            images=bool(model.get("has_image_understanding")),
            update_weights=True,
            max_model_len=max_model_len,
            vocab_size=self._vocab_size,
            # SGLang looks at stop_token_ids only where it looks at the end token.
            stop_token_ids_with_ignore_eos=False,
            extra_sampling=() if self._is_rollstream else server_sampling(has_tokenizer=has_tokenizer),
        )

    @property
    def resumes_aborted(self) -> bool:
        return True

    async def generate(self, request: ReplicaRequest) -> Completion:
        ids, images = request.prompt_ids, request.images
        if images:
            sent_ids = collapse_images(ids, self._image_token_id, len(images))
            body = request_body(sent_ids, request.sampling, request.rid, check_images(images))
        else:
            body = request_body(ids, request.sampling, request.rid)
        payload = await self._server.post(
            "/generate", body, is_healthy=self._health.ask, wanted=lambda: not request.aborted
        )
        return read_reply(
            self.name,
            payload,
            request.sampling,
            rid=request.rid,
            vocab_size=self._vocab_size,
            image_prompt_tokens=len(ids) if images else None,
            ends_are_seen=self._is_rollstream,
        )

    async def abort(self, rid: str) -> None:
        try:
            await self._server.tell("/abort_request", {"rid": rid}, timeout_s=ABORT_TIMEOUT_S)
        except RollstreamError as error:
            # A server that cannot be reached runs nothing that could be aborted.
            _LOG.debug("could not abort %s on %s: %s", rid, self.name, error)

    async def health(self) -> bool:
        """SGLang's `/health` generates a token. A router's may only say that the router runs; then its
        `/readiness`, which SGLang does not have, says whether there are servers behind it.
        """
        timeout = self._server.health_timeout
        if await is_answered(self._server.get("/health", timeout_s=timeout)) != 200:
            return False
        ready = await is_answered(self._server.get("/readiness", timeout_s=timeout))
        return ready is not None and ready not in AWAY_STATUSES

    async def update_weights(self, source: str, version: int) -> None:
        body = {"model_path": source, "weight_version": str(version)}
        payload = await self._server.tell("/update_weights_from_disk", body, timeout_s=self._update_timeout)
        if b'"success":false' in payload.replace(b" ", b""):
            raise EngineError(
                f"{self.name} could not load {source}: {payload[:500].decode(errors='replace')}"
            )
        self._loaded = source
        said = (await self._server.ask("/get_model_info", kind="an SGLang")).get("weight_version")
        if parse_version(said) != version:
            # The version of a token is what the server says with it.
            raise WeightsLostError(
                f"{self.name} has loaded {source}, but says weight version {said!r} and not {version}: "
                "this SGLang is too old to tell which weights a token is from"
            )

    async def load(self) -> EngineLoad | None:
        """How busy the server is. `/metrics`, if it was started with them, say more than its load routes."""
        return await self._loads.ask(lambda path: self._server.get(path, timeout_s=ASK_TIMEOUT_S))

    async def close(self) -> None:
        await self._health.close()
        await self._server.close()


def _make_replica(url: str, options: EngineOptions) -> SGLangReplica:
    return SGLangReplica(
        url,
        model_path=options.model_path,
        limits=model_limits(options),
        kwargs=KIND.read_kwargs(options.engine_kwargs),
    )


class SGLangEngine(ServerEngine):
    """A pool of SGLang servers of the same model."""

    title = "SGLang"
    port = 30000


KIND = SGLangEngine.kind = EngineKind(
    "sglang",
    SGLangEngine.create,
    ENGINE_KWARGS,
    launches=("sglang", "rollstream"),
    make_replica=_make_replica,
)
