"""When failures are too many to go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.generation_failures import FailureWatch
from rollstream.errors import DataError

FAILURE = {"error": "KeyError: 'level'\nand more", "stage": "reward", "attempts": 1}


def test_a_bad_start_is_told_with_its_first_cause() -> None:
    watch = FailureWatch()
    with pytest.raises(
        DataError, match=r"first 64 .* 16 instances; .*instance 0, stage reward: KeyError: 'le"
    ):
        for number in range(100):
            watch.add(number // 4, FAILURE if number == 0 else {**FAILURE, "error": "another"})
    assert watch.ended == 64


def test_repeats_of_few_prompts_are_no_bad_start() -> None:
    watch = FailureWatch()
    for number in range(1000):
        watch.add(number % 15, FAILURE)
    with pytest.raises(DataError, match=r"^all 1000 rollouts failed; .*'level'$"):
        watch.check_end()


def test_nothing_and_one() -> None:
    FailureWatch().check_end()
    watch = FailureWatch()
    watch.add("a", FAILURE)
    with pytest.raises(DataError, match=r"^the only rollout failed"):
        watch.check_end()


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 20))
def test_one_success_before_is_enough_to_go_on(failed: list[bool], repeats: int) -> None:
    watch = FailureWatch()
    watch.add("good", None)
    for number, one in enumerate(failed):
        watch.add(number // repeats, FAILURE if one else None)
    watch.check_end()
    assert (watch.ended, watch.failed) == (len(failed) + 1, sum(failed))
