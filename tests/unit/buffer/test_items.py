"""Items: what is one, what is not and why, how they are stored and written."""

import json
import math
import struct
from array import array
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollstream.buffer.items import (
    MAX_ITEMS,
    MAX_TEXT,
    Encoding,
    Item,
    ItemError,
    dump_item,
    load_item,
    parse_item,
    parse_items,
)
from rollstream.surrogates import replace_in_json, replace_in_text

MESSAGES = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
TOKENS = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5],
    "response_mask": [1, 0, 1],
    "response_logprobs": [-0.5, 0.0, -1.25],
}
PACKED = {
    "prompt_ids": struct.pack("<2i", 1, 2),
    "response_ids": struct.pack("<3i", 3, 4, 5),
    "response_mask": b"\x01\x00\x01",
    "response_logprobs": struct.pack("<3f", -0.5, 0.0, -1.25),
}
ENCODINGS: list[Encoding] = ["json", "msgpack"]

each_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


def an_item(**changes: Any) -> dict[str, Any]:
    item = {"uid": "u", "instance_id": 7, "messages": MESSAGES, "reward": 0.5, "extra_info": {}}
    return {**item, **changes}


def body_of(item: Any, encoding: Encoding = "json") -> bytes:
    return json.dumps(item).encode() if encoding == "json" else msgspec.msgpack.encode(item)


def each(name: str, *bad: Any) -> list[tuple[dict[str, Any], str]]:
    return [({name: one}, name) for one in bad]


@each_encoding
def test_an_item_is_stored_as_it_came(encoding: Encoding) -> None:
    item = an_item(reward=1, timestamp="12.5", extra_info={"label": [1, {"a": None}]})
    body = body_of(item, encoding)
    assert parse_item(body, encoding) == Item("u", 7, 1.0, False, None, body, encoding)
    assert load_item(body, encoding) == item
    own = {"task_type": "math", "job": "j1", "policy_version": 3, "policy_versions": [[0, 3]], **TOKENS}
    parsed = parse_item(body_of(an_item(instance_id="7", **own), encoding), encoding)
    assert (parsed.instance_id, parsed.task, parsed.job, parsed.version) == ("7", "math", "j1", 3)
    assert load_item(parsed.body, encoding) == an_item(instance_id="7", **own)


@each_encoding
def test_what_is_missing_and_may_be_is_made(encoding: Encoding) -> None:
    body = body_of({"instance_id": "q1", "messages": MESSAGES, "reward": None}, encoding)
    if encoding == "json":
        body = b" \n" + body
    first, second = parse_item(body, encoding), parse_item(body, encoding)
    assert first.uid != second.uid and first.reward is None
    stored = load_item(first.body, encoding)
    assert stored["uid"] == first.uid and stored["extra_info"] == {}
    assert parse_item(first.body, encoding) == first


@each_encoding
@pytest.mark.parametrize("failure", [{"error": "away", "attempts": 3}, "away", True, 0, [], {}])
def test_an_item_whose_rollout_failed(encoding: Encoding, failure: Any) -> None:
    for failed, extra in ((True, {"failure": failure}), (False, {"failure": None}), (False, {"error": "x"})):
        body = body_of(an_item(reward=-1, extra_info=extra), encoding)
        assert parse_item(body, encoding).failed is failed


def test_tokens_of_msgpack_are_binary_or_lists() -> None:
    for tokens in (TOKENS, PACKED, {**TOKENS, "response_ids": PACKED["response_ids"]}):
        parsed = parse_item(body_of(an_item(**tokens), "msgpack"), "msgpack")
        loaded = load_item(parsed.body, "msgpack")
        assert {name: list(loaded[name]) for name in TOKENS} == TOKENS
        assert json.loads(dump_item(loaded, "json")) == an_item(**TOKENS)
        assert msgspec.msgpack.decode(dump_item(loaded, "msgpack")) == an_item(**PACKED)
    assert load_item(body_of(an_item(**PACKED), "msgpack"), "msgpack")["response_ids"] == array(
        "i", [3, 4, 5]
    )


@each_encoding
@pytest.mark.parametrize(
    ("changes", "where"),
    [
        *(({name: ...}, "") for name in ("instance_id", "messages", "reward")),
        *each("instance_id", None, True, 1.5, "", [1], 1 << 63, "x" * (MAX_TEXT + 1)),
        *each("uid", 5, None, "", "x" * (MAX_TEXT + 1)),
        *each("reward", "1", True, [1]),
        *each("messages", None, {}, "hello", []),
        ({"messages": [*MESSAGES, 3]}, "messages[2]"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"extra_info": []}, "extra_info"),
        ({"task_type": 3}, "task_type"),
        ({"job": ""}, "job"),
        *each("policy_version", -1, 1.5, False),
        ({"response_ids": [1]}, "prompt_ids"),
        ({"prompt_ids": [1]}, "response_ids"),
        ({"response_mask": [1]}, "response_mask"),
        ({**TOKENS, "response_mask": [1]}, "response_mask"),
        ({**TOKENS, "response_logprobs": []}, "response_logprobs"),
        *(
            ({**TOKENS, "response_ids": [1, bad, 3]}, "response_ids[1]")
            for bad in ("3", 2.5, True, -2, 1 << 31)
        ),
        ({**TOKENS, "response_ids": "abc"}, "response_ids"),
        ({**TOKENS, "response_mask": [0, 1, 2]}, "response_mask[2]"),
        *(
            ({**TOKENS, "response_logprobs": [0.0, bad, 0.0]}, "response_logprobs[1]")
            for bad in (None, 1e300)
        ),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], where: str, encoding: Encoding) -> None:
    item = {name: value for name, value in an_item(**changes).items() if value is not ...}
    with pytest.raises(ItemError) as caught:
        parse_item(body_of(item, encoding), encoding)
    assert caught.value.where == where and caught.value.message
    assert str(caught.value) == (f"{where}: {caught.value.message}" if where else caught.value.message)
    assert where or next(iter(changes)) in caught.value.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused(value: float) -> None:
    for changes in ({"reward": value}, {"extra_info": {"score": [value]}}, {"deep": [{"null": value}]}):
        for encoding in ENCODINGS:
            with pytest.raises(ItemError):
                parse_item(body_of(an_item(**changes), encoding), encoding)
    with pytest.raises(ItemError):
        parse_item(body_of(an_item(reward=0)).replace(b'"reward": 0', b'"reward": 1e999'))
    for name, bad in (("response_logprobs", struct.pack("<3f", 0, value, 0)), ("response_logprobs", b"12345"),
                      ("response_mask", b"\0\2\1"), ("response_ids", struct.pack("<3i", 1, -1, 1))):  # fmt: skip
        with pytest.raises(ItemError, match=f"^{name}: "):
            parse_item(body_of(an_item(**{**PACKED, name: bad}), "msgpack"), "msgpack")


@pytest.mark.parametrize("escape", [rb"\ud800", rb"\udfff", rb"\ud800\ud800", rb"a\udc00b"])
def test_lone_surrogates_are_replaced_and_counted(escape: bytes) -> None:
    cut = json.loads(b'"' + escape + b'"')
    text = replace_in_text(cut)
    count = text.count("\ufffd")
    for item in (an_item(uid="SPOT"), an_item(extra_info={"x": "SPOT"}), {"items": [an_item(note="SPOT")]}):
        body = body_of(item).replace(b"SPOT", escape)
        with pytest.raises(ItemError):
            parse_items(body)
        mended, replaced = replace_in_json(body)
        assert (json.loads(mended), replaced) == (
            json.loads(body_of(item).decode().replace("SPOT", text)),
            count,
        )
    raw = cut.encode("utf-8", "surrogatepass")
    with pytest.raises(ItemError):
        parse_item(body_of(an_item(note="S" * len(raw)), "msgpack").replace(b"S" * len(raw), raw), "msgpack")
    for encoding in ENCODINGS:
        assert load_item(dump_item({"a": [{cut: cut}], "b": 1}, encoding), encoding)["a"] == [{text: text}]


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_refused(opening: bytes, closed: bool) -> None:
    closing = opening.replace(b'"a":', b"").translate(bytes.maketrans(b"[{", b"]}"))[::-1]
    nest = opening * 100_000 + b"1" + closing * 100_000 * closed
    for body in (nest, body_of(an_item(extra_info={"deep": "SPOT"})).replace(b'"SPOT"', nest)):
        for parse in (parse_item, parse_items):
            with pytest.raises(ItemError):
                parse(body)
    with pytest.raises(ItemError):
        parse_items(b"\x81\xa5items" + b"\x91" * 100_000 + b"\x01", "msgpack")


@each_encoding
@given(levels=st.integers(1, 1100))
def test_what_is_taken_can_be_given_in_both_encodings(encoding: Encoding, levels: int) -> None:
    nest: Any = 1
    for _ in range(levels):
        nest = [nest]
    try:
        body = body_of(an_item(deep=nest), encoding)
        loaded = load_item(parse_item(body, encoding).body, encoding)
    except (RecursionError, ItemError):
        return
    for wanted in ENCODINGS:
        assert load_item(dump_item(loaded, wanted), wanted) == loaded


@pytest.mark.parametrize(
    "value", [b"bytes", msgspec.msgpack.Ext(5, b"1234"), {1: 2}, msgspec.Raw(b"\xd6\xff\0\0\0\0")]
)
def test_what_json_has_no_form_for_is_refused_in_msgpack(value: Any) -> None:
    with pytest.raises(ItemError, match="JSON has no form for"):
        parse_item(body_of(an_item(extra_info={"odd": [value]}), "msgpack"), "msgpack")


def test_a_number_beyond_64_bits_is_read_as_every_json_reader_reads_it() -> None:
    body = body_of(an_item(odd=0)).replace(b'"odd": 0', b'"odd": %d' % 2**65)
    assert load_item(parse_item(body).body, "json")["odd"] == 2.0**65


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"7", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\xc1"]
)
@each_encoding
def test_what_is_no_item_is_refused(body: bytes, encoding: Encoding) -> None:
    for parse in (parse_item, parse_items):
        with pytest.raises(ItemError):
            parse(body, encoding)


@each_encoding
def test_a_batch_is_all_good_or_refused(encoding: Encoding) -> None:
    batch = [an_item(uid=f"u{index}") for index in range(5)]
    parsed = parse_items(body_of({"items": batch}, encoding), encoding)
    assert [one.uid for one in parsed] == ["u0", "u1", "u2", "u3", "u4"]
    assert [load_item(one.body, encoding) for one in parsed] == batch
    assert parse_items(body_of(batch[1], encoding), encoding) == [parsed[1]]
    batch[3]["reward"] = "high"
    with pytest.raises(ItemError) as caught:
        parse_items(body_of({"items": batch}, encoding), encoding)
    assert caught.value.where == "items[3].reward"
    wrong: Any
    for wrong in ([], {}, [an_item(), 3], [1] * (MAX_ITEMS + 1), None, [None]):
        with pytest.raises(ItemError, match="items"):
            parse_items(body_of({"items": wrong}, encoding), encoding)


@each_encoding
def test_items_of_numpy_are_written(encoding: Encoding) -> None:
    ids = numpy.array([3, 4, 5])
    item = an_item(reward=numpy.float32(0.5), prompt_ids=ids, response_ids=ids, odd=[numpy.int64(3)])
    loaded = load_item(dump_item(item, encoding), encoding)
    assert (list(loaded["prompt_ids"]), loaded["reward"], loaded["odd"]) == ([3, 4, 5], 0.5, [3])
    for bad in ({"prompt_ids": [2**31]}, {"prompt_ids": [0.5]}, {"prompt_ids": ["x"]}, {"odd": object()}):
        if encoding == "msgpack" or "odd" in bad:
            with pytest.raises(ItemError):
                dump_item(an_item(**bad), encoding)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    st.sampled_from(ENCODINGS),
    st.sampled_from(ENCODINGS),
)
def test_further_keys_survive_both_encodings(
    rest: dict[str, Any], came: Encoding, given_as: Encoding
) -> None:
    item = {**rest, **an_item()}
    assume(not {"job", "uid"} & rest.keys())  # keys of an item that `an_item` leaves out
    loaded = load_item(parse_item(body_of(item, came), came).body, came)
    assert load_item(dump_item(loaded, given_as), given_as) == item
