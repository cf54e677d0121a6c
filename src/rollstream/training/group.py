"""A group as the trainer gets it, a batch of them, and the seam to whatever generates groups."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollstream.agent.turns import Turns
from rollstream.errors import ConfigError, WeightUpdateError
from rollstream.training.plan import PlannedGroup
from rollstream.trajectory import Failure, Rollout

if TYPE_CHECKING:
    from rollstream.rollout.teachers import Teachers
    from rollstream.training.store import StoreFacts


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
    step: int | None = None
    """The batch in which it was trained before a restart, and is trained again."""

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


@dataclass(frozen=True, slots=True)
class Kept:
    """Results of a group that are stored already."""

    results: Mapping[int, Rollout | Failure] = field(default_factory=dict)
    """By place in the group."""
    is_whole: bool = False
    """Whether the group is complete as it is, even with fewer rollouts than others have."""
    is_judged: bool = False
    """Whether the results are those that have the rewards of a function that sees groups."""


class GroupKeeper(Protocol):
    """Stores results of groups one by one, for the generators that take part in it."""

    async def kept(self, planned: PlannedGroup) -> Kept:
        """The results of a group that are stored already. A generator asks each time that it makes the group, before
        anything else, and makes the others only.
        """
        ...

    async def keep(self, planned: PlannedGroup, place: int, result: Rollout | Failure) -> Rollout | Failure:
        """Returns the result when it is durable; or a failure, where it cannot be stored."""
        ...

    async def keep_rewards(self, planned: PlannedGroup, rollouts: Mapping[int, Rollout]) -> None:
        """Returns when the rewards that a function has given to the group, by place, are durable."""
        ...

    def turns(self, planned: PlannedGroup, place: int, prompt_key: str) -> Turns | None:
        """The finished turns of a rollout that is not finished; None: turns are not kept."""
        ...


class NothingKept:
    """Keeps nothing: for batches without a store."""

    async def kept(self, planned: PlannedGroup) -> Kept:
        return Kept()

    async def keep(self, planned: PlannedGroup, place: int, result: Rollout | Failure) -> Rollout | Failure:
        return result

    async def keep_rewards(self, planned: PlannedGroup, rollouts: Mapping[int, Rollout]) -> None:
        return

    def turns(self, planned: PlannedGroup, place: int, prompt_key: str) -> Turns | None:
        return None


class TaughtFirst:
    """A keeper before which each rollout that is finished is shown to teachers: it is kept with what they said."""

    def __init__(self, keeper: GroupKeeper, teachers: "Teachers") -> None:
        self._keeper, self._teachers = keeper, teachers
        self.kept, self.keep_rewards, self.turns = keeper.kept, keeper.keep_rewards, keeper.turns

    async def keep(self, planned: PlannedGroup, place: int, result: Rollout | Failure) -> Rollout | Failure:
        if isinstance(result, Rollout):
            await self._teachers.teach(result)
        return await self._keeper.keep(planned, place, result)


class GroupGenerator(ABC):
    """Generates groups; all its coroutine functions run in one event loop, that of the generation thread.

    Your own inherits from it, and has `generate` at least; `CallableGenerator` makes one of plain functions.
    """

    bounds_groups: bool = False
    """Whether its groups need no time limit: see `BatchesAhead(group_timeout=)`."""
    group_size: int = 0
    """Rollouts of a group at most, which a store needs; 0: it is not known."""
    keeps_rollouts: bool = False
    """Whether it gives `keeper` each rollout; else groups are stored as a whole."""
    keeper: GroupKeeper = NothingKept()
    """The store, which is set before `start`, where there is one."""
    keep_turns: bool = False
    """Whether finished turns are stored, too; asked for after `start`."""
    replays: bool = False
    """Whether its tokens were sampled in another training: their versions are not checked."""

    async def start(self) -> None:
        """Gets ready; what it raises is raised by whoever starts the batches."""
        return

    @abstractmethod
    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        """The group's rollouts, one at least. Many run at once; cancelled when nobody wants them any more.

        Raises:
            EngineUnavailableError: no engine is there; it is asked again later, within the group's time.
            TransientError: trying again may help.
            DroppedGroupError: the group is not wanted; the plan's next one takes its place.
            Exception: trying again does not help; the group has failed.
        """

    async def update_weights(self, source: str, version: int) -> None:
        """Gives the engine new weights; `source` is what the engine understands by it, "" for those that it shares."""
        if source:
            raise WeightUpdateError(f"this generator has no update_weights: it cannot load {source!r}")

    def pin_weights(self, versions: int) -> None:
        """Has each rollout end under the LoRA adapter that it began with; called before `start`.

        Args:
            versions: that rollouts may be of at once.

        Raises:
            ConfigError: it cannot.
        """
        raise ConfigError(f"weights='pinned': a {type(self).__name__} pins no rollout to its weights")

    def prompt_key(self, index: int) -> str | None:
        """The key of a prompt row as it is now: a stored group of a row that has changed is not used. None: unknown."""
        return None

    def store_facts(self) -> "StoreFacts | None":
        """What a store says of the rollouts; asked for after `start`, in another thread."""
        return None

    async def close(self) -> None:
        """Releases everything. Called once, also after a failed `start`."""
        return


class CallableGenerator(GroupGenerator):
    """A generator of plain coroutine functions: `GroupGenerator`'s, by name.

    Without `update_weights` it is for weights that the engine shares, or that somebody else pushes.
    """

    def __init__(
        self,
        generate: Callable[[PlannedGroup], Awaitable[Sequence[Any]]],
        update_weights: Callable[[str, int], Awaitable[None]] | None = None,
        start: Callable[[], Awaitable[None]] | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
        group_size: int = 0,
    ) -> None:
        self._generate, self.group_size = generate, group_size
        for name, part in (("update_weights", update_weights), ("start", start), ("close", close)):
            if part is not None:
                setattr(self, name, part)

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        return await self._generate(group)
