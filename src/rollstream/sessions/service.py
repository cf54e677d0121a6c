"""Sessions of agent programs that run elsewhere: opened, finished and abandoned over HTTP.

    POST /v1/sessions --> open --- finish --> ending --- durable --> finished
                            |                   |  ^ not written: finish again
                            |                   +--+
                            +--- DELETE, left alone --> ending --> failed
                            +--- the server ends --> gone: owed again

A session is a rollout: the worker of a run executes it by `SessionLoop`, which opens an address for the
program's calls and waits until somebody says how it ended. So failures, rewards and checks are those of a run.

What was answered is durable (R2). An id names a session for ever: a finish that is repeated, also after a
restart, gets the same answer, and stores nothing twice (R3). What was not answered is begun again under the
same id.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
import orjson
from aiohttp import web

import rollstream
from rollstream.agent.base import AgentLoop
from rollstream.agent.registry import register
from rollstream.aio import finish_despite_cancellation
from rollstream.chat.wires.requests import refusal_of
from rollstream.errors import ConfigError, EngineError, RollstreamError, StorageError, TransientError
from rollstream.gateway.agents import Outcome, finished
from rollstream.gateway.app import Endpoint
from rollstream.gateway.recorder import Recorder, SessionLimits
from rollstream.metrics_text import family, metrics_page
from rollstream.rollout.worker import make_failure
from rollstream.store.records import EncodingError
from rollstream.trajectory import Failure, PromptRow, Rollout, SamplingParams, Trajectory
from rollstream.web import HTTPError, Request, Route, openapi, render_json_error, weights_below

logger = logging.getLogger(__name__)

LOOP = "gateway_session"
"""The agent loop's name, in a run's identity too."""

_ENDED_KNOWN = 10_000
"""Sessions that ended and can be told of without asking the sink."""

_LONGEST_LOOK_S = 5.0
"""Between two looks for sessions that were left alone."""

_MAX_BODY = 16 * 2**20
"""Bytes of a prompt row, or of a result."""

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._~:-]{1,200}$(?!\n)")]


class CreateSession(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`."""

    id: Id | None = None
    """Chosen by the client, so that the request can be repeated; None makes one."""
    row: dict[str, Any] | None = None
    """The prompt row, as a line of a prompt file has it."""
    instance_id: _Int64 | Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    """Which row of `data.train_files`; of a row that comes along, what the buffer groups it by."""


class FinishSession(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions/ID/finish`."""

    reward: float | None = None
    """None: the run's reward function scores it, if there is one."""
    answer: str | None = None
    """What that function scores; None: the text of the last answer."""
    reward_extra: dict[str, Any] = {}
    extra: dict[str, Any] = {}


class SessionInfo(msgspec.Struct, omit_defaults=True):
    """A session, as every route tells it."""

    id: str
    state: Literal["open", "ending", "finished", "failed"]
    base_url: str | None = None
    """For OpenAI's clients; Anthropic's take it without `/v1`."""
    api_key: str | None = None
    expires_in: float | None = None
    """Seconds without a call after which it fails."""
    messages: list[dict[str, Any]] | None = None
    """Of the prompt row."""
    calls: int | None = None
    """Answered so far."""
    open_calls: int | None = None
    tokens: int | None = None
    """Sampled so far."""
    index: int | None = None
    repeat: int | None = None
    trajectories: int | None = None
    reward: float | None = None
    error: str | None = None
    """Why it failed."""


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/weights`."""

    model_path: str
    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """None: one more than the last."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a session is a rollout of."""

    row: PromptRow
    repeat: int
    instance_id: int | str | None = None
    is_key: bool = False
    """Whether `(row.index, repeat)` is its key in a run directory."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A session that ended."""

    info: SessionInfo
    digest: str | None
    """Of what it was finished with; None: not known any more, or not finished."""


class SessionSink(Protocol):
    """Where sessions become durable."""

    def place(self, id: str, asked: CreateSession) -> Place:
        """Takes a place for a session. Raises `HTTPError` where there is none."""
        ...

    def free(self, place: Place) -> None:
        """Gives back a place of a session of which nothing was recorded."""
        ...

    async def write(self, id: str, place: Place, result: Rollout | Failure) -> None:
        """Returns when it is durable; once, however often it is called for a session that was finished.

        Raises:
            EncodingError: this result cannot be stored.
            TransientError: not now.
            StorageError: never again.
        """
        ...

    async def find(self, id: str) -> Ended | None:
        """A session that was finished, by whichever process."""
        ...


class SessionEndedError(RollstreamError):
    """A session ended without a result."""


@dataclass(slots=True, eq=False)
class _OpenSession:
    id: str
    place: Place
    created: str
    """Digest of the request."""
    service: "SessionService"
    last_used: float
    url: str = ""
    recorder: Recorder | None = None
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    result: "asyncio.Future[FinishSession]" = field(default_factory=asyncio.Future)
    """Resolved when it ends."""
    digest: str | None = None
    """Of what it is finished with."""
    seen_calls: int = 0
    settling: "asyncio.Task[Ended] | None" = None
    playing: "asyncio.Task[Rollout | Failure]" = field(init=False)

    def counts(self) -> tuple[int, int, int]:
        """Calls that were answered, calls that are open, sampled tokens."""
        recorder = self.recorder
        return (0, 0, 0) if recorder is None else (recorder.calls, recorder.open_calls, recorder.tokens)


_current: ContextVar[_OpenSession] = ContextVar("session")


@register(LOOP)
class SessionLoop(AgentLoop):
    """The agent loop whose program is elsewhere: opens an address for its calls, and waits for its end."""

    sees_images = False
    brings_images = True

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:
        """Executes the rollout. Raises `SessionEndedError`."""
        session = _current.get()
        service, started = session.service, time.monotonic()
        recorder = session.recorder = Recorder(
            self,
            sampling,
            name=self.request_id,
            broken=asyncio.get_running_loop().create_future(),  # the program is told, and may try again
            limits=service.limits,
            engine_wait=service.engine_wait,
        )
        with service.endpoint.open(recorder) as session.url:
            session.opened.set()
            result = await session.result
        trajectories = finished(
            self,
            recorder,
            Outcome(result.answer, result.reward, result.reward_extra, result.extra),
            started,
            service.endpoint,
            prompt=row["raw_prompt"],
            train_side_calls=service.train_side_calls,
        )
        for trajectory in trajectories:
            trajectory.extra["session"] = {"id": session.id, "finish": session.digest}
        return trajectories


@dataclass(eq=False)
class SessionService:
    """The sessions, and the routes to them."""

    run: Callable[..., Coroutine[Any, Any, Rollout | Failure]]
    """Executes a rollout, as `RolloutWorker.run`, by `SessionLoop`; one attempt each, without a time limit."""
    sink: SessionSink
    endpoint: Endpoint
    """Answers the programs' calls."""
    _: KW_ONLY
    train_side_calls: bool = False
    """Whether side calls are branches as any other."""
    limits: SessionLimits = SessionLimits()  # noqa: RUF009 (frozen)
    engine_wait: float = 0.0
    """Seconds that a call waits for an engine that is away."""
    expire_s: float = 3600.0
    """Seconds without a call after which a session fails."""
    max_sessions: int = 1024
    """Open at once, at most."""
    update_weights: Callable[[str, int], Any] | None = None
    """Gives the engine weights; None where it takes none."""
    weights: tuple[Path, ...] = ()
    """Folders below which those may be."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.weight_version = 0
        self._updating = asyncio.Lock()
        self._open: dict[str, _OpenSession] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._counts: Counter[str] = Counter()
        """Sessions that ended by state, and calls and tokens of those."""
        self._answered: Counter[tuple[str, ...]] = Counter()

    # -- what becomes of a session

    async def create(self, asked: CreateSession) -> SessionInfo:
        """Opens a session, or tells of the one that has this id. Raises `HTTPError`."""
        digest = _digest(asked)
        ended = None if asked.id is None else await self._find_ended(asked.id)
        if ended is not None and ended.info.state == "finished":
            return ended.info
        id = asked.id or secrets.token_hex(12)
        session = self._open.get(id)
        if session is None:
            session = self._begin(id, asked, digest)
        elif session.created != digest:
            raise HTTPError(409, f"session {id} is open, with another row", "conflict", "id")
        opened = asyncio.ensure_future(session.opened.wait())
        await asyncio.wait({opened, session.playing}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if not session.opened.is_set():
            ended = await asyncio.shield(self._end(session, "it could not be opened"))
            raise HTTPError(503, f"session {id} cannot be opened: {ended.info.error}", "unavailable")
        return self._tell(session, opening=True)

    def _begin(self, id: str, asked: CreateSession, digest: str) -> _OpenSession:
        if self._closing:
            raise HTTPError(503, "the gateway is ending", "closing", headers={"retry-after": "10"})
        if len(self._open) >= self.max_sessions:
            text = f"{self.max_sessions} sessions are open, which is --max-sessions"
            raise HTTPError(429, text, "too_many_sessions", headers={"retry-after": "5"})
        place = self.sink.place(id, asked)
        session = _OpenSession(id, place, digest, self, self.clock())
        session.result.add_done_callback(_seen)
        self._open[id] = session
        self._empty.clear()
        token = _current.set(session)  # the task has it
        session.playing = asyncio.create_task(
            self.run(replace(place.row, agent_name=LOOP), place.repeat, name=id)
        )
        _current.reset(token)
        return session

    async def finish(self, id: str, result: FinishSession) -> SessionInfo:
        """Ends a session with a result; returns when that is durable. Raises `HTTPError`."""
        digest = _digest(result)
        if result.reward is not None and not math.isfinite(result.reward):
            raise HTTPError(400, "the reward is not finite", where="reward")
        session = self._open.get(id)
        if session is not None and not session.result.done():
            if not session.counts()[0]:
                text = "no call of it was answered yet, so there is nothing to store; DELETE abandons it"
                raise HTTPError(409, f"session {id}: {text}", "no_calls")
            session.digest = digest
            session.result.set_result(result)
        ended = await self._when_ended(id)
        if ended.info.state == "failed":
            raise HTTPError(409, f"session {id} failed: {ended.info.error}", "failed")
        if ended.digest not in (digest, None):
            raise HTTPError(409, f"session {id} was finished with another result", "conflict")
        return ended.info

    async def abandon(self, id: str) -> SessionInfo:
        """Ends a session as failed; returns when that is durable. Raises `HTTPError`."""
        ended = await self._when_ended(id, "it was abandoned by its client")
        if ended.info.state == "finished":
            raise HTTPError(409, f"session {id} is finished, and stays", "conflict")
        return ended.info

    async def _when_ended(self, id: str, why: str = "") -> Ended:
        """How a session ended, or ends now. Raises `HTTPError`."""
        if (session := self._open.get(id)) is not None:
            return await asyncio.shield(self._end(session, why))
        ended = await self._find_ended(id)
        if ended is None or id in self._open:
            raise _unknown(id)
        return ended

    def _end(self, session: _OpenSession, why: str = "") -> "asyncio.Task[Ended]":
        """Ends a session that has not ended, because of `why`; the task is done when that is durable.

        There is one task for all who wait. What it raises is raised to them, and tried again by the next.
        """
        if not session.result.done():
            session.result.set_exception(SessionEndedError(f"session {session.id}: {why}"))
        task = session.settling
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = session.settling = asyncio.create_task(self._settle(session))
            task.add_done_callback(_seen)
        return task

    async def _settle(self, session: _OpenSession) -> Ended:
        place, playing = session.place, session.playing
        await asyncio.wait({playing})
        if playing.cancelled() or playing.exception() is not None:
            self._drop(session)
            text = "the gateway ends" if playing.cancelled() else str(playing.exception())
            raise HTTPError(503, f"session {session.id} is gone: {text}", "unavailable")
        result = playing.result()
        try:
            await self.sink.write(session.id, place, result)
        except EncodingError as error:
            result = make_failure(place.row.index, place.repeat, place.row.prompt_key, 1, "store", error)
            with contextlib.suppress(EncodingError):  # its row may be what is refused
                await self.sink.write(session.id, place, result)
        info = ended_info(session.id, place, result)
        ended = Ended(info, session.digest if info.state == "finished" else None)
        self._close(session)
        self._remember(ended)
        calls, _, tokens = session.counts()
        self._counts.update({info.state: 1, "calls": calls, "tokens": tokens})
        if info.state == "failed":
            logger.warning("%s", info.error)
        return ended

    def _close(self, session: _OpenSession) -> None:
        del self._open[session.id]
        if not self._open:
            self._empty.set()

    def _drop(self, session: _OpenSession) -> None:
        """Forgets a session of which nothing is recorded."""
        if self._open.get(session.id) is session:
            self.sink.free(session.place)
            self._close(session)

    def _remember(self, ended: Ended) -> None:
        self._ended[ended.info.id] = ended
        while len(self._ended) > _ENDED_KNOWN:
            self._ended.popitem(last=False)

    async def _find_ended(self, id: str) -> Ended | None:
        if id in self._open:
            return None
        ended = self._ended.get(id)
        if ended is None and (ended := await self.sink.find(id)) is not None:
            self._remember(ended)
        return ended

    def expire(self) -> None:
        """Ends those that were left alone, and tries again what could not be written."""
        now = self.clock()
        for session in list(self._open.values()):
            calls, open_calls, _ = session.counts()
            if session.result.done():
                self._end(session)
            elif open_calls or calls != session.seen_calls:
                session.seen_calls, session.last_used = calls, now
            elif now - session.last_used >= self.expire_s:
                self._end(session, f"it was left alone for {self.expire_s:g} s (--expire-seconds)")

    async def watch(self) -> None:
        """Ends those that are left alone, for as long as this runs."""
        while True:
            await asyncio.sleep(min(_LONGEST_LOOK_S, self.expire_s / 4))
            self.expire()

    async def drain(self, grace_s: float) -> int:
        """Opens no more sessions, gives those that are open time to finish, and drops the others.

        Returns how many were dropped: nothing of them is recorded.
        """
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        dropped = 0
        for session in list(self._open.values()):
            if not session.result.done():  # else its client finished it meanwhile
                session.playing.cancel()
                await asyncio.wait({session.playing})
                self._drop(session)
                dropped += 1
        ending = map(self._end, self._open.values())
        await finish_despite_cancellation(asyncio.gather(*ending, return_exceptions=True))
        return dropped

    def _totals(self) -> Counter[str]:
        """Sessions by state, calls and tokens, until now."""
        totals = self._counts + Counter(open=len(self._open))
        for session in self._open.values():
            calls, open_calls, tokens = session.counts()
            totals.update(calls=calls, open_calls=open_calls, tokens=tokens)
        return totals

    def progress(self) -> str:
        """In a line, for people."""
        return (
            "{0[open]} sessions open, {0[finished]} finished, {0[failed]} failed; {0[calls]} calls, {0[tokens]} tokens"
        ).format(self._totals())

    # -- routes

    def routes(self) -> list[Route]:
        """All, those of the programs' calls included. Load balancers and monitoring have no token."""

        async def create(request: Request) -> SessionInfo:
            return await self.create(await request.json(CreateSession, _MAX_BODY))

        async def finish(request: Request) -> SessionInfo:
            return await self.finish(request.params["id"], await request.json(FinishSession, _MAX_BODY))

        async def abandon(request: Request) -> SessionInfo:
            return await self.abandon(request.params["id"])

        async def weight_version(request: Request) -> Any:
            return {"version": self.weight_version}

        async def document(request: Request) -> Any:
            return openapi(own, "rollstream gateway", rollstream.__version__)

        own = [
            Route("POST", "/v1/sessions", create, CreateSession, answer=SessionInfo),
            Route("GET", "/v1/sessions/{id}", self._get, answer=SessionInfo),
            Route("POST", "/v1/sessions/{id}/finish", finish, FinishSession, answer=SessionInfo),
            Route("DELETE", "/v1/sessions/{id}", abandon, answer=SessionInfo),
            Route("POST", "/v1/weights", self._update_weights, UpdateWeights),
            Route("GET", "/v1/weights", weight_version),
            Route("GET", "/healthz", self._health, open=True),
            Route("GET", "/metrics", self._metrics, open=True),
        ]
        return [*own, Route("GET", "/openapi.json", document, open=True), *self.endpoint.routes()]

    async def _get(self, request: Request) -> SessionInfo:
        id = request.params["id"]
        if (session := self._open.get(id)) is not None:
            return self._tell(session)
        if (ended := await self._find_ended(id)) is None:
            raise _unknown(id)
        return ended.info

    def _tell(self, session: _OpenSession, *, opening: bool = False) -> SessionInfo:
        calls, open_calls, tokens = session.counts()
        place = session.place
        return SessionInfo(
            id=session.id,
            state="ending" if session.result.done() else "open",
            base_url=f"{session.url}/v1",
            api_key=session.url.rpartition("/")[2],
            expires_in=self.expire_s,
            messages=place.row.messages if opening else None,
            calls=calls,
            open_calls=open_calls,
            tokens=tokens,
            index=place.row.index if place.is_key else None,
            repeat=place.repeat if place.is_key else None,
        )

    async def _update_weights(self, request: Request) -> Any:
        asked = await request.json(UpdateWeights)
        if self.update_weights is None:
            raise HTTPError(400, "this engine cannot update its weights", "unsupported")
        path = str(weights_below(self.weights, asked.model_path))

        async def load(version: int) -> None:
            assert self.update_weights is not None
            await self.update_weights(path, version)
            self.weight_version = version

        async with self._updating:
            version = self.weight_version + 1 if asked.version is None else asked.version
            await finish_despite_cancellation(load(version))
        return {"version": version}

    async def _health(self, request: Request) -> Any:
        if self._closing:
            raise HTTPError(503, "the gateway is ending", "closing")
        return {"status": "ok", "sessions": len(self._open)}

    def count(self, route: Route | None, status: int, seconds: float) -> None:
        """For `WebServer`: counts answers. Paths that nobody knows share a label."""
        self._answered[route.path if route else "unknown", str(status)] += 1

    async def _metrics(self, request: Request) -> web.Response:
        totals = self._totals()
        states: dict[tuple[str, ...], float] = {(name,): totals[name] for name in ("finished", "failed")}
        families = [
            family("rollstream_gateway_sessions", "Sessions open", totals["open"]),
            family("rollstream_gateway_sessions_total", "Sessions that ended", states, ["state"]),
            family("rollstream_gateway_calls_total", "Calls answered", totals["calls"]),
            family("rollstream_gateway_open_calls", "Calls being answered", totals["open_calls"]),
            family("rollstream_gateway_tokens_total", "Tokens sampled", totals["tokens"]),
            family("rollstream_gateway_weight_version", "Version of the weights", self.weight_version),
            family(
                "rollstream_http_requests_total", "Requests answered", {**self._answered}, ["route", "status"]
            ),
            family(
                "rollstream_replaced_surrogates_total",
                "Halves of surrogate pairs in requests that became U+FFFD",
                request.replaced_surrogates_in_all,
            ),
        ]
        return web.Response(body=metrics_page(families), content_type="text/plain")


def render_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
    """A refusal: of a program's call as its API has it, else as `web.ErrorBody`."""
    render = Endpoint.render_error if request.path.startswith("/s/") else render_json_error
    return render(request, error)


def translate(error: Exception) -> HTTPError | None:
    """Errors of handlers as refusals."""
    if isinstance(error, StorageError):
        return HTTPError(507, str(error), "storage")
    if isinstance(error, TransientError) and not isinstance(error, EngineError):
        return HTTPError(503, str(error), "unavailable", headers={"retry-after": "1"})
    return HTTPError(400, str(error)) if isinstance(error, ConfigError) else refusal_of(error)


def ended_info(id: str, place: Place, result: Rollout | Failure) -> SessionInfo:
    """What is told of a session that ended."""
    info = SessionInfo(id, "failed" if isinstance(result, Failure) else "finished")
    if place.is_key:
        info.index, info.repeat = place.row.index, place.repeat
    if isinstance(result, Failure):
        info.error = result.error
    else:
        info.trajectories, info.reward = len(result.trajectories), result.final.reward
    return info


def session_of(extra: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """The id and digest that a stored trajectory's `extra` has; None: it is of no session."""
    about = extra.get("session")
    if not isinstance(about, Mapping) or not isinstance(about.get("id"), str):
        return None
    return about["id"], about.get("finish")


def _digest(value: msgspec.Struct) -> str:
    try:
        form = orjson.dumps(msgspec.to_builtins(value), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:  # numbers of any size are JSON, and deeper than it is written
        raise HTTPError(400, f"the body cannot be stored: {error}") from error
    return hashlib.blake2b(form, digest_size=16).hexdigest()


def _seen(done: "asyncio.Future[Any]") -> None:
    """An error is told to those who wait; if nobody does, it is told to the next who asks."""
    if not done.cancelled():
        done.exception()


def _unknown(id: str) -> HTTPError:
    return HTTPError(404, f"session {id} is not open, and was never finished", "not_found")
