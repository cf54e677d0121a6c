"""Writes a generator's items to the buffer: what gathers during one request goes with the next."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.buffer.async_client import AsyncBufferClient, Backoff, BufferClientError
from rollstream.buffer.items import ItemError
from rollstream.errors import ConfigError, RollstreamError

_BATCH_ITEMS = 256
"""Written together; the client makes more requests of them if they are large."""

FOR_EVER = Backoff(first=0.2, longest=5.0, give_up_after=None)
"""While the buffer is away, or full: its generators end with it, so there is no end to trying."""

_NO_BUFFER = (401, 403, 404, 405)
"""Statuses that say nothing about an item."""


class ItemRefusedError(RollstreamError):
    """The buffer will never take this item."""


@dataclass(slots=True)
class _Waiting:
    item: Mapping[str, Any]
    durable: asyncio.Future[None]


class ItemWriter:
    """Writes items in batches. `run` is to be a task of its owner's.

    Args:
        client: tries again by itself, for ever (`FOR_EVER`).
    """

    def __init__(self, client: AsyncBufferClient) -> None:
        self._client = client
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()

    async def write(self, item: Mapping[str, Any]) -> None:
        """Returns when the item is durable.

        Raises:
            ItemRefusedError: it cannot be written (half a character in a tool's text, a loop's own object),
                or the server refuses it.
        """
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wake.set()
        await waiting.durable

    async def run(self) -> None:
        """Writes until it is cancelled. Raises what no retry mends; who waits is told the same."""
        batch: list[_Waiting] = []
        try:
            while True:
                self._wake.clear()
                while batch := self._gather():
                    await self._send(batch)
                await self._wake.wait()
        except BaseException as error:
            for one in (*batch, *self._waiting):
                if not one.durable.done():
                    if isinstance(error, asyncio.CancelledError):
                        one.durable.cancel()
                    else:
                        one.durable.set_exception(error)
            raise

    def _gather(self) -> list[_Waiting]:
        return [self._waiting.popleft() for _ in range(min(_BATCH_ITEMS, len(self._waiting)))]

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            await self._client.write([one.item for one in batch])
        except (BufferClientError, ItemError) as error:
            if isinstance(error, BufferClientError) and error.status in _NO_BUFFER:
                raise ConfigError(f"remote_buffer_url: {error}") from error
            if len(batch) > 1:  # one by one: the good ones are known by their uids, if they were stored
                for one in batch:
                    await self._send([one])
                return
            if not batch[0].durable.done():
                batch[0].durable.set_exception(ItemRefusedError(f"the buffer does not take it: {error}"))
            return
        for one in batch:
            if not one.durable.done():
                one.durable.set_result(None)
