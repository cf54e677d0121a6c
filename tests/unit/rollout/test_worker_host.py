"""A worker that takes orders and reports."""

import asyncio
from typing import Any, cast

from rollstream.engine.continuation import ContinuingEngine
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Completion, SamplingParams
from tests.support.until import PATIENCE_S, until


class Slow(ScriptedEngine):
    """Ends no request for an abort."""

    def __init__(self) -> None:
        super().__init__()
        self.aborts, self.end = 0, asyncio.Event()

    async def generate(self, *_: Any, **__: Any) -> Completion:
        await self.end.wait()
        return Completion([1], None, "length")

    async def abort(self, request_id: str) -> None:
        self.aborts += 1


async def test_a_hold_ends_with_its_release() -> None:
    """Ray's orders run side by side: the hold of an update that was cancelled may still be under way."""
    engine, nobody = Slow(), cast(Any, None)
    continuing = ContinuingEngine(engine)
    host = LocalBackend(BuiltWorker(nobody, continuing.meter, nobody, continuing=continuing)).spawn(0)
    async with asyncio.timeout(PATIENCE_S):
        await host.start()
        asking = continuing.generate([1], SamplingParams(4, logprobs=False), request_id="a")
        running = asyncio.create_task(asking)
        await until(lambda: continuing.inside == 1)
        holding = asyncio.create_task(host.hold(1))
        await until(lambda: engine.aborts == 1)
        await host.release([])
        await holding
        engine.end.set()
        await running
        assert (await anext(host.reports())).held == 0
