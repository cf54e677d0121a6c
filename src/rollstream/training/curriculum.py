"""A plan that prefers prompts of the right difficulty, and learns which these are."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from rollstream.errors import ConfigError
from rollstream.training.group import Group
from rollstream.training.plan import Plan, PlannedGroup, seeded

Array = np.ndarray[Any, np.dtype[np.float64]]

Weigh = Callable[[Array, int], Array]
"""Weights (>= 0) of rows by their estimated success, and by the number of groups that were trained on."""

_FIRST = 0.5
"""The estimate of a row's success before the first group of it."""

_RATE = 0.3
"""How far a group's mean success (its mean reward, clipped to 0 to 1) moves its row's estimate."""

_FLOOR = 0.05
"""Added to all weights, relative to the greatest: what is never drawn is never learnt about."""


def medium_first(success: Array, trained: int) -> Array:
    """Most for prompts that succeed half of the time, where a group's rewards differ most: `4 p (1 - p)`."""
    return 4.0 * success * (1.0 - success)


def easy_to_hard(groups: int) -> Weigh:
    """Follows a target that falls from success 1 to 0 over so many trained groups; near it, weights are high."""
    if groups < 1:
        raise ConfigError(f"easy_to_hard over {groups} groups: at least 1")

    def weigh(success: Array, trained: int) -> Array:
        target = max(0.0, 1.0 - trained / groups)
        return np.exp(-8.0 * (success - target) ** 2)

    return weigh


class Curriculum(Plan):
    """Draws each position's prompt row by weights that depend on how often it succeeded.

    A draw is decided when the position is first asked for, and kept until it is trained or dropped, in the
    saved state too: after a restart what was on its way comes again. There are no epochs as of a shuffled
    plan; a row's `epoch` counts how often it was drawn before, so `(epoch, index)` is unique all the same.

    Args:
        rows: prompt rows, > 0.
        seed: of the draws.
        weigh: weights of rows by estimated success.
        length: positions there are; None: endless.
    """

    def __init__(
        self,
        rows: int,
        *,
        seed: int = 0,
        weigh: Weigh = medium_first,
        length: int | None = None,
    ) -> None:
        if rows < 1:
            raise ConfigError("a curriculum needs at least one prompt row")
        self._seed = seed
        self._weigh = weigh
        self._success = np.full(rows, _FIRST)
        self._trained = 0
        self._drawn: Counter[int] = Counter()  # times, of rows
        self._decided: dict[int, PlannedGroup] = {}
        self.length = length

    def at(self, position: int) -> PlannedGroup:
        if position not in self._decided:
            weights = np.maximum(self._weigh(self._success, self._trained), 0.0)
            weights = np.cumsum(weights + _FLOOR * (weights.max() or 1.0))
            drawn = seeded(self._seed, position).random() * weights[-1]
            # A product may round up to the whole.
            index = min(int(np.searchsorted(weights, drawn, side="right")), len(weights) - 1)
            self._decided[position] = PlannedGroup(position, self._drawn[index], index)
            self._drawn[index] += 1
        return self._decided[position]

    def success(self, index: int) -> float:
        """The estimate of a row's success, 0 to 1."""
        return float(self._success[index])

    def observe(self, group: Group) -> None:
        """Learns from a group that was trained on; unscored rollouts say nothing."""
        self._trained += 1
        self.observe_dropped(group)

    def observe_dropped(self, group: Group) -> None:
        """Learns from a group that a filter dropped: or what has no signal would be drawn for ever."""
        rewards = [reward for reward in group.rewards if reward is not None]
        if rewards:
            before = self._success[group.index]
            self._success[group.index] += _RATE * (np.clip(np.mean(rewards), 0.0, 1.0) - before)

    def restore(self, group: PlannedGroup) -> None:
        if group.position not in self._decided:
            self._decided[group.position] = group
            self._drawn[group.index] = max(self._drawn[group.index], group.epoch + 1)

    def forget(self, below: int) -> None:
        self._decided = {position: group for position, group in self._decided.items() if position >= below}

    def identity(self) -> dict[str, Any]:
        return {"kind": "curriculum", "rows": len(self._success), "seed": self._seed}

    def state_dict(self) -> dict[str, Any]:
        learnt = np.flatnonzero(self._success != _FIRST)
        return {
            "trained": self._trained,
            "success": [[int(index), float(self._success[index])] for index in learnt],
            "drawn": [list(item) for item in sorted(self._drawn.items())],
            "decided": [[group.position, group.epoch, group.index] for group in self._decided.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained = state["trained"]
        self._success[:] = _FIRST
        for index, success in state["success"]:
            self._success[index] = success
        self._drawn = Counter(dict(state["drawn"]))
        self._decided = {place[0]: PlannedGroup(*place) for place in state["decided"]}
