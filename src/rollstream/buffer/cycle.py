"""A trainer that reads in cycles: which instances it had in this one, and must not get again.

The groups that were handed out stand in one list, in that order; a group that comes back leaves it. Held is
an instance that is among the last of them, as many as a cycle has groups but one: so of as many instances
as a cycle has groups, one is always free.

The list changes by records of the log only. A group of a lease that has expired keeps its place and does not
count: it may be acked still. Then, and after a restart, it counts again, where it stood.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from rollstream.buffer.group_state import Instance

_CYCLES_KEPT = 4
_SPARE_PLACES = 256
"""Places that are known, beyond those of so many cycles: what comes back lets the ones before it count."""


class Cycle:
    """Groups that were handed out, counted; the last of them by name."""

    def __init__(self, groups: int | None) -> None:
        """`groups`: of a cycle; None: there are none."""
        self._cycle = groups
        self.handed = 0
        """Groups that were handed out and did not come back."""
        self.cycle_began = 0
        """Those of them that were, when the first cycle of the trainer that is there began."""
        self._next_place = 1
        self._first_of_cycle = 1
        """The first place of the trainer that is there."""
        self._places: OrderedDict[int, tuple[int, Instance]] = OrderedDict()
        """Place -> number of the group (0: a log of an earlier version does not say it), and its instance."""
        self._place_of: dict[int, int] = {}
        """Number of the group -> place."""
        self._counted: list[int] = []
        """Places that count, in order."""
        self._counted_of: dict[Instance, list[int]] = {}
        """Those of an instance."""
        self._paused: set[int] = set()
        """Groups of the trainer that is there that do not count while their lease has expired."""

    @property
    def left_in_cycle(self) -> int | None:
        """Groups that are still to be handed out in the trainer's cycle, at least 1; None: no cycles."""
        if self._cycle is None or self._cycle == 1:
            return None
        return self._cycle - (self.handed - self.cycle_began - len(self._paused)) % self._cycle

    def is_held(self, instance: Instance, ahead: int = 0) -> bool:
        """Whether it must not be handed out yet, once `ahead` others are: it would come twice in a cycle."""
        if self._cycle is None or self._cycle == 1:
            return False
        places = self._counted_of.get(instance)
        if places is None:
            return False
        return len(self._counted) - bisect_left(self._counted, places[-1]) + ahead < self._cycle

    def _newest_place(self, instance: Instance) -> int:
        """Of an instance that is held: the lower, the sooner it is free."""
        return self._counted_of[instance][-1]

    # -- what a record of the log changes

    def _hand_out(self, numbers: Sequence[int], instances: Sequence[Instance]) -> None:
        """Groups, and of which instances they are."""
        if self._cycle is None:
            return
        for number, instance in zip(numbers, instances, strict=False):
            if number in self._place_of:  # the record of its return is damaged: a group has one place
                self._take_back([number])
            place = self._next_place
            self._next_place += 1
            self._places[place] = number, instance
            if number:
                self._place_of[number] = place
            self._counted.append(place)
            self._counted_of.setdefault(instance, []).append(place)
            self.handed += 1
        last = 0
        for _ in range(len(self._places) - _CYCLES_KEPT * self._cycle - _SPARE_PLACES):
            last, (number, instance) = self._places.popitem(last=False)
            self._place_of.pop(number, None)
            places = self._counted_of.get(instance)
            if places is not None and places[0] == last:
                self._forget_first(instance, places)
        del self._counted[: bisect_right(self._counted, last)]

    def _take_back(self, numbers: Iterable[int]) -> None:
        """They did not reach the trainer: their places in the cycle are free for others."""
        for number in numbers:
            self._paused.discard(number)
            place = self._place_of.get(number)
            if place is not None:
                self._free(place)
            elif self.handed > len(self._places):  # one whose place is known no more
                self.cycle_began -= not self._is_of_cycle(None)
                self.handed -= 1

    def _take_back_newest(self, instances: Iterable[Instance]) -> None:
        """As a log of an earlier version says it, which does not tell groups."""
        for instance in instances:
            if instance in self._counted_of:
                self._free(self._newest_place(instance))

    def _begin_cycle(self) -> None:
        """A trainer's cycle begins here."""
        self.cycle_began = self.handed
        self._first_of_cycle = self._next_place
        self._paused.clear()

    def _free(self, place: int) -> None:
        self.cycle_began -= not self._is_of_cycle(place)
        self.handed -= 1
        number, instance = self._places.pop(place)
        self._place_of.pop(number, None)
        self._uncount(place, instance)

    def _is_of_cycle(self, place: int | None) -> bool:
        """Whether it was handed out since the trainer's first cycle began; None: before all known ones."""
        if place is None:
            return self.handed - len(self._places) > self.cycle_began
        return place >= self._first_of_cycle

    # -- what time changes

    def _pause(self, numbers: Iterable[int]) -> None:
        """Their lease has expired: they keep their places, and do not count."""
        for number in numbers:
            place = self._place_of.get(number)
            if place is not None:
                self._uncount(place, self._places[place][1])
            if self._is_of_cycle(place):
                self._paused.add(number)

    def _resume(self, numbers: Iterable[int]) -> None:
        """They are their reader's after all."""
        for number in numbers:
            self._paused.discard(number)
            place = self._place_of.get(number)
            if place is not None:
                insort(self._counted, place)
                insort(self._counted_of.setdefault(self._places[place][1], []), place)

    def _uncount(self, place: int, instance: Instance) -> None:
        at = bisect_left(self._counted, place)
        if at < len(self._counted) and self._counted[at] == place:
            del self._counted[at]
            places = self._counted_of[instance]
            places.remove(place)
            if not places:
                del self._counted_of[instance]

    def _forget_first(self, instance: Instance, places: list[int]) -> None:
        del places[0]
        if not places:
            del self._counted_of[instance]

    # -- as a segment's first record has it

    def _places_in_order(self) -> list[tuple[int, Instance]]:
        return list(self._places.values())

    def _set_places(self, handed: int, cycle_began: int, places: Iterable[tuple[int, Instance]]) -> None:
        """Into an empty list."""
        known = list(places)
        self.handed, self.cycle_began = handed, cycle_began
        self._next_place = handed - len(known) + 1  # so that they are counted as `cycle_began` is
        self._first_of_cycle = cycle_began + 1
        for place, (number, instance) in enumerate(known, self._next_place):
            self._places[place] = number, instance
            if number:
                self._place_of[number] = place
            self._counted.append(place)
            self._counted_of.setdefault(instance, []).append(place)
        self._next_place += len(known)
