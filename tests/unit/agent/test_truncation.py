import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.agent.prompt import Truncation, truncate
from rollstream.errors import DataError


@given(st.lists(st.integers()), st.integers(1, 50), st.sampled_from(["left", "right", "middle"]))
def test_length_and_what_is_kept(ids: list[int], max_length: int, how: Truncation) -> None:
    cut = truncate(ids, max_length, how)
    if len(ids) <= max_length:
        assert cut == ids
        return
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[how]
    assert len(cut) == max_length
    assert cut[:head] == ids[:head]
    assert cut[head:] == (ids[-(max_length - head) :] if head < max_length else [])


def test_a_prompt_that_may_not_be_cut() -> None:
    assert truncate([1, 2], 2, "error") == [1, 2]
    with pytest.raises(DataError, match=r"has 10 tokens, more than data.max_prompt_length=9"):
        truncate(list(range(10)), 9, "error")
