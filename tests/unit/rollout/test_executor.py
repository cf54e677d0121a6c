"""R2, R3, R5, R7: the executor in one event loop, with real agent loops, a real store and a scripted engine."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import register
from rollstream.engine.base import Engine
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import (
    DataError,
    EngineError,
    EngineUnavailableError,
    RewardError,
    TransientEngineError,
)
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import Executor
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker, rollout_seed
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend
from rollstream.store.run import Run
from rollstream.store.run_dir import RunDirectory
from rollstream.store.writer import StoreWriter
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Completion, Failure, PromptRow, Rollout, SamplingParams, Trajectory
from tests.unit.agent.rollouts import demo_tokenizer, started
from tests.unit.store.fabric import N, keys_on_disk, open_dir


class LengthReward:
    """Scores an answer by its length; refuses row 3."""

    async def score(self, row: PromptRow, solution_str: str) -> tuple[float | None, dict[str, Any]]:
        if row.index == 3:
            raise RewardError("row 3 cannot be scored")
        return float(len(solution_str)), {"chars": len(solution_str)}


def load_row(index: int) -> PromptRow:
    if index == 5:
        raise DataError("prompts.jsonl, row 5: the prompt is a number")
    return PromptRow(index, f"{index:032x}", [{"role": "user", "content": f"{index} + 1 ="}], "test")


class Harness:
    """An executor over a run directory."""

    def __init__(
        self,
        run: RunDirectory,
        engine: Engine,
        *,
        adaptive: bool = False,
        refusal_patience: float = 0.0,
        loop: str = "single_turn_agent",
        max_in_flight: int = 8,
        attempt_timeout: float = 30.0,
    ) -> None:
        self.run = run
        self.engine = engine
        metered = ContinuingEngine(engine)
        resources = AgentResources(
            metered,
            demo_tokenizer(),
            PromptRenderer(demo_tokenizer(), prompt_length=64, truncation="error"),
            16,
        )
        self.availability = EngineAvailability(engine, timeout=30)
        self.worker = RolloutWorker(
            resources,
            sampling=SamplingParams(16),
            seed=3,
            default_agent_loop=loop,
            retry=RetryPolicy(3, 0.001, 0.002),
            attempt_timeout=attempt_timeout,
            availability=self.availability,
            reward=LengthReward(),
            refusal_patience=refusal_patience,
            counts=metered.meter.counts,
        )
        self.writer = StoreWriter(run, save_batch_size=1000, pull_timeout=60)
        self.writer.start()
        self.executor = Executor(
            self.writer,
            LocalBackend(BuiltWorker(self.worker, metered.meter, self.availability)),
            load_row=lambda key: load_row(key.index),
            max_in_flight=max_in_flight,
            adaptive=adaptive,
            engine=engine,
        )

    async def close(self) -> None:
        await self.executor.close()
        await self.writer.close()

    async def work(self, rows: int) -> None:
        try:
            await self.executor.run(self.run.state.keys.owed(range(rows), retry_failed=False))
        finally:
            await self.close()


async def test_every_rollout_is_done_or_recorded(tmp_path: Path) -> None:
    engine = await started()
    engine.fail(lambda request: request.request_id.startswith("1-0-"), EngineError("400: no"), times=None)
    engine.fail(lambda request: request.request_id == "2-0-1", TransientEngineError("503"))
    engine.fail(lambda request: request.request_id.startswith("4-1-"), TransientEngineError("5"), times=None)
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine)
        await harness.work(7)
        assert (run.state.keys.done, run.state.keys.failed) == (14 - 4, 4)
        assert harness.worker.counts.retries == 3
        assert harness.worker.counts.reward_errors == 2
    failures = {(one.index, one.repeat): one for one in Run.open(tmp_path).failures()}
    assert failures.keys() == {(1, 0), (4, 1), (5, 0), (5, 1)}
    assert failures[1, 0].error == "EngineError: 400: no"
    assert (failures[1, 0].attempts, failures[4, 1].attempts) == (1, 3)
    assert "row 5: the prompt is a number" in failures[5, 0].error
    assert "Traceback" in failures[1, 0].traceback
    assert len(keys_on_disk(tmp_path)) == 10
    assert Run.open(tmp_path).find(2, 0).row["attempts"] == 2
    unscored = Run.open(tmp_path).find(3, 1).row
    assert unscored["reward"] is None
    assert "row 3 cannot be scored" in unscored["reward_extra"]["error"]


async def test_stored_tokens_are_those_the_engine_sampled(tmp_path: Path) -> None:
    """R1, id for id and log-prob for log-prob."""
    engine = await started()
    with open_dir(tmp_path) as run:
        await Harness(run, engine).work(3)
    sampled = dict(engine.completions)
    for index in range(3):
        for repeat in range(N):
            row = Run.open(tmp_path).find(index, repeat).row
            completion = sampled[f"{index}-{repeat}-1"]
            assert row["response_ids"] == completion.token_ids
            assert row["response_logprobs"] == pytest.approx(completion.logprobs, abs=1e-6)
            assert set(row["response_mask"]) == {1}
    seeds = {request.sampling.seed for request in engine.requests}
    assert seeds == {rollout_seed(3, index, repeat) for index in range(3) for repeat in range(N)}
    assert len(seeds) == 6


async def test_a_row_says_how_it_is_sampled(tmp_path: Path) -> None:
    engine = await started()
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine)
        row = replace(load_row(0), columns={"sampling_params": {"temperature": 0.25, "max_tokens": 2}})
        await harness.worker.run(row, 0)
        failed = await harness.worker.run(replace(row, columns={"sampling_params": {"temprature": 1}}), 1)
        await harness.close()
    (asked,) = engine.requests
    assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.25, 2)
    assert asked.sampling.seed == rollout_seed(3, 0, 0)
    assert isinstance(failed, Failure) and "has 'temprature'" in failed.error


async def test_an_outage_costs_no_attempt(tmp_path: Path) -> None:
    engine = await started(latency=0.01)
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine)
        work = asyncio.create_task(harness.work(5))
        while not engine.requests:
            await asyncio.sleep(0)
        engine.go_down()
        while harness.availability.is_available:
            await asyncio.sleep(0)
        engine.come_back()
        await work
        assert (run.state.keys.done, run.state.keys.failed) == (10, 0)
        assert harness.worker.counts.unavailable > 0
    assert Run.open(tmp_path).find(0, 0).row["attempts"] == 1


class CrashingEngine(ScriptedEngine):
    """Goes down with all that is in flight whenever one of the deadly rows reaches it; back at once."""

    deadly: frozenset[int] = frozenset()

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, **named: Any) -> Completion:
        if int(named["request_id"].split("-")[0]) in self.deadly:
            await asyncio.sleep(0)
            self.go_down()
            self.come_back()
            raise EngineUnavailableError("the engine died of this request")
        return await super().generate(prompt_ids, sampling, **named)


@pytest.mark.parametrize("deadly", [{3}, {2, 4, 9}])
async def test_deadly_requests_are_found_and_nobody_else_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadly: set[int]
) -> None:
    monkeypatch.setattr("rollstream.rollout.availability._FIRST_PROBE_S", 0.001)
    monkeypatch.setattr("rollstream.rollout.availability._PROBE_S_MAX", 0.001)
    engine = CrashingEngine(latency=0.002)
    await engine.start()
    engine.deadly = frozenset(deadly)
    rows = [index for index in range(60) if index != 5]  # row 5 cannot be loaded
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine, max_in_flight=8)
        try:
            await harness.executor.run(run.state.keys.owed(rows[:20], retry_failed=False))
            engine.peak_in_flight = 0
            await harness.executor.run(run.state.keys.owed(rows, retry_failed=False))
            assert engine.peak_in_flight > 4  # full concurrency again
        finally:
            await harness.close()
    failures = list(Run.open(tmp_path).failures())
    assert {(one.index, one.repeat) for one in failures} == {(i, r) for i in deadly for r in range(N)}
    assert {one.attempts for one in failures} == {3}
    for index in set(rows) - deadly:
        assert [Run.open(tmp_path).find(index, repeat).row["attempts"] for repeat in range(N)] == [1, 1]


ENDS = {12: SystemExit(3), 13: KeyboardInterrupt("of the loop"), 14: BaseException("bare")}
"""What raises them; in a task of its own each would end more than a rollout."""

NO_IDS = {15: 10_000_000, 16: 512, 17: 1.5, 18: -1, 19: 2**40}
"""Of a model with 512 ids."""


@register("hanging_agent")
class HangingAgent(AgentLoop):
    """Hangs on row 0, raises on row 1, returns nonsense on row 2, several trajectories else."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory | list[Trajectory]:
        if row["index"] == 0:
            await asyncio.Event().wait()
        if row["index"] == 1:
            raise KeyError("bug in the loop")
        if row["index"] == 2:
            return "not a trajectory"  # type: ignore[return-value]
        ids = self.resources.prompts.render(row["raw_prompt"], prompt_key=row["prompt_key"])
        parts = [
            Trajectory(ids, [1, 2], [1, 0], [-0.5, 0.0], row["raw_prompt"], "stop", is_snapshot=number < 2)
            for number in range(3)
        ]
        if row["index"] == 6:
            parts[0].response_mask = [1]
        if row["index"] == 7:
            parts[2].response_mask = [1]
            parts[2].messages = []
        if row["index"] == 8:
            raise asyncio.CancelledError
        if row["index"] == 9:
            parts[2].reward = "0.5"  # type: ignore[assignment]
        if row["index"] == 10:
            parts[2].reward = float("nan")
        if row["index"] == 11:
            parts[2].extra = None  # type: ignore[assignment]
        if row["index"] in NO_IDS:
            parts[2].response_ids = [1, NO_IDS[row["index"]]]  # type: ignore[list-item]
        if row["index"] in ENDS:
            raise ENDS[row["index"]]
        return parts


@pytest.mark.virtual_time
async def test_loops_that_misbehave_hurt_only_themselves(tmp_path: Path) -> None:
    engine = await started()
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine, loop="hanging_agent", attempt_timeout=0.05)
        await harness.work(20)
        assert run.state.keys.done + run.state.keys.failed == 40
    failures = {one.index: one for one in Run.open(tmp_path).failures() if one.repeat == 0}
    kinds = {index: failure.error.partition(":")[0] for index, failure in failures.items()}
    assert kinds == {
        0: "AttemptTimeoutError",
        1: "KeyError",
        **dict.fromkeys([2, 9, 11], "TypeError"),
        5: "DataError",
        **dict.fromkeys([6, 7, 10, *NO_IDS], "ValueError"),
        **dict.fromkeys([8, *ENDS], "RuntimeError"),
    }
    assert (failures[0].attempts, failures[0].stage) == (3, "agent")
    assert keys_on_disk(tmp_path) == [(i, r, t) for i in (3, 4) for r in range(N) for t in range(3)]


async def test_what_is_being_stored_is_waited_for_however_often_it_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await started()
    with open_dir(tmp_path) as run:
        harness = Harness(run, engine, max_in_flight=4)
        submit, held = harness.writer.submit, asyncio.Event()
        submitted = 0

        async def later(result: Rollout | Failure) -> None:
            nonlocal submitted
            submitted += 1
            await held.wait()
            await submit(result)

        monkeypatch.setattr(harness.writer, "submit", later)
        work = asyncio.create_task(harness.work(3))
        while submitted < 4:
            await asyncio.sleep(0)
        for _ in range(3):
            harness.executor.drop()
            await asyncio.sleep(0)
        held.set()
        await work
        counters = harness.executor.counters
        assert (counters.completed, counters.dropped, run.state.keys.done) == (4, 0, 4)


def test_rollout_seeds_differ_and_are_stable() -> None:
    seeds = {rollout_seed(0, index, repeat) for index in range(200) for repeat in range(8)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert rollout_seed(1, 2, 3) == rollout_seed(1, 2, 3) != rollout_seed(2, 2, 3)
    assert isinstance(Rollout(0, 0, "", [], "").key.index, int)
