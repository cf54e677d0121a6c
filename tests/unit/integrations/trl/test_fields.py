"""Rollouts as TRL's fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import GroupFailedError, TrainingError
from rollstream.integrations.trl.failures import FailedGroups, failure_of, stand_in
from rollstream.integrations.trl.fields import env_reward, take_slice, to_fields
from rollstream.integrations.trl.row_numbers import RowNumbers
from rollstream.training.group import token_versions
from rollstream.training.plan import PlannedGroup
from rollstream.trajectory import Failure, PromptRow, Rollout, Trajectory


def trajectory(**changed: object) -> Trajectory:
    values: dict[str, object] = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "response_mask": [1, 0, 1],
        "response_logprobs": [-0.5, 0.0, -0.25],
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        "finish_reason": "stop",
        "reward": 0.5,
    }
    return Trajectory(**{**values, **changed})  # type: ignore[arg-type]


def rollout(repeat: int, *trajectories: Trajectory) -> Rollout:
    return Rollout(7, repeat, "key", list(trajectories) or [trajectory()], "source")


def test_ids_masks_and_logprobs_stay_as_they_are() -> None:
    fields = to_fields([rollout(0), rollout(1)], end_id=9)
    assert fields["prompt_ids"] == [[1, 2]] * 2
    assert fields["completion_ids"] == [[3, 4, 5]] * 2
    assert fields["env_mask"] == [[1, 0, 1]] * 2
    assert fields["logprobs"] == [[-0.5, 0.0, -0.25]] * 2
    assert env_reward(prompts=[], **fields) == [0.5, 0.5]


def test_an_empty_response_is_one_masked_end_token() -> None:
    empty = trajectory(response_ids=[], response_mask=[], response_logprobs=[], reward=None)
    fields = to_fields([rollout(0, empty)], end_id=9)
    assert (fields["completion_ids"], fields["env_mask"], fields["logprobs"]) == ([[9]], [[0]], [[0.0]])
    assert fields["env_reward"] == [None]


def test_a_rollout_that_failed_is_masked_and_has_no_reward() -> None:
    row = PromptRow(7, "key", [{"role": "user", "content": "?"}], "source")
    failed = stand_in(row, Failure(7, 1, "key", 3, "agent", "ValueError: no", "…", 0.0))
    assert token_versions([failed]) == []  # older than no stamp
    fields = to_fields([rollout(0), failed], end_id=9)
    assert fields["env_failed"] == [False, True]
    assert (fields["prompt_ids"][1], fields["completion_ids"][1], fields["env_mask"][1]) == ([9], [9], [0])
    assert fields["env_reward"] == [0.5, None]
    assert failure_of(rollout(0)) is None and "after 3 attempts, ValueError: no" in (failure_of(failed) or "")


def test_groups_that_fail_whole_one_after_the_other_are_an_error() -> None:
    row = PromptRow(7, "key", [], "source")
    failed = stand_in(row, Failure(7, 1, "key", 3, "agent", "ValueError: no", "…", 0.0))
    group = PlannedGroup(0, 0, 7)
    judged = FailedGroups(2)
    for _ in range(3):
        judged.judge(group, [failed, failed])
        judged.judge(group, [failed, failed])
        judged.judge(group, [failed, rollout(0)])  # one is left
    judged.judge(group, [failed])
    judged.judge(group, [failed])
    with pytest.raises(GroupFailedError, match=r"3 groups in a row failed whole .* ValueError: no"):
        judged.judge(group, [failed])


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=6), max_size=6), st.integers(0, 9))
def test_no_two_rollouts_have_one_number(calls: list[list[str]], first: int) -> None:
    numbers, seen = RowNumbers(first), []
    for call in calls:
        numbered = numbers.number([PromptRow(0, key, [], "source") for key in call])
        assert [row.prompt_key for row, _ in numbered] == call
        seen += [(row.index, repeat, row.prompt_key) for row, repeat in numbered]
    assert len({(index, repeat) for index, repeat, _ in seen}) == len(seen)
    assert len({(index, key) for index, _, key in seen}) == len({key for _, _, key in seen})
    assert all(index >= first for index, _, _ in seen)


def test_snapshots_and_missing_logprobs_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"\(7, 3\) has 2 trajectories"):
        to_fields([rollout(3, trajectory(is_snapshot=True), trajectory())], end_id=9)
    with pytest.raises(TrainingError, match="no log-probs"):
        to_fields([rollout(0, trajectory(response_logprobs=None))], end_id=9)


def test_slices_are_consecutive_and_whole() -> None:
    fields = to_fields([rollout(0, trajectory(reward=float(i))) for i in range(6)], end_id=9)
    dealt = [take_slice(fields, rank, 3)["env_reward"] for rank in range(3)]
    assert dealt == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    with pytest.raises(TrainingError, match="evenly"):
        take_slice(fields, 0, 4)
