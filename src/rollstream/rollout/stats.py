"""What all workers of a run count, as one. Pure.

Workers come, end and are replaced; what they counted until then stays counted.
"""

from dataclasses import dataclass, field
from typing import Protocol

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import Counts, LoadSum


@dataclass(slots=True)
class WorkerStatus:
    """What one worker reports of itself."""

    counts: Counts = field(default_factory=Counts)
    calls: int = 0
    """Requests at the engine now."""
    is_available: bool = True
    returns: int = 0
    """How often its engine has come back."""
    load: EngineLoad | None = None
    """Of its own engine; None when it has none of its own, or the engine does not say."""


class Status(Protocol):
    """A `WorkerStatus`, or a worker in this process, whose status is always the latest."""

    @property
    def counts(self) -> Counts: ...
    @property
    def calls(self) -> int: ...
    @property
    def is_available(self) -> bool: ...
    @property
    def returns(self) -> int: ...
    @property
    def load(self) -> EngineLoad | None: ...


class WorkerStats:
    """The workers as one; what they count is added up.

    Args:
        shared_engine: asked how busy it is, where workers share one; None: each has its own and reports it.
    """

    def __init__(self, shared_engine: object = None) -> None:
        self.engine = self if shared_engine is None else shared_engine
        """Says the load of all engines, see `ask_load`."""
        self._statuses: dict[int, Status] = {}
        self._ended = Counts()
        self._loads = LoadSum()
        self._changes = 0

    async def load(self) -> EngineLoad | None:
        """Of the workers' own engines; None when none reports it."""
        return self._loads.add((str(worker), status.load) for worker, status in self._statuses.items())

    def update(self, worker: int, status: Status) -> None:
        """A worker has reported."""
        self._statuses[worker] = status

    def remove(self, worker: int) -> None:
        """A worker has ended: what it counted stays."""
        status = self._statuses.pop(worker, None)
        if status is not None:
            self._ended.add(status.counts)
            self._changes += 1 + status.returns

    @property
    def counts(self) -> Counts:
        """Of all workers, the ended ones included."""
        total = Counts()
        for counts in (self._ended, *(status.counts for status in self._statuses.values())):
            total.add(counts)
        return total

    @property
    def calls(self) -> int:
        """Requests at engines now."""
        return sum(status.calls for status in self._statuses.values())

    @property
    def is_available(self) -> bool:
        """Whether no worker waits for its engine."""
        return all(status.is_available for status in self._statuses.values())

    @property
    def all_wait(self) -> bool:
        """Whether there are workers, and all of them wait for their engine."""
        return bool(self._statuses) and not any(one.is_available for one in self._statuses.values())

    @property
    def returns(self) -> int:
        """Changes whenever an engine has come back or a worker has ended; only ever rises."""
        return self._changes + sum(status.returns for status in self._statuses.values())
