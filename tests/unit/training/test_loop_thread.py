import asyncio
import threading

import pytest

from rollstream.errors import GenerationStoppedError, TrainingError
from rollstream.training.loop_thread import LoopThread


def thread() -> tuple[LoopThread, list[BaseException | None], threading.Event]:
    ends: list[BaseException | None] = []
    ended = threading.Event()

    def on_end(error: BaseException | None) -> None:
        ends.append(error)
        ended.set()

    return LoopThread("the test's thread", on_end=on_end), ends, ended


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_stop_is_no_error() -> None:
    one, ends, _ = thread()
    assert one.describe() == "the test's thread was never started"
    assert one.stop(1.0)
    one, ends, _ = thread()
    one.start(forever)
    assert one.describe() == "the test's thread is well"
    assert one.stop(10.0)
    assert ends == [None]
    assert one.describe() == "the test's thread has ended"
    with pytest.raises(GenerationStoppedError):
        one.submit(asyncio.sleep(0))
    one.call_soon(lambda: None)  # nothing
    with pytest.raises(TrainingError, match="started before"):
        one.start(forever)


def test_every_other_end_is_heard_of() -> None:
    async def raises() -> None:
        raise KeyError("x")

    async def returns() -> None:
        return None

    async def stops_the_loop() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(10)

    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    for main, kind in (
        (raises, KeyError),
        (returns, TrainingError),
        (stops_the_loop, RuntimeError),
        (cancels_itself, asyncio.CancelledError),
    ):
        one, ends, ended = thread()
        one.start(main)
        assert ended.wait(10)
        assert isinstance(ends[0], kind)


def test_work_beside_it() -> None:
    one, _, _ = thread()
    one.start(forever)

    async def answer() -> int:
        return 42

    assert one.submit(answer()).result(10) == 42
    hanging = one.submit(forever())
    assert one.stop(10.0)
    assert hanging.cancelled() or hanging.done()


def test_a_stop_that_is_ignored_is_bounded() -> None:
    release = threading.Event()

    async def blocks() -> None:
        release.wait()

    one, _, _ = thread()
    one.start(blocks)
    try:
        assert one.stop(0.1) is False
        assert one.alive
    finally:
        release.set()
    assert one.stop(10.0)
