"""Results of a stream on their way to whoever iterates over it."""

import asyncio
from collections.abc import AsyncGenerator

from rollstream.store.records import EncodedRollout
from rollstream.trajectory import Failure

Result = EncodedRollout | Failure


class Inbox:
    """Takes the place of a store: a result is durable once somebody has taken it, or will never."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Result, asyncio.Future[None]] | None] = asyncio.Queue()
        self._abandoned = False

    def submit(self, result: Result) -> "asyncio.Future[None]":
        """See `StoreWriter.submit`."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._abandoned:
            taken.set_result(None)
        else:
            self._queue.put_nowait((result, taken))
        return taken

    def end(self) -> None:
        """Nothing more comes."""
        self._queue.put_nowait(None)

    def abandon(self) -> None:
        """Nobody takes anything any more: who waits for it need not. Idempotent."""
        self._abandoned = True
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is not None and not item[1].done():
                item[1].set_result(None)

    async def results(self) -> AsyncGenerator[Result, None]:
        """What is submitted, in that order, until the end."""
        while (item := await self._queue.get()) is not None:
            result, taken = item
            if not taken.done():
                taken.set_result(None)
            yield result
