"""Why a request gets no answer, as HTTP says it."""

from typing import Any

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

RETRY_AFTER_S = 1
"""What a client is told to wait when it is turned away: a worker that died is back after about a second."""


class RequestError(RollstreamError):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        param: the parameter that is wrong, where it is one.
        code: OpenAI's word for the cause, where it has one.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def refuse(error: RollstreamError) -> web.Response:
    """The answer for an error: a fault of the request is a 4xx, one of the engine a 5xx."""
    if isinstance(error, RequestError):
        return error_response(str(error), error.status, param=error.param, code=error.code)
    if isinstance(error, EngineUnavailableError):
        return error_response(str(error), 503)
    if isinstance(error, TransientEngineError):
        return error_response(str(error), 500)
    if isinstance(error, EngineError | DataError | ConfigError):
        return error_response(str(error), 400)
    return error_response(f"{type(error).__name__}: {error}", 500)


def error_response(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> web.Response:
    """An error in OpenAI's shape, which SGLang's clients read as well."""
    kind = {401: "authentication_error", 503: "overloaded_error"}.get(status)
    body = {
        "error": {
            "message": message,
            "type": kind or ("server_error" if status >= 500 else "invalid_request_error"),
            "param": param,
            "code": code,
        }
    }
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return json_response(body, status, headers=headers)


def json_response(value: Any, status: int = 200, *, headers: dict[str, str] | None = None) -> web.Response:
    """A value as JSON."""
    return web.Response(
        body=orjson.dumps(value), status=status, content_type="application/json", headers=headers
    )
