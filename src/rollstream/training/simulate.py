"""Predicts what asynchrony would bring: discrete events over the real admission and delivery.

The schedule is the one that a training run uses (`GroupSchedule`), so what is predicted is what it does; the
engine is a number of slots, each generating one group at a time, and the trainer a duration.
"""

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from rollstream.errors import ConfigError
from rollstream.training.plan import ShuffledPlan
from rollstream.training.schedule import GroupSchedule, Order
from rollstream.training.staleness import StalenessRule

Kind = Literal["constant", "exponential", "lognormal", "pareto"]

_SHAPES = {"constant": 0.0, "exponential": 0.0, "lognormal": 0.8, "pareto": 2.5}
"""The default shapes: a log-normal as response lengths of chat models are spread; a Pareto whose longest
of a hundred is some four times the mean."""

_WORTH_IT = 1.05
"""Speed-ups below it do not pay for stale data."""

_AS_GOOD = 1.02
"""A step time within this factor of the best one counts as the best."""

_SLACK = 4
"""Times the batches ahead: a staleness bound that lets the long groups of a heavy tail be overtaken."""


@dataclass(frozen=True, slots=True)
class Duration:
    """A distribution of seconds, named by its mean."""

    kind: Kind
    mean: float
    """Seconds, > 0."""
    shape: float = 0.0
    """Log-normal: sigma of the logarithm, >= 0. Pareto: alpha, > 1; the smaller, the heavier its tail."""

    def __post_init__(self) -> None:
        least = {"pareto": math.nextafter(1.0, 2.0)}.get(self.kind, 0.0)
        if self.kind not in _SHAPES or not 0 < self.mean < math.inf or self.shape < least:
            raise ConfigError(f"{self}: {', '.join(_SHAPES)}; a mean > 0; sigma >= 0, alpha > 1")

    def draw(self, seed: int, position: int) -> float:
        """Seconds of the group at a position: a function of both, whoever asks, in whatever order."""
        rng = random.Random(seed * 1_000_003 + position)
        match self.kind:
            case "constant":
                return self.mean
            case "exponential":
                return rng.expovariate(1 / self.mean)
            case "lognormal":
                return rng.lognormvariate(math.log(self.mean) - self.shape**2 / 2, self.shape)
            case "pareto":
                return rng.paretovariate(self.shape) * self.mean * (self.shape - 1) / self.shape


def parse_duration(text: str) -> Duration:
    """Reads `KIND:MEAN[:SHAPE]`, or a number for a constant.

    Raises:
        ConfigError: it is neither.
    """
    kind, *numbers = text.split(":") if ":" in text else ["constant", text]
    try:
        mean, shape = map(float, [*numbers, str(_SHAPES.get(kind, 0.0))][: max(2, len(numbers))])
    except ValueError:
        raise ConfigError(f"{text!r} is not SECONDS or KIND:MEAN[:SHAPE], as in lognormal:30:0.8") from None
    return Duration(kind, mean, shape)  # type: ignore[arg-type]  # it checks


@dataclass(frozen=True, slots=True)
class Setup:
    """A training run, as far as its times depend on it."""

    generation: Duration
    """Seconds of one group, when the engine works on it."""
    training_s: float
    """Seconds of one step."""
    update_s: float = 0.0
    """Seconds of one weight update, in which the trainer waits."""
    groups_per_step: int = 32
    slots: int | None = None
    """Groups that all engines together generate at once; None: `groups_per_step`."""
    max_staleness: int = 1
    ahead: int = 1
    order: Order = "plan"
    weights: Literal["drain", "in_flight", "pinned"] = "drain"
    """`pinned` is predicted as `in_flight`: nothing waits for an update."""
    dropped: float = 0.0
    """Share of the groups that are thrown away when they are finished, 0 <= share < 1."""
    steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("training_s", "update_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: seconds, at least 0")
        for name in ("groups_per_step", "places", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 1")
        if not 0 <= self.dropped < 1:
            raise ConfigError(f"dropped={self.dropped}: a share from 0 to below 1")

    @property
    def places(self) -> int:
        """Groups that are generated at once."""
        return self.groups_per_step if self.slots is None else self.slots

    @property
    def generation_s(self) -> float:
        """Seconds that the engine, never idle, needs for a batch."""
        return self.groups_per_step * self.generation.mean / (self.places * (1 - self.dropped))

    @property
    def ideal_s(self) -> float:
        """Seconds of a step when the slower side never waits."""
        return max(self.generation_s, self.training_s + self.update_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """How the steps go; means are per step, once the pipeline is filled."""

    step_s: float
    first_s: float
    """Until the first batch is there."""
    wait_s: float
    """The trainer waits for a batch."""
    drain_s: float
    """The trainer waits for an idle engine before it updates the weights."""
    trainer_idle: float
    """Share of the time in which the trainer neither trains nor sends weights."""
    engine_idle: float
    """Share of the engine's slots that are empty, over time."""
    staleness: dict[int, float]
    """Share of the groups trained on, by steps of staleness."""
    staleness_max: int


def simulate(setup: Setup) -> Prediction:
    """Plays `setup.steps` steps. Raises `ConfigError` for what a training run would refuse, too."""
    rule = StalenessRule(setup.groups_per_step, setup.max_staleness, setup.ahead)
    schedule = GroupSchedule(ShuffledPlan(1, shuffle=False), rule, order=setup.order)
    now = busy = 0.0
    version = finished = 0
    events: list[tuple[float, int, str, int]] = []  # heap of (time, number, kind, position or step)
    numbers = itertools.count()
    asked: float | None = 0.0  # since when the trainer waits for a batch
    trained: float | None = None  # since when it waits for an update to begin
    held = False  # nothing is begun
    histogram, delivered, waited, drained = Counter[int](), list[float](), list[float](), list[float]()

    def later(seconds: float, kind: str, number: int = 0) -> None:
        heapq.heappush(events, (now + seconds, next(numbers), kind, number))

    while len(delivered) < setup.steps + 1:
        if trained is not None and not (held and schedule.generating):
            drained.append(now - trained)
            trained = None
            later(setup.update_s, "updated")
        while not held and schedule.generating < setup.places and (group := schedule.admit(version)):
            later(setup.generation.draw(setup.seed, group.position), "group", group.position)
        if asked is not None and (batch := schedule.deliver(version)) is not None:
            histogram.update(batch.staleness)
            delivered.append(now)
            waited.append(now - asked)
            asked = None
            later(setup.training_s, "trained", batch.step)
            continue  # there is room for more now
        at, _, kind, number = heapq.heappop(events)
        busy += (at - now) * schedule.generating
        now = at
        # The fractional part of multiples of an irrational number is spread evenly: no chance, and no seed.
        if kind == "group" and (number * 0.6180339887498949) % 1.0 < setup.dropped:
            schedule.drop(number)
        elif kind == "group":
            finished += 1
            schedule.finish(number, rank=float(finished))
        elif kind == "trained":
            schedule.trained(number)
            trained, held = now, setup.weights == "drain"
        else:
            version, held, asked = schedule.trained_steps, False, now

    steps = [after - before for before, after in itertools.pairwise(delivered)]
    filled = min(len(steps) - 1, setup.ahead + 1)  # the first steps fill the pipeline
    step_s = fmean(steps[filled:])
    return Prediction(
        step_s=step_s,
        first_s=delivered[0],
        wait_s=fmean(waited[filled + 1 :]),
        drain_s=fmean(drained[filled:]),
        trainer_idle=max(0.0, 1 - (setup.training_s + setup.update_s) / step_s) if step_s else 0.0,
        engine_idle=max(0.0, 1 - busy / (now * setup.places)),
        staleness={key: histogram[key] / histogram.total() for key in sorted(histogram)},
        staleness_max=max(histogram),
    )


def compare(setup: Setup) -> dict[str, Any]:
    """A setup's prediction, as JSON values (keys may be numbers), and what could be set otherwise beside it.

    Returns:
        The fields of the `Prediction`; `setup`, `ideal_s`; `by_ahead`: predictions with so many batches ahead (0:
        synchronous) and a staleness bound of as many steps; `in_flight`: the setup, but weight updates wait for
        nobody; `first`: that with `order="first"` and a greater staleness bound, so that long groups are
        overtaken; `speed_up`: how many times faster than synchronous a step is; `fewest_ahead`: batches ahead
        beyond which a step gets no faster, 0 if asynchrony does not pay.
    """

    def predict(**changed: Any) -> dict[str, Any]:
        return asdict(simulate(replace(setup, **changed)))

    chosen = predict()
    by_ahead = {ahead: predict(ahead=ahead, max_staleness=ahead) for ahead in (0, 1, 2, 4)}
    slack = _SLACK * setup.ahead
    seconds = {ahead: prediction["step_s"] for ahead, prediction in by_ahead.items()}
    fastest = min(seconds.values())
    as_good = [ahead for ahead in seconds if seconds[ahead] <= _AS_GOOD * fastest]
    return {
        "setup": asdict(setup),
        "ideal_s": setup.ideal_s,
        "speed_up": seconds[0] / chosen["step_s"],
        "fewest_ahead": 0 if seconds[0] < _WORTH_IT * fastest else as_good[0],
        **chosen,
        "by_ahead": by_ahead,
        "in_flight": predict(weights="in_flight"),
        "first": predict(weights="in_flight", order="first", max_staleness=slack),
    }


def format_comparison(setup: Setup, compared: dict[str, Any]) -> str:
    """What `compare` found, for people."""
    rows = {
        "synchronous": compared["by_ahead"][0],
        **{f"ahead {ahead}, staleness <= {ahead}": compared["by_ahead"][ahead] for ahead in (1, 2, 4)},
        "as asked": compared,
        "  weights in flight": compared["in_flight"],
        f"  and first, staleness <= {_SLACK * setup.ahead}": compared["first"],
    }
    lines = [f"{'':<26}{'step s':>9}{'speed-up':>10}{'trainer idle':>14}{'engine idle':>13}   staleness"]

    def line(name: str, step_s: float) -> str:
        return f"{name:<26}{step_s:>9.3g}{rows['synchronous']['step_s'] / step_s:>9.2f}x"

    for name, row in rows.items():
        shares = ", ".join(f"{key}: {100 * share:.0f} %" for key, share in row["staleness"].items())
        idle = f"{100 * row['trainer_idle']:>12.0f} %{100 * row['engine_idle']:>11.0f} %"
        lines.append(f"{line(name, row['step_s'])}{idle}   {shares}")
    lines += [
        line("ideal", setup.ideal_s),
        "",
        f"a step as asked: generation {setup.generation_s:.3g} s, training and update "
        f"{setup.training_s + setup.update_s:.3g} s, waits for an idle engine {compared['drain_s']:.3g} s",
        f"fewest batches ahead that are as fast as any: {compared['fewest_ahead'] or '0 (asynchrony does not pay)'}",
    ]
    return "\n".join(lines)
