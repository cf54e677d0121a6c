"""Which worker gets which rollout: a state machine that owns no task and no clock.

The life of a key, and of the place that it takes in the window:

    owed --assign--> in flight at a worker --arrive--> at the store --settle--> settled
      ^                        |
      +---- lose (it died) ----+

A key has one owner. What a worker delivers that is not its own any more (it was declared dead, and its keys
went to others) is refused by `arrive`: so whatever dies when, each key is settled once. A place is taken from
`assign` to `settle`: at most `cap` are, and of them a worker holds at most its share.

A rollout that brings its worker down would do so for ever. So one that was in flight at `free_deaths` deaths
is a suspect: it gets a worker for itself, and if that one dies too it is charged. After `max_charges` it is
handed back, to be recorded as failed.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from rollstream.trajectory import RolloutKey

_FREE_DEATHS = 4
"""Deaths that a rollout lives through unsuspected: workers die for want of memory or with their node, too.
To be a suspect costs little: to run alone."""


class Dispatch:
    """Binds keys to workers as late as possible.

    Example:
        >>> dispatch = Dispatch(iter([RolloutKey(0, 0)]), cap=8, max_charges=3)
        >>> dispatch.add(1)
        >>> dispatch.assign()
        {1: [RolloutKey(index=0, repeat=0)]}

    Args:
        keys: owed, each once; taken one by one as there is room.
        cap: keys that hold a place at most; may be changed at any time.
        max_charges: deaths of a worker that a rollout may cause.
        free_deaths: see above.
    """

    def __init__(
        self, keys: Iterator[RolloutKey], *, cap: int, max_charges: int, free_deaths: int = _FREE_DEATHS
    ) -> None:
        self.cap = cap
        self.expected = 1
        """Workers that share the cap, those included that will come: what they are due is kept free."""
        self._keys: Iterator[RolloutKey] | None = keys
        self._max_charges = max_charges
        self._free_deaths = free_deaths
        self._workers: dict[int, set[RolloutKey]] = {}
        self._at_store: set[RolloutKey] = set()
        self._again: deque[RolloutKey] = deque()
        self._deaths: dict[RolloutKey, int] = {}
        self._charges: dict[RolloutKey, int] = {}
        self._suspects: deque[RolloutKey] = deque()
        self._reserved: int | None = None
        """The worker that is for a suspect, as soon as it has nothing else."""
        self._alone: RolloutKey | None = None
        """The suspect that it has."""
        self._stopped = False

    @property
    def in_flight(self) -> int:
        """Keys that hold a place."""
        return len(self._at_store) + self.at_workers

    @property
    def at_workers(self) -> int:
        """Of them, those that a death could cost."""
        return sum(map(len, self._workers.values()))

    @property
    def share(self) -> int:
        """Keys that one worker holds at most."""
        return -(-self.cap // max(self.expected, len(self._workers), 1))

    @property
    def is_finished(self) -> bool:
        """Whether nothing is in flight and nothing more will be."""
        more = not self._stopped and bool(self._keys is not None or self._again or self._suspects)
        return not more and not self.in_flight

    def held_by(self, worker: int) -> frozenset[RolloutKey]:
        """The keys in flight at a worker."""
        return frozenset(self._workers.get(worker, ()))

    def add(self, worker: int) -> None:
        """A worker that can be given work; its number was never used before."""
        assert worker not in self._workers
        self._workers[worker] = set()

    def assign(self) -> dict[int, list[RolloutKey]]:
        """Gives out what there is room for, evenly; returns who got what."""
        given: dict[int, list[RolloutKey]] = {}
        room = self.cap - self.in_flight
        if self._stopped or room <= 0:
            return given
        if (suspect := self._assign_suspect()) is not None:
            worker, key = suspect
            given[worker] = [key]
            room -= 1
        share = self.share
        least = [(len(keys), worker) for worker, keys in self._workers.items() if worker != self._reserved]
        heapq.heapify(least)
        while room > 0 and least and least[0][0] < share:
            next_key = self._next()
            if next_key is None:
                break
            load, worker = least[0]
            self._workers[worker].add(next_key)
            given.setdefault(worker, []).append(next_key)
            heapq.heapreplace(least, (load + 1, worker))
            room -= 1
        return given

    def arrive(self, worker: int, key: RolloutKey) -> bool:
        """A worker has delivered; False if the key is not its own: then it must be thrown away."""
        keys = self._workers.get(worker)
        if keys is None or key not in keys:
            return False
        keys.remove(key)
        self._at_store.add(key)
        self._deaths.pop(key, None)
        self._charges.pop(key, None)
        if key == self._alone:
            self._alone = self._reserved = None
        return True

    def settle(self, key: RolloutKey) -> None:
        """What has arrived is durable."""
        self._at_store.remove(key)

    def lose(self, worker: int) -> list[tuple[RolloutKey, int]]:
        """A worker is gone; its keys are owed again. Unknown workers: fine.

        Returns:
            the keys that have caused too many deaths, and how many: they have arrived, as failures.
        """
        failed = []
        if worker == self._reserved:
            self._reserved = None
        for key in sorted(self._workers.pop(worker, ())):
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if key == self._alone:
                self._alone = None
                self._charges[key] = charges = self._charges.get(key, 0) + 1
                if charges >= self._max_charges:
                    del self._deaths[key], self._charges[key]
                    self._at_store.add(key)
                    failed.append((key, charges))
                    continue
            if self._deaths[key] >= self._free_deaths:
                self._suspects.append(key)
            else:
                self._again.append(key)
        return failed

    def stop(self) -> None:
        """Gives out nothing more; what is in flight goes on."""
        self._stopped = True

    def _assign_suspect(self) -> tuple[int, RolloutKey] | None:
        if not self._suspects or not self._workers or self._alone is not None:
            return None
        if self._reserved is None:
            self._reserved = min(self._workers, key=lambda worker: (len(self._workers[worker]), worker))
        if self._workers[self._reserved]:
            return None
        self._alone = self._suspects.popleft()
        self._workers[self._reserved].add(self._alone)
        return self._reserved, self._alone

    def _next(self) -> RolloutKey | None:
        if self._again:
            return self._again.popleft()
        if self._keys is not None:
            key = next(self._keys, None)
            if key is not None:
                return key
            self._keys = None
        return None
