"""Groups of real rollouts: the house's worker, an agent loop, a scripted engine."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.registry import register
from rollstream.agent.single_turn import SingleTurnAgent
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import (
    ConfigError,
    DroppedGroupError,
    EngineError,
    GenerationFailedError,
    GroupFailedError,
    TransientEngineError,
    WeightUpdateError,
)
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.training.ahead import BatchesAhead
from rollstream.training.group import CallableGenerator
from rollstream.training.plan import PlannedGroup, ShuffledPlan
from rollstream.training.rollout_groups import RolloutGroups
from rollstream.trajectory import Failure, Rollout, SamplingParams, Trajectory
from tests.unit.agent.rollouts import make_row, make_worker, resources

NEVER_S = 3600.0
"""Of an answer that nobody may wait for: a test that does so does not end."""


class Length:
    """Scores an answer by its length."""

    async def score(self, row: Any, solution_str: str) -> tuple[float | None, dict[str, Any]]:
        return float(len(solution_str)), {}


def groups_of(engine: ScriptedEngine, n: int = 4, **options: Any) -> RolloutGroups:
    worker = make_worker(resources(engine, response_length=8), loop="single_turn_agent", reward=Length())
    return RolloutGroups(worker, make_row, n, engine=engine, **options)


def repeat_of(request: ScriptedRequest) -> int:
    return int(request.request_id.split("-")[1])


async def generate(groups: RolloutGroups, group: PlannedGroup) -> list[Rollout]:
    await groups.start()
    try:
        return list(await groups.generate(group))
    finally:
        await groups.close()


async def test_a_group_is_n_rollouts_named_once_and_for_all() -> None:
    engine = ScriptedEngine(response_tokens=8)
    rollouts = await generate(groups_of(engine), PlannedGroup(7, epoch=2, index=3))
    assert [(rollout.index, rollout.repeat) for rollout in rollouts] == [(3, 8), (3, 9), (3, 10), (3, 11)]
    assert all(rollout.final.reward is not None for rollout in rollouts)
    assert len({tuple(rollout.final.response_ids) for rollout in rollouts}) == 4  # seeds of their own


async def test_rows_in_memory_in_and_all_their_rollouts_out() -> None:
    engine = ScriptedEngine()
    groups = groups_of(engine, n=2)
    await groups.start()
    rollouts = await groups.generate_rows([make_row(5), make_row(3)])
    assert [(rollout.index, rollout.repeat) for rollout in rollouts] == [(5, 0), (5, 1), (3, 0), (3, 1)]
    engine.fail(lambda request: request.request_id.startswith("3-"), EngineError("no"), times=None)
    with pytest.raises(GroupFailedError, match="2 rollouts of row 3"):
        await groups.generate_rows([make_row(5), make_row(3)])
    assert engine.in_flight == 0
    await groups.close()


async def test_the_first_k_of_n_are_taken_and_the_others_cut_off() -> None:
    engine = ScriptedEngine(latency=lambda request: [0.0, NEVER_S, 0.01, NEVER_S][repeat_of(request)])
    rollouts = await generate(groups_of(engine, first=2), PlannedGroup(0, 0, 1))
    assert [rollout.repeat for rollout in rollouts] == [0, 2]
    assert engine.in_flight == 0


async def test_rollouts_that_fail_are_retried_and_then_fail_the_group_with_the_cause() -> None:
    engine = ScriptedEngine()
    engine.fail("1-2-1", TransientEngineError("busy"))
    assert len(await generate(groups_of(engine), PlannedGroup(0, 0, 1))) == 4
    engine = ScriptedEngine(latency=lambda request: 0.0 if repeat_of(request) == 2 else NEVER_S)
    engine.fail(
        lambda request: repeat_of(request) == 2, EngineError("ids outside the vocabulary"), times=None
    )
    with pytest.raises(GroupFailedError, match="ids outside the vocabulary") as raised:
        await generate(groups_of(engine), PlannedGroup(5, 0, 1))
    assert "group 5 (prompt 1)" in str(raised.value)
    assert "Traceback" in str(raised.value)


async def test_an_error_of_all_rollouts_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def store(result: Rollout | Failure) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        await generate(groups_of(ScriptedEngine(), on_result=store), PlannedGroup(0, 0, 1))
    gc.collect()
    assert not caplog.text


async def test_a_partial_group_may_be_good_enough() -> None:
    engine = ScriptedEngine()
    engine.fail(lambda request: repeat_of(request) == 2, EngineError("no"), times=None)
    rollouts = await generate(groups_of(engine, min_rollouts=3), PlannedGroup(0, 0, 1))
    assert [rollout.repeat for rollout in rollouts] == [0, 1, 3]
    engine = ScriptedEngine()
    engine.fail(lambda request: repeat_of(request) != 2, EngineError("no"), times=None)
    with pytest.raises(GroupFailedError, match="3 of 4"):
        await generate(groups_of(engine, min_rollouts=2), PlannedGroup(0, 0, 1))


@pytest.mark.virtual_time
@pytest.mark.parametrize(("late", "taken"), [("drop", None), ("partial", 3)])
async def test_late_groups(late: Any, taken: int | None) -> None:
    engine = ScriptedEngine(latency=lambda request: NEVER_S if repeat_of(request) == 1 else 0.0)
    groups = groups_of(engine, deadline=0.3, late=late, min_rollouts=2)
    if taken is None:
        with pytest.raises(DroppedGroupError, match=r"3 of 4 rollouts after 0\.3 s"):
            await generate(groups, PlannedGroup(0, 0, 1))
    else:
        assert len(await generate(groups, PlannedGroup(0, 0, 1))) == taken
    assert engine.in_flight == 0


async def test_a_group_that_is_cancelled_leaves_nothing_behind() -> None:
    engine = ScriptedEngine(latency=30.0)
    groups = groups_of(engine, deadline=60.0)
    await groups.start()
    task = asyncio.create_task(groups.generate(PlannedGroup(0, 0, 1)))  # type: ignore[arg-type]
    while engine.in_flight < 4:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.in_flight == 0


async def test_weights_may_go_another_way() -> None:
    pushed = []

    async def push(source: str, version: int) -> None:
        pushed.append((source, version))

    engine = ScriptedEngine()
    await groups_of(engine, push_weights=push).update_weights("here", 3)
    assert pushed == [("here", 3)]
    assert engine.policy_version == 0
    await groups_of(engine).update_weights("here", 3)
    assert engine.policy_version == 3
    nobodys = RolloutGroups(make_worker(resources(engine)), make_row, 4)
    await nobodys.update_weights("", 4)  # somebody else has given them to the engine
    with pytest.raises(WeightUpdateError, match="nobody would load 'here'"):
        await nobodys.update_weights("here", 4)


async def test_every_result_is_told() -> None:
    told: list[Rollout | Failure] = []

    async def note(result: Rollout | Failure) -> None:
        told.append(result)

    await generate(groups_of(ScriptedEngine(), on_result=note), PlannedGroup(0, 0, 1))
    assert sorted(result.repeat for result in told) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [{"first": 5}, {"min_rollouts": 5}, {"first": 2, "min_rollouts": 3}, {"deadline": 0}, {"late": "x"},
     {"max_in_flight": 0}],
)  # fmt: skip
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        groups_of(ScriptedEngine(), **wrong)


def test_a_new_engine_is_given_the_weights_of_the_saved_step_and_their_version() -> None:
    """It stamps tokens with version 0, whatever it has loaded by itself."""

    def batches_of(engine: ScriptedEngine, state: dict[str, Any] | None = None) -> BatchesAhead:
        batches = BatchesAhead(ShuffledPlan(6, seed=2), groups_of(engine), groups_per_step=3)
        if state is not None:
            batches.load_state_dict(state)
        return batches

    first = ScriptedEngine()
    with batches_of(first) as batches:
        for step in range(2):
            batches.trained(batches.next_batch(30).step)
            batches.update_weights("weights")
            assert first.policy_version == step + 1
        state = json.loads(json.dumps(batches.state_dict()))
    assert not first.started  # closed
    with (
        batches_of(ScriptedEngine(), state) as untold,
        pytest.raises(GenerationFailedError, match=r"start\(weights"),
    ):
        untold.next_batch(30)
    resumed = batches_of(engine := ScriptedEngine(), state)
    resumed.start(weights="checkpoint")
    assert engine.policy_version == resumed.engine_version == 2
    with resumed:
        batch = resumed.next_batch(30)
    versions = [version for rollout in batch.rollouts for _, version in rollout.final.policy_versions]
    assert (batch.step, set(versions)) == (2, {2})
    assert all(len(group.rewards) == 4 for group in batch.groups)


async def outage(engine: ScriptedEngine, seconds: float) -> None:
    """Begins one in the engine's own event loop."""
    engine.go_down()
    asyncio.get_running_loop().call_later(seconds, engine.come_back)


def test_an_engine_that_is_gone_for_a_while_costs_nothing_but_time() -> None:
    seconds = 0.5
    engine = ScriptedEngine(latency=0.01)
    plan = ShuffledPlan(6)
    with BatchesAhead(plan, groups_of(engine), groups_per_step=3) as batches:
        sequence = []
        for step in range(4):
            batch = batches.next_batch(seconds + 30)
            sequence += [group.planned for group in batch.groups]
            assert all(rollout.attempts == 1 for rollout in batch.rollouts)
            batches.trained(step)
            batches.update_weights("weights")
            if step == 1:
                batches.submit(outage(engine, seconds)).result(60)
    assert sequence == [plan.at(position) for position in range(12)]


@register("two_turns")
class TwoTurns(SingleTurnAgent):
    """Asks twice for the same prompt, and tells the versions of both answers."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        first = await super().run(sampling, **row)
        await asyncio.sleep(row["index"] % 3 / 50)
        second = await super().run(sampling, **row)
        first.extra["versions"] = [first.policy_versions, second.policy_versions]
        return first


async def test_pinned_rollouts_are_of_one_version_each(tmp_path: Path) -> None:
    def groups(engine: Any, **options: Any) -> RolloutGroups:
        worker = make_worker(resources(engine, response_length=8), loop="two_turns")
        return RolloutGroups(worker, make_row, 2, engine=engine, **options)

    def run(url: str) -> list[tuple[int, Any]]:
        engine = ContinuingEngine(SGLangEngine([url]))
        options: dict[str, Any] = {"groups_per_step": 4, "weights": "pinned"}
        for wrong in (ScriptedEngine(), engine):
            with pytest.raises(ConfigError, match="pinned"):
                given = {"push_weights": engine.update_weights} if wrong is engine else {}
                BatchesAhead(ShuffledPlan(9), groups(wrong, **given), **options)
        with pytest.raises(ConfigError, match="pins no rollout"):
            BatchesAhead(ShuffledPlan(9), CallableGenerator(engine.generate), **options)  # type: ignore[arg-type]
        found = []
        with BatchesAhead(ShuffledPlan(9), groups(engine), **options) as batches:
            for step in range(1, 5):
                batch = batches.next_batch(60)
                found += [
                    (group.start, rollout.final.extra["versions"])
                    for group in batch.groups
                    for rollout in group.rollouts
                ]
                batches.trained(batch.step)
                (tmp_path / str(step)).mkdir()
                (tmp_path / str(step) / "adapter_config.json").write_text("{}")
                batches.update_weights(str(tmp_path / str(step)))
        return found

    async with StubServer(model=StubModel(adapters=2), latency=Latency.parse("fixed:0.02")) as server:
        found = await asyncio.to_thread(run, server.url)
    assert len(found) == 32 and len({start for start, _ in found}) > 1
    for start, (first, second) in found:
        assert first == second and len(first) == 1 and first[0][1] >= start
    async with StubServer(model=StubModel(adapters=1)) as server:
        with pytest.raises(ConfigError, match="max_staleness"):
            await asyncio.to_thread(run, server.url)
