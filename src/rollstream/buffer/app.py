"""The buffer's server: routes, metrics and errors over a service."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

import rollstream
from rollstream import plugins
from rollstream.buffer.groups import HookError
from rollstream.buffer.items import ItemError
from rollstream.buffer.routes_native import NativeRoutes
from rollstream.buffer.service import BufferOptions, Service, closing_error
from rollstream.errors import (
    BufferFullError,
    ConfigError,
    ConflictError,
    DamageError,
    DataError,
    NotFoundError,
    StorageError,
    StorageFullError,
)
from rollstream.web import Access, HTTPError, Request, Route, ServerLimits, WebServer, openapi

_BODIES: Final = 128 * 2**20
"""Bytes of all bodies in flight: two of the largest. With their copies on the way the process stays small."""

_PREFIX: Final = "rollstream_buffer_"

_REFUSALS: Final[tuple[tuple[type[Exception], int, str, str], ...]] = (
    (ItemError, 400, "bad_item", ""),
    (ConfigError, 400, "bad_request", ""),
    (DamageError, 503, "damaged", ""),
    (HookError, 503, "hooks_fail", ""),
    (DataError, 400, "bad_item", ""),
    (NotFoundError, 404, "not_found", ""),
    (ConflictError, 409, "conflict", ""),
    (BufferFullError, 429, "full", "1"),
    (StorageFullError, 507, "disk_full", "5"),
    (StorageError, 503, "storage", "1"),
)
"""Status, code and retry-after for errors; of an error that is of several kinds, the first one's."""


class BufferServer:
    """A buffer over HTTP."""

    def __init__(self, options: BufferOptions, access: Access, limits: ServerLimits | None = None) -> None:
        self.service = Service(options, access.token)
        self._registry = registry = CollectorRegistry()
        text = "Of a request, waiting included"
        seconds = Histogram(f"{_PREFIX}request_seconds", text, ["route"], registry=registry)
        text = "Requests answered"
        requests = Counter(f"{_PREFIX}http_requests", text, ["route", "status"], registry=registry)
        # Looking a label up takes ten times as long as counting.
        self._metrics_of = functools.cache(
            lambda path, status: (requests.labels(path, status), seconds.labels(path))
        )
        slime = plugins.load("rollstream.generators", "slime")
        self._routes = [
            *slime.SlimeRoutes(self.service).routes(),
            *NativeRoutes(self.service).routes(),
            Route("GET", "/health", self._health, open=True, summary="The process answers"),
            Route("GET", "/ready", self._ready, open=True, summary="Reads and writes are taken"),
            Route("GET", "/metrics", self._metrics, summary="For Prometheus"),
            Route("GET", "/openapi.json", self._openapi, summary="This description"),
        ]
        self._web = WebServer(
            self._routes,
            access=replace(access, whose=self.service.job_of_token),
            limits=limits or ServerLimits(bodies_in_flight=_BODIES),
            translate=_translate,
            render_error=slime.render_slime_error,
            on_answer=self._count,
        )
        self.url = ""

    async def start(self, host: str, port: int) -> str:
        """Opens the buffer and listens; returns the URL.

        Raises:
            ConfigError: An option or the address is wrong.
            RunDirectoryError: The folder cannot be used.
        """
        await self.service.open()
        try:
            self.url = await self._web.start(host, port)
            await self.service.begin(self.url)
        except BaseException:
            await self._web.stop(0.0)
            await self.service.close()
            raise
        return self.url

    async def stop(self, grace_s: float) -> None:
        """Ends in order: those who wait are answered, requests in flight get the grace period, then the rest."""
        self.service.end_waits()
        await self._web.stop(grace_s)
        await self.service.close()

    def _count(self, route: Route | None, status: int, seconds: float) -> None:
        answered, took = self._metrics_of(route.path if route is not None else "unknown", status)
        answered.inc()
        took.observe(seconds)

    async def _health(self, request: Request) -> Any:
        return {"status": "ok", "version": rollstream.__version__}

    async def _ready(self, request: Request) -> Any:
        if self.service.closing:
            raise closing_error()
        if (await self.service.store.stats()).disk_full:
            raise StorageFullError("the disk has no room for items; reads and acks go on")
        return {"status": "ready"}

    async def _openapi(self, request: Request) -> Any:
        return openapi(self._routes, "rollstream buffer", rollstream.__version__)

    async def _metrics(self, request: Request) -> web.Response:
        stats = await self.service.store.stats()
        figures = msgspec.structs.asdict(stats)
        rewards = SummaryMetricFamily(f"{_PREFIX}reward", "Rewards as they were written", labels=["items"])
        for which in ("written", "delivered"):
            rewards.add_metric([which], figures.pop(f"scored_{which}"), figures.pop(f"reward_{which}"))
        figures |= {
            "oldest_ready_seconds": figures.pop("oldest_ready_s"),
            "replaced_surrogates": request.replaced_surrogates_in_all,
            "held_writes": self.service.held_writes,
            "waiting_reads": self.service.reads.waiting,
        }
        families = [rewards, *(_family(name, value) for name, value in figures.items())]
        counts: Any = SimpleNamespace(collect=lambda: families)
        text = generate_latest(counts) + generate_latest(self._registry)
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})


def _family(name: str, value: float | dict[str, int]) -> Metric:
    """A figure of `Stats`, or of the server."""
    only_grows = name.endswith(("_written", "_delivered", "_dropped", "_surrogates"))
    label = [] if not isinstance(value, dict) else ["state" if name == "groups" else "reason"]
    kind = CounterMetricFamily if only_grows else GaugeMetricFamily
    family = kind(f"{_PREFIX}{name}", name.replace("_", " "), labels=label)
    for key, number in value.items() if isinstance(value, dict) else [("", value)]:
        family.add_metric([key] if label else [], number)
    return family


def _translate(error: Exception) -> HTTPError | None:
    where = error.where if isinstance(error, ItemError) else ""
    if isinstance(error, ConfigError):
        key, colon, _ = str(error).partition(":")
        where = key if colon and key.isidentifier() else ""
    for kind, status, code, seconds in _REFUSALS:
        if isinstance(error, kind):
            headers = {"retry-after": seconds} if seconds else {}
            return HTTPError(status, str(error), code, where, headers)
    return None
