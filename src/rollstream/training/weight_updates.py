"""Weight updates on their way to the engine: one after the other, however late one of them is.

update(1) --in time--> taken, or refused
          --too late--> an error; it goes on all the same: nobody can call back what a server was asked for
update(2) --> sent when update(1) has ended, so that version 1 never comes after version 2
          --update(1) does not end in time--> an error, and update(1) is cut off: the next one finds the way free

While no engine is there, an update waits for it: it is sent again and again, within the caller's time.
"""

import asyncio
import concurrent.futures
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rollstream.errors import WeightUpdateError
from rollstream.rollout.retry import RetryPolicy, find_unavailable

logger = logging.getLogger(__name__)

_AGAIN = RetryPolicy(max_attempts=1, delay=0.5, delay_max=5.0)
"""Waits for an engine that is away; its attempts do not count. Asking costs little, and an engine that is
back is kept waiting for no longer than this."""

_SAID_S = 1.0
"""For the cause of the last try, at the time limit, to be heard of before the limit itself is told."""


def load_within(
    submit: Callable[[Coroutine[Any, Any, None]], "concurrent.futures.Future[None]"],
    update: Callable[[], Awaitable[None]],
    version: int,
    timeout: float,
) -> None:
    """Sends weights from another thread than the engine's, and waits until it has them.

    Args:
        submit: runs a coroutine in the engine's event loop.
        update: sends the weights; again and again while no engine is there.
        version: of the weights.
        timeout: seconds.

    Raises:
        WeightUpdateError: they were refused, or no engine came (the cause is attached), or it took too long.
        Exception: what `submit` raises.
    """
    loading = submit(_until_taken(update, version, time.monotonic() + timeout))
    try:
        loading.result(timeout + _SAID_S)
    except WeightUpdateError:
        raise
    except Exception as error:
        if loading.done():
            waited = f" within {timeout:.1f} s" if find_unavailable(error) is not None else ""
            raise WeightUpdateError(
                f"the engine did not take version {version}{waited}: {type(error).__name__}: {error}"
            ) from error
        loading.cancel()
        raise WeightUpdateError(
            f"the engine has not taken version {version} within {timeout:.1f} s"
        ) from None


async def _until_taken(update: Callable[[], Awaitable[None]], version: int, until: float) -> None:
    waits, jitter = 0, random.Random()
    while True:
        try:
            return await update()
        except Exception as error:
            waits += 1
            wait = _AGAIN.wait(waits, jitter)
            if find_unavailable(error) is None or time.monotonic() + wait >= until:
                raise
            logger.warning(
                "no engine is there for weights of version %d (%s); they are sent again in %.1f s",
                *(version, error, wait),
            )
            await asyncio.sleep(wait)
            if time.monotonic() >= until:  # the loop was busy: the caller has given up
                raise


class WeightUpdates:
    """Sends weights, one update after the other; all calls in one event loop.

    Args:
        update: as `GroupGenerator.update_weights`.
    """

    def __init__(self, update: Callable[[str, int], Awaitable[None]]) -> None:
        self._update = update
        self._running: asyncio.Task[None] | None = None
        self._version = 0
        self._begun_at = 0.0

    async def send(self, source: str, version: int, timeout: float) -> None:
        """Returns when the engine has the weights.

        Raises:
            WeightUpdateError: it has not taken them within `timeout` seconds, or an earlier update has not
                ended by then.
            Exception: the engine's own.
        """
        until = time.monotonic() + timeout
        if self._running is not None and not await _done(self._running, until):
            if not self._running.cancelling():  # a second time would cut off how it cleans up
                self._running.cancel()
            raise WeightUpdateError(
                f"version {self._version} has been on its way to the engine for "
                f"{time.monotonic() - self._begun_at:.1f} s, which keeps back version {version}: it is cut "
                "off now, try again (and give weight_timeout more than the engine's own time limits)"
            )
        self._version, self._begun_at = version, time.monotonic()
        self._running = asyncio.ensure_future(self._update(source, version))
        self._running.add_done_callback(_see)
        if not await _done(self._running, until):
            raise WeightUpdateError(
                f"the engine has not taken version {version} within {timeout:.1f} s (weight_timeout); what it was "
                "sent may still come, and the next update waits for its end"
            )
        self._running.result()


async def _done(task: "asyncio.Task[None]", until: float) -> bool:
    await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
    return task.done()


def _see(task: "asyncio.Task[None]") -> None:
    """The end of an update that nobody waits for any more is no news."""
    if not task.cancelled():
        task.exception()
