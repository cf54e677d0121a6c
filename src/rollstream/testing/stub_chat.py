"""A chat endpoint without a model: OpenAI's `/v1/chat/completions`, streamed, that goes wrong on command."""

import asyncio
import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from aiohttp import web

from rollstream.testing.http_stub import HttpStub
from rollstream.trajectory import Message

ChatRule = Callable[[dict[str, Any]], str | Message]
"""From the body of a request to what is answered: text, or an assistant's message. A call's arguments may be
a mapping or text; text is sent as it is, also when it is no JSON."""

_PIECES = re.compile(r"\s*\S+\s*|\s+")


@dataclass(frozen=True, slots=True)
class ChatFault:
    """The fate of one request.

    | kind | |
    |---|---|
    | `status` | an HTTP `status` with `headers` and an error of `code` |
    | `cut` | the connection is closed after half of the answer |
    | `truncate` | the stream ends after half of the answer, without a finish reason |
    | `half_event` | the stream ends in the middle of an event |
    | `garbage` | an event that is no JSON |
    | `error_event` | after half of the answer, an event with an error of `code` |
    | `no_choices` | the stream has chunks without choices, and its end |
    | `finish` | the whole answer, with `code` as its finish reason |
    | `drop` | the connection is closed without a reply |
    | `hang` | half of the answer, and then nothing; the connection stays open |
    """

    kind: Literal[
        "status",
        "cut",
        "truncate",
        "half_event",
        "garbage",
        "error_event",
        "no_choices",
        "finish",
        "drop",
        "hang",
    ]
    status: int = 500
    code: Any = "stub_error"
    message: str = "stub error"
    headers: Mapping[str, str] = field(default_factory=dict)


class ChatStub(HttpStub):
    """The endpoint, in this process. Bound to 127.0.0.1.

    Example:
        >>> async with ChatStub(lambda body: "5") as stub:
        ...     engine = OpenAIEngine([stub.url], model_path="stub")

    Args:
        rule: what is answered.
        model: the only one that is served.
        api_key: what clients have to show; None asks for none.
        lists_models: whether there is `/v1/models`.
        limit: `(requests, seconds)`: more in any such time are a 429.
        retry_after: whether such a 429 says when to come back.
        pause: seconds between two pieces of an answer.
    """

    handler_cancellation = True

    def __init__(
        self,
        rule: ChatRule,
        *,
        model: str = "stub",
        api_key: str | None = None,
        lists_models: bool = True,
        limit: tuple[int, float] | None = None,
        retry_after: bool = True,
        pause: float = 0.0,
    ) -> None:
        self.rule = rule
        self.model = model
        self.api_key = api_key
        self.lists_models = lists_models
        self.limit = limit
        self.retry_after = retry_after
        self.pause = pause
        self.faults: deque[ChatFault | None] = deque()
        """Faults of the next requests, one each; a request without one goes well."""
        self.requests: list[dict[str, Any]] = []
        """Bodies of all requests, in order; those that were refused included."""
        self.arrivals: list[float] = []
        """When they came, by `time.monotonic`."""
        self.answered = 0
        self.refused = 0
        """For the rate limit."""
        self.closed_by_client = 0
        """Answers whose reader went away."""
        self._admitted: deque[float] = deque()
        self._ids = itertools.count(1)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            given = request.headers.get("Authorization", "none").removeprefix("Bearer ")
            return _error(401, f"Incorrect API key provided: {given}", "invalid_api_key")
        if request.path == "/v1/models" and self.lists_models:
            return _json({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        if request.path != "/v1/chat/completions":
            return _error(404, f"no route {request.path}", "not_found")
        self.arrivals.append(time.monotonic())
        try:
            body = orjson.loads(await request.read())
            self.requests.append(body)
        except orjson.JSONDecodeError as error:
            return _error(400, f"malformed request: {error}", "bad_request")
        if body.get("model") != self.model:
            return _error(404, f"The model `{body.get('model')}` does not exist", "model_not_found")
        if refusal := self._refusal():
            self.refused += 1
            return refusal
        return await self._answer(request, body, self.faults.popleft() if self.faults else None)

    def _refusal(self) -> web.Response | None:
        """A 429, if there were too many requests of late."""
        if self.limit is None:
            return None
        most, seconds = self.limit
        now = time.monotonic()
        while self._admitted and self._admitted[0] + seconds <= now:
            self._admitted.popleft()
        if len(self._admitted) < most:
            self._admitted.append(now)
            return None
        wait = self._admitted[0] + seconds - now
        headers = {"Retry-After": f"{wait:.3f}"} if self.retry_after else {}
        return _error(429, "Rate limit reached", "rate_limit_exceeded", headers)

    async def _answer(
        self, request: web.BaseRequest, body: dict[str, Any], fault: ChatFault | None
    ) -> web.StreamResponse:
        kind = None if fault is None else fault.kind
        if fault is not None and kind == "status":
            return _error(fault.status, fault.message, fault.code, fault.headers)
        if kind == "drop" and request.transport is not None:
            request.transport.abort()
        said = self.rule(body)
        message: Message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if fault is not None and kind == "finish":
            finish = fault.code
        name = f"chatcmpl-{next(self._ids)}"
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        if not body.get("stream"):
            self.answered += 1
            whole = {**message, "tool_calls": _calls(message)} if message.get("tool_calls") else message
            choice = {"index": 0, "message": whole, "finish_reason": finish}
            return _json({"id": name, "model": self.model, "choices": [choice], "usage": usage})
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *_deltas(message)]
        events: list[dict[str, Any]] = [
            {"id": name, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        if kind == "no_choices":
            events = [{"id": name, "choices": []}]
        elif kind in ("cut", "truncate", "half_event", "error_event", "hang"):
            events = events[: max(1, (len(events) + 1) // 2)]
        else:
            events.append({"id": name, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if body.get("stream_options", {}).get("include_usage") and kind is None:
            events.append({"id": name, "choices": [], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._write(response, events, fault, request)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.closed_by_client += 1
            raise
        self.answered += 1
        return response

    async def _write(
        self,
        response: web.StreamResponse,
        events: Iterable[dict[str, Any]],
        fault: ChatFault | None,
        request: web.BaseRequest,
    ) -> None:
        for event in events:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            if self.pause:
                await asyncio.sleep(self.pause)
        match None if fault is None else fault.kind:
            case "cut":
                await asyncio.sleep(0.01)  # what was written is on its way first
                if request.transport is not None:
                    request.transport.abort()
            case "half_event":
                await response.write(b'data: {"choices": [{"ind')
            case "garbage":
                await response.write(b"data: {what is this\n\n")
            case "error_event":
                assert fault is not None
                error = {"error": {"message": fault.message, "code": fault.code}}
                await response.write(b"data: " + orjson.dumps(error) + b"\n\n")
            case "hang":
                await asyncio.Event().wait()
            case "truncate":
                pass
            case _:
                await response.write(b"data: [DONE]\n\n")


def _deltas(message: Message) -> list[dict[str, Any]]:
    """The message in pieces: a word each, and each call's arguments in two."""
    deltas: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        deltas += [{"reasoning_content": piece} for piece in _PIECES.findall(reasoning)]
    deltas += [{"content": piece} for piece in _PIECES.findall(message.get("content") or "")]
    for index, call in enumerate(_calls(message)):
        text = call["function"]["arguments"]
        half = len(text) // 2
        head = {"name": call["function"]["name"], "arguments": text[:half]}
        first = {**call, "index": index, "function": head}
        rest = {"index": index, "function": {"arguments": text[half:]}}
        deltas += [{"tool_calls": [first]}, {"tool_calls": [rest]}]
    return deltas


def _calls(message: Message) -> list[dict[str, Any]]:
    """The message's calls, with text as arguments, and with ids."""
    calls = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        function = {"name": name, "arguments": text}
        calls.append({"id": call.get("id") or f"call_{index}", "type": "function", "function": function})
    return calls


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(value), status=status, content_type="application/json", headers=headers
    )


def _error(status: int, message: str, code: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return _json({"error": {"message": message, "type": "stub", "code": code}}, status, headers)
