"""What rollouts share is opened once, closed after the last one, and opened anew when it is wanted again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollstream.integrations.verifiers.lasting import Lasting


class Opened:
    """Counts, and may fail."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.error: Exception | None = None
        self.tasks: list[object] = []

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[int]:
        await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        self.opened += 1
        self.tasks.append(asyncio.current_task())
        try:
            yield self.opened
        finally:
            assert asyncio.current_task() is self.tasks[-1]
            self.closed += 1

    async def until_closed(self) -> None:
        async with asyncio.timeout(10):
            while self.closed < self.opened:
                await asyncio.sleep(0.001)


async def test_many_users_share_one_opening() -> None:
    opened = Opened()
    lasting = Lasting(opened, linger=0.01)

    async def use() -> int:
        async with lasting.using() as value:
            await asyncio.sleep(0.002)
            return value

    assert set(await asyncio.gather(*(use() for _ in range(20)))) == {1}
    await opened.until_closed()
    assert await use() == 2
    await opened.until_closed()
    assert (opened.opened, opened.closed) == (2, 2)


async def test_it_lingers_between_users() -> None:
    opened = Opened()
    lasting = Lasting(opened, linger=60)
    for _ in range(5):
        async with lasting.using() as value:
            assert value == 1
        await asyncio.sleep(0)
    assert opened.closed == 0


async def test_what_cannot_be_opened_tells_everybody_and_is_tried_again() -> None:
    opened = Opened()
    opened.error = OSError("no port")
    lasting = Lasting(opened)

    async def use() -> int:
        async with lasting.using() as value:
            return value

    results = await asyncio.gather(use(), use(), return_exceptions=True)
    assert [str(result) for result in results] == ["no port", "no port"]
    opened.error = None
    assert await use() == 1


async def test_a_user_that_is_cancelled_while_it_opens_disturbs_nobody() -> None:
    opened = Opened()
    lasting = Lasting(opened, linger=0.01)

    async def use() -> int:
        async with lasting.using() as value:
            return value

    first, second = asyncio.create_task(use()), asyncio.create_task(use())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1
    with pytest.raises(asyncio.CancelledError):
        await first
    await opened.until_closed()


def test_the_end_of_the_event_loop_closes_it() -> None:
    opened = Opened()
    lasting = Lasting(opened, linger=60)

    async def use() -> int:
        async with lasting.using() as value:
            return value

    assert asyncio.run(use()) == 1
    assert opened.closed == 1
    # Another loop opens its own.
    assert asyncio.run(use()) == 2
    assert opened.closed == 2
