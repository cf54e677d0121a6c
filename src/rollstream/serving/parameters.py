"""Parameters of a request: known ones typed, others refused by name, never passed over.

A parameter that would change the answer and is not known here is an error. Two kinds are let through: those
that change nothing in an answer, and those with the value that asks for nothing (`logit_bias: {}`).
"""

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec
import orjson

from rollstream.serving.refusals import RequestError
from rollstream.web import Request

_StructT = TypeVar("_StructT", bound=msgspec.Struct)

_PLACE = re.compile(r" - at `\$\.(\w+)")


async def request_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body, which is dropped: the answer may take minutes."""
    body = await request.body()
    request.release()
    return read_object(body)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        RequestError: it is none.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def read_parameters(
    given: Mapping[str, Any],
    kind: type[_StructT],
    *,
    harmless: Collection[str] = (),
    neutral: Mapping[str, Any] | None = None,
    where: str = "",
) -> _StructT:
    """Types the parameters of a request. A value of null counts as not given.

    Args:
        given: from the body.
        kind: has a field for each known parameter.
        harmless: names that are accepted and mean nothing here.
        neutral: names that are accepted with this value only.
        where: in front of names in messages, such as `sampling_params.`.

    Raises:
        RequestError: naming the parameter that is not known, not supported or of a wrong type.
    """
    neutral = neutral or {}
    known = kind.__struct_fields__
    values = {}
    for name, value in given.items():
        if value is None or name in harmless:
            continue
        if name in known:
            values[name] = value
        elif name in neutral:
            if value != neutral[name]:
                raise RequestError(
                    f"parameter {where + name!r} is supported with the value {neutral[name]!r} only",
                    param=where + name,
                    code="unsupported_parameter",
                )
        else:
            near = difflib.get_close_matches(name, [*known, *neutral], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(
                f"parameter {where + name!r} is not supported{hint}",
                param=where + name,
                code="unsupported_parameter",
            )
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        raise RequestError(
            str(error).replace("`$.", f"`{where}"), param=where + place[1] if place else None
        ) from error
