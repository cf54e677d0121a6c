"""Work goes on when its caller is cancelled, and the caller hears of its own cancellation."""

import asyncio

import pytest

from rollstream.engine.to_the_end import to_the_end


async def test_results_and_errors_pass_through() -> None:
    async def work(number: int) -> int:
        await asyncio.sleep(0)
        return 1 // number

    assert await to_the_end(work(1)) == 1
    with pytest.raises(ZeroDivisionError):
        await to_the_end(work(0))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_waits(fails: bool) -> None:
    go_on, ended = asyncio.Event(), []

    async def work() -> None:
        await go_on.wait()
        ended.append(1)
        if fails:
            raise ZeroDivisionError

    task = asyncio.create_task(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]
