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


def test_a_stop_that_comes_first_keeps_it_from_beginning() -> None:
    one, ends, _ = thread()
    assert one.stop(1.0)
    with pytest.raises(GenerationStoppedError, match="before it began"):
        one.start(forever)
    assert not one.alive and ends == []


@pytest.mark.parametrize("fails", [True, False])
def test_stops_do_not_cut_off_how_it_cleans_up(fails: bool) -> None:
    one, _, _ = thread()
    cleaning, cleaned = threading.Event(), threading.Event()

    async def main() -> None:
        try:
            if fails:
                raise KeyError("x")
            await forever()
        finally:
            one.leave_alone()
            cleaning.set()
            await asyncio.sleep(0.5)
            cleaned.set()

    one.start(main)
    if not fails:
        one.stop(0.0)
    assert cleaning.wait(20)
    one.stop(0.0)
    assert one.stop(20) and cleaned.is_set()


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
