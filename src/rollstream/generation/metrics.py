"""What a run counts, by the names that trackers and Prometheus are told: sums, never the values themselves.

Names for trackers are `group/name`; units stand in the name, or in `docs/tracking.md`. What nobody knows now
(the mean reward of a window in which nothing was scored, the load of an engine that does not say it) is left
out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
from prometheus_client import Histogram

from rollstream.engine.base import EngineLoad
from rollstream.generation.progress import RunProgress
from rollstream.metrics_text import family, metrics_page
from rollstream.store.records import EncodedRollout, RolloutFacts, rollout_facts
from rollstream.trajectory import Failure, Rollout, failure_cause

MOST_NAMES = 16
"""Data sources, and kinds of failures, that are told apart: more make no chart that anybody reads, and a
column of ids taken for a data source must not fill the memory. Those that come later are `OTHER`."""

OTHER = "other"

_COUNTERS = frozenset(
    (
        *("rollouts/completed", "rollouts/scored", "responses/at_limit", "engine/preemptions"),
        *("progress/reward_failed", "progress/retries", "tokens/sampled", "tools/calls", "tools/errors"),
    )
)
"""What only ever rises within a process."""

_HELP = "see docs/tracking.md"

_TOKEN_BOUNDS = tuple(float(2**power) for power in range(5, 18))
"""Response lengths, 32 to 131072 tokens: each twice the last, as budgets for answers are chosen."""

_SECOND_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds of a rollout: from a small model's single turn to an agent's hour."""


class RunMetrics:
    """Counts durable rollouts and failures of one process."""

    def __init__(self) -> None:
        self.completed = 0
        self.tokens = 0
        """Sampled."""
        self.tool_calls = 0
        self.tool_errors = 0
        self.failures: Counter[str] = Counter()
        """By the class of the error."""
        self.causes: dict[str, tuple[int, str]] = {}
        """How many failed by each cause, see `failure_cause`, and the first error of it."""
        self.versions: tuple[int, int] | None = None
        """The lowest and the highest policy version of any token; None before the first rollout."""
        self._scored = 0
        self._reward_sum = 0.0
        self._at_limit = 0
        """Trajectories that ended because there was no room for more tokens."""
        self._lengths = Histogram(
            "rollstream_response_tokens",
            "Length of responses, in tokens",
            buckets=_TOKEN_BOUNDS,
            registry=None,
        )
        self._seconds = Histogram(
            "rollstream_rollout_seconds",
            "Seconds from a rollout's dispatch until it is scored",
            buckets=_SECOND_BOUNDS,
            registry=None,
        )
        self._sources: set[str] = set()
        self._window: list[tuple[RolloutFacts, float | None]] = []
        """Rollouts since trackers were told last, with their rewards: seconds of a run."""

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
        self._window.append((facts, reward))
        self.completed += 1
        self.tokens += tokens
        self.tool_calls += calls
        self.tool_errors += errors
        for length in facts.response_lengths:
            self._lengths.observe(length)
        self._at_limit += facts.at_limit
        self._seconds.observe(facts.seconds)
        low, high = self.versions or facts.versions
        self.versions = min(low, facts.versions[0]), max(high, facts.versions[1])
        if reward is not None:
            self._scored += 1
            self._reward_sum += reward

    def add_failure(self, failure: Failure) -> None:
        """Counts a rollout that failed."""
        kind = failure.error.partition(":")[0].strip()
        self.failures[_one_of_few(kind, self.failures) if kind.isidentifier() else OTHER] += 1
        cause = _one_of_few(failure_cause(failure.error), self.causes)
        count, example = self.causes.get(cause, (0, failure.error))
        self.causes[cause] = count + 1, example

    def report(
        self, snapshot: RunProgress, rates: tuple[float, float], load: EngineLoad | None
    ) -> dict[str, float]:
        """All metrics for trackers; a new window begins.

        Args:
            snapshot: of the run's progress.
            rates: rollouts per second, sampled tokens per second.
            load: of the engine.
        """
        window, self._window = self._window, []
        told: dict[str, float] = {
            **self._values(snapshot, load),
            "rate/rollouts_per_second": rates[0],
            "rate/tokens_per_second": rates[1],
            **{f"failures/{kind}": count for kind, count in self.failures.items()},
        }
        by_source: dict[str, list[float]] = {}
        for facts, reward in window:
            if reward is not None:
                source = _one_of_few(facts.data_source, self._sources)
                self._sources.add(source)
                by_source.setdefault(source, []).append(reward)
        if rewards := [reward for source in by_source.values() for reward in source]:
            told |= {
                "reward/mean": fmean(rewards),
                "reward/std": float(np.std(rewards)),
                "reward/scored": len(rewards),
            }
            told |= {f"reward/{source}/mean": fmean(values) for source, values in by_source.items()}
        if lengths := [length for facts, _ in window for length in facts.response_lengths]:
            told["response/length_mean"], told["response/length_max"] = fmean(lengths), max(lengths)
            told["response/share_at_limit"] = sum(facts.at_limit for facts, _ in window) / len(lengths)
        if seconds := [facts.seconds for facts, _ in window]:
            told["rollout/seconds_mean"], told["rollout/seconds_max"] = fmean(seconds), max(seconds)
        return told

    def page(self, snapshot: RunProgress | None, load: EngineLoad | None) -> bytes:
        """The page for Prometheus; `snapshot` is None before the first rollout.

        What trackers are told has the same names there, with `_` for `/`.
        """
        values = {
            **self._values(snapshot, load),
            "rollouts/completed": self.completed,
            "rollouts/scored": self._scored,
            "rewards/sum": self._reward_sum,
            "responses/at_limit": self._at_limit,
        }
        failed: Mapping[tuple[str, ...], float] = {(kind,): n for kind, n in self.failures.items()}
        families = [
            family(f"rollstream_{name.replace('/', '_')}{'_total' * (name in _COUNTERS)}", _HELP, value)
            for name, value in values.items()
        ]
        families.append(family("rollstream_failures_total", _HELP, failed, ["error"]))
        histograms: list[Any] = [*self._lengths.collect(), *self._seconds.collect()]
        return metrics_page([*families, *histograms])

    def _values(self, snapshot: RunProgress | None, load: EngineLoad | None) -> dict[str, float]:
        """What is known now, and what was counted from the start."""
        low, high = self.versions or (None, None)
        values: dict[str, float | None] = {
            "tokens/sampled": self.tokens,
            "tools/calls": self.tool_calls,
            "tools/errors": self.tool_errors,
            "engine/policy_version_min": low,
            "engine/policy_version_max": high,
        }
        if snapshot is not None:
            up, replicas = snapshot.replicas or (None, None)
            values |= {
                "progress/total": snapshot.total,
                "progress/done": snapshot.done,
                "progress/failed": snapshot.failed,
                "progress/reward_failed": snapshot.reward_failed,
                "progress/retries": snapshot.retries,
                "queue/in_flight": snapshot.in_flight,
                "queue/cap": snapshot.limit if snapshot.cap is None else snapshot.cap,
                "queue/pending_rows": snapshot.unsealed_rows,
                "queue/saved_batches": snapshot.saved_batches,
                "reward/mean_of_run": snapshot.mean_reward,
                "engine/waiting": int(snapshot.waiting),
                "engine/replicas_up": up,
                "engine/replicas": replicas,
            }
        if load is not None:
            values |= {f"engine/{name}": value for name, value in asdict(load).items()}
        return {name: value for name, value in values.items() if value is not None}


def _one_of_few(name: str, known: Any) -> str:
    return name if name in known or len(known) < MOST_NAMES else OTHER
