"""Calls of the user's functions, plain and async, that hang, raise what they like, or are cancelled."""

import asyncio
import contextlib
import contextvars
import functools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rollstream import user_calls as module
from rollstream.errors import TransientError
from rollstream.user_calls import CallsRefusedError, UserCalls
from tests.support.until import until

FAR = 60.0
"""Seconds; more than any of this takes."""


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """What hanging threads wait for."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def calls(let_go: threading.Event) -> AsyncIterator[UserCalls]:
    calls = UserCalls("tool")
    yield calls
    let_go.set()
    await until(lambda: not calls.lost)
    calls.close()


async def in_the_loop() -> str:
    return threading.current_thread().name


class Callable:
    async def __call__(self) -> str:
        return threading.current_thread().name


async def test_plain_functions_run_in_threads_and_async_ones_do_not(calls: UserCalls) -> None:
    thread = (await calls.run(functools.partial(threading.current_thread), name="it", seconds=FAR)).value
    assert thread.daemon and thread.name == "rollstream-tool"
    for function in (in_the_loop, functools.partial(in_the_loop), Callable(), lambda: in_the_loop()):
        assert (await calls.run(function, name="it", seconds=FAR, read=str.lower)).value == "mainthread"


async def test_context_variables_reach_the_thread(calls: UserCalls) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(5)
    assert (await calls.run(variable.get, name="it", seconds=FAR)).value == 5


def raises(error: BaseException) -> None:
    raise error


async def raises_later(error: BaseException) -> None:
    raise error


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(FAR)


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
)
async def test_whatever_is_raised_is_an_outcome(calls: UserCalls, error: BaseException) -> None:
    for function in (raises, raises_later):
        assert (await calls.run(functools.partial(function, error), name="it", seconds=FAR)).error is error
        reading = await calls.run(lambda: 1, name="it", seconds=FAR, read=lambda _: raises(error))
        assert reading.error is error
    assert isinstance((await calls.run(cancels_itself, name="it", seconds=FAR)).error, asyncio.CancelledError)
    assert (await calls.run(lambda: 1, name="it", seconds=FAR)).value == 1


async def test_a_hanging_thread_gives_up_its_slot(
    calls: UserCalls, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    for lost in (1, 2):
        assert (await calls.run(let_go.wait, name="it", seconds=0.01)).timed_out
        assert calls.lost == lost
    assert (await calls.run(lambda: 1, name="it", seconds=FAR)).value == 1


async def test_a_function_that_hangs_too_often_is_refused_alone(
    calls: UserCalls, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 2)
    monkeypatch.setattr(module, "THREADS", 2)
    outcomes = await asyncio.gather(*(calls.run(let_go.wait, name="a", seconds=0.01) for _ in range(10)))
    assert sum(outcome.timed_out for outcome in outcomes) <= 3  # of which one began before the second ended
    for function in (lambda: 1, in_the_loop, lambda: in_the_loop()):
        refused = (await calls.run(function, name="a", seconds=FAR)).error
        assert isinstance(refused, CallsRefusedError) and "earlier calls still hang" in str(refused)
        assert (await calls.run(function, name="b", seconds=FAR)).error is None
    let_go.set()
    await until(lambda: not calls.lost)
    assert (await calls.run(lambda: 1, name="a", seconds=FAR)).value == 1


async def test_functions_of_other_names_do_not_wait(
    calls: UserCalls, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    running = asyncio.create_task(calls.run(let_go.wait, name="it", seconds=FAR))
    assert (await calls.run(lambda: 1, name="it.release", seconds=FAR)).value == 1
    assert not running.done()
    let_go.set()
    assert (await running).value is True


async def test_waiting_for_a_thread_is_not_the_calls_time(
    calls: UserCalls, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    running = asyncio.create_task(calls.run(let_go.wait, name="it", seconds=FAR))
    waiting = asyncio.create_task(calls.run(lambda: 1, name="it", seconds=1.0))
    assert (await calls.run(asyncio.Event().wait, name="other", seconds=1.2)).timed_out
    assert not waiting.done()  # had its time begun, it would be over
    let_go.set()
    assert (await waiting).value == 1
    await running


@pytest.mark.parametrize("plain", [True, False])
async def test_cancelling_the_caller_cancels_what_is_async(
    calls: UserCalls, let_go: threading.Event, plain: bool
) -> None:
    began = threading.Event()
    ended = []

    def hangs() -> None:
        began.set()
        let_go.wait()

    async def hangs_in_the_loop() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = asyncio.create_task(calls.run(hangs if plain else hangs_in_the_loop, name="it", seconds=FAR))
    await until(began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ([] if plain else [True])
    assert calls.lost == int(plain)


@pytest.mark.parametrize("cancellations", [0, 1, 2])
async def test_a_task_that_ignores_its_cancellation_is_left_behind(
    calls: UserCalls, cancellations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the caller is cancelled again, and waits for it no longer."""
    monkeypatch.setattr(module, "CANCEL_GRACE", 0.1)
    began, end = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        began.set()
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    running = asyncio.create_task(calls.run(stubborn, name="it", seconds=FAR if cancellations else 0.01))
    await began.wait()
    for _ in range(cancellations):
        running.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({running})
    assert running.cancelled() if cancellations else running.result().timed_out
    assert calls.lost == 1
    end.set()


async def test_closed_calls_nothing() -> None:
    calls = UserCalls("tool")
    await calls.run(lambda: 1, name="it", seconds=FAR)
    calls.close()
    calls.close()
    for function in (lambda: 1, in_the_loop):
        with pytest.raises(TransientError, match="the tools are closed"):
            await calls.run(function, name="it", seconds=FAR)


def test_a_hanging_thread_does_not_hold_up_the_exit() -> None:
    code = (
        "import asyncio, time\n"
        "from rollstream.user_calls import UserCalls\n"
        "async def main():\n"
        "    print((await UserCalls('x').run(lambda: time.sleep(3600), name='it', seconds=0.01)).timed_out)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=FAR)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


@pytest.fixture
async def own_loop(let_go: threading.Event) -> AsyncIterator[UserCalls]:
    calls = UserCalls("reward", limit=4, own_loop=True)
    yield calls
    let_go.set()
    await until(lambda: not calls.lost)
    calls.close()


async def test_async_functions_may_have_a_loop_of_their_own(own_loop: UserCalls) -> None:
    functions: list[Any] = [in_the_loop, functools.partial(in_the_loop), Callable(), lambda: in_the_loop()]
    for function in functions:
        ran = await own_loop.run(function, name="it", seconds=FAR, read=str.lower)
        assert ran.value == "rollstream-reward-loop"
    for error in (SystemExit(3), KeyboardInterrupt()):
        caught = (await own_loop.run(functools.partial(raises_later, error), name="it", seconds=FAR)).error
        assert type(caught) is type(error)


async def test_a_blocked_loop_is_left_behind_and_replaced(
    own_loop: UserCalls, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCKED_AFTER", 0.05)
    monkeypatch.setattr(module, "MAX_LOST", 2)

    async def block() -> None:
        let_go.wait()

    for lost in (1, 2):
        assert (await own_loop.run(block, name="it", seconds=0.01)).timed_out
        assert own_loop.lost == lost
    assert isinstance((await own_loop.run(block, name="it", seconds=FAR)).error, CallsRefusedError)
    assert (await own_loop.run(in_the_loop, name="other", seconds=FAR)).value == "rollstream-reward-loop"
    let_go.set()
    await until(lambda: not own_loop.lost)
    assert (await own_loop.run(block, name="it", seconds=FAR)).error is None


async def test_what_runs_on_its_own_loop_is_cancelled_in_time_and_at_the_end(own_loop: UserCalls) -> None:
    began, ended = threading.Semaphore(0), threading.Semaphore(0)

    async def forever() -> None:
        try:
            began.release()
            await asyncio.Event().wait()
        finally:
            ended.release()

    assert (await own_loop.run(forever, name="it", seconds=0.01)).timed_out
    assert await asyncio.to_thread(ended.acquire, timeout=FAR) and not own_loop.lost
    assert await asyncio.to_thread(began.acquire, timeout=FAR)
    running = asyncio.create_task(own_loop.run(forever, name="it", seconds=FAR))
    assert await asyncio.to_thread(began.acquire, timeout=FAR)
    own_loop.close()
    assert isinstance((await running).error, asyncio.CancelledError)
    assert await asyncio.to_thread(ended.acquire, timeout=FAR)
