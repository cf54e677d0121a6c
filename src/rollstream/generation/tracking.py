"""Telling trackers how a run goes, without them ever being in its way.

Each tracker has a daemon thread of its own and a short queue before it:

    report --(room in the queue)--> queue --> the tracker's thread: open, log, log …, close
           --(full)--> dropped, counted, said once

    on --(it raises; or one call takes longer than it may)--> off: said once, told nothing any more

A thread that hangs in its tracker is left behind: it ends with the process, and what it holds is its own.
Nothing here waits for a tracker but `close`, and that is bounded.
"""

import asyncio
import concurrent.futures
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollstream.daemon_threads import in_daemon_thread

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_OPENING_S = 15.0
"""For a tracker that is still opening when a short run ends: W&B takes some seconds to begin."""

_LOOK_EVERY_S = 0.5
"""Between looks whether a tracker that somebody waits for hangs."""

_FLUSH_LOOK_S = 0.1
"""The same at the end."""

OPEN_LIMIT_S = 150.0
"""For a tracker to open: the import of a large package and a log-in over a slow network; W&B's own limit for
its part is 90 s."""

CALL_LIMIT_S = 60.0
"""For a tracker to take one report. They put it into a buffer or a file: more than this is a hang."""

QUEUE_REPORTS = 64
"""Reports that wait for a tracker: more than come during the two limits above."""


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
        """Takes figures; `step` is higher than the one before, over all processes of a run."""
        ...

    def close(self, *, succeeded: bool) -> None:
        """Writes what is left. `succeeded`: whether the run ended without an error."""
        ...

    def abandon(self) -> None:
        """Told, by another thread, that it hangs and is left behind: it must not hold up the end."""
        ...


class TrackerOffError(Exception):
    """The tracker was switched off before it came to what was asked of it."""


@dataclass(slots=True, eq=False)
class _Job:
    """Something to do in a tracker's thread."""

    work: Callable[[], Any]
    done: "concurrent.futures.Future[Any]" = field(default_factory=concurrent.futures.Future)

    def run(self) -> None:
        """Does it, unless nobody waits for it any more."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work())
        except BaseException as error:
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class _Lane:
    """A tracker, its thread and what waits for it."""

    name: str
    tracker: Tracker
    reports: "queue.Queue[tuple[int, Mapping[str, float]] | _Job | bool]" = field(
        default_factory=lambda: queue.Queue(QUEUE_REPORTS)
    )
    """Figures with their step, work to do between them, at the end whether the run succeeded."""
    busy_since: float | None = None
    limit: float = OPEN_LIMIT_S
    is_open: bool = False
    is_off: bool = False
    hangs: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    dropped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, run: TrackedRun, call_limit: float) -> None:
        """The thread: until told to close, or off."""
        try:
            self.busy_since = time.monotonic()
            last = self.tracker.open(run)
            self.is_open = True
            while not self.is_off:
                self.busy_since = None  # before the limit, which is read by another thread
                self.limit = call_limit
                report = self.reports.get()
                self.busy_since = time.monotonic()
                if isinstance(report, bool):
                    self.tracker.close(succeeded=report)
                    return
                if isinstance(report, _Job):
                    self.limit = math.inf  # whoever asked for it waits, and has a bound of their own
                    report.run()
                    continue
                step, figures = report
                last = step if last is None else max(step, last + 1)
                self.tracker.log(figures, step=last)
        except BaseException as error:  # SystemExit of a library, too: it is this thread's, not the program's
            self.switch_off(f"{type(error).__name__}: {error}")
            self._rescue()
        finally:
            self.busy_since = None
            self.ended.set()

    def _rescue(self) -> None:
        """After an error: what it took before it may still be written."""
        if not self.is_open:
            return
        try:
            self.tracker.close(succeeded=False)
        except BaseException as error:
            logger.debug("tracker %s: %s: %s", self.name, type(error).__name__, error)

    def offer(self, step: int, figures: Mapping[str, float]) -> None:
        """Queues a report, or drops it."""
        if self.is_off:
            return
        try:
            self.reports.put_nowait((step, figures))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("tracker %s is slow: some reports are left out", self.name)

    def insist(self, item: "_Job | bool") -> None:
        """Queues work, or the end: worth more than a report, which makes room."""
        while True:
            try:
                self.reports.put_nowait(item)
                return
            except queue.Full:
                self.dropped += 1
                try:
                    self.reports.get_nowait()
                except queue.Empty:
                    continue

    def switch_off(self, why: str) -> None:
        """Tells it nothing any more, and says so once."""
        with self._lock:
            if self.is_off:
                return
            self.is_off = True
        logger.warning("tracker %s is switched off, the run goes on without it: %s", self.name, why)

    def leave_behind(self, why: str) -> None:
        """Switches it off as one whose thread may never come back. Once."""
        self.switch_off(why)
        if self.hangs:
            return
        self.hangs = True
        try:
            self.tracker.abandon()
        except Exception as error:  # somebody else's, and of no use any more
            logger.debug("tracker %s: %s", self.name, error)


class Tracking:
    """Tells trackers how a run goes.

    Args:
        trackers: by the names under which they are spoken of.
        run: told to each when it opens.
        open_limit: seconds, see `OPEN_LIMIT_S`.
        call_limit: seconds, see `CALL_LIMIT_S`.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        run: TrackedRun,
        *,
        open_limit: float = OPEN_LIMIT_S,
        call_limit: float = CALL_LIMIT_S,
    ) -> None:
        self._run = run
        self._call_limit = call_limit
        self._lanes = [_Lane(name, tracker, limit=open_limit) for name, tracker in trackers.items()]
        self._until = math.inf
        """When `close` leaves behind what has not ended, on the monotonic clock."""

    @property
    def dropped(self) -> int:
        """Reports that were left out."""
        return sum(lane.dropped for lane in self._lanes)

    @property
    def live(self) -> dict[str, Tracker]:
        """Trackers that are not switched off."""
        return {lane.name: lane.tracker for lane in self._lanes if not lane.is_off}

    def start(self) -> None:
        """Begins to open the trackers; waits for none."""
        for lane in self._lanes:
            threading.Thread(
                target=lane.run,
                args=(self._run, self._call_limit),
                name=f"rollstream-tracker-{lane.name}",
                daemon=True,
            ).start()

    def report(self, figures: Mapping[str, float], *, step: int) -> None:
        """Hands figures to all trackers. Takes microseconds, whatever they do."""
        self.check()
        for lane in self._lanes:
            lane.offer(step, figures)

    def check(self) -> None:
        """Switches off the trackers that hang."""
        now = time.monotonic()
        for lane in self._lanes:
            since, limit = lane.busy_since, lane.limit
            if not lane.is_off and since is not None and now - since > limit:
                lane.leave_behind(f"it has not answered for {now - since:.0f} s")

    async def call(self, name: str, work: Callable[[], _T]) -> _T:
        """Does `work` in a tracker's thread, after what was reported before; raises what it raises.

        Raises:
            TrackerOffError: the tracker hung, or failed, before its turn came.
        """
        lane = next(lane for lane in self._lanes if lane.name == name)
        job = _Job(work)
        lane.insist(job)
        waiting: asyncio.Future[_T] = asyncio.wrap_future(job.done)
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S)
                self.check()
                if lane.is_off and not waiting.done():
                    raise TrackerOffError(f"tracker {name} is switched off")
            return waiting.result()
        finally:
            waiting.cancel()

    async def close(self, *, succeeded: bool, timeout: float) -> None:
        """Lets trackers write what is left, for `timeout` seconds at most; then leaves them behind.

        One that has not even opened is not worth as long a wait: see `_OPENING_S`.
        """
        now = time.monotonic()
        self._until = min(self._until, now + timeout)
        for lane in self._lanes:
            lane.insist(succeeded)
        try:
            await in_daemon_thread(self._wait, now)
        finally:
            for lane in self._lanes:
                if not lane.ended.is_set():
                    what = "end" if lane.is_open else "open"
                    waited = time.monotonic() - now
                    lane.leave_behind(f"it did not {what} within {waited:.0f} s of the run's end")
        if self.dropped:
            logger.warning("%d reports to trackers were left out", self.dropped)

    def hurry(self, timeout: float) -> None:
        """Makes a `close` that goes on, or will come, end within so many seconds from now."""
        self._until = min(self._until, time.monotonic() + timeout)

    def _wait(self, began: float) -> None:
        def left(until: float) -> float:
            """Until another look, for `hurry` may change the end; 0 when it is over."""
            return min(_FLUSH_LOOK_S, max(0.0, min(self._until, until) - time.monotonic()))

        for lane in self._lanes:
            if lane.hangs:
                continue
            while not lane.is_open and (wait := left(began + _OPENING_S)) > 0:
                if lane.ended.wait(wait):
                    break
            while lane.is_open and (wait := left(math.inf)) > 0:
                if lane.ended.wait(wait):
                    break
