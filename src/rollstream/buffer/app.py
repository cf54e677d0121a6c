"""The application: who may come in, which route answers, what a failure looks like, what is counted."""

import asyncio
import base64
import binascii
import hmac
import logging

import orjson

from rollstream.buffer.exchange import Exchange, GoneError, Receive, RefusalError, Scope, Send
from rollstream.buffer.metrics import RequestMetrics
from rollstream.buffer.protocol import HotRoute
from rollstream.buffer.refusals import refusal_of, refused_body
from rollstream.buffer.routing import Handler, Router
from rollstream.errors import RollstreamError

_LOG = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""Bytes. A batch of 1,000 items of 16,000 tokens with log-probs is 40 MB; more is better sent in parts."""

_OPEN = frozenset(("/health", "/ready"))
"""For load balancers, which have no token."""

_ASKED_FOR_EVER = "/start_rollout"
_ERROR_PAUSE_S = 1.0
"""Before that route is refused, whatever for: the stock client asks again at once, for ever."""


class BufferApp:
    """ASGI. Answers requests; what the other rooms raise becomes a status and a reason.

    Args:
        router: the routes.
        hot_path: the one route whose cost counts; looked up before anything else.
        hot_route: the short way of it, see `protocol`.
        token: what clients have to show, as a bearer token or as the password of HTTP Basic (any user), so
            that it can be part of a URL; None asks for none.
        metrics: counted here.
        max_body: bytes of a request's body.
        open_metrics: `/metrics` needs no token.
    """

    def __init__(
        self,
        router: Router,
        hot_path: tuple[str, Handler],
        *,
        metrics: RequestMetrics,
        token: str | None = None,
        max_body: int = MAX_BODY,
        hot_route: HotRoute | None = None,
        open_metrics: bool = False,
    ) -> None:
        self._router = router
        self._hot_path, self._hot = hot_path
        self._token = None if token is None else token.encode()
        self._open = _OPEN | {"/metrics"} if open_metrics else _OPEN
        self._metrics = metrics
        self.hot_route = hot_route
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            raise RuntimeError(f"the buffer speaks HTTP only, not {scope['type']}")
        exchange = Exchange(scope, receive, send, body_limit=self._max_body)
        label = "unknown"  # of paths that nobody knows: clients could make any number of them
        try:
            if self._token is not None and exchange.path not in self._open:
                self._check_token(exchange)
            if exchange.path == self._hot_path and exchange.method == "POST":
                label = self._hot_path
                await self._hot(exchange)
            else:
                route, handler = self._router.find(exchange)
                label = route.path
                await handler(exchange)
        except GoneError:
            exchange.status = exchange.status or 499  # as nginx counts it
        except RollstreamError as error:
            await self._refuse(exchange, error)
        except Exception as error:
            _LOG.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.started:
                raise  # uvicorn ends the connection: the client must not take a part for the whole
            await self._answer(
                exchange,
                RefusalError(
                    f"internal error ({type(error).__name__}), see the server's log",
                    status=500,
                    code="internal",
                ),
            )
        finally:
            self._metrics.answered[label, exchange.status] += 1

    async def _refuse(self, exchange: Exchange, error: RollstreamError) -> None:
        refusal = refusal_of(error)
        if refusal.status >= 500 and refusal.status != 503:
            _LOG.warning("%s %s: %s", exchange.method, exchange.path, error)
        if exchange.started:
            raise error
        await self._answer(exchange, refusal)

    async def _answer(self, exchange: Exchange, refusal: RefusalError) -> None:
        body = refused_body(refusal, exchange.path)
        if exchange.path == _ASKED_FOR_EVER:
            await asyncio.sleep(_ERROR_PAUSE_S)
        try:
            await exchange.refuse(orjson.dumps(body, _as_text), refusal.status, refusal.headers)
        except GoneError:
            exchange.status = 499

    def _check_token(self, exchange: Exchange) -> None:
        assert self._token is not None
        given = (exchange.header(b"authorization") or "").strip()
        scheme, _, credentials = given.partition(" ")
        shown = b""
        if scheme.lower() == "bearer":
            shown = credentials.strip().encode("latin-1")
        elif scheme.lower() == "basic":
            try:
                shown = base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                shown = b""
        if not hmac.compare_digest(shown, self._token):
            raise RefusalError(
                "the token is missing or wrong",
                status=401,
                code="unauthorized",
                headers={"www-authenticate": "Bearer"},
            )


def _as_text(value: object) -> str:
    return str(value)
