"""Where a body breaks the rules of JSON."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.items import ItemError, parse_item, parse_items
from rollstream.buffer.json_faults import find_fault

from .served import item


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        ("\ud800", "half of a character (a lone surrogate)"),
    ],
)
def test_the_item_and_the_field_are_named(value: object, said: str) -> None:
    items = [item("a", 1.0, f"u{n}") for n in range(800)]
    items[700]["extra_info"]["notes"] = [0, {"deep": value}]
    with pytest.raises(ItemError) as refused:
        parse_items(json.dumps({"items": items}).encode())
    where = "items[700].extra_info.notes[1].deep"
    assert (refused.value.where, refused.value.message) == (where, f"not valid json: {said}")
    raw = json.dumps(items[700], ensure_ascii=False).encode("utf-8", "surrogatepass")
    with pytest.raises(ItemError) as refused:
        parse_item(raw)
    assert refused.value.where == "extra_info.notes[1].deep"


def test_a_reward_that_is_not_a_number_is_named() -> None:
    with pytest.raises(ItemError, match=r"^items\[1\]\.reward: not valid json: NaN$"):
        parse_items(json.dumps({"items": [item("a"), item("a", float("nan"))]}).encode())
    with pytest.raises(ItemError, match=r"^reward: not valid json: a number that is too large$"):
        parse_item(b'{"reward": 1e999}')
    with pytest.raises(ItemError, match=r"^extra_info: not valid json: half of a character .* in a key$"):
        parse_item(b'{"extra_info": {"\\ud800": 1}}')


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b"[" * 100_000, b'{"a": NaN', b'{"a": tru, "b": NaN}'])
def test_other_faults_keep_their_line_and_column(body: bytes) -> None:
    assert find_fault(body) is None
    with pytest.raises(ItemError, match=r"not valid json|deeper"):
        parse_item(body)


def test_a_large_body_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"text": "' + b"x" * (64 << 20) + b'", "reward": NaN}'

    def read(*_: object, **__: object) -> None:
        raise AssertionError("it was read again")

    monkeypatch.setattr(json, "loads", read)
    monkeypatch.setattr(json.JSONDecoder, "decode", read)
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", read)
    assert find_fault(body) is None
    with pytest.raises(AssertionError, match="read again"):
        find_fault(b'{"reward": NaN}')  # a small one is


@given(
    st.recursive(
        st.floats() | st.text(st.characters(exclude_categories=())) | st.none() | st.integers(0, 9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_a_fault_is_found_where_orjson_finds_one(value: object) -> None:
    body = json.dumps(value).encode()
    try:
        orjson.loads(body)
    except ValueError:
        assert find_fault(body) is not None
    else:
        assert find_fault(body) is None
