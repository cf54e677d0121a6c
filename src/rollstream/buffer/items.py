"""An item: one trajectory as the buffer's wire carries it, checked and turned into the bytes that are stored.

slime's wire has `uid`, `instance_id`, `messages`, `reward` and `extra_info`; further top-level keys are kept.
The buffer adds, all of them optional: `task_type`, `rollout_id`, `policy_version`, and the exact tokens
`prompt_ids`, `response_ids`, `response_mask`, `response_logprobs`. In JSON, tokens are lists of numbers; in
msgpack they are little-endian binary (int32 ids, int8 mask, float32 log-probs) or lists too.

Source of the wire format: slime_plugins/rollout_buffer of THUDM/slime.
"""

import math
import sys
import uuid
from array import array
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import numpy
import orjson

from rollstream.buffer.json_faults import find_fault
from rollstream.errors import RollstreamError

InstanceId = int | str
"""Names the prompt that an item answers. 7 and "7" are two different ids."""

Encoding = Literal["json", "msgpack"]

MAX_DEPTH: Final = 200
"""Lists and maps within each other, the item itself counted. Below the 254 levels that orjson writes, with
room for what an answer wraps around an item, and far below what Python's own JSON reader can take."""

MAX_TEXT_ID: Final = 1024
"""Characters of an id, uid, task type or rollout id: these stay in memory, unlike the item's content."""

MAX_ITEMS: Final = 10_000
"""Items of one batch: bounds the memory that a body of tiny items takes once it is parsed."""

_TOKENS: Final[Mapping[str, tuple[str, numpy.dtype[Any]]]] = {
    "prompt_ids": ("i", numpy.dtype("<i4")),
    "response_ids": ("i", numpy.dtype("<i4")),
    "response_mask": ("b", numpy.dtype("i1")),
    "response_logprobs": ("f", numpy.dtype("<f4")),
}
"""Token fields: the code of Python's array, and the numbers as they travel in msgpack."""

_NUMBERS: Final[Mapping[str, frozenset[type]]] = {
    "i": frozenset({int}),
    "b": frozenset({int}),
    "f": frozenset({int, float}),
}
_SWAP: Final = sys.byteorder == "big"
_INT64: Final = 1 << 63
_SHORT_TEXT: Final = 2048
"""Bytes up to which it is cheaper to count brackets than to look at fields; beyond, a count soon costs more
than all the rest."""

_NESTED: Final = frozenset((dict, list))
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))

_decode_msgpack = msgspec.msgpack.Decoder().decode


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

    def within(self, where: str) -> "ItemError":
        """The same error of a part, told from the whole's point of view."""
        return ItemError(self.message, f"{where}.{self.where}" if self.where else where)


class Item(msgspec.Struct, frozen=True, gc=False):
    """What the buffer has to know of an item, and its bytes."""

    uid: str
    """As written, or made for an item that came without one (then writing it again stores it again)."""
    instance_id: InstanceId
    reward: float | None
    """None: not scored."""
    policy_version: int | None
    payload: bytes
    """The whole item, in `encoding`, without white space or repeated keys."""
    encoding: Encoding
    task_type: str | None = None
    """None: the task of the active rollout."""
    rollout_id: str | None = None


def parse_item(body: bytes | Mapping[str, Any], encoding: Encoding = "json") -> Item:
    """Checks one item.

    Args:
        body: The item as it came in, or as a mapping, which is left as it is.
        encoding: Of the body, and of the payload made from it.

    Raises:
        ItemError: It is not an item; names the field.
    """
    if isinstance(body, bytes):
        return _item_of(_decoded(body, encoding), encoding, finite=_is_finite(body, encoding))
    return _item_of(dict(body), encoding, finite=False)


def parse_items(body: bytes, encoding: Encoding = "json") -> list[Item]:
    """Checks a batch, `{"items": [...]}`, or one item alone. Either all of them are good, or none is taken.

    Raises:
        ItemError: The first fault; names the item's position and the field.
    """
    document = _decoded(body, encoding)
    finite = _is_finite(body, encoding)
    if not isinstance(document, dict) or "items" not in document:
        return [_item_of(document, encoding, finite=finite)]
    batch = document["items"]
    if type(batch) is not list:
        raise ItemError(f"must be a list of items, is {_kind(batch)}", "items")
    if not batch:
        raise ItemError("is empty; a batch has at least one item", "items")
    if len(batch) > MAX_ITEMS:
        raise ItemError(f"has {len(batch)} items; at most {MAX_ITEMS} in one batch", "items")
    items: list[Item] = []
    try:
        for item in batch:
            items.append(_item_of(item, encoding, finite=finite))
    except ItemError as error:
        raise error.within(f"items[{len(items)}]") from None
    return items


def load_item(payload: bytes, encoding: Encoding) -> dict[str, Any]:
    """The item that a payload holds, a new one each time: what is done to it does not touch what is stored.

    Tokens are lists (of a JSON payload) or `array.array`s (of a msgpack one, `i`, `b` and `f`).
    """
    item: dict[str, Any]
    if encoding == "json":
        item = orjson.loads(payload)
        return item
    item = _decode_msgpack(payload)
    for name, (code, _) in _TOKENS.items():
        if type(stored := item.get(name)) is bytes:
            tokens = array(code)
            tokens.frombytes(stored)
            if _SWAP:
                tokens.byteswap()
            item[name] = tokens
    return item


def dump_item(item: Mapping[str, Any], encoding: Encoding) -> bytes:
    """An item as bytes; the inverse of `load_item`, in either encoding.

    Tokens become lists in JSON and binary in msgpack. Numbers and arrays of numpy are written as plain ones.

    Raises:
        ItemError: It holds something that the encoding has no form for.
    """
    try:
        if encoding == "json":
            return orjson.dumps(item, _listed, orjson.OPT_SERIALIZE_NUMPY)
        packed = {
            name: _packed(name, value) if name in _TOKENS and value is not None else value
            for name, value in item.items()
        }
        return msgspec.msgpack.encode(packed, enc_hook=_listed)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ItemError(f"cannot be written as {encoding}: {error}") from error


def _item_of(item: Any, encoding: Encoding, *, finite: bool) -> Item:
    """Checks a decoded item, which may be changed; `finite`: it has no NaN or infinity for sure."""
    if type(item) is not dict:
        raise ItemError(f"an item is an object with instance_id, messages and reward; this is {_kind(item)}")
    instance_id = _instance_id(item)
    reward = _reward(item)
    _check_messages(item)
    uid = _text(item, "uid")
    if uid is None:
        if "uid" in item:
            raise ItemError("must be text, is null; leave it out to have one made", "uid")
        item["uid"] = uid = uuid.uuid4().hex
    extra = item.get("extra_info")
    if extra is None:
        item["extra_info"] = {}
    elif type(extra) is not dict:
        raise ItemError(f"must be an object, is {_kind(extra)}", "extra_info")
    version = item.get("policy_version")
    if version is not None and (type(version) is not int or not 0 <= version < _INT64):
        raise ItemError(f"must be a whole number from 0 on, is {_kind(version)}", "policy_version")
    has_tokens = not _TOKENS.keys().isdisjoint(item)
    if has_tokens:
        _check_tokens(item, encoding)
    if not finite:
        _check_values(item)
    payload = _payload(item, encoding, has_tokens)
    task_type, rollout_id = _text(item, "task_type"), _text(item, "rollout_id")
    return Item(uid, instance_id, reward, version, payload, encoding, task_type, rollout_id)


def _decoded(body: bytes, encoding: Encoding) -> Any:
    try:
        return orjson.loads(body) if encoding == "json" else _decode_msgpack(body)
    except RecursionError:
        raise ItemError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # both libraries' errors, and bytes that are not UTF-8
        if "depth limit" in str(error):
            raise ItemError(f"is nested deeper than {MAX_DEPTH} levels") from None
        if encoding == "json" and (found := find_fault(body)) is not None:
            fault, where = found
            raise ItemError(f"not valid json: {fault}", where) from None
        raise ItemError(f"not valid {encoding}: {error}") from None


def _is_finite(body: bytes, encoding: Encoding) -> bool:
    """Whether a body that was decoded has neither NaN nor infinity for sure.

    In msgpack these have a byte 0x7f or 0xff, sign and exponent, which text has not. So most bodies need not
    be walked through; one that has such a byte in its tokens costs a walk, no more.
    """
    return encoding == "json" or not (b"\x7f" in body or b"\xff" in body)


def _payload(item: dict[str, Any], encoding: Encoding, has_tokens: bool) -> bytes:
    """The bytes to store. What JSON has no form for, and too deep nesting, shows when it is written."""
    rest = item
    if has_tokens and encoding == "msgpack":
        rest = {name: value for name, value in item.items() if name not in _TOKENS}
    try:
        text = orjson.dumps(rest, None, orjson.OPT_PASSTHROUGH_DATETIME)
        payload = text if encoding == "json" else msgspec.msgpack.encode(item)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        _check_values(item)  # says where
        raise ItemError(f"cannot be stored as {encoding}: {error}") from None
    counts = len(text) < _SHORT_TEXT or not _is_flat(item)
    if counts and text.count(b"[") + text.count(b"{") > MAX_DEPTH:  # fewer cannot be that deep
        _check_values(item)
    return payload


def _is_flat(item: dict[str, Any]) -> bool:
    """Whether its messages and `extra_info` have plain fields only, and no other field has parts."""
    for name, value in item.items():
        kind = type(value)
        if kind is dict:
            if not _NESTED.isdisjoint(map(type, value.values())):
                return False
        elif kind is list and name not in _TOKENS:
            if name != "messages":
                return False
            for message in value:
                if not _NESTED.isdisjoint(map(type, message.values())):
                    return False
    return True


def _instance_id(item: dict[str, Any]) -> InstanceId:
    if "instance_id" not in item:
        raise ItemError("is missing", "instance_id")
    value = item["instance_id"]
    if type(value) is str:
        if value:
            return _short(value, "instance_id")
        raise ItemError("is an empty text", "instance_id")
    if type(value) is int:
        if -_INT64 <= value < _INT64:
            return value
        raise ItemError("does not fit into 64 bits", "instance_id")
    raise ItemError(f"must be a whole number within 64 bits or a text, is {_kind(value)}", "instance_id")


def _reward(item: dict[str, Any]) -> float | None:
    if "reward" not in item:
        raise ItemError("is missing; null says that the item is not scored", "reward")
    value = item["reward"]
    if value is None:
        return None
    if type(value) is not float and type(value) is not int:
        raise ItemError(f"must be a number or null, is {_kind(value)}", "reward")
    if type(value) is float and not math.isfinite(value):
        raise ItemError(f"must be a finite number or null, is {value}", "reward")
    return float(value)


def _check_messages(item: dict[str, Any]) -> None:
    if "messages" not in item:
        raise ItemError("is missing", "messages")
    messages = item["messages"]
    if type(messages) is not list:
        raise ItemError(f"must be a list of messages, is {_kind(messages)}", "messages")
    if not messages:
        raise ItemError("is empty; an item has at least one message", "messages")
    for index, message in enumerate(messages):
        if type(message) is not dict:
            raise ItemError(f"must be an object, is {_kind(message)}", f"messages[{index}]")
        role = message.get("role")
        if type(role) is not str or not role:
            fault = f"must be a text, is {_kind(role)}" if "role" in message else "is missing"
            raise ItemError(fault, f"messages[{index}].role")


def _text(item: dict[str, Any], name: str) -> str | None:
    """A text of the item, None where it has none."""
    value = item.get(name)
    if value is None:
        return None
    if type(value) is not str:
        raise ItemError(f"must be text, is {_kind(value)}", name)
    if not value:
        raise ItemError("is an empty text", name)
    return _short(value, name)


def _short(value: str, name: str) -> str:
    if len(value) > MAX_TEXT_ID:
        raise ItemError(f"has {len(value)} characters; at most {MAX_TEXT_ID}", name)
    return value


def _check_tokens(item: dict[str, Any], encoding: Encoding) -> None:
    """Checks the token fields against their types and each other; makes them binary for msgpack."""
    lengths: dict[str, int] = {}
    for name, (_, dtype) in _TOKENS.items():
        value = item.get(name)
        if value is None:
            continue
        packed = _packed(name, value)
        numbers = numpy.frombuffer(packed, dtype)
        lengths[name] = len(numbers)
        if name == "response_logprobs":
            if not numpy.isfinite(numbers).all():
                raise ItemError("holds a number that is not finite, or too large for float32", name)
        elif name == "response_mask":
            if packed.strip(b"\x00\x01"):
                raise ItemError("holds a number that is neither 0 nor 1", name)
        elif len(numbers) and numpy.minimum.reduce(numbers) < 0:
            raise ItemError("holds a negative id", name)
        if encoding == "msgpack":
            item[name] = packed
    if ("prompt_ids" in lengths) != ("response_ids" in lengths):
        missing = "response_ids" if "prompt_ids" in lengths else "prompt_ids"
        raise ItemError("is missing; prompt_ids and response_ids come together", missing)
    for name in ("response_mask", "response_logprobs"):
        if name in lengths and lengths[name] != lengths.get("response_ids"):
            told = lengths.get("response_ids", "no")
            raise ItemError(f"has {lengths[name]} numbers for {told} response_ids", name)


def _packed(name: str, value: Any) -> bytes:
    """Tokens as they are stored in msgpack, from numbers in a row or what is binary already."""
    code, dtype = _TOKENS[name]
    if isinstance(value, bytes):
        if len(value) % dtype.itemsize:
            raise ItemError(f"has {len(value)} bytes, no multiple of {dtype.itemsize}", name)
        return value
    if not isinstance(value, list | array | numpy.ndarray):
        raise ItemError(f"must be a list of numbers, is {_kind(value)}", name)
    if isinstance(value, list) and not _NUMBERS[code].issuperset(map(type, value)):
        odd = next(index for index, number in enumerate(value) if type(number) not in _NUMBERS[code])
        wanted = "a number" if code == "f" else "a whole number"
        raise ItemError(f"must be {wanted}, is {_kind(value[odd])}", f"{name}[{odd}]")
    try:
        numbers = array(code, value)
    except (TypeError, OverflowError) as error:
        raise ItemError(f"must be a list of numbers ({dtype.name}): {error}", name) from None
    if _SWAP:
        numbers.byteswap()
    return numbers.tobytes()


def _check_values(item: dict[str, Any]) -> None:
    """Refuses what JSON has no form for, and nesting that is too deep. Token fields were checked before."""
    waiting: list[tuple[Any, str, int]] = [(item, "", 1)]
    while waiting:
        value, where, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ItemError(f"is nested deeper than {MAX_DEPTH} levels", where[:100])
        children: list[tuple[Any, Any]]
        children = list(value.items()) if type(value) is dict else list(enumerate(value))
        for key, child in children:
            kind = type(child)
            if type(value) is dict and type(key) is not str:
                raise ItemError(f"has a key that is not text: {str(key)[:50]!r}", where)
            if kind in _SCALARS:
                if kind is float and not math.isfinite(child):
                    raise ItemError(f"is {child}, not a finite number", _place(where, key))
                if kind is int and not -_INT64 <= child < 2 * _INT64:
                    raise ItemError("does not fit into 64 bits", _place(where, key))
            elif kind is dict or kind is list:
                waiting.append((child, _place(where, key), depth + 1))
            elif not (depth == 1 and key in _TOKENS):
                raise ItemError(f"is {_kind(child)}, which JSON has no form for", _place(where, key))


def _place(where: str, key: Any) -> str:
    if type(key) is int:
        return f"{where}[{key}]"
    key = key if len(key) <= 50 else key[:50] + "…"
    return f"{where}.{key}" if where else str(key)


def _listed(value: Any) -> Any:
    if isinstance(value, array | numpy.ndarray | numpy.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in an item")


def _kind(value: Any) -> str:
    """A value's type in the words of JSON, with the value where it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value:.20g}" if isinstance(value, float) else f"the number {str(value)[:30]}"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 40 else f"a text of {len(value)} characters"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return f"of type {type(value).__name__}"
