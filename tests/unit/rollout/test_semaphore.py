"""The window: never more in it than there are places, nobody forgotten at its door."""

import asyncio
import random

import pytest

from rollstream.rollout.semaphore import ResizableSemaphore


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_places_are_given_to_all_who_want_one_and_never_twice(seed: int) -> None:
    """Visitors come, go, give up; the cap moves; then the window is wide open and all who stayed get in."""
    rng = random.Random(seed)
    window = ResizableSemaphore(rng.randint(1, 5))
    inside = 0
    leaving = [asyncio.Event() for _ in range(40)]
    entered: set[int] = set()

    async def visit(number: int) -> None:
        nonlocal inside
        if not await window.enter():
            raise AssertionError("closed")
        inside += 1
        entered.add(number)
        assert window.in_flight == inside
        try:
            await leaving[number].wait()
        finally:
            inside -= 1
            window.leave()

    visitors = [asyncio.create_task(visit(number)) for number in range(40)]
    gone: set[int] = set()
    for _ in range(300):
        before = inside
        match rng.randrange(4):
            case 0:
                leaving[rng.randrange(40)].set()
            case 1:
                number = rng.randrange(40)
                visitors[number].cancel()
                gone.add(number)
            case 2:
                window.cap = rng.randint(1, 8)
            case _:
                await settle()
        await asyncio.sleep(0)
        assert inside <= max(before, window.cap)  # a lower cap throws nobody out
    window.cap = 40
    for event in leaving:
        event.set()
    results = await asyncio.gather(*visitors, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
    assert entered >= set(range(40)) - gone
    assert window.in_flight == inside == 0
