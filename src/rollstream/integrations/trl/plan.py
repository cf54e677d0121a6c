"""Which prompts are generated: those of TRL's sampler, known ahead by replaying it, or a curriculum's."""

import logging
from collections.abc import Sequence
from functools import partial
from statistics import pstdev
from typing import TYPE_CHECKING, Any

from rollstream.errors import ConfigError
from rollstream.integrations.trl.environment import read_row
from rollstream.training import Curriculum, Group, NoSignal, Plan, Priority, TokenBudget
from rollstream.training.curriculum import easy_to_hard, medium_first
from rollstream.training.plan import FunctionPlan
from rollstream.user_code import import_name

if TYPE_CHECKING:
    from rollstream.integrations.trl.config import GRPOEnvConfig

logger = logging.getLogger(__name__)

_EPOCHS_KEPT = 3
"""Permutations in memory: work in flight reaches over one end of an epoch, over two of a tiny one."""

_SAMPLED = 64
"""Rows that say which dataset it is."""


def sample_prompts(dataset: Sequence[Any]) -> list[str]:
    """The prompt keys of some rows, evenly spaced: a resume knows its dataset by them."""
    rows = len(dataset)
    count = min(rows, _SAMPLED)
    return [read_row(dataset[number * rows // count]).prompt_key for number in range(count)]


def check_prompts(saved: Sequence[str], prompts: Sequence[str]) -> None:
    """Refuses to go on with another dataset. Rows that were mended meanwhile are trained as they are now.

    Raises:
        ConfigError: most rows are others.
    """
    changed = sum(before != now for before, now in zip(saved, prompts, strict=True))
    if changed * 2 > len(prompts):
        raise ConfigError(
            f"the saved state is of another dataset: {changed} of {len(prompts)} rows are others"
        )
    if changed:
        logger.warning("%d of %d rows looked at have changed since the checkpoint", changed, len(prompts))


class SamplerReplay:
    """The rows that TRL's sampler draws, by their place in its sequence, without repeats.

    Args:
        rows: of the dataset.
        groups: prompts of one generated batch.
        seed: of the trainer's sampler.
        shuffle: False takes the rows in order.

    Raises:
        ConfigError: there are fewer rows than a batch needs.
    """

    def __init__(self, rows: int, groups: int, *, seed: int, shuffle: bool) -> None:
        from trl.trainer.utils import RepeatSampler

        self._used = rows // groups * groups  # the sampler leaves out what fills no whole batch
        if not self._used:
            raise ConfigError(f"the dataset has {rows} rows, and a generated batch needs {groups} prompts")
        self._sampler = partial(RepeatSampler, range(rows), 1, groups, shuffle=shuffle, seed=seed)
        self._begin()

    def at(self, position: int) -> tuple[int, int]:
        """Epoch and index of the row at a position."""
        epoch, place = divmod(position, self._used)
        if epoch not in self._epochs and epoch < self._drawn:
            self._begin()
        while epoch not in self._epochs:
            self._epochs[self._drawn] = list(self._drawing)
            self._epochs.pop(self._drawn - _EPOCHS_KEPT, None)
            self._drawn += 1
        return epoch, self._epochs[epoch][place]

    def _begin(self) -> None:
        """Each pass over the sampler is its next epoch; a new one begins with the first."""
        self._drawing, self._drawn = self._sampler(), 0
        self._epochs: dict[int, list[int]] = {}


def make_plan(args: "GRPOEnvConfig", rows: int, *, batches: int, shuffle: bool) -> Plan:
    """The plan of a training of so many batches over a dataset of so many rows.

    Raises:
        ConfigError: the curriculum has no such name.
    """
    groups = args.groups_per_batch
    # Groups that are thrown away are replaced, and batches may be larger: nobody knows how many there will be.
    length = None if args.group_filter or args.batch_tokens else batches * groups
    if args.curriculum is None:
        replay = SamplerReplay(rows, groups, seed=args.seed, shuffle=shuffle)
        identity = {
            "sampler": "trl.RepeatSampler",
            "rows": rows,
            "prompts_per_batch": groups,
            "seed": args.seed if shuffle else None,
        }
        return FunctionPlan(replay.at, identity=identity, length=length)
    known = {"medium_first": medium_first, "easy_to_hard": easy_to_hard(max(1, batches * groups))}
    weigh = _named("curriculum", args.curriculum, known)
    return Curriculum(rows, seed=args.seed, weigh=weigh, length=length)


def make_policies(args: "GRPOEnvConfig") -> dict[str, Any]:
    """`BatchesAhead`'s arguments for filters, priority and dynamic batches.

    Raises:
        ConfigError: there is no such name.
    """
    policies: dict[str, Any] = {}
    if (name := args.group_filter) is not None:
        policies["filters"] = [_named("group_filter", name, {"no_signal": NoSignal})()]
    if (name := args.group_priority) is not None:
        policies["rank"] = Priority(name, _named("group_priority", name, {"spread": _spread}))
    if args.batch_tokens is not None:
        smallest = args.groups_per_batch
        largest = args.batch_groups_max or 4 * smallest
        policies["batch_size"] = TokenBudget(args.batch_tokens, smallest, largest)
    return policies


def refuse_later_rewards(args: "GRPOEnvConfig", added: int) -> None:
    """Refuses what selects prompts or groups by the environment's reward, where that is not the whole reward.

    Args:
        args: of the trainer.
        added: reward functions of TRL's, which score a batch when it is trained.

    Raises:
        ConfigError: naming the settings.
    """
    weights = args.reward_weights or [1.0] * (added + 1)
    chosen = {
        "curriculum": args.curriculum is not None,
        "group_filter": args.group_filter == "no_signal",
        "group_priority": args.group_priority == "spread",
    }
    if any(weights[1:]) and any(chosen.values()):
        raise ConfigError(
            f"{', '.join(name for name in chosen if chosen[name])}: goes by the environment's reward, and "
            "reward_funcs add to it only when a batch is trained. Score in the environment "
            "(custom_reward_function.path), or give reward_funcs no weight (reward_weights)"
        )


def _named(key: str, name: str, known: dict[str, Any]) -> Any:
    if name in known:
        return known[name]
    if "." not in name and ":" not in name:
        raise ConfigError(
            f"{key}={name!r}: {', '.join(known)}, or package.module.name (path.py:name) of your own"
        )
    return import_name(name, key=key)


def _spread(group: Group) -> float:
    return pstdev(rewards) if (rewards := group.trained_rewards) else 0.0
