"""What the pace of an engine says about its load, when the engine itself says nothing. Pure.

The pace is tokens per second at so many requests in flight, by Little's law: requests in flight, divided by
the seconds that a token of theirs took. Answers of all lengths go into it, long ones with many tokens and
many seconds, so a heavy tail moves it little.

More in flight never makes a healthy engine slower. One that is far slower than it was with no more in flight
is suspected of being overloaded; that is tried out: with less in flight, an overloaded engine is as fast as
before. If it is slower instead, the work has changed (longer prompts, say): the cap is as it was, and what is
normal is learnt anew. Growing is tried out in the same way.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rollstream.rollout.concurrency import Observation

_LEAST_FINISHED = 64
"""Requests in a measurement; below, a few long answers decide what comes out."""

_SLOW = 0.6
"""Of the best pace seen. Chance does not make that difference between two measurements of log-normal or
Pareto lengths (tests/unit/rollout/test_concurrency.py), and an engine that loses one of two replicas loses
more."""

_DEEPEST_CUT = 0.5
_PROBE = 1.25
"""A growth large enough that its effect can be told from noise."""

_LEAST_GAIN = 0.3
"""Of the growth in flight, as growth of the pace: an engine with room gives about half of it or more."""

_LEAST_KEPT = 0.5
"""How much of what the cut takes from the requests in flight the pace may lose: one with room loses all."""

_FORGETTING = 0.05
"""How fast the best pace fades into what is normal, with each measurement."""


@dataclass(frozen=True, slots=True)
class _Measure:
    calls: float
    """Requests in flight, the mean."""
    rate: float
    """Tokens per second."""


@dataclass(frozen=True, slots=True)
class _Trial:
    kind: Literal["cut", "growth"]
    before: _Measure
    cap: int
    """The one before, to go back to."""


class Pace:
    """Judges one measurement after the other."""

    def __init__(self) -> None:
        self.reason = ""
        """Why the cap should change, if it should."""
        self.failed_growths = 0
        """Growths in a row that brought nothing."""
        self._best: _Measure | None = None
        self._trial: _Trial | None = None
        self._start: Observation | None = None
        self._settled = False

    def interrupt(self) -> None:
        """Begins the measurement anew."""
        self._start, self._settled = None, False

    def judge(self, now: "Observation", cap: int, *, may_grow: bool) -> int:
        """Takes an observation of a full window; returns what the cap should be, mostly `cap`.

        Once that is another one, what is observed before it has taken effect does not belong here.
        """
        if self._start is None:
            self._start = now
        finished = now.finished - self._start.finished
        if not self._settled:
            # Whoever was in flight at the start says something about the time before it.
            if finished < self._start.calls:
                return cap
            self._start, self._settled, finished = now, True, 0
        start = self._start
        tokens, seconds, elapsed = now.tokens - start.tokens, now.seconds - start.seconds, now.at - start.at
        if finished < max(_LEAST_FINISHED, now.calls) or tokens <= 0 or seconds <= 0 or elapsed <= 0:
            return cap
        calls = (now.call_seconds - start.call_seconds) / elapsed
        self._start = now
        if calls <= 0:
            return cap
        measure = _Measure(calls, calls * tokens / seconds)
        trial, self._trial = self._trial, None
        if trial is not None:
            return self._conclude(trial, measure, cap)
        return self._compare(measure, cap, may_grow=may_grow)

    def _compare(self, now: _Measure, cap: int, *, may_grow: bool) -> int:
        best = self._best
        if best is None or now.rate >= best.rate or now.calls < 0.9 * best.calls:
            self._best = now
        elif now.rate < _SLOW * best.rate:
            self._trial = _Trial("cut", now, cap)
            self.reason = f"{now.rate:.0f} tokens/s; it was {best.rate:.0f} with {best.calls:.0f} requests"
            return int(cap * max(_DEEPEST_CUT, now.rate / best.rate))
        else:
            self._best = _Measure(best.calls, best.rate + _FORGETTING * (now.rate - best.rate))
        if may_grow:
            self._trial = _Trial("growth", now, cap)
            self.reason = "trying whether there is room"
            return max(cap + 1, int(_PROBE * cap))
        return cap

    def _conclude(self, trial: _Trial, now: _Measure, cap: int) -> int:
        before = trial.before
        growth = now.calls / before.calls - 1
        gain = now.rate / before.rate - 1
        if trial.kind == "cut":
            if gain >= _LEAST_KEPT * growth:
                self._best = now
                return cap
            self._best = before
            self.reason = "less in flight was slower"
            return trial.cap
        if gain >= _LEAST_GAIN * growth:
            self._best, self.failed_growths = now, 0
            return cap
        self.failed_growths += 1
        self.reason = "more in flight was no faster"
        return trial.cap
