"""Chat endpoints, hosted or local: messages in, a message out, by the openai client.

A request waits for the user's own limits (aiolimiter) and for the end of a hold, is sent, and is answered by a
stream, so that what has arrived survives an abort:

    429, 529, or 503 with Retry-After          -> the endpoint is held; the request is sent again, nothing is charged
    401, 402, no quota left                    -> the endpoint is held for minutes, and counts as away
    connection lost, stream without an end     -> sent again, up to `_CUTS` times, while the endpoint is healthy
    another status                             -> as `http_server.status_error` has it

Source of the wire: https://platform.openai.com/docs/api-reference/chat; `reasoning_content` is DeepSeek's, SGLang's
and older vLLM's name for thinking, `reasoning` newer vLLM's and OpenRouter's.
"""

import asyncio
import contextlib
import logging
import math
import os
import random
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import openai
import orjson
from aiolimiter import AsyncLimiter
from yarl import URL

from rollstream.aio import Backoff, SharedCheck
from rollstream.engine.base import Capabilities, ChatPrompt
from rollstream.engine.checks import read_engine_kwargs
from rollstream.engine.http_server import (
    AWAY_STATUSES,
    CONNECTION_KWARGS,
    base_url,
    read_api_key,
    status_error,
)
from rollstream.engine.kind import EngineKind, EngineOptions, of_servers
from rollstream.engine.pool import POOL_KWARGS
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError
from rollstream.engine.servers import ServerEngine, card_names
from rollstream.errors import ConfigError, EngineError, TransientEngineError
from rollstream.sampling import bias_by_id, schema_text
from rollstream.trajectory import Completion, FinishReason, Message, SamplingParams

_LOG = logging.getLogger(__name__)

ENGINE_KWARGS: dict[str, Any] = {
    **CONNECTION_KWARGS,
    "probe_after": POOL_KWARGS["probe_after"],
    "requests_per_minute": 0,  # to each endpoint, evenly spread; 0: no limit of rollstream's own
    "tokens_per_minute": 0,  # the same for tokens; a request counts for its prompt and max_tokens
    "honours_seed": False,  # it repeats itself for a seed; without it generation.seed is an error
    "takes_images": False,  # its model sees images; they are sent as data: URLs
    "send_reasoning": False,  # send earlier answers with their thinking (reasoning_content)
    "check_model": True,  # a model that the endpoint does not list is an error
    "max_tokens_key": "max_tokens",  # max_completion_tokens for models that want that
    "omit": [],  # fields not to send at their default: temperature, top_p, seed, stream_options
    "extra_body": {},  # further fields of every request: {top_k: 20, reasoning_effort: low}
}

DATA_DECIDING_KWARGS = ("extra_body", "send_reasoning")

EXTRA_SAMPLING = ("frequency_penalty", "json_schema", "logit_bias", "presence_penalty")
"""Further sampling parameters that OpenAI's API has; others go by `extra_body`."""

_OWN_FIELDS = {
    "model",
    "messages",
    "tools",
    "stream",
    "stream_options",
    "n",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "continue_final_message",
    "add_generation_prompt",
}
"""Fields of a request that are set here, or that would change what an answer is read as."""

_MAY_BE_OMITTED = ("temperature", "top_p", "stream_options", "seed")
"""Some models refuse a field even with the value that is its default."""

_ENDS: dict[object, FinishReason] = {
    **dict.fromkeys(("stop", "tool_calls", "function_call", "eos", "end_turn", "stop_sequence"), "stop"),
    "length": "length",
}
"""The first two and `length` are OpenAI's; endpoints that pass on another server's word say the others."""

_QUOTA_CODES = frozenset(("insufficient_quota", "billing_hard_limit_reached", "billing_not_active"))
"""A 429 with one of these does not pass by waiting."""

_RATE_CODES = frozenset(("rate_limit_exceeded", "rate_limit_error"))

_CUTS = 2
"""How often a request whose answer was cut off is sent again, before it counts as a failed attempt. Long
answers of hosted models are cut now and then, and an attempt of many turns is worth more than one answer."""
_CUT_PAUSE_S = 0.5

_HOLD_S, _LEAST_HOLD_S, _MOST_HOLD_S = 1.0, 0.1, 3600.0
"""After a refusal that does not say how long (doubled by each that follows); `Retry-After: 0.001` is no licence
for a hot loop; an endpoint that asks for more than an hour is asked once an hour."""

_AWAY_HOLD_S = 120.0
"""An endpoint that is held for longer counts as away: another one may take the request, and while it waits for
the engine no attempt runs out of time."""

_REFUSED_HOLD_S = 150.0
"""After a key that was refused, or without quota. That is no request's fault, and the next one would fare no better:
work waits, and the run stops when nobody has mended it within generation.engine_timeout."""


class OpenAIEngine(ServerEngine):
    """Chat endpoints that serve the same model; their URLs are with or without `/v1`."""

    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        return await self.generate([], sampling, request_id=request_id, chat=prompt)


class OpenAIReplica:
    """One endpoint.

    Args:
        url: see `endpoint_url`.
        options: the model as the endpoint calls it; a folder is looked for by its name. The others: `ENGINE_KWARGS`.

    Raises:
        ConfigError: no model, or no such setting.
    """

    def __init__(self, url: str, options: EngineOptions) -> None:
        if not options.model_path:
            raise ConfigError("engine 'openai' needs the model's name: actor_rollout_ref.model.path")
        self.name = endpoint_url(url)
        self._model = options.model_path
        self._kwargs = kwargs = read_settings(options.engine_kwargs)
        self._key = read_api_key(kwargs)
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",  # as endpoints without keys are asked by everybody
            base_url=self.name,
            max_retries=0,  # a held endpoint is held for all of its requests
            http_client=openai.DefaultAsyncHttpxClient(
                # A job of a buffer may name its engine, but only where the operator allows it.
                follow_redirects=False,
                trust_env=False,
                verify=ssl.create_default_context(),
                timeout=openai.Timeout(None, connect=kwargs["connect_timeout"]),
            ),
        )
        self._health = SharedCheck(self.health)
        requests, self._tokens_per_minute = kwargs["requests_per_minute"], kwargs["tokens_per_minute"]
        self._requests = AsyncLimiter(1, 60 / requests) if requests else None
        self._tokens = AsyncLimiter(self._tokens_per_minute, 60) if self._tokens_per_minute else None
        self._backoff = Backoff(_HOLD_S, 60.0)
        self._held_until = self._refused_at = -math.inf
        self._held_because = ""
        self._in_flight: dict[str, asyncio.Task[Completion]] = {}
        self._closed = False

    async def describe(self) -> Capabilities:
        if self._key:
            _LOG.info("the API key in %s goes to %s", self._kwargs["api_key_env"], self.name)
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

    async def generate(self, request: ReplicaRequest) -> Completion:
        if request.chat is None:
            raise EngineError("engine 'openai' takes messages, not token ids")
        answer = StreamedAnswer()
        task = asyncio.ensure_future(self._ask(request.chat, request.sampling, answer))
        self._in_flight[request.rid] = task
        try:
            await asyncio.wait((task,))
            if task.cancelled():  # by `close`, or by `abort`
                if self._closed:
                    raise ReplicaUnavailableError("the engine is closed")
                return answer.completion("abort")
            return task.result()
        finally:
            del self._in_flight[request.rid]
            task.cancel()  # closes the connection, which ends the request in most servers
            await asyncio.gather(task, return_exceptions=True)

    async def abort(self, rid: str) -> bool:
        if (task := self._in_flight.get(rid)) is not None:
            task.cancel()
        return True

    async def health(self) -> bool:
        if self._held_until - time.monotonic() > _AWAY_HOLD_S:
            return False
        try:
            await self._client.models.with_raw_response.list(timeout=self._kwargs["health_timeout"])
        except openai.APIStatusError as error:
            return error.status_code < 500 and error.status_code != 401
        except openai.APIConnectionError:
            return False
        return True

    async def update_weights(self, source: str, version: int) -> None:
        raise EngineError("a chat endpoint has no route for other weights")

    async def close(self) -> None:
        self._closed = True
        for task in self._in_flight.values():
            task.cancel()
        await self._health.close()
        await self._client.close()

    async def _find_model(self) -> int | None:
        """Learns how the endpoint calls the model, and the longest sequence if it says so."""
        is_folder = Path(self._model).is_dir()
        name = Path(self._model).name if is_folder else self._model
        cards = await self._list_models()
        chosen = next((card for card in cards if card["id"] == self._model), None)
        if chosen is None and is_folder:
            chosen = next((card for card in cards if name in card_names(card)), None)
        if chosen is None and cards and self._kwargs["check_model"]:
            served = ", ".join(str(card["id"]) for card in cards[:10])
            raise EngineError(
                f"{self.name} does not list the model {self._model!r} of actor_rollout_ref.model.path, but "
                f"{served} ({len(cards)} models); engine_kwargs.check_model=false takes it nevertheless"
            )
        self._model = name if chosen is None else str(chosen["id"])
        length = None if chosen is None else chosen.get("max_model_len")
        return length if isinstance(length, int) else None

    async def _list_models(self) -> list[dict[str, Any]]:
        """The models that the endpoint lists; none where it has no such route, or a list of another form."""
        try:
            raw = await self._client.models.with_raw_response.list(timeout=self._kwargs["info_timeout"])
            value = orjson.loads(raw.content)
        except openai.APIConnectionError as error:
            raise self._away(error) from error
        except openai.APIStatusError as error:
            if error.status_code in AWAY_STATUSES:
                raise ReplicaUnavailableError(str(self._refusal(error, error.status_code))) from None
            if error.status_code == 401:
                raise self._refusal(error, 401) from None
            return []
        except orjson.JSONDecodeError:
            return []
        data = value.get("data") if isinstance(value, dict) else None
        cards = data if isinstance(data, list) else []
        return [card for card in cards if isinstance(card, dict) and card.get("id")]

    async def _ask(
        self, prompt: ChatPrompt, sampling: SamplingParams, answer: "StreamedAnswer"
    ) -> Completion:
        """Asks until there is an answer with an end; `answer` has what there is of it."""
        cuts = 0
        while True:
            sent_at = await self._allowed(prompt, sampling)
            answer.clear()  # forgets a try that was cut off
            cause: Exception | None = None
            try:
                fields = request_fields(self._model, prompt, sampling, self._kwargs)
                stream = await self._client.chat.completions.create(
                    model=self._model, messages=fields.pop("messages"), stream=True, extra_body=fields
                )
                async with stream:
                    async for chunk in stream:
                        answer.add(chunk)
                if answer.finish_reason is not None:
                    self._backoff.reset()
                    return answer.completion(answer.end(self.name))
                problem = f"{self.name}: the answer has no end"
            except openai.APIConnectionError as error:
                cause, problem = error, str(self._away(error))
            except openai.APIError as error:
                await self._refused(error, sent_at)
                continue
            except ValueError as error:
                cause, problem = error, f"{self.name}: an event of the stream is no JSON object"
            if not await self._health.ask():
                raise ReplicaUnavailableError(f"{problem}, and it is not healthy") from cause
            cuts += 1
            if cuts > _CUTS:
                raise TransientEngineError(f"{problem} ({cuts} times in a row)") from cause
            await asyncio.sleep(_CUT_PAUSE_S * cuts)

    async def _refused(self, error: openai.APIError, sent_at: float) -> None:
        """Holds the endpoint, or raises what an error means for its request.

        The error has a response, or it is an event of the stream, with a status as its `code` or none. What is
        raised here has no cause: the client's error, in a record of a failure by its traceback, may repeat the key.
        """
        codes, wait, status = {error.code, error.type}, None, 500
        if isinstance(error, openai.APIStatusError):
            status, wait = error.status_code, retry_after(error.response.headers)
        elif codes & _RATE_CODES:
            status = 429
        elif isinstance(error.body, dict) and isinstance(code := error.body.get("code"), int):
            status = code if 400 <= code < 600 else 500
        refusal = self._refusal(error, status)
        if status in (401, 402) or (status == 429 and codes & _QUOTA_CODES):
            self._hold(refusal, sent_at, _REFUSED_HOLD_S)
        elif status in (429, 529) or (status == 503 and wait is not None):
            self._hold(refusal, sent_at, wait)
        elif status in AWAY_STATUSES and not await self._health.ask():
            raise ReplicaUnavailableError(f"{refusal}, and it is not healthy") from None
        else:
            raise refusal from None

    def _hold(self, refusal: EngineError, sent_at: float, wait: float | None) -> None:
        now = time.monotonic()
        if sent_at > self._refused_at and not wait:  # requests that were sent together double it once
            wait = self._backoff.pause() * random.uniform(0.5, 1.0)
        self._refused_at = now
        until = now + min(max(wait or 0.0, _LEAST_HOLD_S), _MOST_HOLD_S)
        if until > self._held_until:
            if self._held_until <= now:
                _LOG.warning("%s; nothing is sent for %.1f s (no attempt is charged)", refusal, until - now)
            self._held_until, self._held_because = until, str(refusal)

    async def _allowed(self, prompt: ChatPrompt, sampling: SamplingParams) -> float:
        """Waits until the limits let a request through; returns when that was.

        Raises:
            ReplicaUnavailableError: they will not for long.
        """
        if self._tokens is not None:
            tokens = _estimated_tokens(prompt) + sampling.max_tokens
            await self._tokens.acquire(min(tokens, self._tokens_per_minute))
        if self._requests is not None:
            await self._requests.acquire()
        while (held := self._held_until - time.monotonic()) > 0:
            if held > _AWAY_HOLD_S:
                raise ReplicaUnavailableError(f"{self._held_because}; it is not asked for {held:.0f} s")
            # Those who waited together would else be sent at the same moment, and refused together.
            await asyncio.sleep(held * random.uniform(1.0, 1.5))
        return time.monotonic()

    def _refusal(self, error: openai.APIError, status: int) -> EngineError:
        """The error for a status, in the endpoint's own words but without the API key."""
        message = error.body.get("message") if isinstance(error.body, dict) else None
        return status_error(self.name, status, self._shown(str(message or error.message))[:500])

    def _away(self, error: openai.APIConnectionError) -> ReplicaUnavailableError:
        cause = error.__cause__ or error
        return ReplicaUnavailableError(f"{self.name}: {type(cause).__name__}: {self._shown(str(cause))}")

    def _shown(self, text: str) -> str:
        """A text of the endpoint's without the key: endpoints repeat it in what they refuse."""
        return text.replace(self._key, "***") if self._key else text


class StreamedAnswer:
    """An answer as it arrives."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets what has arrived."""
        self.finish_reason: object = None
        self._content = ""
        self._reasoning = ""
        self._calls: dict[int, dict[str, str]] = {}
        self._usage: tuple[int, int] | None = None
        self._cached = 0

    def add(self, chunk: Any) -> None:
        """Takes in a `ChatCompletionChunk`, which endpoints fill as they like."""
        if (usage := chunk.usage) is not None:
            self._usage = usage.prompt_tokens, usage.completion_tokens
            self._cached = getattr(usage.prompt_tokens_details, "cached_tokens", 0) or 0
        for choice in (chunk.choices or ())[:1]:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if (delta := choice.delta) is None:
                continue
            thought = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
            self._content += (delta.content or "") + (delta.refusal or "")
            self._reasoning += thought or ""
            for part in delta.tool_calls or ():
                # Some endpoints send whole calls without an index: one with an id begins a new call.
                is_new = part.id or not self._calls
                index = part.index if part.index is not None else len(self._calls) - (not is_new)
                call = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
                call["id"] = part.id or call["id"]
                if part.function is not None:
                    call["name"] = call["name"] or part.function.name or ""
                    call["arguments"] += part.function.arguments or ""

    def end(self, server: str) -> FinishReason:
        """Why the answer ended.

        Raises:
            EngineError: the endpoint's content filter ended it: asking again would not help.
            TransientEngineError: a reason that is not known.
        """
        reason = str(self.finish_reason)
        if reason == "content_filter":
            raise EngineError(f"{server}: the endpoint's content filter ended the answer (content_filter)")
        if reason not in _ENDS:
            raise TransientEngineError(f"{server}: the answer ended for an unknown reason: {reason!r:.100}")
        return _ENDS[reason]

    def completion(self, reason: FinishReason) -> Completion:
        """The answer so far; arguments of calls are text, as the model wrote them."""
        message: Message = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.pop("id"), "function": call}
                for _, call in sorted(self._calls.items())
            ]
        return Completion(
            [], None, reason, cached_prompt_tokens=self._cached, message=message, usage=self._usage
        )


def endpoint_url(url: str) -> str:
    """The URL in front of `/chat/completions`: as given, or with `/v1` where it names only a host.

    Raises:
        ConfigError: no such URL, or one that would put a secret into logs.
    """
    url = base_url(url)
    parsed = URL(url)
    if parsed.user or parsed.password or parsed.query_string or parsed.fragment:
        raise ConfigError(
            f"server URL of {parsed.host}: neither user nor query: URLs are written into logs; the key is given by "
            "engine_kwargs.api_key_env"
        )
    url = url.removesuffix("/chat/completions")
    return f"{url}/v1" if parsed.path in ("", "/") else url


def request_fields(
    model: str, prompt: ChatPrompt, sampling: SamplingParams, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a request; `kwargs`: see `ENGINE_KWARGS`.

    Raises:
        EngineError: asks for what no chat endpoint can give.
    """
    if sampling.logprobs or sampling.stop_token_ids or sampling.top_k != -1 or sampling.ignore_eos:
        raise EngineError("a chat endpoint has no log-probs, stop_token_ids, top_k or ignore_eos")
    fields: dict[str, Any] = {
        "model": model,
        "messages": wire_messages(prompt.messages, prompt.images, send_reasoning=kwargs["send_reasoning"]),
        kwargs["max_tokens_key"]: sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    extra = dict(sampling.extra)
    if "json_schema" in extra:
        schema = orjson.loads(schema_text(extra.pop("json_schema")))
        answer = {"name": "answer", "schema": schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": answer}
    if "logit_bias" in extra:
        extra["logit_bias"] = bias_by_id(extra["logit_bias"])
    fields |= extra
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if prompt.tools:
        fields["tools"] = list(prompt.tools)
    for name in kwargs["omit"]:
        if name in ("stream_options", "seed") or fields.get(name) == 1.0:
            fields.pop(name, None)
    return {**fields, **kwargs["extra_body"]}


def wire_messages(
    messages: Sequence[Message], images: Sequence[object] = (), *, send_reasoning: bool = False
) -> list[Message]:
    """Messages as endpoints take them: arguments of calls as JSON text, images as `data:` URLs.

    Raises:
        EngineError: another number of image parts than of images.
    """
    left = iter(images)
    try:
        sent = [_wire_message(message, left, send_reasoning) for message in messages]
    except StopIteration:
        raise EngineError("the messages have more image parts than there are images") from None
    if next(left, None) is not None:
        raise EngineError("there are more images than image parts in the messages")
    return sent


def _wire_message(message: Message, images: Iterator[object], send_reasoning: bool) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = [
            {"type": "image_url", "image_url": {"url": next(images)}}
            if isinstance(part, dict) and part.get("type") in ("image", "image_url")
            else part
            for part in content
        ]
    sent: Message = {"role": message["role"], "content": content}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            sent[name] = message[name]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_wire_call(call) for call in calls]
        sent["content"] = content or None
    if send_reasoning and message.get("reasoning_content"):
        sent["reasoning_content"] = message["reasoning_content"]
    return sent


def _wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    try:
        is_object = not isinstance(arguments, str) or isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    if not is_object:
        # What the model wrote is no JSON object. Some servers read the history and refuse it, so it is
        # wrapped; the result that follows says that it could not be read.
        arguments = {"unreadable": arguments}
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    function = {"name": call["function"]["name"], "arguments": text}
    return {"id": call["id"], "type": "function", "function": function}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that an endpoint asks to wait; None where it does not say, or says neither a number nor a date.

    `retry-after-ms` is what OpenAI's own clients read first; a date (RFC 9110) is one of this machine's clock.
    """
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        with contextlib.suppress(ValueError, OverflowError):
            try:
                seconds = float(text) * factor
            except ValueError:
                seconds = parsedate_to_datetime(text).timestamp() - time.time()
            if math.isfinite(seconds):
                return max(0.0, seconds)
    return None


def _estimated_tokens(prompt: ChatPrompt) -> int:
    """Roughly the tokens of the messages: English has some four characters a token."""
    return sum(len(str(message.get("content") or "")) for message in prompt.messages) // 4


def read_settings(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's settings with their defaults; `api_key_env` is `OPENAI_API_KEY` where that is set.

    Raises:
        ConfigError: an unknown key, or a value that makes no sense.
    """
    kwargs = read_engine_kwargs("openai", engine_kwargs, ENGINE_KWARGS)
    if not kwargs["api_key_env"] and os.environ.get("OPENAI_API_KEY", "").strip():
        kwargs["api_key_env"] = "OPENAI_API_KEY"
    for key in ("requests_per_minute", "tokens_per_minute"):
        if kwargs[key] < 0:
            raise ConfigError(f"engine_kwargs.{key} must be 0 (no limit) or more, not {kwargs[key]}")
    if kwargs["max_tokens_key"] not in ("max_tokens", "max_completion_tokens"):
        raise ConfigError("engine_kwargs.max_tokens_key must be max_tokens or max_completion_tokens")
    if unknown := [name for name in kwargs["omit"] if name not in _MAY_BE_OMITTED]:
        raise ConfigError(f"engine_kwargs.omit has {unknown[0]!r}; it may have {', '.join(_MAY_BE_OMITTED)}")
    if taken := sorted(_OWN_FIELDS.intersection(kwargs["extra_body"])):
        raise ConfigError(f"engine_kwargs.extra_body has {taken[0]!r}, which rollstream sets itself")
    return kwargs


KIND = OpenAIEngine.kind = EngineKind(
    "openai",
    of_servers(OpenAIEngine),
    ENGINE_KWARGS,
    DATA_DECIDING_KWARGS,
    is_token_exact=False,
    make_replica=OpenAIReplica,
)
