"""Rollouts in workers elsewhere, for somebody here who waits for each: a training's generator.

run(row, repeat) --key--> Executor --WorkItem--> worker --WorkerReport--> its result

an update: workers' engines let go of requests --> the servers load weights --> the workers go on
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollstream.agent.turns import Turns
from rollstream.engine.adapters import is_adapter
from rollstream.errors import DataError, EngineError, TrainingError
from rollstream.rollout.executor import Executor, WorkerBackend
from rollstream.rollout.worker_host import Result
from rollstream.store.records import EncodedRollout, EncodedTurn, RecordCodec
from rollstream.trajectory import Failure, PromptRow, Rollout, RolloutKey

_RUNS = 3
"""Of a rollout whose tokens are older than it: servers that never say another version have no better ones."""


_CHECK_EVERY_S = 10.0
"""After a look at the servers that found nothing: an agent loop of the user's may say no versions at all."""


@dataclass(slots=True, eq=False)
class _Asked:
    row: PromptRow
    turns: Turns | None
    result: asyncio.Future[Rollout | Failure]
    """Cancelled when nobody wants it any more."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no worker has it."""


class WorkerRollouts:
    """Runs rollouts as a `RolloutWorker` does, in workers of a backend.

    What was in flight in a worker that dies is run again, see `Executor`.

    Args:
        backend: makes the workers.
        recheck: has servers with other weights than the last update's load these again, and says whether there were
            any; asked when tokens are older than their rollout, which is then run again.
        options: of `Executor`: `max_in_flight`, `workers`, …
    """

    def __init__(
        self,
        backend: WorkerBackend,
        *,
        recheck: Callable[[], Awaitable[bool]] | None = None,
        **options: Any,
    ) -> None:
        self._executor = Executor(self, backend, load_row=self._row, turns=self, **options)
        self._recheck = recheck
        self._checking = asyncio.Lock()
        self._version = 0
        """Of the last update."""
        self._check_at = 0.0
        self._found = 0
        """How often servers with other weights were found."""
        self._asked: dict[RolloutKey, _Asked] = {}
        self._new: deque[RolloutKey] = deque()
        self._codec = RecordCodec()
        self._running: asyncio.Task[None] | None = None
        self.availability = self._executor.stats
        """Whether workers have an engine."""

    async def start(self) -> None:
        """Starts the workers; raises what `Executor.start` does."""
        await self._executor.start()
        self._running = asyncio.create_task(self._executor.run(self._keys()))
        self._running.add_done_callback(self._ended)

    async def run(
        self,
        row: PromptRow,
        repeat: int,
        *,
        on_scoring: Callable[[], object] = lambda: None,
        turns: Turns | None = None,
    ) -> Rollout | Failure:
        """See `RolloutWorker.run`; it is not heard of here when the reward begins."""
        for _ in range(_RUNS):
            version, found = self._version, self._found
            went_on = turns is not None and bool(turns.bodies)
            result = await self._run(row, repeat, turns)
            parts = result.trajectories if isinstance(result, Rollout) else []
            oldest = min((one for part in parts for _, one in part.policy_versions), default=version)
            if oldest >= version or went_on or not await self._were_others(found):
                break
            if turns is not None:
                turns.bodies.clear()  # else these would be gone on with
        return result

    async def _run(self, row: PromptRow, repeat: int, turns: Turns | None) -> Rollout | Failure:
        key = RolloutKey(row.index, repeat)
        while (before := self._asked.get(key)) is not None:  # cut off, and still on its way out
            await before.gone.wait()
        self._check()
        asked = self._asked[key] = _Asked(row, turns, asyncio.get_running_loop().create_future())
        self._new.append(key)
        self._executor.wake()
        try:
            return await asked.result
        except asyncio.CancelledError:
            self._executor.cut(key)
            raise

    async def update_weights(
        self, load: Callable[[str, int], Awaitable[None]], source: str, version: int
    ) -> None:
        """Has the servers `load` weights while the workers have no requests there."""
        if is_adapter(source):
            raise EngineError(
                f"{source} is an adapter, and a server's adapters are known to the client that gave them: train the "
                "whole model, or have the rollouts in the trainer's process (generation.processes=1)"
            )
        self._check()
        async with self._executor.held():
            await load(source, version)
        self._version = version

    async def close(self) -> None:
        """Ends the workers."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._running
        await self._executor.close()

    async def _were_others(self, found: int) -> bool:
        """Whether servers were started anew, say, since there were `found` such finds."""
        async with self._checking:
            if self._found == found and self._recheck is not None and time.monotonic() >= self._check_at:
                if await self._recheck():
                    self._found += 1
                    await self._executor.send_urls()  # so that the next rollout goes to the others
                else:
                    self._check_at = time.monotonic() + _CHECK_EVERY_S
        return self._found != found

    # -- the executor's keys, rows, turns and sink

    def _keys(self) -> Iterator[RolloutKey | None]:
        while True:
            yield self._new.popleft() if self._new else None

    def _row(self, key: RolloutKey) -> PromptRow:
        asked = self._asked[key]
        if asked.result.cancelled():
            raise DataError("nobody wants it any more")
        return asked.row

    async def submit(self, result: Result) -> None:
        """See `Sink`."""
        asked = self._asked.pop(result.key)
        asked.gone.set()
        if not asked.result.done():
            whole = self._codec.decode(result.body) if isinstance(result, EncodedRollout) else result
            asked.result.set_result(whole)

    def turns_of(self, key: RolloutKey) -> list[bytes] | None:
        """See `TurnStore`."""
        turns = self._asked[key].turns
        return None if turns is None else turns.bodies

    def keep(self, turn: EncodedTurn) -> None:
        """See `TurnStore`."""
        asked = self._asked[turn.key]
        if asked.turns is not None and not asked.result.done():  # else its group may have ended without it
            asked.turns.relay(turn)

    def _ended(self, running: "asyncio.Task[None]") -> None:
        """What ended the executor is raised where somebody waits (R10)."""
        for asked in self._asked.values():
            asked.gone.set()
            if not asked.result.done():
                if running.cancelled() or (error := running.exception()) is None:
                    asked.result.cancel()
                else:
                    asked.result.set_exception(error)
        self._asked.clear()

    def _check(self) -> None:
        if self._running is None:
            raise TrainingError("start() comes first")
        if self._running.done():
            self._running.result()
            raise TrainingError("the workers have ended")
