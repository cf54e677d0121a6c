"""Asks the engine how busy it is, every other second, and sets the cap of the window."""

import asyncio
import logging
import time
from typing import Protocol

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import ask_load
from rollstream.rollout.concurrency import ConcurrencyCap, Observation

_LOG = logging.getLogger(__name__)

EVERY_S = 2.0
"""Between observations: long against a step of an engine, short against an answer; a busy run asks a server
for its metrics this often."""

_SAID = 50
"""Changes that are logged as they come, in a run that may have thousands; then only for the curious."""


class Meter(Protocol):
    """What went through an engine, or all of them: a `MeteredEngine`, a `Fleet`."""

    @property
    def engine(self) -> object: ...  # asked for its load
    @property
    def calls(self) -> int: ...
    @property
    def finished(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def call_seconds(self) -> float: ...
    @property
    def overloads(self) -> int: ...
    @property
    def cut_off(self) -> int: ...


class Gate(Protocol):
    """Whether engines are there: an `EngineGate`, a `Fleet`."""

    @property
    def is_open(self) -> bool: ...
    @property
    def generation(self) -> int: ...


class Timeouts(Protocol):
    """How many attempts were cut off by their time limit: `WorkerCounters`, a `Fleet`."""

    @property
    def timeouts(self) -> int: ...


class Places(Protocol):
    """A window whose places are counted: a `Window`, an executor."""

    cap: int

    @property
    def in_flight(self) -> int: ...


class Adaptation:
    """Keeps the cap of a window where the engine is busy and not overloaded.

    Args:
        maximum: rollouts in flight at most.
        engine: the one that the rollouts use.
        gate: closed while the engine is away.
        counters: of the worker.
        every_s: seconds between observations.
    """

    def __init__(
        self,
        maximum: int,
        engine: Meter,
        gate: Gate,
        counters: Timeouts,
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self.cap = ConcurrencyCap(maximum)
        self.changes = 0
        """How often the cap was changed."""
        self._engine = engine
        self._gate = gate
        self._counters = counters
        self._every_s = every_s
        self._generation = gate.generation

    async def run(self, window: Places) -> None:
        """Works until it is cancelled."""
        while True:
            load = await ask_load(self._engine.engine)
            # An outage is no evidence, neither while it lasts nor in what was seen before it.
            if self._gate.is_open and self._gate.generation == self._generation:
                before = self.cap.cap
                window.cap = self.cap.observe(self._observation(window, load))
                if window.cap != before:
                    self._say(before)
            else:
                self._generation = self._gate.generation
                self.cap.interrupt()
            await asyncio.sleep(self._every_s)

    def _observation(self, window: Places, load: EngineLoad | None) -> Observation:
        engine, counters = self._engine, self._counters
        return Observation(
            at=time.monotonic(),
            in_flight=window.in_flight,
            calls=engine.calls,
            finished=engine.finished,
            tokens=engine.tokens,
            seconds=engine.seconds,
            call_seconds=engine.call_seconds,
            overloads=engine.overloads,
            # A rollout that hangs in a tool says nothing about the engine.
            timeouts=min(counters.timeouts, engine.cut_off),
            load=load,
        )

    def _say(self, before: int) -> None:
        self.changes += 1
        level = logging.INFO if self.changes <= _SAID else logging.DEBUG
        cap = self.cap
        _LOG.log(level, "%d rollouts in flight at most, %d before: %s", cap.cap, before, cap.reason)
        if self.changes == _SAID:
            _LOG.info("further changes of the cap are logged at log_level=debug")
