"""Rollouts as TRL's fields."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    with_added,
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


def test_tokens_may_have_more_advantage_than_their_row() -> None:
    output = {
        "completion_ids": torch.zeros(3, 4, dtype=torch.long),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
    }
    grown = with_added(output, [[0.5, 0.0, 2.0], []])
    assert grown["advantages"].tolist() == [[1.5, 1.0, 3.0, 1.0], [-1.0] * 4, [0.5] * 4]


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


NAN = float("nan")
EPSILON = 1e-4


def average(values: list[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else NAN


def deviation(values: list[float]) -> float:
    known = [value for value in values if value == value]
    if len(known) < 2:
        return NAN
    mean = average(known)
    return math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))


def weighted(values: list[float], weights: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True) if value == value)


def reference(
    finals: list[list[float]],
    snapshots: list[tuple[int, float | None]],
    *,
    weights: list[float],
    size: int,
    scale: str,
    aggregation: str,
) -> list[float]:
    """TRL's advantages of final trajectories and snapshots, where each group has all rewards of its own."""
    rows = [list(values) for values in finals]
    groups = [place // size for place in range(len(finals))]
    counts = [True] * len(finals)
    silent = [False] * len(finals)
    for place, reward in snapshots:
        outcome = finals[place][0]
        rows.append([NAN if reward is None else reward, *finals[place][1:]])
        groups.append(place // size)
        counts.append(reward is not None and reward != outcome)
        silent.append(reward is None and outcome == outcome)

    def peers(row: int, of: list[Any]) -> list[Any]:
        return [
            value
            for value, group, counted in zip(of, groups, counts, strict=True)
            if counted and group == groups[row]
        ]

    if aggregation == "normalize_then_sum":
        parts = []
        for row, values in enumerate(rows):
            columns = list(zip(*peers(row, rows), strict=True))
            parts.append(
                [
                    (value - average(column)) / (deviation(column) + EPSILON)
                    for value, column in zip(values, columns, strict=True)
                ]
            )
    else:
        parts = rows
    totals = [
        weighted(part, weights) if any(value == value for value in values) else NAN
        for part, values in zip(parts, rows, strict=True)
    ]
    everything = [total for total, counted in zip(totals, counts, strict=True) if counted]
    advantages = []
    for row, total in enumerate(totals):
        group = peers(row, totals)
        if aggregation == "normalize_then_sum":
            advantage = (total - average(everything)) / (deviation(everything) + EPSILON)
        elif scale == "none":
            advantage = total - average(group)
        else:
            compared = everything if scale == "batch" else group
            advantage = (total - average(group)) / (deviation(compared) + EPSILON)
        advantages.append(0.0 if silent[row] or advantage != advantage else advantage)
    return advantages


REWARDS = st.sampled_from([0.0, 1.0, 0.99, 0.9, -2.048, 0.5])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[tuple[int, float | None]], list[float], int]:
    size, count = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    functions = draw(st.integers(1, 2))
    equal = draw(st.booleans())  # as most groups are
    finals = []
    for _ in range(size * count):
        value = 1.0 if equal else draw(REWARDS)
        finals.append([value, *(draw(REWARDS | st.just(NAN)) for _ in range(functions - 1))])
    for failed in draw(st.sets(st.integers(0, len(finals) - 1), max_size=size)):
        finals[failed] = [NAN] * functions
    places = sorted(draw(st.lists(st.integers(0, len(finals) - 1), min_size=1, max_size=6)))
    own = st.none() | REWARDS
    snapshots = [
        (
            place,
            finals[place][0] if finals[place][0] == finals[place][0] and draw(st.booleans()) else draw(own),
        )
        for place in places
    ]
    weights = [draw(st.sampled_from([1.0, 0.5])) for _ in range(functions)]
    return finals, snapshots, weights, size


def advantages(
    finals: list[list[float]],
    snapshots: list[tuple[int, float | None]],
    *,
    weights: list[float],
    size: int,
    scale: str,
    aggregation: str = "sum_then_normalize",
) -> list[float]:
    row = Row([1], [2], [1], [0.0])
    found: list[float] = snapshot_advantages(
        torch.tensor(finals),
        [Snapshot(place, reward, row) for place, reward in snapshots],
        weights=torch.tensor(weights),
        group_size=size,
        scale=scale,
        aggregation=aggregation,
    ).tolist()
    return found


@pytest.mark.parametrize(
    ("scale", "aggregation"),
    [
        ("group", "sum_then_normalize"),
        ("batch", "sum_then_normalize"),
        ("none", "sum_then_normalize"),
        ("group", "normalize_then_sum"),
    ],
)
@given(batch=batches())
def test_advantages_are_those_of_the_formula_over_all_rewards_of_the_group(
    scale: str, aggregation: str, batch: Any
) -> None:
    finals, snapshots, weights, size = batch
    options: dict[str, Any] = {"weights": weights, "size": size, "scale": scale, "aggregation": aggregation}
    wanted = reference(finals, snapshots, **options)
    # In single precision the deviation of equal rewards is not quite 0: an error of 1e-7 over 1e-4.
    assert advantages(finals, snapshots, **options) == pytest.approx(wanted, abs=1e-2, rel=2e-3)


@pytest.mark.parametrize("finals", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.99], [1.0, 1.0, NAN, NAN]])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_a_snapshots_own_reward_in_a_group_of_nearly_equal_ones_is_bounded(
    finals: list[float], scale: str
) -> None:
    rewards = [[value] for value in finals]
    found = advantages(rewards, [(0, -0.5)], weights=[1.0], size=4, scale=scale)
    assert found[-1] < -1 and max(map(abs, found)) < 2  # (n - 1) / sqrt(n) with n = 5


def test_a_snapshot_of_the_outcome_changes_no_advantage() -> None:
    rewards = [[0.0], [1.0], [1.0], [1.0]]
    alone = advantages(rewards, [(1, 1.0)], weights=[1.0], size=4, scale="group")
    assert alone[:4] == pytest.approx([-1.5, 0.5, 0.5, 0.5], abs=1e-3)  # TRL's
    assert alone[4] == alone[1]


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
