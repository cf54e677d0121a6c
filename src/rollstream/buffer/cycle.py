"""A trainer that reads in cycles: which instances it had in this one, and must not get again."""

from rollstream.buffer.group_state import Instance

_SPARE_HANDED = 256
"""Instances handed out before the cycle that are known still: what is given back moves a cycle's begin."""


class Cycle:
    """Instances that were handed out, counted; the last of them by name."""

    def __init__(self, groups: int | None) -> None:
        """`groups`: of a cycle; None: there are none."""
        self._cycle = groups
        self.handed = 0
        self.cycle_began = 0
        """`handed`, when the first cycle of the trainer that is there began."""
        self._recent: dict[Instance, int] = {}
        """When an instance was handed out last, counted by `handed`."""
        self._earlier: dict[Instance, int] = {}
        """When it was handed out before that."""

    @property
    def left_in_cycle(self) -> int | None:
        """Groups that are still to be handed out in the trainer's cycle, at least 1; None: no cycles."""
        if self._cycle is None or self._cycle == 1:
            return None
        return self._cycle - (self.handed - self.cycle_began) % self._cycle

    def is_held(self, instance: Instance, ahead: int = 0) -> bool:
        """Whether it must not be handed out yet, once `ahead` others are: it would come twice in a cycle."""
        if self._cycle is None or self._cycle == 1:
            return False
        at = self._recent.get(instance)
        return at is not None and self.handed + 1 + ahead - at < self._cycle

    def _note_handed(self, instance: Instance) -> None:
        if self._cycle is None:
            return
        self.handed += 1
        before = self._recent.pop(instance, None)
        if before is not None:
            self._earlier[instance] = before
        self._recent[instance] = self.handed
        while len(self._recent) > 4 * self._cycle + _SPARE_HANDED:
            forgotten = next(iter(self._recent))
            del self._recent[forgotten]
            self._earlier.pop(forgotten, None)

    def _note_returned(self, instance: Instance) -> None:
        """It did not reach the trainer: the place that it took in the cycle is free for another one."""
        if self._recent.pop(instance, None) is None:
            return
        self.handed -= 1
        self.cycle_began = min(self.cycle_began, self.handed)
        before = self._earlier.pop(instance, None)
        if before is not None:
            self._recent[instance] = before
