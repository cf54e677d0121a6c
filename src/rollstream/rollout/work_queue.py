"""Which worker gets which rollout: a state machine that owns no task and no clock.

The life of a key, and of the place that it takes in the window:

    owed --assign--> in flight at a worker --receive--> at the store --commit--> settled
      ^                        |
      +---- worker lost ----+

A key has one owner. What a worker delivers that is not its own any more (it was declared dead, and its keys
went to others) is refused by `receive`: so whatever dies when, each key is settled once. A place is taken from
`assign` to `commit`: at most `cap` are, and of them a worker holds at most its share.

A rollout that brings its worker down would do so for ever. So one that was in flight at `_FREE_DEATHS` deaths
is a suspect, and is tried: on a worker that has nothing but suspects, one alone at first, twice as many after
each that passes, one again after such a worker's death. So innocents are through after a few rounds, and who
was alone in flight at a death is charged. After `max_charges` it is handed back, to be recorded as failed.
The other workers go on with other work meanwhile.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from rollstream.trajectory import RolloutKey

_FREE_DEATHS = 4
"""Deaths that a rollout lives through unsuspected: workers die for want of memory, or of another's fault.
To be a suspect costs little: to run in small company for a while."""


class WorkQueue:
    """Binds keys to workers as late as possible.

    Example:
        >>> queue = WorkQueue(iter([RolloutKey(0, 0)]), cap=8, max_charges=3)
        >>> queue.add(1)
        >>> queue.assign()
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
        """The worker that is for suspects, as soon as it has nothing else."""
        self._tried: set[RolloutKey] = set()
        """The suspects that it has."""
        self._limit = 1
        """Suspects in flight at most."""
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
        room -= self._assign_suspects(given, room)
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

    def receive(self, worker: int, key: RolloutKey) -> bool:
        """A worker has delivered; False if the key is not its own: then it must be thrown away."""
        keys = self._workers.get(worker)
        if keys is None or key not in keys:
            return False
        keys.remove(key)
        self._at_store.add(key)
        self._deaths.pop(key, None)
        self._charges.pop(key, None)
        if key in self._tried:
            self._tried.remove(key)
            self._limit *= 2
        return True

    def commit(self, key: RolloutKey) -> None:
        """What has arrived is durable."""
        self._at_store.remove(key)

    def worker_lost(self, worker: int, *, suspect: bool = True) -> list[tuple[RolloutKey, int]]:
        """A worker is gone; its keys are owed again. Unknown workers: fine.

        Args:
            worker: its number.
            suspect: whether a rollout may have brought it down; not if it left for want of an engine, or
                with its node.

        Returns:
            the keys that have caused too many deaths, and how many: they have arrived, as failures.
        """
        if worker == self._reserved:
            self._reserved = None
        keys = sorted(self._workers.pop(worker, ()))
        failed, again = [], []
        for key in keys:
            was_tried = key in self._tried
            self._tried.discard(key)
            if suspect:
                self._deaths[key] = self._deaths.get(key, 0) + 1
                if was_tried:
                    self._limit = 1
                    if len(keys) == 1:
                        self._charges[key] = charges = self._charges.get(key, 0) + 1
                        if charges >= self._max_charges:
                            del self._deaths[key], self._charges[key]
                            self._at_store.add(key)
                            failed.append((key, charges))
                            continue
            if was_tried:
                again.append(key)
            elif suspect and self._deaths[key] >= self._free_deaths:
                self._suspects.append(key)
            else:
                self._again.append(key)
        # Before those that were not tried yet: the company of a culprit gets smaller each time.
        self._suspects.extendleft(reversed(again))
        return failed

    def stop(self) -> None:
        """Gives out nothing more; what is in flight goes on."""
        self._stopped = True

    def _assign_suspects(self, given: dict[int, list[RolloutKey]], room: int) -> int:
        """Gives suspects to the worker that is theirs; returns how many."""
        if not self._suspects and not self._tried:
            self._reserved, self._limit = None, 1
        elif self._reserved is None and self._workers:
            self._reserved = min(self._workers, key=lambda worker: (len(self._workers[worker]), worker))
        if self._reserved is None or not (held := self._workers[self._reserved]) <= self._tried:
            return 0
        count = max(0, min(room, len(self._suspects), min(self._limit, self.share) - len(held)))
        for _ in range(count):
            key = self._suspects.popleft()
            self._tried.add(key)
            held.add(key)
            given.setdefault(self._reserved, []).append(key)
        return count

    def _next(self) -> RolloutKey | None:
        if self._again:
            return self._again.popleft()
        if self._keys is not None:
            key = next(self._keys, None)
            if key is not None:
                return key
            self._keys = None
        return None
