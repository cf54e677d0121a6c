"""Which rollouts are done, in one byte each, and what else is counted of a run."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstream.store.arrow import column_values
from rollstream.store.turns import TurnPlaces
from rollstream.trajectory import RolloutKey

_OWED, _DONE, _FAILED = 0, 1, 2

_REPEAT_BITS = 31


def rollout_numbers(index: npt.NDArray[Any], repeat: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """One number for each rollout, in the order of prompt rows and repeats."""
    numbers: npt.NDArray[np.int64] = (index.astype(np.int64) << _REPEAT_BITS) + repeat
    return numbers


def row_numbers(rollouts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The prompt rows of such numbers."""
    return rollouts >> _REPEAT_BITS


class KeyStates:
    """The state of every `(index, repeat)`: owed, done or failed. One byte per key, grown on demand.

    Done is final: a failure recorded for a key that is done changes nothing.

    Attributes:
        n: rollouts of a prompt row.
        done: how many keys are done.
        failed: how many keys are failed.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.done = self.failed = 0
        self._states: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def is_done(self, index: int, repeat: int) -> bool:
        """Whether the rollout completed."""
        at = index * self.n + repeat
        return at < len(self._states) and bool(self._states[at] == _DONE)

    def are_done(self, keys: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows of `index` and `repeat` are of completed rollouts."""
        at = column_values(keys["index"]) * self.n + column_values(keys["repeat"])
        known: npt.NDArray[np.bool_] = at < len(self._states)
        known[known] = self._states[at[known]] == _DONE
        return known

    def mark_done(self, index: int, repeat: int) -> bool:
        """Marks one key; False when it was done before."""
        at = index * self.n + repeat
        self._reserve(at + 1)
        before = self._states[at]
        if before == _DONE:
            return False
        self.failed -= int(before == _FAILED)
        self._states[at] = _DONE
        self.done += 1
        return True

    def mark_failed(self, index: int, repeat: int) -> None:
        """Marks one key as failed unless it is done."""
        at = index * self.n + repeat
        self._reserve(at + 1)
        if self._states[at] == _OWED:
            self._states[at] = _FAILED
            self.failed += 1

    def mark_done_many(
        self, index: npt.NDArray[np.int64], repeat: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Marks keys (arrays of equal length, repetitions allowed); says which were not done before."""
        at = index * self.n + repeat
        if not len(at):
            return np.zeros(0, bool)
        self._reserve(int(at.max()) + 1)
        new: npt.NDArray[np.bool_] = self._states[at] != _DONE
        marked = np.sort(at[new])
        marked = marked[np.diff(marked, prepend=-1) != 0]
        self.failed -= int((self._states[marked] == _FAILED).sum())
        self._states[marked] = _DONE
        self.done += len(marked)
        return new

    def owed(self, order: Iterable[int], *, retry_failed: bool) -> Iterator[RolloutKey]:
        """Keys still to be done, rows in the order given, the repeats of a row together.

        Evaluated lazily: a key that is done by the time it is reached is left out.
        """
        for index in order:
            for repeat in range(self.n):
                at = int(index) * self.n + repeat
                state = self._states[at] if at < len(self._states) else _OWED
                if state == _OWED or (state == _FAILED and retry_failed):
                    yield RolloutKey(int(index), repeat)

    def count(self, order: npt.NDArray[np.int64]) -> tuple[int, int]:
        """How many of the rollouts of these rows are done, and how many failed."""
        if not len(order):
            return 0, 0
        self._reserve((int(order.max()) + 1) * self.n)
        by_row = self._states.reshape(-1, self.n)[order]
        return int((by_row == _DONE).sum()), int((by_row == _FAILED).sum())

    def settled_rows(self) -> npt.NDArray[np.int64]:
        """Rows of which no rollout is owed, and one at least is done."""
        by_row = self._states.reshape(-1, self.n)
        return np.flatnonzero((by_row != _OWED).all(1) & (by_row == _DONE).any(1))

    def done_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rollouts of some rows are done; shape (rows, n)."""
        self._reserve((int(rows.max(initial=0)) + 1) * self.n)
        done: npt.NDArray[np.bool_] = self._states.reshape(-1, self.n)[rows] == _DONE
        return done

    def done_ranges(self) -> list[tuple[int, int]]:
        """Rows of which all `n` rollouts are done, as `(first, last)` ranges."""
        complete = (self._states.reshape(-1, self.n) == _DONE).all(axis=1)
        edges = np.flatnonzero(np.diff(complete.astype(np.int8), prepend=0, append=0))
        return [(int(first), int(last) - 1) for first, last in edges.reshape(-1, 2)]

    def _reserve(self, size: int) -> None:
        if size > len(self._states):  # whole rows
            size = -(-max(size, 1024, len(self._states) * 3 // 2) // self.n) * self.n
            self._states = np.pad(self._states, (0, size - len(self._states)))


@dataclass(slots=True)
class RewardTotals:
    """Sum over final trajectories."""

    total: float = 0.0
    scored: int = 0
    unscored: int = 0
    """Those whose reward function failed; one without a reward function is in neither count."""
    lowest: float = math.inf
    highest: float = -math.inf

    @property
    def mean(self) -> float | None:
        """Mean reward; None when nothing was scored."""
        return self.total / self.scored if self.scored else None

    @property
    def are_equal(self) -> bool:
        """Whether several were scored, and all alike."""
        return self.scored > 1 and self.lowest == self.highest

    def add(self, reward: float | None, failed: bool) -> None:
        """Counts one final trajectory; `failed`: its reward function failed."""
        if reward is not None:
            self.total += reward
            self.scored += 1
            self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)
        elif failed:
            self.unscored += 1

    def add_rows(self, table: pa.Table) -> None:
        """Counts the rewards of rows with `is_snapshot` and `reward`."""
        rewards = column_values(table["reward"])[~column_values(table["is_snapshot"])]
        scored = rewards[~np.isnan(rewards)]
        if len(scored):
            self.total += float(scored.sum())
            self.scored += len(scored)
            self.lowest = min(self.lowest, float(scored.min()))
            self.highest = max(self.highest, float(scored.max()))


class OpenJournal(NamedTuple):
    """The journal file to continue."""

    number: int
    end: int
    """Where in it the next frame belongs."""
    rows: int
    raw_bytes: int
    """Of its rows, uncompressed (about)."""


@dataclass(slots=True)
class RunState:
    """What a run directory holds, as counts and key states."""

    keys: KeyStates
    rewards: RewardTotals = field(default_factory=RewardTotals)
    turns: TurnPlaces = field(default_factory=TurnPlaces)
    """Of rollouts that are not finished."""
    batches: list[int] = field(default_factory=list)
    """Numbers of the good batches."""
    rows: int = 0
    """Trajectories in batches and journals, and in the artifact alone."""
    journal_rows: int = 0
    """Trajectories in journals."""
    artifact_rows: int = 0
    """Trajectories in the artifact alone; 0 once the run is opened for writing."""
    damage: list[str] = field(default_factory=list)
    """One line per damaged or missing file, or damaged stretch of one."""
    unsealed: list[int] = field(default_factory=list)
    """Numbers of closed journal files that wait to be sealed. This and the rest are known once the run is opened."""
    open_journal: OpenJournal | None = None
    torn: int = 0
    """Bytes of the torn tail that was cut."""
    restored: list[str] = field(default_factory=list)
    """One line for each file that rollouts were taken from because their batches are gone or damaged."""
