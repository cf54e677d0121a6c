"""The buffer's server: routes, metrics and errors over a service."""

from dataclasses import replace
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

import rollstream
from rollstream.buffer.hooks import HookError
from rollstream.buffer.items import ItemError
from rollstream.buffer.routes_native import NativeRoutes
from rollstream.buffer.routes_slime import SlimeRoutes, render_slime_error
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
from rollstream.web import Access, HTTPError, Limits, Request, Route, WebServer, json_response, openapi

_BODIES: Final = 128 * 2**20
"""Bytes of all bodies in flight: two of the largest. With their copies on the way the process stays small."""

_PREFIX: Final = "rollstream_buffer_"


class BufferServer:
    """A buffer over HTTP.

    Args:
        options: Of the buffer.
        access: Who may send requests.
        limits: What clients can make the server hold.
    """

    def __init__(self, options: BufferOptions, access: Access, limits: Limits | None = None) -> None:
        self.service = Service(options, access.token)
        self._requests: dict[tuple[str, int], int] = {}
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            f"{_PREFIX}request_seconds", "Of a request, waiting included", ["route"], registry=self._registry
        )
        self._of_route: dict[str, Any] = {}
        native, slime = NativeRoutes(self.service).routes(), SlimeRoutes(self.service).routes()
        own = [
            Route("GET", "/health", self._health, open=True, summary="The process answers"),
            Route("GET", "/ready", self._ready, open=True, summary="Reads and writes are taken"),
            Route("GET", "/metrics", self._metrics, summary="For Prometheus"),
            Route("GET", "/openapi.json", self._openapi, summary="This description"),
        ]
        self._routes = [*slime, *native, *own]
        self._web = WebServer(
            self._routes,
            access=replace(access, whose=self.service.job_of_token),
            limits=limits or Limits(bodies_in_flight=_BODIES),
            translate=_translate,
            render_error=render_slime_error,
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
        path = route.path if route is not None else "unknown"
        key = path, status
        self._requests[key] = self._requests.get(key, 0) + 1
        child = self._of_route.get(path)
        if child is None:
            child = self._of_route[path] = self._seconds.labels(path)
        child.observe(seconds)

    async def _health(self, request: Request) -> web.Response:
        return json_response({"status": "ok", "version": rollstream.__version__})

    async def _ready(self, request: Request) -> web.Response:
        if self.service.closing:
            raise closing_error()
        await self.service.store.check_writable()
        return json_response({"status": "ready"})

    async def _openapi(self, request: Request) -> web.Response:
        return json_response(openapi(self._routes, "rollstream buffer", rollstream.__version__))

    async def _metrics(self, request: Request) -> web.Response:
        stats = await self.service.store.stats()
        families = [
            _family("items_written_total", "Items stored so far", stats.items_written),
            _family("items_delivered_total", "Items of acked groups", stats.items_delivered),
            _family("groups_delivered_total", "Groups acked", stats.groups_delivered),
            _family("items_dropped_total", "Items that left undelivered", stats.items_dropped, "reason"),
            _family("groups_dropped_total", "Groups that left undelivered", stats.groups_dropped, "reason"),
            _family("items", "Items that have not left", stats.items),
            _family("groups", "Groups that have not left", stats.groups, "state"),
            _family("leases", "Leases that are out", stats.leases),
            _family("oldest_ready_seconds", "Age of the group that is first in line", stats.oldest_ready_s),
            _family("disk_bytes", "Of the database", stats.disk_bytes),
            _family("archive_bytes", "Of items that have left", stats.archive_bytes),
            _family("held_writes", "Writes that wait for room", self.service.held_writes),
            _family("waiting_reads", "Reads that wait for groups", self.service.reads.waiting),
        ]
        requests = CounterMetricFamily(
            f"{_PREFIX}http_requests", "Requests answered", labels=["route", "status"]
        )
        for (route, status), count in self._requests.items():
            requests.add_metric([route, str(status)], count)
        registry = CollectorRegistry()
        registry.register(_Families([*families, requests]))
        text = generate_latest(self._registry) + generate_latest(registry)
        return web.Response(body=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


class _Families:
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _family(name: str, text: str, value: float | dict[str, int], label: str = "") -> Any:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"{_PREFIX}{name.removesuffix('_total')}", text, labels=[label] if label else [])
    for key, number in value.items() if isinstance(value, dict) else [("", value)]:
        family.add_metric([key] if label else [], number)
    return family


def _translate(error: Exception) -> HTTPError | None:
    if isinstance(error, ItemError):
        return HTTPError(400, str(error), "bad_item", error.where)
    if isinstance(error, ConfigError):
        return HTTPError(400, str(error), "bad_request", str(error).partition(":")[0])
    if isinstance(error, DamageError | HookError):
        return HTTPError(503, str(error), "damaged" if isinstance(error, DamageError) else "hooks_fail")
    if isinstance(error, DataError):
        return HTTPError(400, str(error), "bad_item")
    if isinstance(error, NotFoundError):
        return HTTPError(404, str(error), "not_found")
    if isinstance(error, ConflictError):
        return HTTPError(409, str(error), "conflict")
    if isinstance(error, BufferFullError):
        return HTTPError(429, str(error), "full", headers={"retry-after": "1"})
    if isinstance(error, StorageFullError):
        return HTTPError(507, str(error), "disk_full", headers={"retry-after": "5"})
    if isinstance(error, StorageError):
        return HTTPError(503, str(error), "storage", headers={"retry-after": "1"})
    return None
