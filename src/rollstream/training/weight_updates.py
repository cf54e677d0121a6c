"""Weight updates on their way to the engine: one after the other, however late one of them is.

push(1) --in time--> taken, or refused
        --too late--> an error; it goes on all the same: nobody can call back what a server was asked for
push(2) --> sent when push(1) has ended, so that version 1 never comes after version 2
        --push(1) does not end in time--> an error, and push(1) is cut off: the next one finds the way free

While no engine is there, a push waits for it: it is sent again and again, within the caller's time.
"""

import asyncio
import concurrent.futures
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rollstream.errors import WeightUpdateError
from rollstream.rollout.retry import RetryPolicy, find_unavailable
from rollstream.training.generation_thread import GenerationThread
from rollstream.training.generator import GroupGenerator

logger = logging.getLogger(__name__)

_AGAIN = RetryPolicy(max_attempts=1, delay=0.5, delay_max=5.0)
"""Waits for an engine that is away; its attempts do not count. Asking costs little, and an engine that is
back is kept waiting for no longer than this."""

_SAID_S = 1.0
"""For the cause of the last try, at the time limit, to be heard of before the limit itself is told."""


async def until_taken(update: Callable[[], Awaitable[None]], version: int, until: float) -> None:
    """Runs an update again and again while no engine is there for it.

    Args:
        update: sends the weights.
        version: of the weights, for the log.
        until: monotonic time, when the caller gives up.

    Raises:
        Exception: what `update` raised last; anything but an engine that is away at once.
    """
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
    loading = submit(until_taken(update, version, time.monotonic() + timeout))
    try:
        loading.result(timeout + _SAID_S)
    except Exception as error:
        if loading.done():
            raise _not_taken(version, f"{timeout:g} s", error) from error
        loading.cancel()
        raise WeightUpdateError(f"the engine has not taken version {version} within {timeout:g} s") from None


@dataclass(slots=True, eq=False)
class _Push:
    source: str
    version: int
    begun_at: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    """The generator's `update_weights`, in the generation thread; None until it is begun there."""
    ended: "concurrent.futures.Future[None] | None" = None
    """Done only when `task` is, so that a cancelled one is seen to end, and not only asked to."""
    refused: Exception | None = None
    """Why the last try was in vain, while there is no other under way."""

    async def run(self, generator: GroupGenerator, until: float) -> None:
        async def update() -> None:
            self.refused = None
            self.task = asyncio.ensure_future(generator.update_weights(self.source, self.version))
            await asyncio.wait({self.task})
            if not self.task.cancelled():
                error = self.task.exception()
                self.refused = error if isinstance(error, Exception) else None
            self.task.result()

        await until_taken(update, self.version, until)

    def cut_off(self) -> None:
        """In the generation thread. Once: a second time would cut off how it cleans up."""
        if self.task is not None:
            if not self.task.cancelling():
                self.task.cancel()
        elif self.ended is not None:
            self.ended.cancel()


class WeightUpdates:
    """Sends weights by a generator's `update_weights`, from the trainer's thread.

    Args:
        thread: in which the generator runs.
        generator: whose `update_weights` is called.
        raise_if_broken: raises when generation has ended.
    """

    def __init__(
        self, thread: GenerationThread, generator: GroupGenerator, raise_if_broken: Callable[[], None]
    ) -> None:
        self._thread = thread
        self._generator = generator
        self._raise_if_broken = raise_if_broken
        self._last: _Push | None = None

    def push(self, source: str, version: int, *, timeout: float, whole: float) -> None:
        """Returns when the engine has the weights. One that is away is waited for.

        Args:
            source: what the generator's engine understands by it.
            version: of the weights.
            timeout: seconds that are left, the wait for an earlier update that is late included.
            whole: seconds that the caller gave in all, for the message.

        Raises:
            WeightUpdateError: it was refused, or no engine came (the cause is attached), or it took too long,
                or an earlier one did.
            GenerationFailedError, GenerationStoppedError: generation has ended.
        """
        until, limit = time.monotonic() + timeout, f"{whole:g} s (weight_timeout)"
        if self._last is not None:
            self._wait_for(self._last, version, until)
        push = _Push(source, version)
        ended = push.ended = self._thread.submit(push.run(self._generator, until))
        self._last = push
        if not _done(ended, until):
            if push.refused is not None:  # between two tries
                raise _not_taken(version, limit, push.refused) from push.refused
            raise WeightUpdateError(
                f"the engine has not taken version {version} within {limit}; what it "
                f"was sent may still come, and the next update waits for its end; {self._thread.describe()}"
            )
        self._last = None
        try:
            ended.result()
        except concurrent.futures.CancelledError:
            self._raise_if_broken()
            raise WeightUpdateError(f"the update to version {version} was cut off") from None
        except Exception as error:
            raise _not_taken(version, limit, error) from error

    def _wait_for(self, late: _Push, version: int, until: float) -> None:
        assert late.ended is not None
        if _done(late.ended, until):
            return  # how it ended does not matter: the newer one follows
        self._raise_if_broken()
        self._thread.call_soon(late.cut_off)
        raise WeightUpdateError(
            f"version {late.version} has been on its way to the engine for "
            f"{time.monotonic() - late.begun_at:.1f} s, which keeps back version {version}: it is cut off "
            "now, try again (and give weight_timeout more than the engine's own time limits); "
            f"{self._thread.describe()}"
        )


def _not_taken(version: int, limit: str, error: Exception) -> WeightUpdateError:
    waited = f" within {limit}" if find_unavailable(error) is not None else ""
    return WeightUpdateError(
        f"the engine did not take version {version}{waited}: {type(error).__name__}: {error}"
    )


def _done(ended: "concurrent.futures.Future[None]", until: float) -> bool:
    concurrent.futures.wait([ended], timeout=max(0.0, until - time.monotonic()))
    return ended.done()
