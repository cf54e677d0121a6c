from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.chat.truncation import truncate
from rollstream.errors import DataError

CUTS = st.sampled_from(["left", "right", "middle"])


@given(st.lists(st.integers()), st.integers(1, 50), CUTS)
def test_length_and_what_is_kept(
    ids: list[int], max_length: int, how: Literal["left", "right", "middle"]
) -> None:
    before = list(ids)
    cut = truncate(ids, max_length, how)
    assert ids == before
    if len(ids) <= max_length:
        assert cut == ids
        return
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[how]
    assert len(cut) == max_length
    assert cut[:head] == ids[:head]
    assert cut[head:] == (ids[-(max_length - head) :] if head < max_length else [])


def test_like_verl() -> None:
    ids = list(range(10))
    assert truncate(ids, 3, "left") == [7, 8, 9]
    assert truncate(ids, 3, "right") == [0, 1, 2]
    assert truncate(ids, 3, "middle") == [0, 8, 9]
    assert truncate(ids, 1, "middle") == [9]
    assert truncate(ids, 10, "error") is ids


def test_errors() -> None:
    with pytest.raises(DataError, match=r"has 10 tokens, more than data.max_prompt_length=9"):
        truncate(list(range(10)), 9, "error")
    with pytest.raises(ValueError, match="positive"):
        truncate([1], 0, "left")
