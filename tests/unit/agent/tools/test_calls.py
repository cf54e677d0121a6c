import asyncio
import contextlib
import contextvars
import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollstream.agent.tools import calls as module
from rollstream.agent.tools.calls import Calls, CallsRefusedError
from rollstream.errors import TransientError

FAR = 60.0
"""Seconds; more than any of this takes."""


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """What hanging threads wait for."""
    event = threading.Event()
    yield event
    event.set()


async def settle(calls: Calls) -> None:
    async with asyncio.timeout(FAR):
        while calls.lost:
            await asyncio.sleep(0.001)


def later(value: Any) -> Any:
    async def give() -> Any:
        return value

    return give()


class Callable:
    async def __call__(self) -> str:
        return threading.current_thread().name


async def in_the_loop() -> str:
    return threading.current_thread().name


async def test_plain_functions_run_in_threads_and_async_ones_do_not() -> None:
    calls = Calls()
    where = functools.partial(lambda: threading.current_thread())
    thread = (await calls.run(where, name="it", seconds=FAR)).value
    assert thread.daemon and thread.name == "rollstream-tool"
    for function in (in_the_loop, functools.partial(in_the_loop), Callable(), lambda: in_the_loop()):
        assert (await calls.run(function, name="it", seconds=FAR)).value == "MainThread"
    outcome = await calls.run(functools.partial(later, 3), name="it", seconds=FAR, read=str)
    assert outcome.value == "3"
    calls.close()


async def test_context_variables_reach_the_thread() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(5)
    calls = Calls()
    assert (await calls.run(variable.get, name="it", seconds=FAR)).value == 5
    calls.close()


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
async def test_whatever_is_raised_is_an_outcome(error: BaseException) -> None:
    calls = Calls()
    for function in (raises, raises_later):
        assert (await calls.run(functools.partial(function, error), name="it", seconds=FAR)).error is error
        reading = await calls.run(lambda: 1, name="it", seconds=FAR, read=lambda _: raises(error))
        assert reading.error is error
    assert isinstance((await calls.run(cancels_itself, name="it", seconds=FAR)).error, asyncio.CancelledError)
    assert (await calls.run(lambda: 1, name="it", seconds=FAR)).value == 1
    calls.close()


async def test_a_hanging_thread_gives_up_its_place(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    calls = Calls()
    for lost in (1, 2):
        assert (await calls.run(let_go.wait, name="it", seconds=0.01)).timed_out
        assert calls.lost == lost
    assert (await calls.run(lambda: 1, name="it", seconds=FAR)).value == 1
    let_go.set()
    await settle(calls)
    calls.close()


async def test_too_many_that_hang_are_said(let_go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 2)
    monkeypatch.setattr(module, "THREADS", 2)
    calls = Calls()
    outcomes = await asyncio.gather(*(calls.run(let_go.wait, name="it", seconds=0.01) for _ in range(10)))
    assert sum(outcome.timed_out for outcome in outcomes) <= 3  # of which one began before the second ended
    for function in (lambda: 1, in_the_loop, lambda: in_the_loop()):
        refused = await calls.run(function, name="it", seconds=FAR)
        assert isinstance(refused.error, CallsRefusedError) and "still hang" in str(refused.error)
    let_go.set()
    await settle(calls)
    assert (await calls.run(lambda: 1, name="it", seconds=FAR)).value == 1
    calls.close()


async def test_only_the_name_that_hangs_is_refused(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 1)
    monkeypatch.setattr(module, "MAX_LOST_IN_ALL", 2)
    calls = Calls()
    assert (await calls.run(let_go.wait, name="a", seconds=0.01)).timed_out
    for function in (lambda: 1, in_the_loop):
        refused = (await calls.run(function, name="a", seconds=FAR)).error
        assert isinstance(refused, CallsRefusedError) and str(refused).startswith("a: 1 earlier calls still")
        assert (await calls.run(function, name="b", seconds=FAR)).error is None
    let_go.set()
    await settle(calls)
    assert (await calls.run(lambda: 1, name="a", seconds=FAR)).value == 1
    calls.close()


async def test_when_many_names_hang_none_has_an_outcome(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 1)
    monkeypatch.setattr(module, "MAX_LOST_IN_ALL", 2)
    calls = Calls()
    for name in ("a", "b"):
        assert (await calls.run(let_go.wait, name=name, seconds=0.01)).timed_out
    for function in (lambda: 1, in_the_loop):
        with pytest.raises(TransientError, match="earlier calls hang: 1 of a, 1 of b"):
            await calls.run(function, name="c", seconds=FAR)
        assert (await calls.run(function, name="c", seconds=FAR, ends=True)).error is None
    let_go.set()
    await settle(calls)
    assert (await calls.run(lambda: 1, name="c", seconds=FAR)).value == 1
    calls.close()


async def test_calls_of_one_name_made_at_once_do_not_stop_the_others(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 1)
    monkeypatch.setattr(module, "MAX_LOST_IN_ALL", 2)
    calls = Calls()
    await asyncio.gather(*(calls.run(let_go.wait, name="a", seconds=0.5) for _ in range(10)))
    assert calls.lost > 2
    assert (await calls.run(lambda: 1, name="b", seconds=FAR)).value == 1
    let_go.set()
    await settle(calls)
    calls.close()


async def test_ends_wait_for_ends_alone(let_go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    monkeypatch.setattr(module, "MAX_LOST", 1)
    monkeypatch.setattr(module, "MAX_LOST_ENDS", 2)
    calls = Calls()
    began = threading.Event()

    def hangs() -> None:
        began.set()
        let_go.wait()

    running = asyncio.create_task(calls.run(hangs, name="it", seconds=FAR))
    while not began.is_set():
        await asyncio.sleep(0.001)
    assert (await calls.run(lambda: 1, name="it", seconds=FAR, ends=True)).value == 1
    running.cancel()
    await asyncio.wait({running})
    for _ in range(2):  # they are bounded, too, each name by itself
        assert (await calls.run(let_go.wait, name="it", seconds=0.01, ends=True)).timed_out
    for function in (lambda: 1, in_the_loop):
        refused = await calls.run(function, name="it", seconds=FAR, ends=True)
        assert isinstance(refused.error, CallsRefusedError)
        assert (await calls.run(function, name="other", seconds=FAR, ends=True)).error is None
        assert (await calls.run(function, name="it", seconds=FAR)).error is None
    let_go.set()
    await settle(calls)
    calls.close()


async def test_what_is_cancelled_is_not_lost_before_its_time(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 1)
    monkeypatch.setattr(module, "CANCEL_GRACE", FAR)
    calls = Calls()
    callers: list[asyncio.Task[Any]] = []
    begun, clean, cleaning = asyncio.Queue[None](), asyncio.Event(), asyncio.Queue[None]()

    async def cleans_up() -> None:
        begun.put_nowait(None)
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.put_nowait(None)
            await clean.wait()

    loop = asyncio.get_running_loop()

    def works() -> None:
        loop.call_soon_threadsafe(begun.put_nowait, None)
        let_go.wait()

    for function, name in [(cleans_up, "async"), (works, "plain")]:
        running = [asyncio.create_task(calls.run(function, name=name, seconds=FAR)) for _ in range(10)]
        for _ in running:
            await begun.get()
        for task in running:
            task.cancel()
        callers += running
    for _ in range(10):
        await cleaning.get()
    assert calls.lost == 0
    for name in ("async", "plain"):
        assert (await calls.run(lambda: 1, name=name, seconds=FAR)).value == 1
    clean.set()
    await asyncio.wait(callers)
    assert all(caller.cancelled() for caller in callers)
    calls.close()


@pytest.mark.parametrize("plain", [True, False])
async def test_what_is_cancelled_and_does_not_end_is_lost_in_the_end(
    let_go: threading.Event, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the caller is cancelled again, and waits for it no longer."""
    monkeypatch.setattr(module, "CANCEL_GRACE", 0.3)
    calls = Calls()
    began, end = threading.Event(), asyncio.Event()

    def hangs() -> None:
        began.set()
        let_go.wait()

    async def stubborn() -> None:
        began.set()
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    running = asyncio.create_task(calls.run(hangs if plain else stubborn, name="it", seconds=0.5))
    while not began.is_set():
        await asyncio.sleep(0.001)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({running})
    assert running.cancelled()
    async with asyncio.timeout(FAR):
        while not calls.lost:
            await asyncio.sleep(0.001)
    let_go.set()
    end.set()
    await settle(calls)
    calls.close()


async def test_waiting_for_a_thread_is_not_the_calls_time(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    calls = Calls()
    began = threading.Event()

    def first() -> None:
        began.set()
        let_go.wait()

    running = asyncio.create_task(calls.run(first, name="it", seconds=FAR))
    while not began.is_set():
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(calls.run(lambda: 1, name="it", seconds=1.0))
    await asyncio.sleep(0)  # it waits
    assert (await calls.run(asyncio.Event().wait, name="it", seconds=1.0)).timed_out
    assert not waiting.done()  # had its time begun, it would be over
    let_go.set()
    assert (await waiting).value == 1
    await running
    calls.close()


async def test_a_task_that_ignores_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANCEL_GRACE", 0.01)
    calls = Calls()
    end = asyncio.Event()

    async def stubborn() -> None:
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue

    assert (await calls.run(stubborn, name="it", seconds=0.01)).timed_out
    assert calls.lost == 1
    end.set()
    await settle(calls)
    calls.close()


@pytest.mark.parametrize("plain", [True, False])
async def test_cancelling_the_caller_passes_through(let_go: threading.Event, plain: bool) -> None:
    calls = Calls()
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
    while not began.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ([] if plain else [True])
    let_go.set()
    await settle(calls)
    calls.close()


async def test_closed() -> None:
    calls = Calls()
    await calls.run(lambda: 1, name="it", seconds=FAR)
    calls.close()
    calls.close()
    for function in (lambda: 1, in_the_loop):
        with pytest.raises(TransientError, match="the tools are closed"):
            await calls.run(function, name="it", seconds=FAR)
        ended = await calls.run(function, name="it", seconds=FAR, ends=True)
        assert isinstance(ended.error, CallsRefusedError) and "closed" in str(ended.error)


def test_a_hanging_thread_does_not_hold_up_the_exit() -> None:
    code = (
        "import asyncio, time\n"
        "from rollstream.agent.tools.calls import Calls\n"
        "async def main():\n"
        "    print((await Calls().run(lambda: time.sleep(3600), name='it', seconds=0.01)).timed_out)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=FAR)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
