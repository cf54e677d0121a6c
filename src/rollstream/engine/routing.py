"""Which replica gets the next request: sticky, else the one that is likely to answer first. Owns no task.

The life of a replica, as seen from here:

    closed --(away, or `_FAILURES_TO_OPEN` failures in a row)--> open for a while
    open --(the while is over)--> half-open: one request at a time tries it
    half-open --(it answers)--> closed          half-open --(it does not)--> open for twice as long
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["answered", "failed", "away", "cancelled"]
"""How a request ended: with an answer (an error that is the request's own fault counts), with an error of the
replica's, without a replica, or because nobody wants it any more."""

_OPEN_S = 1.0
"""For so long a replica that was away gets nothing: long enough that a burst does not run into a dead server
request by request, short enough that a restarted one is used at once."""
_OPEN_S_MAX = 15.0
_FAILURES_TO_OPEN = 5
"""One bad reply is an accident; five in a row, with requests in between going well elsewhere, are a state."""

_REMEMBERED_SESSIONS = 65_536
"""A session is a rollout; more than are ever in flight."""
_STICKY_LOAD = 2.0
"""A session leaves its replica when another would be this much faster: a cached prefix saves the prompt's
computation, not a whole answer's."""
_STICKY_MARGIN = 4
"""And when it has at least this many more requests: small numbers differ by chance."""

_SPEED_WEIGHT = 0.1
"""Of a new observation: some ten answers tell a replica's speed, and one slow answer does not."""
_SPEED_TOKENS = 8
"""Shorter answers say little of a replica's speed."""


@dataclass(slots=True)
class ReplicaState:
    """What is known of a replica."""

    in_flight: int = 0
    tokens_per_second: float | None = None
    """Of one request, as measured; None before the first answer."""
    failures: int = 0
    """In a row."""
    open_until: float = 0.0
    open_for: float = _OPEN_S
    tries: int = 0
    """Requests in flight that were sent while it was half-open."""
    is_open: bool = False
    """It was away and has not answered since."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A replica that was chosen for a request; give it back by `Router.release`."""

    name: str
    trial: bool
    """Whether it is tried out after it was away."""
    began: float = field(compare=False, default=0.0)


class Router:
    """Chooses replicas and learns from how requests end.

    Args:
        names: the replicas.
        clock: seconds; never goes back.
        rng: breaks ties.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.replicas: dict[str, ReplicaState] = {name: ReplicaState() for name in names}
        self._clock = clock
        self._rng = rng or random.Random()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def add(self, name: str) -> None:
        """Makes a replica known; one that is known stays as it is."""
        self.replicas.setdefault(name, ReplicaState())

    def remove(self, name: str) -> None:
        """Forgets a replica; requests that it has may still be released."""
        self.replicas.pop(name, None)

    def pick(self, session: str | None = None, tried: Collection[str] = ()) -> Pick | None:
        """Takes a replica that is not in `tried` and counts the request; None when all were tried.

        One that is away is chosen only when its time has come, or when no other is left: a caller who has
        tried all knows that there is none.

        Args:
            session: requests of the same one go to the same replica, if that is sensible.
            tried: names.
        """
        left = [name for name in self.replicas if name not in tried]
        if not left:
            return None
        now = self._clock()
        ready = [name for name in left if self._is_ready(self.replicas[name], now)]
        # A trial comes before the others: whether a replica is back should show soon.
        trials = [name for name in ready if self.replicas[name].is_open]
        candidates = trials or ready or left
        trial = self.replicas[candidates[0]].is_open
        name = self._choose(session, candidates)
        state = self.replicas[name]
        state.in_flight += 1
        state.tries += trial
        if session is not None:
            self._sessions[session] = name
            self._sessions.move_to_end(session)
            if len(self._sessions) > _REMEMBERED_SESSIONS:
                self._sessions.popitem(last=False)
        return Pick(name, trial, now)

    def release(self, pick: Pick, outcome: Outcome, *, tokens: int = 0) -> None:
        """Ends a request that `pick` counted. `tokens`: how many it got."""
        state = self.replicas.get(pick.name)
        if state is None:
            return
        state.in_flight = max(0, state.in_flight - 1)
        state.tries = max(0, state.tries - pick.trial)
        if outcome == "cancelled":
            return
        now = self._clock()
        if outcome == "answered":
            state.failures, state.is_open, state.open_for = 0, False, _OPEN_S
            seconds = now - pick.began
            if tokens >= _SPEED_TOKENS and seconds > 0:
                speed = tokens / seconds
                before = state.tokens_per_second
                state.tokens_per_second = (
                    speed if before is None else before + _SPEED_WEIGHT * (speed - before)
                )
            return
        state.failures += 1
        if outcome == "away" or state.failures >= _FAILURES_TO_OPEN:
            if state.is_open and pick.trial:
                state.open_for = min(2 * state.open_for, _OPEN_S_MAX)
            if not state.is_open or pick.trial:  # what was in flight when it went tells nothing new
                state.open_until = now + state.open_for
            state.is_open = True

    def load(self, name: str) -> float:
        """How long a request is likely to take there, in arbitrary units: its place in line, by the speed."""
        state = self.replicas[name]
        return (state.in_flight + 1) / (state.tokens_per_second or self._usual_speed())

    def _is_ready(self, state: ReplicaState, now: float) -> bool:
        return not state.is_open or (now >= state.open_until and state.tries == 0)

    def _choose(self, session: str | None, candidates: list[str]) -> str:
        if len(candidates) == 1:
            return candidates[0]
        loads = {name: self.load(name) for name in candidates}
        least = min(loads.values())
        known = self._sessions.get(session) if session is not None else None
        if known in loads:
            fewest = min(self.replicas[name].in_flight for name in candidates)
            overloaded = (
                loads[known] > _STICKY_LOAD * least
                and self.replicas[known].in_flight >= fewest + _STICKY_MARGIN
            )
            if not overloaded:
                return known
        return self._rng.choice([name for name, load in loads.items() if load <= least * (1 + 1e-9)])

    def _usual_speed(self) -> float:
        speeds = [state.tokens_per_second for state in self.replicas.values() if state.tokens_per_second]
        return sum(speeds) / len(speeds) if speeds else 1.0
