"""The routes of the server, and what all of them share: keys, errors, counts."""

import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from rollstream.errors import RollstreamError
from rollstream.serving import native
from rollstream.serving.chat import chat
from rollstream.serving.completions import complete
from rollstream.serving.control import ControlRoutes
from rollstream.serving.metrics import RequestCounts
from rollstream.serving.model import ServedModel
from rollstream.serving.openai_wire import check_model, event_stream
from rollstream.serving.parameters import read_object
from rollstream.serving.refusals import error_response, json_response, refuse
from rollstream.serving.service import EngineService

_LOG = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""Bytes. A batch of 64 prompts of 100,000 ids is 40 MB of JSON; more is a mistake."""

_WITHOUT_KEY = frozenset(("/health", "/health_generate", "/metrics"))
"""For load balancers and monitoring, which have no key; as in SGLang."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(
    model: ServedModel, service: EngineService, counts: RequestCounts, *, api_key: str | None = None
) -> web.Application:
    """The application.

    Run it with `handler_cancellation`, so that a client that goes away aborts its request.

    Args:
        model: what is served.
        service: its engine.
        counts: of the requests that it answers.
        api_key: what clients have to show as bearer token; None asks for none.
    """
    app = web.Application(
        client_max_size=MAX_BODY, middlewares=[_counting(counts), _errors, _key_check(api_key)]
    )
    app.add_routes(ControlRoutes(model, service, counts).routes())
    app.add_routes(_GenerationRoutes(model, service).routes())
    return app


class _GenerationRoutes:
    """What samples, and the list of models."""

    def __init__(self, model: ServedModel, service: EngineService) -> None:
        self._model = model
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.put("/generate", self.generate),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.one_model),
        ]

    async def generate(self, request: web.Request) -> web.Response:
        given = read_object(await request.read())
        reply, stream = await native.generate(given, self._model, self._service)
        if not stream:
            return json_response(reply)
        if not isinstance(reply, list):
            return _stream([reply])
        return _stream([{**one, "index": index} for index, one in enumerate(reply)])

    async def completions(self, request: web.Request) -> web.Response:
        given = read_object(await request.read())
        return _one_or_stream(await complete(given, self._model, self._service))

    async def chat(self, request: web.Request) -> web.Response:
        given = read_object(await request.read())
        return _one_or_stream(await chat(given, self._model, self._service))

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._describe()]})

    async def one_model(self, request: web.Request) -> web.Response:
        check_model(request.match_info["name"], self._model)
        return json_response(self._describe())

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "rollstream",
            "root": self._model.path,
            "parent": None,
            "max_model_len": self._service.capabilities.max_model_len,
            # No field of OpenAI's or vLLM's: spares our own client the questions that it asks a vLLM.
            "capabilities": asdict(self._service.capabilities),
        }


def _one_or_stream(answer: dict[str, Any] | list[dict[str, Any]]) -> web.Response:
    return _stream(answer) if isinstance(answer, list) else json_response(answer)


def _stream(chunks: list[dict[str, Any]]) -> web.Response:
    # The engine has given the whole: all events go at once, and what goes wrong before has its status.
    return web.Response(
        body=event_stream(chunks), content_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _counting(counts: RequestCounts) -> Any:
    @web.middleware
    async def count(request: web.Request, handler: _Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        # Paths that nobody knows share a label: clients could make any number of them.
        counts.answered[resource.canonical if resource else "unknown", response.status] += 1
        return response

    return count


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Whatever goes wrong has a status and OpenAI's shape."""
    try:
        return await handler(request)
    except RollstreamError as error:
        response = refuse(error)
        if response.status == 500:  # a 503 comes in crowds: a full queue, a server that ends
            _LOG.warning("%s %s: %s", request.method, request.path, error)
        return response
    except web.HTTPRequestEntityTooLarge:
        return error_response(f"the body is larger than {MAX_BODY} bytes", 413)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        refusal = error_response(f"{request.path} takes {allowed}, not {request.method}", 405)
        refusal.headers["Allow"] = allowed
        return refusal
    except web.HTTPException as error:
        text = f"there is no {request.path}" if error.status == 404 else error.reason
        return error_response(text, error.status)
    except Exception as error:
        _LOG.exception("%s %s failed", request.method, request.path)
        return error_response(f"internal error ({type(error).__name__}), see the server's log", 500)


def _key_check(api_key: str | None) -> Any:
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if expected is not None and request.path not in _WITHOUT_KEY:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, expected):
                return error_response("the API key is missing or wrong", 401, code="invalid_api_key")
        return await handler(request)

    return check
