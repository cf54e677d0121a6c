import json
import math
import struct
from array import array
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollstream.buffer.items import (
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_TEXT_ID,
    Encoding,
    Item,
    ItemError,
    dump_item,
    load_item,
    parse_item,
    parse_items,
)

MESSAGES = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
TOKENS = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5],
    "response_mask": [1, 0, 1],
    "response_logprobs": [-0.5, 0.0, -1.25],
}
ENCODINGS: list[Encoding] = ["json", "msgpack"]


def an_item(**changes: Any) -> dict[str, Any]:
    item = {"uid": "u", "instance_id": 7, "messages": MESSAGES, "reward": 0.5, "extra_info": {}}
    return {**item, **changes}


def body_of(item: Any, encoding: Encoding = "json") -> bytes:
    return json.dumps(item).encode() if encoding == "json" else msgspec.msgpack.encode(item)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_item_is_stored_as_it_came_in(encoding: Encoding) -> None:
    item = an_item(reward=1, timestamp="12.5", finish_reason="stop", extra_info={"label": [1, {"a": None}]})
    parsed = parse_item(body_of(item, encoding), encoding)
    assert parsed == Item("u", 7, 1.0, None, parsed.payload, encoding)
    assert load_item(parsed.payload, encoding) == item


def test_white_space_and_repeated_keys_are_not_stored() -> None:
    parsed = parse_item(
        b'{"uid":"a", "uid":"u",\n "instance_id":7,"reward":null,"messages":[{"role":"user"}]}'
    )
    assert (
        parsed.payload
        == b'{"uid":"u","instance_id":7,"reward":null,"messages":[{"role":"user"}],"extra_info":{}}'
    )
    assert parsed.uid == "u"
    assert parsed.reward is None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_missing_and_may_be_is_made(encoding: Encoding) -> None:
    body = body_of({"instance_id": "q1", "messages": MESSAGES, "reward": 0}, encoding)
    first, second = parse_item(body, encoding), parse_item(body, encoding)
    assert first.uid != second.uid
    stored = load_item(first.payload, encoding)
    assert stored["uid"] == first.uid
    assert stored["extra_info"] == {}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_buffers_own_fields(encoding: Encoding) -> None:
    item = an_item(task_type="math", rollout_id="r1", policy_version=3, policy_versions=[[0, 3]], **TOKENS)
    parsed = parse_item(body_of(item, encoding), encoding)
    assert (parsed.task_type, parsed.rollout_id, parsed.policy_version) == ("math", "r1", 3)
    stored = load_item(parsed.payload, encoding)
    for name, tokens in TOKENS.items():
        assert list(stored.pop(name)) == item.pop(name) == tokens
    assert stored == item


def test_tokens_of_msgpack_are_binary() -> None:
    packed = {
        "prompt_ids": struct.pack("<2i", 1, 2),
        "response_ids": struct.pack("<3i", 3, 4, 5),
        "response_mask": b"\x01\x00\x01",
        "response_logprobs": struct.pack("<3f", -0.5, 0.0, -1.25),
    }
    as_binary = parse_item(body_of(an_item(**packed), "msgpack"), "msgpack")
    as_lists = parse_item(body_of(an_item(**TOKENS), "msgpack"), "msgpack")
    assert as_binary.payload == as_lists.payload
    loaded = load_item(as_binary.payload, "msgpack")
    assert loaded["response_ids"] == array("i", [3, 4, 5])
    assert {name: loaded[name].tolist() for name in TOKENS} == TOKENS
    assert dump_item(loaded, "msgpack") == as_binary.payload
    assert json.loads(dump_item(loaded, "json")) == an_item(**TOKENS)
    from_json = load_item(parse_item(body_of(an_item(**TOKENS))).payload, "json")
    assert dump_item(from_json, "msgpack") == as_binary.payload


def test_ids_of_numbers_and_texts_differ() -> None:
    assert parse_item(body_of(an_item(instance_id=7))).instance_id == 7
    assert parse_item(body_of(an_item(instance_id="7"))).instance_id == "7"


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        ({"instance_id": None}, "instance_id", "is null"),
        ({"instance_id": True}, "instance_id", "is true"),
        ({"instance_id": 1.0}, "instance_id", "is the number 1"),
        ({"instance_id": ""}, "instance_id", "empty"),
        ({"instance_id": [1]}, "instance_id", "is a list"),
        ({"instance_id": 1 << 63}, "instance_id", "64 bits"),
        ({"instance_id": 10**30}, "instance_id", "64 bits"),
        ({"instance_id": "x" * (MAX_TEXT_ID + 1)}, "instance_id", "characters"),
        ({"uid": 5}, "uid", "must be text, is the number 5"),
        ({"uid": None}, "uid", "leave it out"),
        ({"uid": ""}, "uid", "empty"),
        ({"reward": "1"}, "reward", "must be a number or null, is the text '1'"),
        ({"reward": True}, "reward", "is true"),
        ({"reward": [1]}, "reward", "is a list"),
        ({"messages": None}, "messages", "is null"),
        ({"messages": {}}, "messages", "is an object"),
        ({"messages": "hello"}, "messages", "is the text 'hello'"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [*MESSAGES, 3]}, "messages[2]", "must be an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": 1}]}, "messages[0].role", "must be a text"),
        ({"extra_info": []}, "extra_info", "must be an object"),
        ({"task_type": 3}, "task_type", "must be text"),
        ({"rollout_id": ""}, "rollout_id", "empty"),
        ({"policy_version": -1}, "policy_version", "from 0 on"),
        ({"policy_version": 1.5}, "policy_version", "from 0 on"),
        ({"policy_version": False}, "policy_version", "from 0 on"),
        ({"response_ids": [1]}, "prompt_ids", "is missing"),
        ({"prompt_ids": [1]}, "response_ids", "is missing"),
        ({"response_mask": [1]}, "response_mask", "1 numbers for no response_ids"),
        ({**TOKENS, "response_mask": [1]}, "response_mask", "1 numbers for 3 response_ids"),
        ({**TOKENS, "response_logprobs": []}, "response_logprobs", "0 numbers for 3"),
        ({**TOKENS, "response_ids": [1, 2, "3"]}, "response_ids[2]", "must be a whole number"),
        ({**TOKENS, "response_ids": [1, 2.0, 3]}, "response_ids[1]", "must be a whole number"),
        ({**TOKENS, "response_ids": [1, True, 3]}, "response_ids[1]", "is true"),
        ({**TOKENS, "response_ids": [1, -2, 3]}, "response_ids", "negative"),
        ({**TOKENS, "response_ids": [1, 1 << 31, 3]}, "response_ids", "int32"),
        ({**TOKENS, "response_ids": "abc"}, "response_ids", "must be a list"),
        ({**TOKENS, "response_mask": [0, 1, 2]}, "response_mask", "neither 0 nor 1"),
        ({**TOKENS, "response_logprobs": [0.0, None, 0.0]}, "response_logprobs[1]", "is null"),
        ({**TOKENS, "response_logprobs": [0.0, 1e300, 0.0]}, "response_logprobs", "not finite"),
    ],
)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_wrong_field_is_named(changes: dict[str, Any], where: str, said: str, encoding: Encoding) -> None:
    item = an_item(**changes)
    if encoding == "msgpack" and item["instance_id"] == 10**30:
        return  # has no form in msgpack
    if encoding == "json" and item["instance_id"] == 10**30:
        said = "is the number 1"  # orjson reads it as one with a decimal point
    with pytest.raises(ItemError) as caught:
        parse_item(body_of(item, encoding), encoding)
    assert caught.value.where == where
    assert said in caught.value.message
    assert str(caught.value) == f"{where}: {caught.value.message}"


@pytest.mark.parametrize("name", ["instance_id", "messages", "reward"])
def test_a_missing_field_is_named(name: str) -> None:
    item = an_item()
    del item[name]
    with pytest.raises(ItemError, match=f"^{name}: is missing"):
        parse_item(body_of(item))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused(value: float) -> None:
    for item in (an_item(reward=value), an_item(extra_info={"score": [value]})):
        with pytest.raises(ItemError, match="not valid json"):
            parse_item(body_of(item))  # Python writes NaN and Infinity, which are not JSON
        with pytest.raises(ItemError, match=r"reward|extra_info.score\[0\]"):
            parse_item(body_of(item, "msgpack"), "msgpack")
        with pytest.raises(ItemError, match=r"reward|extra_info.score\[0\]"):
            parse_item(item)
    with pytest.raises(ItemError, match="not valid json"):
        parse_item(body_of(an_item(reward=0)).replace(b'"reward": 0', b'"reward": 1e999'))
    packed = {name: numpy.array(tokens, "f4" if "log" in name else "i4") for name, tokens in TOKENS.items()}
    binary = {name: tokens.tobytes() for name, tokens in packed.items()}
    binary["response_mask"] = b"\1\0\1"
    parse_item(body_of(an_item(**binary), "msgpack"), "msgpack")
    binary["response_logprobs"] = struct.pack("<3f", 0, value, 0)
    with pytest.raises(ItemError, match="response_logprobs: holds a number that is not finite"):
        parse_item(body_of(an_item(**binary), "msgpack"), "msgpack")
    binary["response_logprobs"] = b"12345"
    with pytest.raises(ItemError, match="response_logprobs: has 5 bytes, no multiple of 4"):
        parse_item(body_of(an_item(**binary), "msgpack"), "msgpack")


@pytest.mark.parametrize("escape", [rb"\ud800", rb"\udfff", rb"\ud800\ud800", rb"a\udc00b"])
def test_lone_surrogates_are_refused(escape: bytes) -> None:
    with pytest.raises(ItemError, match="not valid json"):
        parse_item(body_of(an_item(uid="SPOT")).replace(b"SPOT", escape))
    text = json.loads(b'"' + escape + b'"')
    with pytest.raises(ItemError, match="cannot be stored as"):
        parse_item(an_item(extra_info={"text": text}))
    raw = text.encode("utf-8", "surrogatepass")
    with pytest.raises(ItemError, match="not valid msgpack"):
        parse_item(body_of(an_item(uid="S" * len(raw)), "msgpack").replace(b"S" * len(raw), raw), "msgpack")


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_refused(opening: bytes, closed: bool) -> None:
    closing = opening.replace(b'"a":', b"").translate(bytes.maketrans(b"[{", b"]}"))[::-1]
    nest = opening * 100_000 + b"1" + closing * 100_000 * closed
    for body in (nest, body_of(an_item(extra_info={"deep": "SPOT"})).replace(b'"SPOT"', nest)):
        with pytest.raises(ItemError, match=r"deeper than|not valid json"):
            parse_item(body)
    deep = b"\x91" * 100_000 + b"\x01"
    with pytest.raises(ItemError, match="deeper than"):
        parse_item(deep, "msgpack")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_deepest_item_can_be_written_again(encoding: Encoding) -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value] if levels % 2 else {"k": value}
        return value

    for levels in (MAX_DEPTH - 2, MAX_DEPTH - 3):  # the item and extra_info are two more
        item = an_item(extra_info={"deep": nested(levels)})
        loaded = load_item(parse_item(body_of(item, encoding), encoding).payload, encoding)
        assert loaded == item
        answer = {"data": {"data": [loaded]}}
        assert json.loads(dump_item(answer, "json")) == answer
    for levels in (MAX_DEPTH - 1, MAX_DEPTH, 300):
        with pytest.raises(ItemError, match="deeper than 200 levels"):
            parse_item(body_of(an_item(extra_info={"deep": nested(levels)}), encoding), encoding)
    wide = an_item(messages=MESSAGES * 300)
    assert load_item(parse_item(body_of(wide, encoding), encoding).payload, encoding) == wide


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("brackets", ["list", "map"])
@pytest.mark.parametrize("place", ["message", "second message", "extra_info", "map", "list"])
@pytest.mark.parametrize("text", ["short", "long" * 2000])
def test_depth_counts_wherever_it_is(text: str, place: str, brackets: str, encoding: Encoding) -> None:
    def item(levels: int) -> dict[str, Any]:
        nest: Any = "x"
        for _ in range(levels):
            nest = [nest] if brackets == "list" else {"k": nest}
        message = {"role": "user", "content": "2+2"}
        return an_item(
            note=text,
            **{
                "message": {"messages": [{"role": "user", "content": nest}]},
                "second message": {"messages": [message, {**message, "tool_calls": nest}]},
                "extra_info": {"extra_info": {"plain": 1, "deep": nest}},
                "map": {"other": {"deep": nest}},
                "list": {"other": [nest]},
            }[place],
        )

    above = 3 if "message" in place else 2  # the item, what is named, and a message
    deepest = item(MAX_DEPTH - above)
    assert load_item(parse_item(body_of(deepest, encoding), encoding).payload, encoding) == deepest
    with pytest.raises(ItemError, match="deeper than 200 levels"):
        parse_item(body_of(item(MAX_DEPTH - above + 1), encoding), encoding)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"bytes", "of type bytes"),
        (msgspec.msgpack.Ext(5, b"1234"), "of type Ext"),
        ({1: 2}, "a key that is not text"),
    ],
)
def test_what_json_has_no_form_for_is_refused_in_msgpack(value: Any, said: str) -> None:
    with pytest.raises(ItemError, match=said) as caught:
        parse_item(body_of(an_item(extra_info={"odd": [value]}), "msgpack"), "msgpack")
    assert caught.value.where == "extra_info.odd[0]"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"7", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}"]
)
def test_what_is_no_item_is_refused(body: bytes) -> None:
    with pytest.raises(ItemError):
        parse_item(body)
    with pytest.raises(ItemError):
        parse_items(body)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_batch_is_all_good_or_refused(encoding: Encoding) -> None:
    batch = [an_item(uid=f"u{index}") for index in range(5)]
    parsed = parse_items(body_of({"items": batch}, encoding), encoding)
    assert [item.uid for item in parsed] == ["u0", "u1", "u2", "u3", "u4"]
    assert parsed[2] == parse_item(body_of(batch[2], encoding), encoding)
    assert parse_items(body_of(batch[1], encoding), encoding) == [parsed[1]]
    batch[3]["reward"] = "high"
    with pytest.raises(ItemError) as caught:
        parse_items(body_of({"items": batch}, encoding), encoding)
    assert caught.value.where == "items[3].reward"
    for wrong, said in (
        ({"items": []}, "is empty"),
        ({"items": {}}, "must be a list"),
        ({"items": [an_item(), 3]}, r"items\[1\]: an item is an object"),
        ({"items": [1] * (MAX_ITEMS + 1)}, "at most"),
        ([an_item()], "an item is an object"),
    ):
        with pytest.raises(ItemError, match=said):
            parse_items(body_of(wrong, encoding), encoding)


def test_a_mapping_is_left_as_it_is() -> None:
    item = {"instance_id": 1, "messages": MESSAGES, "reward": 1, **TOKENS}
    before = json.dumps(item)
    parse_item(item, "msgpack")
    parse_item(item)
    assert json.dumps(item) == before


def test_numbers_of_numpy_are_written() -> None:
    item = an_item(reward=numpy.float64(0.5), extra_info={"n": numpy.int64(3), "a": numpy.array([1.0])})
    plain = an_item(extra_info={"n": 3, "a": [1.0]})
    assert json.loads(dump_item(item, "json")) == plain
    assert msgspec.msgpack.decode(dump_item(item, "msgpack")) == plain
    for encoding in ENCODINGS:
        with pytest.raises(ItemError, match="cannot be written"):
            dump_item(an_item(extra_info={"x": object()}), encoding)
        with pytest.raises(ItemError, match="cannot be written"):
            dump_item(an_item(extra_info={"x": "\ud800"}), encoding)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
jsons = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@st.composite
def items(draw: st.DrawFn) -> dict[str, Any]:
    item = {
        **draw(st.dictionaries(texts.map(lambda name: "x" + name), jsons, max_size=3)),
        "uid": draw(texts.filter(bool)),
        "instance_id": draw(st.integers(-(2**63), 2**63 - 1) | texts.filter(bool)),
        "reward": draw(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9)),
        "messages": draw(
            st.lists(
                st.dictionaries(texts, jsons, max_size=3).map(lambda rest: {**rest, "role": "user"}),
                min_size=1,
                max_size=3,
            )
        ),
        "extra_info": draw(st.dictionaries(texts, jsons, max_size=3)),
    }
    if draw(st.booleans()):
        size = draw(st.integers(0, 5))
        ids = st.integers(0, 2**31 - 1)
        item["prompt_ids"] = draw(st.lists(ids, max_size=5))
        item["response_ids"] = draw(st.lists(ids, min_size=size, max_size=size))
        mask = st.lists(st.integers(0, 1), min_size=size, max_size=size)
        item["response_mask"] = draw(mask | st.none())
        logprobs = st.lists(st.floats(-100, 0, width=32), min_size=size, max_size=size)
        item["response_logprobs"] = draw(logprobs | st.none())
    return item


@settings(max_examples=60)
@given(items(), st.sampled_from(ENCODINGS), st.sampled_from(ENCODINGS))
def test_an_item_survives_every_way_through(
    item: dict[str, Any], stored: Encoding, answered: Encoding
) -> None:
    parsed = parse_item(body_of(item, stored), stored)
    assert (parsed.uid, parsed.instance_id, parsed.reward) == (
        item["uid"],
        item["instance_id"],
        item["reward"],
    )
    written = dump_item(load_item(parsed.payload, stored), answered)
    # What was written is an item again, the same one.
    again = load_item(parse_item(written, answered).payload, "json" if answered == "json" else answered)
    assert json.loads(dump_item(again, "json")) == json.loads(json.dumps(item))


def check_body(body: bytes, encoding: Encoding) -> None:
    """Nothing but an item or an ItemError may come of it, and an item must be one that can be handed out."""
    for parse in (lambda: [parse_item(body, encoding)], lambda: parse_items(body, encoding)):
        try:
            parsed = parse()
        except ItemError as error:
            assert error.message
            str(error).encode()
            continue
        for item in parsed:
            loaded = load_item(item.payload, encoding)
            assert loaded["uid"] == item.uid
            assert type(loaded["instance_id"]) is type(item.instance_id)
            assert item.reward is None or math.isfinite(item.reward)
            json.loads(dump_item(loaded, "json"))
            dump_item(loaded, "msgpack")


@settings(max_examples=500)
@given(st.binary(max_size=200), st.sampled_from(ENCODINGS))
@example(b"\xdf\xff\xff\xff\xff", "msgpack")
@example(b"\xdd\x0f\xff\xff\xff\xc0", "msgpack")
@example(b"\x81\x91\x01\x02", "msgpack")
def test_any_bytes_are_an_item_or_an_error(body: bytes, encoding: Encoding) -> None:
    check_body(body, encoding)


odd_values = jsons | st.sampled_from([math.nan, math.inf, 2**64 + 1, -(2**70), "\ud800", 1e308, -0.0])


@settings(max_examples=60)
@given(
    items(),
    st.dictionaries(
        st.sampled_from(
            ["uid", "instance_id", "messages", "reward", "extra_info", "policy_version", *TOKENS]
        ),
        odd_values | st.lists(odd_values, max_size=3),
        max_size=3,
    ),
)
def test_an_item_with_odd_fields_is_an_item_or_an_error(item: dict[str, Any], odd: dict[str, Any]) -> None:
    check_body(json.dumps({**item, **odd}).encode(), "json")
    check_body(json.dumps({"items": [item, {**item, **odd}]}).encode(), "json")
    try:
        body = msgspec.msgpack.encode({**item, **odd})
    except (OverflowError, UnicodeEncodeError):
        return  # has no form in msgpack
    check_body(body, "msgpack")


@settings(max_examples=60)
@given(items(), st.sampled_from(ENCODINGS), st.data())
def test_a_spoilt_item_is_an_item_or_an_error(
    item: dict[str, Any], encoding: Encoding, data: st.DataObject
) -> None:
    body = bytearray(body_of(item, encoding))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    check_body(bytes(body), encoding)
    check_body(bytes(body[: data.draw(st.integers(0, len(body)))]), encoding)
