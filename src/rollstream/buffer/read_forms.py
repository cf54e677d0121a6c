"""How the answer to a read is written: a head, the groups as they are finished, an end."""

from typing import Any

import msgspec
import orjson

from rollstream.buffer.bodies import MSGPACK_TYPES
from rollstream.buffer.exchange import JSON, MSGPACK, NDJSON, Exchange
from rollstream.buffer.items import Encoding
from rollstream.buffer.ledger import GroupView


class Rows:
    """The items of all groups, one after the other: what slime's answers have between their head and end."""

    encoding: Encoding = "json"
    """What groups hand in their items in."""

    def group(self, view: GroupView, items: bytes) -> bytes:
        """One group; `items` is a list of them."""
        return items[1:-1]

    def joined(self, groups: list[bytes], *, first: bool) -> bytes:
        """Groups that follow each other; `first`: none was before them."""
        return b",".join(groups if first else [b"", *groups])


class Form(Rows):
    """How a native read is written: one JSON document."""

    media_type = JSON

    def head(self, head: dict[str, Any]) -> bytes:
        """What stands in front."""
        return b'{"head":' + orjson.dumps(head) + b',"groups":['

    def group(self, view: GroupView, items: bytes) -> bytes:
        return b"".join((orjson.dumps(_described(view))[:-1], b',"items":', items, b"}"))

    def end(self, end: dict[str, Any]) -> bytes:
        """What stands behind."""
        return b'],"end":' + orjson.dumps(end) + b"}"


class Lines(Form):
    """How a native read is written: a JSON document a line, the head first, then the groups, then the end."""

    media_type = NDJSON

    def head(self, head: dict[str, Any]) -> bytes:
        return orjson.dumps({"head": head}) + b"\n"

    def joined(self, groups: list[bytes], *, first: bool) -> bytes:
        return b"\n".join([*groups, b""])

    def end(self, end: dict[str, Any]) -> bytes:
        return orjson.dumps({"end": end}) + b"\n"


class Packed(Form):
    """How a native read is written: msgpack, as `Lines`, tokens are binary.

    The stream is a sequence of `bin 32` values, each of which holds one document: its length stands in front,
    so that a reader need not parse what has not come yet.
    """

    encoding = "msgpack"
    media_type = MSGPACK

    def head(self, head: dict[str, Any]) -> bytes:
        return _bin32(msgspec.msgpack.encode({"head": head}))

    def group(self, view: GroupView, items: bytes) -> bytes:
        return _bin32(msgspec.msgpack.encode({**_described(view), "items": msgspec.Raw(items)}))

    def joined(self, groups: list[bytes], *, first: bool) -> bytes:
        return b"".join(groups)

    def end(self, end: dict[str, Any]) -> bytes:
        return _bin32(msgspec.msgpack.encode({"end": end}))


def _bin32(document: bytes) -> bytes:
    return b"\xc6" + len(document).to_bytes(4, "big") + document


def form_for(exchange: Exchange) -> Form:
    """As its Accept header asks for."""
    accepted = (exchange.header(b"accept") or "").lower()
    if any(kind in accepted for kind in MSGPACK_TYPES):
        return Packed()
    return Lines() if "ndjson" in accepted else Form()


def _described(view: GroupView) -> dict[str, Any]:
    return {
        "group": view.number,
        "task_type": view.task_type,
        "instance_id": view.instance_id,
        "timed_out": view.timed_out,
        "policy_version": view.policy_version,
    }
