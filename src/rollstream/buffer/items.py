"""An item: one trajectory as the buffer's wire carries it. It is checked, and stored as it came.

slime's wire has `uid`, `instance_id`, `messages`, `reward` and `extra_info`. The buffer adds, all optional:
`task_type`, `job`, `policy_version`, and the exact tokens `prompt_ids`, `response_ids`, `response_mask`,
`response_logprobs`. Further keys are kept. In JSON tokens are lists of numbers; in msgpack they are
little-endian binary (int32 ids, int8 mask, float32 log-probs) or lists.

Source of the wire format: slime_plugins/rollout_buffer of THUDM/slime.
"""

import json
import math
import re
import sys
import uuid
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy
import orjson
from msgspec import UNSET, Meta, UnsetType

from rollstream.errors import RollstreamError
from rollstream.surrogates import replace_in_value

InstanceId = int | str
"""Names the prompt that an item answers. 7 and "7" are two ids."""

Encoding = Literal["json", "msgpack"]

MAX_ITEMS: Final = 10_000
"""A batch has at most so many: bounds the memory that a body of tiny items takes once it is parsed."""

MAX_TEXT: Final = 1024
"""Characters of an id, uid, task type or job."""

TOKENS: Final[Mapping[str, tuple[str, numpy.dtype[Any]]]] = {
    "prompt_ids": ("i", numpy.dtype("<i4")),
    "response_ids": ("i", numpy.dtype("<i4")),
    "response_mask": ("b", numpy.dtype("i1")),
    "response_logprobs": ("f", numpy.dtype("<f4")),
}
"""Token fields: the code of Python's array, and the numbers as they travel in msgpack."""

_DEPTH: Final = 200
"""Brackets from which on nesting is looked at."""

_FLOAT32_MAX: Final = float(numpy.finfo(numpy.float32).max)

_Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Ids = list[Annotated[int, Meta(ge=0, lt=2**31)]]
_Mask = list[Annotated[int, Meta(ge=0, le=1)]]
_Logprobs = list[Annotated[float, Meta(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX)]]


class ItemError(RollstreamError):
    """An item that cannot be stored.

    Attributes:
        message: What is wrong with it.
        where: The field, such as `messages[2].role` or `items[5].reward`; "" for the body as a whole.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.where = where

    def within(self, number: int) -> "ItemError":
        """The same error of an item in a batch."""
        return ItemError(self.message, f"items[{number}]{self.where and '.'}{self.where}")


class Item(msgspec.Struct, frozen=True, gc=False):
    """An item's bytes, and the fields that the buffer reads."""

    uid: str
    """The written one, or one made for an item that came without."""
    instance_id: InstanceId
    reward: float | None
    failed: bool
    """Its `extra_info` has a `failure`: its reward says nothing."""
    version: int | None
    body: bytes
    encoding: Encoding
    task: str | None = None
    """None: the task of the job that was started last."""
    job: str | None = None


class _ItemMessage(msgspec.Struct, gc=False):
    role: Annotated[str, Meta(min_length=1)]


class _Extra(msgspec.Struct, gc=False):
    failure: Any = None


class _Head(msgspec.Struct, gc=False):
    instance_id: _Int64 | _Text
    messages: Annotated[list[_ItemMessage], Meta(min_length=1)]
    reward: float | None
    uid: _Text | UnsetType = UNSET
    extra_info: _Extra | None = None
    task_type: _Text | None = None
    job: _Text | None = None
    policy_version: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class _JsonHead(_Head, gc=False):
    prompt_ids: _Ids | None = None
    response_ids: _Ids | None = None
    response_mask: _Mask | None = None
    response_logprobs: _Logprobs | None = None


class _PackedHead(_Head, gc=False):
    prompt_ids: memoryview | _Ids | None = None
    response_ids: memoryview | _Ids | None = None
    response_mask: memoryview | _Mask | None = None
    response_logprobs: memoryview | _Logprobs | None = None


class _ItemBatch(msgspec.Struct, gc=False):
    items: list[msgspec.Raw] | UnsetType = UNSET


_decode_json_head = msgspec.json.Decoder(_JsonHead).decode
_decode_json_batch = msgspec.json.Decoder(_ItemBatch).decode
_decode_packed_head = msgspec.msgpack.Decoder(_PackedHead).decode
_decode_packed_batch = msgspec.msgpack.Decoder(_ItemBatch).decode
_decode_packed = msgspec.msgpack.Decoder().decode
_decode_packed_top = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


def parse_item(body: bytes, encoding: Encoding = "json") -> Item:
    """Checks one item.

    Raises:
        ItemError: It is not an item; names the field.
    """
    try:
        if encoding == "json":
            judged = orjson.loads(body)  # what the typed decoder skips: UTF-8, numbers, surrogates
            if body.count(b"[") + body.count(b"{") > _DEPTH:
                orjson.dumps(judged)  # raises beyond 254 levels, so that what is stored can be written again
            head: _JsonHead | _PackedHead = _decode_json_head(body)
        else:
            head = _decode_packed_head(body)
            _check_packed(body)
    except (ValueError, TypeError, RecursionError) as error:  # msgspec's and orjson's
        raise _fault(error, encoding) from None
    if any(getattr(head, name) is not None for name in TOKENS):
        _check_tokens(head)
    if head.reward is not None and not math.isfinite(head.reward):
        raise ItemError(f"must be a finite number or null, is {head.reward}", "reward")
    uid = head.uid
    for name in ("uid", "instance_id", "task_type", "job"):
        if type(text := getattr(head, name)) is str and "\0" in text:
            raise ItemError("holds a NUL character, which databases have no form for", name)
    if uid is UNSET:
        uid = uuid.uuid4().hex
        body = with_uid(body, uid, encoding)
    extra = head.extra_info
    failed = extra is not None and extra.failure is not None
    return Item(
        uid,
        head.instance_id,
        head.reward,
        failed,
        head.policy_version,
        body,
        encoding,
        head.task_type,
        head.job,
    )


def parse_items(body: bytes, encoding: Encoding = "json") -> list[Item]:
    """Checks a batch, `{"items": [...]}`, or one item alone. Either all of them are good, or none is taken.

    Raises:
        ItemError: The first fault; names the item's position and the field.
    """
    if (bodies := split_batch(body, encoding)) is None:
        return [parse_item(body, encoding)]
    return [parse_nth(number, one, encoding) for number, one in enumerate(bodies)]


def parse_nth(number: int, body: bytes, encoding: Encoding) -> Item:
    """One item of a batch. Raises `ItemError`."""
    try:
        return parse_item(body, encoding)
    except ItemError as error:
        raise error.within(number) from None


def split_batch(body: bytes, encoding: Encoding) -> list[bytes] | None:
    """The items of a batch, not checked; None: it is one item alone. Raises `ItemError`."""
    try:
        batch = (_decode_json_batch if encoding == "json" else _decode_packed_batch)(body).items
    except (ValueError, RecursionError) as error:
        raise _fault(error, encoding) from None
    if batch is UNSET:
        return None
    if not 1 <= len(batch) <= MAX_ITEMS:
        raise ItemError(f"has {len(batch)} items; a batch has 1 to {MAX_ITEMS}", "items")
    return [bytes(raw) for raw in batch]


def with_uid(body: bytes, uid: str, encoding: Encoding) -> bytes:
    """The body of an item that has no uid, with this one."""
    if encoding == "json":
        return b'{"uid":"%b",%b' % (uid.encode(), body.lstrip()[1:])
    return msgspec.msgpack.encode({"uid": uid, **_decode_packed_top(body)})


def load_item(body: bytes, encoding: Encoding) -> dict[str, Any]:
    """The item of a body, new each time. Binary tokens are `array.array`s; a missing `extra_info` is {}."""
    item: dict[str, Any] = orjson.loads(body) if encoding == "json" else _decode_packed(body)
    if encoding == "msgpack":
        for name, (code, _) in TOKENS.items():
            if type(stored := item.get(name)) is bytes:
                tokens = array(code, stored)
                if sys.byteorder == "big":
                    tokens.byteswap()
                item[name] = tokens
    if item.get("extra_info") is None:
        item["extra_info"] = {}
    return item


def plain_item(body: bytes, encoding: Encoding) -> dict[str, Any]:
    """`load_item`, with tokens as lists: as JSON has it."""
    item = load_item(body, encoding)
    return {name: _plain(value) if isinstance(value, array) else value for name, value in item.items()}


def dump_item(item: Mapping[str, Any], encoding: Encoding) -> bytes:
    """An item as bytes. Tokens become lists in JSON and binary in msgpack; numpy's numbers become plain.

    Lone surrogates become U+FFFD.

    Raises:
        ItemError: It holds something that the encoding has no form for.
    """
    try:
        try:
            return _dump(item, encoding)
        except (TypeError, ValueError) as error:
            if "surrogates not allowed" not in str(error):
                raise
            return _dump(replace_in_value(item), encoding)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ItemError(f"cannot be written as {encoding}: {error}") from error


def _dump(item: Mapping[str, Any], encoding: Encoding) -> bytes:
    if encoding == "json":
        return orjson.dumps(item, _plain, orjson.OPT_SERIALIZE_NUMPY)
    packed = {
        name: _binary(name, value) if name in TOKENS and value is not None else value
        for name, value in item.items()
    }
    return msgspec.msgpack.encode(packed, enc_hook=_plain)


def dump_list(items: Sequence[bytes], encoding: Encoding) -> bytes:
    """A list of items, each of them encoded already."""
    if encoding == "json":
        return b"[" + b",".join(items) + b"]"
    return msgspec.msgpack.encode([msgspec.Raw(one) for one in items])


def _check_packed(body: bytes) -> None:
    """Refuses what JSON has no form for: binary outside of tokens, timestamps, NaN, keys that are no text."""
    item = _decode_packed(body)
    rest = {name: value for name, value in item.items() if name not in TOKENS}
    try:
        text = orjson.dumps(rest, None, orjson.OPT_PASSTHROUGH_DATETIME)
    except (TypeError, ValueError) as error:
        raise ItemError(f"holds something that JSON has no form for: {error}") from None
    if b"null" in text:  # orjson's form of NaN and infinities, too
        try:
            json.dumps(rest, allow_nan=False)
        except ValueError:
            raise ItemError("holds a number that is not finite") from None


def _check_tokens(head: _JsonHead | _PackedHead) -> None:
    lengths = {}
    for name, (_, dtype) in TOKENS.items():
        value = getattr(head, name)
        if type(value) is memoryview:
            if len(value) % dtype.itemsize:
                raise ItemError(f"has {len(value)} bytes, no multiple of {dtype.itemsize}", name)
            numbers = numpy.frombuffer(value, dtype)
            if name == "response_logprobs":
                good = bool(numpy.isfinite(numbers).all())
            elif name == "response_mask":
                good = not len(numbers) or int(numbers.view("u1").max()) <= 1
            else:
                good = not len(numbers) or int(numbers.min()) >= 0
            if not good:
                raise ItemError("holds a number that is none of its kind", name)
            value = numbers
        if value is not None:
            lengths[name] = len(value)
    if ("prompt_ids" in lengths) != ("response_ids" in lengths):
        missing = "response_ids" if "prompt_ids" in lengths else "prompt_ids"
        raise ItemError("is missing; prompt_ids and response_ids come together", missing)
    for name in ("response_mask", "response_logprobs"):
        if name in lengths and lengths[name] != lengths.get("response_ids"):
            raise ItemError(
                f"has {lengths[name]} numbers for {lengths.get('response_ids', 'no')} response_ids", name
            )


def _binary(name: str, value: Any) -> bytes:
    code, dtype = TOKENS[name]
    if isinstance(value, bytes):
        return value
    try:
        numbers = numpy.asarray(value)
        if numbers.size and (numbers.ndim != 1 or numbers.dtype.kind not in ("iu" if code != "f" else "iuf")):
            raise ItemError("must be a list of numbers", name)
        kept = numbers.astype(dtype)
        if code != "f" and not numpy.array_equal(kept, numbers):
            raise ItemError(f"holds a number that does not fit into {dtype.name}", name)
        return kept.tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise ItemError(f"must be a list of numbers ({dtype.name}): {error}", name) from None


def _plain(value: Any) -> Any:
    if isinstance(value, array | numpy.ndarray | numpy.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in an item")


_AT: Final = re.compile(r"^(.*) - at `(?:key in )?\$?\.?(.*)`$", re.DOTALL)


def _fault(error: Exception, encoding: Encoding) -> ItemError:
    if isinstance(error, ItemError):
        return error
    if isinstance(error, RecursionError | TypeError):
        return ItemError("is nested too deep")
    if isinstance(error, msgspec.ValidationError):
        found = _AT.match(str(error))
        return ItemError(found[1], found[2]) if found else ItemError(str(error))
    return ItemError(f"not valid {encoding}: {error}"[:300])
