"""The buffer's server: routes, metrics and errors over a service."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

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
    """A buffer over HTTP.

    Args:
        options: Of the buffer.
        access: Who may send requests.
        limits: What clients can make the server hold.
    """

    def __init__(self, options: BufferOptions, access: Access, limits: ServerLimits | None = None) -> None:
        self.service = Service(options, access.token)
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            f"{_PREFIX}request_seconds", "Of a request, waiting included", ["route"], registry=self._registry
        )
        self._requests = Counter(
            f"{_PREFIX}http_requests", "Requests answered", ["route", "status"], registry=self._registry
        )
        # Looking a label up takes ten times as long as counting.
        self._metrics_of = functools.cache(
            lambda path, status: (self._requests.labels(path, status), self._seconds.labels(path))
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
        await self.service.store.check_writable()
        return {"status": "ready"}

    async def _openapi(self, request: Request) -> Any:
        return openapi(self._routes, "rollstream buffer", rollstream.__version__)

    async def _metrics(self, request: Request) -> web.Response:
        stats = await self.service.store.stats()
        figures: tuple[tuple[str, str, float | dict[str, int], str], ...] = (
            ("items_written_total", "Items stored so far", stats.items_written, ""),
            ("items_delivered_total", "Items of acked groups", stats.items_delivered, ""),
            ("groups_delivered_total", "Groups acked", stats.groups_delivered, ""),
            ("items_dropped_total", "Items that left undelivered", stats.items_dropped, "reason"),
            ("groups_dropped_total", "Groups that left undelivered", stats.groups_dropped, "reason"),
            ("items", "Items that have not left", stats.items, ""),
            ("groups", "Groups that have not left", stats.groups, "state"),
            ("leases", "Leases that are out", stats.leases, ""),
            ("oldest_ready_seconds", "Age of the next ready group", stats.oldest_ready_s, ""),
            ("disk_bytes", "Of the database", stats.disk_bytes, ""),
            ("disk_full", "1 while items are refused for want of room", int(stats.disk_full), ""),
            ("archive_bytes", "Of items that have left", stats.archive_bytes, ""),
            (
                "replaced_surrogates_total",
                "Halves of surrogate pairs in requests that became U+FFFD",
                request.replaced_surrogates_in_all,
                "",
            ),
            ("held_writes", "Writes that wait for room", self.service.held_writes, ""),
            ("waiting_reads", "Reads that wait for groups", self.service.reads.waiting, ""),
        )
        counts = CollectorRegistry()
        rewards = SummaryMetricFamily(f"{_PREFIX}reward", "Rewards as they were written", labels=["items"])
        rewards.add_metric(["written"], stats.scored_written, stats.reward_written)
        rewards.add_metric(["delivered"], stats.scored_delivered, stats.reward_delivered)
        counts.register(_Families([rewards, *(_family(*figure) for figure in figures)]))
        text = generate_latest(counts) + generate_latest(self._registry)
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})


class _Families:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _family(name: str, text: str, value: float | dict[str, int], label: str) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"{_PREFIX}{name.removesuffix('_total')}", text, labels=[label] if label else [])
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
