"""The rules of groups: when one is complete and good, why not, what becomes of its rewards, how it is padded."""

import copy
import json
import math
import random
import statistics
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollstream.buffer.groups import (
    EPSILON,
    GroupSettings,
    StoredItem,
    Verdict,
    drop_reason,
    filter_item,
    finish_group,
    get_group_data_meta_info,
    is_valid_group,
    is_valid_reward,
    judge_rewards,
    normalize_group_data,
    pad_group_data,
    summarize_rewards,
)
from rollstream.buffer.items import Encoding, dump_item, load_item
from rollstream.errors import ConfigError
from tests.support.buffer import named_group

ENCODINGS: list[Encoding] = ["json", "msgpack"]

valid_reward = st.sampled_from([0, 1, 0.5, 1e-9]) | st.floats(0, 1)
any_reward = valid_reward | st.sampled_from([-1.0, 2, None]) | st.floats(-1e300, 1e300)
ratio = st.floats(0.01, 1.0)


def encoded(items: list[dict[str, Any]], encoding: Encoding = "json") -> list[StoredItem]:
    return [StoredItem(one["uid"], one["reward"], encoding, dump_item(one, encoding)) for one in items]


def finished(
    items: list[dict[str, Any]], settings: GroupSettings, encoding: Encoding = "json"
) -> list[dict[str, Any]]:
    done = finish_group(encoded(items, encoding), settings, encoding)
    return [load_item(body, encoding) for body in done]


@st.composite
def a_settings(draw: st.DrawFn) -> GroupSettings:
    return GroupSettings(
        group_size=draw(st.integers(1, 20)),
        min_valid_group_size_ratio=draw(ratio),
        min_valid_item_size_ratio=draw(ratio),
        min_timeout_group_size_ratio=draw(ratio),
    )


def as_multiset(items: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(item, sort_keys=True) for item in items)


def test_the_defaults_are_slimes() -> None:
    assert GroupSettings() == GroupSettings(16, 1.0, 0.7, 300.0, 0.7, False)


@pytest.mark.parametrize(
    ("size", "share", "items"),
    [(16, 0.7, 12), (10, 0.7, 7), (8, 0.7, 6), (1, 0.7, 1), (3, 0.1, 1), (8, 1.0, 8)],
)
def test_a_share_of_a_group_is_rounded_up(size: int, share: float, items: int) -> None:
    settings = GroupSettings(size, share, share, 300.0, share)
    assert settings.min_group_size == settings.min_valid_items == settings.min_timeout_group_size == items


RATIOS = ("min_valid_group_size_ratio", "min_valid_item_size_ratio", "min_timeout_group_size_ratio")
BAD_VALUES: dict[str, list[Any]] = {
    "group_size": [0, 2.5, True, "many", 10**9, []],
    "group_timeout_seconds": [0, -1, math.inf, math.nan, "soon"],
    "raw": ["yes", 2],
    **{name: [0, 1.1, math.nan, True, "x"] for name in RATIOS},
}


@pytest.mark.parametrize(("name", "value"), [(name, one) for name, bad in BAD_VALUES.items() for one in bad])
def test_settings_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        GroupSettings().for_job({name: value})


def test_a_jobs_payload_counts() -> None:
    defaults = GroupSettings(8, 1.0, 0.5, 60.0, 0.5)
    assert defaults.for_job({"task_type": "x", "group_size": None}) == defaults
    assert defaults.for_job({"group_size": 3, "num_repeat_per_sample": "3"}).group_size == 3
    given_all = {
        "num_repeat_per_sample": "2", "min_valid_group_size_ratio": "0.9", "min_valid_item_size_ratio": 0.8,
        "group_timeout_seconds": "1.5", "min_timeout_group_size_ratio": 0.6, "raw": True,
    }  # fmt: skip
    assert defaults.for_job(given_all) == GroupSettings(2, 0.9, 0.8, 1.5, 0.6, True)
    for bad in (
        {"group_size": 2, "num_repeat_per_sample": 3},
        *({"num_repeat_per_sample": n} for n in (0, "x")),
    ):
        with pytest.raises(ConfigError, match="num_repeat_per_sample"):
            defaults.for_job(bad)


@pytest.mark.parametrize(
    ("rewards", "timed_out", "verdict", "reason"),
    [
        ([0, 1, 0, 1], False, (True, True), ""),
        ([0, 1, 0], False, (False, False), ""),
        ([0, 1, 0], True, (True, True), ""),
        ([0, 1], True, (False, True), "timed_out"),
        ([1, 1, 1, 1], False, (False, True), "equal_rewards"),
        ([0, 0, 0, 0], False, (False, True), "equal_rewards"),
        ([1, 1, 1, -1.0], False, (False, True), "equal_rewards"),  # all that is valid is equal
        ([0, 1, 1, -1.0], False, (True, True), ""),
        ([0, 1, None, -1.0], False, (False, True), "too_few_valid"),
        ([0, 1, None], True, (False, True), "too_few_valid"),
        ([None] * 4, False, (False, True), "unscored"),
        ([-1, -1, 5, 7], False, (False, True), "out_of_range"),
        ([], False, (False, False), ""),
        ([], True, (False, True), "timed_out"),
    ],
)
def test_the_default_verdict(
    rewards: list[Any], timed_out: bool, verdict: tuple[bool, bool], reason: str
) -> None:
    settings = GroupSettings(group_size=4)
    assert judge_rewards(rewards, settings, timed_out=timed_out) == Verdict(*verdict)
    assert is_valid_group(named_group(rewards), settings, timed_out=timed_out) == Verdict(*verdict)
    if reason:
        assert drop_reason(rewards, settings, failed=0, timed_out=timed_out) == reason
        raw = judge_rewards(rewards, replace(settings, raw=True), timed_out=timed_out)
        assert raw == Verdict(reason != "timed_out", True)
    failed = [None] * len(rewards)  # what a store keeps of failed items
    if len(rewards) == 4:
        assert drop_reason(failed, settings, failed=4, timed_out=False) == "failed"


def test_a_group_of_one_needs_a_valid_reward_only() -> None:
    settings = GroupSettings(group_size=1)
    for reward in (0, 1, 0.5):
        assert judge_rewards([reward], settings).valid
        (item,) = finished(named_group([reward])[1], settings)
        assert item["reward"] == item["raw_reward"] == reward
    for bad in (-1.0, None):
        assert judge_rewards([bad], settings) == Verdict(valid=False, finished=True)


@given(st.lists(any_reward, max_size=20), a_settings(), st.booleans(), st.booleans(), st.randoms())
def test_a_verdict_is_sound(
    rewards: list[Any], settings: GroupSettings, raw: bool, timed_out: bool, order: random.Random
) -> None:
    settings = replace(settings, raw=raw)
    verdict = judge_rewards(rewards, settings, timed_out=timed_out)
    assert verdict.finished or not verdict.valid
    assert verdict.finished == (timed_out or len(rewards) >= settings.min_group_size)
    if verdict.valid and not raw:
        valid = [reward for reward in rewards if is_valid_reward(reward)]
        assert len(valid) >= settings.min_valid_items
        assert settings.group_size == 1 or len(set(valid)) > 1
    order.shuffle(rewards)
    assert judge_rewards(rewards, settings, timed_out=timed_out) == verdict


def test_meta_info() -> None:
    nothing = get_group_data_meta_info({})
    assert set(nothing.values()) == {0}
    groups: Any = {
        7: named_group([1, 0, None, -1])[1],
        "7": named_group([0.5])[1],
        "f": named_group([0.9], failure="x")[1],
    }
    assert get_group_data_meta_info(groups) == {
        "total_samples": 6, "num_groups": 3, "avg_group_size": 2.0, "avg_reward": 0.5,
        "reward_std": pytest.approx(statistics.pstdev([1, 0, 0.5])), "reward_min": 0, "reward_max": 1, "unscored": 3,
    }  # fmt: skip
    for rewards in ([1.7e308] * 9, [sys.float_info.max] * 3):
        assert summarize_rewards([rewards])["avg_reward"] == pytest.approx(rewards[0])
    assert summarize_rewards([[-1, 1]], raw=True)["avg_reward"] == 0


@given(st.lists(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False))), st.booleans())
def test_meta_info_of_any_rewards_is_finite(groups: list[list[float | None]], raw: bool) -> None:
    """It is in the answer to every read: one item with a reward of 1e308 must not spoil them all."""
    assert all(map(math.isfinite, summarize_rewards(groups, raw=raw).values()))


@given(any_reward, st.booleans())
def test_the_filter_lets_valid_rewards_through(reward: Any, failed: bool) -> None:
    (item,) = named_group([reward], **({"failure": {}} if failed else {}))[1]
    assert filter_item(item) == (reward is not None and 0 <= reward <= 1 and not failed)


@given(st.lists(any_reward, min_size=1, max_size=20).map(named_group))
def test_normalised_rewards(group: Any) -> None:
    before = copy.deepcopy(group)
    _, items = normalize_group_data(group)
    assert group == before
    raw = [item["reward"] for item in group[1]]
    assert (
        [item["raw_reward"] for item in items] == [item["extra_info"]["raw_reward"] for item in items] == raw
    )
    assert all(
        item["reward"] == old for item, old in zip(items, raw, strict=True) if not is_valid_reward(old)
    )
    valid = [reward for reward in raw if is_valid_reward(reward)]
    new = [item["reward"] for item in items if is_valid_reward(item["raw_reward"])]
    std = statistics.pstdev(valid) if valid else 0
    if set(valid) <= {0}:
        assert new == valid
    elif std < 0.9 * EPSILON:
        assert set(new) == {0}
    elif std > 1.1 * EPSILON:
        assert math.fsum(new) / len(new) == pytest.approx(0, abs=1e-6)
        assert statistics.pstdev(new) == pytest.approx(std / (std + EPSILON), rel=1e-6)


@given(st.lists(any_reward, min_size=1, max_size=20).map(named_group), st.integers(1, 40))
def test_padding_gives_the_exact_size_and_keeps_the_sum(group: Any, group_size: int) -> None:
    items = group[1]
    assume(all(item["reward"] is None or abs(item["reward"]) < 1e298 for item in items))
    padded = pad_group_data(group, group_size)[1]
    assert len(padded) == group_size and len({id(item) for item in padded}) == group_size
    if group_size < len(items):
        assert as_multiset(padded) <= as_multiset(items)  # cut, not scaled
        return
    for item in items:
        shares = [other["reward"] for other in padded if other["uid"] == item["uid"]]
        assert (
            len(shares) in (group_size // len(items), -(-group_size // len(items))) and len(set(shares)) == 1
        )
        if item["reward"] is not None:
            # An original and its copies weigh together what the original weighs in a group of its own size.
            scaled = item["reward"] * group_size / len(items)
            assert math.fsum(shares) == pytest.approx(scaled, rel=1e-9, abs=1e-300)


@given(st.lists(any_reward, min_size=1, max_size=20), a_settings(), st.sampled_from(ENCODINGS), st.randoms())
def test_a_group_from_its_bytes_is_the_default_hooks_one(
    rewards: list[Any], settings: GroupSettings, encoding: Encoding, order: random.Random
) -> None:
    items = named_group(rewards)[1]
    done = finished(items, settings, encoding)
    kept = [item for item in items if filter_item(item)]
    if len(kept) < settings.min_valid_items:
        assert done == []
        return
    normal = normalize_group_data(("q", kept)) if settings.group_size > 1 else ("q", kept)
    expected = pad_group_data(normal, settings.group_size)[1]
    assert [(one["uid"], one["reward"]) for one in done] == [(one["uid"], one["reward"]) for one in expected]
    assert all(one["raw_reward"] == one["extra_info"]["raw_reward"] for one in done)
    assert all(
        one["messages"] == items[0]["messages"] and "round_number" in one["extra_info"] for one in done
    )
    shuffled = list(items)
    order.shuffle(shuffled)
    assert as_multiset(finished(shuffled, settings, encoding)) == as_multiset(done)


@given(st.lists(any_reward, min_size=1, max_size=6), st.sampled_from(ENCODINGS), st.sampled_from(ENCODINGS))
def test_raw_changes_nothing(rewards: list[Any], came: Encoding, wanted: Encoding) -> None:
    items = named_group(rewards)[1]
    done = finish_group(encoded(items, came), GroupSettings(4, raw=True), wanted)
    assert [load_item(body, wanted) for body in done] == items


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_becomes_of_an_odd_item(encoding: Encoding) -> None:
    items = named_group([0, 1, -1])[1]
    items[0] |= {"scores": {"reward": 9}, 'a"reward': "ü\n"}
    items[1] |= {"extra_info": {"raw_reward": "old", "reward": 3}, "raw_reward": 8}
    del items[0]["extra_info"]
    settings = GroupSettings(group_size=2, min_valid_item_size_ratio=0.5)
    first, second = finished(items, settings, encoding)
    assert (first["raw_reward"], second["raw_reward"]) == (0, 1)
    assert first["extra_info"] == {"raw_reward": 0}
    assert (first["scores"], first['a"reward']) == ({"reward": 9}, "ü\n")
    assert second["extra_info"] == {"raw_reward": 1, "reward": 3}
    mixed = encoded(items[:1], "json") + encoded(items[1:], "msgpack")
    assert len(finish_group(mixed, settings, encoding)) == 2
