"""The worker's side of a run with several workers: executes rollouts and reports what became of them.

The same host runs in a process of this machine (`processes`) and as a Ray actor (`ray`): only how orders and
reports travel differs.
"""

import asyncio
import gc
import logging
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import ask_load
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.instrumented import InstrumentedEngine
from rollstream.rollout.stats import Counts, WorkerStatus
from rollstream.rollout.worker import RolloutWorker, make_failure
from rollstream.store.records import EncodedRollout, EncodingError, RecordCodec
from rollstream.trajectory import Failure, PromptRow, Rollout

_REPORT_ROLLOUTS = 32
"""At most in one report: measured, more gain nothing."""

_REPORT_BYTES = 8 << 20
"""At most in one report, but for a single result: results with images' tokens are large."""

HEARTBEAT_S = 1.0
"""Between reports when there are no results."""

_LOAD_EVERY_S = 2.0
"""Between asking an engine of its own how busy it is, as locally."""

_LOG_LINES = 200
"""Kept for the next report: a worker that logs more loses the oldest."""


async def _nothing_to_close() -> None:
    return


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A worker on a started engine, with what it is observed by."""

    worker: RolloutWorker
    instrumented: InstrumentedEngine
    availability: EngineAvailability
    close: Callable[[], Awaitable[None]] = _nothing_to_close
    """Releases all of it."""
    owns_engine: bool = True
    """Whether the engine is this worker's own, so that its load is added to the others'."""
    follow: Callable[[Sequence[str]], Awaitable[None]] | None = None
    """Takes the URLs of the engine's servers when they change."""

    @property
    def engine(self) -> object:
        """Asked how busy it is."""
        return self.instrumented.engine

    @property
    def counts(self) -> Counts:
        return self.instrumented.counts

    @property
    def calls(self) -> int:
        """Requests at the engine now."""
        return self.instrumented.calls

    @property
    def is_available(self) -> bool:
        """Whether the engine is believed to be there."""
        return self.availability.is_available

    @property
    def returns(self) -> int:
        """Changes whenever the engine has come back."""
        return self.availability.returns


class WorkerRecipe(Protocol):
    """How a worker is made, wherever it is made. Travels by pickle."""

    async def build(self, number: int) -> BuiltWorker:
        """Makes and starts one.

        Args:
            number: of the worker, from 0; one that replaces another has the same.

        Raises:
            RollstreamError: it cannot be.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker runs, and what of the driver's place it should find there."""

    cwd: str
    sys_path: tuple[str, ...]
    log_level: int

    @classmethod
    def here(cls) -> "WorkerPlace":
        """The driver's."""
        level = logging.getLogger("rollstream").getEffectiveLevel()
        return cls(str(Path.cwd()), tuple(path for path in sys.path if path), level)

    def take(self) -> None:
        """Relative paths and the user's modules are found as in the driver, where there are such folders."""
        if Path(self.cwd).is_dir():
            os.chdir(self.cwd)
        sys.path.extend(path for path in self.sys_path if path not in sys.path and Path(path).exists())


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One rollout to execute."""

    index: int
    repeat: int
    prompt_key: str
    row: bytes
    """The prompt row, pickled by itself: one that cannot be read here fails alone."""

    @classmethod
    def of(cls, row: PromptRow, repeat: int) -> "WorkItem":
        """Raises whatever pickle does for a row of a user's own dataset class."""
        return cls(row.index, repeat, row.prompt_key, pickle.dumps(row, protocol=5))


@dataclass(slots=True)
class WorkerReport:
    """What a worker says."""

    results: list[EncodedRollout | Failure] = field(default_factory=list)
    status: WorkerStatus = field(default_factory=WorkerStatus)
    logs: list[tuple[int, str, str]] = field(default_factory=list)
    """Level, logger, message."""


class WorkerHost:
    """All methods run in one event loop.

    Args:
        recipe: what it is made from.
        number: see `WorkerRecipe.build`.
        place: of the driver.
        linger_s: how long a result waits for company before it is reported.
    """

    def __init__(self, recipe: WorkerRecipe, number: int, place: WorkerPlace, *, linger_s: float) -> None:
        self._linger_s = linger_s
        self._recipe = recipe
        self._number = number
        self._place = place
        self._codec = RecordCodec()
        self._results: deque[EncodedRollout | Failure] = deque()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fatal: BaseException | None = None
        self._load_asked = 0.0
        self._logs = _LogTail()
        self._built: BuiltWorker | None = None
        self._load: EngineLoad | None = None

    async def start(self) -> int:
        """Makes the worker; returns its process id. Raises what the recipe does."""
        self._place.take()
        logger = logging.getLogger("rollstream")
        logger.setLevel(self._place.log_level)
        logger.addHandler(self._logs)
        logger.propagate = False
        self._built = await self._recipe.build(self._number)
        # What the start made stays: walking it again and again would cost a tenth of the worker's CPU.
        gc.collect()
        gc.freeze()
        return os.getpid()

    async def give(self, items: Sequence[WorkItem]) -> None:
        """Begins rollouts; returns at once."""
        for item in items:
            task = asyncio.create_task(self._one(item))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def reports(self) -> AsyncIterator[WorkerReport]:
        """What happens here, until the worker is closed.

        Raises:
            EngineLostError: the engine stayed away too long.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._news.wait()
            if len(self._results) < _REPORT_ROLLOUTS and not self._fatal:
                await asyncio.sleep(self._linger_s)
            self._news.clear()
            report = await self._report()
            if report.results or not self._fatal:
                yield report
            else:
                raise self._fatal

    async def follow(self, urls: Sequence[str]) -> None:
        """The engine's servers are others now."""
        built = self._running
        if built.follow is not None:
            await built.follow(urls)

    async def drop(self) -> None:
        """Cuts off what is in flight."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cuts off what is in flight and releases everything."""
        await self.drop()
        if self._built is not None:
            await self._built.close()

    @property
    def _running(self) -> BuiltWorker:
        assert self._built is not None, "start() first"
        return self._built

    async def _one(self, item: WorkItem) -> None:
        result: Rollout | Failure
        try:
            row = pickle.loads(item.row)
        except Exception as error:
            result = make_failure(item.index, item.repeat, item.prompt_key, 1, "prompt", error)
        else:
            result = await self._running.worker.run(row, item.repeat)
        encoded: EncodedRollout | Failure
        try:
            encoded = self._codec.encode(result) if isinstance(result, Rollout) else result
        except EncodingError as error:
            encoded = make_failure(item.index, item.repeat, item.prompt_key, 1, "store", error)
        self._results.append(encoded)
        self._news.set()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = self._fatal or error
            self._news.set()

    async def _report(self) -> WorkerReport:
        results: list[EncodedRollout | Failure] = []
        size = 0
        while self._results and len(results) < _REPORT_ROLLOUTS and (size < _REPORT_BYTES or not results):
            result = self._results.popleft()
            size += len(result.body) if isinstance(result, EncodedRollout) else len(result.traceback)
            results.append(result)
        if self._results:
            self._news.set()
        return WorkerReport(results, await self._status(), self._logs.take())

    async def _status(self) -> WorkerStatus:
        built = self._running
        if built.owns_engine and time.monotonic() - self._load_asked >= _LOAD_EVERY_S:
            self._load_asked = time.monotonic()
            self._load = await ask_load(built.engine)
        return WorkerStatus(
            counts=copy(built.counts),
            calls=built.calls,
            engine_available=built.is_available,
            returns=built.returns,
            load=self._load,
        )


class _LogTail(logging.Handler):
    """Keeps log lines for the next report."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[int, str, str]] = deque(maxlen=_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, record.name, self.format(record)))

    def take(self) -> list[tuple[int, str, str]]:
        """What came since the last time."""
        lines = list(self._lines)
        self._lines.clear()
        return lines


__all__ = [
    "BuiltWorker",
    "WorkItem",
    "WorkerHost",
    "WorkerPlace",
    "WorkerRecipe",
    "WorkerReport",
]
