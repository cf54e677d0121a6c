import copy
import itertools
import math
import random
import statistics
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollstream.buffer.groups import (
    EPSILON,
    Group,
    GroupSettings,
    Verdict,
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
from rollstream.errors import ConfigError

any_reward = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0, 1, -1.0, 0.5])
valid_reward = st.floats(0, 1) | st.sampled_from([0, 1, 0.0, 0.5, 1e-9, 1 / 3])
ratio = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.75, 1.0])


def a_group(rewards: list[Any]) -> Group:
    return "q", [
        {
            "uid": f"u{index}",
            "instance_id": "q",
            "messages": [{"role": "user", "content": str(index)}],
            "reward": reward,
            "extra_info": {"round_number": index},
        }
        for index, reward in enumerate(rewards)
    ]


groups = st.lists(any_reward, min_size=1, max_size=20).map(a_group)
valid_groups = st.lists(valid_reward, min_size=1, max_size=20).map(a_group)


def rewards_of(items: list[dict[str, Any]]) -> list[Any]:
    return [item["reward"] for item in items]


def as_multiset(items: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(item.items())) for item in items)


@st.composite
def a_settings(draw: st.DrawFn, group_size: int | None = None) -> GroupSettings:
    return GroupSettings(
        group_size=group_size or draw(st.integers(1, 20)),
        min_valid_group_size_ratio=draw(ratio),
        min_valid_item_size_ratio=draw(ratio),
        min_timeout_group_size_ratio=draw(ratio),
    )


def test_the_defaults_are_slimes() -> None:
    assert GroupSettings() == GroupSettings(16, 1.0, 0.7, 300.0, 0.7)


@pytest.mark.parametrize(
    ("size", "share", "items"),
    [(16, 0.7, 12), (10, 0.7, 7), (8, 0.7, 6), (1, 0.7, 1), (3, 0.1, 1), (8, 1.0, 8)],
)
def test_a_share_of_a_group_is_rounded_up(size: int, share: float, items: int) -> None:
    settings = GroupSettings(size, share, share, 300.0, share)
    assert settings.min_group_size == settings.min_valid_items == settings.min_timeout_group_size == items


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_size", 0),
        ("group_size", 2.0),
        ("group_size", True),
        ("min_valid_group_size_ratio", 0),
        ("min_valid_item_size_ratio", 1.1),
        ("min_timeout_group_size_ratio", math.nan),
        ("group_timeout_seconds", 0),
        ("group_timeout_seconds", math.inf),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        GroupSettings(**{name: value})


@pytest.mark.parametrize(
    ("rewards", "timed_out", "verdict"),
    [
        ([0, 1, 0, 1], False, (True, True)),
        ([0, 1, 0], False, (False, False)),
        ([0, 1, 0], True, (True, True)),
        ([0, 1], True, (False, True)),
        ([1, 1, 1, 1], False, (False, True)),
        ([0, 0, 0, 0], False, (False, True)),
        ([1, 1, 1, -1.0], False, (False, True)),  # all that is valid is equal
        ([0, 1, 1, -1.0], False, (True, True)),
        ([0, 1, None, -1.0], False, (False, True)),  # too few are valid
        ([0, 1, None], True, (False, True)),
        ([], False, (False, False)),
        ([], True, (False, True)),
    ],
)
def test_the_default_verdict(rewards: list[Any], timed_out: bool, verdict: tuple[bool, bool]) -> None:
    settings = GroupSettings(group_size=4)
    assert judge_rewards(rewards, settings, timed_out=timed_out) == Verdict(*verdict)
    assert is_valid_group(a_group(rewards), settings, timed_out=timed_out) == Verdict(*verdict)


def test_a_group_of_one_needs_a_valid_reward_only() -> None:
    settings = GroupSettings(group_size=1)
    for reward in (0, 1, 0.5):
        assert judge_rewards([reward], settings).valid
        (item,) = finish_group(a_group([reward]), settings)
        assert item["reward"] == item["raw_reward"] == reward
    assert judge_rewards([-1.0], settings) == Verdict(valid=False, finished=True)
    assert judge_rewards([None], settings) == Verdict(valid=False, finished=True)


@given(st.lists(any_reward, max_size=20), a_settings(), st.booleans(), st.randoms())
def test_a_verdict_is_sound(
    rewards: list[Any], settings: GroupSettings, timed_out: bool, order: random.Random
) -> None:
    verdict = judge_rewards(rewards, settings, timed_out=timed_out)
    assert verdict.finished or not verdict.valid
    assert verdict.finished == (timed_out or len(rewards) >= settings.min_group_size)
    if verdict.valid:
        valid = [reward for reward in rewards if is_valid_reward(reward)]
        assert len(valid) >= settings.min_valid_items
        assert settings.group_size == 1 or len(set(valid)) > 1
    order.shuffle(rewards)
    assert judge_rewards(rewards, settings, timed_out=timed_out) == verdict


def test_meta_info() -> None:
    nothing = {"total_samples": 0, "num_groups": 0, "avg_group_size": 0, "avg_reward": 0}
    assert get_group_data_meta_info({}) == nothing
    groups = {7: a_group([1, 0, None])[1], "7": a_group([0.5])[1]}
    told = {"total_samples": 4, "num_groups": 2, "avg_group_size": 2.0, "avg_reward": 0.5}
    assert get_group_data_meta_info(groups) == told
    assert summarize_rewards([[None]])["avg_reward"] == 0
    assert summarize_rewards([[1.7e308] * 9])["avg_reward"] == pytest.approx(1.7e308)


@given(any_reward)
def test_the_filter_lets_valid_rewards_through(reward: Any) -> None:
    (item,) = a_group([reward])[1]
    assert filter_item(item) == (reward is not None and 0 <= reward <= 1)


@given(groups)
def test_normalised_rewards(group: Group) -> None:
    instance_id, items = normalize_group_data(group)
    assert instance_id == "q"
    raw = rewards_of(group[1])
    assert [item["raw_reward"] for item in items] == raw
    assert [item["extra_info"]["raw_reward"] for item in items] == raw
    for item, before in zip(items, group[1], strict=True):
        if not is_valid_reward(before["reward"]):
            assert item["reward"] == before["reward"]
        assert item["messages"] is before["messages"]
        assert item["extra_info"]["round_number"] == before["extra_info"]["round_number"]
    valid = [reward for reward in raw if is_valid_reward(reward)]
    new = [item["reward"] for item in items if is_valid_reward(item["raw_reward"])]
    if not valid:
        return
    std = statistics.pstdev(valid)
    if set(valid) == {0}:
        assert new == valid
    elif std < 0.9 * EPSILON:
        assert set(new) == {0}
    elif std > 1.1 * EPSILON:
        assert math.fsum(new) / len(new) == pytest.approx(0, abs=1e-6)
        assert statistics.pstdev(new) == pytest.approx(std / (std + EPSILON), rel=1e-6)
        assert all(
            (a < b) <= (x <= y)
            for (a, x), (b, y) in itertools.product(zip(valid, new, strict=True), repeat=2)
        )


@given(groups | valid_groups, st.integers(1, 40))
def test_padding_gives_the_exact_size_and_keeps_the_sum(group: Group, group_size: int) -> None:
    items = group[1]
    assume(all(reward is None or abs(reward) < 1e300 for reward in rewards_of(items)))
    padded = pad_group_data(group, group_size)
    assert padded[0] == "q"
    assert len(padded[1]) == group_size
    if group_size < len(items):
        assert as_multiset(padded[1]) <= as_multiset(items)  # cut, not scaled
        return
    scale = group_size / len(items)
    for item in items:
        shares = [other["reward"] for other in padded[1] if other["uid"] == item["uid"]]
        assert len(shares) in (group_size // len(items), -(-group_size // len(items)))
        assert len(set(shares)) == 1
        if item["reward"] is not None:
            # An original and its copies weigh together what the original weighs in a group of its own size.
            assert math.fsum(shares) == pytest.approx(item["reward"] * scale, rel=1e-9, abs=1e-300)
    numbers = [reward for reward in rewards_of(items) if reward is not None]
    sums = math.fsum(reward for reward in rewards_of(padded[1]) if reward is not None)
    assert sums == pytest.approx(
        math.fsum(numbers) * scale, rel=1e-9, abs=1e-9 * sum(map(abs, numbers)) + 1e-300
    )


def test_a_copy_and_its_original_have_half_each() -> None:
    items = pad_group_data(a_group([0.3, 0.6, 0.9]), 4)[1]
    assert rewards_of(items) == pytest.approx([0.2, 0.8, 1.2, 0.2])
    assert [item["uid"] for item in items] == ["u0", "u1", "u2", "u0"]
    assert rewards_of(pad_group_data(a_group([0.5]), 4)[1]) == [0.5] * 4
    assert pad_group_data(a_group([]), 4)[1] == []


@given(groups, a_settings(), st.randoms())
def test_the_order_of_arrival_is_irrelevant(
    group: Group, settings: GroupSettings, order: random.Random
) -> None:
    shuffled = (group[0], list(group[1]))
    order.shuffle(shuffled[1])
    assert as_multiset(finish_group(shuffled, settings)) == as_multiset(finish_group(group, settings))
    padded = pad_group_data(group, settings.group_size)[1]
    assert as_multiset(pad_group_data(shuffled, settings.group_size)[1]) == as_multiset(padded)


@given(groups, a_settings())
def test_nothing_that_is_given_is_changed(group: Group, settings: GroupSettings) -> None:
    before = copy.deepcopy(group)
    normalized = normalize_group_data(group)
    between = copy.deepcopy(normalized)
    for item in pad_group_data(normalized, settings.group_size)[1] + finish_group(group, settings):
        item["reward"] = item["raw_reward"] = item["extra_info"] = "changed by the caller"
    for item in normalized[1]:
        item["reward"] = "changed by the caller"
        item["extra_info"]["raw_reward"] = "changed by the caller"
    assert group == before
    assert between[1] is not normalized[1]


@given(st.lists(any_reward, max_size=20).map(a_group), a_settings(), st.booleans())
def test_a_finished_group_is_whole_and_every_reward_a_number(
    group: Group, settings: GroupSettings, timed_out: bool
) -> None:
    items = finish_group(group, settings)
    assert len(items) in (0, settings.group_size)
    assert all(math.isfinite(item["reward"]) and 0 <= item["raw_reward"] <= 1 for item in items)
    assert all(item["extra_info"]["raw_reward"] == item["raw_reward"] for item in items)
    if judge_rewards(rewards_of(group[1]), settings, timed_out=timed_out).valid:
        assert len(items) == settings.group_size
    kept = [item for item in group[1] if filter_item(item)]
    if settings.group_size > 1 and len(kept) <= settings.group_size:  # a larger one is cut
        assert math.fsum(rewards_of(items)) == pytest.approx(0, abs=1e-6) or not any(
            item["raw_reward"] for item in items
        )


def test_padding_does_not_alias_items() -> None:
    items = pad_group_data(a_group([0.3, 0.6]), 8)[1]
    assert len({id(item) for item in items}) == 8
