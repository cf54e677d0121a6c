"""Telling trackers and Prometheus how a run goes, without them ever being in its way.

Each tracker has a short queue and a daemon thread that works it off:

    report --(room in the queue)--> queue --> open, log, log …, close
           --(full)--> dropped, counted, said once

    off --(it raises)--> said once, told nothing any more

A thread that hangs in its tracker drops reports, and is left behind when the run ends: it ends with the process.
Trackers are found by entry points (`rollstream.trackers`), and imported when a run asks for them.
"""

import asyncio
import calendar
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from rollstream import plugins
from rollstream.engine.base import EngineLoad
from rollstream.engine.load import ask_load
from rollstream.errors import ConfigError
from rollstream.generation.metrics import RunMetrics
from rollstream.generation.progress import RateMeter, RunProgress
from rollstream.metrics_text import CONTENT_TYPE
from rollstream.redaction import redact
from rollstream.store.manifest import Manifest
from rollstream.web import Request, Route, WebServer

logger = logging.getLogger(__name__)

_UPLOADER = "wandb"

EVERY_S = 10.0
"""Between reports: a day's run is some nine thousand points, which trackers draw with ease."""

QUEUE_REPORTS = 64
"""Reports that wait for a tracker: ten minutes of them, in which the slowest log-in ends."""

FLUSH_S = 60.0
"""For trackers to write what is left when a run ends: they may have to open, and to send it."""

FLUSH_STOPPED_S = 10.0
"""The same when a person or a scheduler waits for the process to end."""

_LAST_ANSWERS_S = 1.0
"""For scrapes to get their answers when the run ends."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The facts about a run that a tracker opens with."""

    run_id: str
    """32 hexadecimal digits, the same whenever the run is resumed."""
    project: str
    name: str
    config: Mapping[str, Any]
    """Resolved, without secrets."""
    run_dir: Path


class Tracker(Protocol):
    """Shows how a run goes. All calls but `abandon` come from one thread, one after another."""

    def check(self) -> None:
        """Raises `ConfigError` when it could not work here, with the command that installs what is missing."""

    def open(self, run: TrackedRun) -> int | None:
        """Begins, or goes on with what there is of this run.

        Returns:
            the last step that it has already; None when it has none, or does not know.
        """
        ...

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Takes metrics; `step` is higher than the one before, over all processes of a run."""
        ...

    def close(self, *, succeeded: bool) -> None:
        """Writes what is left. `succeeded`: whether the run ended without an error."""
        ...

    def abandon(self) -> None:
        """Called from another thread when it hangs and is left behind; must not block."""


class Staged(str):
    """The answer of an `Uploader` for a file that waits on this machine until a person sends it."""


class Uploader(Tracker, Protocol):
    """A tracker that takes a run's trajectories, too."""

    def check_login(self) -> None:
        """Raises `ConfigError` when nobody is logged in. A run without an upload goes on without its tracker."""
        ...

    def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        """Uploads a file; returns where it is, or what to do (`Staged`). Raises what its library raises."""
        ...


def load_trackers(names: Iterable[str]) -> dict[str, Tracker]:
    """The trackers of `trainer.logger`, not opened; `console` is none of them: it is the progress line.

    Raises `ConfigError` for a name that does not exist.
    """
    kept = [name for name in dict.fromkeys(names) if name != "console"]
    return {name: plugins.load("rollstream.trackers", name)() for name in kept}


def load_uploader() -> Uploader:
    """The tracker that takes artifacts: W&B."""
    uploader: Uploader = plugins.load("rollstream.trackers", _UPLOADER)()
    return uploader


def check_trackers(names: Iterable[str], *, upload: bool = False) -> None:
    """Refuses trackers, and an upload, that could not work, before anything is made on disk.

    Raises:
        ConfigError: with the command that installs what is missing.
    """
    for tracker in load_trackers([*names, *([_UPLOADER] if upload else [])]).values():
        tracker.check()
    if upload:
        load_uploader().check_login()


def tracked_run(run_dir: Path, manifest: Manifest, config: Mapping[str, Any] | None = None) -> TrackedRun:
    """The facts about a run; `config`: its configuration now, by default that of the manifest."""
    config = manifest.config if config is None else config
    about = {
        "run_id": manifest.run_id,
        "run_dir": str(run_dir.absolute()),
        "versions": dict(manifest.versions),
    }
    project, name = str(config["trainer"]["project_name"]), str(config["trainer"]["experiment_name"])
    return TrackedRun(manifest.run_id, project, name, {**redact(config), "rollstream": about}, run_dir)


class TrackerThread:
    """A tracker, its queue, and the daemon thread that works it off. `dropped`: reports that were left out."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun) -> None:
        self.name = name
        self.tracker = tracker
        self.dropped = 0
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread has, or is left behind."""
        self._queue: queue.Queue[tuple[Mapping[str, float], int] | bool] = queue.Queue(QUEUE_REPORTS)
        """Reports with their steps; at last, whether the run succeeded."""
        label = f"rollstream-tracker-{name}"
        threading.Thread(target=self._work, args=(run,), name=label, daemon=True).start()

    def _work(self, run: TrackedRun) -> None:
        is_open = False
        try:
            last = self.tracker.open(run)
            is_open = True
            while not isinstance(report := self._queue.get(), bool):
                if self.ended.done():
                    return
                figures, step = report
                last = step if last is None else max(step, last + 1)
                self.tracker.log(figures, step=last)
            is_open = False
            if not self.ended.done():
                self.tracker.close(succeeded=report)
        except BaseException as error:  # SystemExit of a library, too: it is the thread's, not the program's
            self._log_off(f"{type(error).__name__}: {error}")
            if is_open:  # what it took before may still be written
                with contextlib.suppress(BaseException):
                    self.tracker.close(succeeded=False)
        with contextlib.suppress(RuntimeError):  # the loop is closed: it was left behind
            self._loop.call_soon_threadsafe(self._end)

    def report(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Queues a report, or drops it. Takes microseconds, whatever the tracker does."""
        if not self.ended.done():
            try:
                self._queue.put_nowait((metrics, step))
            except queue.Full:
                self._drop()

    def close(self, *, succeeded: bool) -> None:
        """Ends the thread after what is queued; `ended` says when. A full queue loses a report to it."""
        while not self.ended.done():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(succeeded)
                return
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()
                self._drop()

    def leave(self, why: str) -> None:
        """Leaves it behind: it hangs."""
        self._log_off(why)
        self._end()
        with contextlib.suppress(Exception):  # somebody else's, and of no use any more
            self.tracker.abandon()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _log_off(self, why: str) -> None:
        if not self.ended.done():
            logger.warning("tracker %s is switched off, the run goes on without it: %s", self.name, why)

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped == 1:
            logger.warning("tracker %s is slow: some reports are left out", self.name)


class Reporter:
    """Tells trackers, and whoever scrapes the run's metrics, how it goes.

    Args:
        trackers: by name; not opened.
        metrics_port: for Prometheus, 0 for a free one; None for none.
        every: seconds between reports.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], metrics_port: int | None, *, every: float = EVERY_S
    ) -> None:
        self.metrics = RunMetrics()
        self.threads: dict[str, TrackerThread] = {}
        """Of the trackers, once they are opened."""
        self._trackers = trackers
        self._port = metrics_port
        self._server = WebServer([Route("GET", "/metrics", self._answer)])
        self._every = every
        self._observe: Callable[[], RunProgress] | None = None
        self._load: EngineLoad | None = None
        self._last: RunProgress | None = None
        self._meter = RateMeter()
        self._base = 0
        self._created = 0.0

    async def listen(self) -> None:
        """Begins to answer scrapes, if asked for. Raises `ConfigError` when the port cannot be used."""
        if self._port is not None:
            try:
                url = await self._server.start("127.0.0.1", self._port)
            except ConfigError as error:
                raise ConfigError(f"generation.metrics_port={self._port}: {error}") from error
            logger.info("metrics for Prometheus: %s/metrics", url)

    def begin(self, run: TrackedRun, created: str) -> None:
        """Opens the trackers; waits for none. Steps are the seconds since `created`, UTC in ISO 8601."""
        self._created = calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ"))
        self.threads = {name: TrackerThread(name, one, run) for name, one in self._trackers.items()}

    async def run(self, observe: Callable[[], RunProgress], engine: object) -> None:
        """Reports now and then until cancelled: how the run goes (`observe`), how busy the engine is."""
        self._observe = observe
        self._last = observe()
        self._base = self._last.done + self._last.failed
        self._meter.observe(time.monotonic(), 0, self._last.tokens)
        try:
            while True:
                await asyncio.sleep(self._every)
                if self._trackers or self._port is not None:
                    self._load = await ask_load(engine)
                self._report(observe())
        finally:
            self._last = observe()
            self._observe = None

    def sealed(self, *, unsealed_rows: int, saved_batches: int) -> None:
        """The last report: all is on disk, in so many batches."""
        if self._last is not None:
            last = replace(self._last, in_flight=0)
            self._report(replace(last, unsealed_rows=unsealed_rows, saved_batches=saved_batches))

    async def close(self, *, succeeded: bool, stop: asyncio.Event) -> None:
        """Lets trackers write what is left, for a bounded time, and leaves behind those that hang.

        May be called twice: the second time does nothing. When `stop` is or gets set, somebody waits for the
        process to end, and the time is short.
        """
        threads, self.threads = self.threads, {}
        if not threads:
            return
        began = time.monotonic()
        for thread in threads.values():
            thread.close(succeeded=succeeded)
        ended: asyncio.Future[Any] = asyncio.gather(*(thread.ended for thread in threads.values()))
        async with asyncio.TaskGroup() as tasks:
            stopping: asyncio.Future[Any] = tasks.create_task(stop.wait())
            await asyncio.wait({ended, stopping}, timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        if stop.is_set():
            await asyncio.wait({ended}, timeout=FLUSH_STOPPED_S)
        for thread in threads.values():
            if not thread.ended.done():
                thread.leave(f"it did not end within {time.monotonic() - began:.0f} s of the run's end")
        if dropped := sum(thread.dropped for thread in threads.values()):
            logger.warning("%d reports to trackers were left out", dropped)

    async def end_server(self) -> None:
        """Answers scrapes no more. May be called twice."""
        await self._server.stop(_LAST_ANSWERS_S)

    def _report(self, snapshot: RunProgress) -> None:
        self._last = snapshot
        finished = snapshot.done + snapshot.failed - self._base
        self._meter.observe(time.monotonic(), finished, self.metrics.tokens)
        metrics = self.metrics.report(snapshot, self._meter.rates(), self._load)
        for thread in self.threads.values():
            thread.report(metrics, step=max(0, int(time.time() - self._created)))

    async def _answer(self, request: Request) -> web.Response:
        snapshot = self._last if self._observe is None else self._observe()
        page = self.metrics.page(snapshot, self._load)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})
