"""The progress line: pure parts."""

import asyncio
import contextlib
import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.generation.progress import (
    ProgressConsole,
    RateMeter,
    RunProgress,
    Waits,
    format_line,
    show_progress,
)
from tests.support.until import until


def snapshot(**changes: object) -> RunProgress:
    values = {
        "total": 100,
        "done": 40,
        "failed": 10,
        "in_flight": 8,
        "unsealed_rows": 3,
        "saved_batches": 2,
        "tokens": 999,
        "mean_reward": 0.25,
    }
    return RunProgress(**{**values, **changes})  # type: ignore[arg-type]


def line(rates: tuple[float, float] = (10.0, 1234.0), **changes: object) -> str:
    return format_line(snapshot(**changes), *rates, 754.0)


def test_line_says_everything() -> None:
    assert line() == (
        " 40%|████      | 40/100 [12m34s<5s, 10.0/s] | 1,234 tok/s | saved batches 2 | pending 42 | "
        "in flight 8 | failed 10 | mean reward 0.250"
    )
    assert line(waiting=True).endswith(" | WAITING FOR THE ENGINE")
    assert "[12m34s<-, 0.0/s]" in line(rates=(0.0, 0.0))
    assert line(mean_reward=None).endswith("mean reward -")
    assert "| in flight 8 (cap 9) |" in line(cap=9)
    assert "replicas 3/4 | mean" in line(replicas=(3, 4))
    assert "rep" not in line(replicas=(1, 1))
    assert "retries 2 | reward failed 1" in line(retries=2, reward_failed=1)


async def test_waits_are_said_when_they_take_long(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    with caplog.at_level(logging.INFO, "rollstream"), Waits([0.01, 20.0], clock=lambda: now) as waits:
        waits.begin("loading the tokenizer")
        now = 5.0
        await until(lambda: len(caplog.records) == 1)
        now = 30.0
        await until(lambda: len(caplog.records) == 2)
        waits.begin(None)
        now = 35.0
        waits.begin("merging")
        now = 40.0
        await until(lambda: len(caplog.records) == 3)
    assert [record.getMessage() for record in caplog.records] == [
        "loading the tokenizer … 5s",
        "loading the tokenizer … 30s",
        "merging … 5s",
    ]


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
