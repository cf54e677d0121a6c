"""One chat endpoint: a replica of engine `openai`.

The way of a request to one endpoint:

    line --(its turn, and the limits let it through)--> sent --> answered
      ^                                                  |
      +-- refused for its rate (429): nothing is charged +
      +-- the stream was cut: up to `_CUTS` times -------+

Answers are always streamed, so that what has arrived survives an abort and a cut connection.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rollstream.aio import SharedCheck
from rollstream.engine.base import Capabilities, ChatPrompt
from rollstream.engine.http_server import AWAY_STATUSES, HttpServer, is_answered
from rollstream.engine.openai_wire import (
    EXTRA_SAMPLING,
    EventReader,
    Turn,
    endpoint_url,
    error_code,
    finish_reason,
    request_fields,
)
from rollstream.engine.rate_limit import LimitHeaders, RateLimit, Sent, read_limit_headers
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

_CHAT = "/chat/completions"

_CUTS = 2
"""How often a request whose answer was cut off is sent again, before it counts as a failed attempt. Long
answers of hosted models are cut now and then, and an attempt of many turns is worth more than one answer."""
_CUT_PAUSE_S = 0.5

_END_S = 0.5
"""For what is left of a reply after `[DONE]`: nothing, as a rule."""

_LONG_HOLD_S = 120.0
"""A rate limit that holds for longer counts as an endpoint that is away: another one may take the request,
and while it waits for the engine no attempt runs out of time."""

_TRIAL_PAUSE_S = 15.0
"""Between two trials of an endpoint that refused the key or had no quota left."""

_SAID_EVERY_S = 60.0
"""A line about waiting for the limits that were configured: they are meant to be reached."""
_WORTH_SAYING_S = 5.0

_MODELS_SHOWN = 10

_CHARS_PER_TOKEN = 4
"""Of English text, about."""

_QUOTA_CODES = frozenset(("insufficient_quota", "billing_hard_limit_reached", "billing_not_active"))
"""A 429 with one of these does not pass by waiting."""


class _RateLimitedError(Exception):
    """The endpoint refused a request for its rate."""

    def __init__(self, said: str, headers: LimitHeaders) -> None:
        super().__init__(said)
        self.headers = headers


class _CutError(Exception):
    """An answer has no end."""


@dataclass(slots=True)
class _Flight:
    """A request, and what has arrived of its answer."""

    turn: Turn = field(default_factory=Turn)
    task: "asyncio.Task[Completion] | None" = None


class OpenAIReplica:
    """One endpoint.

    Args:
        url: see `endpoint_url`.
        model: as the endpoint calls it; a folder is looked for by its name.
        kwargs: see `openai.ENGINE_KWARGS`.
    """

    def __init__(self, url: str, *, model: str, kwargs: dict[str, Any]) -> None:
        self._server = HttpServer(endpoint_url(url), kwargs)
        self._health = SharedCheck(self.health)
        self._model = model
        self._kwargs = kwargs
        self._limit = RateLimit(
            requests_per_minute=kwargs["requests_per_minute"], tokens_per_minute=kwargs["tokens_per_minute"]
        )
        self._line = asyncio.Lock()
        """Who waits for the limits, in order of arrival; the first of them watches the clock."""
        self._in_flight: dict[str, _Flight] = {}
        self._stopped = ""
        """Why it serves nobody until somebody acts: no quota, a key that was refused."""
        self._tried_at = 0.0
        self._said_at = -_SAID_EVERY_S
        self._closed = False

    @property
    def name(self) -> str:
        return self._server.url

    async def describe(self) -> Capabilities:
        return Capabilities(
            token_ids=False,
            logprobs="none",
            seeds=self._kwargs["honours_seed"],
            stop_strings=True,
            stop_token_ids=False,
            images=self._kwargs["takes_images"],
            update_weights=False,
            max_model_len=await self._find_model(),
            extra_sampling=EXTRA_SAMPLING,
        )

    @property
    def resumes_aborted(self) -> bool:
        return False

    async def generate(self, request: ReplicaRequest) -> Completion:
        if request.chat is None:
            raise needs_messages()
        flight = _Flight()
        flight.task = asyncio.ensure_future(self._answer(request, request.chat, flight))
        self._in_flight[request.rid] = flight
        try:
            await asyncio.wait((flight.task,))
            if flight.task.cancelled():  # by `close`, or by `abort`
                if self._closed:
                    raise ReplicaUnavailableError("the engine is closed")
                return _completion(flight.turn, "abort")
            return flight.task.result()
        finally:
            del self._in_flight[request.rid]
            flight.task.cancel()  # closes the connection, which ends the request in most servers
            await asyncio.gather(flight.task, return_exceptions=True)

    async def abort(self, rid: str) -> None:
        if (flight := self._in_flight.get(rid)) is not None and flight.task is not None:
            flight.task.cancel()

    async def health(self) -> bool:
        if self._stopped:
            return await self._serves_again()
        if self._limit.held_for(time.monotonic()) > _LONG_HOLD_S:
            return False
        status = await is_answered(self._server.get("/models", timeout_s=self._server.health_timeout))
        return status is not None and status < 500 and status != 401

    async def update_weights(self, source: str, version: int) -> None:
        raise EngineError("a chat endpoint has no route for other weights")

    async def close(self) -> None:
        self._closed = True
        for flight in self._in_flight.values():
            if flight.task is not None:
                flight.task.cancel()
        await self._health.close()
        await self._server.close()

    async def _find_model(self) -> int | None:
        """Learns how the endpoint calls the model, and the longest sequence if it says so."""
        status, payload = await self._server.get("/models", timeout_s=self._kwargs["info_timeout"])
        if status == 401:
            raise self._server.refusal(status, payload)
        if status in AWAY_STATUSES:
            raise ReplicaUnavailableError(str(self._server.refusal(status, payload)))
        cards = _model_cards(payload) if status == 200 else []
        if not cards:  # no such route, no leave to read it, or a list of another form
            _LOG.info("%s/models does not list its models (HTTP %d)", self.name, status)
            self._model = Path(self._model).name if Path(self._model).is_dir() else self._model
            await self._try_out()
            return None
        chosen = next((card for card in cards if card["id"] == self._model), None) or next(
            (card for card in cards if Path(self._model).name in _names(card) and Path(self._model).is_dir()),
            None,
        )
        if chosen is None:
            if self._kwargs["check_model"]:
                served = ", ".join(_shown(card) for card in cards[:_MODELS_SHOWN])
                more = f" and {len(cards) - _MODELS_SHOWN} more" if len(cards) > _MODELS_SHOWN else ""
                raise EngineError(
                    f"{self.name} does not list the model {self._model!r}, but {served}{more}: name one of "
                    "them by actor_rollout_ref.model.path; if it is served without being listed, set "
                    "engine_kwargs.check_model=false"
                )
            return None
        self._model = str(chosen["id"])
        length = chosen.get("max_model_len")
        return length if isinstance(length, int) else None

    async def _try_out(self) -> None:
        """Asks for one token: where no list says so, whether this is a chat endpoint shows in no other way.

        Raises:
            EngineError: it is not, or it refuses this model.
        """
        prompt = ChatPrompt([{"role": "user", "content": "1"}], [])
        try:
            async with asyncio.timeout(self._kwargs["info_timeout"]):
                await self._send(SamplingParams(1, logprobs=False), prompt, Turn())
        except (_RateLimitedError, _CutError, TimeoutError) as error:
            _LOG.info("%s did not answer a first question: %s", self.name, error)
        except ReplicaUnavailableError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}: is it a chat endpoint that serves {self._model!r}?") from error

    async def _answer(self, request: ReplicaRequest, prompt: ChatPrompt, flight: _Flight) -> Completion:
        """Asks until there is an answer with an end."""
        tokens = (len(prompt.ids) or _estimated_tokens(prompt)) + request.sampling.max_tokens
        cuts = 0
        while True:
            sent = await self._allowed(tokens)
            self._begin(flight)
            headers = LimitHeaders()
            try:
                headers = await self._send(request.sampling, prompt, flight.turn)
                reason = finish_reason(flight.turn, self.name)
                if reason is not None:
                    return _completion(flight.turn, reason)
                raise _CutError("the answer has no finish_reason" if flight.turn.begun else "an empty reply")
            except _RateLimitedError as refusal:
                headers = refusal.headers
                self._hold(sent, refusal)
            except (_CutError, ReplicaUnavailableError) as error:
                if isinstance(error, ReplicaUnavailableError) and not _was_cut(error):
                    raise
                cuts += 1
                if cuts > _CUTS:
                    raise await self._given_up(error) from error
                _LOG.info("%s: %s; asking again", self.name, error)
                await asyncio.sleep(_CUT_PAUSE_S * cuts)
            finally:
                if flight.turn.finish_reason is not None:
                    self._limit.answered(time.monotonic(), sent, headers, tokens=flight.turn.total_tokens)

    def _begin(self, flight: _Flight) -> None:
        """Makes the turn of another try: anew, or with the text to go on with."""
        before = flight.turn
        goes_on = self._kwargs["continue_final_message"] and not before.calls and not before.reasoning
        flight.turn = Turn(content=before.content, pieces=before.pieces) if goes_on else Turn()

    async def _send(self, sampling: SamplingParams, prompt: ChatPrompt, turn: Turn) -> LimitHeaders:
        """One request, and its answer as far as it comes."""
        kwargs = self._kwargs
        fields = request_fields(
            self._model,
            prompt,
            sampling,
            max_tokens_key=kwargs["max_tokens_key"],
            omit=kwargs["omit"],
            extra_body=kwargs["extra_body"],
            send_reasoning=kwargs["send_reasoning"],
            partial=turn.content,
            partial_tokens=turn.pieces,
        )
        async with self._server.stream(_CHAT, orjson.dumps(fields)) as response:
            headers = read_limit_headers(response.headers, time.time())
            if response.status != 200:
                await self._refuse(response.status, await response.read(), headers)
            if response.content_type == "application/json":
                self._take(_object(await response.read()), turn, headers)
                return headers
            events = EventReader(self._server.without_key)
            async for data in response.content.iter_any():
                for event in events.feed(data):
                    self._take(event, turn, headers)
                if events.done:
                    break
            for event in events.finish():
                self._take(event, turn, headers)
            with suppress(TimeoutError):  # read to its end, a connection can be used again
                async with asyncio.timeout(_END_S):
                    await response.content.read()
        return headers

    def _take(self, event: dict[str, Any], turn: Turn, headers: LimitHeaders) -> None:
        if event.get("error") is None:
            turn.add(event)
            return
        # An error in the middle of a stream: its status comes as `code`, or not at all.
        error = event["error"]
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        if status == 429 or error_code(event) in ("rate_limit_exceeded", "rate_limit_error"):
            raise _RateLimitedError(str(self._server.refusal(429, orjson.dumps(event))), headers)
        raise self._server.refusal(status, orjson.dumps(event))

    async def _refuse(self, status: int, payload: bytes, headers: LimitHeaders) -> None:
        """Raises what a status other than 200 means."""
        refusal = self._server.refusal(status, payload)
        if status == 401 or status == 402 or (status == 429 and error_code(payload) in _QUOTA_CODES):
            # Not this request's fault, and the next one would fare no better: work waits, and the run stops
            # (and can be resumed) when nobody has mended it within generation.engine_timeout.
            what = "the API key is refused" if status == 401 else "no quota is left on the account"
            self._stopped = f"{refusal} ({what}; waiting alone does not help)"
            self._tried_at = time.monotonic()
            raise ReplicaUnavailableError(self._stopped)
        if status in (429, 529) or (status == 503 and headers.retry_after is not None):
            raise _RateLimitedError(str(refusal), headers)
        if status in AWAY_STATUSES and not await self._health.ask():
            raise ReplicaUnavailableError(f"{refusal}, and it is not healthy")
        raise refusal

    async def _given_up(self, error: Exception) -> EngineError:
        said = f"{error}" if isinstance(error, ReplicaUnavailableError) else f"{self.name}: {error}"
        if await self._health.ask():
            return TransientEngineError(f"{said} ({_CUTS + 1} times in a row)")
        return ReplicaUnavailableError(f"{said}, and it is not healthy")

    async def _allowed(self, tokens: int) -> Sent:
        """Waits until the limits let a request through; counts it.

        Raises:
            ReplicaUnavailableError: they will not for long, or the endpoint has stopped serving.
        """
        async with self._line:
            while True:
                now = time.monotonic()
                if self._stopped:
                    raise ReplicaUnavailableError(self._stopped)
                if (held := self._limit.held_for(now)) > _LONG_HOLD_S:
                    raise ReplicaUnavailableError(f"{self.name} takes nothing for {held:.0f} s (rate limit)")
                wait = self._limit.wait(now, tokens)
                if wait <= 0:
                    return self._limit.send(now, tokens)
                if wait > _WORTH_SAYING_S and now - self._said_at > _SAID_EVERY_S:
                    self._said_at = now
                    _LOG.info("%s: the next request waits %.0f s for the rate limit", self.name, wait)
                await asyncio.sleep(wait)

    def _hold(self, sent: Sent, refusal: _RateLimitedError) -> None:
        held = self._limit.refused(time.monotonic(), sent, refusal.headers.retry_after)
        if held:
            _LOG.warning("%s; nothing is sent for %.1f s (no attempt is charged)", refusal, held)

    async def _serves_again(self) -> bool:
        """Tries out an endpoint that refused the key or had no quota left."""
        now = time.monotonic()
        if now - self._tried_at < _TRIAL_PAUSE_S:
            return False
        self._tried_at = now
        messages = [{"role": "user", "content": "."}]
        body = {"model": self._model, "messages": messages, self._kwargs["max_tokens_key"]: 1}
        try:
            await self._server.tell(_CHAT, body, timeout_s=self._server.health_timeout)
        except EngineUnavailableError:
            return False
        except EngineError as error:
            _LOG.info("%s still serves nobody: %s", self.name, error)
            return False
        self._stopped = ""
        return True


def needs_messages() -> EngineError:
    """The error for a request that has only ids."""
    return EngineError(
        "engine 'openai' takes messages, not token ids: an agent loop hands them to its `generate` "
        "(`self.generate(ids, sampling, messages=messages)`), and `Conversation` does"
    )


def _was_cut(error: ReplicaUnavailableError) -> bool:
    """Whether a connection was there and was lost; perhaps an idle one that was just being closed."""
    cause = error.__cause__
    lost = (
        aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError
    )
    return isinstance(cause, lost) and not isinstance(cause, aiohttp.ClientConnectorError)


def _completion(turn: Turn, reason: Any) -> Completion:
    usage = None
    if turn.prompt_tokens is not None and turn.completion_tokens is not None:
        usage = turn.prompt_tokens, turn.completion_tokens
    return Completion(
        [], None, reason, cached_prompt_tokens=turn.cached_tokens, message=turn.message(), usage=usage
    )


def _estimated_tokens(prompt: ChatPrompt) -> int:
    """About as many tokens as the messages have, for the rate limit: the answer says how many there were."""
    return sum(len(str(message.get("content") or "")) for message in prompt.messages) // _CHARS_PER_TOKEN


def _object(payload: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise _CutError("the reply is no JSON") from error
    if not isinstance(value, dict):
        raise TransientEngineError("the reply is no JSON object")
    return value


def _model_cards(payload: bytes) -> list[dict[str, Any]]:
    """What `/models` lists; nothing if it is a list of another form."""
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return []
    cards = value.get("data") if isinstance(value, dict) else None
    return (
        [card for card in cards if isinstance(card, dict) and card.get("id")]
        if isinstance(cards, list)
        else []
    )


def _shown(card: dict[str, Any]) -> str:
    """A model of the list, with the folder that it is loaded from, if the endpoint says so."""
    root = card.get("root")
    return f"{card['id']} ({root})" if root and root != card["id"] else str(card["id"])


def _names(card: dict[str, Any]) -> set[str]:
    """What a model is called: by its server, and on its disk."""
    return {Path(str(card[key])).name for key in ("id", "root") if card.get(key)}
