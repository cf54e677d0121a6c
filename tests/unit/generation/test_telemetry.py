"""What is told while a run goes on, and that nothing in it ends one."""

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest

from rollstream.engine.base import EngineLoad
from rollstream.generation.progress import Snapshot
from rollstream.generation.telemetry import Telemetry
from rollstream.generation.tracking import TrackedRun
from tests.unit.generation.test_progress import snapshot
from tests.unit.generation.test_tracking import Recorder, Stuck, eventually

RUN = TrackedRun("ab" * 16, "project", "name", {}, Path("nowhere"))
CREATED = "2026-01-02T03:04:05Z"


class Engine:
    """Says its load, or never comes to say it."""

    def __init__(self, load: EngineLoad | None) -> None:
        self.said = load

    async def load(self) -> EngineLoad | None:
        if self.said is None:
            await asyncio.Event().wait()
        return self.said


async def test_reports_are_told_now_and_then_and_at_the_end() -> None:
    tracker = Recorder()
    telemetry = Telemetry({"one": tracker}, None, every=0.01)
    telemetry.begin(RUN, CREATED)
    done = 0

    def observe() -> Snapshot:
        nonlocal done
        done += 1
        return snapshot(done=done, saved_batches=1, pending_rows=7)

    work = asyncio.ensure_future(telemetry.run(observe, Engine(EngineLoad(5, 6))))
    await eventually(lambda: len(tracker.figures) > 3)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    telemetry.sealed(pending_rows=0, saved_batches=9)
    await telemetry.close(succeeded=True, stop=asyncio.Event())
    assert tracker.ended is True
    counts = [figures["progress/done"] for figures in tracker.figures]
    assert counts == sorted(counts)
    assert counts[-1] == done
    assert tracker.steps == sorted(set(tracker.steps))
    last = tracker.figures[-1]
    assert (last["queue/pending_rows"], last["queue/saved_batches"], last["queue/in_flight"]) == (0, 9, 0)
    assert (last["engine/running"], last["engine/queued"]) == (5, 6)


async def test_what_goes_wrong_in_it_is_said_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder()
    telemetry = Telemetry({"one": tracker}, None, every=0.01)
    telemetry.begin(RUN, "never")
    observed = 0

    def observe() -> Snapshot:
        nonlocal observed
        observed += 1
        if observed == 3:
            raise ZeroDivisionError("no such figure")
        return snapshot()

    with caplog.at_level(logging.WARNING, "rollstream"):
        async with asyncio.timeout(20):
            await telemetry.run(observe, None)  # it returns
        await telemetry.close(succeeded=True, stop=asyncio.Event())
    assert caplog.text.count("ZeroDivisionError: no such figure") == 1
    assert len(tracker.figures) == 1


async def test_an_engine_that_never_says_its_load_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.engine.load.ASK_TIMEOUT_S", 0.05)
    tracker = Recorder()
    telemetry = Telemetry({"one": tracker}, None, every=0.01)
    telemetry.begin(RUN, CREATED)
    work = asyncio.ensure_future(telemetry.run(snapshot, Engine(None)))
    await eventually(lambda: len(tracker.figures) > 1)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await telemetry.close(succeeded=True, stop=asyncio.Event())
    assert "engine/running" not in tracker.figures[-1]


async def test_who_stops_while_trackers_are_flushed_waits_no_longer_than_who_stopped_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollstream.generation.telemetry._FLUSH_STOPPED_S", 0.2)
    for at_once in (True, False):
        stuck, stop = Stuck("close"), asyncio.Event()
        telemetry = Telemetry({"stuck": stuck}, None)
        telemetry.begin(RUN, CREATED)
        if at_once:
            stop.set()
        async with asyncio.timeout(30):  # not the 60 s of a run that nobody stopped
            closing = asyncio.ensure_future(telemetry.close(succeeded=True, stop=stop))
            if not at_once:
                await asyncio.to_thread(stuck.reached.wait, 20)
                assert not closing.done()
                stop.set()
            await closing
        stuck.release.set()
    assert caplog.text.count("tracker stuck is switched off") == 2
