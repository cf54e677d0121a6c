"""Which replica gets the next request: sticky, else the one that is likely to answer first. Owns no task.

The life of a replica, as seen from here:

    closed --(away, or `_FAILURES_TO_OPEN` failures in a row)--> open for a while
    open --(the while is over)--> half-open: one request at a time tries it
    half-open --(it answers)--> closed          half-open --(it does not)--> open for twice as long
    any --(`hang`: it holds requests, says nothing and is not healthy)--> hung: gets nothing at all
    hung --(`revive`: it is healthy again)--> half-open

The speed of a replica is that of one request there, in tokens per second, as measured on its last answers. It
includes what a request waits in the server, so a server with a queue is a slow one.
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rollstream.engine.stragglers import Lane

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

_MEMORY = 0.9
"""Weight of an answer against the next one: some ten tell a replica's speed, one slow answer does not."""
_SPEED_TOKENS = 8
"""Shorter answers say little of a replica's speed."""


@dataclass(slots=True)
class ReplicaState:
    """What is known of a replica."""

    in_flight: int = 0
    began: float = 0.0
    """Sum of the times at which they began."""
    tokens: float = 0.0
    seconds: float = 0.0
    answers: float = 0.0
    """Of the last answers, each with `_MEMORY` times the weight of the next."""
    usual: float = 0.0
    """In flight when an answer came, as a mean of the same kind."""
    heard: float = 0.0
    """When it last said something, or began to have work."""
    is_hung: bool = False
    failures: int = 0
    """In a row."""
    open_until: float = 0.0
    open_for: float = _OPEN_S
    tries: int = 0
    """Requests in flight that were sent while it was half-open."""
    is_open: bool = False
    """It was away and has not answered since."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of one request, as measured; None before the first answer."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class Pick:
    """A replica that was chosen for a request; give it back by `Router.release`."""

    name: str
    trial: bool
    """Whether it is tried out after it was away."""
    began: float = field(compare=False, default=0.0)


@dataclass(frozen=True, slots=True)
class _Usual:
    """Of the replicas that have answered."""

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
        names: Iterable[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.replicas: dict[str, ReplicaState] = {name: ReplicaState() for name in names}
        self._clock = clock
        self._rng = rng or random.Random()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def now(self) -> float:
        """The time by the clock of the picks."""
        return self._clock()

    def add(self, name: str) -> None:
        """Makes a replica known; one that is known stays as it is."""
        self.replicas.setdefault(name, ReplicaState())

    def remove(self, name: str) -> None:
        """Forgets a replica; requests that it has may still be released."""
        self.replicas.pop(name, None)

    def pick(self, session: str | None = None, tried: Collection[str] = ()) -> Pick | None:
        """Takes a replica that is not in `tried` and counts the request; None when none is left.

        One that is away is chosen only when its time has come, or when no other is left: a caller who has
        tried all knows that there is none. One that hangs is never chosen.

        Args:
            session: requests of the same one go to the same replica, if that is sensible.
            tried: names.
        """
        left = [name for name, state in self.replicas.items() if name not in tried and not state.is_hung]
        if not left:
            return None
        now = self._clock()
        ready = [name for name in left if self._is_ready(self.replicas[name], now)]
        # A trial comes before the others: whether a replica is back should show soon.
        trials = [name for name in ready if self.replicas[name].is_open]
        return self._take(self._choose(session, trials or ready or left, now), session, now)

    def take(self, name: str, session: str | None = None) -> Pick | None:
        """Takes a certain replica; None when it is not known, away or hung."""
        return self._take(name, session, self._clock()) if self.is_there(name) else None

    def is_there(self, name: str) -> bool:
        """Whether a replica is known, and neither away nor hung."""
        state = self.replicas.get(name)
        return state is not None and not state.is_open and not state.is_hung

    def release(self, pick: Pick, outcome: Outcome, *, tokens: int = 0) -> None:
        """Ends a request that `pick` counted. `tokens`: how many it got."""
        state = self.replicas.get(pick.name)
        if state is None:
            return
        in_flight = state.in_flight
        state.in_flight = max(0, in_flight - 1)
        state.began = state.began - pick.began if state.in_flight else 0.0
        state.tries = max(0, state.tries - pick.trial)
        if outcome == "cancelled":
            return
        now = self._clock()
        state.heard = max(state.heard, now)
        if outcome == "answered":
            state.failures, state.is_open, state.open_for = 0, False, _OPEN_S
            seconds = now - pick.began
            if tokens >= _SPEED_TOKENS and seconds > 0:
                state.tokens = _MEMORY * state.tokens + tokens
                state.seconds = _MEMORY * state.seconds + seconds
                state.usual = (_MEMORY * state.answers * state.usual + in_flight) / (
                    _MEMORY * state.answers + 1
                )
                state.answers = _MEMORY * state.answers + 1
            return
        state.failures += 1
        if outcome == "away" or state.failures >= _FAILURES_TO_OPEN:
            if state.is_open and pick.trial:
                state.open_for = min(2 * state.open_for, _OPEN_S_MAX)
            if not state.is_open or pick.trial:  # what was in flight when it went tells nothing new
                state.open_until = now + state.open_for
            state.is_open = True

    def silent(self, seconds: float) -> list[str]:
        """Replicas with requests in flight that have not said anything for so long."""
        before = self._clock() - seconds
        return [name for name, state in self.replicas.items() if state.in_flight and state.heard < before]

    def heard(self, name: str) -> None:
        """Told that a replica said something. One that hung is tried again."""
        if (state := self.replicas.get(name)) is not None:
            state.heard = self._clock()
            if state.is_hung:
                state.is_hung = False
                state.is_open, state.open_until = True, state.heard

    def hang(self, name: str) -> None:
        """Told that a replica holds on to requests and is not healthy: it gets nothing until `heard`."""
        if (state := self.replicas.get(name)) is not None:
            state.is_hung = True

    @property
    def hung(self) -> list[str]:
        """Replicas that hang."""
        return [name for name, state in self.replicas.items() if state.is_hung]

    def lanes(self) -> dict[str, Lane]:
        """What is known of the replicas that are there."""
        now, usual = self._clock(), self._usual()
        return {
            name: Lane(state.in_flight, _speed(state, now, usual), state.usual)
            for name, state in self.replicas.items()
            if not state.is_open and not state.is_hung
        }

    def load(self, name: str) -> float:
        """How long a request is likely to take there, in arbitrary units: its place in line, by the speed."""
        state = self.replicas[name]
        return (state.in_flight + 1) / _speed(state, self._clock(), self._usual())

    def _take(self, name: str, session: str | None, now: float) -> Pick:
        state = self.replicas[name]
        if not state.in_flight:
            state.heard = max(state.heard, now)  # nobody listened before
        trial = state.is_open
        state.in_flight += 1
        state.began += now
        state.tries += trial
        if session is not None:
            self._sessions[session] = name
            self._sessions.move_to_end(session)
            if len(self._sessions) > _REMEMBERED_SESSIONS:
                self._sessions.popitem(last=False)
        return Pick(name, trial, now)

    def _is_ready(self, state: ReplicaState, now: float) -> bool:
        return not state.is_open or (now >= state.open_until and state.tries == 0)

    def _choose(self, session: str | None, candidates: list[str], now: float) -> str:
        if len(candidates) == 1:
            return candidates[0]
        usual = self._usual()
        states = self.replicas
        loads = {name: (states[name].in_flight + 1) / _speed(states[name], now, usual) for name in candidates}
        least = min(loads.values())
        known = self._sessions.get(session) if session is not None else None
        if known in loads:
            fewest = min(states[name].in_flight for name in candidates)
            overloaded = (
                loads[known] > _STICKY_LOAD * least and states[known].in_flight >= fewest + _STICKY_MARGIN
            )
            if not overloaded:
                return known
        return self._rng.choice([name for name, load in loads.items() if load <= least * (1 + 1e-9)])

    def _usual(self) -> _Usual:
        measured = [state for state in self.replicas.values() if state.seconds]
        if not measured:
            return _Usual(1.0, float("inf"))
        return _Usual(
            sum(state.tokens / state.seconds for state in measured) / len(measured),
            sum(state.seconds for state in measured) / sum(state.answers for state in measured),
        )


def _speed(state: ReplicaState, now: float, usual: _Usual) -> float:
    """Tokens per second of a request. One without an answer is as fast as the others, until it is late."""
    if state.seconds:
        return state.tokens / state.seconds
    if state.in_flight:
        age = now - state.began / state.in_flight
        if age > usual.seconds:
            return usual.speed * usual.seconds / age
    return usual.speed
