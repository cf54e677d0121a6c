"""The few asyncio helpers that several rooms need."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def finish_despite_cancellation(work: Awaitable[_T]) -> _T:
    """Awaits `work`. Cancelling this lets `work` go on, and is raised when it has ended, whatever came of it.

    `work` must have a bound of its own.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise cancelled
    return task.result()


async def any_true(checks: Iterable[Coroutine[Any, Any, bool]]) -> bool:
    """Whether one of several checks says yes; the others are cancelled as soon as one does."""
    tasks = [asyncio.ensure_future(check) for check in checks]
    try:
        for task in asyncio.as_completed(tasks):
            if await task:
                return True
        return False
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SharedCheck:
    """A check that all who ask at the same time share: when a server goes, all its requests want to know.

    Args:
        check: must have a bound of its own.
    """

    def __init__(self, check: Callable[[], Awaitable[bool]]) -> None:
        self._check = check
        self._task: asyncio.Future[bool] | None = None

    async def ask(self) -> bool:
        """The check's result; False when `close` ended it."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._check())
        task = self._task
        await asyncio.wait((task,))
        return not task.cancelled() and task.result()

    async def close(self) -> None:
        """Ends a check that is running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Backoff:
    """Pauses that double from `first` to `longest`. Decides; owns no task and no clock."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = max(first, longest)
        self._next = first
        self.failures = 0
        """In a row: pauses since the last `reset`."""

    def pause(self) -> float:
        """Seconds to wait before the next try."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        self.failures += 1
        return pause

    def reset(self) -> None:
        """It went well: the next pause is the first again."""
        self._next, self.failures = self._first, 0


class Restarts:
    """When something that ended is started again: pauses that double while it keeps ending soon.

    Args:
        first: seconds before the first restart.
        longest: seconds between restarts at most.
        most_failures: starts in a row that may fail.
    """

    served_well_s = 10.0
    """A process that ran this long did not break because of its configuration or of a request: it is started
    again with the first pause."""

    def __init__(self, *, first: float, longest: float, most_failures: int) -> None:
        self._backoff = Backoff(first, longest)
        self._most_failures = most_failures
        self.failures = 0
        """Failed starts in a row."""

    def after_serving(self, seconds: float) -> float:
        """It served for so long, and ended: seconds to wait."""
        self.failures = 0
        if seconds >= self.served_well_s:
            self._backoff.reset()
        return self._backoff.pause()

    def after_failed_start(self) -> float | None:
        """It never served: seconds to wait; None when it is to be given up."""
        self.failures += 1
        return None if self.failures > self._most_failures else self._backoff.pause()
