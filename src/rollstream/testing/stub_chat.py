"""A chat endpoint without a model: OpenAI's `/v1/chat/completions`, streamed, that goes wrong on command."""

import asyncio
import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from aiohttp import web

from rollstream.testing.http_stub import HttpStub, error_response, json_response
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
    | `half_event` | after half of the answer, the stream ends in the middle of an event |
    | `garbage` | after half of the answer, an event that is no JSON |
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
        limit: `(requests, seconds)`: more in any such time are a 429 that says when to come back.
        pause: seconds between two pieces of an answer.

    Attributes:
        faults: of the next requests, one each; a request without one goes well.
        requests: bodies of all requests, in order; those that were refused included.
        answered: streams that came to their end.
        refused: requests beyond `limit`.
        closed_by_client: answers whose reader went away.
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
        pause: float = 0.0,
    ) -> None:
        self.rule = rule
        self.model = model
        self.api_key = api_key
        self.lists_models = lists_models
        self.limit = limit
        self.pause = pause
        self.faults: deque[ChatFault | None] = deque()
        self.requests: list[dict[str, Any]] = []
        self.answered = self.refused = self.closed_by_client = 0
        self._admitted: deque[float] = deque()
        self._ids = itertools.count(1)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "none").removeprefix("Bearer ")
        if self.api_key not in (None, shown):
            return error_response(401, f"Incorrect API key provided: {shown}", "invalid_api_key")
        if request.path == "/v1/models" and self.lists_models:
            return json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        if request.path != "/v1/chat/completions":
            return error_response(404, f"no route {request.path}", "not_found")
        body = orjson.loads(await request.read())
        self.requests.append(body)
        if body.get("model") != self.model:
            return error_response(404, f"The model `{body.get('model')}` does not exist", "model_not_found")
        if (wait := self._wait_for_room()) > 0:
            self.refused += 1
            headers = {"Retry-After": f"{wait:.3f}"}
            return error_response(429, "Rate limit reached", "rate_limit_exceeded", headers)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "status":
            return error_response(fault.status, fault.message, fault.code, fault.headers)
        if fault is not None and fault.kind == "drop" and request.transport is not None:
            request.transport.abort()
        answer = self.rule(body)
        message: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if fault is not None and fault.kind == "finish":
            finish = fault.code
        head = {"id": f"chatcmpl-{next(self._ids)}", "model": self.model}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        if not body.get("stream"):
            self.answered += 1
            whole = {**message, "tool_calls": _calls(message)} if message.get("tool_calls") else message
            choice = {"index": 0, "message": whole, "finish_reason": finish}
            return json_response({**head, "choices": [choice], "usage": usage})
        ends: list[dict[str, Any]] = [{"delta": {}, "finish_reason": finish}]
        deltas = [{"delta": delta, "finish_reason": None} for delta in _deltas(message)]
        events: list[dict[str, Any]] = [
            {**head, "choices": [{"index": 0, **piece}]} for piece in [*deltas, *ends]
        ]
        if body.get("stream_options", {}).get("include_usage"):
            events.append({**head, "choices": [], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for part in _spoilt(events, fault):
                await response.write(b"data: " + part + b"\n\n")
                await asyncio.sleep(self.pause)
            if fault is not None and fault.kind == "half_event":
                await response.write(b'data: {"choices": [{"ind')
            if fault is not None and fault.kind == "hang":
                await asyncio.Event().wait()
            if fault is not None and fault.kind == "cut" and request.transport is not None:
                await asyncio.sleep(0.01)  # what was written is on its way first
                request.transport.abort()
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.closed_by_client += 1
            raise
        self.answered += 1
        return response

    def _wait_for_room(self) -> float:
        """Seconds until the limit lets another request through; if it does now, this one counts."""
        if self.limit is None:
            return 0.0
        most, seconds = self.limit
        now = time.monotonic()
        while self._admitted and self._admitted[0] + seconds <= now:
            self._admitted.popleft()
        if len(self._admitted) == most:
            return self._admitted[0] + seconds - now
        self._admitted.append(now)
        return 0.0


def _spoilt(events: list[dict[str, Any]], fault: ChatFault | None) -> list[bytes]:
    """The data of an answer's events, as a fault leaves them."""
    whole, done = [orjson.dumps(event) for event in events], b"[DONE]"
    half = whole[: max(1, len(whole) // 2)]
    match fault:
        case ChatFault("no_choices"):
            return [orjson.dumps({**events[0], "choices": []}), done]
        case ChatFault("garbage"):
            return [*half, b"{what is this"]
        case ChatFault("error_event"):
            return [*half, orjson.dumps({"error": {"message": fault.message, "code": fault.code}})]
        case ChatFault("cut" | "truncate" | "half_event" | "hang"):
            return half
    return [*whole, done]


def _deltas(message: Message) -> list[dict[str, Any]]:
    """The message in pieces: a word each, and each call's arguments in two."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in _PIECES.findall(message.get(name) or "")]
    for index, call in enumerate(_calls(message)):
        text = call["function"]["arguments"]
        half = len(text) // 2
        head = {"name": call["function"]["name"], "arguments": text[:half]}
        rest = {"index": index, "function": {"arguments": text[half:]}}
        deltas += [{"tool_calls": [{**call, "index": index, "function": head}]}, {"tool_calls": [rest]}]
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
