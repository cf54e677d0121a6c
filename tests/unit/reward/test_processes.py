"""A reward function in processes of its own: what it gives, and what it costs when one goes."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollstream.errors import ConfigError, RewardError
from rollstream.reward.base import scored_row
from rollstream.reward.custom import load_reward
from rollstream.reward.processes import ProcessReward
from rollstream.trajectory import PromptRow
from tests.unit.store.export.artifacts import trajectory

SOURCE = """
import os, signal, time

def compute_score(data_source, solution_str, ground_truth, extra_info, factor=1):
    if solution_str == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "raises":
        raise ValueError("no number")
    if solution_str == "hangs":
        time.sleep(60)
    return {"score": factor * len(solution_str), "pid": os.getpid(), "told": extra_info["told"]}

def steps(data_source, solution_str, ground_truth, extra_info, trajectory):
    trajectory.messages.clear()
    return {"score": 0, "steps": [len(ids) for _, ids in trajectory.generations()]}

def ranks(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": sorted(solution_strs).index(one), "pid": os.getpid()} for one in solution_strs]

async def waits(data_source, solution_str, ground_truth, extra_info):
    return 1.5
"""


def row(index: int = 0) -> PromptRow:
    return PromptRow(index, "0" * 32, [], "sums", "12", {"told": index})


@asynccontextmanager
async def rewards(
    folder: Path, processes: int = 2, *, name: str = "compute_score", timeout: float = 30.0
) -> AsyncIterator[ProcessReward]:
    (folder / "reward.py").write_text(SOURCE)
    kwargs = {"factor": 2} if name == "compute_score" else {}
    reward = ProcessReward(str(folder / "reward.py"), name, kwargs, timeout, processes)
    try:
        yield reward
    finally:
        reward.close()


async def test_it_scores_as_here_and_elsewhere(tmp_path: Path) -> None:
    async with rewards(tmp_path) as reward:
        scores = await asyncio.gather(*(reward.score(row(index), "x" * index) for index in range(8)))
        assert [score.reward for score in scores] == [2.0 * index for index in range(8)]
        assert [score.extra["told"] for score in scores] == [*range(8)]
        pids = {score.extra["pid"] for score in scores}
        assert len(pids) == 2 and os.getpid() not in pids
        here = load_reward(str(tmp_path / "reward.py"), reward_kwargs={"factor": 2})
        assert reward.source_digest == here.source_digest and reward.label == here.label
        here.close()
    async with rewards(tmp_path, 1, name="waits") as reward:
        assert (await reward.score(row(), "")).reward == 1.5


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_function_that_asks_for_the_trajectory_has_a_copy(tmp_path: Path, processes: int) -> None:
    async with rewards(tmp_path, 1, name="steps") as elsewhere:
        here = load_reward(str(tmp_path / "reward.py"), "steps")
        scored = trajectory(reward=None)
        told = scored_row(row(), scored)
        score = await (elsewhere if processes else here).score(told, "")
        here.close()
    assert score == (0.0, {"steps": [2.0, 2.0]}) and scored == trajectory(reward=None)
    with pytest.raises(ConfigError, match="trajectory comes from the prompt row or the rollout"):
        load_reward(str(tmp_path / "reward.py"), "steps", {"trajectory": 1})


async def test_a_function_of_groups_is_there_too(tmp_path: Path) -> None:
    async with rewards(tmp_path, 1, name="ranks") as reward:
        assert reward.sees_group and await reward.score(row(), "alone") == (None, {})
        scores = await reward.score_group([row(0), row(1)], ["b", "a"])
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert {score.extra["pid"] for score in scores}.isdisjoint({os.getpid()})


async def test_one_that_fails_or_brings_its_process_down_costs_no_other(tmp_path: Path) -> None:
    async with rewards(tmp_path) as reward:
        answers = ["1", "killed", "22", "raises", "333"]
        results = await asyncio.gather(
            *(reward.score(row(at), answer) for at, answer in enumerate(answers)), return_exceptions=True
        )
        errors = {
            answer: one for answer, one in zip(answers, results, strict=True) if isinstance(one, Exception)
        }
        assert errors.keys() == {"killed", "raises"} and all(
            isinstance(one, RewardError) for one in errors.values()
        )
        assert "was killed by SIGKILL" in str(errors["killed"]) and "row 1 (sums)" in str(errors["killed"])
        assert "raised ValueError: no number" in str(errors["raises"])
        assert [await reward.score(row(), "1" * at) for at in range(3)]


async def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    async with rewards(tmp_path, 1, timeout=1.0) as reward:
        with pytest.raises(RewardError, match="took longer than 1 seconds"):
            await reward.score(row(), "hangs")


async def test_one_that_nobody_waits_for_is_ended_too(tmp_path: Path) -> None:
    async with rewards(tmp_path, 1) as reward:
        waiting = asyncio.ensure_future(reward.score(row(), "hangs"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        assert (await reward.score(row(), "1")).reward == 2.0


def test_what_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="custom_reward_function"):
        ProcessReward(str(tmp_path / "none.py"), "compute_score", {}, 1.0, 1)
