"""Requests of model servers: parameters typed, what is not understood refused by name or noted, errors as OpenAI's.

A parameter with the value that asks for nothing (`logit_bias: {}`) is passed over. Others that are not known:

- a server for trainers refuses them, but for those that change nothing in an answer
- where agents are recorded, they are noted and passed over, but for those that would make the answer one to
  another question (`DECISIVE`)
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from rollstream.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineUnavailableError,
    RollstreamError,
    TransientEngineError,
)
from rollstream.web import HTTPError, Request, json_response

StructT = TypeVar("StructT", bound=msgspec.Struct)
T = TypeVar("T")

_PLACE = re.compile(r" - at `\$\.([^`]+)`")

_RETRY_AFTER_S = 1
"""What a client is told to wait when it is turned away: a worker that died is back after about a second."""

_KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "overloaded_error"}

HARMLESS = frozenset(
    (
        "cache_control",
        "cache_salt",
        "client_metadata",
        "diagnostics",
        "inference_geo",
        "max_tool_calls",
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "speed",
        "store",
        "truncation",  # a conversation that is too long is refused, and so nothing is cut off unseen
        "user",
        "user_profile_id",
        "workspace_id",
    )
)
"""Parameters of any API that change nothing in an answer."""

NEUTRAL: Mapping[str, Any] = {
    "add_special_tokens": False,
    "background": False,
    "chat_template_kwargs": {},
    "context_management": [],
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "none",
    "functions": [],
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "logit_bias": {},
    "mcp_servers": [],
    "min_p": 0,
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "top_logprobs": 0,
    "use_beam_search": False,
}
"""Parameters of any API, each with the value by which it asks for nothing."""

DECISIVE = frozenset(
    (
        "add_generation_prompt",
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "echo",
        "function_call",
        "functions",
        "ignore_eos",
        "length_penalty",
        "logit_bias",
        "min_tokens",
        "n",
        "prompt",
        "stop_token_ids",
        "suffix",
        "use_beam_search",
    )
)
"""Parameters of any API that decide what is sampled or shown: without them it is another request."""

_CODES = {"unauthorized": "invalid_api_key", "bad_request": None, "": None}
"""OpenAI's words for those of `web`."""


class RequestError(HTTPError):
    """A request that is refused.

    Attributes:
        param: the parameter that is wrong, where it is one.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message, code or "", where=param or "")
        self.param = param


class Sampling(msgspec.Struct, kw_only=True):
    """How a request wants to be sampled; None leaves it to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: int = 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts, one or many."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


async def request_object(
    request: Request, read: Callable[[dict[str, Any]], T], *, most: int | None = None
) -> T:
    """Reads the JSON object in a request's body, and drops the body: the answer may take minutes.

    Args:
        request: see there.
        read: runs in a thread where the body is long.
        most: bytes that the body may have.
    """
    body = await request.body(most)
    decode = partial(request.decode, decoder=orjson.loads)
    try:
        return await request.in_thread(lambda: read(read_object(body, decode)))
    finally:
        request.release()


def read_object(body: bytes, decode: Callable[[bytes], Any] = orjson.loads) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        RequestError: it is none.
    """
    try:
        value = decode(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def read_parameters(
    given: Mapping[str, Any],
    kind: type[StructT],
    *,
    harmless: Collection[str] = (),
    neutral: Mapping[str, Any] = MappingProxyType({}),
    notes: dict[str, Any] | None = None,
    where: str = "",
) -> StructT:
    """Types the parameters of a request. A value of null counts as not given.

    Args:
        given: from the body.
        kind: has a field for each known parameter.
        harmless: names that are accepted and mean nothing here.
        neutral: names that are accepted with this value only.
        notes: gets what is passed over, unless it is `DECISIVE`; None: that is refused, unless it is harmless.
        where: in front of names in messages, such as `sampling_params.`.

    Raises:
        RequestError: naming the parameter that is not known, not supported or of a wrong type.
    """
    known = kind.__struct_encode_fields__
    values = {}
    for name, value in given.items():
        if value is None or (name in neutral and value == neutral[name]):
            continue
        if name in known:
            values[name] = value
        elif notes is not None and name not in DECISIVE:
            notes[name] = value
        elif name in neutral:
            raise unsupported(where + name, f"is supported with the value {neutral[name]!r} only")
        elif name not in harmless:
            raise unsupported(where + name, "is not supported")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        raise RequestError(
            str(error).replace("`$.", f"`{where}"), param=where + place[1] if place else None
        ) from error


def unsupported(param: str, why: str) -> RequestError:
    return RequestError(f"parameter {param!r} {why}", param=param, code="unsupported_parameter")


def refusal_of(error: Exception) -> HTTPError | None:
    """The refusal for an error: a fault of the request is a 4xx, one of the engine a 5xx; None for a bug."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, EngineUnavailableError):
        return RequestError(str(error), status=503)
    if isinstance(error, TransientEngineError):
        return RequestError(str(error), status=500)
    if isinstance(error, EngineError | DataError | ConfigError):
        return RequestError(str(error))
    if isinstance(error, RollstreamError):
        return RequestError(f"{type(error).__name__}: {error}", status=500)
    return None


def error_body(error: HTTPError) -> dict[str, Any]:
    """An error in OpenAI's shape, which SGLang's clients read as well."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": _KINDS.get(error.status, kind),
            "param": error.where or None,
            "code": _CODES.get(error.code, error.code),
        }
    }


def error_headers(error: HTTPError) -> dict[str, str]:
    """The headers of a refusal: who is turned away for a moment is told when to come again."""
    again = {"Retry-After": str(_RETRY_AFTER_S)} if error.status in (429, 503) else {}
    return {**again, **error.headers}


def render_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
    """A refusal in OpenAI's shape."""
    return json_response(error_body(error), error.status, error_headers(error))
