"""A plan over several sources of prompt rows, each with its share of the groups."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.data.shares import Shares
from rollstream.errors import ConfigError, TrainingError
from rollstream.training.plan import Plan, PlannedGroup, ShuffledPlan

logger = logging.getLogger(__name__)

_JUDGED = 10
"""A source is judged as if it had begun so many groups at least: the first that fails is no share."""


@dataclass(frozen=True, slots=True)
class Source:
    """A part of the prompt rows."""

    name: str
    rows: Sequence[int]
    """Their indices: a range, or any sequence."""
    weight: float = 1.0
    """Its share of the groups is its weight by the sum of all."""
    max_failed_share: float | None = None
    """With a larger share of failed groups it is paused; None: never. Failed groups have to be replaced
    (`on_group_failure="drop_and_refill"`)."""


class Mixture(Plan):
    """Gives each source its share of the positions; within a source every row comes once an epoch.

    After any number of positions no source is a whole group ahead of or behind its share; a group that is dropped or
    has failed gives its place back to its own source. A paused source's places go to the others. A position is decided
    when it is first asked for, and kept, in the saved state too.

    Args:
        sources: with different names and rows.
        seed: of their orders.
        shuffle: False keeps each source's order.
        length: positions there are; None: endless.

    Raises:
        ConfigError: two sources have a name or a row in common, or one has no rows.
    """

    def __init__(
        self, sources: Sequence[Source], *, seed: int = 0, shuffle: bool = True, length: int | None = None
    ) -> None:
        self._of_row = {int(row): number for number, one in enumerate(sources) for row in one.rows}
        names = {one.name for one in sources}
        if len(self._of_row) < sum(len(one.rows) for one in sources) or len(names) < len(sources):
            raise ConfigError(
                f"sources {', '.join(sorted(names))}: their names and rows have to be different"
            )
        if not sources or any(not len(one.rows) or not one.weight > 0 for one in sources):
            raise ConfigError("each source needs rows, and a weight of more than 0")
        self.sources = list(sources)
        self._orders = [
            ShuffledPlan(len(one.rows), seed=seed + at, shuffle=shuffle) for at, one in enumerate(sources)
        ]
        self._identity = {"seed": seed if shuffle else None}
        self._shares = Shares([one.weight for one in sources])
        self._next = [0] * len(sources)  # places in the orders
        self._taken: list[set[int]] = [set() for _ in sources]  # of those behind `_next`
        self._failed = [0] * len(sources)
        self._begun = [0] * len(sources)
        self._decided: dict[int, PlannedGroup] = {}
        self.length = length

    def at(self, position: int) -> PlannedGroup:
        if position not in self._decided:
            if not self._shares.active:
                raise TrainingError(f"all sources are paused: {'; '.join(self.paused.values())}")
            number = self._shares.take()
            while self._next[number] in self._taken[number]:
                self._taken[number].remove(self._next[number])
                self._next[number] += 1
            place = self._orders[number].at(self._next[number])
            self._next[number] += 1
            self._begun[number] += 1
            row = int(self.sources[number].rows[place.index])
            self._decided[position] = PlannedGroup(position, place.epoch, row)
        return self._decided[position]

    def source_of(self, row: int) -> str:
        """The name of a row's source."""
        return self.sources[self._of_row[row]].name

    @property
    def paused(self) -> dict[str, str]:
        """The sources that get no places any more, and why."""
        return {
            one.name: f"{self._failed[at]} of {self._begun[at]} groups of {one.name} failed (max_failed_share="
            f"{one.max_failed_share:g})"
            for at, one in enumerate(self.sources)
            if at not in self._shares.active
        }

    def dropped(self, position: int, *, failed: bool) -> None:
        if (group := self._decided.get(position)) is None:
            return
        number = self._of_row[group.index]
        self._shares.give(number, -1)
        self._failed[number] += failed
        self._judge(number)

    def _judge(self, number: int) -> None:
        most = self.sources[number].max_failed_share
        failed, begun = self._failed[number], max(self._begun[number], _JUDGED)
        if most is not None and failed > most * begun and number in self._shares.active:
            self._shares.pause(number)
            logger.warning("%s: its places go to the other sources", self.paused[self.sources[number].name])

    def restore(self, group: PlannedGroup) -> None:
        number = self._of_row.get(group.index)
        if group.position in self._decided or number is None:
            return
        order, rows = self._orders[number], self.sources[number].rows
        for place in range(self._next[number], (group.epoch + 1) * len(rows)):
            if (at := order.at(place)).epoch == group.epoch and rows[at.index] == group.index:
                self._taken[number].add(place)
                break
        self._decided[group.position] = group
        self._shares.give(number)
        self._begun[number] += 1

    def forget(self, below: int) -> None:
        self._decided = {position: group for position, group in self._decided.items() if position >= below}

    def identity(self) -> dict[str, Any]:
        sources = [[one.name, len(one.rows), one.weight] for one in self.sources]
        return {"kind": "mixture", "sources": sources, **self._identity}

    def state_dict(self) -> dict[str, Any]:
        return {
            "shares": self._shares.state(),
            "next": list(self._next),
            "taken": [sorted(places) for places in self._taken],
            "failed": list(self._failed),
            "begun": list(self._begun),
            "decided": [[group.position, group.epoch, group.index] for group in self._decided.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shares.set_state(state["shares"])
        self._next, self._taken = list(state["next"]), [set(places) for places in state["taken"]]
        self._failed, self._begun = list(state["failed"]), list(state["begun"])
        self._decided = {place[0]: PlannedGroup(*place) for place in state["decided"]}
        for number in range(len(self.sources)):
            self._judge(number)
