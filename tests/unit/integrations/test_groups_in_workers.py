"""R1, R3, R10: the rollouts of a training in processes of their own, on a server that says what it samples under."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollstream.agent.turns import Turns
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, EngineError
from rollstream.integrations.configured_groups import ConfiguredGroups
from rollstream.rollout.in_workers import WorkerRollouts
from rollstream.rollout.processes import ProcessBackend
from rollstream.store.records import EncodedTurn, RecordCodec
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.training import PlannedGroup
from rollstream.trajectory import Completion, PromptRow, Rollout, RolloutKey, Trajectory
from tests.support.until import PATIENCE_S, until
from tests.support.workers import ScriptedRecipe, load_row

ROWS, N, TOKENS, PIECE, FIRST_ID = 12, 4, 40, 10, 100

HERE = ["generation.processes=2"]
ON_RAY = ["generation.executor=ray", "actor_rollout_ref.rollout.agent.num_workers=2"]

REWARD = """
import os

def compute_score(**_):
    return {"score": 1.0, "pid": os.getpid()}
"""


def words(folder: Path, engine: str, *more: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{one} + 1 ="}) for one in range(ROWS))
    )
    return [
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.rollout.response_length={TOKENS}",
        f"data.train_files={folder / 'rows.jsonl'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        *more,
    ]


@asynccontextmanager
async def training(folder: Path, *where: str) -> AsyncIterator[tuple[ConfiguredGroups, StubServer]]:
    """Groups on a server that ends each answer after a piece. It gives the next piece under a later version only, and
    its ids say which version it had when the piece was asked for.
    """

    def version() -> int:
        return 0 if server.weight_version == "default" else int(server.weight_version)

    async def answer(request: ScriptedRequest) -> Completion:
        asked_at, done = version(), TOKENS - request.sampling.max_tokens
        await until(lambda: version() >= done // PIECE)
        whole = done + PIECE == TOKENS
        count = (
            PIECE if whole else PIECE + 1
        )  # of an answer that SGLang ended the last token may be one of an end
        return Completion([FIRST_ID + asked_at] * count, [-0.5] * count, "length" if whole else "abort")

    async with asyncio.timeout(PATIENCE_S), StubServer(answer, model=StubModel(seeds=False)) as server:
        engine = ["sglang", f"actor_rollout_ref.rollout.server_urls=[{server.url}]", *(where or HERE)]
        groups = ConfiguredGroups(words(folder, *engine))
        try:
            await groups.start()
            yield groups, server
        finally:
            await groups.close()


@pytest.mark.parametrize("where", [HERE, ON_RAY], ids=["processes", "ray"])
async def test_each_token_is_of_the_version_that_it_is_stamped_with(tmp_path: Path, where: list[str]) -> None:
    """Updates come while rollouts are in flight, and a worker is killed in one of them."""
    if where is ON_RAY:
        pytest.importorskip("ray")
    async with training(tmp_path, *where) as (groups, server):
        assert groups._workers is not None
        executor = groups._workers._executor
        await until(lambda: len(executor.pids) == 2)
        running = [asyncio.create_task(groups.generate(PlannedGroup(at, 0, at))) for at in range(ROWS)]
        for version in range(1, TOKENS // PIECE):
            await until(lambda: server.stats.in_flight == ROWS * N)
            updating = asyncio.create_task(groups.update_weights(f"/weights/{version}", version))
            if version == 2:
                await until(lambda: not executor._released.is_set())
                os.kill(executor.pids[1], signal.SIGKILL)
            await updating
        rollouts = [rollout for group in running for rollout in await group]
        assert executor.deaths == 1
    assert [(one.index, one.repeat) for one in rollouts] == list(itertools.product(range(ROWS), range(N)))
    assert os.getpid() not in {rollout.final.reward_extra["pid"] for rollout in rollouts}
    seen = set()
    for rollout in rollouts:
        runs = [*rollout.final.policy_versions, (TOKENS, -1)]
        for (start, version), (end, _) in itertools.pairwise(runs):
            assert rollout.final.response_ids[start:end] == [FIRST_ID + version] * (end - start)
            seen.add(version)
    assert seen == set(range(TOKENS // PIECE))


async def test_a_server_that_was_started_anew_gets_the_weights_again(tmp_path: Path) -> None:
    """Its URL is the same, and only the workers meet it."""

    async def answer(request: ScriptedRequest) -> Completion:
        return Completion([FIRST_ID] * request.sampling.max_tokens, [-0.5] * TOKENS, "length")

    async with asyncio.timeout(PATIENCE_S), StubServer(answer, model=StubModel(seeds=False)) as server:
        engine = ["sglang", f"actor_rollout_ref.rollout.server_urls=[{server.url}]", "generation.processes=2"]
        groups = ConfiguredGroups(words(tmp_path, *engine))
        try:
            await groups.start()
            await groups.update_weights("/weights/1", 1)
            server.weight_version = "default"
            rollouts = await asyncio.gather(*(groups.generate(PlannedGroup(at, 0, at)) for at in range(ROWS)))
            versions = [one.final.policy_versions for group in rollouts for one in group]
            assert versions == [[(0, 1)]] * ROWS * N and server.weight_version == "1"
        finally:
            await groups.close()


async def test_who_is_not_waited_for_is_cut_off_and_may_come_again(tmp_path: Path) -> None:
    async with training(tmp_path) as (groups, server):
        group = PlannedGroup(0, 0, 3)
        running = asyncio.create_task(groups.generate(group))
        await until(lambda: server.stats.in_flight == N)
        running.cancel()
        await until(lambda: server.stats.aborts == N)
        await groups.update_weights("/weights", TOKENS)
        assert len(await groups.generate(group)) == N


async def test_turns_of_a_worker_that_dies_are_kept_here() -> None:
    backend, row, kept = (
        ProcessBackend(lambda: ScriptedRecipe(loop="patient_agent")),
        load_row(3),
        list[EncodedTurn](),
    )
    rollouts = WorkerRollouts(backend, max_in_flight=4)
    key = RolloutKey(70, 5)  # the store's own
    try:
        await rollouts.start()
        turns = Turns(key, row.prompt_key, [], kept.append, RecordCodec())
        running = asyncio.create_task(rollouts.run(row, 0, turns=turns))
        await until(lambda: len(kept) == 2)
        os.kill(rollouts._executor.pids[0], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            rollout = await running
    finally:
        await rollouts.close()
    assert isinstance(rollout, Rollout) and rollout.final.metrics.engine_calls == 3
    assert [(turn.key, turn.number) for turn in kept] == [(key, 0), (key, 1), (key, 2)]


async def test_a_turn_that_comes_after_its_rollout_was_cut_off_is_not_kept() -> None:
    """Nobody would delete it, and files behind it would stay."""
    backend, row = ProcessBackend(lambda: ScriptedRecipe(loop="patient_agent")), load_row(3)
    rollouts, kept = WorkerRollouts(backend, max_in_flight=4), list[EncodedTurn]()
    try:
        await rollouts.start()
        turns = Turns(RolloutKey(70, 5), row.prompt_key, [], kept.append, RecordCodec())
        running = asyncio.create_task(rollouts.run(row, 0, turns=turns))
        await until(lambda: len(kept) == 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        rollouts.keep(EncodedTurn(RolloutKey(row.index, 0), 2, b""))  # it was on its way
        assert len(kept) == 2
    finally:
        await rollouts.close()


async def test_turns_by_weights_of_before_are_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    row, seen = load_row(3), list[list[bytes]]()

    async def recheck() -> bool:
        return True

    async def run(row: PromptRow, repeat: int, turns: Turns) -> Rollout:
        seen.append([*turns.bodies])
        turns.bodies.append(b"a turn")
        one = Trajectory([1], [2], [1], [-0.5], [], "stop", [(0, len(seen))])
        return Rollout(row.index, repeat, row.prompt_key, [one], "test")

    rollouts = WorkerRollouts(ProcessBackend(ScriptedRecipe), recheck=recheck, max_in_flight=4)
    monkeypatch.setattr(rollouts, "_run", run)
    rollouts._version = 2
    turns = Turns(RolloutKey(70, 5), row.prompt_key, [], lambda turn: None, RecordCodec())
    result = await rollouts.run(row, 0, turns=turns)
    assert isinstance(result, Rollout) and result.final.policy_versions == [(0, 2)] and seen == [[], []]
    await rollouts.close()


async def test_a_loop_that_says_no_versions_costs_one_look_at_the_servers() -> None:
    backend, looks = ProcessBackend(lambda: ScriptedRecipe(loop="deadly_agent")), list[int]()

    async def load(source: str, version: int) -> None:
        pass

    async def recheck() -> bool:
        looks.append(1)
        return False

    rollouts = WorkerRollouts(backend, recheck=recheck, max_in_flight=4)
    try:
        await rollouts.start()
        await rollouts.run(load_row(3), 0)
        assert not looks
        await rollouts.update_weights(load, "/weights", 2)
        done = await asyncio.gather(*(rollouts.run(load_row(3), repeat) for repeat in range(9)))
        assert all(isinstance(one, Rollout) for one in done) and len(looks) == 1
    finally:
        await rollouts.close()


async def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    async with training(tmp_path) as (groups, _):
        with pytest.raises(EngineError, match="processes=1"):
            await groups.update_weights(str(tmp_path), 1)


@pytest.mark.parametrize("where", ["generation.processes=2", "generation.executor=ray"])
def test_an_engine_that_no_worker_reaches_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function\.processes"):
        ConfiguredGroups(words(tmp_path, "hf", where))
