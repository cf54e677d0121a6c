"""Rewards that are missing: which are counted, and which end the training."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from rollstream.errors import ConfigError, TrainingError
from rollstream.integrations.trl.environment import RolloutEnvironment
from tests.compat.trl.parts import environment, rows, trainer

ROWS = 10


def scored_by(folder: Path, body: str) -> Any:
    """An environment whose reward has this body."""
    made = environment(folder)
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    (folder / "reward.py").write_text(
        "import itertools\n\ncalls = itertools.count()\n\n"
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{lines}\n"
    )
    return made


def test_a_reward_that_always_raises_ends_the_training(tmp_path: Path) -> None:
    made = trainer(tmp_path, rows(ROWS), env=scored_by(tmp_path, 'raise KeyError("my reward")'), max_steps=2)
    with pytest.raises(TrainingError, match=r"none of the batch's 8 rollouts .*KeyError.*my reward"):
        made.train()
    assert made.state.global_step == 0


def test_rollouts_without_a_reward_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = 'if next(calls) % 4 == 0:\n    raise KeyError("my reward")\nreturn 1.0'
    made = trainer(
        tmp_path, rows(ROWS), env=scored_by(tmp_path, some), max_steps=2, num_steps_async=0, logging_steps=2
    )
    made.train()
    (logged,) = [entry for entry in made.state.log_history if "rollstream/unscored" in entry]
    assert logged["rollstream/unscored"] == 0.25
    assert "rollouts not scored" in capsys.readouterr().err
    assert "25.0 %" in made.step_times.table()


def test_what_other_functions_score_is_scored(tmp_path: Path) -> None:
    """No reward of the environment's own: fine when there are others, an error at start when not."""

    def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    alone = RolloutEnvironment(["actor_rollout_ref.rollout.name=hf", "data.max_prompt_length=300"])
    made = trainer(tmp_path, rows(ROWS), env=alone, max_steps=1, reward_funcs=[by_length])
    made.train()
    (logged,) = [entry for entry in made.state.log_history if "rollstream/unscored" in entry]
    assert logged["rollstream/unscored"] == 0 and logged["reward"] > 0
    with pytest.raises(ConfigError, match=r"nothing gives a reward.*unknown.*reward_funcs"):
        trainer(tmp_path, rows(ROWS), env=alone, max_steps=1).train()


def test_a_reward_that_sees_groups(tmp_path: Path) -> None:
    """Each group is compared once, evaluations too, and its store has what a restart and a replay need."""
    env = environment(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert len(set(ground_truths)) == 1 and len(solution_strs) == 2\n"
        '    return [{"score": float(at), "of": len(solution_strs)} for at in range(len(solution_strs))]\n'
    )
    saved = {"save_strategy": "steps", "save_steps": 1, "num_generations_eval": 2}
    made = trainer(tmp_path, rows(ROWS), env=env, max_steps=2, eval_dataset=rows(4), **saved)
    made.train()
    assert made.evaluate()["eval_reward"] == pytest.approx(0.5)
    assert [entry["reward"] for entry in made.state.log_history if "reward" in entry] == [0.5, 0.5]
    for output in made.outputs:
        assert sorted(output["advantages"].sign().tolist()) == [-1.0] * 4 + [1.0] * 4
    replayed = trainer(
        tmp_path / "again",
        rows(ROWS),
        env=env,
        max_steps=2,
        rollout_replay=str(tmp_path / "out" / "rollouts"),
    )
    replayed.train()
    assert [one["advantages"].tolist() for one in replayed.outputs] == [
        one["advantages"].tolist() for one in made.outputs[:2]
    ]
