"""Which replica gets the next request: the one of its session, else the one likely to answer first.

The speed of a replica is that of one request there, in tokens per second, as measured on its last answers. It
includes what a request waits in the server, so a server with a queue is a slow one. Pure: owns no task, and
takes no connection. Which replicas may get requests at all is `readiness`.
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rollstream.engine.stragglers import ReplicaLoad

Outcome = Literal["answered", "failed", "cancelled"]
"""How a request ended: with an answer (an error that is the request's own fault counts), with the replica's
failure, or because nobody wants it any more."""

_REMEMBERED_SESSIONS = 8_192
"""A session is a rollout; some times as many as are in flight. One that is forgotten loses a cached prefix."""
_STICKY_LOAD = 2.0
"""A session leaves its replica when another would be this much faster: a cached prefix saves the prompt's
computation, not a whole answer's."""
_STICKY_MARGIN = 4
"""And when it has at least this many more requests: small numbers differ by chance."""

_MEMORY = 0.9
"""Weight of an answer against the next one: some ten tell a replica's speed, one slow answer does not."""
_SPEED_TOKENS = 8
"""Shorter answers say little of a replica's speed."""


@dataclass(slots=True)
class ReplicaStats:
    """What is known of a replica."""

    in_flight: int = 0
    began: float = 0.0
    """Sum of the times at which the requests in flight began."""
    tokens: float = 0.0
    seconds: float = 0.0
    answers: float = 0.0
    """Sums over the last answers, each with `_MEMORY` times the weight of the next."""
    typical_in_flight: float = 0.0
    """Requests in flight when an answer came: a mean of the same kind."""
    alive_at: float = 0.0
    """When it last answered, or began to have work."""
    failures: int = 0
    """In a row."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A replica that was chosen for a request, which counts there until `Router.release`."""

    name: str
    began: float = field(compare=False, default=0.0)


@dataclass(frozen=True, slots=True)
class _Typical:
    """Means over the replicas that have answered."""

    speed: float
    seconds: float
    """That an answer takes."""


class Router:
    """Chooses replicas and learns from how requests end.

    Args:
        names: the replicas.
        clock: seconds; never goes back.
        rng: breaks ties.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.replicas: dict[str, ReplicaStats] = {name: ReplicaStats() for name in names}
        self._clock = clock
        self._rng = rng or random.Random()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def now(self) -> float:
        """The time by the clock of the picks."""
        return self._clock()

    def add(self, name: str) -> None:
        """Makes a replica known; one that is known stays as it is."""
        self.replicas.setdefault(name, ReplicaStats())

    def remove(self, name: str) -> None:
        """Forgets a replica; requests that it has may still be released."""
        self.replicas.pop(name, None)

    def pick(self, candidates: Collection[str], session: str) -> Pick | None:
        """Takes one of the candidates and counts the request there; None when there is none.

        Args:
            candidates: names of replicas that are known.
            session: requests of the same one go to the same replica, if that is sensible.
        """
        return self.take(self._choose(session, candidates), session) if candidates else None

    def take(self, name: str, session: str) -> Pick:
        """Counts a request at a certain replica, where its session is from now on."""
        stats, now = self.replicas[name], self._clock()
        if not stats.in_flight:
            stats.alive_at = max(stats.alive_at, now)  # nobody listened before
        stats.in_flight += 1
        stats.began += now
        if len(self.replicas) > 1:
            self._sessions[session] = name
            self._sessions.move_to_end(session)
            if len(self._sessions) > _REMEMBERED_SESSIONS:
                self._sessions.popitem(last=False)
        return Pick(name, now)

    def release(self, pick: Pick, outcome: Outcome, *, tokens: int = 0) -> None:
        """Ends a request that was counted. `tokens`: how many it got."""
        stats = self.replicas.get(pick.name)
        if stats is None:
            return
        in_flight = stats.in_flight
        stats.in_flight = max(0, in_flight - 1)
        stats.began = stats.began - pick.began if stats.in_flight else 0.0
        if outcome == "cancelled":
            return
        now = self._clock()
        stats.alive_at = max(stats.alive_at, now)
        if outcome == "failed":
            stats.failures += 1
            return
        stats.failures = 0
        seconds = now - pick.began
        if tokens >= _SPEED_TOKENS and seconds > 0:
            before = _MEMORY * stats.answers
            stats.tokens = _MEMORY * stats.tokens + tokens
            stats.seconds = _MEMORY * stats.seconds + seconds
            stats.answers = before + 1
            stats.typical_in_flight = (before * stats.typical_in_flight + in_flight) / stats.answers

    def mark_alive(self, name: str) -> None:
        """A replica has shown that it is alive."""
        if (stats := self.replicas.get(name)) is not None:
            stats.alive_at = self._clock()

    def silent_for(self, seconds: float) -> list[str]:
        """Replicas with requests in flight that have not answered for so long."""
        before = self._clock() - seconds
        return [name for name, stats in self.replicas.items() if stats.in_flight and stats.alive_at < before]

    def loads(self, names: Collection[str]) -> dict[str, ReplicaLoad]:
        """How busy and how fast replicas are."""
        now, typical = self._clock(), self._typical()
        return {
            name: ReplicaLoad(stats.in_flight, _speed(stats, now, typical), stats.typical_in_flight)
            for name, stats in self.replicas.items()
            if name in names
        }

    def _choose(self, session: str, candidates: Collection[str]) -> str:
        if len(candidates) == 1:
            return next(iter(candidates))
        now, typical, stats = self._clock(), self._typical(), self.replicas
        # How long a request is likely to take there, in arbitrary units: its place in line, by the speed.
        waits = {name: (stats[name].in_flight + 1) / _speed(stats[name], now, typical) for name in candidates}
        least = min(waits.values())
        home = self._sessions.get(session)
        if home in waits:
            fewest = min(stats[name].in_flight for name in candidates)
            is_crowded = stats[home].in_flight >= fewest + _STICKY_MARGIN
            if not (is_crowded and waits[home] > _STICKY_LOAD * least):
                return home
        return self._rng.choice([name for name, wait in waits.items() if wait <= least * (1 + 1e-9)])

    def _typical(self) -> _Typical:
        measured = [stats for stats in self.replicas.values() if stats.seconds]
        if not measured:
            return _Typical(1.0, float("inf"))
        return _Typical(
            sum(stats.tokens / stats.seconds for stats in measured) / len(measured),
            sum(stats.seconds for stats in measured) / sum(stats.answers for stats in measured),
        )


def _speed(stats: ReplicaStats, now: float, typical: _Typical) -> float:
    """Tokens per second of a request. One without an answer is as fast as the others, until it is late."""
    if stats.seconds:
        return stats.tokens / stats.seconds
    if stats.in_flight and (age := now - stats.began / stats.in_flight) > typical.seconds:
        return typical.speed * typical.seconds / age
    return typical.speed
