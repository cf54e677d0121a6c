"""Shares of a whole in places that are given one by one. Pure, and exact: in whole numbers.

A place is for a member that has had less than its share, counted with this place; of several for the one that would
first be a whole place behind. So none is ever a whole place behind or ahead (the deadlines of P-fair scheduling).
"""

import math
from collections.abc import Sequence
from fractions import Fraction


class Shares:
    """Gives places by weights.

    Attributes:
        active: members that get some.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: of the members, > 0; only their ratios count."""
        exact = [Fraction(str(weight)) for weight in weights]
        least = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * least) for weight in exact]
        self._unit = sum(self._weights)  # of a place: what the weights that are active divide
        self._owed = [0] * len(weights)  # of these; the sum is 0
        self.active = set(range(len(weights)))

    def take(self) -> int:
        """Gives the next place; somebody must be active."""
        shares = self._shares()
        due = [one for one, share in shares.items() if self._owed[one] + share > 0]
        chosen = min(due, key=lambda one: (self._unit - self._owed[one]) / shares[one])
        self.give(chosen)
        return chosen

    def give(self, member: int, places: int = 1) -> None:
        """Gives a member places that were decided elsewhere; with -1 a place is given back, as if it had not been."""
        if member not in self.active:
            return  # what it has had, or gives back, is all the others'
        for one, share in self._shares().items():
            self._owed[one] += places * share
        self._owed[member] -= places * self._unit

    def pause(self, member: int) -> None:
        """Gives a member no more places; what it is owed goes to the others."""
        self.active.remove(member)
        if total := sum(self._weights[one] for one in self.active):
            self._unit *= total
            self._owed = [owed * total for owed in self._owed]
        for one, share in self._shares().items():
            self._owed[one] += self._owed[member] * share // self._unit  # of which nothing is left over
        self._owed[member] = 0

    def state(self) -> list[str]:
        """What is owed, exactly."""
        return list(map(str, (self._unit, *self._owed)))

    def set_state(self, state: Sequence[str]) -> None:
        """Takes what `state` gave."""
        self._unit, *self._owed = map(int, state)

    def _shares(self) -> dict[int, int]:
        total = sum(self._weights[one] for one in self.active)
        return {one: self._unit // total * self._weights[one] for one in sorted(self.active)}
