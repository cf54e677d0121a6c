"""Groups finished from their stored bytes are those that are finished from parsed items."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollstream.buffer.groups import GroupSettings, finish_group
from rollstream.buffer.items import Encoding, load_item, parse_item
from rollstream.buffer.raw_groups import dump_items, finish_raw

ENCODINGS: list[Encoding] = ["json", "msgpack"]

KEYS = st.sampled_from(["reward", "raw_reward", "extra_info", "uid", 'a"reward', "ü\n", ""]) | st.text(
    max_size=3
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(['"reward":1', "\\", "}", '{"extra_info":{', "\u2028", "\x7f"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
REWARDS = st.sampled_from([0, 1, 0.5, -0.0, 1e-300, 1e-9, 0.1, -1, 2, None]) | st.floats(0, 1)
REST = st.dictionaries(KEYS, VALUES, max_size=4)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[dict[str, Any]], GroupSettings]:
    size = draw(st.integers(1, 6))
    items = []
    for at in range(draw(st.integers(1, size))):
        known = {
            "uid": f"{draw(st.text(max_size=3))}{at}",
            "instance_id": 7,
            "messages": [{"role": "user", "content": draw(st.text(max_size=5))}],
            "reward": draw(REWARDS),
        }
        if draw(st.booleans()):
            known["extra_info"] = draw(st.none() | REST)
        if draw(st.booleans()):
            known |= {"prompt_ids": [1], "response_ids": [2, 3], "response_logprobs": [-0.5, 0.0]}
        rest = {key: value for key, value in draw(REST).items() if key not in ("uid", "extra_info", "reward")}
        items.append(dict(draw(st.permutations([*known.items(), *rest.items()]))))
    settings = GroupSettings(
        group_size=size, min_valid_item_size_ratio=draw(st.sampled_from([0.01, 0.7, 1.0]))
    )
    return items, settings


def both(
    items: list[dict[str, Any]], settings: GroupSettings, encoding: Encoding
) -> tuple[bytes, bytes, list[str], list[str]]:
    """A group finished from its bytes, and by way of parsed items: bodies, and uids that were left out."""
    payloads = [parse_item(item, encoding).payload for item in items]
    raw = finish_raw(payloads, encoding, settings)
    given = [load_item(payload, encoding) for payload in payloads]
    expected = finish_group((7, given), settings)
    kept = {item["uid"] for item in expected}
    left_out = [item["uid"] for item in given if item["uid"] not in kept]
    if raw is None:
        assert expected == []
        return b"", b"", [], []
    assert raw.items == len(expected) == settings.group_size
    return raw.body, dump_items(expected, encoding), raw.left_out, left_out


@given(encoding=st.sampled_from(ENCODINGS), group=groups())
@example(
    encoding="json",
    group=([{"uid": "u", "instance_id": 7, "messages": [{"role": "u"}], "reward": 0}], GroupSettings(1)),
)
def test_bytes_and_parsed_items_give_the_same(encoding: Encoding, group: Any) -> None:
    body, expected, left_out, expected_left_out = both(*group, encoding)
    assert left_out == expected_left_out
    assert body == expected  # also the order of keys, and every number's form


def test_what_becomes_of_an_item() -> None:
    items = [
        {
            "uid": f"u{at}",
            "instance_id": 7,
            "messages": [{"role": "user", "content": 'say "reward":5'}],
            "reward": reward,
            "scores": {"reward": 9},
            "extra_info": {"raw_reward": "old", "reward": 3} if at else {},
        }
        for at, reward in enumerate([0, 1, -1])
    ]
    raw = finish_raw(
        [parse_item(item).payload for item in items],
        "json",
        GroupSettings(group_size=2, min_valid_item_size_ratio=0.5),
    )
    assert raw is not None and raw.left_out == ["u2"]
    first, second = json.loads(raw.body)
    assert (first["reward"], second["reward"]) == pytest.approx((-1, 1))
    assert (first["raw_reward"], second["raw_reward"]) == (0, 1)
    assert first["extra_info"] == {"raw_reward": 0}
    assert second["extra_info"] == {"raw_reward": 1, "reward": 3}
    assert first["scores"] == {"reward": 9} and first["messages"] == items[0]["messages"]


def test_too_few_valid_items() -> None:
    payload = parse_item({"instance_id": 7, "messages": [{"role": "user"}], "reward": -1, "uid": "u"}).payload
    assert finish_raw([payload], "json", GroupSettings(group_size=1)) is None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_no_payload_is_an_error(encoding: Encoding) -> None:
    with pytest.raises(msgspec.DecodeError):
        finish_raw([b"\xc1"], encoding, GroupSettings(group_size=1))
