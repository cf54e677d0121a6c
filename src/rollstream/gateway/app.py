"""The HTTP server that agent programs ask for answers, by the chat API that each of them speaks.

A session is a secret in the path, so that an unchanged client needs nothing but its base URL:

    http://host:port/s/SECRET/v1/chat/completions     OpenAI's chat completions
    http://host:port/s/SECRET/v1/responses            OpenAI's responses
    http://host:port/s/SECRET/v1/messages             Anthropic's messages

Whoever knows a session's secret may ask in it, and nobody else: that is its token. A client's own API key is
not looked at.
"""

import asyncio
import logging
import resource
import secrets
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from rollstream.chat.wires.anthropic_messages import MessagesWire
from rollstream.chat.wires.exchange import Answer, Asked, Wire
from rollstream.chat.wires.openai_chat import ChatWire
from rollstream.chat.wires.openai_responses import ResponsesWire
from rollstream.chat.wires.requests import (
    NEUTRAL,
    RequestError,
    error_headers,
    refusal_of,
    request_object,
)
from rollstream.errors import DataError
from rollstream.gateway.recorder import Call, Recorder
from rollstream.gateway.sessions import AnsweredCall
from rollstream.sampling import SERVER_SAMPLING, sampling_of_row
from rollstream.trajectory import SamplingParams
from rollstream.web import (
    HTTPError,
    Request,
    Route,
    ServerLimits,
    WebServer,
    json_response,
)

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
"""Says whose request it is in place of a path, for clients that have one base URL for all rollouts."""

CALL_HEADER = "X-Rollstream-Call"
"""`side`: the call has no part in the rollout's answer. In a body: `{"rollstream": {"call": "side"}}`."""

_LAST_ANSWERS_S = 1.0
"""For answers that are being sent, when the server ends."""

_HEADERS_S = 1.0
"""A stream's status is sent when the answer is there, or after this time: an error that comes sooner has its
own status, which clients understand best."""

_KEEP_ALIVE_S = 10.0
"""Between signs of life in a stream whose answer is awaited: proxies and clients give up after about a minute."""

_CALLS_AT_ONCE = 128
"""The limit of one session; more are told to come again. Parallel agents of one rollout are a few dozen at most."""

_CONNECTIONS, _OTHER_FILES = 8192, 1024
"""Each call that waits has a connection: a thousand sessions may have several each, and a program gone wild a thousand.
The process opens other files, too."""

_MAX_BODY = 32 * 2**20
"""Bytes of a call: more than fits any model's context, images included."""

SESSION_SHARE = 0.25
"""The part of the room for bodies and answers that a session may take."""

_DEPTH, _DEPTH_WRITTEN = 60, 254
"""How deeply a request's JSON may be nested, and what the JSON writer takes: what is recorded is written, with
something around it."""

_LOGGED = 100
"""Models, parameters and tools that agents ask for and do not get: the log names so many, each once."""

_WIRES: Mapping[str, Wire] = {
    "chat/completions": ChatWire(),
    "responses": ResponsesWire(),
    "messages": MessagesWire(),
}


@dataclass(eq=False)
class _Open:
    """A session that is open."""

    recorder: Recorder
    answering: set[asyncio.Task[Any]] = field(default_factory=set)
    responses: dict[str, tuple[AnsweredCall, bool]] = field(default_factory=dict)
    """Answers by their ids, and whether their conversation begins with instructions."""


@dataclass(eq=False)
class Endpoint:
    """The routes of all sessions, and a server for them."""

    model: str
    """What the model is called."""
    max_model_len: int | None
    """Told to those who ask what the model can take."""
    _: KW_ONLY
    client_sampling: bool = False
    """Whether clients choose how their calls are sampled; else the run's sampling wins."""
    strict: bool = False
    """Refuse requests that would not be done as asked; else note it where no answer would change."""
    max_sessions: int = 4096
    """That may be open at once."""
    url: str = ""
    """The address by which clients reach it, without a path; known while it serves."""

    def __post_init__(self) -> None:
        self._sessions: dict[str, _Open] = {}
        self._logged: set[str] = set()
        self._server: WebServer

    @contextmanager
    def open(self, recorder: Recorder, secret: str | None = None) -> Iterator[str]:
        """Opens a session: its calls are the recorder's, for a while. Who still waits at its end is cut off.

        Args:
            recorder: answers the calls.
            secret: of the session; a new one if not given. It must be one that only its own client knows.

        Returns:
            The session's URL: Anthropic's base URL. OpenAI's is the same with `/v1` behind it.

        Raises:
            HTTPError: too many sessions are open.
        """
        if len(self._sessions) >= self.max_sessions:
            raise HTTPError(503, f"{self.max_sessions} sessions are open already: try again", "busy")
        secret = secret or secrets.token_urlsafe(32)
        session = self._sessions[secret] = _Open(recorder)
        try:
            yield f"{self.url}/s/{secret}"
        finally:
            del self._sessions[secret]
            for task in session.answering:
                task.cancel()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves this machine."""
        server = WebServer(
            [*self.routes(), *self.routes("")],  # the latter where `SESSION_HEADER` says whose a request is
            limits=ServerLimits(max_connections=room_for_connections(), client_share=SESSION_SHARE),
            translate=refusal_of,
            render_error=self.render_error,
        )
        try:
            self.url = await server.start()
            self._server = server
            yield
        finally:
            await server.stop(_LAST_ANSWERS_S)

    def listening_at(self, path: Path) -> AbstractAsyncContextManager[None]:
        """Serves a program without a network, too, at a Unix socket of its own, while `serving`.

        What it opens there beyond a session's bound of calls is cut off: it cannot use up others' connections.
        """
        return self._server.listening_at(path, most=_CALLS_AT_ONCE)

    def routes(self, session: str = "/s/{secret}") -> Iterator[Route]:
        """Yields the routes for a server. A session's secret is the token of its routes."""
        for name, wire in _WIRES.items():
            # A client that goes away ends its generation.
            path = f"{session}/v1/{name}"
            yield Route("POST", path, self._answers(wire), open=True, cancel_when_gone=True)
        yield Route("POST", f"{session}/v1/messages/count_tokens", self._count_tokens, open=True)
        yield Route("GET", f"{session}/v1/models", self._models, open=True)
        yield Route("GET", f"{session}/v1/models/{{name...}}", self._models, open=True)
        for method in ("GET", "POST"):
            yield Route(method, f"{session}/{{rest...}}", self._other, open=True)

    @staticmethod
    def render_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
        """A refusal as the client of the API expects it that its path names."""
        parts = request.path.split("/")
        speaks_anthropic = "messages" in parts or "anthropic-version" in request.headers
        wire = _WIRES["messages" if speaks_anthropic else "responses"]
        return json_response(wire.error(error), error.status, error_headers(error))

    def _session(self, request: Request) -> _Open:
        secret: str = request.params.get("secret") or request.headers.get(SESSION_HEADER) or ""
        session = self._sessions.get(secret)
        if session is None:
            raise RequestError(
                "no session of this URL is open: it has ended, or it is another one's", status=404
            )
        request.client = secret
        return session

    def _answers(self, wire: Wire) -> Any:
        async def answer(request: Request) -> web.StreamResponse:
            session = self._session(request)
            if len(session.answering) >= _CALLS_AT_ONCE:
                raise RequestError(
                    f"{_CALLS_AT_ONCE} calls of this session are being answered already: try again",
                    status=429,
                    code="rate_limit_exceeded",
                )
            task = asyncio.current_task()
            assert task is not None
            session.answering.add(task)  # before its body comes: a thousand heads are a thousand calls
            try:
                read = partial(self._read, wire, session, request)
                asked, is_side_call = await request_object(request, read, most=_MAX_BODY)
                return await self._answer(wire, session, asked, request, is_side_call=is_side_call)
            finally:
                session.answering.discard(task)

        return answer

    def _read(self, wire: Wire, session: _Open, request: Request, body: dict[str, Any]) -> tuple[Asked, bool]:
        """Reads a call; says whether it is a side call."""
        recorder = session.recorder
        recorder.note_surrogates(request.replaced_surrogates)
        _check_depth(body)
        is_side_call = _says_side_call(body, request)
        with recorder.noting():
            asked = wire.read(body, images=recorder.takes_images, strict=self.strict)
            recorder.check_length(asked.messages, asked.tools)
        return asked, is_side_call

    async def _answer(
        self, wire: Wire, session: _Open, asked: Asked, request: Request, *, is_side_call: bool
    ) -> web.StreamResponse:
        recorder = session.recorder
        with recorder.noting():
            if asked.previous is not None:
                asked = _continued(asked, session.responses)
            name = f"{wire.prefix}{uuid.uuid4().hex}"
            call = self._call(asked, recorder, name, is_side_call=is_side_call)

        async def answered() -> Answer:
            with recorder.noting():
                turn, prompt_ids = await recorder.answer(call, gone=lambda: request.gone)
            if isinstance(wire, ResponsesWire):
                session.responses[turn.name] = turn, asked.has_instructions
            completion = turn.completion
            if completion.finish_reason == "abort":
                # Cut off by an abort: for the client an answer that is not whole.
                completion = replace(completion, finish_reason="length")
            return Answer(turn.name, self.model, prompt_ids, turn.message, completion, turn.stop)

        if asked.stream:
            return await _stream(wire, asked, answered(), request)
        return json_response(wire.body(asked, await answered()))

    def _call(self, asked: Asked, recorder: Recorder, name: str, *, is_side_call: bool) -> Call:
        """Makes the session's call of a request, as the run allows it.

        Raises:
            RequestError: what cannot be had.
        """
        if asked.max_tokens is not None and asked.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {asked.max_tokens}", param="max_tokens")
        if asked.logprobs and not recorder.sampling.logprobs:
            raise RequestError("the run keeps no log-probs (calculate_log_probs)", param="logprobs")
        notes = dict(asked.notes)
        if asked.model not in (None, self.model):
            notes["model"] = asked.model
        wishes = {
            key: value for key, value in asked.sampling.items() if not _is_met(key, value, recorder.sampling)
        }
        sampling = _sampling(wishes, recorder) if self.client_sampling and wishes else None
        if sampling is None:
            notes |= wishes
        shown = {_short(key): _short(value) for key, value in notes.items()}
        for key, value in shown.items():
            about = f"model={value}" if key == "model" else key
            self.log_once(
                about, f"agents ask for {about}, which is not done as asked: each trajectory's notes say so"
            )
        return Call(
            asked.messages,
            asked.tools,
            asked.max_tokens,
            tuple(text for text in asked.stops if text),
            sampling=sampling,
            own_seed="seed" in asked.sampling and sampling is not None,
            deferred=asked.deferred,
            notes=shown,
            name=name,
            is_side_call=is_side_call,
        )

    def log_once(self, about: str, text: str, *, level: int = logging.INFO) -> None:
        """Logs what concerns many rollouts, the first time that it does."""
        if about not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(about)
            logger.log(level, "%s", text)

    async def _count_tokens(self, request: Request) -> web.Response:
        recorder = self._session(request).recorder

        def read(body: dict[str, Any]) -> Asked:
            _check_depth(body)
            body = {"max_tokens": 1, **body}
            asked = _WIRES["messages"].read(body, images=recorder.takes_images, strict=self.strict)
            recorder.check_length(asked.messages, asked.tools)
            return asked

        asked = await request_object(request, read, most=_MAX_BODY)
        return json_response({"input_tokens": await recorder.count_tokens(asked.messages, asked.tools)})

    async def _models(self, request: Request) -> web.Response:
        """The list of OpenAI's and of Anthropic's API; whatever name is asked for, this one answers."""
        if "secret" in request.params:
            self._session(request)
        model = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "rollstream",
            "type": "model",
            "display_name": self.model,
            "created_at": "1970-01-01T00:00:00Z",
            "max_model_len": self.max_model_len,
            "max_input_tokens": self.max_model_len,
        }
        if "name" in request.params:
            return json_response(model)
        page = {"has_more": False, "first_id": self.model, "last_id": self.model}
        return json_response({"object": "list", "data": [model], **page})

    async def _other(self, request: Request) -> web.Response:
        recorder, rest = self._session(request).recorder, request.params["rest"]
        twice = " (Anthropic's clients take the address without /v1)" if rest.startswith("v1/v1/") else ""
        with recorder.noting():
            routes = "chat/completions, responses and messages"
            raise RequestError(f"there is no {request.method} {rest} here{twice}, but {routes}", status=404)


def room_for_connections() -> int:
    """How many may be open. The process may open as many files as it is let: many systems begin at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _OTHER_FILES
    if 0 <= soft < wanted:
        soft = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _CONNECTIONS if soft < 0 else max(soft // 2, min(_CONNECTIONS, soft - _OTHER_FILES))


def _says_side_call(body: dict[str, Any], request: Request) -> bool:
    """Whether a call marks itself as a side call, in its header or body. Takes the mark out of the body."""
    own = body.pop("rollstream", None)
    calls = [request.headers.get(CALL_HEADER), own.get("call") if isinstance(own, dict) else own]
    for call in calls:
        if call not in (None, "side"):
            raise RequestError(f"a call says that it is a call 'side', not {call!r:.50}", param="rollstream")
    return "side" in calls


def _check_depth(body: Any) -> None:
    """Raises `RequestError` for a body that is nested too deeply. The JSON writer counts, which is quick."""
    for _ in range(_DEPTH_WRITTEN - _DEPTH):
        body = [body]
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise RequestError(f"the body is nested more than {_DEPTH} deep") from error


def _continued(asked: Asked, responses: Mapping[str, tuple[AnsweredCall, bool]]) -> Asked:
    """The request with the conversation that it goes on with, without that one's instructions."""
    before = responses.get(asked.previous or "")
    if before is None:
        raise RequestError(
            f"this session has no response {asked.previous!r}",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    turn, had_instructions = before
    own = asked.messages[:1] if asked.has_instructions else []
    messages = [*own, *turn.conversation[had_instructions:], *asked.messages[len(own) :]]
    return replace(asked, messages=messages)


def _is_met(name: str, value: Any, run: SamplingParams) -> bool:
    """Whether the run does already what is wished for."""
    if name == "top_k":
        return bool(value == run.top_k or (value <= 0 and run.top_k <= 0))
    if name in ("temperature", "top_p"):
        return bool(value == getattr(run, name))
    return name in NEUTRAL and bool(value == run.extra.get(name, NEUTRAL[name]))


def _sampling(chosen: dict[str, Any], recorder: Recorder) -> SamplingParams:
    """How the client wants its call to be sampled.

    Raises:
        RequestError: a value that cannot be, or that the engine cannot follow.
    """
    for name in chosen:
        if name in SERVER_SAMPLING and name not in recorder.capabilities.extra_sampling:
            raise RequestError(f"the run's engine knows no {name}", param=name)
    seed = chosen.pop("seed", None)
    try:
        sampling = sampling_of_row(recorder.sampling, chosen)
    except DataError as error:
        raise RequestError(str(error).removeprefix("the row's ")) from error
    if seed is None:
        return sampling
    if not isinstance(seed, int) or not recorder.capabilities.seeds:
        raise RequestError("seed must be a whole number, and the run's engine must know seeds", param="seed")
    return replace(sampling, seed=seed % 2**31)


def _short(value: Any) -> str:
    """A value as notes show it."""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= 100 else text[:99] + "…"


async def _stream(
    wire: Wire, asked: Asked, answered: Coroutine[Any, Any, Answer], request: Request
) -> web.StreamResponse:
    """Sends an answer as a stream. Until it is there, the stream is kept alive."""
    work = asyncio.create_task(answered)
    headers = {"Cache-Control": "no-cache"}
    try:
        await asyncio.wait((work,), timeout=_HEADERS_S)
        if work.done():
            events = wire.stream(asked, work.result())
            return web.Response(body=events, headers=headers, content_type="text/event-stream")
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        await response.prepare(request.raw)
        while not work.done():
            await response.write(wire.keep_alive)
            await asyncio.wait((work,), timeout=_KEEP_ALIVE_S)
        try:
            events = wire.stream(asked, work.result())
        except Exception as error:
            if (refusal := refusal_of(error)) is None:
                logger.error("a streamed answer failed", exc_info=error)
                refusal = HTTPError(500, f"internal error ({type(error).__name__}), see the server's log")
            events = wire.error_event(refusal)
        await response.write(events)
        await response.write_eof()
        return response
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
