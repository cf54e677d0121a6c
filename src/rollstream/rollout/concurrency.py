"""How many rollouts may be in flight: a pure policy, which the executor feeds.

The policy is told what was observed and answers with a cap. The cap begins at the user's number, which it never
passes, shrinks on evidence of overload, and grows back where there is room:

    drained after a change? --no--> nothing counts yet
            | yes
    evidence of overload    --yes-> a lower cap, and memory of the one that was too high
            | no
    the cap limits the run, and there is room --yes--> a higher cap; slowly near one that was too high
            | no
    as it is

What is evidence: requests refused or timed out; an engine that takes memory away from requests to give it to
others (preemptions, each of which computes something twice); a queue that stays and is longer than what the
engine works on. An engine that reports no load is judged by refusals and time-outs alone.

What is none: a queue that comes and goes (rollouts come back from their tools together), one that is there
while the engine still takes in its first prompts, a few long answers, an outage, a window that is not full.
"""

from collections import deque
from dataclasses import dataclass

from rollstream.engine.base import EngineLoad

_WINDOW_S = 10.0
"""Evidence is of the last so many seconds. The shortest queue in it is the one that stays, as in CoDel
(https://queue.acm.org/detail.cfm?id=2209336); ten seconds outlast most tool calls and prefills."""

_LEAST_OBSERVATIONS = 4
"""Fewer say nothing about what stays. Refusals need not wait for that: each costs a rollout an attempt."""

_REFUSED_SHARE = 0.02
"""Of requests. One refusal in a hundred is a server's hiccup, and its retry costs less than a lower cap."""

_LEAST_REFUSED = 3
_TIMED_OUT_SHARE = 0.1
"""Of requests. Some models never end some answers, whatever the load."""

_LEAST_ENDED = 20
"""Requests that have ended, before a share of time-outs means anything."""

_PREEMPTED_SHARE = 0.3
"""Preemptions for one finished request. A few come with a cache that is well used, and cost a prefill each;
around this share, simulated engines with long answers lose more by computing twice than they win by a full
cache (`bench.concurrency`)."""

_LEAST_PREEMPTIONS = 3

_BACK_OFF = 0.7
_DEEP_BACK_OFF = 0.4
_LEAST_BACK_OFF = 0.95
"""After refusals and time-outs, which do not say how much was too much: by their share, within the first and
the last; the deep one if half of all are lost, but not below what the engine holds."""

_PREEMPTED_BACK_OFF = 0.95
"""Of what the engine held: its memory was full, not twice as large as needed."""

_QUEUE_FLOOR = 32
"""A queue up to this costs nothing worth having, and keeps a small fast engine busy while finished rollouts
are scored and written."""

_GROWING = 1.05
"""An engine that works on more than it did some seconds before is still taking in prompts from its queue."""

_GROWTH = 1.25
"""From a tenth of the engine's capacity back to it in ten steps, a minute."""

_BLIND_GROWTH = 1.1
"""Where the engine reports no load: only refusals say that it was too much."""

_FULL_USAGE = 0.95
"""Of the KV cache: requests in flight go on growing, so what is free now is not free for others."""

_NEAR = 0.95
"""Of a cap that was too high: from here on growth is careful."""

_CAREFUL_GROWTH = 1.05
_PATIENCE_S = 30.0
"""Between careful steps; doubles each time the same cap turns out too high, up to the next. So a capacity
that does not change is overshot a few times, then every five minutes, by 5 %."""

_PATIENCE_S_MAX = 300.0

EVERY_S = 2.0
"""Between observations: long against a step of an engine, short against an answer; a busy run asks a server
for its metrics this often."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What is seen of a run at one moment. Counts are of the whole run so far, and only ever rise."""

    at: float
    """Seconds, of any clock that only goes forward."""
    in_flight: int
    """Rollouts in the window."""
    calls: int
    """Of those, requests at the engine."""
    finished: int
    """Requests that were answered."""
    overloads: int = 0
    """Requests refused for want of room: HTTP 429, 503."""
    timeouts: int = 0
    """Rollouts cut off by their time limit while they were at the engine."""
    load: EngineLoad | None = None
    """What the engine says; None when it does not."""


class ConcurrencyPolicy:
    """The cap on rollouts in flight.

    Example:
        >>> policy = ConcurrencyPolicy(256)
        >>> policy.observe(observation)
        256

    Args:
        maximum: the user's number, at least 1.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.cap = maximum
        """Rollouts in flight at most, 1 to `maximum`."""
        self.reason = ""
        """Why it was changed the last time."""
        self._seen: deque[Observation] = deque()
        self._drained = True
        self._changed_at = float("-inf")
        self._too_high: int | None = None
        self._patience = _PATIENCE_S

    def observe(self, now: Observation) -> int:
        """Takes an observation, later than the last one, and returns the cap."""
        seen = self._seen
        if seen and (seen[-1].load is None) != (now.load is None):
            self.interrupt()  # evidence of two kinds does not mix
        if not self._drained:
            if now.in_flight > self.cap:
                return self.cap
            # What was seen before says nothing about this cap.
            self._drained = True
            self._changed_at = now.at
            self.interrupt()
        seen.append(now)
        while now.at - seen[1].at >= _WINDOW_S if len(seen) > 2 else False:
            seen.popleft()
        if len(seen) >= 2:
            self._judge()
        return self.cap

    def interrupt(self) -> None:
        """Forgets what was seen: the engine was away, or is another now. The cap stays."""
        self._seen.clear()

    def _judge(self) -> None:
        first, now = self._seen[0], self._seen[-1]
        ended = now.finished - first.finished
        refused, timed_out = now.overloads - first.overloads, now.timeouts - first.timeouts
        if refused >= _LEAST_REFUSED and refused > _REFUSED_SHARE * (ended + refused):
            self._back_off(refused, ended, "were refused")
        elif timed_out > _TIMED_OUT_SHARE * (ended + timed_out) and ended + timed_out >= _LEAST_ENDED:
            self._back_off(timed_out, ended, "timed out")
        elif len(self._seen) < _LEAST_OBSERVATIONS:
            return
        elif now.load is None:
            if not refused and not timed_out and self._was_full():
                self._grow(_BLIND_GROWTH, patience=self._patience)
        else:
            self._judge_load(ended)

    def _back_off(self, lost: int, answered: int, how: str) -> None:
        now, share = self._seen[-1], lost / (lost + answered)
        factor = min(_LEAST_BACK_OFF, max(_DEEP_BACK_OFF if share > 0.5 else _BACK_OFF, 1 - share))
        target = factor * now.in_flight
        if factor < _BACK_OFF:
            target = max(target, min(now.calls, _BACK_OFF * now.in_flight))
        self._shrink(target, f"{lost} of {lost + answered} requests {how}")

    def _judge_load(self, ended: int) -> None:
        loads = [one.load for one in self._seen if one.load is not None]
        now = loads[-1]
        preemptions = (now.preemptions or 0) - (loads[0].preemptions or 0)
        queue = min(load.queued for load in loads)
        idle = self._seen[-1].in_flight - queue  # what does not stand in it: in the engine, or in tools
        too_long = now.running + _QUEUE_FLOOR
        settled = max(load.running for load in loads[: len(loads) // 2])
        if preemptions >= _LEAST_PREEMPTIONS and preemptions > _PREEMPTED_SHARE * ended:
            self._shrink(
                _PREEMPTED_BACK_OFF * idle, f"{preemptions} preemptions for {ended} finished requests"
            )
        elif queue > too_long and ended and now.running <= _GROWING * settled:
            # Half of the queue stays, so the engine never lacks work by this.
            self._shrink(idle + too_long / 2, f"{queue} requests queued behind {now.running}", remember=False)
        elif queue < too_long / 4 and not preemptions and self._was_full():
            usage = max((load.kv_usage for load in loads if load.kv_usage is not None), default=0.0)
            self._grow(min(_GROWTH, _FULL_USAGE / usage if usage else _GROWTH))

    def _was_full(self) -> bool:
        """Whether the cap was what limits the run."""
        return all(one.in_flight >= self.cap for one in self._seen)

    def _grow(self, factor: float, patience: float = 0.0) -> None:
        if self._seen[-1].at - self._changed_at < patience:
            return
        cap = max(self.cap + 1, int(factor * self.cap))
        if self._too_high is not None and cap > _NEAR * self._too_high:
            if self._seen[-1].at - self._changed_at < self._patience:
                return
            cap = max(self.cap + 1, int(min(factor, _CAREFUL_GROWTH) * self.cap))
            if self.cap > self._too_high:  # it is not too high any more
                self._too_high, self._patience = None, _PATIENCE_S
        if factor > 1.0 and self.cap < self.maximum:
            self._set(min(self.maximum, cap), "there is room")

    def _shrink(self, cap: float, reason: str, *, remember: bool = True) -> None:
        lower = max(1, min(int(cap), self.cap - 1))
        if lower >= self.cap:
            return
        if remember:
            if self._too_high is not None and self.cap >= _NEAR * self._too_high:
                self._patience = min(_PATIENCE_S_MAX, 2 * self._patience)
            self._too_high = min(self.cap, self._seen[-1].in_flight)
        self._set(lower, reason)

    def _set(self, cap: int, reason: str) -> None:
        if cap != self.cap:
            self.cap, self.reason = cap, reason
            self._changed_at = self._seen[-1].at
            self._drained = False
            self._seen.clear()
