"""Times of each step, for logs and for a table at the end."""

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

_STEPS_KEPT = 10_000
"""Steps whose times are kept one by one; some 2 MB. Means and the histogram are of all of them."""


@dataclass(slots=True)
class StepTime:
    """A step lasts from the trainer's asking for its batch until it asks for the next."""

    step: int
    wait_s: float
    """The trainer waited for the batch."""
    train_s: float = 0.0
    """From the batch until it was reported as trained."""
    weights_s: float = 0.0
    """The weight update after it, the wait for an idle engine included."""
    drain_s: float = 0.0
    """The part of `weights_s` that waited for an idle engine."""
    total_s: float = 0.0
    """The whole step; what the others leave over is the trainer's own (saving, logging, …)."""
    generation_s: float = 0.0
    """Mean over the batch's groups: from a group's dispatch until it was finished."""
    generation_max_s: float = 0.0
    queue_s: float = 0.0
    """Mean over the batch's groups: finished, and waiting for the trainer."""
    staleness: list[int] = field(default_factory=list)
    """Steps, for each group of the batch."""
    engine_busy_s: float = 0.0
    """Seconds of the step in which at least one group was being generated."""
    unscored: float = 0.0
    """Share of the batch's rollouts that have no reward, 0 to 1."""
    waiting_rollouts: int = 0
    """Generated for later batches and in memory when this one was delivered; `waiting_tokens`: theirs."""
    waiting_tokens: int = 0
    dropped: int = 0
    """Groups thrown away (by filters) since the batch before was delivered."""

    def numbers(self) -> dict[str, float]:
        """All of it, under names for a log."""
        left_out = ("step", "total_s", "staleness", "engine_busy_s")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        values |= {
            "step_s": self.total_s,
            "staleness_mean": mean(self.staleness),
            "staleness_max": max(self.staleness, default=0),
            **_idle_shares(asdict(self)),
        }
        return {f"rollstream/{name}": float(value) for name, value in values.items()}


class StepTimes:
    """Collects steps; written by the trainer's thread only.

    Idle shares: the trainer's is the part of all time that it waited for batches and weight updates; the
    engine's is the part in which no group was being generated.
    """

    def __init__(self) -> None:
        self.steps: list[StepTime] = []
        """The last steps, whole ones; the one under way is not among them."""
        self.histogram: Counter[int] = Counter()
        """Groups trained on, by staleness."""
        self._count = 0
        self._sums: Counter[str] = Counter()

    def add(self, step: StepTime) -> None:
        """Notes a whole step."""
        self.steps.append(step)
        del self.steps[:-_STEPS_KEPT]
        self.histogram.update(step.staleness)
        self._count += 1
        values = asdict(step)
        del values["step"], values["staleness"]
        self._sums.update(values)

    def last(self) -> dict[str, float]:
        """The last whole step, under names for a log; empty before the first one."""
        return self.steps[-1].numbers() if self.steps else {}

    def summary(self) -> dict[str, Any]:
        """Means over all steps, shares and the histogram: JSON values."""
        means = {name: total / max(1, self._count) for name, total in self._sums.items()}
        staleness = {str(key): self.histogram[key] for key in sorted(self.histogram)}
        return {"steps": self._count, **means, **_idle_shares(self._sums), "staleness": staleness}

    def table(self) -> str:
        """The means over all steps as a table for people."""
        means = self.summary()
        lines = [f"{self._count} steps"]
        for name, text in (
            ("total_s", "step"),
            ("train_s", "training"),
            ("wait_s", "waiting for the batch"),
            ("weights_s", "weight update"),
            ("engine_busy_s", "engine busy"),
        ):
            share = _share(self._sums[name], self._sums["total_s"])
            lines.append(f"  {text:<24}{means.get(name, 0.0):>9.3f} s{100 * share:>5.0f} %")
        for name, text in (("generation_s", "a group, generation"), ("queue_s", "a group, queue")):
            lines.append(f"  {text:<24}{means.get(name, 0.0):>9.3f} s")
        groups = self.histogram.total()
        shares = [f"{key}: {100 * self.histogram[key] / groups:.0f} %" for key in sorted(self.histogram)]
        lines.append(f"  {'staleness':<24}{', '.join(shares) or '-'}")
        if unscored := means.get("unscored"):
            lines.append(f"  {'rollouts not scored':<24}{100 * unscored:>9.1f} %")
        return "\n".join(lines)


def mean(values: Collection[float]) -> float:
    """The mean; 0 of nothing."""
    return fmean(values) if values else 0.0


def _idle_shares(seconds: dict[str, Any]) -> dict[str, float]:
    total = seconds["total_s"]
    engine = 1.0 - _share(seconds["engine_busy_s"], total) if total else 0.0
    return {"trainer_idle": _share(seconds["wait_s"] + seconds["weights_s"], total), "engine_idle": engine}


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
