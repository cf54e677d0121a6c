"""What is known of all workers, as one: what they count, how busy their engines are, whether work waits.

Workers come, die and are replaced; what they counted until then stays counted. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import LoadSum


@dataclass(slots=True)
class WorkerStatus:
    """What one worker says of itself. Counts are of its whole life, and only ever rise, but for `calls`."""

    calls: int = 0
    """Requests at the engine now."""
    finished: int = 0
    tokens: int = 0
    seconds: float = 0.0
    call_seconds: float = 0.0
    overloads: int = 0
    cut_off: int = 0
    """These as `MeteredEngine` has them."""
    retries: int = 0
    unavailable: int = 0
    reward_errors: int = 0
    timeouts: int = 0
    """These as `WorkerCounters` has them."""
    gate_open: bool = True
    gate_generation: int = 0
    load: EngineLoad | None = None
    """Of its own engine; None when it has none of its own, or the engine does not say."""


_COUNTS = (
    "finished",
    "tokens",
    "seconds",
    "call_seconds",
    "overloads",
    "cut_off",
    "retries",
    "unavailable",
    "reward_errors",
    "timeouts",
)


@dataclass(slots=True)
class Fleet:
    """The workers as one. It looks like an engine's meter, its gate and a worker's counters, added up."""

    shared_engine: object = None
    """Asked how busy it is, where workers share one; None: each has its own, and says that of it."""
    statuses: dict[int, WorkerStatus] = field(default_factory=dict)
    """The last one of each worker that lives."""
    _gone: WorkerStatus = field(default_factory=WorkerStatus)
    _loads: LoadSum = field(default_factory=LoadSum)
    _changes: int = 0

    @property
    def engine(self) -> object:
        """What to ask for the load of all engines."""
        return self if self.shared_engine is None else self.shared_engine

    async def load(self) -> EngineLoad | None:
        """As `ReportsLoad` has it, of the workers' own engines."""
        return self.sum_loads()

    def tell(self, worker: int, status: WorkerStatus) -> None:
        """A worker has said how it is."""
        self.statuses[worker] = status

    def forget(self, worker: int) -> None:
        """A worker is gone: what it counted stays, and what was seen with it is of another fleet."""
        status = self.statuses.pop(worker, None)
        if status is not None:
            for name in _COUNTS:
                setattr(self._gone, name, getattr(self._gone, name) + getattr(status, name))
            self._changes += 1 + status.gate_generation

    @property
    def calls(self) -> int:
        """Requests at engines now."""
        return sum(status.calls for status in self.statuses.values())

    @property
    def finished(self) -> int:
        return int(self._sum("finished"))

    @property
    def tokens(self) -> int:
        return int(self._sum("tokens"))

    @property
    def seconds(self) -> float:
        return self._sum("seconds")

    @property
    def call_seconds(self) -> float:
        return self._sum("call_seconds")

    @property
    def overloads(self) -> int:
        return int(self._sum("overloads"))

    @property
    def cut_off(self) -> int:
        return int(self._sum("cut_off"))

    @property
    def retries(self) -> int:
        """Attempts that failed and were followed by another."""
        return int(self._sum("retries"))

    @property
    def unavailable(self) -> int:
        """Attempts cut off because an engine went away."""
        return int(self._sum("unavailable"))

    @property
    def reward_errors(self) -> int:
        """Rollouts that completed but could not be scored."""
        return int(self._sum("reward_errors"))

    @property
    def timeouts(self) -> int:
        return int(self._sum("timeouts"))

    @property
    def is_open(self) -> bool:
        """Whether no worker waits for its engine."""
        return all(status.gate_open for status in self.statuses.values())

    @property
    def all_wait(self) -> bool:
        """Whether there are workers, and all of them wait for their engine."""
        return bool(self.statuses) and not any(status.gate_open for status in self.statuses.values())

    @property
    def generation(self) -> int:
        """Changes whenever an engine has come back or a worker has gone; only ever rises."""
        return self._changes + sum(status.gate_generation for status in self.statuses.values())

    def sum_loads(self) -> EngineLoad | None:
        """Of the workers' own engines; None when none says it."""
        loads: Iterable[tuple[str, EngineLoad | None]] = (
            (str(worker), status.load) for worker, status in self.statuses.items()
        )
        return self._loads.add(loads)

    def _sum(self, name: str) -> float:
        gone: float = getattr(self._gone, name)
        return gone + sum(float(getattr(status, name)) for status in self.statuses.values())
