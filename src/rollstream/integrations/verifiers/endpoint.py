"""The HTTP server that environments of this process ask for answers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from rollstream.chat.wires.requests import RequestError, refusal_of, render_error, request_object
from rollstream.integrations.verifiers.recorder import Recorder
from rollstream.web import Request, Route, WebServer, json_response

SESSION_HEADER = "X-Session-ID"
"""Says whose request it is, by a name that only the rollout's own client knows. From 0.3 on verifiers itself
sends it, with the id of a trace."""

_LAST_ANSWERS_S = 1.0
"""For answers that are being sent, when the server ends."""


class Endpoint:
    """OpenAI's chat route on a free port of 127.0.0.1; each request belongs to a recorder."""

    def __init__(self, model: str, max_model_len: int | None) -> None:
        """Args:
        model: what the model is called.
        max_model_len: told to those who ask what the model can take.
        """
        self._model = model
        self._max_model_len = max_model_len
        self._sessions: dict[str, Recorder] = {}
        self.url = ""
        """Where it is, `/v1` included; known while it serves."""

    @contextmanager
    def session(self, name: str, recorder: Recorder) -> Iterator[None]:
        """Requests with this name are the recorder's, for a while."""
        self._sessions[name] = recorder
        try:
            yield
        finally:
            del self._sessions[name]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves."""
        server = WebServer(
            [
                # A client that goes away ends its generation.
                Route("POST", "/v1/chat/completions", self._chat, cancel_when_gone=True),
                Route("GET", "/v1/models", self._models),
                Route("POST", "/v1/{route...}", self._other),
            ],
            translate=refusal_of,
            render_error=render_error,
        )
        try:
            self.url = await server.start() + "/v1"
            yield
        finally:
            await server.stop(_LAST_ANSWERS_S)

    def _recorder(self, request: Request) -> Recorder:
        recorder = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if recorder is None:
            raise RequestError(f"no rollout of this {SESSION_HEADER} is under way here", status=404)
        return recorder

    async def _chat(self, request: Request) -> web.Response:
        recorder = self._recorder(request)
        asked, answer = await recorder.answer(await request_object(request))
        if asked.stream:
            return web.Response(body=answer.events(asked), content_type="text/event-stream")
        return json_response(answer.body(asked))

    async def _models(self, request: Request) -> web.Response:
        model = {"id": self._model, "object": "model", "owned_by": "rollstream"}
        return json_response(
            {"object": "list", "data": [{**model, "created": 0, "max_model_len": self._max_model_len}]}
        )

    async def _other(self, request: Request) -> web.Response:
        recorder = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        error = RequestError(
            f"there is no {request.path} here: only chat completions are recorded with exact tokens; use a "
            "client or harness that speaks OpenAI's chat API",
            status=404,
        )
        if recorder is not None:
            recorder.refusal = error
        raise error
