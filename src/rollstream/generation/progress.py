"""What a person sees while a run goes on: one line, in place on a terminal, now and then elsewhere."""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

logger = logging.getLogger(__name__)

_TERMINAL_EVERY_S = 0.25
_PLAIN_EVERY_S = 5.0
"""Between lines where the output is no terminal: readable in a log, still soon enough to see a stall."""

_RATE_WINDOW_S = 30.0
"""Rates are of the last half minute, so that the ETA follows what happens now."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the progress line shows. Counts of rollouts unless said otherwise."""

    total: int
    done: int
    """Durable, earlier runs included."""
    failed: int
    in_flight: int
    pending_rows: int
    """Durable rows that are in no batch yet."""
    saved_batches: int
    tokens: int
    """Sampled since this process started."""
    mean_reward: float | None
    waiting: bool = False
    """Work waits for an engine."""
    retries: int = 0
    unscored: int = 0
    """Completed rollouts whose reward function failed."""


class RateMeter:
    """Rates over a sliding window. Told times, owns no clock."""

    def __init__(self, window: float = _RATE_WINDOW_S) -> None:
        self._window = window
        self._points: deque[tuple[float, int, int]] = deque()

    def observe(self, now: float, finished: int, tokens: int) -> None:
        """Adds a point: rollouts finished and tokens sampled until `now` (seconds)."""
        self._points.append((now, finished, tokens))
        while len(self._points) > 2 and self._points[1][0] <= now - self._window:
            self._points.popleft()

    def rates(self) -> tuple[float, float]:
        """Rollouts per second and tokens per second."""
        if len(self._points) < 2:
            return 0.0, 0.0
        (start, finished, tokens), (end, finished_now, tokens_now) = self._points[0], self._points[-1]
        span = end - start
        return ((finished_now - finished) / span, (tokens_now - tokens) / span) if span > 0 else (0.0, 0.0)


def format_line(snapshot: Snapshot, rate: float, tokens_rate: float) -> str:
    """The progress line."""
    settled = snapshot.done + snapshot.failed
    share = f" {100 * settled / snapshot.total:.0f}%" if snapshot.total else ""
    parts = [
        f"{snapshot.done}/{snapshot.total}{share}",
        f"{rate:.1f}/s",
        f"{tokens_rate:,.0f} tok/s",
        f"saved batches {snapshot.saved_batches}",
        f"pending {snapshot.pending_rows}",
        f"in flight {snapshot.in_flight}",
        f"failed {snapshot.failed}",
    ]
    if snapshot.retries:
        parts.append(f"retries {snapshot.retries}")
    if snapshot.unscored:
        parts.append(f"unscored {snapshot.unscored}")
    reward = "-" if snapshot.mean_reward is None else f"{snapshot.mean_reward:.3f}"
    parts.append(f"mean reward {reward}")
    if snapshot.waiting:
        parts.append("WAITING FOR THE ENGINE")
    else:
        parts.append(f"ETA {format_duration((snapshot.total - settled) / rate) if rate > 0 else '-'}")
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """`45s`, `3m20s`, `2h05m`, `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


async def show_progress(observe: Callable[[], Snapshot], console: Console) -> None:
    """Shows the line until cancelled, and once more then."""
    meter = RateMeter()
    started = observe()
    base = started.done + started.failed

    def line() -> str:
        snapshot = observe()
        meter.observe(time.monotonic(), snapshot.done + snapshot.failed - base, snapshot.tokens)
        return format_line(snapshot, *meter.rates())

    meter.observe(time.monotonic(), 0, started.tokens)
    if console.is_terminal:
        with Live(Text(line()), console=console, refresh_per_second=1 / _TERMINAL_EVERY_S) as live:
            try:
                while True:
                    await asyncio.sleep(_TERMINAL_EVERY_S)
                    live.update(Text(line()))
            finally:
                live.update(Text(line()))
    else:
        try:
            while True:
                await asyncio.sleep(_PLAIN_EVERY_S)
                console.print(line(), highlight=False, markup=False, soft_wrap=True)
        finally:
            console.print(line(), highlight=False, markup=False, soft_wrap=True)


def progress_console() -> Console:
    """Progress goes to standard error; standard output is for what a script would read."""
    return Console(file=sys.stderr)
