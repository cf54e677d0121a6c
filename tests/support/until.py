"""Waiting for something to become true. A bound only ends what would wait for ever: no test measures time."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0
"""Seconds; more than anything takes that happens at all, also on a machine that does ten things at once."""


async def until(check: Callable[[], Any], seconds: float = PATIENCE_S, every: float = 0.01) -> Any:
    """What `check`, a coroutine function or not, gives, as soon as it is true."""
    async with asyncio.timeout(seconds):
        while True:
            found = check()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(every)


def wait_until(
    check: Callable[[], Any], what: str = "", seconds: float = PATIENCE_S, every: float = 0.01
) -> Any:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what or check}"
        time.sleep(every)
    return found
