"""A worker that takes orders and reports: in the driver's event loop, in a process of its own (`processes`) and as
a Ray actor (`ray`). Only how orders and reports travel differs.
"""

import asyncio
import gc
import logging
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from rollstream.agent.turns import Turns
from rollstream.engine.base import EngineLoad
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.load import Counts, RequestMeter, ask_load
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.stats import Status, WorkerStatus
from rollstream.rollout.worker import RolloutWorker, make_failure
from rollstream.store.records import EncodedRollout, EncodedTurn, EncodingError, RecordCodec
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey

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

Result = Rollout | EncodedRollout | Failure
"""What became of a rollout; encoded where it has travelled."""


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A worker on a started engine, with what it is observed by."""

    worker: RolloutWorker
    meter: RequestMeter
    availability: EngineAvailability
    close: Callable[[], Awaitable[None]] | None = None
    """Releases all of it."""
    engine: object = None
    """Asked how busy it is, where it is this worker's own, so that its load is added to the others'."""
    follow: Callable[[Sequence[str]], Awaitable[None]] | None = None
    """Takes the URLs of the engine's servers when they change."""
    load: EngineLoad | None = None
    continuing: ContinuingEngine | None = None
    """Its engine, where that can be held."""
    check: Callable[[], None] = lambda: None
    """Raises, after a rollout, what all others would meet, too."""

    @property
    def counts(self) -> Counts:
        return self.meter.counts

    @property
    def calls(self) -> int:
        return self.meter.calls

    @property
    def is_available(self) -> bool:
        return self.availability.is_available

    @property
    def returns(self) -> int:
        return self.availability.returns


class WorkerRecipe(Protocol):
    """How a worker is made, wherever it is made. Travels by pickle."""

    async def build(self, number: int) -> BuiltWorker:
        """Makes and starts worker `number`, from 0; one that replaces another has the same number.

        Raises:
            RollstreamError: it cannot be.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where the driver runs, and what of its place a worker elsewhere should find."""

    cwd: str
    sys_path: tuple[str, ...]
    log_level: int

    @classmethod
    def here(cls) -> "WorkerPlace":
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
    row: PromptRow | bytes
    """Pickled by itself where it travels: one that cannot be read there fails alone."""
    turns: Sequence[bytes] | None = None
    """Those that are finished, see `TurnStore`; None: they are not kept."""


@dataclass(slots=True)
class WorkerReport:
    """What happened at a worker since its last report."""

    results: list[Result] = field(default_factory=list)
    turns: list[EncodedTurn] = field(default_factory=list)
    """Of these results, too: they were finished before."""
    status: Status = field(default_factory=WorkerStatus)
    logs: list[tuple[int, str, str]] = field(default_factory=list)
    """Level, logger, message."""
    held: int = 0
    """The number of the hold under which its engine has no requests; 0: there is none."""


class WorkerHost:
    """Executes rollouts. All methods run in one event loop; see `WorkerHandle`.

    Args:
        recipe: what the worker is made from.
        number: see `WorkerRecipe.build`.
        place: the driver's, where that is another process; None in the driver's own.
        linger_s: how long a result waits for company before it is reported.
    """

    def __init__(
        self, recipe: WorkerRecipe, number: int, place: WorkerPlace | None = None, *, linger_s: float = 0.0
    ) -> None:
        self._recipe, self._number, self._place, self._linger_s = recipe, number, place, linger_s
        self._codec = RecordCodec()
        self._results: deque[Result] = deque()
        self._turns: list[EncodedTurn] = []
        self._logs = _LogTail()
        self._news = asyncio.Event()
        self._tasks: dict[RolloutKey, asyncio.Task[None]] = {}
        self._held = 0
        self._holding: asyncio.Task[None] | None = None
        self._fatal: BaseException | None = None
        self._load: EngineLoad | None = None
        self._load_asked = 0.0
        self._built: BuiltWorker | None = None

    async def start(self) -> int:
        if self._place is not None:
            self._place.take()
            logger = logging.getLogger("rollstream")
            logger.setLevel(self._place.log_level)
            logger.addHandler(self._logs)
            logger.propagate = False
        self._built = await self._recipe.build(self._number)
        if self._place is not None:
            # What the start made stays: walking it again and again would cost a tenth of the worker's CPU.
            gc.collect()
            gc.freeze()
        self._news.set()
        return os.getpid()

    async def give(self, items: Sequence[WorkItem]) -> None:
        """Begins rollouts; returns at once."""
        for item in items:
            key = RolloutKey(item.index, item.repeat)
            self._tasks[key] = task = asyncio.create_task(self._execute(item))
            task.add_done_callback(partial(self._ended, key))

    async def reports(self) -> AsyncGenerator[WorkerReport, None]:
        """What happens here, until the worker is closed; elsewhere at least once in `HEARTBEAT_S`.

        Raises:
            EngineLostError: the engine stayed away too long.
        """
        heartbeat = None if self._place is None else HEARTBEAT_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat):
                    await self._news.wait()
            if len(self._results) < _REPORT_ROLLOUTS and not self._fatal:
                await asyncio.sleep(self._linger_s)
            self._news.clear()
            report = await self._report()
            if not report.results and self._fatal:
                raise self._fatal
            yield report

    async def follow(self, urls: Sequence[str]) -> None:
        if (follow := self._running.follow) is not None:
            await follow(urls)

    async def hold(self, number: int) -> None:
        """Raises `EngineError`, which ends this process: so its engine has no requests either."""
        assert self._running.continuing is not None
        self._holding = holding = asyncio.create_task(self._running.continuing.hold())
        await asyncio.wait((holding,))
        if not holding.cancelled():
            holding.result()
            self._held = number
            self._news.set()

    async def release(self, urls: Sequence[str]) -> None:
        self._held = 0
        if self._holding is not None:  # an update that was cancelled: else it would go on to end requests
            self._holding.cancel()
        await self.follow(urls)
        if self._running.continuing is not None:
            self._running.continuing.release()

    async def cut(self, key: RolloutKey) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.add_done_callback(partial(self._was_cut, key))
            task.cancel()

    def _was_cut(self, key: RolloutKey, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            self._deliver(
                make_failure(key.index, key.repeat, "", 1, "agent", asyncio.CancelledError("cut off"))
            )

    async def drop(self) -> None:
        self.kill()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def kill(self) -> None:
        """Cuts off what is in flight; does not wait for it."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        await self.drop()
        if self._built is not None and self._built.close is not None:
            await self._built.close()

    @property
    def _running(self) -> BuiltWorker:
        assert self._built is not None, "start() first"
        return self._built

    async def _execute(self, item: WorkItem) -> None:
        try:
            row = pickle.loads(item.row) if isinstance(item.row, bytes) else item.row
        except Exception as error:
            self._deliver(make_failure(item.index, item.repeat, item.prompt_key, 1, "prompt", error))
            return
        worker, key = self._running.worker, RolloutKey(item.index, item.repeat)
        if item.turns is None:
            result: Result = await worker.run(row, item.repeat)
        else:
            turns = Turns(key, item.prompt_key, item.turns, self._keep, self._codec)
            result = await worker.run(row, item.repeat, turns=turns)
        self._running.check()
        if self._place is not None and isinstance(result, Rollout):
            try:
                result = self._codec.encode(result)
            except EncodingError as error:
                result = make_failure(item.index, item.repeat, item.prompt_key, 1, "store", error)
        self._deliver(result)

    def _keep(self, turn: EncodedTurn) -> None:
        self._turns.append(turn)
        self._news.set()

    def _deliver(self, result: Result) -> None:
        self._results.append(result)
        self._news.set()

    def _ended(self, key: RolloutKey, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = self._fatal or error
            self._news.set()

    async def _report(self) -> WorkerReport:
        results: list[Result] = []
        size = 0
        while self._results and len(results) < _REPORT_ROLLOUTS and (size < _REPORT_BYTES or not results):
            results.append(result := self._results.popleft())
            size += len(result.body) if isinstance(result, EncodedRollout) else 0
        if self._results:
            self._news.set()
        turns, self._turns = self._turns, []
        built = self._running
        if self._place is None:
            return WorkerReport(results, turns, built, held=self._held)
        if built.engine is not None and time.monotonic() - self._load_asked >= _LOAD_EVERY_S:
            self._load_asked = time.monotonic()
            self._load = await ask_load(built.engine)
        status = WorkerStatus(copy(built.counts), built.calls, built.is_available, built.returns, self._load)
        return WorkerReport(results, turns, status, self._logs.take(), self._held)


class LocalBackend:
    """One worker in this event loop, on an engine of its caller's; see `WorkerBackend`."""

    is_local = True
    shares_files = True

    def __init__(self, built: BuiltWorker) -> None:
        self._built = built

    async def build(self, number: int) -> BuiltWorker:
        """The recipe of its worker."""
        return self._built

    def spawn(self, number: int) -> WorkerHost:
        return WorkerHost(self, number)


class _LogTail(logging.Handler):
    """Keeps log lines for the next report."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[int, str, str]] = deque(maxlen=_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, record.name, self.format(record)))

    def take(self) -> list[tuple[int, str, str]]:
        lines = list(self._lines)
        self._lines.clear()
        return lines
