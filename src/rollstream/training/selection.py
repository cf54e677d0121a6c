"""Which groups are trained on, and in what order: small policies, each with a state that is saved.

A filter looks at a finished group and may throw it away: the plan's next group takes its place, so that a
batch has its full number of groups with signal. A rank decides what goes first where the order leaves a
choice. What a policy learns, it learns from groups that were trained on (`Learns`) or dropped
(`LearnsFromDrops`): after a restart it knows what it knew then. (What prompts come at all is the plan's:
`Curriculum`. How many rollouts of a group are waited for is the generator's: `RolloutGroups`.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import pstdev
from typing import Any, Protocol, runtime_checkable

from rollstream.errors import ConfigError
from rollstream.training.group import Group


@runtime_checkable
class Learns(Protocol):
    """A plan or policy that learns from what was trained on."""

    def observe(self, group: Group) -> None:
        """Told of each group once its batch has been trained, in the order of training."""
        ...


@runtime_checkable
class LearnsFromDrops(Protocol):
    """A plan or policy that learns from what a filter threw away, too: it may be why it was thrown away."""

    def observe_dropped(self, group: Group) -> None:
        """Told of each group that a filter drops, when it does: what is learnt is saved with the drop.

        (After a restart a dropped group does not come again, so it is learnt from once.) Quick: a lock is
        held.
        """
        ...


class Policy(Protocol):
    """What filters and ranks have in common: a state that is saved."""

    @property
    def name(self) -> str:
        """Under which its state is saved; unique among the policies of a run."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
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
    """Drops groups whose rewards are (nearly) all the same: their advantages are zero.

    Args:
        spread: the standard deviation of a group's rewards up to which it is dropped, >= 0.
        unscored: what to do with a group in which fewer than two rollouts have a reward.
    """

    name = "no_signal"

    def __init__(self, *, spread: float = 0.0, unscored: bool = True) -> None:
        self._spread = spread
        self._unscored = unscored
        self.dropped = 0
        """Groups so far."""
        self.seen = 0

    def drops(self, group: Group) -> str | None:
        self.seen += 1
        rewards = [reward for reward in group.rewards if reward is not None]
        reason = None
        if len(rewards) < 2:
            reason = f"only {len(rewards)} of its rollouts have a reward" if self._unscored else None
        elif pstdev(rewards) <= self._spread:
            reason = f"its {len(rewards)} rewards are all {rewards[0]:g}, or nearly so"
        self.dropped += reason is not None
        return reason

    def state_dict(self) -> dict[str, Any]:
        return {"dropped": self.dropped, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dropped, self.seen = state["dropped"], state["seen"]


class Priority:
    """Ranks groups by a function of theirs; among equals, the plan's order.

    Example:
        >>> most_signal = Priority("spread", lambda group: pstdev(map(float, group.rewards)))

    Args:
        name: under which its state is saved.
        priority: the greater, the sooner.
    """

    def __init__(self, name: str, priority: Callable[[Group], float]) -> None:
        self.name = name
        self._priority = priority

    def rank(self, group: Group) -> float:
        return -self._priority(group)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up: a pure function."""


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
