"""The plan: which prompt row stands at which position of the endless stream of groups. Pure.

Nothing looks into a live iterator: what comes at position `p` is a function of the seed and `p`, so the
future is known, and a resumed run goes on with the same sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from rollstream.errors import ConfigError

_EPOCHS_KEPT = 3
"""Permutations in memory: work in flight may reach over one end of an epoch, and over two of a tiny one."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A place in the plan."""

    position: int
    """Place in the endless stream, >= 0."""
    epoch: int
    """Pass over the prompt rows, from 0."""
    index: int
    """The prompt row: `PromptRow.index`, or a position in whatever the generator looks up."""


class Plan(Protocol):
    """Says what stands at each position.

    A plan that learns (`Curriculum`) decides a position when it is first asked for it, and keeps the decision
    until `forget`: asking again gives the same answer, also after `load_state_dict`.
    """

    length: int | None
    """Positions there are; None: endless."""

    def at(self, position: int) -> PlannedGroup:
        """The group at a position, `0 <= position < length`."""
        ...

    def identity(self) -> dict[str, Any]:
        """The facts that decide the sequence, as JSON values. A saved state of another identity is refused (R6)."""
        ...

    def forget(self, below: int) -> None:
        """Told that nobody asks for positions under `below` any more."""
        return

    def dropped(self, position: int, *, failed: bool) -> None:
        """Told that a position is not trained: a filter has thrown its group away, or it has `failed`."""
        return

    def restore(self, group: PlannedGroup) -> None:
        """Told, after `load_state_dict`, what was decided for a position after that state was saved."""
        return

    def state_dict(self) -> dict[str, Any]:
        """All that the plan has learnt and decided, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
        return


class FunctionPlan(Plan):
    """A sequence that a function decides, as a trainer's own seeded sampler.

    Args:
        index_at: the epoch and the index at a position; the same answer every time it is asked.
        identity: what decides the sequence, as JSON values.
        length: positions there are; None: endless.
    """

    def __init__(
        self,
        index_at: Callable[[int], tuple[int, int]],
        *,
        identity: dict[str, Any],
        length: int | None = None,
    ) -> None:
        self._index_at = index_at
        self._identity = {"kind": "function", **identity}
        self.length = length

    def at(self, position: int) -> PlannedGroup:
        if position < 0 or (self.length is not None and position >= self.length):
            raise IndexError(f"position {position} is not in a plan of {self.length} positions")
        return PlannedGroup(position, *self._index_at(position))

    def identity(self) -> dict[str, Any]:
        return self._identity


class ShuffledPlan(FunctionPlan):
    """Every prompt row once an epoch, in an order that the seed and the epoch decide.

    Position p is `(epoch, index) = (p // N, permutation(seed, epoch)[p % N])` with `N = rows`.

    Args:
        rows: prompt rows, > 0; indices are `0 … rows-1`.
        seed: of the permutations.
        shuffle: False keeps the rows' order.
        epochs: after how many the plan ends; None: never.
    """

    def __init__(self, rows: int, *, seed: int = 0, shuffle: bool = True, epochs: int | None = None) -> None:
        if rows < 1:
            raise ConfigError("a plan needs at least one prompt row")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs={epochs}: at least 1, or None for no end")

        @lru_cache(_EPOCHS_KEPT)
        def permutation(epoch: int) -> Any:
            return seeded(seed, epoch).permutation(rows)

        def index_at(position: int) -> tuple[int, int]:
            epoch, place = divmod(position, rows)
            return epoch, int(permutation(epoch)[place]) if shuffle else place

        kind = "shuffled" if shuffle else "sequential"
        super().__init__(
            index_at,
            identity={"kind": kind, "rows": rows, "seed": seed if shuffle else None},
            length=None if epochs is None else epochs * rows,
        )


def seeded(*numbers: int) -> np.random.Generator:
    """Random numbers of a key of several numbers: by Philox, neighbouring keys share nothing."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))
