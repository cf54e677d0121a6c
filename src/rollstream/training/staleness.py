"""The staleness rule: what may be begun, what the next batch must take. Pure; proof: docs/staleness.md.

Words: batch k is trained with version k (the weights have had k updates). A group that was begun at engine
version `start` and is trained in batch k has staleness `k - start`, the time it lay finished included. It
may go into batches up to `start + max_staleness`: its deadline.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollstream.errors import ConfigError
from rollstream.training.group import Group


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """Admission and delivery such that no deadline is ever missed, whatever finishes when."""

    groups_per_step: int
    """Groups that every batch takes at least, > 0 (all batches the same number, unless sizes are dynamic)."""
    max_staleness: int = 1
    """Steps, >= 0."""
    ahead: int = 1
    """Batches that may exist beyond the one being trained, >= 0; 0 generates only while nothing is trained."""
    largest_step: int | None = None
    """Groups that a batch may take at most, where sizes are dynamic; None: `groups_per_step`."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0 or self.ahead < 0:
            raise ConfigError(f"{self}: groups_per_step > 0, max_staleness >= 0, ahead >= 0")
        if self.largest < self.groups_per_step:
            raise ConfigError(f"{self}: the largest step is smaller than the smallest")
        if self.max_staleness == 0 and self.largest > self.groups_per_step:
            # What does not fit into a batch any more waits for the next one, and is a step older then.
            raise ConfigError(f"batches of a dynamic size need a max_staleness of 1 or more: {self}")

    @property
    def largest(self) -> int:
        """Groups that a batch may take at most."""
        return self.groups_per_step if self.largest_step is None else self.largest_step

    def room(
        self, starts: Mapping[int, int], *, next_step: int, untrained: int, version: int, taken: int = 0
    ) -> int:
        """Groups that may be begun now at engine version `version`.

        Args:
            starts: undelivered groups that were begun: how many at each start version, none above `version`.
            next_step: the batch that is delivered next.
            untrained: batches that were delivered and are not trained yet.
            version: the engine's.
            taken: groups, not in `starts`, that the next batch has taken while it waits for more; it has what
                it must hold then, and need not take any other.
        """
        outstanding = sum(starts.values())
        room = (self.ahead + 1 - untrained) * self.largest - outstanding - taken
        first = next_step + (taken > 0)  # of the batches that places can be counted on in
        batches = version + self.max_staleness - first + 1  # first … version + max_staleness
        return max(0, min(room, batches * self.groups_per_step - outstanding))

    def must_take(self, starts: Mapping[int, int], *, next_step: int) -> list[tuple[int, int]]:
        """The groups that batch `next_step` must hold, as `(version, number)`: so many begun at `version` or before.

        Only pairs with a number > 0, versions ascending.
        """
        pairs, before = [], 0
        for version in sorted(starts):
            before += starts[version]
            later = max(0, version + self.max_staleness - next_step)  # batches that may take them after this
            if before > later * self.groups_per_step:
                pairs.append((version, before - later * self.groups_per_step))
        return pairs


def choose(groups: Iterable[Group], must_take: Sequence[tuple[int, int]], *, size: int) -> list[Group]:
    """The groups of the next batch, as far as they are finished: complete when there are `size`.

    Of all ways to keep the rule, the one that takes the best-ranked groups first; positions decide between
    equals. What the rule demands and is not finished keeps its place: then the answer is shorter than `size`,
    and the batch has to wait.

    Args:
        groups: the finished ones.
        must_take: of `StalenessRule.must_take`.
        size: groups that the batch takes.
    """
    # "At least m of those begun at v or before" in a batch of `size` is "at most size - m of the later ones":
    # limits on nested sets, under which taking the best one that fits, again and again, is optimal.
    # One that does not fit any more never fits again.
    left = {version: size - number for version, number in must_take}
    taken: list[Group] = []
    for group in sorted(groups, key=lambda group: (group.rank, group.position)):
        limits = [version for version in left if group.start > version]
        if len(taken) < size and all(left[version] for version in limits):
            taken.append(group)
            for version in limits:
                left[version] -= 1
    return taken
