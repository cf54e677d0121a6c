"""What a request's body says, checked."""

from typing import Any, TypeVar

import msgspec
import orjson

from rollstream.buffer.exchange import Exchange, RefusalError

MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")

T = TypeVar("T")


async def read_object(exchange: Exchange) -> dict[str, Any]:
    """A JSON object; none for an empty body.

    Raises:
        RefusalError: it is something else.
    """
    body = await exchange.body()
    if not body.strip():
        return {}
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise RefusalError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RefusalError(f"the body is not a JSON object but a {type(value).__name__}")
    return value


async def read_typed(exchange: Exchange, wanted: type[T]) -> T:
    """A JSON (or, by content type, msgpack) object of a struct's fields; an empty body has none of them.

    Raises:
        RefusalError: a field is unknown, missing or of another type; says which.
    """
    body = await exchange.body()
    decode = msgspec.msgpack.decode if exchange.media_type() in MSGPACK_TYPES else msgspec.json.decode
    try:
        if not body.strip():
            return msgspec.convert({}, wanted)
        return decode(body, type=wanted)
    except RecursionError as error:
        raise RefusalError("the body is nested too deep") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise RefusalError(f"the body cannot be read: {error}") from error
