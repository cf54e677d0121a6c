"""Results of a stream: durable once they are taken, or never wanted."""

import asyncio
from contextlib import aclosing

from rollstream.integrations.verl.inbox import Inbox
from rollstream.trajectory import Failure


def failure(index: int) -> Failure:
    return Failure(
        index=index,
        repeat=0,
        prompt_key="k",
        attempts=1,
        stage="agent",
        error="e",
        traceback="t",
        failed_at=0.0,
    )


async def test_a_result_is_durable_when_it_is_taken() -> None:
    inbox = Inbox()
    futures = [inbox.submit(failure(i)) for i in range(3)]
    inbox.end()
    got = []
    async for result in inbox.results():
        got.append(result.index)
        assert [future.done() for future in futures] == [i < len(got) for i in range(3)]
    assert got == [0, 1, 2]


async def test_who_leaves_keeps_nobody_waiting() -> None:
    inbox = Inbox()
    before = [inbox.submit(failure(i)) for i in range(3)]
    async with aclosing(inbox.results()) as results:
        async for _ in results:
            break
    inbox.end()
    inbox.abandon()
    inbox.abandon()
    after = inbox.submit(failure(9))
    await asyncio.wait_for(asyncio.gather(*before, after), 5)
