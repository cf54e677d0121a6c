import base64
import datetime
import decimal
import uuid
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.data.values import BadRow, content_digest, pruned, to_jsonable

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=12,
)
ROWS = st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=4)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\x00\xff", base64.b64encode(b"\x00\xff").decode()),
        (datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), "2024-01-02T03:04:05+00:00"),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (datetime.timedelta(seconds=1.5), 1.5),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (float("nan"), None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([{"a": np.int64(1)}], dtype=object), [{"a": 1}]),
        ((1, (2,)), [1, [2]]),
        ({1: "x"}, {"1": "x"}),
    ],
)
def test_values_become_ones_that_json_knows(value: Any, expected: Any) -> None:
    assert to_jsonable(value) == expected
    assert to_jsonable({"a": [value]}) == {"a": [expected]}


@pytest.mark.parametrize("value", [float("inf"), {1, 2}, object(), np.float64("-inf")])
def test_a_value_without_json_form_is_refused(value: Any) -> None:
    with pytest.raises(BadRow):
        to_jsonable({"a": [value]})


def test_none_is_dropped_below_the_top_only_when_asked() -> None:
    row = {"a": None, "b": {"c": None, "d": [{"e": None, "f": 1}]}}
    assert to_jsonable(row) == row
    assert to_jsonable(row, drop_none=True) == {"a": None, "b": {"d": [{"f": 1}]}}


@given(ROWS)
def test_the_digest_does_not_depend_on_key_order(row: dict[str, Any]) -> None:
    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: backwards(item) for key, item in reversed(value.items())}
        return [backwards(item) for item in value] if isinstance(value, list) else value

    assert content_digest(row) == content_digest(backwards(row))
    assert content_digest(row) == content_digest(orjson.loads(orjson.dumps(row)))


@given(ROWS, ROWS)
def test_different_content_has_a_different_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    def comparable(row: dict[str, Any]) -> bytes:
        return orjson.dumps(pruned(row), option=orjson.OPT_SORT_KEYS)

    one.pop("extra_info", None)
    other.pop("extra_info", None)
    assert (content_digest(one) == content_digest(other)) == (comparable(one) == comparable(other))


def test_the_digest_ignores_position_and_what_is_absent() -> None:
    digest = content_digest({"prompt": "hi", "extra_info": {"index": 3, "split": "train"}})
    assert digest == content_digest(
        {"prompt": "hi", "extra_info": {"index": 9, "split": "train", "hint": None}}
    )
    assert digest != content_digest({"prompt": "hi", "extra_info": {"index": 3, "split": "test"}})
    assert content_digest({"prompt": "hi"}) == content_digest({"prompt": "hi", "extra_info": {"index": 1}})
    assert content_digest({"prompt": "hi"}) == content_digest({"prompt": "hi", "pass_rate": 0.5})
    assert content_digest({"prompt": "null {}"}) != content_digest({"prompt": ""})


def test_the_digest_refuses_what_json_cannot_hold() -> None:
    for value in (2**64, "\ud800"):
        with pytest.raises(BadRow, match="no JSON form"):
            content_digest({"prompt": value})
