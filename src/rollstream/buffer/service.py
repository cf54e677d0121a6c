"""A buffer that is served: its ledger, reads, generators and routes, started and ended in order."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import orjson

from rollstream.buffer.app import MAX_BODY, BufferApp
from rollstream.buffer.delivery import Delivery
from rollstream.buffer.exchange import Exchange, RefusalError
from rollstream.buffer.generator_files import GeneratorFiles
from rollstream.buffer.generators import Rollouts
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.hot_write import HotWrite
from rollstream.buffer.ledger import Ledger, LedgerSettings
from rollstream.buffer.metrics import MEDIA_TYPE, Page, RequestMetrics, label
from rollstream.buffer.native_routes import NativeRoutes
from rollstream.buffer.openapi import document, page
from rollstream.buffer.routing import Router
from rollstream.buffer.server import Server
from rollstream.buffer.slime_routes import CONSUMER, SlimeRoutes
from rollstream.buffer.waiting_reads import WaitingReads
from rollstream.errors import RollstreamError, StorageError

_LOG = logging.getLogger(__name__)

_SWEEP_S = 5.0
"""Between two looks for groups that timed out with too little in them, at most."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What a server is told."""

    host: str = "127.0.0.1"
    port: int = 8889
    token: str | None = None
    open_metrics: bool = False
    generators: str | None = None
    """Folder of generator files, or "builtin"."""
    max_groups_per_read: int | None = None
    whole_reads: bool = False
    """slime's reads give `max_groups_per_read` groups or none."""
    max_body: int = MAX_BODY


class BufferService:
    """Serves a folder over HTTP.

    Example:
        >>> async with BufferService(Path("outputs/buffer"), LedgerSettings()) as service:
        ...     print(service.url)

    Args:
        directory: where everything is kept.
        settings: of the ledger.
        options: of the server.
    """

    def __init__(
        self, directory: Path, settings: LedgerSettings, options: ServiceOptions | None = None
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._options = options or ServiceOptions()
        if settings.groups_per_cycle is None and self._options.max_groups_per_read is not None:
            # A trainer that polls several times for one batch must not get an instance twice in it.
            self._settings = replace(settings, groups_per_cycle=self._options.max_groups_per_read)
        self._closing = False
        self._ready = False
        self._sweeper: asyncio.Task[None] | None = None
        self._ledger: Ledger | None = None
        self._delivery: Delivery | None = None
        self._rollouts: Rollouts | None = None
        self._server: Server | None = None
        self.metrics = RequestMetrics()
        self.router = Router()
        """Has its routes once `start` has returned."""
        self.files: GeneratorFiles | None = None
        """The generator files; known after `start`."""

    async def start(self) -> str:
        """Opens the folder, listens, and goes on with the rollout that ran; returns the URL.

        Raises:
            ConfigError: the address or a generator file cannot be used.
            StorageError: the folder cannot.
        """
        options = self._options
        files = self.files = GeneratorFiles(options.generators)
        files.check()
        router = self.router
        self._server = Server(None, host=options.host, port=options.port)
        bound = self._server.bind()
        try:
            ledger = self._ledger = Ledger.open(self._directory, self._settings)
        except BaseException:
            bound.close()
            raise
        delivery = self._delivery = Delivery(ledger, files.hooks, self.group_settings)
        rollouts = self._rollouts = Rollouts(
            ledger,
            files,
            directory=self._directory,
            buffer_url=_own_url(self._server.url),
            token=options.token,
            group_size=self._settings.groups.group_size,
        )
        waiting = WaitingReads(ledger, delivery, rollouts, self.metrics, lambda: self._closing)
        slime = SlimeRoutes(
            ledger,
            delivery,
            rollouts,
            self.metrics,
            waiting,
            max_groups_per_read=options.max_groups_per_read,
            whole_reads=options.whole_reads,
            lease_seconds=self._settings.lease_seconds,
            max_buffer_size=self._settings.max_buffer_size,
            closing=lambda: self._closing,
        )
        slime.add_to(router)
        NativeRoutes(
            ledger,
            delivery,
            rollouts,
            self.metrics,
            waiting,
            max_groups_per_read=options.max_groups_per_read,
            lease_seconds=self._settings.lease_seconds,
        ).add_to(router)
        self._add_to(router)
        self._server.app = BufferApp(
            router,
            ("/buffer/write", slime.write),
            metrics=self.metrics,
            token=options.token,
            max_body=options.max_body,
            hot_route=HotWrite(ledger, self.metrics, options.token, options.max_body),
            open_metrics=options.open_metrics,
        )
        try:
            # What a server that was killed was answering on slime's wire: those answers were never whole. On
            # their leases still, the groups would count as had by a trainer that has to get them.
            await ledger.release(CONSUMER)
        except StorageError as error:
            _LOG.warning("what was being read on slime's wire comes back when its time is over: %s", error)
        await self._server.start(bound)
        self._sweeper = asyncio.create_task(self._sweep(), name="buffer-sweep")
        await rollouts.resume()
        self._ready = True
        return self._server.url

    async def stop(self) -> None:
        """Generators first, then the requests in flight, then the folder. Idempotent."""
        self._closing, self._ready = True, False
        if self._rollouts is not None:
            await self._rollouts.close()
        if self._server is not None:
            await self._server.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        if self._delivery is not None:
            self._delivery.close()
        if self._ledger is not None:
            await self._ledger.close()

    @property
    def url(self) -> str:
        """Known once `start` has returned."""
        return self._server.url if self._server is not None else ""

    @property
    def answering(self) -> "asyncio.Task[None]":
        """Ends when requests are no longer answered: after `stop`, or by a defect, which it raises."""
        assert self._server is not None and self._server.task is not None, "start() first"
        return self._server.task

    @property
    def ledger(self) -> Ledger:
        """What is kept."""
        assert self._ledger is not None, "start() first"
        return self._ledger

    def group_settings(self, task_type: str) -> GroupSettings:
        """Of a task: the server's, with the group size of its rollout."""
        size = self.ledger.group_size(task_type)
        groups = self._settings.groups
        return groups if groups.group_size == size else replace(groups, group_size=size)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def _sweep(self) -> None:
        assert self._delivery is not None
        pause = min(_SWEEP_S, self._settings.groups.group_timeout_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            try:
                dropped = await self._delivery.sweep()
            except RollstreamError as error:  # a full disk: told to who writes, too; tried again
                _LOG.warning("groups that timed out could not be dropped: %s", error)
            else:
                if dropped:
                    _LOG.info("%d groups timed out with too little in them; /v1/dropped lists them", dropped)

    # -- routes about the server itself

    def _add_to(self, router: Router) -> None:
        router.add("GET", "/health", self._health)
        router.add("GET", "/ready", self._is_ready)
        router.add("GET", "/metrics", self._metrics_page)
        described, shown = orjson.dumps(document()), page()

        async def openapi(exchange: Exchange) -> None:
            await exchange.reply(described)

        async def docs(exchange: Exchange) -> None:
            await exchange.reply(shown, media_type=b"text/html; charset=utf-8")

        router.add("GET", "/openapi.json", openapi)
        router.add("GET", "/docs", docs)

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply_json({"status": "ok"})

    async def _is_ready(self, exchange: Exchange) -> None:
        if not self._ready:
            raise RefusalError("the server starts or ends", status=503, code="not_ready")
        try:
            await self.ledger.try_writing()
        except RollstreamError as error:
            raise RefusalError(str(error), status=503, code="not_ready") from error
        await exchange.reply_json({"status": "ready"})

    async def _metrics_page(self, exchange: Exchange) -> None:
        stats = self.ledger.stats()
        metrics, sheet = self.metrics, Page()
        sheet.add("items", "gauge", "Items stored and not delivered yet, or leased.", stats.items)
        sheet.add("items_written_total", "counter", "Items stored.", stats.items_written)
        sheet.add(
            "items_known_total",
            "counter",
            "Items that were not stored again, since the server started: their uid was known.",
            metrics.known.items,
        )
        sheet.add("items_delivered_total", "counter", "Items delivered and acked.", stats.items_delivered)
        sheet.add("groups", "gauge", "Groups, by state.", _labelled("state", stats.groups))
        sheet.add(
            "items_dropped_total",
            "counter",
            "Items that left undelivered, by reason.",
            _labelled("reason", stats.dropped),
        )
        sheet.add("groups_delivered_total", "counter", "Groups delivered and acked.", stats.groups_delivered)
        sheet.add(
            "reads_total",
            "counter",
            "Answered reads: with groups, or empty.",
            _labelled("result", {"groups": metrics.reads.count, "empty": metrics.empty_reads}),
        )
        sheet.add("writes_total", "counter", "Writes that were answered with success.", metrics.writes.count)
        sheet.add("leases", "gauge", "Leases that are out.", stats.leases)
        sheet.add("stored_bytes", "gauge", "Bytes of the folder's log.", stats.bytes_on_disk)
        sheet.add("live_bytes", "gauge", "Bytes of what is kept.", stats.bytes_live)
        sheet.add(
            "oldest_ready_seconds", "gauge", "Age of the oldest group that waits for a reader.", stats.lag
        )
        sheet.add("held_writes", "gauge", "Writes that wait for room.", metrics.held_writes)
        sheet.add("waiting_reads", "gauge", "Reads that wait for data.", metrics.waiting_reads)
        sheet.add("received_bytes_total", "counter", "Bytes of the bodies of writes.", metrics.bytes_in)
        sheet.add("sent_bytes_total", "counter", "Bytes of the bodies of reads.", metrics.bytes_out)
        sheet.add(
            "http_requests_total",
            "counter",
            "Answered requests, by route and status.",
            {
                f"{label('route', route)},{label('status', str(status))}": number
                for (route, status), number in metrics.answered.items()
            },
        )
        sheet.add_histogram("write_seconds", "Durable writes.", metrics.writes)
        sheet.add_histogram("read_seconds", "Reads that handed something out.", metrics.reads)

        await exchange.reply(sheet.text(), media_type=MEDIA_TYPE)


def _labelled(name: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {label(name, key): value for key, value in values.items()}


def _own_url(url: str) -> str:
    """Where this machine's own processes reach a server that listens on every address."""
    return url.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")
