import asyncio
import functools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from rollstream import user_calls
from rollstream.user_calls import CallsRefusedError, UserCalls


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging functions wait for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def make_calls() -> AsyncIterator[Callable[[int], UserCalls]]:
    made = []

    def make(limit: int = 1) -> UserCalls:
        made.append(UserCalls("test-calls", limit))
        return made[-1]

    yield make
    for calls in made:
        calls.close()


Make = Callable[[int], UserCalls]


async def _block(release: threading.Event) -> None:
    release.wait()


async def _exits() -> None:
    sys.exit(3)


async def _cancels() -> None:
    raise asyncio.CancelledError


async def test_values_and_errors_come_back_and_threads_are_used_again(make_calls: Make) -> None:
    calls = make_calls(2)
    threads = {(await calls.run(threading.get_ident, 10)).value for _ in range(10)}
    assert len(threads) == 1 and threading.get_ident() not in threads
    for raises in (lambda: 1 / 0, lambda: sys.exit(3), lambda: next(iter(())), _exits, _cancels):
        error = (await calls.run(raises, 10)).error
        assert isinstance(error, ZeroDivisionError | SystemExit | StopIteration | asyncio.CancelledError)
    calls.close()
    for function in (int, _exits):
        with pytest.raises(CallsRefusedError, match="closed"):
            await calls.run(function, 1)


async def test_no_more_than_the_limit_at_once(make_calls: Make) -> None:
    calls, lock, running, most = make_calls(3), threading.Lock(), 0, 0
    full = threading.Barrier(3)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(timeout=30)  # three do run at once
        with lock:
            running -= 1

    outcomes = await asyncio.gather(*(calls.run(work, 60) for _ in range(12)))
    assert all(outcome.error is None for outcome in outcomes)
    assert most == 3


async def test_a_hanging_call_frees_its_place(make_calls: Make, release: threading.Event) -> None:
    calls = make_calls(1)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await calls.run(release.wait, 0.01)
    assert calls.lost == 3
    assert (await calls.run(lambda: "fine", 10)).value == "fine"
    release.set()
    calls.close()
    for thread in threading.enumerate():
        if thread.name == "test-calls":
            await asyncio.to_thread(thread.join, 30)
    assert calls.lost == 0


async def test_a_cancelled_call_frees_its_place(make_calls: Make, release: threading.Event) -> None:
    calls, started = make_calls(1), threading.Event()

    def hang() -> None:
        started.set()
        release.wait()

    task = asyncio.create_task(calls.run(hang, 60))
    assert await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await calls.run(lambda: "fine", 10)).value == "fine"


async def test_one_ceiling_for_all_that_hangs(
    make_calls: Make, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "MAX_LOST", 2)
    monkeypatch.setattr(user_calls, "STUCK_AFTER", 0.05)
    calls = make_calls(4)
    for hangs in (release.wait, functools.partial(_block, release)):
        with pytest.raises(TimeoutError):
            await calls.run(hangs, 0.01)
    with pytest.raises(CallsRefusedError, match="2 earlier calls still hang"):
        await calls.run(int, 1)


async def test_async_functions_run_on_another_loop(make_calls: Make) -> None:
    calls, here = make_calls(4), asyncio.get_running_loop()

    async def where() -> tuple[bool, int]:
        await asyncio.sleep(0)
        return asyncio.get_running_loop() is here, threading.get_ident()

    functions: list[Any] = [where, functools.partial(where), lambda: where()]
    outcomes = await asyncio.gather(*(calls.run(function, 10) for function in functions * 3))
    assert {outcome.value for outcome in outcomes} == {(False, outcomes[0].value[1])}


async def test_an_async_call_is_cancelled_at_its_timeout_and_at_the_end(make_calls: Make) -> None:
    calls, ended = make_calls(4), threading.Semaphore(0)

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    with pytest.raises(TimeoutError):
        await calls.run(forever, 0.01)
    assert await asyncio.to_thread(ended.acquire, timeout=30)
    assert calls.lost == 0
    task = asyncio.create_task(calls.run(forever, 60))
    await asyncio.sleep(0)
    calls.close()
    assert isinstance((await task).error, asyncio.CancelledError)
    assert await asyncio.to_thread(ended.acquire, timeout=30)


async def test_a_blocked_loop_is_replaced_and_this_one_goes_on(
    make_calls: Make, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "STUCK_AFTER", 0.05)
    calls, ticks = make_calls(4), 0

    async def fine() -> str:
        return "fine"

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    with pytest.raises(TimeoutError):
        await calls.run(functools.partial(_block, release), 0.02)
    ticking.cancel()
    assert ticks > 10
    assert (await calls.run(fine, 10)).value == "fine"


def test_hanging_calls_do_not_keep_the_interpreter() -> None:
    script = """
import asyncio, threading
from rollstream.user_calls import UserCalls

async def block():
    threading.Event().wait()

async def main():
    for hangs in (threading.Event().wait, block):
        try:
            await UserCalls("a", 1).run(hangs, 0.01)
        except TimeoutError:
            print("timeout")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("timeout\ntimeout\n", "")
