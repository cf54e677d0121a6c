"""The few asyncio helpers that several rooms need."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def finish_despite_cancellation(work: Coroutine[Any, Any, _T]) -> _T:
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
