import asyncio
import threading
from typing import Any

import pytest

from rollstream.errors import GenerationStoppedError, TrainingError
from rollstream.training.loop_thread import LoopThread
from tests.support.training import LONG_S


class Watched(LoopThread):
    """Notes how it ended."""

    def __init__(self) -> None:
        super().__init__("the test's thread", on_end=self.note)
        self.ended = threading.Event()
        self.end: BaseException | None = None

    def note(self, error: BaseException | None) -> None:
        self.end = error
        self.ended.set()


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_stop_is_no_error() -> None:
    one = Watched()
    assert one.describe() == "the test's thread was never started"
    one.start(forever)
    assert one.describe() == "the test's thread is well"
    with pytest.raises(TrainingError, match="started before"):
        one.start(forever)
    assert one.submit(asyncio.sleep(0, 42)).result(LONG_S) == 42
    hanging = one.submit(forever())
    assert one.stop(LONG_S)
    assert one.ended.is_set() and one.end is None
    assert one.describe() == "the test's thread has ended"
    assert hanging.done()
    with pytest.raises(GenerationStoppedError):
        one.submit(asyncio.sleep(0))
    one.call_soon(lambda: None)  # nothing


def test_a_stop_that_comes_first_keeps_it_from_beginning() -> None:
    one = Watched()
    assert one.stop(1.0)
    with pytest.raises(GenerationStoppedError, match="was stopped"):
        one.start(forever)
    assert not one.alive and not one.ended.is_set()


@pytest.mark.parametrize("fails", [True, False])
def test_stops_do_not_cut_off_how_it_cleans_up(fails: bool) -> None:
    one = Watched()
    cleaning, cleaned = threading.Event(), threading.Event()

    async def main() -> None:
        try:
            if fails:
                raise KeyError("x")
            await forever()
        finally:
            one.leave_alone()
            cleaning.set()
            await asyncio.sleep(0.2)
            cleaned.set()

    one.start(main)
    if not fails:
        one.stop(0.0)
    assert cleaning.wait(LONG_S)
    one.stop(0.0)
    assert one.stop(LONG_S) and cleaned.is_set()


async def raises() -> None:
    raise KeyError("x")


async def returns() -> None:
    return None


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await forever()


async def cancels_itself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        (raises, KeyError),
        (returns, TrainingError),
        (stops_the_loop, RuntimeError),
        (cancels_itself, asyncio.CancelledError),
    ],
)
def test_every_other_end_is_heard_of(main: Any, kind: type[BaseException]) -> None:
    one = Watched()
    one.start(main)
    assert one.ended.wait(LONG_S)
    assert isinstance(one.end, kind)


def test_a_stop_that_is_ignored_is_bounded() -> None:
    blocking, release = threading.Event(), threading.Event()

    async def blocks() -> None:
        blocking.set()
        release.wait()

    one = Watched()
    one.start(blocks)
    try:
        assert blocking.wait(LONG_S)
        assert one.stop(0.1) is False
        assert one.alive
    finally:
        release.set()
    assert one.stop(LONG_S)
