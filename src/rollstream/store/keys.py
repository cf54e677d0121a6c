"""Which rollouts are done, in one byte each."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from rollstream.trajectory import RolloutKey

_OWED, _DONE, _FAILED = 0, 1, 2


class KeyStates:
    """The state of every `(index, repeat)`: owed, done or failed. One byte per key, grown on demand.

    Done is final: a failure recorded for a key that is done changes nothing.
    """

    def __init__(self, n: int) -> None:
        """`n` is the number of rollouts of a prompt row."""
        self.n = n
        self._states: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.done = 0
        """How many keys are done."""
        self.failed = 0
        """How many keys are failed."""

    def is_done(self, index: int, repeat: int) -> bool:
        """Whether the rollout completed."""
        at = index * self.n + repeat
        return at < len(self._states) and bool(self._states[at] == _DONE)

    def are_done(self, index: npt.NDArray[np.int64], repeat: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which of these keys are done. Shape of the arguments."""
        at = index * self.n + repeat
        known = at < len(self._states)
        done = np.zeros(len(at), bool)
        done[known] = self._states[at[known]] == _DONE
        return done

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

    def mark_done_many(self, index: npt.NDArray[np.int64], repeat: npt.NDArray[np.int32]) -> int:
        """Marks keys (arrays of equal length, repetitions allowed); returns how many are new."""
        if not len(index):
            return 0
        at = np.unique(index * self.n + repeat)
        self._reserve(int(at[-1]) + 1)
        before = self._states[at]
        new = int((before != _DONE).sum())
        self.failed -= int((before == _FAILED).sum())
        self._states[at] = _DONE
        self.done += new
        return new

    def owed(self, order: Iterable[int], *, retry_failed: bool) -> Iterator[RolloutKey]:
        """Keys still to be done, rows in the order given, the repeats of a row together.

        Evaluated lazily: a key that is done by the time it is reached is left out.
        """
        for index in order:
            base = int(index) * self.n
            for repeat in range(self.n):
                at = base + repeat
                state = self._states[at] if at < len(self._states) else _OWED
                if state == _OWED or (state == _FAILED and retry_failed):
                    yield RolloutKey(int(index), repeat)

    def count(self, order: npt.NDArray[np.int64]) -> tuple[int, int]:
        """How many of the rollouts of these rows are done, and how many failed."""
        if not len(order):
            return 0, 0
        self._reserve((int(order.max()) + 1) * self.n)
        by_row = self._states[: len(self._states) // self.n * self.n].reshape(-1, self.n)[order]
        return int((by_row == _DONE).sum()), int((by_row == _FAILED).sum())

    def done_ranges(self) -> list[tuple[int, int]]:
        """Rows of which all `n` rollouts are done, as `(first, last)` ranges."""
        rows = len(self._states) // self.n
        complete = (self._states[: rows * self.n].reshape(rows, self.n) == _DONE).all(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], complete, [False]]).astype(np.int8)))
        return [(int(first), int(last) - 1) for first, last in edges.reshape(-1, 2)]

    def _reserve(self, size: int) -> None:
        if size > len(self._states):
            size = -(-max(size, 1024, len(self._states) * 3 // 2) // self.n) * self.n
            grown = np.zeros(size, np.uint8)
            grown[: len(self._states)] = self._states
            self._states = grown
