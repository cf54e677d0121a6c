"""What a run tells others of itself while it goes on: to trackers, and to whoever scrapes its metrics."""

import asyncio
import calendar
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from rollstream.daemon_threads import in_daemon_thread
from rollstream.engine.base import EngineLoad
from rollstream.engine.load import ask_load
from rollstream.generation.figures import run_figures
from rollstream.generation.metrics import MetricsServer, metrics_page
from rollstream.generation.progress import RateMeter, Snapshot
from rollstream.generation.statistics import Statistics
from rollstream.generation.trackers import UPLOADER, Uploader, load_uploader
from rollstream.generation.tracking import TrackedRun, Tracker, Tracking

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""Between reports: a day's run is some nine thousand points, which trackers draw with ease."""

_FLUSH_S = 60.0
"""For trackers to write what is left when a run ends: they may have to send it."""

_FLUSH_STOPPED_S = 10.0
"""The same when a person or a scheduler waits for the process to end."""


class Telemetry:
    """The statistics of a run, and whom they are told.

    Nothing here ends a run: what goes wrong in it is said once, and then there are no reports.

    Args:
        trackers: by name; not opened.
        metrics_port: for Prometheus, 0 for a free one; None for none.
        every: seconds between reports.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], metrics_port: int | None, *, every: float = EVERY_S
    ) -> None:
        self.statistics = Statistics()
        self.tracking: Tracking | None = None
        """Once a run has begun."""
        self._trackers = trackers
        self._server = None if metrics_port is None else MetricsServer(metrics_port, self._page)
        self._every = every
        self._observe: Callable[[], Snapshot] | None = None
        self._engine: object = None
        self._load: EngineLoad | None = None
        self._last: Snapshot | None = None
        self._meter = RateMeter()
        self._base = 0
        self._created = 0.0

    async def listen(self) -> None:
        """Begins to answer scrapes, if asked for. Raises `ConfigError` when the port cannot be used."""
        if self._server is not None:
            logger.info("metrics for Prometheus: %s", await self._server.start())

    def begin(self, run: TrackedRun, created: str) -> None:
        """Opens the trackers; waits for none.

        Args:
            run: told to them.
            created: when the run was, UTC in ISO 8601: steps are the seconds since then.
        """
        try:
            self._created = calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ"))
        except ValueError:  # a run.json that somebody edited
            self._created = time.time()
        self.tracking = Tracking(self._trackers, run)
        self.tracking.start()

    async def run(self, observe: Callable[[], Snapshot], engine: object) -> None:
        """Reports now and then until cancelled, and once more then.

        Args:
            observe: how the run goes now.
            engine: asked how busy it is.
        """
        self._observe, self._engine = observe, engine
        try:
            self._last = observe()
            self._base = self._last.done + self._last.failed
            self._meter.observe(time.monotonic(), 0, self._last.tokens)
            if not self._trackers and self._server is None:
                return
            try:
                while True:
                    await asyncio.sleep(self._every)
                    self._load = await ask_load(engine)
                    self._report(observe())
            finally:
                self._last = observe()
                self._observe = None
        except Exception as error:
            self._give_up(error)

    async def close(self, *, succeeded: bool, stop: asyncio.Event) -> None:
        """Lets trackers write what is left, for a bounded time; ends the server.

        Args:
            succeeded: told to the trackers.
            stop: somebody waits for the process to end: the time is short then, also if that comes meanwhile.
        """
        try:
            if self.tracking is not None:
                flushing = asyncio.ensure_future(self.tracking.close(succeeded=succeeded, timeout=_FLUSH_S))
                hurrying = asyncio.ensure_future(self._hurry(self.tracking, stop))
                try:
                    await flushing
                finally:
                    hurrying.cancel()
                    flushing.cancel()
        finally:
            await self.end_server()

    async def end_server(self) -> None:
        """Answers scrapes no more. May be called twice."""
        if self._server is not None:
            await self._server.close()

    @staticmethod
    async def _hurry(tracking: Tracking, stop: asyncio.Event) -> None:
        await stop.wait()
        tracking.hurry(_FLUSH_STOPPED_S)

    async def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        """Uploads a file as an artifact: by the tracker that is open there, or else by itself.

        Raises:
            Exception: whatever the library raises.
        """
        live = {} if self.tracking is None else self.tracking.live
        if self.tracking is not None and UPLOADER in live:
            uploader = cast(Uploader, live[UPLOADER])
            return await self.tracking.call(UPLOADER, lambda: uploader.upload(run, file, name))
        uploader = load_uploader()
        try:
            return await in_daemon_thread(uploader.upload, run, file, name)
        except asyncio.CancelledError:  # it takes too long
            uploader.abandon()
            raise

    def sealed(self, *, pending_rows: int, saved_batches: int) -> None:
        """The last report: all is on disk, in so many batches."""
        if self._last is None:
            return
        try:
            self._report(
                replace(self._last, in_flight=0, pending_rows=pending_rows, saved_batches=saved_batches)
            )
        except Exception as error:
            self._give_up(error)

    def _report(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        if self.tracking is None:
            return
        self._meter.observe(
            time.monotonic(), snapshot.done + snapshot.failed - self._base, self.statistics.tokens
        )
        figures = run_figures(
            snapshot, self._meter.rates(), self.statistics, self.statistics.take_window(), self._load
        )
        self.tracking.report(figures, step=max(0, int(time.time() - self._created)))

    def _give_up(self, error: Exception) -> None:
        logger.warning("no more reports to trackers: %s: %s", type(error).__name__, error)
        logger.debug("no more reports", exc_info=error)

    def _page(self) -> str:
        snapshot = self._last if self._observe is None else self._observe()
        return metrics_page(snapshot, self.statistics, self._load)
