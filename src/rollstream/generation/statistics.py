"""What a run has counted so far, and since it was last asked: sums, never the values themselves. Pure."""

import math
from collections import Counter
from dataclasses import dataclass, field

from rollstream.metrics_text import Histogram
from rollstream.store.records import EncodedRollout, RolloutFacts, rollout_facts
from rollstream.trajectory import Failure, Rollout

MOST_NAMES = 16
"""Data sources, and kinds of failures, that are told apart: more make no chart that anybody reads, and a
column of ids taken for a data source must not fill the memory. Those that come later are `OTHER`."""

OTHER = "other"

TOKEN_BOUNDS = tuple(float(2**power) for power in range(5, 18))
"""Response lengths, 32 to 131072 tokens: each twice the last, as budgets for answers are chosen."""

SECOND_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds of a rollout: from a small model's single turn to an agent's hour."""


@dataclass(slots=True)
class Moments:
    """Count, mean, deviation, largest of a stream of numbers, by Welford's method: no cancellation."""

    count: int = 0
    mean: float = 0.0
    largest: float = -math.inf
    _squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, value: float) -> None:
        """Counts a value; one that is not finite counts as none."""
        if not math.isfinite(value):
            return
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self._squares += distance * (value - self.mean)
        self.largest = max(self.largest, value)

    @property
    def std(self) -> float:
        """Deviation of these values themselves (divided by their number), 0 of a single one."""
        return math.sqrt(max(0.0, self._squares) / self.count) if self.count else 0.0


@dataclass(slots=True)
class Window:
    """What was counted since the last window."""

    completed: int = 0
    tokens: int = 0
    """Sampled."""
    rewards: Moments = field(default_factory=Moments)
    by_source: dict[str, Moments] = field(default_factory=dict)
    """Rewards by data source."""
    lengths: Moments = field(default_factory=Moments)
    """Of responses, in tokens."""
    at_limit: int = 0
    """Trajectories, of those in `lengths`, that ended because there was no room for more tokens."""
    seconds: Moments = field(default_factory=Moments)
    """Of rollouts."""


class Statistics:
    """Counts durable rollouts and failures of one process."""

    def __init__(self) -> None:
        self.completed = 0
        self.tokens = 0
        """Sampled."""
        self.tool_calls = 0
        self.tool_errors = 0
        self.scored = 0
        self.reward_sum = 0.0
        """Of those that are scored."""
        self.at_limit = 0
        """Trajectories that ended because there was no room for more tokens."""
        self.failures: Counter[str] = Counter()
        """By the class of the error."""
        self.lengths = Histogram(TOKEN_BOUNDS)
        """Of responses, in tokens."""
        self.seconds = Histogram(SECOND_BOUNDS)
        """Of rollouts."""
        self.versions: tuple[int, int] | None = None
        """The lowest and the highest policy version of any token; None before the first rollout."""
        self._sources: set[str] = set()
        self._window = Window()

    def add(self, rollout: Rollout | EncodedRollout) -> None:
        """Counts a completed rollout."""
        facts: RolloutFacts
        if isinstance(rollout, EncodedRollout):
            facts, reward = rollout.facts, rollout.reward
            tokens, calls, errors = rollout.sampled_tokens, rollout.tool_calls, rollout.tool_errors
        else:
            facts, reward = rollout_facts(rollout), rollout.final.reward
            tokens = sum(sum(one.response_mask) for one in rollout.trajectories)
            calls = sum(int(one.metrics.tool_calls) for one in rollout.trajectories)
            errors = sum(int(one.metrics.tool_errors) for one in rollout.trajectories)
        window = self._window
        self.completed += 1
        window.completed += 1
        self.tokens += tokens
        window.tokens += tokens
        self.tool_calls += calls
        self.tool_errors += errors
        for length in facts.response_lengths:
            self.lengths.add(length)
            window.lengths.add(length)
        self.at_limit += facts.at_limit
        window.at_limit += facts.at_limit
        self.seconds.add(facts.seconds)
        window.seconds.add(facts.seconds)
        low, high = facts.versions
        self.versions = (
            facts.versions
            if self.versions is None
            else (min(self.versions[0], low), max(self.versions[1], high))
        )
        if reward is not None:
            self.scored += 1
            self.reward_sum += reward
            window.rewards.add(reward)
            window.by_source.setdefault(self._name(facts.data_source), Moments()).add(reward)

    def add_failure(self, failure: Failure) -> None:
        """Counts a rollout that failed."""
        kind = failure.error.partition(":")[0].strip()
        if not kind.isidentifier() or (kind not in self.failures and len(self.failures) >= MOST_NAMES):
            kind = OTHER
        self.failures[kind] += 1

    def take_window(self) -> Window:
        """What was counted since this was called last."""
        window, self._window = self._window, Window()
        return window

    def _name(self, source: str) -> str:
        if source not in self._sources:
            if len(self._sources) >= MOST_NAMES:
                return OTHER
            self._sources.add(source)
        return source
