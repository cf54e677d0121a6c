"""What asynchrony would bring, before anything is run: discrete events over the real admission and delivery.

The schedule is the one that a training run uses (`GroupSchedule`), so what is predicted is what it does; the
engine is a number of slots, each generating one group at a time, and the trainer a duration.
"""

import heapq
import itertools
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rollstream.errors import ConfigError
from rollstream.training.durations import Duration
from rollstream.training.plan import ShuffledPlan
from rollstream.training.schedule import GroupSchedule, Order
from rollstream.training.staleness import StalenessRule
from rollstream.training.timing import format_histogram

_WORTH_IT = 1.05
"""Speed-ups below it do not pay for stale data."""

_SLACK = 4
"""Times the batches ahead: a staleness bound that lets the long groups of a heavy tail be overtaken."""

_AS_GOOD = 1.02
"""A step time within this factor of the best one counts as the best."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A training run, as far as its times depend on it."""

    generation: Duration
    """Of one group, when the engine works on it."""
    training_s: float
    """Of one step."""
    update_s: float = 0.0
    """Of one weight update, in which the trainer waits."""
    groups_per_step: int = 32
    slots: int | None = None
    """Groups that all engines together generate at once; None: `groups_per_step`."""
    max_staleness: int | None = 1
    ahead: int = 1
    order: Order = "plan"
    window: int | None = None
    weights: Literal["drain", "in_flight"] = "drain"
    """Whether an update waits until nothing is being generated."""
    dropped: float = 0.0
    """Share of the groups that are thrown away when they are finished, 0 <= share < 1."""
    steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.training_s < 0 or self.update_s < 0:
            raise ConfigError("training and update times are not negative")
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"slots={self.slots}: at least 1")
        if not 0 <= self.dropped < 1:
            raise ConfigError(f"dropped={self.dropped}: a share from 0 to below 1")
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: at least 1")

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
    """How the steps go."""

    step_s: float
    """Mean of a step, once the pipeline is filled."""
    first_s: float
    """Until the first batch is there."""
    wait_s: float
    """Mean per step: the trainer waits for a batch."""
    drain_s: float
    """Mean per step: the trainer waits for an idle engine before it updates the weights."""
    trainer_idle: float
    """Share of the time in which the trainer neither trains nor sends weights."""
    engine_idle: float
    """Share of the engine's slots that are empty, over time."""
    staleness: dict[int, float]
    """Share of the groups trained on, by steps of staleness."""
    staleness_max: int
    bound: int | None
    """What the rule promises."""
    steps: list[float]
    """Of every step, the first ones included, from batch to batch."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, the single steps left out."""
        values = asdict(self)
        del values["steps"]
        values["staleness"] = {str(key): share for key, share in self.staleness.items()}
        return values


def simulate(setup: Setup) -> Prediction:
    """Plays `setup.steps` steps. Raises `ConfigError` for what a training run would refuse, too."""
    return _Run(setup).play()


class _Run:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        rule = StalenessRule(setup.groups_per_step, setup.max_staleness, setup.ahead)
        self.schedule = GroupSchedule(
            ShuffledPlan(1, shuffle=False), rule, order=setup.order, window=setup.window
        )
        self.now = 0.0
        self.version = 0
        self.held = False
        self.finished = 0
        self.busy = 0.0
        self.events: list[tuple[float, int, str, int]] = []
        self.number = 0

    def play(self) -> Prediction:
        setup, schedule = self.setup, self.schedule
        histogram: Counter[int] = Counter()
        delivered: list[float] = []
        waited: list[float] = []
        drained: list[float] = []
        asked: float | None = 0.0  # since when the trainer waits for a batch
        drain_since: float | None = None
        while len(delivered) < setup.steps + 1:
            if drain_since is not None and schedule.generating == 0:
                drained.append(self.now - drain_since)
                drain_since = None
                self._at(setup.update_s, "updated")
            self._begin()
            if asked is not None and (delivery := schedule.deliver(self.version)) is not None:
                histogram.update(delivery.step - group.start for group in delivery.groups)
                delivered.append(self.now)
                waited.append(self.now - asked)
                asked = None
                self._at(setup.training_s, "trained", delivery.step)
                continue  # there is room for more now
            at, _, kind, number = heapq.heappop(self.events)
            self.busy += (at - self.now) * schedule.generating
            self.now = at
            if kind == "group":
                self._finish(number)
            elif kind == "trained":
                schedule.trained(number)
                if setup.weights == "drain":
                    self.held = True
                    drain_since = self.now
                else:
                    drained.append(0.0)
                    self._at(setup.update_s, "updated")
            else:
                self.version = schedule.trained_steps
                self.held = False
                asked = self.now
        return self._predict(delivered, waited, drained, histogram)

    def _predict(
        self, delivered: list[float], waited: list[float], drained: list[float], histogram: Counter[int]
    ) -> Prediction:
        setup = self.setup
        steps = [after - before for before, after in itertools.pairwise(delivered)]
        filled = min(len(steps) - 1, setup.ahead + 1)  # the first steps fill the pipeline
        settled = steps[filled:]
        step_s = sum(settled) / len(settled)
        total = histogram.total()
        return Prediction(
            step_s=step_s,
            first_s=delivered[0],
            wait_s=sum(waited[filled + 1 :]) / len(settled),
            drain_s=sum(drained[filled:]) / len(settled),
            trainer_idle=max(0.0, 1 - (setup.training_s + setup.update_s) / step_s) if step_s else 0.0,
            engine_idle=max(0.0, 1 - self.busy / (self.now * setup.places)) if self.now else 0.0,
            staleness={key: histogram[key] / total for key in sorted(histogram)},
            staleness_max=max(histogram),
            bound=self.schedule.bound,
            steps=steps,
        )

    def _at(self, seconds: float, kind: str, number: int = 0) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + seconds, self.number, kind, number))

    def _begin(self) -> None:
        while not self.held and self.schedule.generating < self.setup.places:
            group = self.schedule.admit(self.version)
            if group is None:
                return
            self._at(self.setup.generation.draw(self.setup.seed, group.position), "group", group.position)

    def _finish(self, position: int) -> None:
        dropped = self.setup.dropped
        # The fractional part of multiples of an irrational number is spread evenly: no chance, and no seed.
        if dropped and (position * 0.6180339887498949) % 1.0 < dropped:
            self.schedule.drop(position)
            return
        self.finished += 1
        self.schedule.finish(position, rank=float(self.finished))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A setup beside the synchronous one, and beside others with more or fewer batches ahead."""

    setup: Setup
    chosen: Prediction
    synchronous: Prediction
    """Nothing ahead, no staleness."""
    by_ahead: dict[int, Prediction]
    """The same with 0, 1, 2, 4 batches ahead, and a staleness bound of as many steps."""
    advice: list[str]
    """Sentences."""

    @property
    def speed_up(self) -> float:
        """How many times faster than synchronous a step is."""
        return self.synchronous.step_s / self.chosen.step_s

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "setup": asdict(self.setup),
            "ideal_s": self.setup.ideal_s,
            "speed_up": self.speed_up,
            **self.chosen.to_json(),
            "synchronous": self.synchronous.to_json(),
            "by_ahead": {str(ahead): one.to_json() for ahead, one in self.by_ahead.items()},
            "advice": self.advice,
        }

    def table(self) -> str:
        """For people."""
        setup = self.setup
        lines = [
            f"{'':<26}{'step s':>9}{'speed-up':>10}{'trainer idle':>14}{'engine idle':>13}   staleness",
            self._row("synchronous", self.synchronous),
            *(
                self._row(f"ahead {ahead}, staleness <= {ahead}", one)
                for ahead, one in self.by_ahead.items()
                if ahead
            ),
            self._row("as asked", self.chosen),
            f"{'ideal':<26}{setup.ideal_s:>9.3g}{self.synchronous.step_s / setup.ideal_s:>9.2f}x",
            "",
            *self.advice,
        ]
        return "\n".join(lines)

    def _row(self, name: str, one: Prediction) -> str:
        shares = format_histogram(Counter({key: round(1e6 * one.staleness[key]) for key in one.staleness}))
        speed_up = self.synchronous.step_s / one.step_s
        return (
            f"{name:<26}{one.step_s:>9.3g}{speed_up:>9.2f}x{100 * one.trainer_idle:>12.0f} %"
            f"{100 * one.engine_idle:>11.0f} %   {shares}"
        )


def compare(setup: Setup) -> Comparison:
    """Simulates a setup, the synchronous one, and those in between; says in words what to make of it."""
    chosen = simulate(setup)
    by_ahead = {
        ahead: simulate(replace(setup, ahead=ahead, max_staleness=ahead, window=None))
        if setup.order == "first" or ahead == 0
        else simulate(replace(setup, ahead=ahead, max_staleness=ahead))
        for ahead in (0, 1, 2, 4)
    }
    synchronous = by_ahead[0]
    in_flight = simulate(replace(setup, weights="in_flight")) if setup.weights == "drain" else None
    return Comparison(
        setup, chosen, synchronous, by_ahead, _advise(setup, chosen, synchronous, by_ahead, in_flight)
    )


def _advise(
    setup: Setup,
    chosen: Prediction,
    synchronous: Prediction,
    by_ahead: dict[int, Prediction],
    in_flight: Prediction | None,
) -> list[str]:
    fastest = min(one.step_s for one in by_ahead.values())
    enough = next(ahead for ahead, one in by_ahead.items() if one.step_s <= _AS_GOOD * fastest)
    generation, training = setup.generation_s, setup.training_s + setup.update_s
    slower = "generation" if generation > training else "training"
    share = min(generation, training) / max(generation, training)
    advice = []
    only_in_flight = (
        in_flight is not None
        and synchronous.step_s / fastest < _WORTH_IT <= synchronous.step_s / in_flight.step_s
    )
    if in_flight is not None and only_in_flight:
        advice.append(
            f"Asynchrony pays with updates in flight (weights='in_flight'): a step takes "
            f"{in_flight.step_s:.3g} s instead of {synchronous.step_s:.3g} s. With updates that wait for an "
            f"idle engine it does not: at best {fastest:.3g} s."
        )
    elif synchronous.step_s / fastest < _WORTH_IT:
        advice.append(
            f"Asynchrony does not pay: at best a step takes {fastest:.3g} s instead of "
            f"{synchronous.step_s:.3g} s, since {slower} takes nearly all of it. Stay synchronous (ahead=0), "
            f"and make {slower} faster."
        )
    else:
        more = "more would bring more, and staler data" if enough == max(by_ahead) else "more brings no speed"
        advice.append(
            f"Asynchrony pays: {synchronous.step_s / by_ahead[enough].step_s:.2f}x with ahead={enough} and "
            f"max_staleness={enough}; {more}."
        )
        if fastest > 1.1 * setup.ideal_s and setup.generation.kind != "constant":
            advice.append(
                f"Long groups set the pace: by throughput alone a step would take {setup.ideal_s:.3g} s."
            )
        elif share < 0.5:
            advice.append(
                f"{slower.capitalize()} is the bottleneck ({generation:.3g} s of generation to "
                f"{training:.3g} s of training and updates a step): the other side is idle "
                f"{100 * (1 - share):.0f} % of the time at best."
            )
    speed_up = synchronous.step_s / chosen.step_s
    if setup.ahead and speed_up < _WORTH_IT and synchronous.step_s / fastest >= _WORTH_IT:
        advice.append(
            f"As asked it does not pay ({speed_up:.2f}x): max_staleness={setup.max_staleness} or "
            f"ahead={setup.ahead} holds generation back."
        )
    if in_flight is not None and not only_in_flight and chosen.step_s > _WORTH_IT * in_flight.step_s:
        advice.append(
            f"Waiting for an idle engine before each weight update costs {chosen.drain_s:.3g} s a step: with "
            f"updates in flight (weights='in_flight') a step takes {in_flight.step_s:.3g} s."
        )
    if setup.ahead and setup.generation.kind != "constant" and chosen.step_s > _WORTH_IT * setup.ideal_s:
        most = _SLACK * setup.ahead
        late = replace(setup, order="first", window=None, max_staleness=most, weights="in_flight")
        first = simulate(late)
        if chosen.step_s > _WORTH_IT * first.step_s:
            mean = sum(steps * share for steps, share in first.staleness.items())
            advice.append(
                f"Long groups hold their batch up. If they may be overtaken (order='first', "
                f"ahead={setup.ahead}, max_staleness={most}, weights='in_flight'), a step takes "
                f"{first.step_s:.3g} s, with a mean staleness of {mean:.2g}."
            )
    return advice
