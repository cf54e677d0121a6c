"""Which groups are trained on, and in what order: small policies.

A filter looks at a finished group and may throw it away: the plan's next group takes its place, so that a
batch has its full number of groups with signal. A rank decides what goes first where the order leaves a
choice. (What prompts come at all is the plan's: `Curriculum`. How many rollouts of a group are waited for is
the generator's: `RolloutGroups`.)

A policy or plan may learn, by methods that it need not have. They are quick: a lock is held.

    observe(group)            each group once its batch has been trained, in the order of training
    observe_dropped(group)    each group that a filter throws away, when it does; after a restart those since the saved
                              state again, from a store, before any other
    state_dict()              what a filter or rank has learnt, as JSON values: saved with what it learnt it from
    load_state_dict(state)    after a restart it knows what it knew then
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollstream.errors import ConfigError
from rollstream.training.group import Group


class Policy(Protocol):
    """The common part of filters and ranks."""

    @property
    def name(self) -> str:
        """Under which its state is saved, if it has one; unique among the policies of a run."""
        ...


class GroupFilter(Policy, Protocol):
    """Throws finished groups away."""

    def drops(self, group: Group) -> str | None:
        """Why the group is thrown away, in words; None: it stays. Quick: a lock is held."""
        ...


class GroupRank(Policy, Protocol):
    """Decides what goes first where the order leaves a choice (`order="first"`)."""

    def rank(self, group: Group) -> float:
        """The smaller, the sooner; asked once, when the group has finished. Quick: a lock is held."""
        ...


class NoSignal:
    """Drops groups whose rewards, those of snapshots included, are all the same: nothing is learnt.

    So are groups in which fewer than two trajectories have a reward.
    """

    name = "no_signal"

    def drops(self, group: Group) -> str | None:
        rewards = group.trained_rewards
        if len(rewards) < 2:
            return f"only {len(rewards)} of its trajectories have a reward"
        return f"its {len(rewards)} rewards are all {rewards[0]:g}" if len(set(rewards)) == 1 else None


@dataclass(slots=True)
class Priority:
    """Ranks groups by a function of theirs; among equals, the plan's order.

    Example:
        >>> most_signal = Priority("spread", lambda group: pstdev(map(float, group.rewards)))
    """

    name: str
    priority: Callable[[Group], float]
    """The greater, the sooner."""

    def rank(self, group: Group) -> float:
        return -self.priority(group)


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """A batch of a dynamic size: groups until the next one would go over a number of tokens.

    The staleness rule counts on `smallest` groups a batch, so these are taken whatever their tokens are, and
    `max_staleness * smallest` groups are generated ahead of a batch, and at once while it fills up.
    """

    tokens: int
    """Prompt and response tokens of all rollouts of a batch, > 0."""
    smallest: int
    """Groups that a batch has in any case, > 0."""
    largest: int
    """Groups that a batch has at most."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 1 <= self.smallest <= self.largest:
            raise ConfigError(f"{self}: tokens > 0 and 0 < smallest <= largest")
