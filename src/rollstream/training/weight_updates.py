"""Weight updates on their way to the engine: one after the other, however late one of them is.

update(1) --in time--> taken, or refused
          --too late--> an error; it goes on all the same: nobody can call back what a server was asked for
update(2) --> sent when update(1) has ended, so that version 1 never comes after version 2
          --update(1) does not end in time--> an error, and update(1) is cut off: the next one finds the way free

While no engine is there, an update waits for it: it is sent again and again, within the caller's time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from rollstream.errors import WeightUpdateError
from rollstream.rollout.retry import RetryPolicy, find_unavailable
from rollstream.training.generation_thread import try_again

_AGAIN = RetryPolicy(max_attempts=1, delay=0.5, delay_max=5.0)
"""Waits for an engine that is away; its attempts do not count. Asking costs little, and an engine that is
back is kept waiting for no longer than this."""

_SAID_S = 1.0
"""For the cause of the last try, at the time limit, to be heard of before the limit itself is told."""

Submit = Callable[[Coroutine[Any, Any, None]], "Future[None]"]


class WeightUpdates:
    """Sends weights from another thread than the engine's.

    Args:
        submit: runs a coroutine in the engine's event loop.
        update: as `GroupGenerator.update_weights`.
    """

    def __init__(self, submit: Submit, update: Callable[[str, int], Awaitable[None]]) -> None:
        self._submit = submit
        self._update = update
        self._last: asyncio.Task[tuple[None, int]] | None = None
        self._version = 0

    def send(self, source: str, version: int, timeout: float) -> None:
        """Returns when the engine has the weights.

        Raises:
            WeightUpdateError: they were refused, or no engine came (the cause is attached), or that took more
                than `timeout` seconds, or an earlier update did not end by then.
            Exception: what `submit` raises.
        """
        sending = self._submit(self._send(source, version, timeout))
        try:
            sending.result(timeout + _SAID_S)
        except WeightUpdateError:
            raise
        except Exception as error:
            if not sending.done():  # the event loop is blocked
                sending.cancel()
                raise _late(version, timeout) from None
            waited = f" within {timeout:.1f} s" if find_unavailable(error) is not None else ""
            raise WeightUpdateError(
                f"the engine did not take version {version}{waited}: {type(error).__name__}: {error}"
            ) from error

    async def _send(self, source: str, version: int, timeout: float) -> None:
        until = time.monotonic() + timeout
        if self._last is not None and not await _ended(self._last, until):
            if not self._last.cancelling():  # a second time would cut off how it cleans up
                self._last.cancel()
            raise WeightUpdateError(
                f"version {self._version} has been on its way to the engine all the while, which keeps back "
                f"version {version}: it is cut off now, try again (and give weight_timeout more than the "
                "engine's own time limits)"
            )
        what = f"weights of version {version}"
        trying = try_again(lambda: self._update(source, version), what, _AGAIN, until=until)
        self._version, self._last = version, asyncio.create_task(trying)
        self._last.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        if not await _ended(self._last, until):
            raise _late(version, timeout)
        self._last.result()


def _late(version: int, timeout: float) -> WeightUpdateError:
    return WeightUpdateError(
        f"the engine has not taken version {version} within {timeout:.1f} s (weight_timeout); what it was sent "
        "may still come, and the next update waits for its end"
    )


async def _ended(task: "asyncio.Task[tuple[None, int]]", until: float) -> bool:
    await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
    return task.done()
