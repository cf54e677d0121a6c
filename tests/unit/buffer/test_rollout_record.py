from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.rollout_record import (
    RolloutFailure,
    RolloutRecord,
    read_count,
    read_skips,
    read_task_type,
)
from rollstream.errors import ConfigError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PAYLOADS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@given(payload=PAYLOADS, crashes=st.integers(0, 9), error=st.none() | st.text())
def test_a_record_is_the_same_after_json(payload: dict[str, Any], crashes: int, error: str | None) -> None:
    record = RolloutRecord("r", "math", payload, "failed", 12.5, crashes, error, None)
    stored = orjson.loads(orjson.dumps(record.to_dict()))
    assert RolloutRecord.from_dict(stored) == record
    assert RolloutRecord.from_dict({**stored, "of_a_later_version": 1}) == record


@given(payload=PAYLOADS, skips=st.lists(st.integers()), key=st.text(max_size=3), value=JSON)
def test_what_is_done_makes_no_other_rollout(
    payload: dict[str, Any], skips: list[int], key: str, value: Any
) -> None:
    record = RolloutRecord("r", "math", {**payload, "skip_instance_ids": skips}, "running", 0.0)
    assert record.asks_the_same(payload) and record.asks_the_same({**payload, "skip_instance_ids": [1]})
    moved = {"remote_engine_url": "u", "remote_buffer_url": "u", "num_process": 3}
    assert record.asks_the_same({**payload, **moved})
    assert record.with_payload({**payload, **moved}).payload == {
        **payload,
        **moved,
        "skip_instance_ids": skips,
    }
    changed = {**payload, key: [value]}
    assert record.asks_the_same(changed) == (payload.get(key, record) == [value])


def test_counts_may_be_texts() -> None:
    assert read_count({"n": "16"}, "n", 1) == read_count({"n": 16}, "n", 1) == 16
    assert read_count({}, "n", 7) == read_count({"n": None}, "n", 7) == 7
    wrong: list[Any] = [0, -1, True, 1.0, "1.0", "", "x", "９", "9" * 5000, [], {}]
    for value in wrong:
        with pytest.raises(ConfigError, match=r"^n: "):
            read_count({"n": value}, "n", 1)


def test_skips_and_task_types_are_checked() -> None:
    assert read_skips({"skip_instance_ids": [7, "7", 7]}) == [7, "7", 7] and read_skips({}) == []
    for bad in ("7", [True], [None], [1.0], {"7": 1}):
        with pytest.raises(ConfigError, match="skip_instance_ids"):
            read_skips({"skip_instance_ids": bad})
    for bad in (None, "", 7, ["math"]):
        with pytest.raises(ConfigError, match="task_type"):
            read_task_type({"task_type": bad})


def test_a_failure_says_in_one_line_what_where_and_what_now() -> None:
    failure = RolloutFailure("r1", "math", "OSError: no", "…", 3, final=False, log="/x/y.log")
    text = str(failure)
    assert "\n" not in text
    for part in ("math", "r1", "3 times", "started again", "OSError: no", "/x/y.log"):
        assert part in text
