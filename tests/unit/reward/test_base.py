from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rollstream.errors import RewardError
from rollstream.reward.base import FunctionReward, read_score
from rollstream.rollout.group_reward import score_group
from rollstream.rollout.worker import score_trajectories
from rollstream.trajectory import PromptRow, Rollout
from tests.unit.store.export.artifacts import trajectory

RING: list[Any] = []
RING.append(RING)


class Unshowable(Exception):
    """Neither its `repr` nor its `str` can be had."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


@pytest.mark.parametrize(
    ("raised", "said"), [(ValueError("\ud800"), r"\\ud800"), (Unshowable(), "cannot be shown")]
)
async def test_what_cannot_be_stored_of_an_error(raised: Exception, said: str) -> None:
    def fails(**_: Any) -> float:
        raise raised

    reward = FunctionReward(fails, label="fails", source_digest="")
    with pytest.raises(RewardError, match=rf"raised {type(raised).__name__}: .*{said}") as caught:
        await reward.score(PromptRow(0, "", [], "", None, {}), "")
    assert str(caught.value).encode()
    reward.close()


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
    ],
)
def test_numbers(returned: Any, reward: float) -> None:
    for score in (read_score(returned), read_score({"score": returned})):
        assert score == (reward, {})
        assert type(score.reward) is float


def test_a_dict() -> None:
    returned = {
        "score": np.float64(0.5),
        "acc": np.bool_(True),
        "parts": (1, np.arange(2)),
        "nan": float("nan"),
        "inner": {1: None, "text": "x"},
    }
    extra = {"acc": True, "parts": [1, [0, 1]], "nan": None, "inner": {"1": None, "text": "x"}}
    assert read_score(returned) == (0.5, extra)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"returned None \(NoneType\), want a number or a dict with score"),
        ("1.0", r"returned '1.0' \(str\)"),
        ([1.0], r"returned \[1.0\] \(list\)"),
        (np.array([1.0]), "ndarray"),
        (Fraction(1, 2), "Fraction"),
        (float("nan"), "returned nan, want a finite number"),
        (np.float32("inf"), "returned inf, want a finite number"),
        (10**400, "too large"),
        ({"acc": 1}, "returned a dict without score; its keys are: acc"),
        ({"score": None}, "returned a score of None"),
        ({"score": float("-inf")}, "returned a score of -inf"),
        (Unshowable(), r"returned <.*Unshowable object at .*\(Unshowable\)"),
        ("\ud800", r"returned '.ud800' \(str\)"),
    ],
)
def test_what_is_no_score(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read_score(returned)


def test_steps_and_tokens() -> None:
    returned = {"score": 1, "steps": np.array([1, 0.5]), "tokens": (True, np.float32(0.25))}
    assert read_score(returned) == (1.0, {"steps": [1.0, 0.5], "tokens": [1.0, 0.25]})
    assert read_score({"score": 1, "steps": 3}) == (1.0, {"steps": 3}), "a count is no list of rewards"
    for wrong, message in (
        ([0.0, float("nan")], "steps with nan, want a finite"),
        ([None], "steps with None"),
        ([[1.0]], r"steps with \[1.0\]"),
    ):
        with pytest.raises(RewardError, match=message):
            read_score({"score": 1, "steps": wrong})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"steps": [1.0]}, "1 steps for 2 turns of the model"),
        ({"tokens": [0.0] * 4}, "4 tokens for 5 tokens of the response"),
        ({"steps": [1.0, 2.0], "tokens": [0.0] * 5}, None),
        ({"steps": 7}, None),
    ],
)
async def test_counts_that_do_not_fit_are_failures_of_the_reward(
    extra: dict[str, Any], message: str | None
) -> None:
    reward = FunctionReward(lambda **_: {"score": 1, **extra}, label="it", source_digest="")
    scored = trajectory(reward=None)
    row = PromptRow(0, "", [], "", None, {})
    await score_trajectories(reward, row, [scored], decode=lambda ids: "", snapshots="outcome")
    reward.close()
    if message is None:
        assert (scored.reward, scored.reward_extra) == (1.0, extra)
    else:
        assert scored.reward is None and message in scored.reward_extra["error"]
        assert scored.reward_extra.keys() == {"error"}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, {"score": 0, "why": "worse"}], None),
        (np.array([1.0, 0.0]), None),
        ([1.0], r"returned \[1.0\], want a list of 2 scores"),
        (1.0, "want a list of 2 scores"),
        ([1.0, float("nan")], "returned nan"),
    ],
)
async def test_a_function_of_groups_scores_each_rollout(returned: Any, message: str | None) -> None:
    seen: list[dict[str, Any]] = []

    def compare(
        data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, trajectories: Any
    ) -> Any:
        seen.append(locals())
        return returned

    reward = FunctionReward(compare, label="it", source_digest="")
    rollouts = [Rollout(3, repeat, "", [trajectory(reward=None)], "sums", "7") for repeat in range(2)]
    row = PromptRow(3, "", [], "sums", "7")
    assert await reward.score(row, "one alone") == (None, {}) and not seen
    errors: list[RewardError] = []
    await score_group(reward, rollouts, decode=lambda ids: "", on_error=errors.append)
    reward.close()
    assert seen[0]["solution_strs"] == ["answer 1"] * 2 and seen[0]["ground_truths"] == ["7"] * 2
    assert seen[0]["trajectories"][1] == trajectory(reward=None)
    if message is None:
        assert [one.final.reward for one in rollouts] == [1.0, 0.0] and not errors
    else:
        with pytest.raises(RewardError, match=message):
            raise errors[0]
        assert [one.final.reward for one in rollouts] == [None, None]
        assert all("RewardError" in one.final.reward_extra["error"] for one in rollouts)


def test_what_json_does_not_know_is_left_out_and_named() -> None:
    unknown = {"model": object(), "a": [{"b": {1, 2}}], "big": 2**64, "ring": RING, "raw": b"x"}
    score, extra = read_score({"score": 1, "acc": 0.5, **unknown})
    assert (score, extra["acc"]) == (1.0, 0.5)
    assert extra.keys() == {"acc", "not_stored"} and extra["not_stored"].keys() == unknown.keys()
    assert "a[0].b" in extra["not_stored"]["a"]
    with pytest.raises(RewardError):
        read_score({"score": object(), "acc": 1})
