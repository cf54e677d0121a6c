"""The short way of `/buffer/write`: see `protocol`. It answers what `SlimeRoutes.write` answers."""

import asyncio
import base64
import hmac
import time
from collections.abc import Sequence

import orjson

from rollstream.buffer.exchange import RefusalError, stalled_body
from rollstream.buffer.items import Item, parse_item
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.metrics import RequestMetrics
from rollstream.buffer.refusals import refusal_of, refused_body
from rollstream.buffer.slime_routes import WRITTEN
from rollstream.errors import RollstreamError

_PATH = "/buffer/write"

_SMALL = 2**18
"""Bytes of a body that goes the short way: with larger ones, what it saves is nothing."""

_BEFORE, _AFTER = WRITTEN
_AROUND = len(_BEFORE) + len(_AFTER)
_STORED = (_PATH, 200)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
_REFUSED = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"


class HotWrite:
    """One small item.

    Args:
        ledger: takes it.
        metrics: counted here.
        token: what a client has to show; None asks for none.
        max_body: bytes.
    """

    path = _PATH.encode()

    def __init__(self, ledger: Ledger, metrics: RequestMetrics, token: str | None, max_body: int) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self.largest = min(_SMALL, max_body)
        self._credentials: tuple[bytes, ...] | None = None
        if token is not None:
            basic = base64.b64encode(b"rollstream:" + token.encode())
            self._credentials = (b"Bearer " + token.encode(), b"Basic " + basic)

    def lets_in(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """See `protocol.HotRoute`. Other ways to show the token are the application's to judge."""
        if self._credentials is None:
            return True
        for name, value in headers:
            if name == b"authorization":
                return any(hmac.compare_digest(value, one) for one in self._credentials)
        return False

    def begin(self, body: bytes) -> "tuple[asyncio.Future[list[bool]], tuple[Item, int]] | None":
        """See `protocol.HotRoute`."""
        try:
            item = parse_item(body)
            return self._ledger.submit((item,)), (item, len(body))
        except RollstreamError:
            return None

    def answer(
        self, done: "asyncio.Future[list[bool]]", begun: tuple[Item, int], started: float
    ) -> tuple[bytes, ...]:
        """See `protocol.HotRoute`."""
        metrics = self._metrics
        item, size = begun
        error = done.exception()
        if error is None:
            if not all(stored := done.result()):
                metrics.known.count((item,), stored, self._ledger.active_rollout)
            metrics.answered[_STORED] += 1
            metrics.bytes_in += size
            metrics.writes.add(time.perf_counter() - started)
            payload = item.payload
            return _HEAD % (_AROUND + len(payload)), _BEFORE, payload, _AFTER
        if not isinstance(error, RollstreamError):
            error = RollstreamError(f"internal error ({type(error).__name__})")
        return self._refused(refusal_of(error))

    def too_slow(self) -> tuple[bytes, ...]:
        """See `protocol.HotRoute`."""
        return self._refused(stalled_body())

    def _refused(self, refusal: RefusalError) -> tuple[bytes, ...]:
        self._metrics.answered[_PATH, refusal.status] += 1
        body = orjson.dumps(refused_body(refusal, _PATH))
        return _REFUSED % (refusal.status, len(body)), body
