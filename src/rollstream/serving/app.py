"""The routes of the server."""

from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from rollstream.serving import native
from rollstream.serving.chat import chat
from rollstream.serving.completions import complete
from rollstream.serving.control import ControlRoutes
from rollstream.serving.metrics import RequestCounts
from rollstream.serving.model import ServedModel
from rollstream.serving.openai_wire import check_model, event_stream
from rollstream.serving.parameters import request_object
from rollstream.serving.refusals import refusal_of, render_error
from rollstream.serving.service import EngineService
from rollstream.web import Access, Limits, Request, Route, WebServer, json_response

MAX_BODY = 64 * 2**20
"""Bytes. A batch of 64 prompts of 100,000 ids is 40 MB of JSON; more is a mistake."""

_SPARE_CONNECTIONS = 256
"""Beside those that wait for a sample: for idle ones, monitoring, and requests that are refused."""


def create_server(
    model: ServedModel, service: EngineService, counts: RequestCounts, *, access: Access | None = None
) -> WebServer:
    """The HTTP server, not started.

    Args:
        model: what is served.
        service: its engine.
        counts: of the requests that it answers.
        access: who may send requests.
    """

    def count(route: Route | None, status: int, seconds: float) -> None:
        # Paths that nobody knows share a label: clients could make any number of them.
        counts.answered[route.path if route else "unknown", status] += 1

    routes = [*ControlRoutes(model, service, counts).routes(), *_GenerationRoutes(model, service).routes()]
    return WebServer(
        # A client that goes away aborts its request.
        (replace(route, cancel_when_gone=True) for route in routes),
        access=access,
        limits=Limits(max_body=MAX_BODY, max_connections=service.max_queue + _SPARE_CONNECTIONS),
        translate=refusal_of,
        render_error=render_error,
        on_answer=count,
    )


class _GenerationRoutes:
    """What samples, and the list of models."""

    def __init__(self, model: ServedModel, service: EngineService) -> None:
        self._model = model
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/generate", self.generate),
            Route("PUT", "/generate", self.generate),
            Route("POST", "/v1/completions", self.completions),
            Route("POST", "/v1/chat/completions", self.chat),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{name...}", self.one_model),
        ]

    async def generate(self, request: Request) -> web.Response:
        given = await request_object(request)
        reply, stream = await native.generate(given, self._model, self._service)
        if not stream:
            return json_response(reply)
        if not isinstance(reply, list):
            return _stream([reply])
        return _stream([{**one, "index": index} for index, one in enumerate(reply)])

    async def completions(self, request: Request) -> web.Response:
        given = await request_object(request)
        return _one_or_stream(await complete(given, self._model, self._service))

    async def chat(self, request: Request) -> web.Response:
        given = await request_object(request)
        return _one_or_stream(await chat(given, self._model, self._service))

    async def models(self, request: Request) -> web.Response:
        return json_response({"object": "list", "data": [self._describe()]})

    async def one_model(self, request: Request) -> web.Response:
        check_model(request.params["name"], self._model)
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
