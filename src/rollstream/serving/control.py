"""SGLang's routes beside `/generate`: health, who you are, load, aborts, pauses, weights.

Source: https://docs.sglang.io/basic_usage/native_api.html and advanced_features/sglang_for_rl.html.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

import rollstream
from rollstream.chat.wires.requests import RequestError, read_object, read_parameters, request_object
from rollstream.errors import EngineError, RollstreamError
from rollstream.metrics_text import family, metrics_page
from rollstream.serving.model import ServedModel
from rollstream.serving.service import EngineService
from rollstream.web import HTTPError, Request, Route, json_response, weights_below


class _Abort(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: str = "abort"


class _WeightUpdate(msgspec.Struct):
    model_path: str
    weight_version: str | int | None = None
    abort_all_requests: bool = False


_ABORT_WORDS = frozenset(("finished_reason", "abort_message"))

_UPDATE_WORDS = frozenset(("load_format", "is_async", "torch_empty_cache", "token_step"))
"""How SGLang loads; what is loaded is the same."""

_UPDATE_NEUTRAL = {"keep_pause": False, "recapture_cuda_graph": False, "flush_cache": True}

_AS_OTHERS_SAY = {
    "running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "queued": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    "kv_usage": ("sglang:token_usage", "vllm:kv_cache_usage_perc"),
    "preemptions": ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total"),
}
"""What clients of those servers read, see `engine.load`."""


class ControlRoutes:
    """The handlers.

    Args:
        model: what is served.
        service: its engine.
        answered: HTTP requests by route and status.
        weights: folders below which clients may name weights.
    """

    def __init__(
        self,
        model: ServedModel,
        service: EngineService,
        answered: Counter[tuple[str, int]],
        weights: Iterable[Path],
    ) -> None:
        self._model = model
        self._service = service
        self._answered = answered
        self._weights = tuple(weights)

    def routes(self) -> list[Route]:
        """What goes where. Load balancers and monitoring have no key; as in SGLang."""
        return [
            Route("GET", "/health", self.health, open=True),
            Route("GET", "/health_generate", self.health_generate, open=True),
            Route("GET", "/metrics", self.metrics, open=True),
            Route("GET", "/flush_cache", self.flush_cache),
            Route("POST", "/flush_cache", self.flush_cache),
            Route("GET", "/get_load", self.load),
            Route("GET", "/get_model_info", self.model_info),
            Route("GET", "/get_server_info", self.server_info),
            Route("GET", "/get_weight_version", self.weight_version),
            Route("POST", "/abort_request", self.abort),
            Route("POST", "/pause_generation", self.pause),
            Route("POST", "/continue_generation", self.resume),
            Route("POST", "/update_weights_from_disk", self.update_weights),
        ]

    async def health(self, request: Request) -> web.Response:
        """200 when a request sent now would be served, else 503; starts an engine that died again."""
        return web.Response(status=200 if await self._service.health() else 503)

    async def health_generate(self, request: Request) -> web.Response:
        """The same, by sampling a token."""
        try:
            if await self._service.health():
                await self._service.try_out()
                return web.Response()
        except EngineError:
            pass
        return web.Response(status=503)

    async def model_info(self, request: Request) -> web.Response:
        """What clients ask about the weights."""
        return json_response(
            {
                **self._describe(),
                "is_generation": True,
                "has_image_understanding": False,
            }
        )

    async def server_info(self, request: Request) -> web.Response:
        """What SGLang's clients ask for, and what the engine can."""
        capabilities = self._service.capabilities
        return json_response(
            {
                **self._describe(),
                "served_model_name": self._model.name,
                "context_length": capabilities.max_model_len,
                # SGLang's words: seeds are honoured, and stop strings are not found.
                "enable_deterministic_inference": capabilities.seeds,
                "skip_tokenizer_init": not capabilities.stop_strings,
                "version": f"rollstream {rollstream.__version__}",
                "status": "paused" if self._service.paused else "ready",
                "engine": self._model.engine,
                "capabilities": asdict(capabilities),
            }
        )

    def _describe(self) -> dict[str, Any]:
        return {
            "model_path": self._service.model_path,
            "tokenizer_path": self._model.path,
            "weight_version": str(self._service.weight_version),
            "vocab_size": self._service.capabilities.vocab_size,
        }

    async def weight_version(self, request: Request) -> web.Response:
        """The version of answers that begin now."""
        return json_response({"weight_version": str(self._service.weight_version)})

    async def load(self, request: Request) -> web.Response:
        """How much there is to do; a list, since SGLang has one entry for each data-parallel rank."""
        load = await self._service.load()
        running, waiting = self._service.running, self._service.waiting
        queued = min(load.queued, running) if load is not None else 0
        return json_response(
            [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting + queued}]
        )

    async def abort(self, request: Request) -> web.Response:
        """Ends one request or all; one that is not in flight may just have ended."""
        asked = await request_object(request, partial(read_parameters, kind=_Abort, harmless=_ABORT_WORDS))
        if asked.abort_all or asked.rid:
            await self._service.abort(None if asked.abort_all else asked.rid)
        return web.Response()

    async def flush_cache(self, request: Request) -> web.Response:
        """Nothing to do without a prefix cache; engines cannot empty one while they run."""
        if self._model.keeps_prefixes:
            raise RequestError("this engine has a prefix cache and cannot flush it", code="unsupported")
        return web.Response(text="There is no prefix cache to flush.\n")

    async def pause(self, request: Request) -> web.Response:
        """Aborts what is in flight and holds back what comes."""
        body = await request.body()
        asked = read_parameters(read_object(body) if body.strip() else {}, _Pause)
        if asked.mode != "abort":
            raise RequestError(f"mode {asked.mode!r} is not supported, but 'abort'", param="mode")
        await self._service.pause()
        return json_response({"message": "Generation paused.", "status": "ok"})

    async def resume(self, request: Request) -> web.Response:
        """Ends a pause."""
        self._service.resume()
        return json_response({"message": "Generation continues.", "status": "ok"})

    async def update_weights(self, request: Request) -> web.Response:
        """Loads weights from below the operator's folders; 400 from an engine that cannot.

        What is in flight goes on with the new weights, or returns what it has with `abort_all_requests`.
        """
        read = partial(read_parameters, kind=_WeightUpdate, harmless=_UPDATE_WORDS, neutral=_UPDATE_NEUTRAL)
        asked = await request_object(request, read)
        try:
            folder = str(weights_below(self._weights, asked.model_path))
            version = _version(asked.weight_version)
            if asked.abort_all_requests:
                await self._service.abort()
            version = await self._service.update_weights(folder, version)
        except RollstreamError as error:
            # SGLang's shape, with OpenAI's beside it.
            body = {"success": False, "message": str(error), "error": {"message": str(error)}}
            return json_response(body, error.status if isinstance(error, HTTPError) else 400)
        body = {"success": True, "message": f"weights loaded, version {version}", "num_paused_requests": 0}
        return json_response(body)

    async def metrics(self, request: Request) -> web.Response:
        """For Prometheus. What the engine does not say of its load, or a part of it, is not there."""
        service, load = self._service, await self._service.load()
        finished: dict[tuple[str, ...], float] = {
            (reason,): number for reason, number in service.finished.items()
        }
        answered: dict[tuple[str, ...], float] = {
            (route, str(status)): number for (route, status), number in self._answered.items()
        }
        families = [
            family("rollstream_samples_running", "Samples that the engine has", service.running),
            family(
                "rollstream_samples_waiting", "Samples held back by a pause or an outage", service.waiting
            ),
            family("rollstream_paused", "1 during a pause", int(service.paused)),
            family("rollstream_weight_version", "Version of the weights", service.weight_version),
            family("rollstream_samples_total", "Samples by finish reason", finished, ["finish_reason"]),
            family("rollstream_prompt_tokens_total", "Tokens of finished prompts", service.prompt_tokens),
            family("rollstream_generated_tokens_total", "Tokens sampled", service.generated_tokens),
            family("rollstream_http_requests_total", "Requests answered", answered, ["route", "status"]),
            family(
                "rollstream_replaced_surrogates_total",
                "Halves of surrogate pairs in requests that became U+FFFD",
                request.replaced_surrogates_in_all,
            ),
        ]
        for part, names in _AS_OTHERS_SAY.items():
            value = getattr(load, part, None)
            if value is not None:
                value += service.waiting if part == "queued" else 0
                families += [family(name, part, value) for name in names]
        return web.Response(body=metrics_page(families), content_type="text/plain")


def _version(asked: str | int | None) -> int | None:
    if asked is None:
        return None
    text = str(asked)
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63):  # as it is stored
        raise RequestError(
            f"weight_version {asked!r} must be a number from 0 to 2**63 - 1: it is stored with each token",
            param="weight_version",
        )
    return int(text)
