"""A group as the trainer gets it, and a batch of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.training.plan import PlannedGroup


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt row, generated and not older than was allowed."""

    planned: PlannedGroup
    start: int
    """The engine's version when it was begun: stamped before the wait, never after."""
    rollouts: Sequence[Any]
    """What the generator returned: `Rollout`s, where it is the house's."""
    oldest: int
    """The oldest version that had a part in it: `start`, or what the engine's tokens say if that is less."""
    begun_at: float = 0.0
    """Seconds of the monotonic clock, as `finished_at`."""
    finished_at: float = 0.0
    attempts: int = 1

    @property
    def position(self) -> int:
        """Its place in the plan."""
        return self.planned.position

    @property
    def epoch(self) -> int:
        """Pass over the prompt rows."""
        return self.planned.epoch

    @property
    def index(self) -> int:
        """Of the prompt row."""
        return self.planned.index

    @property
    def generation_s(self) -> float:
        """From its dispatch until it was finished."""
        return self.finished_at - self.begun_at

    @property
    def rewards(self) -> list[float | None]:
        """Of its rollouts, in their order; None: not scored, or not a `Rollout`."""
        return [reward_of(rollout) for rollout in self.rollouts]


@dataclass(slots=True)
class GroupBatch:
    """What the trainer trains with version `step`."""

    step: int
    groups: list[Group]
    """In the plan's order."""
    delivered_at: float = 0.0
    wait_s: float = 0.0
    """How long the trainer waited for it."""
    staleness: list[int] = field(default_factory=list)
    """Of each group: `step` minus the oldest version that had a part in it."""

    @property
    def rollouts(self) -> list[Any]:
        """Of all groups, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]


def reward_of(rollout: Any) -> float | None:
    """The reward of a `Rollout`'s final trajectory, or of anything with a `reward`; None: there is none."""
    final = getattr(rollout, "final", rollout)
    reward = getattr(final, "reward", None)
    return None if reward is None else float(reward)


def unscored_share(rollouts: Sequence[Any]) -> float:
    """The share of rollouts that have no reward, 0 to 1; what could not have one does not count."""
    missing = [reward_of(one) is None for one in rollouts if hasattr(getattr(one, "final", one), "reward")]
    return sum(missing) / len(missing) if missing else 0.0


def token_versions(rollouts: Iterable[Any]) -> list[int]:
    """The versions that the engine stamped on the tokens of `Rollout`s; of anything else, none."""
    return [
        version
        for rollout in rollouts
        for trajectory in getattr(rollout, "trajectories", ())
        for _, version in trajectory.policy_versions
    ]


def count_tokens(rollouts: Iterable[Any]) -> int:
    """Prompt and response tokens of `Rollout`s; 0 for anything else."""
    return sum(
        len(trajectory.prompt_ids) + len(trajectory.response_ids)
        for rollout in rollouts
        for trajectory in getattr(rollout, "trajectories", ())
    )
