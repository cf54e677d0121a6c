"""The progress line: pure parts."""

import asyncio
import contextlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.generation.progress import (
    ProgressConsole,
    RateMeter,
    Snapshot,
    format_duration,
    format_line,
    show_progress,
)


def snapshot(**changes: object) -> Snapshot:
    values = {
        "total": 100,
        "done": 40,
        "failed": 10,
        "in_flight": 8,
        "pending_rows": 3,
        "saved_batches": 2,
        "tokens": 999,
        "mean_reward": 0.25,
    }
    return Snapshot(**{**values, **changes})  # type: ignore[arg-type]


def test_line_says_everything() -> None:
    assert format_line(snapshot(), 10.0, 1234.0) == (
        "40/100 40% | 10.0/s | 1,234 tok/s | saved batches 2 | pending 3 | in flight 8 | failed 10 | "
        "mean reward 0.250 | ETA 5s"
    )
    assert "WAITING FOR THE ENGINE" in format_line(snapshot(waiting=True), 0.0, 0.0)
    assert "mean reward - | ETA -" in format_line(snapshot(mean_reward=None), 0.0, 0.0)
    assert "| in flight 8 (cap 9) |" in format_line(snapshot(cap=9), 1.0, 1.0)
    assert "replicas 3/4 | mean" in format_line(snapshot(replicas=(3, 4)), 1.0, 1.0)
    assert "rep" not in format_line(snapshot(replicas=(1, 1)), 1.0, 1.0)
    assert "retries 2 | unscored 1" in format_line(snapshot(retries=2, unscored=1), 1.0, 1.0)


def test_share_is_of_what_is_done() -> None:
    assert format_line(snapshot(done=0, failed=100), 1.0, 1.0).startswith("0/100 0% |")
    assert format_line(snapshot(done=0, failed=100), 1.0, 1.0).endswith("ETA 0s")
    assert format_line(snapshot(done=999, failed=0, total=1000), 1.0, 1.0).startswith("999/1000 99% |")
    assert format_line(snapshot(done=0, failed=0, total=0), 1.0, 1.0).startswith("0/0 |")


def test_line_fits_the_console() -> None:
    big = snapshot(
        total=1000000, done=123456, in_flight=256, pending_rows=998, retries=7, unscored=3, replicas=(1, 8)
    )
    for width in range(1, 200):
        assert len(format_line(big, 123.4, 98765.4, width)) <= width
    assert format_line(snapshot(), 10.0, 1234.0, 200) == format_line(snapshot(), 10.0, 1234.0)
    assert format_line(snapshot(), 10.0, 1234.0, 79) == (
        "40/100 40% | 10.0/s | 1.2k tok/s | fly 8 | fail 10 | reward 0.250 | ETA 5s"
    )
    narrow = format_line(snapshot(waiting=True), 0.0, 0.0, 24)
    assert narrow == "40/100 40% | NO ENGINE"


async def test_a_progress_line_on_a_terminal_ends_before_what_is_said() -> None:
    file = io.StringIO()
    console = ProgressConsole(file=file, force_terminal=True, width=60)
    shown = asyncio.ensure_future(show_progress(snapshot, console))
    while console.live is None:
        await asyncio.sleep(0)
    words = "resume with: " + "long " * 40
    console.say(words)
    shown.cancel()
    await asyncio.gather(shown, return_exceptions=True)
    assert file.getvalue().endswith(words + "\n")


async def test_a_console_that_takes_nothing_stops_no_run() -> None:
    with open("/dev/full", "w") as full:  # noqa: ASYNC230, PTH123
        shown = asyncio.ensure_future(show_progress(snapshot, ProgressConsole(file=full)))
        await asyncio.sleep(0)
        shown.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shown
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90000, "1d01h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.lists(st.tuples(st.floats(0.1, 20), st.integers(0, 50)), min_size=2, max_size=60))
def test_rates_are_those_of_the_window(steps: list[tuple[float, int]]) -> None:
    meter = RateMeter(window=30.0)
    now, done, points = 0.0, 0, []
    for pause, more in steps:
        now, done = now + pause, done + more
        meter.observe(now, done, 10 * done)
        points.append((now, done))
    inside = [point for point in points if point[0] > now - 30.0]
    before = [point for point in points if point[0] <= now - 30.0][-1:]
    first = (before or inside)[0]
    rate, tokens = meter.rates()
    expected = (done - first[1]) / (now - first[0]) if now > first[0] else 0.0
    assert rate == pytest.approx(expected)
    assert tokens == pytest.approx(10 * expected)
