import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from rollstream.errors import RewardError
from rollstream.reward import calls
from rollstream.reward.calls import BoundedThreads, LoopThread


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging functions wait for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def loop_thread() -> AsyncIterator[LoopThread]:
    thread = LoopThread(4, "test-loop")
    yield thread
    thread.close()


async def test_values_and_errors_come_back_and_threads_are_used_again() -> None:
    threads = BoundedThreads(2, "test")
    names = set()
    for i in range(10):
        outcome = await threads.run(lambda i=i: (i, threading.get_ident()), 10)  # type: ignore[misc]
        assert outcome.value[0] == i
        names.add(outcome.value[1])
    assert len(names) == 1 and threading.get_ident() not in names
    for raises in (lambda: 1 / 0, lambda: sys.exit(3), lambda: next(iter(()))):
        outcome = await threads.run(raises, 10)
        assert isinstance(outcome.error, ZeroDivisionError | SystemExit | StopIteration)
    threads.close()
    with pytest.raises(RewardError, match="closed"):
        await threads.run(int, 1)


async def test_no_more_than_the_limit_at_once() -> None:
    threads = BoundedThreads(3, "test")
    lock, running, most = threading.Lock(), 0, 0
    full = threading.Barrier(3)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(timeout=30)  # three do run at once
        with lock:
            running -= 1

    outcomes = await asyncio.gather(*(threads.run(work, 60) for _ in range(12)))
    assert all(outcome.error is None for outcome in outcomes)
    assert most == 3
    threads.close()


async def test_a_hanging_call_frees_its_slot(release: threading.Event) -> None:
    threads = BoundedThreads(1, "hanging")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await threads.run(release.wait, 0.01)
    assert threads.lost == 3
    assert (await threads.run(lambda: "fine", 10)).value == "fine"
    release.set()
    threads.close()
    for thread in threading.enumerate():
        if thread.name == "hanging":
            await asyncio.to_thread(thread.join, 30)
    assert threads.lost == 0


async def test_a_cancelled_call_frees_its_slot(release: threading.Event) -> None:
    threads = BoundedThreads(1, "test")
    started = threading.Event()

    def hang() -> None:
        started.set()
        release.wait()

    task = asyncio.create_task(threads.run(hang, 60))
    assert await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await threads.run(lambda: "fine", 10)).value == "fine"
    threads.close()


async def test_too_many_hanging_calls_are_refused(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_LOST", 2)
    threads = BoundedThreads(4, "test")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await threads.run(release.wait, 0.01)
    with pytest.raises(RewardError, match="2 earlier calls still hang"):
        await threads.run(int, 1)
    threads.close()


async def test_async_functions_run_on_another_loop(loop_thread: LoopThread) -> None:
    here = asyncio.get_running_loop()

    async def where() -> tuple[bool, int]:
        await asyncio.sleep(0)
        return asyncio.get_running_loop() is here, threading.get_ident()

    outcomes = await asyncio.gather(*(loop_thread.run(where, 10) for _ in range(8)))
    assert {outcome.value for outcome in outcomes} == {(False, outcomes[0].value[1])}

    async def exits() -> None:
        sys.exit(3)

    async def cancels() -> None:
        raise asyncio.CancelledError

    assert isinstance((await loop_thread.run(exits, 10)).error, SystemExit)
    assert isinstance((await loop_thread.run(cancels, 10)).error, asyncio.CancelledError)
    assert (await loop_thread.run(where, 10)).error is None


async def test_an_async_call_is_cancelled_at_its_timeout(loop_thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        await loop_thread.run(forever, 0.01)
    assert await asyncio.to_thread(cancelled.wait, 30)
    assert loop_thread._replaced == 0


async def test_a_blocked_loop_is_replaced_and_this_one_goes_on(
    loop_thread: LoopThread, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "STUCK_AFTER", 0.05)

    async def block() -> None:
        release.wait()

    async def fine() -> str:
        return "fine"

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    with pytest.raises(TimeoutError):
        await loop_thread.run(block, 0.02)
    ticking.cancel()
    assert ticks > 10
    assert (await loop_thread.run(fine, 10)).value == "fine"


async def test_a_closed_loop_takes_no_calls(loop_thread: LoopThread) -> None:
    stopped = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    task = asyncio.create_task(loop_thread.run(forever, 60))
    await asyncio.sleep(0)
    loop_thread.close()
    with pytest.raises(RewardError, match="closed"):
        await loop_thread.run(forever, 1)
    assert isinstance((await task).error, asyncio.CancelledError)
    assert stopped.is_set()


def test_hanging_calls_do_not_keep_the_interpreter() -> None:
    script = """
import asyncio, threading
from rollstream.reward.calls import BoundedThreads, LoopThread

async def block():
    threading.Event().wait()

async def main():
    hang = threading.Event().wait
    for call in (BoundedThreads(1, "a").run(hang, 0.01), LoopThread(1, "b").run(block, 0.01)):
        try:
            await call
        except TimeoutError:
            print("timeout")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "timeout\ntimeout\n"
    assert done.stderr == ""


async def test_a_loop_that_is_gone_is_no_trouble(release: threading.Event) -> None:
    """A call whose event loop has closed meanwhile ends without a word."""
    threads = BoundedThreads(1, "test")

    def elsewhere() -> None:
        async def main() -> None:
            with contextlib.suppress(TimeoutError):
                await BoundedThreads(1, "other").run(release.wait, 0.01)

        asyncio.run(main())

    assert (await threads.run(elsewhere, 30)).error is None
    release.set()
    threads.close()
