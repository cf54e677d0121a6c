"""What a person sees while a run goes on: one line, in place on a terminal, now and then elsewhere."""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

logger = logging.getLogger(__name__)

_TERMINAL_EVERY_S = 0.25
_PLAIN_EVERY_S = 5.0
"""Between lines where the output is no terminal: readable in a log, still soon enough to see a stall."""

_BAR = 10
"""Columns of the bar."""

_SAID_AFTER_S = (2.0, 10.0, *(30.0 * count for count in range(1, 500)))
"""Seconds after which a wait is said, again and again."""

_RATE_WINDOW_S = 30.0
"""Rates are of the last half minute, so that the ETA follows what happens now."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How a run goes now. Counts of rollouts unless said otherwise."""

    total: int
    done: int
    """Durable, earlier runs included."""
    failed: int
    in_flight: int
    unsealed_rows: int
    """Durable rows that are in no batch yet."""
    saved_batches: int
    tokens: int
    """Sampled since this process started."""
    mean_reward: float | None
    waiting: bool = False
    """Work waits for an engine."""
    retries: int = 0
    reward_failed: int = 0
    """Completed rollouts that could not be scored."""
    cap: int | None = None
    """Rollouts in flight at most, where that is below `generation.max_in_flight` now."""
    limit: int | None = None
    """`generation.max_in_flight`."""
    replicas: tuple[int, int] | None = None
    """Replicas of the engine that are there, and all of them; None where it has none."""

    @property
    def pending(self) -> int:
        """Rollouts that have not begun."""
        return max(0, self.total - self.done - self.failed - self.in_flight)


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


def format_line(
    snapshot: RunProgress, rate: float, tokens_rate: float, elapsed: float, fill: str = "█"
) -> str:
    """The progress line.

    Args:
        snapshot: how the run goes.
        rate: rollouts per second.
        tokens_rate: sampled tokens per second.
        elapsed: seconds since rollouts began in this process.
        fill: what the bar is made of.
    """
    # Rounded down: 100% is said when all of it is done.
    share = snapshot.done / snapshot.total if snapshot.total else 0.0
    left = max(0, snapshot.total - snapshot.done - snapshot.failed)
    eta = format_duration(left / rate) if rate > 0 else "-" if left else "0s"
    reward = "-" if snapshot.mean_reward is None else f"{snapshot.mean_reward:.3f}"
    up, replicas = snapshot.replicas or (0, 0)
    parts = [
        f"{int(100 * share):3d}%|{(fill * int(share * _BAR)).ljust(_BAR)}|"
        f" {snapshot.done}/{snapshot.total} [{format_duration(elapsed)}<{eta}, {rate:.1f}/s]",
        f"{tokens_rate:,.0f} tok/s",
        f"saved batches {snapshot.saved_batches}",
        f"pending {snapshot.pending}",
        f"in flight {snapshot.in_flight}" + ("" if snapshot.cap is None else f" (cap {snapshot.cap})"),
        f"failed {snapshot.failed}",
        f"retries {snapshot.retries}" if snapshot.retries else "",
        f"reward failed {snapshot.reward_failed}" if snapshot.reward_failed else "",
        f"replicas {up}/{replicas}" if replicas > 1 else "",
        f"mean reward {reward}",
        "WAITING FOR THE ENGINE" if snapshot.waiting else "",
    ]
    return " | ".join(filter(None, parts))


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


async def show_progress(observe: Callable[[], RunProgress], console: Console) -> None:
    """Shows the line until cancelled, and once more then.

    A console that takes nothing (a log on a full disk) does not stop the run.
    """
    meter = RateMeter()
    started, began = observe(), time.monotonic()
    base = started.done + started.failed
    fill = "█" if console.encoding.lower().startswith("utf") else "#"
    meter.observe(began, 0, started.tokens)

    def line() -> Text:
        snapshot, now = observe(), time.monotonic()
        meter.observe(now, snapshot.done + snapshot.failed - base, snapshot.tokens)
        return Text(format_line(snapshot, *meter.rates(), now - began, fill))

    with ExitStack() as stack:
        if console.is_terminal:
            every = _TERMINAL_EVERY_S
            live = stack.enter_context(Live(line(), console=console, refresh_per_second=1 / every))
            if isinstance(console, ProgressConsole):
                console.live = live

            def show() -> None:
                live.update(line())
        else:
            every = _PLAIN_EVERY_S

            def show() -> None:
                with suppress(OSError):
                    console.print(line(), soft_wrap=True)

        try:
            while True:
                await asyncio.sleep(every)
                show()
        finally:
            show()


class Waits:
    """Says what a run waits for, once that takes longer than a person waits without asking.

    with Waits() as waits:
        waits.begin("loading the tokenizer")  # from any thread
    """

    def __init__(
        self, pauses: Sequence[float] = _SAID_AFTER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pauses, self._clock = pauses, clock
        self._what: str | None = None
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self, what: str | None) -> None:
        """What is waited for from now on; None for nothing."""
        self._began, self._what = self._clock(), what

    def __enter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._say(), name="waits")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _say(self) -> None:
        began, said = -1.0, 0
        while True:
            await asyncio.sleep(min(_TERMINAL_EVERY_S, self._pauses[0]))
            if self._began != began:
                began, said = self._began, 0
            waited = self._clock() - began
            due = sum(waited >= pause for pause in self._pauses)
            if self._what is not None and due > said:
                said = due
                logger.info("%s … %s", self._what, format_duration(waited))


class ProgressConsole(Console):
    """Standard error, and the progress line that may stand on it."""

    live: Live | None = None
    """The progress line, once it was shown."""

    def say(self, text: str) -> None:
        """Ends the progress line and writes lines below it, never wrapped: they can be copied."""
        if self.live is not None:
            self.live.stop()
        self.file.write(f"{text}\n")
        self.file.flush()


def progress_console() -> ProgressConsole:
    """Progress goes to standard error; standard output is for what a script would read."""
    return ProgressConsole(file=sys.stderr)
