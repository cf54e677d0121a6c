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
from collections import Counter, deque
from collections.abc import Iterator

from rollstream.trajectory import RolloutKey

_FREE_DEATHS = 4
"""Deaths that a rollout lives through unsuspected: workers die for want of memory, or of another's fault."""


class WorkQueue:
    """Binds keys to workers as late as possible.

    Args:
        keys: owed, each once; taken one by one as there is room. None among them: there is no other now.
        cap: keys that hold a place at most; may be changed at any time.
        max_charges: deaths of a worker that a rollout may cause.
        free_deaths: see above.
    """

    def __init__(
        self,
        keys: Iterator[RolloutKey | None],
        *,
        cap: int,
        max_charges: int,
        free_deaths: int = _FREE_DEATHS,
    ) -> None:
        self.cap = cap
        self.expected = 1
        """Workers that share the cap, those included that will come: what they are due is kept free."""
        self._keys: Iterator[RolloutKey | None] | None = keys
        self._max_charges = max_charges
        self._free_deaths = free_deaths
        self._workers: dict[int, set[RolloutKey]] = {}
        self._at_store: set[RolloutKey] = set()
        self._again: deque[RolloutKey] = deque()
        self._deaths: Counter[RolloutKey] = Counter()
        self._charges: Counter[RolloutKey] = Counter()
        self._suspects: deque[RolloutKey] = deque()
        self._trial: int | None = None
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
        """A worker that can be given work."""
        assert worker not in self._workers
        self._workers[worker] = set()

    def assign(self) -> dict[int, list[RolloutKey]]:
        """Gives out what there is room for, evenly; returns who got what."""
        assigned: dict[int, list[RolloutKey]] = {}
        room = self.cap - self.in_flight
        if self._stopped or room <= 0:
            return assigned
        share = self.share
        if suspects := self._next_suspects(room):
            assert self._trial is not None
            assigned[self._trial] = suspects
            self._tried.update(suspects)
            room -= len(suspects)
        loads = [(len(keys), worker) for worker, keys in self._workers.items() if worker != self._trial]
        heapq.heapify(loads)
        while room > 0 and loads and loads[0][0] < share and (next_key := self._next()) is not None:
            load, worker = loads[0]
            assigned.setdefault(worker, []).append(next_key)
            heapq.heapreplace(loads, (load + 1, worker))
            room -= 1
        for worker, keys in assigned.items():
            self._workers[worker].update(keys)
        return assigned

    def receive(self, worker: int, key: RolloutKey) -> bool:
        """A worker has delivered; False if the key is not its own: then it must be thrown away."""
        if key not in self._workers.get(worker, ()):
            return False
        self._workers[worker].remove(key)
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
        if worker == self._trial:
            self._trial = None
        keys = sorted(self._workers.pop(worker, ()))
        tried = [key for key in keys if key in self._tried]
        self._tried.difference_update(tried)
        failed = []
        if suspect:
            self._deaths.update(keys)
            if tried:
                self._limit = 1
            if tried == keys and len(keys) == 1:
                (culprit,) = keys
                self._charges[culprit] += 1
                if self._charges[culprit] >= self._max_charges:
                    failed.append((culprit, self._charges.pop(culprit)))
                    del self._deaths[culprit]
                    self._at_store.add(culprit)
                    tried = []
        # Before those that were not tried yet: the company of a culprit gets smaller each time.
        self._suspects.extendleft(reversed(tried))
        for key in keys:
            if key not in tried and key not in self._at_store:
                is_suspect = suspect and self._deaths[key] >= self._free_deaths
                (self._suspects if is_suspect else self._again).append(key)
        return failed

    def stop(self) -> None:
        """Gives out nothing more; what is in flight goes on."""
        self._stopped = True

    def _next_suspects(self, room: int) -> list[RolloutKey]:
        """Takes the suspects that their worker gets now."""
        if not self._suspects and not self._tried:
            self._trial, self._limit = None, 1
        elif self._trial is None and self._workers:
            self._trial = min(self._workers, key=lambda worker: (len(self._workers[worker]), worker))
        if self._trial is None or not (held := self._workers[self._trial]) <= self._tried:
            return []
        count = max(0, min(room, len(self._suspects), min(self._limit, self.share) - len(held)))
        return [self._suspects.popleft() for _ in range(count)]

    def _next(self) -> RolloutKey | None:
        if self._again:
            return self._again.popleft()
        for key in self._keys or ():
            return key
        self._keys = None
        return None
