"""What the sync and the async client share: addresses, batches, records, when to try again. Pure."""

import logging
import random
import time
import uuid
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec
import orjson

from rollstream.buffer.items import InstanceId, dump_item, load_item
from rollstream.errors import RollstreamError, TransientError

_LOG = logging.getLogger(__name__)

Encoding = Literal["json", "msgpack"]

BATCH_ITEMS = 1000
"""Items of one request at most: beyond it the cost of a request is below a percent."""

BATCH_BYTES = 8 * 2**20
"""Bytes of one request at most, but for an item that is larger alone: far below what servers take."""

_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504, 507))
"""Statuses that pass: no room, a full disk that is freed, a server or a proxy that is coming back."""

MEDIA_TYPES: dict[Encoding, str] = {"json": "application/json", "msgpack": "application/msgpack"}
STREAM_TYPES: dict[Encoding, str] = {"json": "application/x-ndjson", "msgpack": "application/msgpack"}

_BIN32 = 0xC6

_SAID_AGAIN_S = 30.0
"""Between two warnings of one client: a hundred writers that wait for one buffer say it once."""


class BufferClientError(RollstreamError):
    """The buffer refused a request; trying again would not help.

    Attributes:
        status: of HTTP.
        code: the server's word for it.
        where: the field of an item, if one is wrong.
    """

    def __init__(self, message: str, *, status: int, code: str = "", where: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.where = where


class BufferUnavailableError(TransientError):
    """The buffer could not be reached, or had no room, for as long as the client was told to try."""


class AnswerLostError(BufferUnavailableError):
    """The connection broke in the middle of an answer."""


class LeaseUseError(RollstreamError):
    """A lease is used in a way that would lose groups: acked with some unread, or iterated over twice."""


UNREAD = (
    "groups of this lease were not read, and an ack would take them out of the buffer: iterate over all of "
    "them first, give the lease back (nack), or insist: ack(unread=True)"
)
BROKEN = "the connection broke during a read: what came of it must not count, give its groups back (nack)"
TWICE = "this lease was iterated over before, and its groups come once: keep them, list(lease), or read again"


@dataclass(frozen=True, slots=True)
class Backoff:
    """When to try again: exponential, with jitter over the upper half: many clients do not come at once."""

    first: float = 0.1
    longest: float = 5.0
    give_up_after: float | None = 300.0
    """Seconds since the first failure; None: never."""

    def pause(self, failures: int, waited: float, asked: float | None, rng: random.Random) -> float | None:
        """Seconds before the next try; None: there is none.

        Args:
            failures: in a row, from 1 on.
            waited: seconds since the first failure.
            asked: what the server's Retry-After says.
            rng: for the jitter.
        """
        if self.give_up_after is not None and waited >= self.give_up_after:
            return None
        longest = min(self.longest, self.first * 2.0 ** min(failures - 1, 30))
        return max(longest * rng.uniform(0.5, 1.0), min(asked or 0.0, self.longest))


class RetryNotice:
    """Says in the log that a client does not get through: a wrong URL must not look like a slow buffer."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._said_at = float("-inf")

    def tell(self, what: str, said: str, *, failures: int, waited: float) -> None:
        """To be called before each pause.

        Args:
            what: method and URL, without a token.
            said: why it failed.
            failures: in a row, from 1 on; only the first is told.
            waited: seconds since the first failure.
        """
        now = time.monotonic()
        if failures > 1 or now - self._said_at < _SAID_AGAIN_S:
            return
        self._said_at = now
        if (patience := self._backoff.give_up_after) is None:
            until = "until it works"
        else:
            end = time.time() + patience - waited
            until = f"until {time.strftime('%H:%M:%S', time.localtime(end))}"
        _LOG.warning("%s: %s; trying again %s", what, said, until)


class Tries:
    """Of one request: how often it failed, since when, and when it goes out again."""

    def __init__(self, what: str, backoff: Backoff, notice: RetryNotice, rng: random.Random) -> None:
        """`what` is its method and URL, without a token; the rest is the client's."""
        self._what = what
        self._backoff = backoff
        self._notice = notice
        self._rng = rng
        self._failures = 0
        self._since = 0.0
        """When it failed first: a request may wait for long before it does."""

    def failed(self, said: str, cause: Exception | None = None, asked: float | None = None) -> float:
        """Seconds before the next try.

        Args:
            said: why it failed.
            cause: the error, if there is one.
            asked: what the server's Retry-After says.

        Raises:
            BufferUnavailableError: there is no next try.
        """
        now = time.monotonic()
        if not self._failures:
            self._since = now
        self._failures += 1
        waited = now - self._since
        pause = self._backoff.pause(self._failures, waited, asked, self._rng)
        if pause is None:
            raise BufferUnavailableError(f"{self._what}: {said}") from cause
        self._notice.tell(self._what, said, failures=self._failures, waited=waited)
        return pause


@dataclass(frozen=True, slots=True)
class Address:
    """Where a buffer is, and what lets one in."""

    host: str
    port: int
    tls: bool
    prefix: str
    headers: dict[str, str]

    @classmethod
    def parse(cls, url: str, token: str | None) -> "Address":
        """Reads a URL; the password of its user part is the token, if none is given."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a buffer: want http://HOST:PORT")
        if token is None and parts.password:
            token = unquote(parts.password)
        headers = {}
        if token is not None:
            headers["authorization"] = "Basic " + b64encode(b"rollstream:" + token.encode()).decode()
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"), headers)

    @property
    def url(self) -> str:
        """Without the token."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the items of a write."""

    stored: int
    known: int
    """Written before, by this client's lost try or another one; not stored again."""
    results: list[bool] = field(default_factory=list)
    """In the order of the items: whether it was stored now."""


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """One group, finished: filtered, normalised, padded."""

    number: int
    task_type: str
    instance_id: InstanceId
    timed_out: bool
    policy_version: int | None
    """The oldest of its items."""
    items: list[dict[str, Any]]
    """As they were written, with `reward` normalised and `raw_reward`. Tokens: lists, or arrays."""


Items = Mapping[str, Any] | bytes | Sequence[Mapping[str, Any] | bytes]
"""What a client writes: items, or one; each a mapping or its JSON text."""


def as_items(items: Items) -> list[Mapping[str, Any] | bytes]:
    """One item or several as a list. Raises `TypeError` naming what is neither a mapping nor bytes."""
    several: Any = [items] if isinstance(items, Mapping | bytes) else items
    if isinstance(several, str) or not isinstance(several, Iterable):
        raise TypeError(f"want an item or a list of items, got {type(items).__name__}")
    listed: list[Any] = list(several)
    for index, item in enumerate(listed):
        if not isinstance(item, Mapping | bytes):
            raise TypeError(f"items[{index}]: want a mapping, or bytes of JSON, got {type(item).__name__}")
    return listed


def encoding_of(items: Sequence[Mapping[str, Any] | bytes], preferred: Encoding) -> Encoding:
    """How a write of these is encoded: JSON texts among them make all of it JSON."""
    return "json" if any(isinstance(item, bytes) for item in items) else preferred


def batches(items: Sequence[Mapping[str, Any] | bytes], encoding: Encoding) -> Iterator[tuple[int, bytes]]:
    """Bodies of `POST /v1/items` and how many items each has. Items without `uid` get one here, so that a
    retried write stores them once.

    Args:
        items: mappings, or JSON texts of items that have a uid (then `encoding` has to be "json").
        encoding: of the bodies.
    """
    waiting: list[bytes] = []
    size = 0
    for item in items:
        packed = _item_bytes(item, encoding)
        if waiting and (len(waiting) >= BATCH_ITEMS or size + len(packed) > BATCH_BYTES):
            yield len(waiting), _joined(waiting, encoding)
            waiting, size = [], 0
        waiting.append(packed)
        size += len(packed)
    if waiting:
        yield len(waiting), _joined(waiting, encoding)


def _item_bytes(item: Mapping[str, Any] | bytes, encoding: Encoding) -> bytes:
    if isinstance(item, bytes):
        return item
    if item.get("uid") is None:
        item = {**item, "uid": uuid.uuid4().hex}
    return dump_item(item, encoding)


def _joined(items: list[bytes], encoding: Encoding) -> bytes:
    if encoding == "json":
        return b'{"items":[' + b",".join(items) + b"]}"
    return msgspec.msgpack.encode({"items": [msgspec.Raw(item) for item in items]})


def read_written(body: bytes) -> Written:
    """The answer to a write."""
    answer = orjson.loads(body)
    return Written(answer["stored"], answer["known"], [one == "stored" for one in answer["results"]])


def read_body(asked: Mapping[str, Any]) -> bytes:
    """The body of `POST /v1/read`: what is asked for, without what is None.

    It names the read: sent again, because its answer was lost, it first gives back what the lost one has on
    lease. So nothing waits for a lease's end that nobody knows of.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    return orjson.dumps({**given, "read_id": uuid.uuid4().hex})


class RecordReader:
    """Cuts the stream of a read into its records."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Adds what came; gives back the records that are complete."""
        self._pending += data
        records: list[dict[str, Any]] = []
        at = 0
        if self._encoding == "json":
            while (end := self._pending.find(b"\n", at)) >= 0:
                records.append(_parsed(bytes(memoryview(self._pending)[at:end])))
                at = end + 1
        else:
            while len(self._pending) - at >= 5:
                if self._pending[at] != _BIN32:
                    raise BufferClientError("the answer to a read is not what a buffer sends", status=200)
                end = at + 5 + int.from_bytes(self._pending[at + 1 : at + 5], "big")
                if len(self._pending) < end:
                    break
                records.append(_unpacked(bytes(self._pending[at + 5 : end])))
                at = end
        del self._pending[:at]
        return records


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BufferClientError("the answer to a read is not what a buffer sends", status=200) from error
    return record


class _PackedGroup(msgspec.Struct):
    group: int
    task_type: str
    instance_id: int | str
    timed_out: bool
    policy_version: int | None
    items: list[msgspec.Raw]


_group_decoder = msgspec.msgpack.Decoder(_PackedGroup)


def _unpacked(document: bytes) -> dict[str, Any]:
    if b"\xa5group" in document[:8]:
        packed = _group_decoder.decode(document)
        record: dict[str, Any] = {name: getattr(packed, name) for name in packed.__struct_fields__}
        record["items"] = [load_item(bytes(raw), "msgpack") for raw in packed.items]
        return record
    decoded: dict[str, Any] = msgspec.msgpack.decode(document)
    return decoded


def read_group(record: Mapping[str, Any]) -> ReadGroup:
    """A group from its record."""
    return ReadGroup(
        record["group"],
        record["task_type"],
        record["instance_id"],
        record["timed_out"],
        record["policy_version"],
        record["items"],
    )


def refusal(status: int, body: bytes) -> BufferClientError | None:
    """The error of an answer; None for one that trying again may better, or that is none."""
    if status < 400 or status in _RETRIED:
        return None
    try:
        error = orjson.loads(body)["error"]
        return BufferClientError(
            str(error["message"]), status=status, code=str(error["code"]), where=str(error.get("where", ""))
        )
    except (ValueError, KeyError, TypeError):
        return BufferClientError(f"HTTP {status}: {body[:200]!r}", status=status)


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header."""
    return float(value) if value is not None and value.isascii() and value.isdecimal() else None
