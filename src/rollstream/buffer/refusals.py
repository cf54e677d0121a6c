"""What the errors of the other rooms are in HTTP."""

from typing import Any

from rollstream.buffer.exchange import RefusalError
from rollstream.buffer.generators import UnknownTaskError
from rollstream.buffer.items import ItemError
from rollstream.errors import (
    BufferFullError,
    ConfigError,
    ConflictError,
    NotFoundError,
    RollstreamError,
    StorageError,
    StorageFullError,
)

RETRY_AFTER_S = 1
"""What a writer is told to wait when there is no room."""


def refusal_of(error: RollstreamError) -> RefusalError:
    """The refusal that tells of an error: a fault of the request is a 4xx, one of the server a 5xx."""
    text = str(error)
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, ItemError):
        return RefusalError(text, code="invalid_item", details={"where": error.where})
    if isinstance(error, UnknownTaskError):
        return RefusalError(text, status=404, code="unknown_task_type", details={"known": error.known})
    if isinstance(error, ConfigError):
        return RefusalError(text, code="invalid_request")
    if isinstance(error, NotFoundError):
        return RefusalError(text, status=404, code="not_found")
    if isinstance(error, ConflictError):
        return RefusalError(text, status=409, code="conflict")
    if isinstance(error, BufferFullError):
        return RefusalError(text, status=429, code="buffer_full", headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, StorageFullError):
        return RefusalError(text, status=507, code="disk_full")
    if isinstance(error, StorageError):
        return RefusalError(text, status=507, code="storage")
    return RefusalError(f"{type(error).__name__}: {text}", status=500, code="internal")


def refused_body(refusal: RefusalError, path: str) -> dict[str, Any]:
    """What the answer says."""
    text = str(refusal)
    body: dict[str, Any] = {"error": {"message": text, "code": refusal.code, **refusal.details}}
    if not path.startswith("/v1/"):
        # As slime's server, and the framework below it, say that something failed.
        body |= {"success": False, "message": text, "detail": text}
    return body
