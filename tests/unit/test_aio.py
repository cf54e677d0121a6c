"""The helpers for asyncio: work that comes to its end, checks that are shared, pauses."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.aio import Restarts, SharedCheck, any_true, finish_despite_cancellation


async def test_cancelled_work_comes_to_its_end_before_the_cancellation_does() -> None:
    gate, ended = asyncio.Event(), []

    async def work(error: Exception | None = None) -> int:
        await gate.wait()
        ended.append(error)
        if error is not None:
            raise error
        return 1

    tasks = [asyncio.create_task(finish_despite_cancellation(work(one))) for one in (None, KeyError("x"))]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    assert len(ended) == 2
    assert await finish_despite_cancellation(work()) == 1
    with pytest.raises(KeyError):
        await finish_despite_cancellation(work(KeyError("x")))


async def test_any_true_does_not_wait_for_the_others() -> None:
    async def says(value: bool | None) -> bool:
        if value is None:
            await asyncio.Event().wait()
        return bool(value)

    assert await any_true([says(False), says(None), says(True)])
    assert not await any_true([says(False), says(False)])
    assert not await any_true([])


async def test_a_check_is_made_once_for_all_who_ask_at_the_same_time() -> None:
    gate, checks = asyncio.Event(), 0

    async def check() -> bool:
        nonlocal checks
        checks += 1
        await gate.wait()
        return True

    shared = SharedCheck(check)
    asked = [asyncio.create_task(shared.ask()) for _ in range(3)]
    await asyncio.sleep(0)
    asked[0].cancel()
    gate.set()
    assert await asyncio.gather(*asked[1:]) == [True, True]
    assert checks == 1
    gate.clear()
    late = asyncio.create_task(shared.ask())
    for _ in range(3):
        await asyncio.sleep(0)
    await shared.close()
    assert not await late and checks == 2


lives = st.lists(st.none() | st.floats(0, 100), max_size=40)
"""How long each life served; None: it never became healthy."""


@given(lives, st.floats(0.01, 5), st.floats(0.01, 60), st.integers(0, 6))
def test_pauses_are_bounded_and_it_is_given_up_after_failures_in_a_row_only(
    served: list[float | None], first: float, longest: float, most: int
) -> None:
    restarts = Restarts(first=first, longest=longest, most_failures=most)
    in_a_row = 0
    for life in served:
        if life is None:
            in_a_row += 1
            pause = restarts.after_failed_start()
            assert (pause is None) == (in_a_row > most)
            if pause is None:
                return
        else:
            in_a_row = 0
            pause = restarts.after_serving(life)
            if life >= 10:
                assert pause == first
        assert first <= pause <= max(first, longest)


def test_pauses_double_until_it_serves_well() -> None:
    restarts = Restarts(first=0.5, longest=3, most_failures=9)
    pauses = [restarts.after_serving(0.1), restarts.after_failed_start(), restarts.after_serving(2)]
    assert pauses == [0.5, 1.0, 2.0]
    assert [restarts.after_failed_start() for _ in range(2)] == [3, 3]
    assert restarts.after_serving(60) == 0.5
    assert restarts.failures == 0
