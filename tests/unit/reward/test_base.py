from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rollstream.errors import RewardError
from rollstream.reward.base import FunctionReward, read_score
from rollstream.trajectory import PromptRow

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


def test_what_json_does_not_know_is_left_out_and_named() -> None:
    unknown = {"model": object(), "a": [{"b": {1, 2}}], "big": 2**64, "ring": RING, "raw": b"x"}
    score, extra = read_score({"score": 1, "acc": 0.5, **unknown})
    assert (score, extra["acc"]) == (1.0, 0.5)
    assert extra.keys() == {"acc", "not_stored"} and extra["not_stored"].keys() == unknown.keys()
    assert "a[0].b" in extra["not_stored"]["a"]
    with pytest.raises(RewardError):
        read_score({"score": object(), "acc": 1})
