"""Groups finished by the default hooks without reading what is in their items.

Of an item these hooks change its reward, and add `raw_reward` at top level and in `extra_info`. So only the
outermost level of a payload is taken apart, and `extra_info`; all else stays the bytes that are stored. What
comes out is what `groups.finish_group` makes of the parsed items, key by key, in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from rollstream.buffer.groups import GroupSettings, ItemDict, finish_rewards
from rollstream.buffer.items import Encoding, dump_item

_RawItem = dict[str, Any]
"""An item whose values are `msgspec.Raw`."""


class _Codec(NamedTuple):
    """How the parts of an encoding are read, and everything is written."""

    item: Callable[[Any], _RawItem]
    extra_info: Callable[[Any], _RawItem | None]
    reward: Callable[[Any], float | None]
    text: Callable[[Any], str]
    encode: Callable[[Any], bytes]


_CODECS: Final[dict[Encoding, _Codec]] = {
    "json": _Codec(
        msgspec.json.Decoder(dict[str, msgspec.Raw]).decode,
        msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode,
        msgspec.json.Decoder(int | float | None).decode,
        msgspec.json.Decoder(str).decode,
        msgspec.json.Encoder().encode,
    ),
    "msgpack": _Codec(
        msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode,
        msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | None).decode,
        msgspec.msgpack.Decoder(int | float | None).decode,
        msgspec.msgpack.Decoder(str).decode,
        msgspec.msgpack.Encoder().encode,
    ),
}


class RawGroup(NamedTuple):
    """A finished group."""

    items: int
    body: bytes
    """A list of them, in the encoding of the payloads."""
    left_out: list[str]
    """Uids of items that were left out."""


def finish_raw(payloads: Sequence[bytes], encoding: Encoding, settings: GroupSettings) -> RawGroup | None:
    """Filters, normalises and pads a valid group by the default hooks.

    Args:
        payloads: its items as `items.parse_item` made them, all of them in `encoding`.
        encoding: of the payloads, and of what comes out.
        settings: of the group.

    Returns:
        The group; None where too few items passed the filter.

    Raises:
        ValueError: A payload is none (msgspec's errors are such).
    """
    codec = _CODECS[encoding]
    items = [codec.item(payload) for payload in payloads]
    chosen = finish_rewards(
        [codec.reward(item["reward"]) for item in items],
        lambda: [codec.text(item["uid"]) for item in items],
        settings,
    )
    if not chosen:
        return None
    body = codec.encode([_scored(items[at], reward, codec) for at, reward in chosen])
    kept = {at for at, _ in chosen}
    left_out = (
        [codec.text(item["uid"]) for at, item in enumerate(items) if at not in kept]
        if len(kept) < len(items)
        else []
    )
    return RawGroup(len(chosen), body, left_out)


def _scored(item: _RawItem, reward: float | None, codec: _Codec) -> _RawItem:
    """As `groups.keep_raw_reward`."""
    raw = item["reward"]
    extra = (codec.extra_info(item["extra_info"]) if "extra_info" in item else None) or {}
    extra["raw_reward"] = raw
    return {**item, "reward": reward, "raw_reward": raw, "extra_info": extra}


def dump_items(items: Sequence[ItemDict], encoding: Encoding) -> bytes:
    """Finished items as a list, as `finish_raw` gives it. Raises `items.ItemError`."""
    dumped = [dump_item(item, encoding) for item in items]
    if encoding == "json":
        return b"[" + b",".join(dumped) + b"]"
    return msgspec.msgpack.encode([msgspec.Raw(one) for one in dumped])
