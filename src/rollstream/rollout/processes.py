"""Workers as processes of this machine.

driver: WorkItems --Child--> process: WorkerHost (row, agent loop, engine, reward, encoding)
WorkerReports <-----
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from rollstream.childproc import Channel, Child, portable
from rollstream.rollout.worker_host import WorkerHost, WorkerPlace, WorkerRecipe, WorkerReport, WorkItem
from rollstream.trajectory import RolloutKey

_LINGER_S = 0.002
"""How long a result waits for company: a report costs some 50 us at both ends."""


class ProcessBackend:
    """Makes workers that are processes of this machine; see `WorkerBackend`."""

    is_local = False
    shares_files = True

    def __init__(self, recipe: Callable[[], WorkerRecipe]) -> None:
        """`recipe`: gives what a worker is made from, asked for each anew."""
        self._recipe = recipe

    def spawn(self, number: int) -> "ProcessWorker":
        return ProcessWorker(self._recipe(), number)


class ProcessWorker:
    """The driver's end of one process; see `WorkerHandle`."""

    def __init__(self, recipe: WorkerRecipe, number: int) -> None:
        self._order = recipe, number
        self._child: Child | None = None

    async def start(self) -> int:
        # Standard output is the driver's, for its result: a child prints on standard error.
        self._child = await Child.start("rollstream.rollout.processes:main")
        await self._child.send(WorkerPlace.here())  # first: the recipe may be a module's that is found by it
        pid: int = await self._child.ask(self._order)
        return pid

    async def reports(self) -> AsyncGenerator[WorkerReport, None]:
        while True:
            yield await self._started.receive()

    async def give(self, items: Sequence[WorkItem]) -> None:
        await self._started.send(("give", items))

    async def follow(self, urls: Sequence[str]) -> None:
        await self._started.send(("follow", urls))

    async def drop(self) -> None:
        await self._started.send(("drop",))

    async def cut(self, key: RolloutKey) -> None:
        await self._started.send(("cut", key))

    async def hold(self, number: int) -> None:
        await self._started.send(("hold", number))

    async def release(self, urls: Sequence[str]) -> None:
        await self._started.send(("release", urls))

    async def close(self) -> None:
        await self._started.send(("close",))
        await self._started.process.wait()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    @property
    def _started(self) -> Child:
        assert self._child is not None, "start() first"
        return self._child


async def _serve(number_of_socket: int) -> None:
    channel = await Channel.over(number_of_socket)
    place = await channel.receive()
    place.take()
    recipe, number = await channel.receive()
    host = WorkerHost(recipe, number, place, linger_s=_LINGER_S)
    try:
        await channel.send(await host.start())
    except Exception as error:
        await channel.send(portable(error))
        return

    async def report() -> None:
        try:
            async for each in host.reports():
                await channel.send(each)
        except Exception as error:
            channel.post(portable(error))

    reporting = asyncio.create_task(report())
    with suppress(EOFError, OSError):  # the driver has ended
        while (order := await channel.receive())[0] != "close":
            await getattr(host, order[0])(*order[1:])
    reporting.cancel()
    await host.close()


def main(number: int) -> None:
    """The process: does what the driver sends, until its end."""
    asyncio.run(_serve(number))
    sys.stderr.flush()
    os._exit(0)  # threads of hanging user functions keep nobody waiting
