"""The progress line: pure parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.generation.progress import RateMeter, Snapshot, format_duration, format_line


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
        "40/100 50% | 10.0/s | 1,234 tok/s | saved batches 2 | pending 3 | in flight 8 | failed 10 | "
        "mean reward 0.250 | ETA 5s"
    )
    assert "WAITING FOR THE ENGINE" in format_line(snapshot(waiting=True), 0.0, 0.0)
    assert "mean reward - | ETA -" in format_line(snapshot(mean_reward=None), 0.0, 0.0)
    assert "retries 2 | unscored 1" in format_line(snapshot(retries=2, unscored=1), 1.0, 1.0)


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
