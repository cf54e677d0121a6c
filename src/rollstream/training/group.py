"""A group as the trainer gets it, a batch of them, and the seam to whatever generates groups."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollstream.errors import WeightUpdateError
from rollstream.training.plan import PlannedGroup


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt row."""

    planned: PlannedGroup
    start: int
    """The engine's version when it was begun: stamped before the wait, never after."""
    rollouts: Sequence[Any] = ()
    """The generator's result: `Rollout`s from rollstream's own; anything else from another one."""
    begun_at: float = 0.0
    """Seconds of the monotonic clock, as `finished_at`."""
    finished_at: float = 0.0
    attempts: int = 1
    tokens: int = 0
    """Prompt and response tokens of all its trajectories."""
    finished: bool = False
    rank: float = 0.0
    """The smaller, the sooner it is delivered where the order leaves a choice."""

    def __str__(self) -> str:
        return f"group {self.position} (prompt {self.index})"

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
        """The prompt row's index."""
        return self.planned.index

    @property
    def generation_s(self) -> float:
        """From its dispatch until it was finished."""
        return self.finished_at - self.begun_at

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each rollout; None: not scored, or not a `Rollout`."""
        return [reward_of(rollout) for rollout in self.rollouts]

    @property
    def trained_rewards(self) -> list[float]:
        """All rewards that are trained on: of each trajectory that has one, a snapshot's own included."""
        rewards = map(reward_of, trajectories_of(self.rollouts) or self.rollouts)
        return [reward for reward in rewards if reward is not None]


@dataclass(slots=True)
class GroupBatch:
    """The groups that the trainer trains with version `step`."""

    step: int
    groups: list[Group]
    """In the plan's order."""
    delivered_at: float = 0.0
    wait_s: float = 0.0
    """Since the trainer first asked for it."""

    @property
    def staleness(self) -> list[int]:
        """For each group, `step` minus the version at which it was begun."""
        return [self.step - group.start for group in self.groups]

    @property
    def rollouts(self) -> list[Any]:
        """The rollouts of all groups, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def trajectories(self) -> list[Any]:
        """The trajectories of all rollouts: a rollout's snapshots come before its final trajectory.

        At least as many as rollouts. Empty where the generator returns no `Rollout`s.
        """
        return trajectories_of(self.rollouts)


def reward_of(rollout: Any) -> float | None:
    """The reward of a `Rollout`'s final trajectory, or of anything with a `reward`; None: there is none."""
    reward = getattr(getattr(rollout, "final", rollout), "reward", None)
    return None if reward is None else float(reward)


def unscored_share(rollouts: Sequence[Any]) -> float:
    """The share of rollouts that have no reward, 0 to 1; what could not have one does not count."""
    missing = [reward_of(one) is None for one in rollouts if hasattr(getattr(one, "final", one), "reward")]
    return sum(missing) / max(1, len(missing))


def trajectories_of(rollouts: Iterable[Any]) -> list[Any]:
    """All trajectories of `Rollout`s; of anything else, none."""
    return [trajectory for rollout in rollouts for trajectory in getattr(rollout, "trajectories", ())]


def token_versions(rollouts: Iterable[Any]) -> list[int]:
    """The versions that the engine stamped on the tokens of `Rollout`s."""
    return [version for each in trajectories_of(rollouts) for _, version in each.policy_versions]


def count_tokens(rollouts: Iterable[Any]) -> int:
    """Prompt and response tokens of `Rollout`s."""
    return sum(len(each.prompt_ids) + len(each.response_ids) for each in trajectories_of(rollouts))


class GroupGenerator(Protocol):
    """Generates groups; all its coroutine functions run in one event loop, that of the generation thread."""

    def start(self) -> Awaitable[None]:
        """Gets ready; what it raises is raised by whoever starts the batches."""
        ...

    def generate(self, group: PlannedGroup) -> Awaitable[Sequence[Any]]:
        """The group's rollouts, one at least. Many run at once; cancelled when nobody wants them any more.

        Raises:
            EngineUnavailableError: no engine is there; it is asked again later, within the group's time.
            TransientError: trying again may help.
            DroppedGroupError: the group is not wanted; the plan's next one takes its place.
            Exception: trying again does not help; the group has failed.
        """
        ...

    def update_weights(self, source: str, version: int) -> Awaitable[None]:
        """Gives the engine new weights; `source` is what the engine understands by it."""
        ...

    def close(self) -> Awaitable[None]:
        """Releases everything. Called once, also after a failed `start`."""
        ...


async def _nothing() -> None:
    return


async def _only_the_version(source: str, version: int) -> None:
    if source:
        raise WeightUpdateError(f"this generator has no update_weights: it cannot load {source!r}")


@dataclass(slots=True)
class CallableGenerator:
    """A generator of plain coroutine functions."""

    generate: Callable[[PlannedGroup], Awaitable[Sequence[Any]]]
    """The rollouts of a group."""
    update_weights: Callable[[str, int], Awaitable[None]] = _only_the_version
    """Takes `(source, version)`; the default is for weights that the engine shares, or that somebody else pushes."""
    start: Callable[[], Awaitable[None]] = _nothing
    close: Callable[[], Awaitable[None]] = _nothing
