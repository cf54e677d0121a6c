"""Telling trackers and Prometheus how a run goes, without them ever being in its way.

Each tracker has a short queue, a task that works it off, and a daemon thread for its calls:

    report --(room in the queue)--> queue --> open, log, log …, close
           --(full)--> dropped, counted, said once

    on --(it raises; or one call takes longer than it may)--> off: said once, told nothing any more

A thread that hangs in its tracker is left behind: it ends with the process, and what it holds is its own.
Trackers belong to other systems and are part of `integrations`, which this room does not know: they are named
here by where they are found, and imported when a run asks for them.
"""

import asyncio
import calendar
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from rollstream.config.settings import Settings
from rollstream.daemon_threads import DaemonThreads, in_daemon_thread
from rollstream.engine.base import EngineLoad
from rollstream.engine.load import ask_load
from rollstream.errors import RunDirectoryError
from rollstream.generation.metrics import MetricsServer, RunMetrics
from rollstream.generation.progress import RateMeter, Snapshot
from rollstream.redaction import redact
from rollstream.store.manifest import Manifest, read_manifest

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_ELSEWHERE = {
    "wandb": "rollstream.integrations.tracking.wandb:WandbTracker",
    "trackio": "rollstream.integrations.tracking.trackio:TrackioTracker",
    "tensorboard": "rollstream.integrations.tracking.tensorboard:TensorBoardTracker",
    "jsonl": "rollstream.integrations.tracking.jsonl:JsonLinesTracker",
}
"""Module and class. `console` is none of them: it is the progress line."""

UPLOADER = "wandb"
"""The tracker that takes artifacts, see `Uploader`."""

EVERY_S = 10.0
"""Between reports: a day's run is some nine thousand points, which trackers draw with ease."""

OPEN_LIMIT_S = 150.0
"""For a tracker to open: the import of a large package and a log-in over a slow network; W&B's own limit for
its part is 90 s."""

CALL_LIMIT_S = 60.0
"""For a tracker to take one report. They put it into a buffer or a file: more than this is a hang."""

QUEUE_REPORTS = 64
"""Reports that wait for a tracker: more than come during the two limits above."""

FLUSH_S = 60.0
"""For trackers to write what is left when a run ends: they may have to send it."""

FLUSH_STOPPED_S = 10.0
"""The same when a person or a scheduler waits for the process to end."""

OPENING_S = 15.0
"""For a tracker that is still opening when a short run ends: W&B takes some seconds to begin."""

_LOOK_S = 0.1
"""Between looks at the end whether trackers have ended, or somebody waits for the process."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run when it opens."""

    run_id: str
    """32 hexadecimal digits, the same whenever the run is resumed."""
    project: str
    name: str
    config: Mapping[str, Any]
    """Resolved, without secrets."""
    run_dir: Path


class Tracker(Protocol):
    """Somebody who is told how a run goes. All calls come from one thread, one after another."""

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
        """Told, by another thread, that it hangs and is left behind: it must not hold up the end."""
        ...


class Staged(str):
    """What an `Uploader` says of a file that waits on this machine until a person sends it."""


class Uploader(Protocol):
    """Takes a run's trajectories elsewhere."""

    def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        """Uploads a file; returns where it is, or what to do (`Staged`). Raises what its library raises."""
        ...

    def abandon(self) -> None:
        """See `Tracker`."""
        ...


def load_trackers(names: Iterable[str]) -> dict[str, Tracker]:
    """The trackers of `trainer.logger`, not opened."""
    return {name: _load(name) for name in dict.fromkeys(names) if name in _ELSEWHERE}


def load_uploader() -> Uploader:
    """What uploads artifacts: W&B."""
    uploader: Uploader = _load(UPLOADER)
    return uploader


def check_trackers(names: Iterable[str], *, upload: bool = False) -> None:
    """Refuses trackers, and an upload, that could not work, before anything is made on disk.

    Raises:
        ConfigError: with the command that installs what is missing.
    """
    for name in dict.fromkeys([*names, *([UPLOADER] if upload else [])]):
        if name in _ELSEWHERE:
            _load(name).check()


def _load(name: str) -> Any:
    module, _, found = _ELSEWHERE[name].partition(":")
    return getattr(importlib.import_module(module), found)()


def tracked_run(settings: Settings, manifest: Manifest, run_dir: Path) -> TrackedRun:
    """What trackers are told of a run, by its present settings."""
    return _tracked(
        run_dir, manifest, asdict(settings), settings.trainer.project_name, settings.trainer.experiment_name
    )


def tracked_run_of(run_dir: Path) -> TrackedRun:
    """The same of a run directory. Raises `RunDirectoryError` when it is none."""
    manifest = read_manifest(run_dir)
    if manifest is None:
        raise RunDirectoryError(f"{run_dir} is not a run directory: it has no run.json")
    trainer = manifest.config.get("trainer", {})
    return _tracked(
        run_dir,
        manifest,
        manifest.config,
        str(trainer.get("project_name", "rollstream")),
        str(trainer.get("experiment_name", "generation")),
    )


def _tracked(
    run_dir: Path, manifest: Manifest, config: Mapping[str, Any], project: str, name: str
) -> TrackedRun:
    about = {
        "run_id": manifest.run_id,
        "run_dir": str(run_dir.absolute()),
        "versions": dict(manifest.versions),
    }
    return TrackedRun(manifest.run_id, project, name, {**redact(config), "rollstream": about}, run_dir)


class TrackerOffError(Exception):
    """The tracker was switched off before it came to what was asked of it."""


@dataclass(slots=True, eq=False)
class _Upload:
    """Work that somebody waits for, between reports."""

    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class _Worker:
    """A tracker, its queue and the task that works it off."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker = tracker
        self.is_open = False
        self.is_off = False
        self.dropped = 0
        self._queue: asyncio.Queue[tuple[int, Mapping[str, float]] | _Upload | bool] = asyncio.Queue(
            QUEUE_REPORTS
        )
        self._threads = DaemonThreads(f"rollstream-tracker-{name}")

    async def run(self, run: TrackedRun) -> None:
        """Opens the tracker and tells it what is queued, until told to close, or off."""
        try:
            last = await self._call(partial(self.tracker.open, run), OPEN_LIMIT_S)
            self.is_open = True
            while True:
                item = await self._queue.get()
                if isinstance(item, bool):
                    await self._call(partial(self.tracker.close, succeeded=item), None)
                    return
                if isinstance(item, _Upload):
                    await self._upload(item)
                    continue
                step, metrics = item
                last = step if last is None else max(step, last + 1)
                await self._call(partial(self.tracker.log, metrics, step=last), CALL_LIMIT_S)
        except TrackerOffError as error:
            self.switch_off(str(error))
            if self.is_open and not isinstance(error.__cause__, TimeoutError):
                await self._rescue()
        except asyncio.CancelledError:  # it did not end in time
            self._leave()
            raise
        finally:
            self._refuse_rest()
            self._threads.close()

    async def _call(self, work: Callable[[], Any], limit: float | None) -> Any:
        """Raises `TrackerOffError` when the tracker raises or takes too long."""
        running = self._threads.start(work)
        began = time.monotonic()
        await asyncio.wait({running}, timeout=limit)
        if not running.done():
            self._leave()
            waited = f"it has not answered for {time.monotonic() - began:.0f} s"
            raise TrackerOffError(waited) from TimeoutError()
        outcome = running.result()
        if outcome.error is not None:  # SystemExit of a library, too: it is the thread's, not the program's
            raise TrackerOffError(f"{type(outcome.error).__name__}: {outcome.error}") from outcome.error
        return outcome.value

    async def _upload(self, item: _Upload) -> None:
        """Whoever asked for it waits, and has a bound of their own."""
        running = self._threads.start(item.work)
        await asyncio.wait({running, item.done}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():  # nobody waits any more
            self._leave()
            raise TrackerOffError("an upload took too long") from TimeoutError()
        outcome = running.result()
        if item.done.done():
            return
        if outcome.error is not None:
            item.done.set_exception(outcome.error)
        else:
            item.done.set_result(outcome.value)

    async def _rescue(self) -> None:
        """After an error: what the tracker took before may still be written."""
        try:
            await self._call(partial(self.tracker.close, succeeded=False), CALL_LIMIT_S)
        except TrackerOffError as error:
            logger.debug("tracker %s: %s", self.name, error)

    def offer(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues a report, or drops it."""
        if self.is_off:
            return
        try:
            self._queue.put_nowait((step, metrics))
        except asyncio.QueueFull:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("tracker %s is slow: some reports are left out", self.name)

    def insist(self, item: _Upload | bool) -> None:
        """Queues work, or the end: worth more than a report, which makes room."""
        if self._queue.full():
            self._queue.get_nowait()
            self.dropped += 1
        self._queue.put_nowait(item)

    def _refuse_rest(self) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, _Upload) and not item.done.done():
                item.done.set_exception(TrackerOffError(f"tracker {self.name} is switched off"))

    def switch_off(self, why: str) -> None:
        """Tells it nothing any more, and says so."""
        self.is_off = True
        logger.warning("tracker %s is switched off, the run goes on without it: %s", self.name, why)

    def _leave(self) -> None:
        try:
            self.tracker.abandon()
        except Exception as error:  # somebody else's, and of no use any more
            logger.debug("tracker %s: %s", self.name, error)


class Tracking:
    """Tells trackers how a run goes. `trackers`: by the names under which they are spoken of."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._workers = {name: _Worker(name, tracker) for name, tracker in trackers.items()}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def live(self) -> dict[str, Tracker]:
        """Trackers that were started and are not switched off."""
        started = {name: self._workers[name] for name in self._tasks}
        return {name: worker.tracker for name, worker in started.items() if not worker.is_off}

    @property
    def dropped(self) -> int:
        """Reports that were left out."""
        return sum(worker.dropped for worker in self._workers.values())

    def start(self, run: TrackedRun) -> None:
        """Begins to open the trackers; waits for none."""
        for name, worker in self._workers.items():
            self._tasks[name] = asyncio.create_task(worker.run(run), name=f"tracker-{name}")

    def report(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hands metrics to all trackers. Takes microseconds, whatever they do."""
        for worker in self._workers.values():
            worker.offer(step, metrics)

    async def call(self, name: str, work: Callable[[], _T]) -> _T:
        """Does `work` in a tracker's thread, after what was reported before; raises what it raises.

        Raises:
            TrackerOffError: the tracker hung, or failed, before its turn came.
        """
        if self._tasks[name].done():
            raise TrackerOffError(f"tracker {name} is switched off")
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._workers[name].insist(_Upload(work, done))
        return await done

    async def close(self, *, succeeded: bool, stop: asyncio.Event) -> None:
        """Lets trackers write what is left, for a bounded time; then leaves them behind.

        Args:
            succeeded: told to the trackers.
            stop: somebody waits for the process to end: the time is short then, also if that comes meanwhile.
        """
        began = time.monotonic()
        until = began + FLUSH_S
        for name, task in self._tasks.items():
            if not task.done():
                self._workers[name].insist(succeeded)
        said = False
        while pending := {name: task for name, task in self._tasks.items() if not task.done()}:
            await asyncio.wait(pending.values(), timeout=_LOOK_S)
            now = time.monotonic()
            if stop.is_set():
                until = min(until, now + FLUSH_STOPPED_S)
            if not said and now - began > 2:
                said = True
                logger.info(
                    "waiting up to %.0f s for %s to take the last reports (Ctrl-C: %.0f s)",
                    *(until - began, ", ".join(pending), FLUSH_STOPPED_S),
                )
            for name, task in pending.items():
                worker = self._workers[name]
                if not task.done() and now > (until if worker.is_open else min(until, began + OPENING_S)):
                    what = "end" if worker.is_open else "open"
                    worker.switch_off(f"it did not {what} within {now - began:.0f} s of the run's end")
                    task.cancel()
                    await asyncio.wait({task})
        if self.dropped:
            logger.warning("%d reports to trackers were left out", self.dropped)


class Reporter:
    """Tells trackers, and whoever scrapes the run's metrics, how it goes.

    Nothing here ends a run: what goes wrong in it is said once, and then there are no reports.

    Args:
        trackers: by name; not opened.
        metrics_port: for Prometheus, 0 for a free one; None for none.
        every: seconds between reports.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], metrics_port: int | None, *, every: float = EVERY_S
    ) -> None:
        self.metrics = RunMetrics()
        self.tracking = Tracking(trackers)
        self._wanted = bool(trackers) or metrics_port is not None
        self._server = None if metrics_port is None else MetricsServer(metrics_port, self._page)
        self._every = every
        self._observe: Callable[[], Snapshot] | None = None
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
        self.tracking.start(run)

    async def run(self, observe: Callable[[], Snapshot], engine: object) -> None:
        """Reports now and then until cancelled.

        Args:
            observe: how the run goes now.
            engine: asked how busy it is.
        """
        self._observe = observe
        try:
            self._last = observe()
            self._base = self._last.done + self._last.failed
            self._meter.observe(time.monotonic(), 0, self._last.tokens)
            if not self._wanted:
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

    def sealed(self, *, unsealed_rows: int, saved_batches: int) -> None:
        """The last report: all is on disk, in so many batches."""
        if self._last is None:
            return
        try:
            last = replace(self._last, in_flight=0, unsealed_rows=unsealed_rows, saved_batches=saved_batches)
            self._report(last)
        except Exception as error:
            self._give_up(error)

    async def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        """Uploads a file as an artifact: by the tracker that is open there, or else by itself.

        Raises:
            Exception: whatever the library raises.
        """
        if (live := self.tracking.live.get(UPLOADER)) is not None:
            uploader = cast(Uploader, live)
            return await self.tracking.call(UPLOADER, lambda: uploader.upload(run, file, name))
        uploader = load_uploader()
        try:
            return await in_daemon_thread(uploader.upload, run, file, name)
        except asyncio.CancelledError:  # it takes too long
            uploader.abandon()
            raise

    async def close(self, *, succeeded: bool, stop: asyncio.Event) -> None:
        """Lets trackers write what is left, see `Tracking.close`; ends the server."""
        try:
            await self.tracking.close(succeeded=succeeded, stop=stop)
        finally:
            await self.end_server()

    async def end_server(self) -> None:
        """Answers scrapes no more. May be called twice."""
        if self._server is not None:
            await self._server.close()

    def _report(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        finished = snapshot.done + snapshot.failed - self._base
        self._meter.observe(time.monotonic(), finished, self.metrics.tokens)
        metrics = self.metrics.report(snapshot, self._meter.rates(), self._load)
        self.tracking.report(metrics, step=max(0, int(time.time() - self._created)))

    def _give_up(self, error: Exception) -> None:
        logger.warning("no more reports to trackers: %s: %s", type(error).__name__, error)
        logger.debug("no more reports", exc_info=error)

    def _page(self) -> bytes:
        return self.metrics.page(self._last if self._observe is None else self._observe(), self._load)
