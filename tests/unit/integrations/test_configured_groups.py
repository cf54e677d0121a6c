"""Groups by configuration keys: what is refused before anything is generated."""

import json
import threading
from pathlib import Path

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, TrainingError
from rollstream.integrations.configured_groups import ConfiguredGroups
from rollstream.training import BatchesAhead, ShuffledPlan


def words(folder: Path, *more: str) -> list[str]:
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        "actor_rollout_ref.rollout.name=openvino",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.response_length=4",
        f"data.train_files={folder / 'rows.jsonl'}",
        *more,
    ]


def test_rows_are_those_that_a_run_would_visit(tmp_path: Path) -> None:
    groups = ConfiguredGroups(words(tmp_path, "data.shuffle=true", "data.seed=4"))
    assert len(groups.rows) == 6
    visited = [groups.row(index).index for index in range(6)]
    assert visited == list(groups.rows) and sorted(visited) == list(range(6)) != visited


def test_what_nothing_scores_is_refused_at_start(tmp_path: Path) -> None:
    groups = ConfiguredGroups(words(tmp_path))
    batches = BatchesAhead(ShuffledPlan(len(groups.rows)), groups, groups_per_step=2)
    with pytest.raises(ConfigError, match="nothing gives a reward"):
        batches.start()
    assert groups.engine is None


def test_raw_log_probs_of_another_distribution_are_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**_):\n    return 1.0\n")
    scored = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    rollout = "actor_rollout_ref.rollout"

    def first(*more: str, **row: object) -> list[str]:
        given = words(tmp_path, scored, *more)
        rows = [{"prompt": f"{number} + 1 =", "answer": "5", **row} for number in range(6)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        groups = ConfiguredGroups(given)
        with BatchesAhead(ShuffledPlan(len(groups.rows)), groups, groups_per_step=2) as batches:
            return [rollout.final.finish_reason for rollout in batches.next_batch(120).rollouts]

    with pytest.raises(ConfigError, match=r"temperature.*0\.7"):
        first(f"{rollout}.temperature=0.7")
    with pytest.raises(TrainingError, match=r"top_k.*3"):
        first(sampling_params={"top_k": 3})
    assert first(f"{rollout}.temperature=0.7", f"{rollout}.calculate_log_probs=false")


def test_no_thread_of_the_reward_is_left(tmp_path: Path) -> None:
    before = threading.enumerate()
    (tmp_path / "reward.py").write_text("def compute_score(**_):\n    return 1.0\n")
    groups = ConfiguredGroups(words(tmp_path, f"custom_reward_function.path={tmp_path / 'reward.py'}"))
    with BatchesAhead(ShuffledPlan(len(groups.rows)), groups, groups_per_step=2) as batches:
        assert batches.next_batch(120).groups[0].rewards == [1.0, 1.0]
    for thread in threading.enumerate():
        if thread.name == "rollstream-reward" and thread not in before:
            thread.join(10)
            assert not thread.is_alive()


def test_rows_with_a_rule_are_scored_by_it(tmp_path: Path) -> None:
    given = words(tmp_path)
    rows = [{"prompt": f"{n} + 1 =", "answer": "5", "data_source": "exact_match"} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    groups = ConfiguredGroups(given, first=1)
    with BatchesAhead(ShuffledPlan(len(groups.rows)), groups, groups_per_step=2) as batches:
        batch = batches.next_batch(120)
        assert [len(group.rollouts) for group in batch.groups] == [1, 1]
        assert all(reward is not None for group in batch.groups for reward in group.rewards)
