"""What is done to a group before a trainer gets it: judging, filtering, normalising, padding. All of it pure.

A group is `(instance_id, items)`; items are dicts as on the wire. Nothing that is given is changed: new items
are made where something differs, and the rest of them (messages, tokens) is shared.

The rules are those of slime's rollout buffer, made exact where it leaves room (see each function).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rollstream.buffer.items import InstanceId
from rollstream.errors import ConfigError

ItemDict = dict[str, Any]
Group = tuple[InstanceId, list[ItemDict]]

EPSILON: Final = 1e-8
"""Added to a standard deviation; one below it is taken for zero. slime's value."""

_RATIO_SLACK: Final = 1e-9
"""0.7 * 10 is 7.000000000000001 in floating point; that group needs 7 items, not 8."""


class Verdict(NamedTuple):
    """What a judge says of a group."""

    valid: bool
    """Hand it out."""
    finished: bool
    """Nothing more is expected of it; if it is not valid either, it goes."""


MAX_GROUP_SIZE: Final = 65_536
"""Items of a group at most: far above any sampling, and a group is still read in one go."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """When a group is complete and good enough. Ratios are shares of `group_size`, above 0 and up to 1."""

    group_size: int = 16
    """Items of a whole group; a rollout's `num_repeat_per_sample`."""
    min_valid_group_size_ratio: float = 1.0
    """Items that finish a group. Below 1, a group goes before it is whole; what comes later is a new one."""
    min_valid_item_size_ratio: float = 0.7
    """Items that must pass the filter; those that are left are padded to the whole size."""
    group_timeout_seconds: float = 300.0
    """Since a group's last item; then it is judged as it is."""
    min_timeout_group_size_ratio: float = 0.7
    """Items that a timed out group must have."""

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or not 1 <= self.group_size <= MAX_GROUP_SIZE:
            raise ConfigError(
                f"group_size must be a whole number from 1 to {MAX_GROUP_SIZE}, is {self.group_size!r}"
            )
        for name in (
            "min_valid_group_size_ratio",
            "min_valid_item_size_ratio",
            "min_timeout_group_size_ratio",
        ):
            ratio = getattr(self, name)
            if not 0 < ratio <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, is {ratio!r}")
        if not 0 < self.group_timeout_seconds < math.inf:
            raise ConfigError(f"group_timeout_seconds must be above 0, is {self.group_timeout_seconds!r}")

    @property
    def min_group_size(self) -> int:
        """Items from which on a group is judged."""
        return _share(self.min_valid_group_size_ratio, self.group_size)

    @property
    def min_valid_items(self) -> int:
        """Items of a group that must be valid."""
        return _share(self.min_valid_item_size_ratio, self.group_size)

    @property
    def min_timeout_group_size(self) -> int:
        """Items that a timed out group must have."""
        return _share(self.min_timeout_group_size_ratio, self.group_size)


def is_valid_reward(reward: float | None) -> bool:
    """Whether an item with this reward can be trained on: a number from 0 to 1."""
    return reward is not None and 0 <= reward <= 1


def judge_rewards(
    rewards: Sequence[float | None], settings: GroupSettings, *, timed_out: bool = False
) -> Verdict:
    """The default verdict, which needs a group's rewards only, in any order.

    A group is finished once it has enough items, or has timed out. A finished group is valid if enough of
    its rewards are valid and not all of those are equal: equal ones teach nothing. A group of one has nothing
    to differ from: where `group_size` is 1, its reward just has to be valid.
    """
    size = len(rewards)
    if size >= settings.min_group_size:
        enough = True
    elif timed_out:
        enough = size >= settings.min_timeout_group_size
    else:
        return Verdict(valid=False, finished=False)
    # As is_valid_reward, written out: a read judges a hundred thousand of them.
    valid = [reward for reward in rewards if reward is not None and 0 <= reward <= 1]
    differ = settings.group_size == 1 or (bool(valid) and min(valid) != max(valid))
    return Verdict(valid=enough and len(valid) >= settings.min_valid_items and differ, finished=True)


def is_valid_group(group: Group, settings: GroupSettings, *, timed_out: bool = False) -> Verdict:
    """The default hook: `judge_rewards` of the group's rewards."""
    return judge_rewards([item["reward"] for item in group[1]], settings, timed_out=timed_out)


def summarize_rewards(groups: Iterable[Sequence[float | None]]) -> dict[str, Any]:
    """What `get_group_data_meta_info` says, from the groups' rewards alone. Null is in no average."""
    num_groups = total = 0
    scored: list[float] = []
    for rewards in groups:
        num_groups += 1
        total += len(rewards)
        scored += [reward for reward in rewards if reward is not None]
    return {
        "total_samples": total,
        "num_groups": num_groups,
        "avg_group_size": total / num_groups if num_groups else 0,
        # Divided before it is summed: rewards of 1e308 have an average, too.
        "avg_reward": math.fsum(reward / len(scored) for reward in scored) if scored else 0,
    }


def get_group_data_meta_info(groups: Mapping[InstanceId, list[ItemDict]]) -> dict[str, Any]:
    """The default hook: `total_samples`, `num_groups`, `avg_group_size` and `avg_reward`, 0 for no groups."""
    return summarize_rewards([item["reward"] for item in items] for items in groups.values())


def filter_item(item: ItemDict) -> bool:
    """The default hook: an item stays if its reward is valid. A failed rollout's (-1) is not."""
    return is_valid_reward(item["reward"])


def keep_raw_reward(item: ItemDict, reward: float | None) -> ItemDict:
    """A new item with this reward; the one it had is its `raw_reward`, at top level and in `extra_info`."""
    raw = item["reward"]
    return {
        **item,
        "reward": reward,
        "raw_reward": raw,
        "extra_info": {**(item.get("extra_info") or {}), "raw_reward": raw},
    }


def normalize_rewards(rewards: Sequence[float | None]) -> list[float | None]:
    """`(reward - mean) / (std + 1e-8)` over the valid rewards, with the population's std.

    Below a deviation of 1e-8 the valid rewards become 0; zeros stay as they are, as do rewards that are not
    valid.
    """
    valid = [reward for reward in rewards if reward is not None and 0 <= reward <= 1]
    if not any(valid):
        return list(rewards)
    mean = math.fsum(valid) / len(valid)
    std = math.sqrt(math.fsum([(reward - mean) ** 2 for reward in valid]) / len(valid))
    scale = 0.0 if std < EPSILON else 1 / (std + EPSILON)
    return [
        (reward - mean) * scale if reward is not None and 0 <= reward <= 1 else reward for reward in rewards
    ]


def normalize_group_data(group: Group) -> Group:
    """The default hook: every reward is that of `normalize_rewards`."""
    instance_id, items = group
    rewards = normalize_rewards([item["reward"] for item in items])
    return instance_id, [keep_raw_reward(item, reward) for item, reward in zip(items, rewards, strict=True)]


def pad_rewards(
    rewards: Sequence[float | None], uids: Sequence[str], group_size: int
) -> list[tuple[int, float | None]]:
    """Exactly `group_size` items, whatever the group has (but for none, which stay none).

    Rewards are scaled by `group_size / n`, then an item and its copies share its reward evenly (halves, if
    there is one copy). So the sum of rewards is that of the scaled ones: the group's mean is kept, and each
    original keeps the weight it had. Which items get a copy more than others follows from their uids, not
    from the order of their arrival. A larger group is cut to size, not scaled.

    Returns:
        Positions, each with its reward: the items in their order, then the copies.
    """
    size = len(rewards)
    if size in (0, group_size):
        return list(enumerate(rewards))
    by_uid = sorted(range(size), key=lambda at: (uids[at], at))
    if size > group_size:
        return [(at, rewards[at]) for at in sorted(by_uid[:group_size])]
    every, more = divmod(group_size, size)
    shares = [every] * size
    for at in by_uid[:more]:
        shares[at] += 1
    scale = group_size / size
    shared = [
        None if reward is None else reward * scale / share
        for reward, share in zip(rewards, shares, strict=True)
    ]
    copies = [(at, shared[at]) for at, share in enumerate(shares) for _ in range(share - 1)]
    return [*enumerate(shared), *copies]


def pad_group_data(group: Group, group_size: int) -> Group:
    """The default hook: `pad_rewards`, of items. Copies keep their original's uid."""
    instance_id, items = group
    uids = [str(item.get("uid")) for item in items]
    padded = pad_rewards([item["reward"] for item in items], uids, group_size)
    return instance_id, [{**items[at], "reward": reward} for at, reward in padded]


def finish_rewards(
    rewards: Sequence[float | None], uids: Callable[[], Sequence[str]], settings: GroupSettings
) -> list[tuple[int, float | None]]:
    """Filters, normalises and pads a valid group by the default hooks, which look at rewards and uids only.

    Args:
        rewards: of its items.
        uids: the same, asked for where they count.
        settings: of the group.

    Returns:
        Positions of items, each with its reward: `group_size` of them, or none where fewer than
        `min_valid_items` passed the filter.
    """
    kept = [at for at, reward in enumerate(rewards) if is_valid_reward(reward)]
    if len(kept) < settings.min_valid_items:
        return []
    scored = [rewards[at] for at in kept]
    if settings.group_size > 1:  # else there is nothing to compare it with: every reward would be 0
        scored = normalize_rewards(scored)
    if len(kept) == settings.group_size:
        return list(zip(kept, scored, strict=True))
    known = uids()
    padded = pad_rewards(scored, [known[at] for at in kept], settings.group_size)
    return [(kept[at], reward) for at, reward in padded]


def finish_group(group: Group, settings: GroupSettings) -> list[ItemDict]:
    """`finish_rewards`, of items.

    Returns:
        `group_size` new items, or none where fewer than `min_valid_items` passed the filter.
    """
    items = group[1]
    chosen = finish_rewards(
        [item["reward"] for item in items], lambda: [str(item.get("uid")) for item in items], settings
    )
    return [keep_raw_reward(items[at], reward) for at, reward in chosen]


def _share(ratio: float, size: int) -> int:
    return max(1, math.ceil(ratio * size - _RATIO_SLACK * size))
