"""Rollouts as TRL's fields."""

from typing import Any

import pytest

from rollstream.errors import TrainingError
from rollstream.integrations.trl.groups import failure_of, stand_in
from rollstream.integrations.trl.rows import (
    Row,
    Snapshot,
    append_rows,
    env_reward,
    snapshot_advantages,
    take_slice,
    to_rows,
)
from rollstream.training.group import token_versions
from rollstream.trajectory import Failure, PromptRow, Rollout, Trajectory

torch = pytest.importorskip("torch")
pytest.importorskip("trl")


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
    fields = to_rows([rollout(0), rollout(1)], end_id=9).fields
    assert fields["prompt_ids"] == [[1, 2]] * 2
    assert fields["completion_ids"] == [[3, 4, 5]] * 2
    assert fields["env_mask"] == [[1, 0, 1]] * 2
    assert fields["logprobs"] == [[-0.5, 0.0, -0.25]] * 2
    assert env_reward(prompts=[], **fields) == [0.5, 0.5]


def test_an_empty_response_is_one_masked_end_token() -> None:
    empty = trajectory(response_ids=[], response_mask=[], response_logprobs=[], reward=None)
    fields = to_rows([rollout(0, empty)], end_id=9).fields
    assert (fields["completion_ids"], fields["env_mask"], fields["logprobs"]) == ([[9]], [[0]], [[0.0]])
    assert fields["env_reward"] == [None]


def test_a_rollout_that_failed_is_masked_and_has_no_reward() -> None:
    row = PromptRow(7, "key", [{"role": "user", "content": "?"}], "source")
    failed = stand_in(row, Failure(7, 1, "key", 3, "agent", "ValueError: no", "…", 0.0))
    assert token_versions([failed]) == []  # older than no stamp
    fields = to_rows([rollout(0), failed], end_id=9).fields
    assert fields["env_failed"] == [False, True]
    assert (fields["prompt_ids"][1], fields["completion_ids"][1], fields["env_mask"][1]) == ([9], [9], [0])
    assert fields["env_reward"] == [0.5, None]
    assert failure_of(rollout(0)) is None and "after 3 attempts, ValueError: no" in (failure_of(failed) or "")


def test_missing_logprobs_are_refused() -> None:
    with pytest.raises(TrainingError, match="no log-probs"):
        to_rows([rollout(0, trajectory(response_logprobs=None))], end_id=9)


def test_a_snapshot_is_a_row_of_its_own() -> None:
    snapshot = trajectory(is_snapshot=True, reward=-1.0, response_ids=[6], response_mask=[1])
    snapshot.response_logprobs = [-2.0]
    rows = to_rows([rollout(0), rollout(1, snapshot, trajectory())], end_id=9)
    assert rows.fields["completion_ids"] == [[3, 4, 5]] * 2 and rows.trained == 3
    assert rows.snapshots == [Snapshot(1, -1.0, Row([1, 2], [6], [1], [-2.0]))]
    assert rows.figures["rollstream/trajectories"] == 1.5


def advantages(
    finals: list[list[float]], *snapshots: tuple[int, float | None], **changed: Any
) -> list[float]:
    """Of snapshots (rollout, reward) beside final rewards `[N][F]`, in groups of two."""
    row = Row([1], [2], [1], [0.0])
    rewards = torch.tensor(finals)
    found = snapshot_advantages(
        rewards,
        [Snapshot(place, reward, row) for place, reward in snapshots],
        **{
            "weights": torch.ones(rewards.shape[1]),
            "group_size": 2,
            "scale": "group",
            "aggregation": "sum_then_normalize",
            **changed,
        },
    )
    return [round(value, 3) for value in found.tolist()]


NAN = float("nan")


@pytest.mark.parametrize(
    ("finals", "snapshots", "changed", "wanted"),
    [
        ([[0.0], [1.0], [4.0], [8.0]], [(1, 1.0), (2, 4.0)], {"scale": "none"}, [0.5, -2.0]),  # outcome
        ([[0.0], [1.0]], [(0, 2.0), (1, None)], {"scale": "none"}, [1.5, 0.0]),  # own; none
        ([[0.0], [1.0]], [(1, 1.0)], {}, [0.707]),
        ([[0.0], [1.0], [4.0], [8.0]], [(1, 1.0)], {"scale": "batch"}, [0.139]),
        ([[0.0, 3.0], [1.0, 1.0]], [(0, 1.0)], {"scale": "none"}, [1.5]),  # other functions are the rollout's
        ([[NAN, 3.0], [NAN, 1.0]], [(0, None)], {"scale": "none"}, [1.0]),  # only others score
        ([[NAN], [1.0]], [(0, None), (1, 1.0)], {}, [0.0, 0.0]),  # failed; alone in its group
        (  # which counts in the batch's deviation, as TRL has it
            [[NAN], [3.0], [0.0], [1.0]],
            [(1, 3.0), (3, 1.0)],
            {"aggregation": "normalize_then_sum"},
            [0.0, 1.0],
        ),
    ],
)
def test_advantages_of_snapshots(
    finals: list[list[float]], snapshots: Any, changed: dict[str, Any], wanted: list[float]
) -> None:
    assert advantages(finals, *snapshots, **changed) == pytest.approx(wanted, abs=2e-3)


def test_rows_are_appended_padded_as_trl_pads() -> None:
    output = {
        "prompt_ids": torch.tensor([[1, 2]]),
        "prompt_mask": torch.tensor([[1, 1]]),
        "completion_ids": torch.tensor([[3, 4]]),
        "completion_mask": torch.tensor([[1, 0]]),
        "tool_mask": torch.tensor([[1, 1]]),
        "sampling_per_token_logps": torch.tensor([[-0.5, 0.0]]),
    }
    grown = append_rows(output, [Row([7], [5, 6, 5], [1, 0, 1], [-1.0, 0.0, -2.0])], pad_id=0, multiple=2)
    assert {name: value.tolist() for name, value in grown.items()} == {
        "prompt_ids": [[1, 2], [0, 7]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[3, 4, 0, 0], [5, 6, 5, 0]],
        "completion_mask": [[1, 0, 0, 0], [1, 1, 1, 0]],
        "tool_mask": [[1, 1, 1, 1], [1, 0, 1, 1]],
        "sampling_per_token_logps": [[-0.5, 0.0, 0.0, 0.0], [-1.0, 0.0, -2.0, 0.0]],
    }


def test_slices_are_consecutive_and_whole() -> None:
    fields = to_rows([rollout(0, trajectory(reward=float(i))) for i in range(6)], end_id=9).fields
    dealt = [take_slice(fields, rank, 3)["env_reward"] for rank in range(3)]
    assert dealt == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    with pytest.raises(TrainingError, match="evenly"):
        take_slice(fields, 0, 4)
