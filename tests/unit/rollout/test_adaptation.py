"""The cap at work: real servers' queues and refusals, outages, stops, and a machine that breaks."""

import asyncio
from itertools import count, takewhile
from pathlib import Path

import pytest

from rollstream.engine.base import EngineLoad
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import EngineOverloadedError
from rollstream.rollout import concurrency
from rollstream.store.run import Run
from rollstream.testing.scripted import ScriptedEngine
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubServer
from tests.support.until import until
from tests.unit.agent.rollouts import started
from tests.unit.rollout.test_executor import Harness
from tests.unit.store.fabric import open_dir


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    monkeypatch.setattr(concurrency, "EVERY_S", 0.01)
    monkeypatch.setattr(concurrency, "_WINDOW_S", 0.1)
    monkeypatch.setattr(concurrency, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(concurrency, "_QUEUE_FLOOR", 4)


ROWS = [index for index in range(150) if index not in (3, 5)]  # those two fail in the harness


@pytest.mark.usefixtures("quick")
async def test_a_long_queue_is_cut_short_and_nothing_is_lost(tmp_path: Path) -> None:
    async with StubServer(response_tokens=8, latency=Latency("fixed", 0.02), max_running=4) as server:
        server.faults = Faults(no_metrics=True)  # then /get_load says it
        engine = SGLangEngine([server.url])
        await engine.start()
        with open_dir(tmp_path) as run:
            harness = Harness(run, engine, max_in_flight=64, adaptive=True)
            rows = takewhile(lambda _: harness.executor.cap > 32, count(6))  # 3 and 5 fail in the harness
            try:
                await harness.executor.run(run.state.keys.owed(rows, retry_failed=False))
            finally:
                await harness.close()
            assert run.state.keys.done == harness.executor.counters.completed == server.stats.answered
        await engine.close()
    assert harness.executor.in_flight == 0
    assert 4 < harness.executor.cap <= 32


@pytest.mark.virtual_time
async def test_refusals_cost_no_attempt_until_patience_ends(tmp_path: Path) -> None:
    engine = await started()
    engine.fail(lambda request: request.request_id == "0-0-1", EngineOverloadedError("429"), times=3)
    engine.fail(lambda request: request.request_id[0] == "1", EngineOverloadedError("429: no"), times=None)
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine, refusal_patience=0.3)
        await harness.work(2)
        assert (run.state.keys.done, run.state.keys.failed) == (2, 2)
    assert Run.open(tmp_path).find(0, 0).row["attempts"] == 1
    failures = list(Run.open(tmp_path).failures())
    assert {(one.index, one.attempts, one.error) for one in failures} == {
        (1, 3, "EngineOverloadedError: 429: no")
    }


class BusyEngine(ScriptedEngine):
    """Says what it is told to say."""

    said: EngineLoad | Exception | None = None
    asked = 0

    async def load(self) -> EngineLoad | None:
        self.asked += 1
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


async def busy(**named: object) -> BusyEngine:
    engine = BusyEngine(**named)  # type: ignore[arg-type]
    await engine.start()
    return engine


async def test_a_broken_adaptation_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: never silently."""

    def broken(*_: object) -> int:
        raise ZeroDivisionError("in the state machine")

    monkeypatch.setattr(concurrency.ConcurrencyPolicy, "observe", broken)
    engine = await busy(latency=1e6)
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine, max_in_flight=4, adaptive=True)
        with pytest.raises(ZeroDivisionError, match="state machine"):
            await harness.work(4)


@pytest.mark.usefixtures("quick")
async def test_while_the_engine_is_away_nothing_is_concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await busy(latency=0.01)
    observed = 0
    observe = concurrency.ConcurrencyPolicy.observe

    def counting(self: concurrency.ConcurrencyPolicy, now: concurrency.Observation) -> int:
        nonlocal observed
        observed += 1
        return observe(self, now)

    monkeypatch.setattr(concurrency.ConcurrencyPolicy, "observe", counting)
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine, max_in_flight=8, adaptive=True)
        work = asyncio.create_task(harness.executor.run(run.state.keys.owed(ROWS[:30], retry_failed=False)))
        await until(lambda: observed, every=0)
        engine.go_down()
        await until(lambda: not harness.availability.is_available, every=0)
        before, asked = observed, engine.asked
        await until(lambda: engine.asked >= asked + 20)
        assert observed == before
        engine.come_back()
        await work
        await harness.close()
        assert run.state.keys.done == 60
    assert observed > before
