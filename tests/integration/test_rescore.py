"""A run whose reward is changed in the middle goes on with `generation.rescore` (and is refused without it)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.errors import IdentityMismatchError, RewardError
from rollstream.generation.run import run_generation
from rollstream.store.manifest import require_manifest
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.integration.test_generation import PAIRS, config, write_sums

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {score}
"""
FIRST, SECOND = 'extra_info["a"]', 'extra_info["a"] + 100.0'


def in_file(folder: Path, score: str) -> dict[str, Any]:
    path = folder / "reward.py"
    path.write_text(REWARD.format(score=score))
    return {"custom_reward_function__path": str(path)}


def rewards(root: Path) -> list[tuple[int, float | None]]:
    """Prompt row and reward of each row of the artifact."""
    table = pq.read_table(root / "trajectories.parquet", columns=["index", "reward"])
    return list(zip(table["index"].to_pylist(), table["reward"].to_pylist(), strict=True))


def test_a_run_goes_on_with_another_reward(tmp_path: Path) -> None:
    root, rows = tmp_path / "run", tmp_path / "sums.jsonl"
    write_sums(rows, PAIRS[:3])
    run_generation(config(root, rows, **in_file(tmp_path, FIRST)))
    recorded = [(index, float(PAIRS[index][0])) for index in range(3) for _ in range(2)]
    assert rewards(root) == recorded

    write_sums(rows, PAIRS[:5])
    changed = {**in_file(tmp_path, SECOND), "generation__resume": "extend"}
    before = (root / "run.json").read_bytes()
    with pytest.raises(IdentityMismatchError, match=r"generation\.rescore=true"):
        run_generation(config(root, rows, **changed))
    assert (root / "run.json").read_bytes() == before and rewards(root) == recorded

    result = run_generation(config(root, rows, generation__rescore=True, **changed))
    wanted = [(index, PAIRS[index][0] + 100.0) for index in range(5) for _ in range(2)]
    mean = pytest.approx(sum(reward for _, reward in wanted) / 10)
    assert rewards(root) == wanted
    assert (result.generated, result.completed, result.mean_reward, result.exit_code) == (4, 10, mean, 0)
    assert orjson.loads((root / "checkpoint.json").read_bytes())["mean_reward"] == mean
    assert read_status(root).mean_reward == mean and read_status(root).stale == []
    assert validate_run(root).sound

    again = run_generation(config(root, rows, **changed))
    assert (again.generated, again.mean_reward) == (0, mean), "the run has this reward now"
    back = {**in_file(tmp_path, FIRST), "generation__rescore": True, "generation__resume": "extend"}
    run_generation(config(root, rows, **back))
    assert rewards(root) == [(index, float(PAIRS[index][0])) for index in range(5) for _ in range(2)]


def test_a_reward_in_memory_and_one_that_fails_on_all(tmp_path: Path) -> None:
    root, rows = tmp_path / "run", tmp_path / "sums.jsonl"
    write_sums(rows, PAIRS[:2])
    run_generation(config(root, rows), reward=lambda **row: 1.0)
    fails: Callable[..., float] = lambda **row: 1.0 / 0.0  # noqa: E731
    with pytest.raises(RewardError, match="division by zero"):
        run_generation(config(root, rows, generation__rescore=True), reward=fails)
    assert require_manifest(root).scores is None
    write_sums(rows, PAIRS[:3])
    changed = {"generation__rescore": True, "generation__resume": "extend"}
    result = run_generation(config(root, rows, **changed), reward=lambda **row: 2.0)
    assert result.generated == 2 and rewards(root) == [(index, 2.0) for index in range(3) for _ in range(2)]


def test_a_reward_that_sees_groups_takes_over(tmp_path: Path) -> None:
    root, rows = tmp_path / "run", tmp_path / "sums.jsonl"
    write_sums(rows, PAIRS[:2])
    run_generation(config(root, rows, **in_file(tmp_path, FIRST)))

    def ranks(
        data_sources: list[str], solution_strs: list[str], ground_truths: Any, extra_infos: Any
    ) -> list[float]:
        return [extra_infos[0]["a"] + float(at) for at in range(len(solution_strs))]

    write_sums(rows, PAIRS[:3])
    changed = {"generation__rescore": True, "generation__resume": "extend"}
    result = run_generation(config(root, rows, **changed), reward=ranks)
    wanted = [(index, PAIRS[index][0] + float(repeat)) for index in range(3) for repeat in range(2)]
    assert rewards(root) == wanted and (result.generated, result.unscored, result.exit_code) == (2, 0, 0)
    assert result.mean_reward == pytest.approx(sum(reward for _, reward in wanted) / 6)
    assert read_status(root).stale == [] and validate_run(root).sound
    again = run_generation(config(root, rows), reward=ranks)
    assert (again.generated, again.mean_reward) == (0, result.mean_reward) and rewards(root) == wanted
    with pytest.raises(IdentityMismatchError, match=r"generation\.rescore=true"):
        run_generation(config(root, rows, **in_file(tmp_path, FIRST)))
