"""Trackers that raise, hang, are slow or come late: none is ever in a run's way."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rollstream.generation import tracking as module
from rollstream.generation.tracking import QUEUE_REPORTS, TrackedRun, TrackerOffError, Tracking

RUN = TrackedRun("ab" * 16, "project", "name", {}, Path("nowhere"))


class Recorder:
    """A tracker that remembers."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.steps: list[int] = []
        self.figures: list[Mapping[str, float]] = []
        self.ended: bool | None = None
        self.abandoned = False

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


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.005)


async def test_reports_arrive_in_order_and_the_end_is_told() -> None:
    one, two = Recorder(), Recorder()
    tracking = Tracking({"one": one, "two": two}, RUN)
    tracking.start()
    for step in range(20):
        tracking.report({"x": step}, step=step)
    await tracking.close(succeeded=True, timeout=20)
    for tracker in (one, two):
        assert tracker.steps == list(range(20))
        assert tracker.ended is True
        assert not tracker.abandoned


async def test_steps_go_on_after_the_last_one_and_never_back() -> None:
    tracker = Recorder(last=100)
    tracking = Tracking({"one": tracker}, RUN)
    tracking.start()
    for step in (3, 3, 2, 500, 499):  # a clock that was set back
        tracking.report({}, step=step)
    await tracking.close(succeeded=False, timeout=20)
    assert tracker.steps == [101, 102, 103, 500, 501]
    assert tracker.ended is False


@pytest.mark.parametrize("where", ["open", "log", "close"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
async def test_one_that_raises_is_switched_off_with_one_warning(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Raising(where, error), Recorder()
    tracking = Tracking({"bad": bad, "good": good}, RUN)
    with caplog.at_level(logging.WARNING, "rollstream"):
        tracking.start()
        for step in range(5):
            tracking.report({}, step=step)
        await tracking.close(succeeded=True, timeout=20)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "tracker bad is switched off" in said[0]
    assert str(error) in said[0]
    assert len(good.steps) == 5
    assert good.ended is True
    # What it took before is written as far as it can be.
    assert bad.ended is {"open": None, "log": False, "close": False}[where]


@pytest.mark.parametrize("where", ["open", "log", "close"])
async def test_one_that_hangs_is_left_behind(where: str, caplog: pytest.LogCaptureFixture) -> None:
    stuck, good = Stuck(where), Recorder()
    tracking = Tracking({"stuck": stuck, "good": good}, RUN)
    try:
        with caplog.at_level(logging.WARNING, "rollstream"):
            tracking.start()
            tracking.report({}, step=0)
            if where != "close":
                await eventually(stuck.reached.is_set)
            await tracking.close(succeeded=True, timeout=0.3)  # it hangs until the test ends
        assert stuck.abandoned
        assert [record.getMessage()[:31] for record in caplog.records] == ["tracker stuck is switched off, "]
        assert good.ended is True
    finally:
        stuck.release.set()


async def test_a_hang_is_found_while_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck("log")
    tracking = Tracking({"stuck": stuck}, RUN, call_limit=0.05)
    try:
        tracking.start()
        tracking.report({}, step=0)
        await eventually(stuck.reached.is_set)

        def found() -> bool:
            tracking.report({}, step=1)
            return not tracking.live

        await eventually(found)
        assert stuck.abandoned
        assert "has not answered" in caplog.text
    finally:
        stuck.release.set()
    await tracking.close(succeeded=True, timeout=5)
    assert stuck.ended is None  # it came back, and was told nothing any more
    assert len(stuck.steps) <= 1


async def test_reporting_to_one_that_hangs_costs_nothing_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = Stuck("log")
    tracking = Tracking({"stuck": stuck}, RUN)
    try:
        tracking.start()
        tracking.report({}, step=0)
        await eventually(stuck.reached.is_set)
        for step in range(10_000):
            tracking.report({"x": 1.0}, step=step)
        assert tracking.dropped == 10_000 - QUEUE_REPORTS
        assert caplog.text.count("is slow") == 1
    finally:
        stuck.release.set()
    await tracking.close(succeeded=True, timeout=20)
    assert stuck.ended is True
    # The end made room for itself, unless one was taken from the queue before it came.
    assert len(stuck.steps) in (QUEUE_REPORTS, QUEUE_REPORTS + 1)


async def test_work_is_done_between_reports_in_its_thread() -> None:
    tracker = Recorder()
    tracking = Tracking({"one": tracker}, RUN)
    tracking.start()
    tracking.report({}, step=1)
    seen, name = await tracking.call("one", lambda: (list(tracker.steps), threading.current_thread().name))
    assert (seen, name) == ([1], "rollstream-tracker-one")
    with pytest.raises(ZeroDivisionError):
        await tracking.call("one", lambda: 1 // 0)
    tracking.report({}, step=2)
    await tracking.close(succeeded=True, timeout=20)
    assert tracker.steps == [1, 2]


async def test_work_for_one_that_hangs_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    stuck = Stuck("open")
    tracking = Tracking({"stuck": stuck}, RUN, open_limit=0.1)
    try:
        tracking.start()
        await eventually(stuck.reached.is_set)
        with pytest.raises(TrackerOffError):
            await tracking.call("stuck", lambda: 1)
    finally:
        stuck.release.set()
