"""Chat endpoints, hosted or local: messages in, a message out, by OpenAI's `/v1/chat/completions`.

The way of a request to one endpoint:

    line --(its turn, and the limits let it through)--> sent --> answered
      ^                                                  |
      +-- refused for its rate (429): nothing is charged +
      +-- the stream was cut: up to `_CUTS` times -------+

Answers are always streamed, so that what has arrived survives an abort and a cut connection.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rollstream.aio import SharedCheck
from rollstream.engine.base import Capabilities, ChatPrompt
from rollstream.engine.checks import no_longer_than, read_engine_kwargs
from rollstream.engine.http_server import AWAY_STATUSES, CONNECTION_KWARGS, HttpServer, is_answered
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.openai_wire import (
    DONE,
    EXTRA_SAMPLING,
    MAY_BE_OMITTED,
    OWN_FIELDS,
    Turn,
    endpoint_url,
    error_code,
    finish_reason,
    read_event,
    request_fields,
)
from rollstream.engine.pool import POOL_KWARGS, PoolEngine
from rollstream.engine.rate_limit import LimitHeaders, RateLimit, Sent, read_limit_headers
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError
from rollstream.engine.servers import card_names
from rollstream.errors import ConfigError, EngineError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

ENGINE_KWARGS: dict[str, Any] = {
    **CONNECTION_KWARGS,
    "probe_after": POOL_KWARGS["probe_after"],
    "requests_per_minute": 0,  # to each endpoint, at most; 0: no limit of rollstream's own
    "tokens_per_minute": 0,  # the same for tokens; a request counts for prompt and max_tokens until it is answered
    "honours_seed": False,  # it repeats itself for a seed; without it generation.seed is an error
    "takes_images": False,  # its model sees images; they are sent as data: URLs
    "continue_final_message": False,  # it can go on with an answer that was cut off (vLLM, SGLang, rollstream serve)
    "send_reasoning": False,  # send earlier answers with their thinking (reasoning_content)
    "check_model": True,  # a model that the endpoint does not list is an error
    "max_tokens_key": "max_tokens",  # max_completion_tokens for models that want that
    "omit": [],  # fields not to send at their default: temperature, top_p, seed, stream_options
    "extra_body": {},  # further fields of every request: {top_k: 20, reasoning_effort: low}
}
"""Keys of `engine_kwargs` with their defaults."""

DATA_DECIDING_KWARGS = ("extra_body", "send_reasoning")
"""Those that decide what is answered."""

_DEFAULT_KEY = "OPENAI_API_KEY"
"""Where OpenAI's own clients look for a key."""

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


class OpenAIEngine(PoolEngine):
    """Chat endpoints that serve the same model.

    Args:
        server_urls: base URLs, with or without `/v1`.
        model_path: the model's name at the endpoints; of a folder, its name.
        max_model_len: prompt plus response tokens at most, by the local tokenizer; None takes what the
            endpoints say, if they do.
        engine_kwargs: see `ENGINE_KWARGS`.

    Raises:
        ConfigError: something is missing, or no such setting.
    """

    def __init__(
        self,
        server_urls: Sequence[str],
        *,
        model_path: str | None,
        max_model_len: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not server_urls:
            raise ConfigError(
                "engine 'openai' needs the endpoint's URL, also a hosted one's: "
                "actor_rollout_ref.rollout.server_urls=[https://api.openai.com/v1]"
            )
        if not model_path:
            raise ConfigError("engine 'openai' needs the model's name: actor_rollout_ref.model.path")
        kwargs = read_settings(engine_kwargs)
        self._key_name: str = kwargs["api_key_env"]

        super().__init__(
            [OpenAIReplica(url, model=model_path, kwargs=kwargs) for url in server_urls],
            own=no_longer_than(max_model_len),
            what="chat",
            hint="check actor_rollout_ref.rollout.server_urls, and that the endpoints can be reached",
            kwargs={"probe_after": kwargs["probe_after"]},
        )

    async def start(self) -> None:
        if self._key_name:
            _LOG.info("the API key in %s goes to %s", self._key_name, ", ".join(self.replicas))
        await super().start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
        chat: ChatPrompt | None = None,
    ) -> Completion:
        """Refused without `chat`: a chat endpoint takes no ids."""
        if chat is None:
            raise _needs_messages()
        return await super().generate(prompt_ids, sampling, request_id=request_id, chat=chat)

    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        return await self.generate(prompt.ids, sampling, request_id=request_id, chat=prompt)


class OpenAIReplica:
    """One endpoint.

    Args:
        url: see `endpoint_url`.
        model: as the endpoint calls it; a folder is looked for by its name.
        kwargs: see `ENGINE_KWARGS`.
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
        self._in_flight: dict[str, asyncio.Task[Completion]] = {}
        self._stopped = ""
        """Why it serves nobody until somebody acts: no quota, a key that was refused."""
        self._tried_at = 0.0
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
            raise _needs_messages()
        turn = Turn()
        task = asyncio.ensure_future(self._answer(request, request.chat, turn))
        self._in_flight[request.rid] = task
        try:
            await asyncio.wait((task,))
            if task.cancelled():  # by `close`, or by `abort`
                if self._closed:
                    raise ReplicaUnavailableError("the engine is closed")
                return _completion(turn, "abort")
            return task.result()
        finally:
            del self._in_flight[request.rid]
            task.cancel()  # closes the connection, which ends the request in most servers
            await asyncio.gather(task, return_exceptions=True)

    async def abort(self, rid: str) -> None:
        if (task := self._in_flight.get(rid)) is not None:
            task.cancel()

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
        for task in self._in_flight.values():
            task.cancel()
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
        is_folder = Path(self._model).is_dir()
        name = Path(self._model).name if is_folder else self._model
        if not cards:  # no such route, no leave to read it, or a list of another form
            _LOG.info("%s/models does not list its models (HTTP %d)", self.name, status)
            self._model = name
            await self._try_out()
            return None
        chosen = next((card for card in cards if card["id"] == self._model), None)
        if chosen is None and is_folder:
            chosen = next((card for card in cards if name in card_names(card)), None)
        if chosen is None:
            if self._kwargs["check_model"]:
                served = ", ".join(str(card["id"]) for card in cards[:_MODELS_SHOWN])
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

    async def _try_out(self) -> bool:
        """Asks for one token: where no list says so, whether this is a chat endpoint shows in no other way.

        Returns:
            whether it was answered; if not, that may pass.

        Raises:
            EngineError: it is none, or it refuses this model.
        """
        prompt = ChatPrompt([{"role": "user", "content": "1"}], [])
        try:
            async with asyncio.timeout(self._kwargs["info_timeout"]):
                await self._send(SamplingParams(1, logprobs=False), prompt, Turn())
            return True
        except (_RateLimitedError, _CutError, TimeoutError) as error:
            _LOG.info("%s did not answer a first question: %s", self.name, error)
            return False
        except ReplicaUnavailableError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}: is it a chat endpoint that serves {self._model!r}?") from error

    async def _answer(self, request: ReplicaRequest, prompt: ChatPrompt, turn: Turn) -> Completion:
        """Asks until there is an answer with an end; `turn` has what there is of it."""
        tokens = (len(prompt.ids) or _estimated_tokens(prompt)) + request.sampling.max_tokens
        cuts = 0
        while True:
            sent = await self._allowed(tokens)
            turn.begin_again(keep_text=self._kwargs["continue_final_message"])
            headers = LimitHeaders()
            try:
                headers = await self._send(request.sampling, prompt, turn)
                reason = finish_reason(turn, self.name)
                if reason is not None:
                    return _completion(turn, reason)
                raise _CutError("the answer has no finish_reason" if turn.begun else "an empty reply")
            except _RateLimitedError as refusal:
                headers = refusal.headers
                held = self._limit.refused(time.monotonic(), sent, headers.retry_after)
                if held:
                    _LOG.warning("%s; nothing is sent for %.1f s (no attempt is charged)", refusal, held)
            except (_CutError, ReplicaUnavailableError) as error:
                if isinstance(error, ReplicaUnavailableError) and not _was_cut(error):
                    raise
                cuts += 1
                if cuts > _CUTS:
                    raise await self._given_up(error) from error
                _LOG.info("%s: %s; asking again", self.name, error)
                await asyncio.sleep(_CUT_PAUSE_S * cuts)
            finally:
                if turn.finish_reason is not None:
                    self._limit.answered(time.monotonic(), sent, headers, tokens=turn.total_tokens)

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
            try:
                async for line in response.content:
                    event = read_event(line, self._server.without_key)
                    if event is DONE:
                        break
                    if event is not None:
                        self._take(event, turn, headers)
            except ValueError as error:  # of aiohttp: a line of megabytes
                raise TransientEngineError("an event of the stream has no end") from error
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
                await asyncio.sleep(wait)

    async def _serves_again(self) -> bool:
        """Tries out an endpoint that refused the key or had no quota left."""
        now = time.monotonic()
        if now - self._tried_at < _TRIAL_PAUSE_S:
            return False
        self._tried_at = now
        try:
            if not await self._try_out():
                return False
        except EngineError as error:
            _LOG.info("%s still serves nobody: %s", self.name, error)
            return False
        self._stopped = ""
        return True


def _needs_messages() -> EngineError:
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


def read_settings(engine_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The engine's settings with their defaults; `api_key_env` is `OPENAI_API_KEY` where that is set.

    Raises:
        ConfigError: an unknown key, or a value that makes no sense.
    """
    kwargs = read_engine_kwargs("openai", engine_kwargs or {}, ENGINE_KWARGS)
    if not kwargs["api_key_env"] and os.environ.get(_DEFAULT_KEY, "").strip():
        kwargs["api_key_env"] = _DEFAULT_KEY
    for key in ("requests_per_minute", "tokens_per_minute"):
        if kwargs[key] < 0:
            raise ConfigError(f"engine_kwargs.{key} must be 0 (no limit) or more, not {kwargs[key]}")
    if kwargs["max_tokens_key"] not in ("max_tokens", "max_completion_tokens"):
        raise ConfigError(
            "engine_kwargs.max_tokens_key must be max_tokens or max_completion_tokens, not "
            f"{kwargs['max_tokens_key']!r}"
        )
    if unknown := [name for name in kwargs["omit"] if name not in MAY_BE_OMITTED]:
        raise ConfigError(f"engine_kwargs.omit has {unknown[0]!r}; it may have {', '.join(MAY_BE_OMITTED)}")
    if taken := sorted(OWN_FIELDS.intersection(kwargs["extra_body"])):
        raise ConfigError(f"engine_kwargs.extra_body has {taken[0]!r}, which rollstream sets itself")
    return kwargs


def _create(options: EngineOptions) -> OpenAIEngine:
    return OpenAIEngine(
        options.server_urls,
        model_path=options.model_path,
        max_model_len=options.max_model_len,
        engine_kwargs=options.engine_kwargs,
    )


KIND = EngineKind("openai", _create, ENGINE_KWARGS, DATA_DECIDING_KWARGS, is_token_exact=False)
