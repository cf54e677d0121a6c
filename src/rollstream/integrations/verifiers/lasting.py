"""Something that is opened for its first user and closed after its last one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_ValueT = TypeVar("_ValueT")


class Lasting(Generic[_ValueT]):
    """A context that many rollouts of one event loop are in at once.

    It is open while it has users, and for a while after the last one: a worker's next rollout comes within
    that. Whoever comes while it closes opens another.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[_ValueT]], *, linger: float = 5.0
    ) -> None:
        """Args:
        make: gives the context, anew each time.
        linger: seconds that it stays open without users.
        """
        self._make = make
        self._linger = linger
        self._opening: _Opening[_ValueT] | None = None

    @asynccontextmanager
    async def using(self) -> AsyncIterator[_ValueT]:
        """Enters. What opening the context raises is raised to each who waits for it."""
        opening = self._opening
        if opening is None or opening.over or opening.loop is not asyncio.get_running_loop():
            opening = self._opening = _Opening(self._make, self._linger)
        opening.users += 1
        opening.changed.set()
        try:
            yield await asyncio.shield(opening.value)
        finally:
            opening.users -= 1
            opening.changed.set()


class _Opening(Generic[_ValueT]):
    """One time that the context is open.

    A task of its own enters and leaves the context: what is entered in a task may have to be left in it. The
    task ends when the context has been unused for a while, or is cancelled with its event loop.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[_ValueT]], linger: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.users = 0
        self.changed = asyncio.Event()
        self.over = False
        """Whether it closes, has closed or never opened."""
        self.value: asyncio.Future[_ValueT] = self.loop.create_future()
        self._linger = linger
        self._keeper = self.loop.create_task(self._keep(make))

    async def _keep(self, make: Callable[[], AbstractAsyncContextManager[_ValueT]]) -> None:
        try:
            async with make() as value:
                self.value.set_result(value)
                await self._until_unused()
                self.over = True
        except Exception as error:
            if self.value.done():
                logger.warning("what environments share did not close well", exc_info=error)
            else:
                self.value.set_exception(error)
        finally:
            self.over = True
            self.value.cancel()  # of no effect on one that is there
            if not self.value.cancelled():
                self.value.exception()  # it has been seen, also when nobody waits any more

    async def _until_unused(self) -> None:
        while True:
            self.changed.clear()
            try:
                async with asyncio.timeout(None if self.users else self._linger):
                    await self.changed.wait()
            except TimeoutError:
                if not self.users:
                    return
