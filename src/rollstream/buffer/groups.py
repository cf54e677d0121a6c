"""What is done to a group before a trainer gets it: judging, filtering, normalising, padding. All of it pure.

A group is `(instance_id, items)`; items are dicts as on the wire. Nothing that is given is changed: new items
are made where something differs. The rules are those of slime's rollout buffer, made exact where it leaves
room (see each function). GroupHooks of a generator file may call them.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from rollstream.buffer.items import Encoding, InstanceId, dump_item, load_item
from rollstream.errors import ConfigError, RollstreamError

ItemDict = dict[str, Any]
Group = tuple[InstanceId, list[ItemDict]]

EPSILON: Final = 1e-8
"""Added to a standard deviation; one below it is taken for zero. slime's value."""

MAX_GROUP_SIZE: Final = 4096
"""A group is read in one go, and its rewards are kept in one row."""

_RATIO_SLACK: Final = 1e-9
"""0.7 * 10 is 7.000000000000001 in floating point; that group needs 7 items, not 8."""


FINISHING: Final = frozenset({"filter_item", "normalize_group_data", "pad_group_data", "transform_group"})
"""What is done to a valid group. `transform_group` stands for the other three at once."""


class HookError(RollstreamError):
    """A hook raised, hung, ended its process, or gave back what cannot be handed out.

    Attributes:
        hook: Its name; several, joined by ", ", if it may have been any of them; "" for the file as a whole.
        traceback: Python's, as text; the message if there is none.
    """

    def __init__(self, message: str, hook: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.hook = hook
        self.traceback = trace or message


class Verdict(NamedTuple):
    """Whether to hand a group out, and whether anything more is expected of it."""

    valid: bool
    finished: bool


_Ratio = Annotated[float, Meta(gt=0, le=1)]


class GroupSettings(msgspec.Struct, frozen=True):
    """When a group is complete and good enough. Ratios are shares of `group_size`."""

    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)] = 16
    min_valid_group_size_ratio: _Ratio = 1.0
    """Items from which on a group is judged. Below 1 it goes before it is whole, and later items open another."""
    min_valid_item_size_ratio: _Ratio = 0.7
    """Items that must pass the filter; those that are left are padded to the whole size."""
    group_timeout_seconds: Annotated[float, Meta(gt=0, le=1e9)] = 300.0
    """Since a group's last item; then it is judged as it is."""
    min_timeout_group_size_ratio: _Ratio = 0.7
    """Items that a timed out group must have."""
    raw: bool = False
    """Every group that has enough items is handed out as it was written: any reward, nothing changed."""

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

    def of_size(self, size: int) -> "GroupSettings":
        """These for a group that keeps its size when the server is started with another one."""
        return self if self.group_size == size else msgspec.structs.replace(self, group_size=size)

    def changed(self, values: Mapping[str, Any]) -> "GroupSettings":
        """These with other values; numbers may be texts, as slime sends them. Raises `ConfigError`."""
        known = {name: values[name] for name in self.__struct_fields__ if values.get(name) is not None}
        try:
            return msgspec.convert({**msgspec.structs.asdict(self), **known}, GroupSettings, strict=False)
        except msgspec.ValidationError as error:
            text, _, name = str(error).rstrip("`").partition(" - at `$.")
            raise ConfigError(f"{name}: {values[name]!r:.100}: {text}") from None

    def for_job(self, payload: Mapping[str, Any]) -> "GroupSettings":
        """The settings of a job: what its payload says counts. Raises `ConfigError`."""
        settings = self.changed(payload)
        if (repeats := payload.get("num_repeat_per_sample")) is None:
            return settings
        try:
            of_repeats = settings.changed({"group_size": repeats})
        except ConfigError as error:
            raise ConfigError(str(error).replace("group_size", "num_repeat_per_sample", 1)) from None
        if payload.get("group_size") is not None and of_repeats != settings:
            raise ConfigError(f"group_size: {settings.group_size}, but num_repeat_per_sample is {repeats!r}")
        return of_repeats


def is_valid_reward(reward: float | None) -> bool:
    """Whether an item with this reward can be trained on: a number from 0 to 1."""
    return reward is not None and 0 <= reward <= 1


def judge_rewards(
    rewards: Sequence[float | None], settings: GroupSettings, *, timed_out: bool = False
) -> Verdict:
    """The default verdict, which needs a group's rewards only, in any order.

    A group is finished once it has enough items, or has timed out. A finished group is valid if enough of
    its rewards are valid and not all of those are equal: equal ones teach nothing. Where `group_size` is 1
    there is nothing to compare: its reward just has to be valid. With `raw`, having enough items is enough.
    """
    size = len(rewards)
    if size >= settings.min_group_size:
        enough = True
    elif timed_out:
        enough = size >= settings.min_timeout_group_size
    else:
        return Verdict(valid=False, finished=False)
    if settings.raw or not enough:
        return Verdict(valid=enough, finished=True)
    valid = [reward for reward in rewards if is_valid_reward(reward)]
    differ = settings.group_size == 1 or len(set(valid)) > 1
    return Verdict(valid=len(valid) >= settings.min_valid_items and differ, finished=True)


def is_valid_group(group: Group, settings: GroupSettings, timed_out: bool = False) -> Verdict:
    """The default hook: `judge_rewards` of the group's rewards."""
    return judge_rewards([_scored(item) for item in group[1]], settings, timed_out=timed_out)


def drop_reason(
    rewards: Sequence[float | None], settings: GroupSettings, *, failed: int, timed_out: bool
) -> str:
    """Why the default rule drops a finished group: `timed_out`, `failed`, `unscored`, `out_of_range`,
    `too_few_valid` or `equal_rewards`.

    Args:
        rewards: None for an item that is not scored, or failed.
        settings: of the group.
        failed: how many of the items say that their rollout failed.
        timed_out: whether its time is over.
    """
    scored = [reward for reward in rewards if reward is not None]
    if timed_out and len(rewards) < settings.min_timeout_group_size:
        return "timed_out"
    if not any(reward >= 0 for reward in scored) and failed:
        return "failed"
    if not scored:
        return "unscored"
    valid = sum(map(is_valid_reward, scored))
    if valid == 0:
        return "out_of_range"
    return "too_few_valid" if valid < settings.min_valid_items else "equal_rewards"


def summarize_rewards(groups: Iterable[Sequence[float | None]], *, raw: bool = False) -> dict[str, Any]:
    """What `get_group_data_meta_info` says, from the groups' rewards alone.

    Rewards that are None, or below 0 (which slime's generators give to a failed rollout; not with `raw`), are
    in no figure but `total_samples` and `unscored`.
    """
    num_groups = total = 0
    scored: list[float] = []
    for rewards in groups:
        num_groups += 1
        total += len(rewards)
        scored += [reward for reward in rewards if reward is not None and (raw or reward >= 0)]
    # Divided by the largest: neither the sum of many 1e308 nor their squares are numbers.
    largest = max(map(abs, scored), default=0.0) or 1.0
    shares = [reward / largest for reward in scored]
    mean = math.fsum(shares) / max(len(shares), 1)
    spread = math.sqrt(math.fsum((share - mean) ** 2 for share in shares) / max(len(shares), 1))
    return {
        "total_samples": total,
        "num_groups": num_groups,
        "avg_group_size": total / num_groups if num_groups else 0,
        "avg_reward": mean * largest,
        "reward_std": min(spread * largest, sys.float_info.max),
        "reward_min": min(scored, default=0),
        "reward_max": max(scored, default=0),
        "unscored": total - len(scored),
    }


def get_group_data_meta_info(groups: Mapping[InstanceId, list[ItemDict]]) -> dict[str, Any]:
    """The default hook: `summarize_rewards`."""
    return summarize_rewards([_scored(item) for item in items] for items in groups.values())


def filter_item(item: ItemDict, task_type: str = "") -> bool:
    """The default hook: an item stays if its reward is valid and its rollout has not failed, for any task."""
    return is_valid_reward(_scored(item))


def keep_raw_reward(item: ItemDict, reward: float | None) -> ItemDict:
    """A new item with this reward; the one it had is its `raw_reward`, at top level and in `extra_info`."""
    raw = item["reward"]
    return {
        **item,
        "reward": reward,
        "raw_reward": raw,
        "extra_info": {**(item.get("extra_info") or {}), "raw_reward": raw},
    }


def normalize_rewards(rewards: Sequence[float | None], epsilon: float = EPSILON) -> list[float | None]:
    """`(reward - mean) / (std + epsilon)` over the valid rewards, with the population's std.

    Below a deviation of 1e-8 the valid rewards become 0; zeros stay as they are, as do rewards that are not
    valid.
    """
    valid = [reward for reward in rewards if reward is not None and 0 <= reward <= 1]
    if not any(valid):
        return list(rewards)
    mean = math.fsum(valid) / len(valid)
    std = math.sqrt(math.fsum([(reward - mean) ** 2 for reward in valid]) / len(valid))
    scale = 0.0 if std < EPSILON else 1 / (std + epsilon)
    return [
        (reward - mean) * scale if reward is not None and 0 <= reward <= 1 else reward for reward in rewards
    ]


def normalize_group_data(group: Group, epsilon: float = EPSILON, algo: str = "grpo") -> Group:
    """The default hook: every reward is that of `normalize_rewards`, which is what GRPO does."""
    if algo != "grpo":
        raise ValueError(f"normalize_group_data knows the algorithm grpo, not {algo!r:.50}")
    instance_id, items = group
    rewards = normalize_rewards([item["reward"] for item in items], epsilon)
    return instance_id, [keep_raw_reward(item, reward) for item, reward in zip(items, rewards, strict=True)]


def pad_rewards(
    rewards: Sequence[float | None], uids: Sequence[str], group_size: int
) -> list[tuple[int, float | None]]:
    """Exactly `group_size` items, whatever the group has (but for none, which stay none).

    Rewards are scaled by `group_size / n`, then an item and its copies share its reward evenly (halves, if
    there is one copy). So the sum of rewards is that of the scaled ones: the group's mean is kept, and each
    original keeps its weight. Which items get a copy more than others follows from their uids, not from the
    order of their arrival. A larger group is cut to size, not scaled.

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


class StoredItem(NamedTuple):
    """An item as a store gives it back."""

    uid: str
    reward: float | None
    """None: not scored, or failed."""
    encoding: Encoding
    body: bytes


class GroupHooks(Protocol):
    """Calls the hooks of generator files."""

    @property
    def files(self) -> Mapping[str, Any]:
        """The files that can be used now, by task."""

    def overridden(self, task_type: str) -> frozenset[str]:
        """Names of a task's own hooks."""

    async def call(
        self,
        call: Literal["judge", "finish", "meta_info"],
        task_type: str,
        settings: GroupSettings,
        groups: Sequence[tuple[InstanceId, Sequence[StoredItem]]],
        timed_out: bool = False,
        encoding: Encoding = "json",
    ) -> Any:
        """Gives a verdict, the bodies of a group as it is handed out, or JSON. Raises `HookError`."""


def finish_group(
    items: Sequence[StoredItem], settings: GroupSettings, encoding: Encoding | None
) -> list[bytes]:
    """Filters, normalises and pads a valid group by the default hooks.

    Only the outermost level of a body is taken apart, and `extra_info`: messages and tokens stay bytes.

    Args:
        items: of the group.
        settings: of the group.
        encoding: of what comes out; None: each item's own.

    Returns:
        `group_size` items, none where too few passed the filter. With `settings.raw` the items as they are.
    """
    if settings.raw:
        return [_transcoded(item.body, item.encoding, encoding) for item in items]
    kept = [item for item in items if is_valid_reward(item.reward)]
    if len(kept) < settings.min_valid_items:
        return []
    rewards: Sequence[float | None] = [item.reward for item in kept]
    if settings.group_size > 1:  # else there is nothing to compare it with: every reward would be 0
        rewards = normalize_rewards(rewards)
    padded = pad_rewards(rewards, [item.uid for item in kept], settings.group_size)
    return [_transcoded(_with_reward(kept[at], reward), kept[at].encoding, encoding) for at, reward in padded]


_Top = dict[str, msgspec.Raw]
_CODECS: Final = {
    name: (codec.Decoder(_Top).decode, codec.Decoder(_Top | None).decode, codec.Encoder().encode)
    for name, codec in (("json", msgspec.json), ("msgpack", msgspec.msgpack))
}
"""How an item's top level and its `extra_info` are taken apart, and put together."""


def _with_reward(item: StoredItem, reward: float | None) -> bytes:
    """As `keep_raw_reward`, on a body."""
    top, extra_of, encode = _CODECS[item.encoding]
    values: dict[str, Any] = top(item.body)
    raw = values["reward"]
    extra = (extra_of(values["extra_info"]) if "extra_info" in values else None) or {}
    values |= {"reward": reward, "raw_reward": raw, "extra_info": {**extra, "raw_reward": raw}}
    body: bytes = encode(values)
    return body


def _transcoded(body: bytes, encoding: Encoding, wanted: Encoding | None) -> bytes:
    return body if wanted in (None, encoding) else dump_item(load_item(body, encoding), wanted)


def _scored(item: ItemDict) -> float | None:
    reward: float | None = item["reward"]
    return None if (item.get("extra_info") or {}).get("failure") is not None else reward


def _share(ratio: float, size: int) -> int:
    return max(1, math.ceil(ratio * size - _RATIO_SLACK * size))
