"""Trackers that raise, hang, are slow or come late: none is ever in a run's way."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollstream.engine.base import EngineLoad
from rollstream.generation import trackers as module
from rollstream.generation.progress import RunProgress
from rollstream.generation.trackers import QUEUE_REPORTS, Reporter, TrackedRun, Tracker
from tests.support.until import until
from tests.unit.generation.test_progress import snapshot

CREATED = "2026-01-02T03:04:05Z"
RUN = TrackedRun("ab" * 16, "project", "name", {}, Path("nowhere"))


class Recorder:
    """A tracker that remembers."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.steps: list[int] = []
        self.figures: list[Mapping[str, float]] = []
        self.ended: bool | None = None
        self.abandoned = False

    def check(self) -> None:
        pass

    def open(self, run: TrackedRun) -> int | None:
        return self.last

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        self.steps.append(step)
        self.figures.append(figures)

    def close(self, *, succeeded: bool) -> None:
        self.ended = succeeded

    def abandon(self) -> None:
        self.abandoned = True


class Stuck(Recorder):
    """Hangs in one of its calls until the test lets it go."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.reached = threading.Event()
        self.release = threading.Event()

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.reached.set()
            self.release.wait(60)

    def open(self, run: TrackedRun) -> int | None:
        self._maybe("open")
        return super().open(run)

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        self._maybe("log")
        super().log(figures, step=step)

    def close(self, *, succeeded: bool) -> None:
        self._maybe("close")
        super().close(succeeded=succeeded)


class Raising(Recorder):
    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def open(self, run: TrackedRun) -> int | None:
        if self.where == "open":
            raise self.error
        return None

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        if self.where == "log":
            raise self.error

    def close(self, *, succeeded: bool) -> None:
        super().close(succeeded=succeeded)
        if self.where == "close":
            raise self.error


def begun(**trackers: Tracker) -> Reporter:
    reporter = Reporter(trackers, None)
    reporter.begin(RUN, CREATED)
    return reporter


def report(reporter: Reporter, *steps: int) -> None:
    for step in steps:
        for thread in reporter.threads.values():
            thread.report({"x": 1.0}, step=step)


async def closed(reporter: Reporter, *, succeeded: bool = True) -> None:
    await reporter.close(succeeded=succeeded, stop=asyncio.Event())


async def test_reports_arrive_in_order_and_the_end_is_told() -> None:
    one, two = Recorder(), Recorder()
    reporter = begun(one=one, two=two)
    report(reporter, *range(20))
    await closed(reporter)
    for tracker in (one, two):
        assert tracker.steps == list(range(20))
        assert tracker.ended is True
        assert not tracker.abandoned


async def test_steps_go_on_after_the_last_one_and_never_back() -> None:
    tracker = Recorder(last=100)
    reporter = begun(one=tracker)
    report(reporter, 3, 3, 2, 500, 499)  # a clock that was set back
    await closed(reporter, succeeded=False)
    assert tracker.steps == [101, 102, 103, 500, 501]
    assert tracker.ended is False


@pytest.mark.parametrize("where", ["open", "log", "close"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
async def test_one_that_raises_is_switched_off_with_one_warning(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Raising(where, error), Recorder()
    with caplog.at_level(logging.WARNING, "rollstream"):
        reporter = begun(bad=bad, good=good)
        report(reporter, *range(5))
        await closed(reporter)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "tracker bad is switched off" in said[0]
    assert str(error) in said[0]
    assert len(good.steps) == 5
    assert good.ended is True
    # What it took before is written as far as it can be.
    assert bad.ended is {"open": None, "log": False, "close": True}[where]


@pytest.mark.parametrize("where", ["open", "log", "close"])
async def test_one_that_hangs_is_left_behind(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 1.0)
    stuck, good = Stuck(where), Recorder()
    with caplog.at_level(logging.WARNING, "rollstream"):
        reporter = begun(stuck=stuck, good=good)
        report(reporter, 0, 1)
        await until(lambda: len(good.steps) == 2)
        await until(lambda: stuck.reached.is_set() or len(stuck.steps) == 2)
        await closed(reporter)  # it hangs until the test lets it go
    assert stuck.abandoned
    assert [record.getMessage()[:31] for record in caplog.records] == ["tracker stuck is switched off, "]
    assert good.ended is True
    stuck.release.set()
    report(reporter, 2)
    await until(lambda: not is_alive("stuck"))
    # It came back, and was told nothing any more.
    assert (len(stuck.steps), stuck.ended) == {"open": (0, None), "log": (1, None), "close": (2, True)}[where]


def is_alive(name: str) -> bool:
    return f"rollstream-tracker-{name}" in {thread.name for thread in threading.enumerate()}


async def test_reporting_to_one_that_hangs_costs_nothing_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = Stuck("log")
    reporter = begun(stuck=stuck)
    try:
        report(reporter, 0)
        await until(stuck.reached.is_set)
        report(reporter, *range(10_000))
        assert reporter.threads["stuck"].dropped == 10_000 - QUEUE_REPORTS
        assert caplog.text.count("is slow") == 1
    finally:
        stuck.release.set()
    await closed(reporter)
    assert stuck.ended is True
    # The end made room for itself, unless one was taken from the queue before it came.
    assert len(stuck.steps) in (QUEUE_REPORTS, QUEUE_REPORTS + 1)


class Engine:
    async def load(self) -> EngineLoad:
        return EngineLoad(5, 6)


async def test_reports_are_told_now_and_then_and_at_the_end() -> None:
    tracker = Recorder()
    reporter = Reporter({"one": tracker}, None, every=0.01)
    reporter.begin(RUN, CREATED)
    done = 0

    def observe() -> RunProgress:
        nonlocal done
        done += 1
        return snapshot(done=done, saved_batches=1, unsealed_rows=7)

    work = asyncio.ensure_future(reporter.run(observe, Engine()))
    await until(lambda: len(tracker.figures) > 3)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    reporter.sealed(unsealed_rows=0, saved_batches=9)
    await reporter.close(succeeded=True, stop=asyncio.Event())
    assert tracker.ended is True
    counts = [figures["progress/done"] for figures in tracker.figures]
    assert counts == sorted(counts)
    assert counts[-1] == done
    assert tracker.steps == sorted(set(tracker.steps))
    last = tracker.figures[-1]
    assert (last["queue/pending_rows"], last["queue/saved_batches"], last["queue/in_flight"]) == (0, 9, 0)
    assert (last["engine/running"], last["engine/queued"]) == (5, 6)


async def test_who_stops_while_trackers_are_flushed_waits_no_longer_than_who_stopped_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLUSH_STOPPED_S", 0.2)
    for at_once in (True, False):
        stuck, stop = Stuck("close"), asyncio.Event()
        reporter = Reporter({"stuck": stuck}, None)
        reporter.begin(RUN, CREATED)
        if at_once:
            stop.set()
        async with asyncio.timeout(30):  # not the 60 s of a run that nobody stopped
            closing = asyncio.ensure_future(reporter.close(succeeded=True, stop=stop))
            if not at_once:
                await asyncio.to_thread(stuck.reached.wait, 20)
                assert not closing.done()
                stop.set()
            await closing
        stuck.release.set()
    assert caplog.text.count("tracker stuck is switched off") == 2
