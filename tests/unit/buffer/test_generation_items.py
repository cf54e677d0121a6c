from typing import Any

from rollstream.buffer.generation_items import completed_item, failed_item
from rollstream.buffer.generation_plan import Work
from rollstream.buffer.groups import GroupSettings, judge_rewards
from rollstream.buffer.items import dump_item, parse_item
from rollstream.trajectory import Failure, PromptRow, Rollout, Trajectory

WORK = Work(3, "x", 1, 2, "r:x", "r")
ROW = PromptRow(
    3, "k", [{"role": "user", "content": "q"}], "unknown", "gt", {"level": 2}, columns={"topic": "t"}
)


def trajectory(reward: float | None, **more: Any) -> Trajectory:
    given: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "response_mask": [1, 0, 1],
        "response_logprobs": [-0.5, 0.0, -1.0],
        "messages": [*ROW.messages, {"role": "assistant", "content": "a"}],
        "finish_reason": "stop",
        "policy_versions": [(0, 6), (2, 7)],
        "reward": reward,
        **more,
    }
    return Trajectory(**given)


def rollout(*trajectories: Trajectory) -> Rollout:
    return Rollout(3, 2, "k", list(trajectories), "unknown", "gt", attempts=2)


def test_an_item_of_a_completed_rollout() -> None:
    item = completed_item(WORK, rollout(trajectory(0.5)), ROW, task_type="math")
    extra = item["extra_info"]
    assert (item["uid"], item["instance_id"], item["reward"]) == ("r:x", "x", 0.5)
    assert (extra["topic"], extra["level"], extra["label"]) == ("t", 2, "gt")
    assert (extra["epoch"], extra["rollout_index"], extra["round_number"], extra["attempts"]) == (1, 2, 1, 2)
    assert item["policy_versions"] == [[0, 6], [2, 7]] and item["policy_version"] == 6
    for encoding in ("json", "msgpack"):
        assert parse_item(dump_item(item, encoding), encoding).policy_version == 6  # type: ignore[arg-type]


def test_snapshots_come_along() -> None:
    cut = trajectory(0.5, is_snapshot=True, response_ids=[9], response_mask=[1], response_logprobs=[-1.0])
    item = completed_item(WORK, rollout(cut, trajectory(0.5)), ROW, task_type="math")
    (snapshot,) = item["snapshots"]
    assert snapshot["response_ids"] == [9] and snapshot["messages"] == cut.messages
    assert item["response_ids"] == [3, 4, 5]


def test_what_was_not_scored_is_no_zero() -> None:
    unscored = completed_item(WORK, rollout(trajectory(None)), ROW, task_type="math")
    assert unscored["reward"] is None and "failure" not in unscored["extra_info"]
    broken = trajectory(None, reward_extra={"error": "no label"})
    item = completed_item(WORK, rollout(broken), ROW, task_type="math")
    assert item["reward"] == -1.0 and item["response_ids"]
    assert item["extra_info"]["failure"] == {"error": "no label", "stage": "reward", "attempts": 2}


def test_a_failure_is_an_item_that_no_default_hook_lets_through() -> None:
    failure = Failure(3, 2, "k", 3, "engine", "EngineError: no", "…", 0.0)
    item = failed_item(WORK, failure, ROW, task_type="math")
    assert item["messages"] == ROW.messages
    assert item["extra_info"]["failure"] == {"error": "EngineError: no", "stage": "engine", "attempts": 3}
    parse_item(dump_item(item, "json"), "json")
    parse_item(dump_item(failed_item(WORK, failure, None, task_type="math"), "msgpack"), "msgpack")
    settings = GroupSettings(group_size=4, min_valid_item_size_ratio=0.5)
    assert not judge_rewards([item["reward"]] * 4, settings, timed_out=False).valid
    assert not judge_rewards([item["reward"]] * 3 + [1.0], settings, timed_out=False).valid
