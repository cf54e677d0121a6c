"""Why a request gets no answer, as HTTP says it."""

from aiohttp import web

from rollstream.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineUnavailableError,
    RollstreamError,
    TransientEngineError,
)
from rollstream.web import HTTPError, json_response

RETRY_AFTER_S = 1
"""What a client is told to wait when it is turned away: a worker that died is back after about a second."""

_KINDS = {401: "authentication_error", 503: "overloaded_error"}

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


def render_error(request: web.BaseRequest, error: HTTPError) -> web.Response:
    """An error in OpenAI's shape, which SGLang's clients read as well."""
    body = {
        "error": {
            "message": str(error),
            "type": _KINDS.get(error.status)
            or ("server_error" if error.status >= 500 else "invalid_request_error"),
            "param": error.where or None,
            "code": _CODES.get(error.code, error.code),
        }
    }
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else {}
    return json_response(body, error.status, {**error.headers, **headers})
