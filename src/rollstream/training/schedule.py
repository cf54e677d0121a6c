"""The schedule: which groups are begun, what the next batch takes, what is owed. No locks, no clock, no I/O.

The life of a position of the plan:

    planned --admit--> generating(start) --finish--> finished --deliver--> delivered(k) --trained--> trained
       ^                   |                            |
       |                   +-----------drop-------------+--> dropped: the next position takes its place
       +-- a restart: whatever is neither trained nor dropped is owed again, or comes back from a store (`restore`)

With `groups_per_step=2, ahead=1`, two steps:

    positions 0 1 begun at version 0, 2 3 too (one batch ahead) -> batch 0 = {0, 1}; while it is trained
    4 5 may not be begun yet: 2 3 are the one batch ahead. Batch 0 is trained, the weights are version 1:
    4 5 begin at version 1 -> batch 1 = {2, 3}, trained with version 1, staleness 1; and so on.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from rollstream.errors import ConfigError, TrainingError
from rollstream.training.group import Group, GroupBatch
from rollstream.training.plan import Plan
from rollstream.training.staleness import StalenessRule, choose

Order = Literal["plan", "first"]
"""`plan`: batches hold the plan's positions in order; `first`: what is finished first goes first."""


class _SavedSchedule(msgspec.Struct, kw_only=True):
    """A saved state, as JSON values; nothing that is in flight is in it."""

    plan: dict[str, Any]
    """Its identity."""
    plan_state: dict[str, Any]
    step: int
    watermark: int
    trained: list[int]
    """Positions from the watermark on, ascending; so are the dropped ones."""
    dropped: list[int]
    format: Literal[1] = 1


class GroupSchedule:
    """Keeps the staleness rule over a plan.

    Args:
        plan: what stands at which position.
        rule: how many groups a batch has, and how stale they may be.
        order: of delivery.
        token_budget: a batch of a dynamic size takes groups until the next one would go over it, between
            `rule.groups_per_step` and `rule.largest_step` of them; None: exactly `groups_per_step`. It keeps
            what it has taken while it waits for more, which makes room for others to be begun.
    """

    def __init__(
        self, plan: Plan, rule: StalenessRule, *, order: Order = "plan", token_budget: int | None = None
    ) -> None:
        if order not in ("plan", "first"):
            raise ConfigError(f"order={order!r}: 'plan' or 'first'")
        if token_budget is None and rule.largest != rule.groups_per_step:
            raise ConfigError("batches of a dynamic size need a token budget")
        self.rule = rule
        self.plan = plan
        self._order = order
        self._token_budget = token_budget
        self._groups: dict[int, Group] = {}  # undelivered, ascending: begun in the plan's order
        self._starts: Counter[int] = Counter()  # of these
        self._taken: list[Group] = []  # by the next batch, which is not full yet
        self._delivered: dict[int, list[Group]] = {}  # by step, untrained
        self._settled: dict[int, bool] = {}  # positions from the watermark on: True trained, False dropped
        self._replayed: dict[
            int, Group
        ] = {}  # undelivered ones of batches that were trained before a restart
        self._resumed: list[Group] = []  # of these and the undelivered ones: not begun again since a restart
        self._owed: list[int] = []  # positions before the next one: a restart left gaps
        self._next_position = 0
        self._awaited = False  # the trainer has asked for the next batch since it trained one
        self.generating = 0
        """Groups that are being generated."""
        self.watermark = 0
        """All positions below it are trained or dropped."""
        self.trained_steps = 0
        """Batches trained so far: the trainer's version."""
        self.next_step = 0
        """The batch that is delivered next."""

    @property
    def outstanding(self) -> int:
        """Groups that were begun and not delivered."""
        return len(self._groups) + len(self._taken)

    @property
    def waiting(self) -> list[Group]:
        """Groups that are finished and not delivered."""
        return [*self._taken, *(group for group in self._groups.values() if group.finished)]

    @property
    def untrained(self) -> int:
        """Batches that were delivered and are not trained yet."""
        return self.next_step - self.trained_steps

    def settled(self, position: int) -> bool:
        """Whether a position is trained or dropped."""
        return position < self.watermark or position in self._settled

    @property
    def first_new(self) -> int:
        """The batch after those that are trained again."""
        last = next(reversed(self._replayed.values()), None)
        return self.next_step if last is None or last.step is None else last.step + 1

    @property
    def ended(self) -> bool:
        """Whether the plan's last group has been delivered."""
        return self._exhausted and not self.outstanding and not self._replayed

    def room(self, version: int) -> int:
        """Groups that may be begun now, the engine being at `version`."""
        if self._exhausted:
            return 0
        step, taken = self.first_new, len(self._taken)
        untrained = step - self.trained_steps
        if not self._awaited:
            # A batch may be trained already and its weights still be on their way: what is begun now would be
            # older than it need be. When the trainer asks for the next batch, there is nothing to wait for.
            untrained = max(untrained, step - version)
        return self.rule.room(self._starts, next_step=step, untrained=untrained, version=version, taken=taken)

    def admit(self, version: int) -> Group | None:
        """Begins the next group of the plan, if there is room. `version` never falls.

        A group of before a restart comes first. What is missing of it must not be older than the rest: it waits for
        the weights that it was begun with.
        """
        if (resumed := self._next_resumed(version)) is not None:
            self._resumed.remove(resumed)
            self.generating += 1
            return resumed
        if self.room(version) == 0:
            return None
        position = self._owed.pop(0) if self._owed else self._next_position
        self._next_position = max(self._next_position, position + 1)
        group = Group(self.plan.at(position), version)
        in_order = not self._groups or group.position > next(reversed(self._groups))
        self._groups[group.position] = group
        if not in_order:
            self._groups = dict(sorted(self._groups.items()))
        self.generating += 1
        self._starts[version] += 1
        return group

    def finish(self, position: int, *, rank: float = 0.0, tokens: int = 0) -> None:
        """A group has been generated; its rank decides where the order leaves a choice."""
        group = self._replayed[position] if position in self._replayed else self._groups[position]
        group.finished, group.rank, group.tokens = True, rank, tokens
        self.generating -= 1

    def drop(self, position: int, *, failed: bool = False) -> None:
        """A group will not be delivered; the next position of the plan takes its place."""
        if position in self._replayed:
            raise TrainingError(
                f"position {position} was trained before the restart, and cannot be made again"
            )
        self.generating -= not self._remove(position).finished
        self.plan.dropped(position, failed=failed)
        self._settle(position, trained=False)

    def deliver(self, version: int) -> GroupBatch | None:
        """The next batch, if what it must hold is finished. Asked by the trainer; `version`: the engine's.

        Having asked in vain, there may be room for more: see `room`.
        """
        self._awaited = True
        replayed = itertools.takewhile(lambda group: group.step == self.next_step, self._replayed.values())
        if groups := list(replayed):
            if not all(group.finished for group in groups):
                return None
            for group in groups:
                del self._replayed[group.position]
            return self._hand_out(groups)
        if not self._taken:
            size = self.rule.groups_per_step
            if self._exhausted:
                size = min(size, len(self._groups))
            must = self.rule.must_take(self._starts, next_step=self.next_step)
            chosen = self._choose(must, size, version)
            if not size or len(chosen) < size:
                return None
            self._taken = [self._remove(group.position) for group in chosen]
        if self._token_budget is not None and not self._fill(version, self._token_budget):
            return None
        groups, self._taken = sorted(self._taken, key=lambda group: group.position), []
        return self._hand_out(groups)

    def _hand_out(self, groups: list[Group]) -> GroupBatch:
        self._awaited = False
        self._delivered[self.next_step] = groups
        self.next_step += 1
        return GroupBatch(self.next_step - 1, list(groups))  # whose owner may sort or thin it out

    def delivered(self, step: int) -> list[Group]:
        """The groups of batch `step`, the one that is to be trained next."""
        if step != self.trained_steps or step not in self._delivered:
            raise TrainingError(
                f"batch {step} cannot be trained now: {self.trained_steps} batches are trained, and "
                f"{self.next_step} were delivered"
            )
        return self._delivered[step]

    def trained(self, step: int) -> list[Group]:
        """Batch `step` has been trained: its groups are never delivered again. In turn."""
        groups = self.delivered(step)
        del self._delivered[step]
        self._awaited = False
        self.trained_steps += 1
        for group in groups:
            self._settle(group.position, trained=True)
        return groups

    def blocked(self, version: int) -> str | None:
        """Why no batch can come until trainer or engine moves; None: one can, or the plan has ended."""
        waiting, step, rule = len(self._groups), self.next_step, self.rule
        if self.generating or self.room(version):
            return None
        if self._next_resumed(version) is not None:
            return None
        if self._resumed and (oldest := max(group.start for group in self._resumed)) > version:
            return (
                f"batch {step} waits for groups that were begun with version {oldest} or before, and the engine is at "
                f"version {version}: give it newer weights"
            )
        if waiting >= rule.groups_per_step or self._exhausted:
            return None
        if (rule.ahead + 1 - self.untrained) * rule.largest <= waiting:
            return (
                f"batch {step} may be generated only once batch {self.trained_steps} is trained "
                f"(ahead={rule.ahead}): call trained({self.trained_steps})"
            )
        return (
            f"batch {step} is trained with version {step}, the engine is at version {version}, and "
            f"max_staleness is {rule.max_staleness}: give the engine newer weights"
        )

    def state_dict(self) -> dict[str, Any]:
        """The trained and dropped positions, and the plan, as JSON values; nothing that is in flight."""
        settled = sorted(self._settled.items())
        state = _SavedSchedule(
            plan=self.plan.identity(),
            plan_state=self.plan.state_dict(),
            step=self.trained_steps,
            watermark=self.watermark,
            trained=[position for position, trained in settled if trained],
            dropped=[position for position, trained in settled if not trained],
        )
        return msgspec.structs.asdict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after what was trained; all else is owed again.

        Raises:
            ConfigError: the state is of another plan or format; nothing is changed then.
            TrainingError: this schedule has begun already.
        """
        if self._next_position or self.trained_steps:
            raise TrainingError("load_state_dict comes before the first group is begun")
        try:
            saved = msgspec.convert(state, _SavedSchedule)
        except msgspec.ValidationError as error:
            raise ConfigError(f"this is no saved state of batches: {error}") from error
        mine, theirs = self.plan.identity(), saved.plan
        if mine != theirs:
            differing = sorted(key for key in mine | theirs if mine.get(key) != theirs.get(key))
            what = ", ".join(f"{key} was {theirs.get(key)!r}, is {mine.get(key)!r}" for key in differing)
            raise ConfigError(f"the saved state is of another plan: {what}")
        self.plan.load_state_dict(saved.plan_state)
        self.trained_steps = self.next_step = saved.step
        self.watermark = saved.watermark
        self._settled = dict.fromkeys(saved.trained, True) | dict.fromkeys(saved.dropped, False)
        self._find_owed()
        self.plan.forget(self.watermark)

    def restore(
        self,
        groups: Iterable[Group],
        batches: Sequence[list[Group]] = (),
        dropped: Mapping[int, bool] = MappingProxyType({}),
    ) -> list[Group]:
        """Takes up what was under way before a restart. Comes after `load_state_dict`, before `admit`.

        Args:
            groups: begun then, and neither trained nor dropped.
            batches: trained after the state was saved, from `trained_steps` on: they are delivered again as they were.
            dropped: positions that were dropped after it was saved, and whether their groups had failed.

        Returns:
            the groups that could not be trained in time any more (by another rule, or a state that is older than
            they are): these are owed again.
        """
        for position, failed in dropped.items():
            self.plan.dropped(position, failed=failed)
            self._settle(position, trained=False)
        for step, batch in enumerate(batches, start=self.trained_steps):
            for group in batch:
                group.step = step
                self._replayed[group.position] = group
        self._groups = {group.position: group for group in sorted(groups, key=lambda group: group.position)}
        self._find_owed()
        # Where each would be trained at the latest; what is owed between them goes before them.
        places = sorted([*self._owed, *self._groups])
        if self._order == "first":
            places = sorted(self._groups, key=lambda position: (self._groups[position].start, position))
        late, first, size = list[Group](), self.first_new, self.rule.groups_per_step
        for place, position in enumerate(places):
            known = self._groups.get(position)
            if known and not known.start <= first <= known.start + self.rule.max_staleness - place // size:
                late.append(self._groups.pop(position))
        self._starts = Counter(group.start for group in self._groups.values())
        self._resumed = [*self._replayed.values(), *self._groups.values()]
        self._find_owed()
        return late

    def _find_owed(self) -> None:
        """After a restart: gaps between positions that are settled or come back are begun first."""
        there = {*self._settled, *self._replayed, *self._groups}
        self._next_position = max(there, default=self.watermark - 1) + 1
        self._owed = [one for one in range(self.watermark, self._next_position) if one not in there]

    @property
    def _exhausted(self) -> bool:
        """Whether the plan has no more groups to begin."""
        return not self._owed and self.plan.length is not None and self._next_position >= self.plan.length

    def _fill(self, version: int, budget: int) -> bool:
        """Takes what else the budget has room for; whether the batch is full, or no more can come."""
        tokens = sum(group.tokens for group in self._taken)
        for group in self._choose((), self.rule.largest - len(self._taken), version):
            tokens += group.tokens
            if tokens > budget:
                return True
            self._taken.append(self._remove(group.position))
        full = len(self._taken) == self.rule.largest or tokens >= budget
        return full or not (self.generating or self.room(version))

    def _next_resumed(self, version: int) -> Group | None:
        """The next group of before a restart that may go on now."""
        soon = self.next_step + self.rule.ahead
        for group in self._resumed:
            if group.start <= version and (group.step is None or group.step <= soon):
                return group
        return None

    def _choose(self, must: Sequence[tuple[int, int]], size: int, version: int) -> list[Group]:
        """Finished groups, the first ones first; fewer than `size` where others must come first."""
        if self._order == "plan":  # the lowest positions are the oldest: they are what the rule demands
            lowest = itertools.islice(self._groups.values(), size)
            # After a restart one that was in flight, and may be begun now, stands before those that were finished.
            owed = self._owed[0] if self._owed and self.room(version) else None
            return [
                *itertools.takewhile(
                    lambda group: group.finished and (owed is None or group.position < owed), lowest
                )
            ]
        return choose((group for group in self._groups.values() if group.finished), must, size=size)

    def _remove(self, position: int) -> Group:
        group = self._groups.pop(position)
        self._starts[group.start] -= 1
        if not self._starts[group.start]:
            del self._starts[group.start]
        return group

    def _settle(self, position: int, *, trained: bool) -> None:
        self._settled[position] = trained
        if position == self.watermark:
            while self._settled.pop(self.watermark, None) is not None:
                self.watermark += 1
            self.plan.forget(self.watermark)
