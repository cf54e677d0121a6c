"""SGLang's routes beside `/generate`: health, who you are, load, aborts, pauses, weights.

Source: https://docs.sglang.io/basic_usage/native_api.html and advanced_features/sglang_for_rl.html.
"""

import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

import rollstream
from rollstream.chat.wires.requests import (
    RequestError,
    read_object,
    read_parameters,
    refusal_of,
    request_object,
)
from rollstream.errors import EngineError, RollstreamError
from rollstream.metrics_text import family, metrics_page
from rollstream.serving.model import ServedModel
from rollstream.serving.service import EngineService
from rollstream.trajectory import SamplingParams
from rollstream.web import Request, Route, json_response, weights_below

Version = (
    Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}\Z")] | Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
)
"""A number, or its digits: it is stored with each token."""


class _Abort(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: Literal["abort"] = "abort"


class _WeightUpdate(msgspec.Struct):
    model_path: str
    weight_version: Version | None = None
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


@dataclass(frozen=True)
class ControlRoutes:
    """The handlers."""

    model: ServedModel
    service: EngineService
    answered: Counter[tuple[str, int]]
    """HTTP requests by route and status."""
    weights: Collection[Path]
    """Folders below which clients may name weights."""

    def routes(self) -> list[Route]:
        """Load balancers and monitoring have no key, as in SGLang."""
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
        return web.Response(status=200 if await self.service.health() else 503)

    async def health_generate(self, request: Request) -> web.Response:
        """The same, by sampling a token from the engine inside: also during a pause."""
        trial = SamplingParams(max_tokens=1, temperature=0.0, logprobs=False)
        try:
            if is_well := await self.service.health():
                await self.service.engine.engine.generate([0], trial, request_id=f"health-{uuid.uuid4().hex}")
        except EngineError:
            is_well = False
        return web.Response(status=200 if is_well else 503)

    async def model_info(self, request: Request) -> web.Response:
        more = {"is_generation": True, "has_image_understanding": False, "has_audio_understanding": False}
        return json_response(self._describe() | more)

    async def server_info(self, request: Request) -> web.Response:
        """What SGLang's clients ask for, and what the engine can."""
        capabilities = self.service.capabilities
        return json_response(
            {
                **self._describe(),
                "served_model_name": self.model.name,
                "context_length": self.service.limit,
                # SGLang's words: seeds are honoured, and stop strings are not found.
                "enable_deterministic_inference": capabilities.seeds,
                "skip_tokenizer_init": not capabilities.stop_strings,
                "version": f"rollstream {rollstream.__version__}",
                "status": "paused" if self.service.engine.paused else "ready",
                "engine": self.model.engine,
                "capabilities": asdict(capabilities),
            }
        )

    def _describe(self) -> dict[str, Any]:
        return {
            "model_path": self.service.model_path,
            "tokenizer_path": self.model.path,
            "weight_version": str(self.service.weight_version),
            "vocab_size": self.service.capabilities.vocab_size,
        }

    async def weight_version(self, request: Request) -> web.Response:
        return json_response({"weight_version": str(self.service.weight_version)})

    async def load(self, request: Request) -> web.Response:
        """How much there is to do; a list, since SGLang has one entry for each data-parallel rank."""
        load = await self.service.engine.load()
        running, waiting = self.service.running, self.service.waiting
        queued = min(load.queued, running) if load is not None else 0
        return json_response(
            [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting + queued}]
        )

    async def abort(self, request: Request) -> web.Response:
        """Ends one request or all; one that is not in flight may just have ended."""
        asked = await request_object(request, partial(read_parameters, kind=_Abort, harmless=_ABORT_WORDS))
        if asked.abort_all or asked.rid:
            await self.service.abort(None if asked.abort_all else asked.rid)
        return web.Response()

    async def flush_cache(self, request: Request) -> web.Response:
        """Nothing to do without a prefix cache; engines cannot empty one while they run."""
        if self.model.keeps_prefixes:
            raise RequestError("this engine has a prefix cache and cannot flush it", code="unsupported")
        return web.Response(text="There is no prefix cache to flush.\n")

    async def pause(self, request: Request) -> web.Response:
        """Aborts what is in flight and holds back what comes."""
        read_parameters(read_object(await request.body() or b"{}"), _Pause)
        await self.service.engine.pause()
        return json_response({"message": "Generation paused.", "status": "ok"})

    async def resume(self, request: Request) -> web.Response:
        self.service.engine.resume()
        return json_response({"message": "Generation continues.", "status": "ok"})

    async def update_weights(self, request: Request) -> web.Response:
        """Loads weights from below the operator's folders.

        What is in flight goes on with the new weights, or returns what it has with `abort_all_requests`.
        """
        read = partial(read_parameters, kind=_WeightUpdate, harmless=_UPDATE_WORDS, neutral=_UPDATE_NEUTRAL)
        asked = await request_object(request, read)
        try:
            folder = str(weights_below(self.weights, asked.model_path))
            if asked.abort_all_requests:
                await self.service.abort()
            version = None if asked.weight_version is None else int(asked.weight_version)
            version = await self.service.update_weights(folder, version)
        except RollstreamError as error:
            # SGLang's shape, with OpenAI's beside it.
            body = {"success": False, "message": str(error), "error": {"message": str(error)}}
            refusal = refusal_of(error)
            return json_response(body, 500 if refusal is None else refusal.status)
        body = {"success": True, "message": f"weights loaded, version {version}", "num_paused_requests": 0}
        return json_response(body)

    async def metrics(self, request: Request) -> web.Response:
        """For Prometheus. What the engine does not say of its load, or a part of it, is not there."""
        service, load = self.service, await self.service.engine.load()
        finished: dict[tuple[str, ...], float] = {
            (reason,): count for reason, count in service.finished.items()
        }
        answered: dict[tuple[str, ...], float] = {
            (route, str(status)): count for (route, status), count in self.answered.items()
        }
        families = [
            family("rollstream_samples_running", "Samples that the engine has", service.running),
            family("rollstream_samples_waiting", "Samples that a pause or an outage holds", service.waiting),
            family("rollstream_paused", "1 during a pause", int(service.engine.paused)),
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
