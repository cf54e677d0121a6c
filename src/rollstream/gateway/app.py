"""The HTTP server that agent programs ask for answers, by OpenAI's chat API."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web

from rollstream.chat.wires.openai_chat import ChatAnswer, ChatRequest, Choice, event_stream, read_chat
from rollstream.chat.wires.requests import RequestError, refusal_of, render_error, request_object
from rollstream.gateway.recorder import Call, Recorder
from rollstream.trajectory import SamplingParams
from rollstream.web import Request, Route, WebServer, json_response

SESSION_HEADER = "X-Session-ID"
"""Says whose request it is, by a name that only the rollout's own client knows."""

_LAST_ANSWERS_S = 1.0
"""For answers that are being sent, when the server ends."""

_HARMLESS = (
    "seed",  # a rollout's seeds are the run's
    "return_tokens_as_token_ids",
    "return_token_ids",
    "reasoning_effort",
)
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "stop_token_ids": [],
    "ignore_eos": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
}


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
        self._answering: dict[asyncio.Task[Any], Recorder] = {}
        self.url = ""
        """Where it is, `/v1` included; known while it serves."""

    @contextmanager
    def session(self, name: str, recorder: Recorder) -> Iterator[None]:
        """Requests with this name are the recorder's, for a while; who still waits at its end is cut off."""
        self._sessions[name] = recorder
        try:
            yield
        finally:
            del self._sessions[name]
            for task, one in self._answering.items():
                if one is recorder:
                    task.cancel()

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
        body = await request_object(request)
        task = asyncio.current_task()
        assert task is not None
        self._answering[task] = self._recorder(request)  # which may have ended while the body came
        try:
            with recorder.noting():
                asked = read_chat(body, harmless=_HARMLESS, neutral=_NEUTRAL)
                call = _call_of(asked, recorder.sampling)
                turn, prompt_ids = await recorder.answer(call, gone=lambda: request.gone)
        finally:
            del self._answering[task]
        completion = turn.completion
        if completion.finish_reason == "abort":
            # Cut off by an abort: for the client an answer that is not whole.
            completion = replace(completion, finish_reason="length")
        answer = ChatAnswer(turn.name, self._model, prompt_ids, [Choice(turn.message, completion)])
        # With log-probs the client is told the token ids, too.
        asked.return_token_ids = asked.logprobs
        if asked.stream:
            return web.Response(body=event_stream(answer.chunks(asked)), content_type="text/event-stream")
        return json_response(answer.body(asked))

    async def _models(self, request: Request) -> web.Response:
        model = {"id": self._model, "object": "model", "owned_by": "rollstream"}
        return json_response(
            {"object": "list", "data": [{**model, "created": 0, "max_model_len": self._max_model_len}]}
        )

    async def _other(self, request: Request) -> web.Response:
        with self._recorder(request).noting():
            raise RequestError(
                f"there is no {request.path} here: only chat completions are recorded with exact tokens; use "
                "a client or harness that speaks OpenAI's chat API",
                status=404,
            )


def _call_of(asked: ChatRequest, run: SamplingParams) -> Call:
    """What is asked for. How to sample is the run's affair: its log-probs and seeds are of its distribution.

    Raises:
        RequestError: another distribution, or a limit below 1.
    """
    for name in ("temperature", "top_p", "top_k"):
        value, ours = getattr(asked, name), getattr(run, name)
        if value is not None and value != ours and not (name == "top_k" and value <= 0 and ours <= 0):
            raise RequestError(
                f"{name} is {value} and the run's is {ours}: leave it out, or set "
                f"actor_rollout_ref.rollout.{name}",
                param=name,
            )
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {asked.max_tokens}", param="max_tokens")
    return Call(asked.messages, asked.tools, asked.max_tokens, tuple(text for text in asked.stops if text))
